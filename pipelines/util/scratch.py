"""A process's temporary folder. Everything that a process leaves outside of lakes lies in it, Spark's folders too.

    <temporary folder>/sluice-xxxxxxxx/held     locked for as long as the process lives

Promises: the folder is gone when its process ends. The next process, or `clear`, removes folders of killed ones. Only
the lock shows that a process, with the children that inherit it, is dead: the system releases it; a name, an age or a
pid never does. A folder that has no lock file, belongs to another user or lies behind a link is not touched.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.errors import Failed

if TYPE_CHECKING:
    import duckdb

_PREFIX = "sluice-"
_HELD = "held"


def get_root() -> Path:
    """This process's folder, which no other user may enter. Raises OSError.

    The first call makes it, and removes what killed processes left.
    """
    return _create_root(os.getpid())[0]


def get_lock() -> int:
    """Return the descriptor of this process's lock, for `pass_fds` of a child that needs the folder. Raises OSError."""
    return _create_root(os.getpid())[1]


@cache
def _create_root(pid: int) -> tuple[Path, int]:
    clear()
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    handle = os.open(hidden / _HELD, os.O_CREAT | os.O_RDWR, 0o600)  # stays open, and locked, until the process ends
    with suppress(OSError):  # on a file system without locks, no folder counts as a dead process's
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    visible = hidden.with_name(hidden.name.removeprefix("."))
    hidden.rename(visible)  # it was never there without its lock
    atexit.register(_leave, visible, pid)
    return visible, handle


@contextmanager
def open_duckdb(memory: int, threads: int, work: str) -> Iterator[tuple[duckdb.DuckDBPyConnection, Path]]:
    """A database in memory that spills to a folder of its own, which is removed when the block ends.

    Raises Failed, which names the work, when there is no room.
    """
    import duckdb

    with tempfile.TemporaryDirectory(dir=get_root()) as folder:
        try:
            with duckdb.connect() as db:
                db.execute(f"set memory_limit = '{memory >> 10}KiB'; set threads = {threads}")
                db.execute("set temp_directory = $folder", {"folder": folder})
                db.execute("set enable_progress_bar = false")
                yield db, Path(folder)
        except (duckdb.OutOfMemoryException, duckdb.IOException) as e:
            raise Failed(
                f"DuckDB cannot {work} in {memory >> 20} MiB: {str(e).splitlines()[0][:200]}",
                remedy=f"DuckDB spills to {tempfile.gettempdir()}: free space there, or set another folder in TMPDIR, "
                "and run again",
            ) from None


def _leave(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process runs this too
        _remove(folder)


def clear() -> list[Path]:
    """Remove the folders of this user's dead processes. Returns those that were removed."""
    there = Path(tempfile.gettempdir())
    with suppress(OSError):
        return [folder for folder in sorted(there.glob(f"{_PREFIX}*")) if _is_dead(folder) and _remove(folder)]
    return []


def dead() -> list[Path]:
    """The folders that `clear` would remove."""
    return [folder for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")) if _is_dead(folder)]


def _is_dead(folder: Path) -> bool:
    """Returns true if the folder is this user's, and no process holds its lock."""
    with suppress(OSError):
        here = folder.lstat()
        if not stat.S_ISDIR(here.st_mode) or here.st_uid != os.geteuid():
            return False
        handle = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(handle)
    return False


def _remove(folder: Path) -> bool:
    """Remove the folder, its lock file last, so that others can go on. Returns whether all of it is gone."""
    with suppress(OSError):
        for child in folder.iterdir():
            if child.name != _HELD:
                _remove_child(child)
        if [c.name for c in folder.iterdir()] == [_HELD]:
            (folder / _HELD).unlink()
        folder.rmdir()
        return True
    return False


def _remove_child(child: Path) -> None:
    with suppress(OSError):
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink()
