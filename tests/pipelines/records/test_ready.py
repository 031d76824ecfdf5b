"""Loops are compiled once, each share separately, by one process at a time; a missing cache folder is reported."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.records.compiled import cache

PIPELINES = Path(cache.__file__).parents[1]
QUICK = "contract_rows.text_tables"


@pytest.fixture
def loops_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of loops, with settings for which nothing is compiled yet and with the quick share alone."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("NUMBA_OPT", "1")
    monkeypatch.setattr(cache, "SHARES", {QUICK: 1})
    clear()
    return tmp_path / "kept"


@pytest.fixture(autouse=True)
def fresh_stamps() -> Any:
    clear()
    yield
    clear()


def clear() -> None:
    for computed in (cache.stamp, cache.find_targets, cache.find_library, cache._processor):
        computed.cache_clear()


def test_every_module_with_entry_points_is_compiled() -> None:
    sources = {p: p.read_text() for p in PIPELINES.rglob("*.py")}
    modules = {p for p, text in sources.items() if re.search(r"^@compiled\(", text, re.MULTILINE)}
    assert {".".join(p.relative_to(PIPELINES).with_suffix("").parts) for p in modules} == set(cache.SHARES)


def test_loops_are_compiled_once_after_a_progress_note(loops_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[Progress] = []
    assert not cache.is_ready()
    cache.ready(progress.append)
    assert [(p.stage, p.done, p.total) for p in progress] == [("compile", 0, 1), ("compile", 1, 1)]
    assert "once for this version of Sluice and numba; about" in progress[0].note
    assert [p.name.partition("-")[0] for p in cache.list_files()] == [QUICK]
    assert cache.is_ready()
    monkeypatch.setattr(subprocess, "Popen", None)
    cache.ready(progress.append)
    assert len(progress) == 2


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_loops_that_another_user_may_change_are_not_loaded(loops_folder: Path, mode: int) -> None:
    loops_folder.mkdir()
    path = loops_folder / cache.make_object_name(QUICK, cache.find_targets()[0])
    path.touch()
    assert cache.find_object(QUICK) == path
    path.chmod(0o664)
    assert cache.find_object(QUICK) is None
    path.chmod(0o644)
    loops_folder.chmod(mode)
    assert cache.find_object(QUICK) is None
    assert cache.find_writable_folder() is None
    loops_folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        assert cache.find_object(QUICK) is None


def test_failed_compilation_of_share_does_not_raise(loops_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARES", {"compiled": 1})
    monkeypatch.setattr(cache, "source_stamp", lambda *shares: "")
    cache.ready()
    assert not cache.is_ready()


@pytest.mark.parametrize(("share", "reason"), [("compiled", "AttributeError"), ("none", "No module named")])
def test_command_exits_with_the_error_of_a_failed_compilation(
    loops_folder: Path, monkeypatch: pytest.MonkeyPatch, share: str, reason: str
) -> None:
    monkeypatch.setattr(cache, "SHARES", {share: 1})
    monkeypatch.setattr(cache, "source_stamp", lambda *shares: "")
    with pytest.raises(SystemExit, match=f"error: {share} cannot be compiled: .*{reason}"):
        cache.main()


def test_command_prints_the_error_of_the_linker(
    loops_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NUMBA_OPT")  # with a setting of numba's own, no library is linked
    monkeypatch.setattr(cache, "LOOPS", loops_folder.parent / "package")
    linker = loops_folder.parent / "bin" / "cc"
    linker.parent.mkdir()
    linker.write_text("#!/bin/sh\necho cannot find ld >&2; exit 1\n")
    linker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{linker.parent}:/usr/bin:/bin")
    cache.main()
    assert "cc cannot link the loops: cannot find ld" in capsys.readouterr().err
    assert cache.is_ready()


def test_source_stamp_changes_with_imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes in modules that a share imports count as well."""
    shutil.copytree(cache.ROOM, tmp_path / "records")
    monkeypatch.setattr(cache, "ROOM", tmp_path / "records")
    before = {share: cache.source_stamp(share) for share in cache.SHARES}
    (tmp_path / "records" / "slots" / "binary_loops.py").write_text("changed")
    changed = {share for share in cache.SHARES if cache.source_stamp(share) != before[share]}
    assert changed == {"avro.loops", "protobuf.loops"}
    (tmp_path / "records" / "compiled" / "jit.py").write_text("changed")
    assert all(cache.source_stamp(share) != before[share] for share in cache.SHARES)


@pytest.mark.slow
def test_loops_load_from_object_file_and_recompile_if_stamp_differs(loops_folder: Path) -> None:
    """The library is not used: it was built with settings other than those of `loops_folder`."""
    script = """import sys
from sluice.pipelines.records.contract_rows import text_tables
assert not cache.find_library() and not text_tables.__name__ in ()
assert "numba" not in sys.modules and "llvmlite" in sys.modules"""
    command = [sys.executable, "-c", f"from sluice.pipelines.records.compiled import cache\n{script}"]
    subprocess.run(command, check=True)
    (path,) = loops_folder.glob("*.o")
    written = path.stat().st_mtime_ns
    subprocess.run(command, check=True)
    assert path.stat().st_mtime_ns == written
    path.rename(path.with_name(f"{QUICK}-{'0' * 16}.o"))
    subprocess.run(command, check=True)
    assert path.exists(), "compiled again"


def test_share_compiled_by_other_process_is_not_compiled_again(loops_folder: Path) -> None:
    loops_folder.mkdir()
    progress: list[Progress] = []
    waiting = threading.Thread(target=cache.ready, args=(progress.append,))
    with (loops_folder / "sluice-loops.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        path = loops_folder / cache.make_object_name(QUICK, cache.find_targets()[0])
        path.touch()  # the other process is done
    waiting.join()
    assert (progress, list(loops_folder.glob("*.o"))) == ([], [path])


@pytest.mark.parametrize("part", ["sources", "numba", "processor", "settings"])
def test_stamp_depends_on_sources_numba_processor_and_settings(
    part: str, loops_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "find_targets", lambda: [cache.HOST])
    before = cache.stamp(QUICK, cache.HOST)
    cache.stamp.cache_clear()
    match part:
        case "sources":
            for name in ("compiled/build.py", f"{QUICK.replace('.', '/')}.py"):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text("changed")
            monkeypatch.setattr(cache, "ROOM", tmp_path)
        case "numba":
            monkeypatch.setattr(cache, "version", lambda name: "9.9")
        case "settings":
            monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
        case _:
            monkeypatch.setattr(cache, "_processor", lambda: "another")
    assert cache.stamp(QUICK, cache.HOST) != before


def test_stamp_does_not_depend_on_package_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.stamp(QUICK, cache.LEVEL)
    shutil.copytree(cache.ROOM, tmp_path / "moved", ignore=shutil.ignore_patterns("__pycache__", "loops"))
    monkeypatch.setattr(cache, "ROOM", tmp_path / "moved")
    cache.stamp.cache_clear()
    assert cache.stamp(QUICK, cache.LEVEL) == before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
def test_processor_below_level_gets_separate_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not load loops with instructions that it lacks."""
    newer = f"flags\t\t: {' '.join(cache._FLAGS)} avx512f"
    marks = {}
    for processor in (newer, f"{newer} avx512_bf16", newer.replace(" avx2", "")):
        monkeypatch.setattr(cache, "_processor", lambda processor=processor: processor)
        cache.find_targets.cache_clear()
        cache.stamp.cache_clear()
        marks[processor] = cache.find_targets(), cache.stamp(QUICK, cache.find_targets()[0])
    one, other, older = marks.values()
    assert one == other
    assert one[0] == (cache.LEVEL, cache.HOST)
    assert older[0] == (cache.HOST,)
    assert older[1] != one[1]


def test_numba_setting_for_processor_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    clear()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert cache.find_targets() == (cache.HOST,)


def test_stale_loops_are_removed_from_package(
    loops_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOOPS", tmp_path / "loops")
    cache.LOOPS.mkdir()
    current = [cache.make_object_name(QUICK, cache.HOST), "sluice-loops.lock"]
    for name in (*current, "json.scan-0123456789abcdef.o", "loops-0123456789abcdef.so"):
        (cache.LOOPS / name).touch()
    cache._remove_stale()
    assert {p.name for p in cache.LOOPS.iterdir()} == {*current}


def test_missing_writable_folder_is_reported_and_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(cache, "LOOPS", tmp_path / "none")
    progress: list[Progress] = []
    cache.ready(progress.append)
    assert [p.note for p in progress] == [cache.NOWHERE]
    assert not cache.is_ready()


def test_user_cache_folder_is_used_if_package_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "LOOPS", tmp_path / "package" / "loops")
    (tmp_path / "package").touch()
    assert cache.find_writable_folder() == tmp_path / "sluice"


def test_progress_notes_are_printed_to_stderr(loops_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache._say(Progress("compile", 0, 1, "compiling"))
    cache._say(Progress("compile", 1, 1))
    assert capsys.readouterr().err == "compiling\n"
