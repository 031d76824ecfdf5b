"""The order in which a batch's tasks run, and the limit on tasks that read from one broker at once.

Spark gives a free core the next task, from any broker. So it is given queues: one queue is one task of Spark's, and
runs tasks of the plan one after the other. A broker with a bound has as many queues as may read from it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

Queue = tuple[int, ...]
"""Positions in a batch's list of tasks."""


def queues(leaders: Sequence[int], bound: int | None = None) -> tuple[Queue, ...]:
    """Put each position of `leaders` (a task's broker) in one queue, with at most `bound` queues for a broker.

    Brokers take turns, so that the first tasks do not all ask the first broker. Tasks that read from several brokers
    count as those of one broker more.

    >>> queues([1, 1, 2])
    ((0,), (2,), (1,))
    >>> queues([1, 1, 1, 2], bound=2)
    ((0, 2), (3,), (1,))
    """
    by_leader: dict[int, list[int]] = {}
    for position, leader in enumerate(leaders):
        by_leader.setdefault(leader, []).append(position)
    shared = [_share(positions, bound or len(positions)) for positions in by_leader.values()]
    return tuple(filter(None, chain.from_iterable(zip_longest(*shared, fillvalue=()))))


def _share(positions: Sequence[int], count: int) -> list[Queue]:
    return [tuple(positions[i::count]) for i in range(min(count, len(positions)))]
