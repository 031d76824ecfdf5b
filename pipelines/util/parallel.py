"""Several calls at the same time, for work that mostly waits: a distant store or cluster takes its time to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

AT_ONCE = 8
"""The most calls under way at once."""
PATIENCE = 0.01
"""Seconds before another thread joins, counted again whenever an item is finished. One does quick work, as on a local
disk, in a third of the processor time: several threads would pass the interpreter's lock around."""

_here = threading.local()

One = TypeVar("One")
Done = TypeVar("Done")


def map_parallel(work: Callable[[One], Done], items: Sequence[One], patience: float = PATIENCE) -> list[Done]:
    """The results of `work` for each item, in order.

    One thread begins; another one joins whenever no item was finished for `patience` seconds (0: at once). Within
    an item of another call it is the caller's own thread that begins, and the others join after an item that took
    longer. After an error no further item begins; when those under way have ended, the error of the first item in
    order is raised.
    """
    if len(items) < 2:
        return [work(one) for one in items]
    remaining, done, failed = iter(enumerate(items)), dict[int, Done](), dict[int, BaseException]()
    # A call within a call begins in its own thread: threads of threads would only wait for each other.
    if patience and getattr(_here, "is_one_of_many", False):
        began = time.monotonic()
        for at, item in remaining:
            done[at] = work(item)
            if (now := time.monotonic()) - began > patience:
                break
            began = now
        if len(done) == len(items):
            return [*done.values()]
        patience = 0

    def go() -> None:
        _here.is_one_of_many = True
        for at, item in remaining:
            try:
                done[at] = work(item)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                failed[at] = error
            if failed:
                return

    with ThreadPoolExecutor(min(len(items), AT_ONCE), "sluice-side-by-side") as pool:
        try:
            threads = [pool.submit(go)]
            while len(threads) < min(len(items), AT_ONCE) and (not patience or _is_slow(threads, done, patience)):
                threads.append(pool.submit(go))
            wait(threads)
        except BaseException as error:  # an interrupt: no thread begins another item
            failed[-1] = error
            raise
    if failed:
        raise failed[min(failed)]
    return [done[at] for at in range(len(items))]


def _is_slow(threads: Sequence[Future[None]], done: dict[int, Done], patience: float) -> bool:
    """Wait until all threads finish, or nothing finishes for `patience` seconds. Returns True in the latter case."""
    before = -1
    while len(done) != before:
        before = len(done)
        _, at_work = wait(threads, patience)
        if not at_work:
            return False
    return True
