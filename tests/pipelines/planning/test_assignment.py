"""The assignment of partitions to tasks: Kafka's documented examples, and properties for any offset ranges."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.model.kafka import Isolation, TopicPartition
from sluice.pipelines.model.plans import SEVERAL, Assignor, OffsetRange, Plan, Request, RequestKind
from sluice.pipelines.planning.assignment import (
    Sizing,
    assign_ranges,
    assign_sticky,
    assign_tasks,
    compare,
    map_tasks,
    round_robin,
)

SIZING = Sizing(range_bytes=100, task_bytes=100, parallelism=3, max_tasks=64)


def list_partitions(count: int, name: str = "t1") -> list[TopicPartition]:
    return [TopicPartition(name, p) for p in range(count)]


def list_numbers(tasks: list[list[TopicPartition]]) -> list[list[int]]:
    return [[tp.partition for tp in task] for task in tasks]


def make_range(partition: int, leader: int = 1, size: int = 10, start: int = 0) -> tuple[int, OffsetRange]:
    return leader, OffsetRange("t1", partition, "id", start, start + 5, estimated_bytes=size)


# c1 has one thread and c2 two: c1-0, c2-0 and c2-1 are the three tasks.


@pytest.mark.parametrize(
    ("partitions", "c1_0", "c2_0", "c2_1"),
    [(10, [0, 1, 2, 3], [4, 5, 6], [7, 8, 9]), (11, [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10])],
)
def test_range_assignor_matches_kafka_documentation(
    partitions: int, c1_0: list[int], c2_0: list[int], c2_1: list[int]
) -> None:
    assert list_numbers(assign_ranges(list_partitions(partitions), 3)) == [c1_0, c2_0, c2_1]


def test_range_assignor_gives_the_extra_partition_to_the_first_task() -> None:
    assert list_numbers(assign_ranges(list_partitions(5), 4)) == [[0, 1], [2], [3], [4]]


def test_range_assignor_restarts_with_each_topic() -> None:
    tasks = assign_ranges([*list_partitions(3, "a"), *list_partitions(3, "b")], 2)
    assert list_numbers(tasks) == [[0, 1, 0, 1], [2, 2]]


def test_round_robin_assignor_matches_kafka_documentation() -> None:
    """Ten partitions in a shuffled order, over c1-0, c1-1, c2-0 and c2-1."""
    shuffled = [TopicPartition("t1", p) for p in (5, 3, 0, 8, 2, 1, 4, 7, 6, 9)]
    assert list_numbers(round_robin(shuffled, 4)) == [[5, 2, 6], [3, 1, 9], [0, 4], [8, 7]]


def test_sticky_assignor_moves_only_partitions_needed_for_balance() -> None:
    before = {tp: tp.partition % 2 for tp in list_partitions(6)}
    assert list_numbers(assign_sticky(list_partitions(6), 2, before)) == [[0, 2, 4], [1, 3, 5]]
    assert list_numbers(assign_sticky(list_partitions(8), 3, before)) == [[0, 2, 4], [1, 3, 5], [6, 7]]
    assert list_numbers(assign_sticky(list_partitions(6), 3, before)) == [[0, 2], [1, 3], [4, 5]]
    assert sorted(list_numbers(assign_sticky(list_partitions(6), 1, before))[0]) == list(range(6))


@given(st.integers(1, 40), st.integers(1, 12), st.dictionaries(st.integers(0, 40), st.integers(0, 15)))
def test_sticky_assignor_is_even_and_keeps_former_tasks_where_possible(
    partitions: int, count: int, stood: dict[int, int]
) -> None:
    before = {TopicPartition("t1", p): task for p, task in stood.items()}
    tasks = assign_sticky(list_partitions(partitions), count, before)
    sizes = [len(assigned) for assigned in tasks]
    assert sorted(tp for assigned in tasks for tp in assigned) == list_partitions(partitions)
    assert max(sizes) - min(sizes) <= 1
    unmoved = sum(before.get(tp) == i for i, assigned in enumerate(tasks) for tp in assigned)
    wanted = Counter(task for tp, task in before.items() if tp in list_partitions(partitions) and task < count)
    assert unmoved >= sum(min(n, partitions // count) for n in wanted.values())


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=30),
    st.sampled_from(Assignor),
)
def test_each_range_is_assigned_to_one_task(world: list[tuple[int, int]], assignor: Assignor) -> None:
    ranges = [make_range(p, 1 + p % 3, size, 5 * i) for i, (p, size) in enumerate(world)]
    tasks = assign_tasks(ranges, replace(SIZING, assignor=assignor))
    assert sorted((s for t in tasks for s in t.offset_ranges), key=lambda s: s.start) == [s for _, s in ranges]
    assert [t.index for t in tasks] == list(range(len(tasks)))
    for task in tasks:
        leaders = {1 + s.partition % 3 for s in task.offset_ranges}
        assert task.leader == (leaders.pop() if len(leaders) == 1 else SEVERAL)
    if assignor is not Assignor.LEADER_BYTES:
        assert all(n == 1 for n in Counter(tp for t in tasks for tp in {s.tp for s in t.offset_ranges}).values())


def test_many_small_ranges_go_to_tasks_in_order_of_time() -> None:
    """A window's ranges share a file, and a partition's are read by one fetch."""
    small = [
        (1, OffsetRange("t1", p, "id", 5 * w, 5 * w + 5, estimated_bytes=10, window=w))
        for w in range(32)
        for p in range(3)
    ]
    sizing = replace(SIZING, parallelism=3, task_bytes=1 << 30)
    tasks = assign_tasks([*small, make_range(9, 1, 2 << 20)], sizing)
    assert [len(t.offset_ranges) for t in tasks] == [1, 48, 48]
    even = assign_tasks(small, sizing)
    windows = [sorted({s.window or 0 for s in t.offset_ranges}) for t in even]
    assert windows == [[*range(11)], [*range(10, 22)], [*range(21, 32)]]
    assert [len(t.offset_ranges) for t in even] == [32, 32, 32]


def test_comparison_reports_balance_leaders_and_moved_partitions() -> None:
    ranges = [make_range(0, 1, 80), make_range(1, 2, 10), make_range(2, 1, 10), make_range(3, 2, 80)]
    sizing = replace(SIZING, parallelism=2, task_bytes=1000)
    first = assign_tasks(ranges, replace(sizing, assignor=Assignor.RANGE))
    plan = Plan("f", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, first)
    comparisons = {c.assignor: c for c in compare(ranges, replace(sizing, before=map_tasks(plan)))}
    assert [c.moved for c in compare(ranges, sizing)] == [None] * 4
    assert comparisons[Assignor.RANGE].moved == comparisons[Assignor.STICKY].moved == 0
    assert comparisons[Assignor.ROUND_ROBIN].moved == 2
    assert comparisons[Assignor.LEADER_BYTES].leaders == 1
    assert comparisons[Assignor.RANGE].leaders == 2
    assert comparisons[Assignor.RANGE].balance == 1.0
    assert comparisons[Assignor.ROUND_ROBIN].balance == 1.0
