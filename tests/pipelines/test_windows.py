"""Windows tile every partition whatever order they are resolved in, whatever the stamps say."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed import WindowSettings
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import OriginEntry, OriginItem
from sluice.pipelines.ranges import Range
from sluice.pipelines.values import Key, OffsetAtTime, PartitionState, TopicPartition
from sluice.pipelines.windows import (
    check_window,
    clamped,
    complete,
    held,
    opening,
    pieces,
    range_of,
    resolved,
    unpinned,
)
from tests.fakes import FakeCluster, MemoryLake, partition

HOUR = 3_600_000
SETTINGS = WindowSettings()
KEY = Key("orders", 0, "id-1")
TP = TopicPartition("orders", 0)
START = 400_000 * HOUR


@dataclass
class Log(FakeCluster):
    """One partition whose look-ups by time come from its records' stamps."""

    stamps: list[int] = field(default_factory=list)

    def offsets_at(self, times):  # type: ignore[no-untyped-def]
        return {tp: self._first(t) for tp, t in times.items()}

    def _first(self, time: int) -> OffsetAtTime | None:
        return next((OffsetAtTime(o, s) for o, s in enumerate(self.stamps) if s >= time), None)

    @property
    def partitions_by_key(self) -> dict[Key, PartitionState]:
        end = len(self.stamps)
        return {KEY: partition(stable_end=end, high_watermark=end)}


class World:
    def __init__(self, stamps: list[int], now: int, origin: int = 0, opens: int | None = None) -> None:
        self.log = Log(stamps=list(stamps))
        self.now = now
        self.ledger = Ledger(MemoryLake(), "orders", lambda: self.now, "run", "c")
        item = OriginItem(key=KEY, offset=origin, committed=None, why="test", opens=opens)
        items = (item,) if opens is not None else opening(self.log, self.log.partitions_by_key, [item], SETTINGS, now)
        self.ledger.append(lambda s: OriginEntry(items=items))

    @property
    def state(self) -> State:
        return self.ledger.read()

    def pin(self, *boundaries: int) -> None:
        for boundary in boundaries:
            missing = unpinned(self.state, self.log.partitions_by_key, boundary)
            entry = resolved(self.log, lambda: self.now, missing, boundary, SETTINGS)
            self.ledger.append(partial(clamped, entry=entry))

    def window(self, start: int) -> Range | None:
        return range_of(self.state, KEY, start, SETTINGS)


stamp = st.one_of(
    st.integers(START - HOUR, START + 6 * HOUR),
    st.sampled_from([-1, 0, START + 20 * 365 * 24 * HOUR, 2**63 - 1]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(stamp, max_size=25),
    st.lists(stamp, max_size=10),
    st.permutations([START + i * HOUR for i in range(6)]),
    st.integers(0, 6),
)
def test_windows_tile_in_any_order_whatever_arrives_between(
    stamps: list[int], later: list[int], order: list[int], arrives_after: int
) -> None:
    world = World(stamps, START + 7 * HOUR, opens=START)
    for i, window in enumerate(order):
        if i == arrives_after:
            world.log.stamps += later
        world.pin(window, window + HOUR)
    ranges = [world.window(START + i * HOUR) for i in range(6)]
    at = 0
    for r in ranges:
        assert r is not None
        assert r.start == at
        assert r.end >= r.start
        at = r.end
    before = list(ranges)
    world.log.stamps += later
    for window in order:
        world.pin(window, window + HOUR)
    assert [world.window(START + i * HOUR) for i in range(6)] == before, "first resolution wins"


def test_records_lie_in_the_window_of_their_stamps() -> None:
    stamps = [START + 5, START + HOUR - 1, START + HOUR, START + 2 * HOUR + 9]
    world = World(stamps, START + 4 * HOUR, opens=START)
    world.pin(START + HOUR, START + 2 * HOUR, START + 3 * HOUR)
    assert [world.window(START + i * HOUR) for i in range(3)] == [Range(0, 2), Range(2, 3), Range(3, 4)]


def test_one_record_from_2040_does_not_empty_later_hours() -> None:
    far = START + 20 * 365 * 24 * HOUR
    world = World([START, far, START + 10], START + HOUR + 20 * 60_000, opens=START)
    world.pin(START + HOUR)
    assert world.window(START) == Range(0, 3)
    world.log.stamps += [START + HOUR + 5, START + 2 * HOUR]
    world.now += HOUR
    world.pin(START + 2 * HOUR)
    assert world.window(START + HOUR) == Range(3, 5)


def test_what_a_catch_up_landed_in_the_open_window_is_the_floor_of_its_end() -> None:
    world = World([START], START + HOUR, opens=START)
    state = world.state
    state.floors[KEY] = (START, 1)
    world.log.stamps = [START + HOUR + 1, START + HOUR + 2]  # a clock that jumped: all stamped after the boundary
    world.now += HOUR
    world.ledger._state = state
    world.pin(START + HOUR)
    assert world.window(START) == Range(0, 1)


@pytest.mark.parametrize(
    ("stamps", "origin", "expected"),
    [
        ([START + 5, START + HOUR], 0, START),
        ([START + 5, START + HOUR], 1, START + HOUR),
        ([START + 5, START + HOUR], 2, START + 5 * HOUR),
        ([], 0, START + 5 * HOUR),
        ([2**62, START + HOUR], 0, START + 5 * HOUR),
        ([0, START], 0, START + 5 * HOUR),
    ],
)
def test_the_first_window_begins_at_the_origin(stamps: list[int], origin: int, expected: int) -> None:
    world = World(stamps, START + 5 * HOUR + 7, origin=origin)
    if stamps == [0, START]:
        expected = 0 + world.state.first_window if world.state.first_window is not None else -1
    assert world.state.first_window == expected
    assert world.state.boundaries[expected] == {KEY: origin}


def test_a_window_before_a_partitions_opening_is_empty_there() -> None:
    world = World([START], START + 5 * HOUR, opens=START + 2 * HOUR)
    world.pin(START + HOUR)
    assert world.window(START) == Range(0, 0)
    assert unpinned(world.state, world.log.partitions_by_key, START + HOUR) == {}


def test_pieces_are_cut_at_boundaries_and_named_by_window() -> None:
    stamps = [START, START + HOUR, START + HOUR + 1, START + 3 * HOUR]
    world = World(stamps, START + 5 * HOUR, opens=START)
    world.pin(START + HOUR, START + 2 * HOUR, START + 3 * HOUR)
    found = pieces(world.state, KEY, Range(0, 4))
    assert [(p.range, p.window) for p in found] == [
        (Range(0, 1), START),
        (Range(1, 3), START + HOUR),
        (Range(3, 4), START + 3 * HOUR),
    ]


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (START + 1, "is no start of a window"),
        (START + 3 * HOUR, "not closed yet"),
        (START - HOUR, "before the feed's first window"),
    ],
)
def test_windows_that_cannot_be_landed_are_refused(window: int, says: str) -> None:
    world = World([START], START + 4 * HOUR + 60_000, opens=START)
    with pytest.raises(UsageError, match=says):
        check_window(window, SETTINGS, world.state, world.now)


def test_an_open_transaction_holds_a_window() -> None:
    world = World([START, START + 1, START + HOUR], START + 3 * HOUR, opens=START)
    world.pin(START + HOUR)
    parts = world.log.partitions_by_key
    assert held(world.state, parts, START, SETTINGS) == ()
    stuck = {KEY: partition(stable_end=1, high_watermark=3)}
    assert held(world.state, stuck, START, SETTINGS) == (TP,)


def test_a_window_is_complete_when_all_of_it_is_accounted_for() -> None:
    world = World([START, START + 1, START + HOUR], START + 3 * HOUR, opens=START)
    assert not complete(world.state, START, SETTINGS)
    world.pin(START + HOUR)
    assert not complete(world.state, START, SETTINGS)
    state = world.state
    state.landed[KEY] = (Range(0, 2),)
    assert complete(state, START, SETTINGS)
