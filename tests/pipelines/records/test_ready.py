"""Compiled once, each share by itself, by one process at a time; and where nothing can be kept, that is said."""

from __future__ import annotations

import fcntl
import pickle
import re
import shutil
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.model.receipts import Progress
from sluice.pipelines.records.compiled import cache

PIPELINES = Path(cache.__file__).parents[1]
PICKLED_IN_ANOTHER_VERSION = pickle.dumps(version("numba")) + b"csluice.pipelines.records.pieces\nPiece\n."
QUICK = "contract_rows.text_tables"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where numba keeps what it compiles; of all shares, the one that is quick."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(cache, "SHARES", {QUICK: 1})
    cache._fingerprint.cache_clear()
    return tmp_path / "kept"


@pytest.fixture(autouse=True)
def own_fingerprint() -> Any:
    yield
    cache._fingerprint.cache_clear()


def test_every_module_with_entry_points_is_a_share() -> None:
    sources = {p: p.read_text() for p in PIPELINES.rglob("*.py") if p.name != "jit.py"}
    found = {p for p, text in sources.items() if re.search(r"^@compiled\(", text, re.MULTILINE)}
    assert {".".join(p.relative_to(PIPELINES).with_suffix("").parts) for p in found} == set(cache.SHARES)


def test_what_is_compiled_is_compiled_once_and_said_before(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    assert not cache.is_ready()
    cache.ready(told.append)
    assert [(p.stage, p.done, p.total) for p in told] == [("compile", 0, 1), ("compile", 1, 1)]
    assert "once for this version of Sluice and numba; about" in told[0].note
    assert [p.name for p in kept.rglob("text_tables._forms-*.nbi")], "numba kept it"
    assert cache.is_ready()
    monkeypatch.setattr(subprocess, "Popen", None)
    cache.ready(told.append)
    assert len(told) == 2


@pytest.mark.slow
def test_a_share_compiles_its_own_entry_points_alone(kept: Path) -> None:
    """The module of names imports the one that scans, whose loop takes half a minute."""
    subprocess.run([sys.executable, "-m", "sluice.pipelines.records.compiled.cache", "json.unknown"], check=True)
    made = {p.name.partition(".")[0] for p in kept.rglob("*.nbi")}
    assert made == {"unknown"}


def test_a_share_that_fails_leaves_it_to_whoever_needs_it(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARES", {"checked.nowhere": 1})
    monkeypatch.setattr(cache, "_mark", lambda folder: folder / "mark")
    cache.ready()
    assert not cache.is_ready()


def test_a_change_of_what_loops_share_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba looks at the file of an entry point alone."""
    shutil.copytree(cache.ROOM, tmp_path / "records")
    monkeypatch.setattr(cache, "ROOM", tmp_path / "records")
    before = {share: cache.source_stamp(share) for share in cache.SHARES}
    (tmp_path / "records" / "slots" / "binary_loops.py").write_text("changed")
    changed = {share for share in cache.SHARES if cache.source_stamp(share) != before[share]}
    assert changed == {"avro.loops", "protobuf.loops"}
    (tmp_path / "records" / "compiled" / "jit.py").write_text("changed")
    assert all(cache.source_stamp(share) != before[share] for share in cache.SHARES)


@pytest.mark.slow
def test_numba_s_cache_is_stamped_with_all_that_loops_are_made_of(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "sluice.pipelines.records.compiled.cache", QUICK]
    subprocess.run(command, check=True)
    (index,) = kept.rglob("text_tables._forms-*.nbi")
    data = index.read_bytes()
    assert cache.source_stamp(QUICK).encode() in data
    index.write_bytes(data.replace(cache.source_stamp(QUICK).encode(), b"0" * 64))
    subprocess.run(command, check=True)
    assert cache.source_stamp(QUICK).encode() in index.read_bytes(), "compiled again"
    index.write_bytes(PICKLED_IN_ANOTHER_VERSION)
    subprocess.run(command, check=True)
    assert cache.source_stamp(QUICK).encode() in index.read_bytes(), "an index of modules that moved"


def test_two_processes_do_not_compile_the_same(kept: Path) -> None:
    kept.mkdir()
    told: list[Progress] = []
    waiting = threading.Thread(target=cache.ready, args=(told.append,))
    with (kept / "sluice-loops.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        cache._mark(kept).touch()  # the other one is done
    waiting.join()
    assert (told, list(kept.rglob("*.nbi"))) == ([], [])


@pytest.mark.parametrize("what", ["sources", "numba", "processor"])
def test_another_version_is_compiled_again(
    what: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache._mark(kept)
    cache._fingerprint.cache_clear()
    match what:
        case "sources":
            for name in ("compiled.py", "pieces.py", f"{QUICK.replace('.', '/')}.py"):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text("changed")
            monkeypatch.setattr(cache, "ROOM", tmp_path)
        case "numba":
            monkeypatch.setattr(cache, "version", lambda name: "9.9")
        case _:
            monkeypatch.setattr(cache, "_processor", lambda: "another")
    assert cache._mark(kept) != before


def test_what_is_kept_beside_the_sources_moves_with_them(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, apart = cache._mark(cache.ROOM / "__pycache__").name, cache._mark(kept).name
    moved = tmp_path / "moved" / "records"
    shutil.copytree(cache.ROOM, moved, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "ROOM", moved)
    cache._fingerprint.cache_clear()
    assert cache._mark(moved / "__pycache__").name == beside
    assert cache._mark(kept).name != apart


def test_where_nothing_can_be_kept_that_is_said_and_nothing_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    told: list[Progress] = []
    cache.ready(told.append)
    assert [p.note for p in told] == [cache.NOWHERE]
    assert not cache.is_ready()


def test_the_users_folder_serves_where_the_package_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "ROOM", tmp_path / "package")
    (tmp_path / "package").touch()
    assert cache._folder() == tmp_path / "sluice"


def test_from_a_shell_it_says_what_it_does(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache._say(Progress("compile", 0, 1, "compiling"))
    cache._say(Progress("compile", 1, 1))
    assert capsys.readouterr().err == "compiling\n"
