"""Which task reads which offset ranges, by the strategy that a feed names (`fetch.assignor`).

Pure functions: equal ranges, sizes and earlier tasks give equal tasks (invariant 9). All strategies read the same
ranges; they differ in how even the tasks are, and in the number of brokers per task. `assign_ranges`, `round_robin` and
`assign_sticky` are those of Kafka's consumers (RangeAssignor, RoundRobinAssignor, and StickyAssignor of KIP-54), with
tasks instead of consumers: they assign complete partitions and ignore bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import groupby

from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import MANY_RANGES, SEVERAL, Assignor, OffsetRange, Plan, Task
from sluice.pipelines.util.grouping import group_by

Led = tuple[int, OffsetRange]
"""An offset range behind the id of the broker that leads its partition."""
Before = Mapping[TopicPartition, int]
"""The task (its place in an earlier plan) that read a partition."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """How a plan is cut into offset ranges and tasks.

    `parallelism` is the number of tasks that run at a time. `max_records` and `max_bytes` limit a run (None: no limit).
    `max_ranges` limits a batch, which ends with the last window that fits and has at least one. With `by_time` (ms),
    rows go to folders of that length by their own time; 0: by window. `before` has the tasks for `assign_sticky`.
    """

    range_bytes: int
    task_bytes: int
    parallelism: int
    max_tasks: int
    max_records: int | None = None
    max_bytes: int | None = None
    max_ranges: int | None = None
    min_range_bytes: int = 8 << 20
    by_time: int = 0
    assignor: Assignor = Assignor.LEADER_BYTES
    before: Before = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One strategy's tasks, for comparison.

    `largest` is in bytes. `balance` is the largest task by the mean one: 1 is even. `leaders` is the maximum number of
    brokers for one task. `moved` counts the offset ranges whose partition another task read before; None without an
    earlier plan.
    """

    assignor: Assignor
    tasks: int
    largest: int
    balance: float
    leaders: int
    moved: int | None


def assign_tasks(ranges: Sequence[Led], sizing: Sizing) -> tuple[Task, ...]:
    """Tasks that read each of the offset ranges once, numbered by their place."""
    bins = _by_leader(ranges, sizing) if sizing.assignor is Assignor.LEADER_BYTES else _by_partition(ranges, sizing)
    return tuple(_build_task(index, bin_) for index, bin_ in enumerate(bin_ for bin_ in bins if bin_))


def map_tasks(plan: Plan) -> Before:
    """Returns the task that read each partition: the first, if there were several."""
    return {s.tp: task.index for task in reversed(plan.tasks) for s in task.offset_ranges}


def compare(ranges: Sequence[Led], sizing: Sizing) -> tuple[Comparison, ...]:
    """Compare all strategies on the same offset ranges, in the order of `Assignor`."""
    return tuple(_measure(ranges, replace(sizing, assignor=a)) for a in Assignor)


def assign_ranges(partitions: Iterable[TopicPartition], count: int) -> list[list[TopicPartition]]:
    """Each topic's partitions in a row, cut into `count` runs of equal length; the first ones get one more.

    >>> [len(run) for run in assign_ranges([TopicPartition("t", p) for p in range(10)], 3)]
    [4, 3, 3]
    """
    runs: list[list[TopicPartition]] = [[] for _ in range(count)]
    for _, group in groupby(sorted(partitions), key=lambda tp: tp.topic):
        topic = list(group)
        for i, run in enumerate(runs):
            run += topic[_share(len(topic), count, i) : _share(len(topic), count, i + 1)]
    return runs


def round_robin(partitions: Iterable[TopicPartition], count: int) -> list[list[TopicPartition]]:
    """One after the other, in the order given, around the tasks."""
    ordered = list(partitions)
    return [ordered[i::count] for i in range(count)]


def assign_sticky(partitions: Iterable[TopicPartition], count: int, before: Before) -> list[list[TopicPartition]]:
    """Numbers that differ by one at most; within that, a partition stays with the task that read it before."""
    ordered = sorted(partitions)
    smallest, larger = divmod(len(ordered), count)
    assigned: list[list[TopicPartition]] = [[] for _ in range(count)]
    free: list[TopicPartition] = []
    for tp in ordered:
        target = assigned[at] if (at := before.get(tp, count)) < count else free
        if target is not free and len(target) == smallest:
            larger, target = (larger - 1, target) if larger else (0, free)
        elif target is not free and len(target) > smallest:
            target = free
        target.append(tp)
    for tp in free:
        min(assigned, key=len).append(tp)
    return assigned


def _share(total: int, count: int, index: int) -> int:
    """Returns the start of the task's run, if the first `total % count` runs are longer by one."""
    shortest, larger = divmod(total, count)
    return index * shortest + min(index, larger)


def _by_partition(ranges: Sequence[Led], sizing: Sizing) -> list[list[Led]]:
    partitions = sorted({s.tp for _, s in ranges})
    count = min(_count_tasks(_count_bytes(ranges), sizing), len(partitions)) or 1
    match sizing.assignor:
        case Assignor.RANGE:
            assigned = assign_ranges(partitions, count)
        case Assignor.ROUND_ROBIN:
            assigned = round_robin(partitions, count)
        case _:
            assigned = assign_sticky(partitions, count, sizing.before)
    task_of = {tp: i for i, tps in enumerate(assigned) for tp in tps}
    bins: list[list[Led]] = [[] for _ in range(count)]
    for led in ranges:
        bins[task_of[led[1].tp]].append(led)
    return bins


def _by_leader(ranges: Sequence[Led], sizing: Sizing) -> list[list[Led]]:
    """A leader gets tasks by its share of the bytes."""
    groups = group_by(ranges, lambda led: led[0])
    total = _count_bytes(ranges) or 1
    wanted = _count_tasks(total, sizing)
    counts = {leader: max(1, min(len(g), round(_count_bytes(g) / total * wanted))) for leader, g in groups.items()}
    return [bin_ for leader, group in sorted(groups.items()) for bin_ in _pack(group, counts[leader])]


def _count_tasks(total: int, sizing: Sizing) -> int:
    """A whole number of rounds over the engine's slots, so that all slots finish at about the same time."""
    rounds = math.ceil(total / (sizing.task_bytes * sizing.parallelism))
    return min(max(1, rounds) * sizing.parallelism, sizing.max_tasks)


def _pack(group: Sequence[Led], count: int) -> list[list[Led]]:
    """The largest offset range goes to the emptiest task. Many small ones then fill one task after the other in order
    of time: those of a window share files, and those of a partition fetches.
    """
    bins: list[tuple[int, int, list[Led]]] = [(0, i, []) for i in range(count)]
    heapify(bins)
    small = [led for led in group if led[1].is_small]
    small = small if len(small) >= count * MANY_RANGES else []
    large = [led for led in group if not (small and led[1].is_small)]
    for led in sorted(large, key=lambda led: (-led[1].estimated_bytes, led[1].key, led[1].start)):
        load, i, bin_ = heappop(bins)
        bin_.append(led)
        heappush(bins, (load + led[1].estimated_bytes, i, bin_))
    rest, total = deque(sorted(small, key=lambda led: (led[1].window, led[1].key, led[1].start))), _count_bytes(group)
    for at, (load, _, bin_) in enumerate(sorted(bins, key=lambda b: (-b[0], b[1]))):
        while rest and (load < total / (count - at) or at == count - 1):
            bin_.append(rest.popleft())
            load += bin_[-1][1].estimated_bytes
        total -= load
    return [bin_ for _, _, bin_ in sorted(bins, key=lambda b: b[1])]


def _build_task(index: int, ranges: Sequence[Led]) -> Task:
    leaders = {leader for leader, _ in ranges}
    ordered = sorted((s for _, s in ranges), key=lambda s: (s.key, s.start))
    return Task(index, leaders.pop() if len(leaders) == 1 else SEVERAL, tuple(ordered))


def _count_bytes(ranges: Iterable[Led]) -> int:
    return sum(s.estimated_bytes for _, s in ranges)


def _measure(ranges: Sequence[Led], sizing: Sizing) -> Comparison:
    tasks_, leader_of = assign_tasks(ranges, sizing), {s.tp: leader for leader, s in ranges}
    sizes = [t.estimated_bytes for t in tasks_]
    before = sizing.before
    moved = sum(before.get(s.tp, t.index) != t.index for t in tasks_ for s in t.offset_ranges)
    return Comparison(
        sizing.assignor,
        len(tasks_),
        max(sizes, default=0),
        max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0,
        max((len({leader_of[s.tp] for s in t.offset_ranges}) for t in tasks_), default=0),
        moved if before else None,
    )
