"""The thread of a job, and the wait for it, which an interrupt ends at once: of either engine."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from sluice.pipelines.util import logs

_log = logging.getLogger(f"{logs.OURS}.engine")
_INTERRUPT_SECONDS = 1.0
"""Limit on the time until an interrupt that did not wake the waiting thread is raised."""
_STOPPED_WAKES, _STOPPED_LOOKS = 5, 6
"""Seconds between looks for stopped processes, and the looks that one survives."""

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Call it in a thread of its own, so that an interrupt ends only Python's wait, and at once.

    Amid a call to the JVM an interrupt would break the connection; PySpark's clean-up then raises another error, or
    waits.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name="sluice-job", daemon=True).start()
    return future


def wait_for_all(jobs: Sequence[Future[T]]) -> None:
    """Wait until all are done. Wakes each second: a signal that another thread received does not end a wait.

    Kills processes below this one that have been stopped (SIGSTOP) for 30 s: they would never answer, and their tasks
    are tried again. If this process is stopped as well, that time does not count.
    """
    stopped, wakes = Counter[int](), 0
    while wait(jobs, _INTERRUPT_SECONDS).not_done:
        wakes += 1
        if wakes % _STOPPED_WAKES == 0:
            now = set(_list_stopped(os.getpid()))
            stopped = Counter({pid: stopped[pid] + 1 for pid in now})
            for pid in (pid for pid, looks in stopped.items() if looks > _STOPPED_LOOKS):
                _log.warning("process %d was stopped for half a minute: it is killed, and its task runs again", pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _list_stopped(pid: int) -> Iterator[int]:
    """Yield the stopped processes below this one, on Linux."""
    for children in Path("/proc", str(pid), "task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for child in map(int, children.read_text().split()):
                if Path("/proc", str(child), "stat").read_text().rpartition(")")[2].split()[0] == "T":
                    yield child
                yield from _list_stopped(child)
