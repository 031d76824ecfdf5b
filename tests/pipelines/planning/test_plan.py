"""The planner: a plan covers exactly the pending offsets, within limits, and is deterministic."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.entries import KeyRange, LossEntry, OriginEntry, OriginItem
from sluice.pipelines.model.kafka import Isolation, Key, PartitionState, Range, TopicPartition, subtract, union
from sluice.pipelines.model.plans import SEVERAL, AskedRange, Assignor, Plan, Request, RequestKind, to_json
from sluice.pipelines.planning.assignment import Sizing
from sluice.pipelines.planning.plan import build, find_pending_ranges
from sluice.testing.cluster import partition
from tests.examples import scale_examples

CATCH_UP = Request(RequestKind.CATCH_UP)
HOURLY = WindowSettings()
SIZING = Sizing(range_bytes=128 << 20, task_bytes=128 << 20, parallelism=2, max_tasks=64)


def make_key(number: int = 0) -> Key:
    return Key("orders", number, "id-1")


def state(origins: dict[int, int], accounted: dict[int, list[Range]] | None = None) -> State:
    items = tuple(OriginItem(key=make_key(n), offset=o, committed=None, why="") for n, o in origins.items())
    lost = tuple(KeyRange(key=make_key(n), range=r) for n, rs in (accounted or {}).items() for r in rs)
    return State().extend([OriginEntry(items=items), LossEntry(ranges=lost, reason="")])


def build_plan(
    s: State, parts: dict[Key, PartitionState], request: Request = CATCH_UP, sizing: Sizing = SIZING
) -> Plan | None:
    pending, refused = find_pending_ranges(request, s, parts, HOURLY)
    assert not refused
    return build(Plan("orders", "c", request, Isolation.READ_COMMITTED, ()), pending, sizing, s, HOURLY)


partitions = st.lists(
    st.tuples(
        st.integers(0, 20),  # origin
        st.integers(0, 60),  # last stable offset beyond it
        st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), max_size=4),  # accounted
        st.integers(1, 3),  # leader
        st.sampled_from([None, 0, 10**6, 10**9]),  # log bytes
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=scale_examples(200))
@given(partitions, st.integers(1, 4), st.sampled_from([1, 1 << 20, 128 << 20]), st.sampled_from(Assignor))
def test_plan_covers_exactly_the_pending_offsets(
    world: list[tuple[int, int, list[tuple[int, int]], int, int | None]],
    parallelism: int,
    size: int,
    assignor: Assignor,
) -> None:
    accounted = {n: [Range(a, a + w) for a, w in w_[2]] for n, w_ in enumerate(world)}
    s = state({n: w[0] for n, w in enumerate(world)}, accounted)
    parts = {
        make_key(n): partition(
            number=n, leader=w[3], log_bytes=w[4], last_stable_offset=w[0] + w[1], high_watermark=max(w[0] + w[1], 200)
        )
        for n, w in enumerate(world)
    }
    sizing = Sizing(size, size, parallelism, 64, min_range_bytes=1, assignor=assignor)
    plan = build_plan(s, parts, sizing=sizing)
    for n, w in enumerate(world):
        frontier = s.frontier(make_key(n))
        expected = subtract(Range(frontier, max(frontier, w[0] + w[1])), s.list_accounted(make_key(n)))
        mine = [x for x in (plan.offset_ranges if plan else ()) if x.key == make_key(n)]
        assert union(x.range for x in mine) == expected
        assert sum(x.span for x in mine) == sum(r.span for r in expected), "offset ranges do not overlap"
        leaders = {t.leader for t in (plan.tasks if plan else ()) for x in t.offset_ranges if x.key == make_key(n)}
        assert leaders <= ({w[3]} if assignor is Assignor.LEADER_BYTES else {w[3], SEVERAL})
    again = build_plan(s, parts, sizing=sizing)
    assert (plan and plan.hash) == (again and again.hash)


def test_large_partitions_are_split_over_several_tasks() -> None:
    parts = {make_key(): partition(last_stable_offset=10**6, high_watermark=10**6, log_bytes=1 << 30)}
    plan = build_plan(state({0: 0}), parts)
    assert plan is not None
    assert len(plan.offset_ranges) == 8
    assert len(plan.tasks) == 8
    assert max(t.estimated_bytes for t in plan.tasks) < 1.1 * min(t.estimated_bytes for t in plan.tasks)


def test_small_partitions_are_not_split() -> None:
    parts = {make_key(n): partition(number=n, leader=n % 3) for n in range(6)}
    plan = build_plan(state(dict.fromkeys(range(6), 0)), parts)
    assert plan is not None
    assert len(plan.offset_ranges) == 6
    assert [t.leader for t in plan.tasks] == [0, 1, 2]


def test_record_limit_shortens_partitions_proportionally() -> None:
    parts = {
        make_key(n): partition(number=n, last_stable_offset=e, high_watermark=e) for n, e in enumerate((1000, 3000))
    }
    plan = build_plan(state({0: 0, 1: 0}), parts, sizing=Sizing(128 << 20, 128 << 20, 2, 64, max_records=400))
    assert plan is not None
    assert {s.key: s.range for s in plan.offset_ranges} == {make_key(0): Range(0, 100), make_key(1): Range(0, 300)}


def test_only_unaccounted_offsets_of_explicit_ranges_are_pending() -> None:
    request = Request(RequestKind.OFFSETS, ranges=(AskedRange("orders", 0, 10, 90),))
    plan = build_plan(state({0: 50}, {0: [Range(50, 60)]}), {make_key(): partition()}, request)
    assert plan is not None
    assert [s.range for s in plan.offset_ranges] == [Range(10, 50), Range(60, 90)], (
        "a backfill may reach below the origin"
    )


def test_overlapping_ranges_are_planned_once() -> None:
    ranges = (AskedRange("orders", 0, 10, 30), AskedRange("orders", 0, 20, 40), AskedRange("orders", 0, 50, 60))
    plan = build_plan(state({0: 0}), {make_key(): partition()}, Request(RequestKind.OFFSETS, ranges))
    assert plan is not None
    assert [s.range for s in plan.offset_ranges] == [Range(10, 40), Range(50, 60)]


@pytest.mark.parametrize(
    ("requested", "says"),
    [
        (AskedRange("orders", 0, 90, 101), "beyond the last stable offset 100"),
        (AskedRange("orders", 0, 5, 5), "is not a range"),
        (AskedRange("orders", 0, -1, 5), "is not a range"),
        (AskedRange("orders", 7, 0, 5), "orders:7 is not a partition"),
    ],
)
def test_invalid_ranges_are_refused(requested: AskedRange, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_pending_ranges(
            Request(RequestKind.OFFSETS, ranges=(requested,)), state({0: 0}), {make_key(): partition()}, HOURLY
        )


def test_only_filter_without_a_match_is_refused() -> None:
    request = Request(RequestKind.CATCH_UP, only=(TopicPartition("orders", 9),))
    with pytest.raises(UsageError, match="orders:9"):
        find_pending_ranges(request, state({0: 0}), {make_key(): partition()}, HOURLY)


def test_pending_offsets_below_the_log_start_are_reported_as_lost() -> None:
    pending, _ = find_pending_ranges(
        CATCH_UP, state({0: 10}, {0: [Range(15, 20)]}), {make_key(): partition(log_start=40)}, HOURLY
    )
    assert pending[0].lost == (Range(10, 15), Range(20, 40))
    assert pending[0].ranges == (Range(40, 100),)


def test_position_beyond_the_log_end_is_refused() -> None:
    pending, refused = find_pending_ranges(CATCH_UP, state({0: 500}), {make_key(): partition()}, HOURLY)
    assert not pending
    assert "beyond the end of the log" in refused[0].error.message


def test_plan_hash_is_sha256_of_canonical_json() -> None:
    plan = build_plan(state({0: 0}), {make_key(): partition()})
    assert plan
    fields = asdict(plan) | {"tasks": [{"slices": t.pop("offset_ranges"), **t} for t in asdict(plan)["tasks"]]}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert to_json(plan) == text
    assert plan.hash == hashlib.sha256(text.encode()).hexdigest()


def test_plan_hash_depends_on_the_content() -> None:
    one = build_plan(state({0: 0}), {make_key(): partition()})
    other = build_plan(state({0: 1}), {make_key(): partition()})
    assert one
    assert other
    assert one.hash != other.hash
