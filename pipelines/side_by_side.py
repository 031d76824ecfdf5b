"""Several calls side by side, for what mostly waits: a store or a cluster that is far away takes its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_ONCE = 8
"""Calls under way at most."""

One = TypeVar("One")
Done = TypeVar("Done")


def each(work: Callable[[One], Done], items: Sequence[One]) -> list[Done]:
    """What the work makes of each item, in their order. Raises the first error, when all that began have ended."""
    if len(items) < 2:
        return [work(one) for one in items]
    with ThreadPoolExecutor(min(len(items), AT_ONCE), "sluice-side-by-side") as pool:
        return list(pool.map(work, items))
