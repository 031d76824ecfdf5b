"""Fix functions are loaded by name; errors name the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipelines.errors import UsageError
from sluice.pipelines.maintenance.fixers import Record, load

RECORD = Record(b"k", b"v", (), "orders", 0, 7, None, "schema", "missing", "id", "is missing", None)


def write(folder: Path, text: str, name: str = "fixes.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_function_is_loaded_from_a_file_or_a_project_module(tmp_path: Path) -> None:
    write(tmp_path, "SUFFIX = '!'\n", "beside_it.py")
    text = "from dataclasses import dataclass\nfrom beside_it import SUFFIX\n\n@dataclass\nclass X:\n    y: str\n\n"
    path = write(tmp_path, text + "def fix(record):\n    return X(record.field + SUFFIX).y\n")
    assert load(f"{path}:fix", Path("/")).fix(RECORD) == b"id!"
    write(tmp_path, "def fix(record):\n    return {'offset': record.offset}\n", "fixes_of_this_test.py")
    assert load("fixes_of_this_test:fix", tmp_path).fix(RECORD) == b'{"offset": 7}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def fix(record:\n", "fixes.py, line 1: SyntaxError"),
        ("import json\n1 / 0\ndef fix(r): ...\n", "fixes.py, line 2: ZeroDivisionError"),
        ("import no_such_module_anywhere\n", "fixes.py, line 1: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "fixes.py, line 1: SystemExit"),
        ("def other(r): ...\n", "fixes.py has no function fix"),
        ("fix = 7\n", "fixes.py: fix is no function"),
        ("\ndef fix(): ...\n", "fixes.py, line 2: fix takes no single argument"),
        ("def fix(a, b): ...\n", "fixes.py, line 1: fix takes no single argument"),
        ("async def fix(record): ...\n", "fixes.py, line 1: fix returns no value"),
        ("def fix(record):\n    yield record\n", "fixes.py, line 1: fix returns no value"),
    ],
)
def test_invalid_fix_file_is_reported_with_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(f"{path}:fix", tmp_path)
    assert says in caught.value.message
    assert caught.value.exit_code == 2


def test_relative_paths_are_resolved_in_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, shell = tmp_path / "project", tmp_path / "shell"
    for folder in (project, shell):
        folder.mkdir()
    (project / "fixes.py").write_text("def fix(record):\n    return b'of the project'\n")
    (shell / "fixes.py").write_text("def fix(record):\n    return b'of the shell'\n")
    monkeypatch.chdir(shell)
    assert load("fixes.py:fix", project).fix(RECORD) == b"of the project"
    assert load(f"{shell}/fixes.py:fix", project).fix(RECORD) == b"of the shell", "by its full path"
    (project / "fixes.py").unlink()
    with pytest.raises(UsageError, match="looked for in the project, not where the shell stands") as caught:
        load("fixes.py:fix", project)
    assert f"--fix {shell}/fixes.py:FUNCTION" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fix", "names no function"),
        ("fixes.py", "names no function"),
        ("fixes.py:", "names no function"),
        ("nowhere/fixes.py:fix", "there is no file"),
        ("no_such_module_anywhere:fix", "no_such_module_anywhere: ModuleNotFoundError"),
        ("json:no_such_thing", "has no function no_such_thing"),
    ],
)
def test_names_that_do_not_resolve_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(text, tmp_path)
