"""A process's temporary folder: everything that it leaves outside of lakes lies in it, Spark's folders too.

    <temporary folder>/sluice-xxxxxxxx/held     locked for as long as the process lives

Promises: it is gone when the process ends; what a killed one left is removed by whoever makes the next, or by `clear`.
Evidence that it is a dead process's is the lock alone, which the system takes back: never a name, an age or a pid. A
folder without it, of another user, or behind a link is not touched.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_PREFIX = "sluice-"
_HELD = "held"


def root() -> Path:
    """This process's folder, that nobody else may enter; made when it is first asked for, where what killed processes
    left is removed. Raises OSError."""
    return _root(os.getpid())


@cache
def _root(pid: int) -> Path:
    clear()
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    handle = os.open(made / _HELD, os.O_CREAT | os.O_RDWR, 0o600)  # stays open, and locked, until the process ends
    with suppress(OSError):  # where nothing can be locked, nobody takes it for a dead process's
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    shown = made.with_name(made.name.removeprefix("."))
    made.rename(shown)  # it was never there without its lock
    atexit.register(_leave, shown, pid)
    return shown


def _leave(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process runs this too
        _remove(folder)


def clear() -> list[Path]:
    """Remove the folders of processes of this user that are dead, and say which they were."""
    there = Path(tempfile.gettempdir())
    with suppress(OSError):
        return [folder for folder in sorted(there.glob(f"{_PREFIX}*")) if _is_dead(folder) and _remove(folder)]
    return []


def dead() -> list[Path]:
    """The folders that `clear` would remove."""
    return [folder for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")) if _is_dead(folder)]


def _is_dead(folder: Path) -> bool:
    """Whether it is one of ours, and nobody holds its lock any more."""
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
    """Whether all of it is gone. What tells whose it is goes last: the rest is then left to the next one."""
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
