"""The next process removes the temporary files of killed processes, and no others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.pipelines.util import scratch

_MAKES = """
import sys
from sluice.pipelines.util import scratch
(scratch.get_root() / "blockmgr-1").mkdir()
(scratch.get_root() / "blockmgr-1" / "shuffle").write_text("x")
print(scratch.get_root(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run a process with a scratch folder, and yield both."""
    command = [sys.executable, "-c", _MAKES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, Path(child.stdout.readline().strip())
        finally:
            child.kill()


def test_scratch_folder_is_private_and_removed_at_process_end(there: Path) -> None:
    with process() as (child, folder):
        assert folder.parent == there
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        child.communicate("")
        assert list(there.iterdir()) == []


def test_folder_of_killed_process_is_removed_and_of_live_process_is_kept(there: Path) -> None:
    with process() as (killed, leftover), process() as (_, alive):
        assert scratch.clear() == []
        killed.kill()
        killed.wait()
        assert scratch.dead() == [leftover]
        assert (leftover / "blockmgr-1" / "shuffle").exists(), "looking removes nothing"
        assert scratch.clear() == [leftover]
        assert not leftover.exists()
        assert (alive / "blockmgr-1" / "shuffle").exists()


def test_next_process_removes_folder_of_killed_process(there: Path) -> None:
    with process() as (killed, leftover):
        killed.kill()
        killed.wait()
        with process() as (_, alive):
            assert list(there.iterdir()) == [alive]
        assert not leftover.exists()


def test_forked_child_does_not_remove_the_parent_folder(there: Path) -> None:
    script = _MAKES.replace("print(", "import os\nif os.fork() == 0: sys.exit()\nos.wait()\nprint(")
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        assert (folder / "blockmgr-1" / "shuffle").exists()
        child.communicate("")
    assert not folder.exists()


def test_only_folders_of_own_dead_processes_are_removed(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (there / "elsewhere").mkdir()
    (there / "elsewhere" / "held").touch()
    (there / "sluice-linked").symlink_to(there / "elsewhere")
    (there / "sluice-unmarked").mkdir()
    (there / "sluice-file").touch()
    (there / "sluice-marked-by-a-link").mkdir()
    (there / "sluice-marked-by-a-link" / "held").symlink_to(there / "elsewhere" / "held")
    for name in ("spark-1", "blockmgr-1"):
        (there / name).mkdir()
    names = sorted(there.rglob("*"))
    assert scratch.clear() == []
    assert sorted(there.rglob("*")) == names
    (there / "sluice-theirs").mkdir()
    (there / "sluice-theirs" / "held").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert scratch.clear() == []
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(there))
    assert scratch.clear() == [there / "sluice-theirs"]


def test_link_in_scratch_folder_is_not_followed(there: Path) -> None:
    (there / "precious").mkdir()
    (there / "precious" / "file").touch()
    (there / "sluice-dead").mkdir()
    (there / "sluice-dead" / "held").touch()
    (there / "sluice-dead" / "link").symlink_to(there / "precious")
    assert scratch.clear() == [there / "sluice-dead"]
    assert (there / "precious" / "file").exists()


def test_folder_that_cannot_be_removed_keeps_its_mark_for_next_clean_up(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there / "sluice-dead").mkdir()
    for name in ("held", "busy"):
        (there / "sluice-dead" / name).touch()
    with monkeypatch.context() as stuck:
        stuck.setattr(scratch, "_remove_child", lambda child: None)
        assert scratch.clear() == []
    assert scratch.dead() == [there / "sluice-dead"]
    assert scratch.clear() == [there / "sluice-dead"]
