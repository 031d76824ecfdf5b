"""Several calls side by side, for what mostly waits: a store or a cluster that is far away takes its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

AT_ONCE = 8
"""Calls under way at most."""
PATIENCE = 0.01
"""Seconds in which one thread alone has to get something done. What is quick, as on a local disk, it does in a third of
the processor time: threads would pass the interpreter's lock around for every call."""

One = TypeVar("One")
Done = TypeVar("Done")


def each(work: Callable[[One], Done], items: Sequence[One], patience: float = PATIENCE) -> list[Done]:
    """What the work makes of each item, in their order. Raises the first error, when all that began have ended.

    One thread begins; the others join once nothing was done for so many seconds (0: at once).
    """
    if len(items) < 2:
        return [work(one) for one in items]
    left, done, failed = iter(enumerate(items)), dict[int, Done](), dict[int, BaseException]()

    def go() -> None:
        for at, item in left:
            try:
                done[at] = work(item)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                failed[at] = error
            if failed:
                return

    with ThreadPoolExecutor(min(len(items), AT_ONCE), "sluice-side-by-side") as pool:
        try:
            threads = [pool.submit(go)]
            if patience:
                _while_quick(threads[0], done, patience)
            if not threads[0].done():
                threads += [pool.submit(go) for _ in range(min(len(items), AT_ONCE) - 1)]
            wait(threads)
        except BaseException as error:  # an interrupt: nobody begins another
            failed[-1] = error
            raise
    if failed:
        raise failed[min(failed)]
    return [done[at] for at in range(len(items))]


def _while_quick(thread: Future[None], done: dict[int, Done], patience: float) -> None:
    before = -1
    while not thread.done() and len(done) != before:
        before = len(done)
        wait([thread], patience)
