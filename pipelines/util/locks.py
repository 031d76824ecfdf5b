"""Locks between processes of one machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path


@contextmanager
def locking(path: Path, *, wait: bool = True, required: bool = True) -> Iterator[None]:
    """Hold the lock of a folder, or of a file, which is created. The system releases it however the process ends.

    Raises BlockingIOError without `wait` if another process holds it; OSError where the file system has no locks,
    unless `required` is false.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with nullcontext() if required else suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
