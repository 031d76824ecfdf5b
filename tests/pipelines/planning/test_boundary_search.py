"""Boundaries where some producers' clocks are wrong, judged by the time at which records arrived."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.model.kafka import OffsetAtTime, Range, SkewLimit
from sluice.pipelines.planning.boundary_search import RECORDS, Sample, search_boundary
from sluice.testing.cluster import partition
from tests.pipelines.planning.test_windows import HOUR, KEY, START, TP, Log, World, list_entries

MINUTE, DAY = 60_000, 24 * HOUR
HOURS = 6


def simulate(seed: int, an_hour: int, ahead: int, share: float, late: float = 0.0) -> tuple[Any, Any]:
    """Returns arrival times and stamps of records from some producers, in batches, whose clocks are `ahead`."""
    random = np.random.default_rng(seed)
    arrival = np.sort(random.uniform(START, START + HOURS * HOUR, an_hour * HOURS)).astype(np.int64)
    draw = random.random(len(arrival))
    stamps = arrival - random.integers(0, 500, len(arrival)) + np.where(draw < share, ahead, 0)
    return arrival, stamps - np.where(draw > 1 - late, random.integers(0, 5 * HOUR, len(arrival)), 0)


def find_boundary(stamps: Any, hour: int, skew: int, floor: OffsetAtTime | None = None) -> int:
    log = Log(stamped=list(map(int, stamps)), states={TP: partition()})
    limit = SkewLimit(skew, {TP: floor} if floor else {})
    hit = log.offsets_at({TP: START + hour * HOUR}, limit)[TP]
    return len(stamps) if hit is None else int(hit.offset)


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("ahead", [10_000, 2 * MINUTE, 55 * MINUTE, 2 * HOUR, int(5.5 * HOUR), 400 * DAY])
@pytest.mark.parametrize("late", [0.0, 0.1])
def test_records_are_in_the_hour_in_which_they_arrived(share: float, ahead: int, late: float) -> None:
    """A search of the whole log, and searches ten minutes after each hour, give the same boundaries."""
    arrival, stamps = simulate(int(share * 100), 3600, ahead, share, late)
    floor = None
    for hour in range(1, HOURS):
        time = START + hour * HOUR
        end = int(np.searchsorted(arrival, time + 10 * MINUTE))
        offset = find_boundary(stamps[:end], hour, 10_000, floor)
        assert find_boundary(stamps, hour, 10_000) == offset
        floor = OffsetAtTime(offset, time)
        right = int(np.searchsorted(arrival, time))
        displaced = arrival[min(offset, right) : max(offset, right)]
        assert (np.abs(displaced - time) <= 10_000).all(), hour


def test_one_record_from_a_fast_clock_moves_no_hour() -> None:
    for ahead in (55 * MINUTE, 400 * DAY):
        arrival, stamps = simulate(1, 300, 0, 0)
        stamps[10] += ahead
        for hour in range(1, HOURS):
            assert find_boundary(stamps, hour, 300_000) == np.searchsorted(
                stamps - (stamps > arrival + 1) * ahead, START + hour * HOUR
            )


def test_hour_with_a_record_is_not_empty_in_a_topic_with_one_record_an_hour() -> None:
    good = [START + n * HOUR + 40 * MINUTE for n in range(6)]
    for ahead in (2 * HOUR, 3 * HOUR + MINUTE, 400 * DAY):
        stamps = good.copy()
        stamps[1] += ahead
        assert [find_boundary(stamps, hour, 300_000) for hour in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert [find_boundary(good, hour, 300_000) for hour in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_late_records_move_no_boundary() -> None:
    """Not even if most records behind it are late, as in the replay of another day."""
    _, stamps = simulate(3, 3600, 0, 0)
    right = int(np.searchsorted(stamps, START + 2 * HOUR))
    stamps[right + 5 : right + 400 : 3] -= 90 * MINUTE
    assert find_boundary(stamps, 2, 300_000) == right
    one_an_hour = [START + 40 * MINUTE, START + HOUR + 40 * MINUTE, START + 5 * MINUTE, START + 2 * HOUR + 40 * MINUTE]
    assert find_boundary(one_an_hour, 1, 300_000) == 1


def test_clock_that_all_producers_share_is_right() -> None:
    _, stamps = simulate(4, 3600, 0, 0)
    local = stamps + 2 * HOUR
    assert [find_boundary(local, hour + 2, 300_000) for hour in range(1, 4)] == [
        find_boundary(stamps, hour, 300_000) for hour in range(1, 4)
    ]


def test_records_without_a_stamp_have_no_vote() -> None:
    _, stamps = simulate(5, 3600, 0, 0)
    stamps[np.arange(len(stamps)) % 10 > 2] = -1
    offset = find_boundary(stamps, 2, 300_000)
    assert stamps[offset] >= START + 2 * HOUR
    assert stamps[:offset].max() < START + 2 * HOUR


def test_searches_are_short() -> None:
    """Some twenty samples in a log of 180,000 records, of which a fifth is stamped in another year."""
    arrival, stamps = simulate(6, 30_000, 400 * DAY, 0.2)
    first = int((stamps >= START + 3 * HOUR).nonzero()[0][0])
    time, reads = START + 3 * HOUR, 0
    search = search_boundary(time, 300_000, OffsetAtTime(first, int(stamps[first])), None, len(stamps))
    position = next(search)
    boundary = None
    while boundary is None:
        reads, until = reads + 1, position + RECORDS
        try:
            position = search.send(Sample(np.arange(position, until), stamps[position:until], until))
        except StopIteration as end:
            boundary = end.value
    assert boundary.offset == pytest.approx(np.searchsorted(arrival, time), abs=5)
    assert reads < 25


def test_first_record_from_a_fast_clock_does_not_open_the_feed_late() -> None:
    for ahead in (2 * HOUR, 400 * DAY):
        arrival, stamps = simulate(7, 60, 0, 0)
        stamps[0] += ahead
        world = World(list(map(int, stamps)), START + 7 * HOUR)
        assert world.state.first_window == START
        world.pin()
        bounds = [0, *(int(np.searchsorted(arrival, START + n * HOUR)) for n in range(1, 6))]
        assert [world.find_window(START + n * HOUR) for n in range(5)] == [Range(a, b) for a, b in pairwise(bounds)]


def test_boundary_against_a_stamp_is_remembered() -> None:
    world = World(
        [START, START + 55 * MINUTE + HOUR, *range(START + 10, START + 2 * HOUR, MINUTE)], START + 3 * HOUR, opens=START
    )
    world.pin()
    assert world.state.against == {START + HOUR: 1}
    (entry,) = [e for e in list_entries(world) if e.kind == "boundary"]
    assert entry.items[0].against == (START + HOUR,)
    assert entry.items[0].key == KEY
    assert WindowSettings().max_skew == 300_000
