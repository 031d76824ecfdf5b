"""The library of loops is built once, and loaded only if it is of these sources, ours, and for this processor."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sluice.pipelines.errors import SetupError
from sluice.pipelines.records.compiled import library

ROOT = Path(__file__).resolve().parents[3]
QUICK = "contract_rows.text_tables"


def clear() -> None:
    for computed in (library.list_targets, library.find_library, library._load_library):
        computed.cache_clear()


@pytest.fixture(autouse=True)
def fresh_answers() -> Any:
    clear()
    yield
    clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of loops, for which nothing is compiled yet, and of which the quick module is all."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "loops"))
    monkeypatch.setattr(library, "SHARES", (QUICK,))
    monkeypatch.setattr(sys, "argv", ["loops.py"])
    return tmp_path / "loops"


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "infra"))
    return importlib.import_module("loops")


def test_every_module_with_entry_points_is_compiled() -> None:
    sources = {p: p.read_text() for p in library.ROOM.rglob("*.py")}
    modules = {p for p, text in sources.items() if re.search(r"^@compiled\(", text, re.MULTILINE)}
    assert {".".join(p.relative_to(library.ROOM).with_suffix("").parts) for p in modules} == set(library.SHARES)


def test_loops_are_built_once(folder: Path, loops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.find_library() is None
    with pytest.raises(SetupError, match="no compiled loops"):
        library.find_address(QUICK, "x")
    loops.main()
    clear()
    path = library.find_library()
    assert path is not None
    assert path.parent == folder
    monkeypatch.setattr(subprocess, "Popen", None)
    loops.main()


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_loops_that_another_user_may_change_are_not_loaded(folder: Path, mode: int) -> None:
    folder.mkdir()
    path = folder / library.name_file(library.list_targets()[0], ".so")
    path.touch()
    assert library.find_library() == path

    def find_again() -> Path | None:
        library.find_library.cache_clear()
        return library.find_library()

    path.chmod(0o664)
    assert find_again() is None
    path.chmod(0o644)
    folder.chmod(mode)
    assert find_again() is None
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        assert find_again() is None


@pytest.mark.parametrize(("share", "reason"), [("compiled", "AttributeError"), ("none", "No module named")])
def test_build_exits_with_the_error_of_a_failed_compilation(
    folder: Path, loops: ModuleType, monkeypatch: pytest.MonkeyPatch, share: str, reason: str
) -> None:
    monkeypatch.setattr(library, "SHARES", (share,))
    monkeypatch.setattr(library, "hash_sources", lambda *shares: "")
    with pytest.raises(SystemExit, match=f"error: {share} cannot be compiled: .*{reason}"):
        loops.main()
    assert library.find_library() is None


@pytest.mark.parametrize("linker", [None, "echo cannot find ld >&2; exit 1"])
def test_build_exits_with_the_error_of_the_linker(
    folder: Path, loops: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linker: str | None
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    if linker:
        (programs / "cc").write_text(f"#!/bin/sh\n{linker}\n")
        (programs / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(SystemExit, match="cannot find ld" if linker else "need a C compiler named cc"):
        loops.main()


def test_name_changes_with_imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(library.ROOM, tmp_path / "records", ignore=shutil.ignore_patterns("__pycache__", "loops"))
    before = {share: library.name_file(library.LEVEL, ".o", share) for share in library.SHARES}
    monkeypatch.setattr(library, "ROOM", tmp_path / "records")
    assert {share: library.name_file(library.LEVEL, ".o", share) for share in library.SHARES} == before
    (tmp_path / "records" / "slots" / "binary_loops.py").write_text("changed")
    changed = {s for s in library.SHARES if library.name_file(library.LEVEL, ".o", s) != before[s]}
    assert changed == {"avro.loops", "protobuf.loops"}
    (tmp_path / "records" / "compiled" / "jit.py").write_text("changed")
    assert all(library.name_file(library.LEVEL, ".o", s) != before[s] for s in library.SHARES)


def test_name_depends_on_settings_target_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        library.name_file(target, ".o", QUICK, versions=versions)
        for target in (library.LEVEL, library.GENERIC)
        for versions in (("1",), ("2",))
    }
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    assert len({*names, library.name_file(library.LEVEL, ".o", QUICK, versions=("1",))}) == 5


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
def test_processor_below_level_gets_generic_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not load loops with instructions that it lacks."""
    newer = f"flags\t\t: {' '.join(library._FLAGS)} avx512f"
    targets = []
    for processor in (newer, newer.replace(" avx2", "")):
        monkeypatch.setattr(Path, "read_text", lambda path, processor=processor: processor)
        library.list_targets.cache_clear()
        targets.append(library.list_targets())
    assert targets == [(library.LEVEL, library.GENERIC), (library.GENERIC,)]
    monkeypatch.setattr(Path, "read_text", lambda path: newer)
    with monkeypatch.context() as emulated:  # on an x86-64, whose flags it shows
        emulated.setattr(platform, "machine", lambda: "aarch64")
        library.list_targets.cache_clear()
        assert library.list_targets() == (library.GENERIC,)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    library.list_targets.cache_clear()
    assert library.list_targets() == (library.GENERIC,)


def test_stale_loops_are_removed(folder: Path, loops: ModuleType) -> None:
    folder.mkdir()
    current = [loops.name_object(QUICK), library.name_file(library.GENERIC, ".so"), "sluice-loops.lock"]
    for name in (*current, "json.scan-0123456789abcdef.o", "loops-0123456789abcdef.so"):
        (folder / name).touch()
    loops.remove_stale(folder)
    assert {p.name for p in folder.iterdir()} == {*current}
