"""Locks between processes of one machine, and checks of files that this user runs.

Lock files are private, since a right to read a file is a right to lock it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sluice.pipelines.errors import Failed, SetupError

PATIENCE = 1800.0
"""Limit in seconds on a wait: a holder may compile loops or fetch jars."""
_LOOK = 0.05


@contextmanager
def locking(path: Path, *, wait: bool = True, required: bool = True) -> Iterator[None]:
    """Hold the lock of a file, which is created. The system releases it however the process ends.

    Raises BlockingIOError without `wait` if another process holds it, and Failed after PATIENCE; SetupError if the file
    is another user's, and OSError where the file system has no locks, or the file cannot be written, unless `required`
    is false.
    """
    with ExitStack() as stack:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, handle)
            status = os.fstat(handle)
            if required and status.st_uid != os.geteuid():
                raise SetupError(f"the lock {path} belongs to another user", remedy=f"remove it: rm {path}")
            if status.st_mode & 0o077:
                os.fchmod(handle, 0o600)
            _lock(handle, path, time.monotonic() + PATIENCE if wait else 0.0)
        except OSError as error:
            if required or isinstance(error, BlockingIOError):
                raise
        yield


def _lock(handle: int, path: Path, until: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not until:
                raise
            if time.monotonic() > until:
                holder = f"process {pid}" if (pid := _find_holder(handle)) else "another process"
                raise Failed(
                    f"{holder} holds the lock {path} for more than {PATIENCE:g} s",
                    remedy=f"see whether it works: ps -f {pid}; end it, then run again" if pid else f"lsof {path}",
                ) from None
        time.sleep(_LOOK)


def _find_holder(handle: int) -> str:
    """Return the pid of the process that holds the file's lock; empty if the system has no list of locks."""
    inode = f":{os.fstat(handle).st_ino}"
    with suppress(OSError):
        locks = map(str.split, Path("/proc/locks").read_text().splitlines())
        return next((f[4] for f in locks if f[1] == "FLOCK" and f[5].endswith(inode)), "")
    return ""


def is_ours(*paths: Path) -> bool:
    """Return whether all exist, and only this user and root may change them."""
    with suppress(OSError):
        return all(s.st_uid in (0, os.geteuid()) and not s.st_mode & 0o022 for s in map(Path.stat, paths))
    return False


def protect(folder: Path) -> None:
    """Take from all others the right to change this user's folder and the files in it: the umask may give it."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o022)


def check_ours(folder: Path) -> Path:
    """Return the folder. Raises SetupError if another user may change it or the files in it."""
    if is_ours(folder.parent, folder, *folder.rglob("*")):
        return folder
    raise SetupError(
        f"other users may change {folder} or files in it, which Sluice would run",
        remedy=f"remove it, to fetch it again: rm -r {folder}; and chmod go-w {folder.parent}",
    )
