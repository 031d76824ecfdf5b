"""Windows tile every partition for any order of resolution and any stamps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.errors import SluiceError, UsageError, WindowHeld, WindowOpen
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import Ledger, State, checkpoint
from sluice.pipelines.ledger.entries import Boundaries, BoundaryEntry, KeyRange, OriginEntry, OriginItem, SkipEntry
from sluice.pipelines.model.kafka import Key, OffsetAtTime, PartitionState, Range, TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.planning.plan import find_pending_ranges
from sluice.pipelines.planning.windows import (
    LISTED,
    check_window,
    clamp,
    clamp_boundaries,
    complete,
    count_marker_searches,
    cut_at_boundaries,
    find_cuts,
    find_due,
    find_opening,
    find_range,
    list_manifest_windows,
)
from sluice.pipelines.status import strip
from sluice.pipelines.status.window_state import Standing
from sluice.testing.cluster import MemoryCluster, partition
from sluice.testing.lake import MemoryLake
from tests.examples import scale_examples

HOUR = 3_600_000
SETTINGS = WindowSettings()
KEY = Key("orders", 0, "id-1")
TP = TopicPartition("orders", 0)
START = 400_000 * HOUR


@dataclass
class Log(MemoryCluster):
    """One partition with look-ups by time over its records' stamps."""

    stamped: list[int] = field(default_factory=list)
    hidden: range = range(0)
    """Offsets of records behind markers, found by a search."""
    lookups: int = 0

    def offsets_at(self, times: Any, max_skew: Any = None) -> Any:
        self.lookups += 1
        return super().offsets_at(times, max_skew)

    def _ask_leaders(self, what: str, concerned: Any, times: int = 1) -> None: ...

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        matches = ((o, s) for o, s in enumerate(self.stamped) if s >= time)
        return next((OffsetAtTime(o, s, by_marker=o in self.hidden) for o, s in matches), None)

    def list_stamps(self, tp: TopicPartition) -> list[tuple[int, int]]:
        return [*enumerate(self.stamped)]

    @property
    def partitions_by_key(self) -> dict[Key, PartitionState]:
        end = len(self.stamped)
        return {KEY: partition(last_stable_offset=end, high_watermark=end)}


class World:
    def __init__(self, stamps: list[int], now: int, origin: int = 0, opens: int | None = None) -> None:
        self.log = Log(stamped=list(stamps))
        self.now = now
        self.ledger = Ledger(MemoryLake(), "orders", lambda: self.now, "run", "c")
        item = OriginItem(key=KEY, offset=origin, committed=None, why="test", opens=opens)
        items = (
            (item,) if opens is not None else find_opening(self.log, self.log.partitions_by_key, [item], SETTINGS, now)
        )
        self.ledger.append(lambda s: OriginEntry(items=items))

    @property
    def state(self) -> State:
        return self.ledger.read()

    def pin(self) -> None:
        """Pin the due boundaries, as a run does."""
        for entry in find_due(self.state, self.log, self.now, self.log.partitions_by_key, SETTINGS):
            self.ledger.append(partial(clamp_boundaries, entry=entry))

    def find_window(self, start: int) -> Range | None:
        return find_range(self.state, KEY, start, SETTINGS)


stamp = st.one_of(
    st.integers(START - HOUR, START + 6 * HOUR),
    st.sampled_from([-1, 0, START + 20 * 365 * 24 * HOUR, 2**63 - 1]),
)


@settings(max_examples=scale_examples(200))
@given(st.lists(st.tuples(st.lists(stamp, max_size=12), st.integers(0, 3 * HOUR)), min_size=1, max_size=6))
def test_windows_tile_regardless_of_arriving_records(rounds: list[tuple[list[int], int]]) -> None:
    world = World([], START + 20 * 60_000, opens=START)
    pinned: dict[int, Range | None] = {}
    for stamps, passes in rounds:
        world.log.stamped += stamps
        world.now += passes
        world.pin()
        windows = range(START, SETTINGS.last_boundary(world.now), HOUR)
        ranges = {w: world.find_window(w) for w in windows}
        assert ranges.items() >= pinned.items(), "first resolution wins"
        at = 0
        for r in ranges.values():
            assert r is not None
            assert (r.start, r.end >= r.start) == (at, True)
            at = r.end
        pinned = ranges


@settings(max_examples=scale_examples(100))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12 * HOUR)), max_size=10), st.randoms())
def test_boundaries_stay_sorted_when_concurrent_runs_read_different_ends(
    looks: list[tuple[bool, int]], random: Any
) -> None:
    """Two runs resolve at different times; their entries reach the ledger in any order."""
    world, waiting = World([], START, opens=START), []
    for grows, passes in looks:
        world.now += passes
        world.log.stamped += [world.now - HOUR] * 3 if grows else []
        waiting += find_due(world.state, world.log, world.now, world.log.partitions_by_key, SETTINGS)
    random.shuffle(waiting)
    for entry in waiting:
        world.ledger.append(partial(clamp_boundaries, entry=entry))
    offsets = [o for _, o in world.state.boundaries[KEY]]
    assert offsets == sorted(offsets)


hours = st.lists(st.integers(-2, 12), min_size=1, max_size=8, unique=True).map(sorted)
offset = st.integers(0, 9)


@settings(max_examples=scale_examples(300))
@given(
    hours, st.lists(offset, min_size=8, max_size=8), hours, st.lists(offset, max_size=8), offset, st.integers(-2, 12)
)
def test_boundaries_clamped_together_equal_boundaries_clamped_singly(
    new_hours: list[int], offsets: list[int], before: list[int], pinned: list[int], origin: int, floor: int
) -> None:
    state = World([], START, origin, opens=START).state
    for hour, at in zip(before, sorted(pinned), strict=False):
        state.boundaries[KEY].add([START + hour * HOUR], [at])
    state.floors[KEY] = START + floor * HOUR, 5
    expected, minimum = dict[int, int](), 0
    for hour, at in zip(new_hours, offsets, strict=False):
        time = START + hour * HOUR
        if time not in state.boundaries[KEY].times:
            expected[time] = minimum = clamp(state, KEY, time, max(at, minimum))
    times = tuple(START + h * HOUR for h in new_hours)
    entry = BoundaryEntry(items=(Boundaries(key=KEY, times=times, offsets=tuple(offsets[: len(times)])),))
    clamped = clamp_boundaries(state, entry)
    assert dict(zip(clamped.items[0].times, clamped.items[0].offsets, strict=True) if clamped else ()) == expected


def test_records_are_in_the_window_of_their_timestamps() -> None:
    stamps = [START + 5, START + HOUR - 1, START + HOUR, START + 2 * HOUR + 9]
    world = World(stamps, START + 4 * HOUR, opens=START)
    world.pin()
    assert [world.find_window(START + i * HOUR) for i in range(3)] == [Range(0, 2), Range(2, 3), Range(3, 4)]


def test_record_from_the_far_future_does_not_empty_later_windows() -> None:
    far = START + 20 * 365 * 24 * HOUR
    world = World([START, far, START + 10], START + HOUR + 20 * 60_000, opens=START)
    world.pin()
    assert world.find_window(START) == Range(0, 3)
    world.log.stamped += [START + HOUR + 5, START + 2 * HOUR]
    world.now += HOUR
    world.pin()
    assert world.find_window(START + HOUR) == Range(3, 4)


def test_fifty_empty_years_need_few_lookups() -> None:
    """A log whose first record is stamped 1970: empty years need no look-up and no entry, and are complete."""
    world = World([5, START, START + HOUR, START + HOUR + 1], START + 4 * HOUR)
    assert world.state.first_window == 0
    world.log.lookups = 0
    world.pin()
    assert world.log.lookups < 60
    assert world.find_window(0) == Range(0, 1)
    assert world.find_window(HOUR) == world.find_window(START - HOUR) == Range(1, 1)
    assert world.find_window(START) == Range(1, 2)
    assert world.find_window(START + HOUR) == Range(2, 4)
    assert LISTED - 2 <= len(list_manifest_windows(world.state, SETTINGS)) < LISTED + 60


def test_longer_windows_begin_where_shorter_windows_ended() -> None:
    short, day = WindowSettings(length="15m"), WindowSettings(length="1d")
    world = World([START + i * HOUR // 8 for i in range(96)], START + 3 * HOUR, opens=START)
    for entry in find_due(world.state, world.log, world.now, world.log.partitions_by_key, short):
        world.ledger.append(partial(clamp_boundaries, entry=entry))
    begun = world.state.boundary_times[-1]
    world.now += 48 * HOUR
    for entry in find_due(world.state, world.log, world.now, world.log.partitions_by_key, day):
        world.ledger.append(partial(clamp_boundaries, entry=entry))
    assert all(t % (24 * HOUR) == 0 for t in world.state.boundary_times if t > begun)
    offsets = [o for _, o in world.state.boundaries[KEY]]
    assert offsets == sorted(offsets)
    assert find_range(world.state, KEY, START, SETTINGS) == Range(0, 8), "hours are still whole quarters"


def test_end_of_open_window_is_not_below_offsets_landed_by_catch_up() -> None:
    world = World([START], START + HOUR, opens=START)
    state = world.state
    state.floors[KEY] = (START, 1)
    world.log.stamped = [START + HOUR + 1, START + HOUR + 2]  # a clock that jumped: all stamped after the boundary
    world.now += HOUR
    world.ledger._state = state
    world.pin()
    assert world.find_window(START) == Range(0, 1)


@pytest.mark.parametrize(
    ("stamps", "origin", "expected"),
    [
        ([START + 5, START + HOUR], 0, START),
        ([START + 5, START + HOUR], 1, START + HOUR),
        ([START + 5, START + HOUR], 2, START + 5 * HOUR),
        ([], 0, START + 5 * HOUR),
        ([2**62, START + HOUR], 0, START + 5 * HOUR),
        ([-1, START], 0, 0),
        ([0, START], 0, 0),
    ],
)
def test_first_window_starts_at_the_origin(stamps: list[int], origin: int, expected: int) -> None:
    world = World(stamps, START + 5 * HOUR + 7, origin=origin)
    assert world.state.first_window == expected
    assert list(world.state.boundaries[KEY]) == [(expected, origin)]


def test_boundary_resolved_by_marker_search_stays_marked() -> None:
    world = World([START, START + HOUR, START + 2 * HOUR + 5, START + 3 * HOUR], START + 5 * HOUR, opens=START)
    world.log.hidden = range(2, 3)
    world.pin()
    assert [count_marker_searches(world.state, START + n * HOUR, SETTINGS) for n in range(4)] == [0, 1, 1, 0]
    (entry,) = [e for e in list_entries(world) if isinstance(e, BoundaryEntry)]
    assert entry.items[0].by_marker == (START + 2 * HOUR,)
    assert world.find_window(START + HOUR) == Range(1, 2)
    again = checkpoint.load(checkpoint.dump(world.state))
    assert again is not None
    assert again.by_marker == {START + 2 * HOUR: 1}
    world.log.hidden = range(0)
    world.ledger.append(lambda s: entry)
    assert world.state.by_marker == {START + 2 * HOUR: 1}, "first resolution wins"


def test_log_end_behind_markers_is_resolved_by_clock_and_marked() -> None:
    world = World([START, START + HOUR], START + 5 * HOUR, opens=START)
    end = OffsetAtTime(2, START + 2 * HOUR, by_marker=True)
    world.log.first = lambda tp, time: OffsetAtTime(1, START + HOUR) if time <= START + HOUR else end  # type: ignore
    world.pin()
    (entry,) = [e for e in list_entries(world) if isinstance(e, BoundaryEntry)]
    assert (entry.items[0].offsets[-1], entry.items[0].by_marker[-1]) == (2, entry.items[0].times[-1])


def list_entries(world: World) -> list[Any]:
    return [entry for _, entry in world.ledger.entries()]


def test_window_before_the_opening_of_a_partition_is_empty() -> None:
    world = World([START], START + 5 * HOUR, opens=START + 2 * HOUR)
    assert world.find_window(START) == Range(0, 0)


def test_ranges_are_cut_at_boundaries_and_assigned_to_windows() -> None:
    stamps = [START, START + HOUR, START + HOUR + 1, START + 3 * HOUR]
    world = World(stamps, START + 5 * HOUR, opens=START)
    world.pin()
    pieces = cut_at_boundaries(world.state, KEY, Range(0, 4))
    assert [(p.range, p.window) for p in pieces] == [
        (Range(0, 1), START),
        (Range(1, 3), START + HOUR),
        (Range(3, 4), START + 3 * HOUR),
    ]


@pytest.mark.parametrize(
    ("window", "error", "says"),
    [
        (START + 1, UsageError, "is not the start of a window"),
        (START + 3 * HOUR, WindowOpen, "not closed yet"),
    ],
)
def test_unaligned_and_open_windows_are_refused(window: int, error: type[SluiceError], says: str) -> None:
    world = World([START], START + 4 * HOUR + 60_000, opens=START)
    with pytest.raises(error, match=says):
        check_window(window, SETTINGS, world.now)


def test_open_transaction_blocks_a_window() -> None:
    world = World([START, START + 1, START + HOUR], START + 3 * HOUR, opens=START)
    world.pin()
    parts = world.log.partitions_by_key
    request = Request(RequestKind.WINDOW, window=START)
    assert find_pending_ranges(request, world.state, parts, SETTINGS)[1] == ()
    stuck = {KEY: partition(last_stable_offset=1, high_watermark=3)}
    (refused,) = find_pending_ranges(request, world.state, stuck, SETTINGS)[1]
    assert (refused.tp, type(refused.error)) == (TP, WindowHeld)


def test_window_is_complete_when_all_its_offsets_are_accounted_for() -> None:
    world = World([START, START + 1, START + HOUR], START + 3 * HOUR, opens=START)
    assert not complete(world.state, START, SETTINGS)
    world.pin()
    assert not complete(world.state, START, SETTINGS)
    state = world.state
    state.landed[KEY] = (Range(0, 2),)
    assert complete(state, START, SETTINGS)


def test_no_boundary_is_resolved_after_the_clock_jumps_back() -> None:
    """The other partition's next boundary is ahead of the clock, and the window length grew in between."""
    world = World([START, START + 3 * HOUR], START + 4 * HOUR, opens=START)
    world.pin()
    other = Key("orders", 1, "id-1")
    opens = world.state.boundary_times[0]
    item = OriginItem(key=other, offset=0, committed=None, why="test", opens=opens)
    world.ledger.append(lambda s: OriginEntry(items=(item,)))
    state = world.state
    state.boundary_times = (opens, START + 9 * HOUR)
    parts = {other: partition(number=1, last_stable_offset=0, high_watermark=0)}
    assert find_due(state, world.log, START + 3 * HOUR, parts, SETTINGS) == []


# -- a feed that begins within a window


@settings(max_examples=scale_examples(150))
@given(st.lists(st.integers(START, START + 4 * HOUR - 1), min_size=1, max_size=16), st.data())
def test_window_that_an_origin_cuts_is_complete_only_with_its_first_records(stamps: list[int], data: Any) -> None:
    """Check for any origin that windows tile the log by stamps, and none is complete without records below it."""
    log = Log(stamped=sorted(stamps))
    origin = data.draw(st.integers(0, len(stamps)))
    item = OriginItem(key=KEY, offset=origin, committed=None, why="test")
    now = START + 4 * HOUR + SETTINGS.grace
    world = World(log.stamped, now, opens=0)
    opening = find_opening(log, log.partitions_by_key, [item], SETTINGS, now)
    items = find_cuts(log, log.partitions_by_key, opening, SETTINGS.max_skew)
    world.ledger = Ledger(MemoryLake(), "orders", lambda: now, "run", "c")
    world.ledger.append(lambda s: OriginEntry(items=items))
    world.pin()
    world.ledger.append(lambda s: SkipEntry(ranges=(KeyRange(key=KEY, range=Range(origin, len(stamps))),), reason="t"))
    (first,) = {i.opens for i in items}
    assert first is not None
    for window in range(first, START + 4 * HOUR, HOUR):
        own = [o for o, s in enumerate(log.stamped) if window <= s < window + HOUR]
        r = world.find_window(window)
        assert r is not None
        assert list(range(*r)) == own
        assert complete(world.state, window, SETTINGS) is all(o >= origin for o in own)
        expected = Standing.LANDED if all(o >= origin for o in own) else Standing.FROM_ORIGIN
        assert strip.standing(world.state, SETTINGS, window, now).state is expected
    assert checkpoint.load(checkpoint.dump(world.state)) == world.state


def test_origin_without_earlier_records_is_written_as_before() -> None:
    log = Log(stamped=[START, START + 1])
    item = OriginItem(key=KEY, offset=0, committed=None, why="test", opens=START)
    assert find_cuts(log, log.partitions_by_key, [item], SETTINGS.max_skew) == (item,)
    assert "cuts" not in item.model_dump()
    assert log.lookups == 0, "nothing precedes the log's start"
