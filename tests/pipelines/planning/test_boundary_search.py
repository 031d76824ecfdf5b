"""Boundaries where some producers' clocks are wrong, judged by the time at which records arrived."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.model.kafka import OffsetAtTime, Range
from sluice.pipelines.planning.boundary_search import Sample, search_boundary
from sluice.testing.cluster import partition
from tests.pipelines.planning.test_windows import HOUR, KEY, START, TP, Log, World, list_entries

MINUTE, DAY = 60_000, 24 * HOUR
HOURS = 6


def simulate(seed: int, an_hour: int, ahead: int, share: float, late: float = 0.0) -> tuple[Any, Any]:
    """Returns arrival times and stamps of records; of a `share` the clocks are `ahead`, others arrive `late`."""
    random = np.random.default_rng(seed)
    arrival = np.sort(random.uniform(START, START + HOURS * HOUR, an_hour * HOURS)).astype(np.int64)
    draw = random.random(len(arrival))
    stamps = arrival - random.integers(0, 500, len(arrival)) + np.where(draw < share, ahead, 0)
    return arrival, stamps - np.where(draw > 1 - late, random.integers(0, 5 * HOUR, len(arrival)), 0)


def find_boundary(stamps: Any, hour: int, max_skew: int) -> int:
    log = Log(stamped=list(map(int, stamps)), states={TP: partition()})
    hit = log.offsets_at({TP: START + hour * HOUR}, max_skew)[TP]
    return len(stamps) if hit is None else int(hit.offset)


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("ahead", [10_000, 2 * MINUTE, 55 * MINUTE, 2 * HOUR, int(5.5 * HOUR), 400 * DAY])
@pytest.mark.parametrize("late", [0.0, 0.1])
def test_records_are_in_the_hour_in_which_they_arrived(share: float, ahead: int, late: float) -> None:
    """A search of the whole log, and searches ten minutes after each hour, give the same boundaries."""
    arrival, stamps = simulate(int(share * 100), 3600, ahead, share, late)
    for hour in range(1, HOURS):
        time = START + hour * HOUR
        end = int(np.searchsorted(arrival, time + 10 * MINUTE))
        offset = find_boundary(stamps[:end], hour, 10_000)
        assert find_boundary(stamps, hour, 10_000) == offset
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


def insert_burst(arrival: Any, stamps: Any, at: int, size: int, oldest: int, newest: int) -> tuple[Any, Any]:
    """Returns the log with records that arrive within two seconds, stamped from `oldest` to `newest` before `at`."""
    arrived = np.concatenate([arrival, np.linspace(at, at + 2000, size).astype(np.int64)])
    order = arrived.argsort(kind="stable")
    late = np.linspace(at - oldest, at - newest, size).astype(np.int64)
    return arrived[order], np.concatenate([stamps, late])[order]


BURSTS = [(at, size) for at in (-MINUTE, 0, 1, MINUTE) for size in (3, 100, 5000)]
"""When a burst of late records begins, before or after the boundary (ms), and its records."""


@pytest.mark.parametrize(("at", "size"), BURSTS)
@pytest.mark.parametrize("oldest", [20 * MINUTE, 3 * HOUR, 26 * HOUR])
@pytest.mark.parametrize("late", [0, 0.2])
def test_late_records_do_not_change_kafkas_answer(at: int, size: int, oldest: int, late: float) -> None:
    for seed, an_hour in enumerate((600, 3600)):
        arrival, stamps = simulate(seed, an_hour, 0, 0, late)
        _, stamps = insert_burst(arrival, stamps, START + 3 * HOUR + at, size, oldest, 15 * MINUTE)
        assert find_boundary(stamps, 3, 300_000) == (stamps >= START + 3 * HOUR).argmax()


@pytest.mark.parametrize(("at", "size"), BURSTS)
@pytest.mark.parametrize("ahead", [10_000, 10 * MINUTE, 2 * HOUR, 400 * DAY])
@pytest.mark.parametrize("late", [0, 0.2])
def test_late_and_fast_records_are_distinguished(at: int, size: int, ahead: int, late: float) -> None:
    """Few records that arrived more than `max_skew` before or after a boundary are on its wrong side."""
    for seed, an_hour in enumerate((600, 3600)):
        arrival, stamps = simulate(seed, an_hour, ahead, 0.2, late)
        time = START + 3 * HOUR
        arrival, stamps = insert_burst(arrival, stamps, time + at, size, 3 * HOUR, 15 * MINUTE)
        offset, right = find_boundary(stamps, 3, 300_000), int(np.searchsorted(arrival, time))
        displaced = arrival[min(offset, right) : max(offset, right)]
        assert (np.abs(displaced - time) > 300_000).sum() <= 8


def test_late_records_among_few_others_do_not_change_kafkas_answer() -> None:
    one_an_hour = [START + 40 * MINUTE, START + HOUR + 40 * MINUTE, START + 5 * MINUTE, START + 2 * HOUR + 40 * MINUTE]
    assert find_boundary(one_an_hour, 1, 300_000) == 1
    ten_an_hour = [START + n * 6 * MINUTE for n in range(20)]
    resent = [*ten_an_hour, START + 400 * DAY, *ten_an_hour]
    assert [find_boundary(resent, hour, 300_000) for hour in (1, 2)] == [10, 41]
    assert find_boundary([*ten_an_hour, *ten_an_hour], 1, 300_000) == 10


def test_clock_that_all_producers_share_is_right() -> None:
    _, stamps = simulate(4, 3600, 0, 0)
    local = stamps + 2 * HOUR
    assert [find_boundary(local, hour + 2, 300_000) for hour in range(1, 4)] == [
        find_boundary(stamps, hour, 300_000) for hour in range(1, 4)
    ]


def test_records_of_one_batch_vote_once_a_minute() -> None:
    offsets = np.arange(1000)
    sample = Sample.take(offsets, START + offsets * 10, offsets // 100, 1000)
    assert sample.offsets.tolist() == [0, 100, 200, 300, 400, 500, 600, 700, 800, 900]
    over_an_hour = Sample.take(offsets, START + offsets * 3600, offsets // 100, 1000)
    assert (len(over_an_hour.offsets), over_an_hour.end) == (128, 128)


def test_records_without_a_stamp_have_no_vote() -> None:
    _, stamps = simulate(5, 3600, 0, 0)
    stamps[np.arange(len(stamps)) % 10 > 2] = -1
    offset = find_boundary(stamps, 2, 300_000)
    assert stamps[offset] >= START + 2 * HOUR
    assert stamps[:offset].max() < START + 2 * HOUR


def test_searches_are_short() -> None:
    """In a log of 180,000 records, of which a fifth is stamped in another year."""
    arrival, stamps = simulate(6, 30_000, 400 * DAY, 0.2)
    first = int((stamps >= START + 3 * HOUR).nonzero()[0][0])
    time, reads = START + 3 * HOUR, 0
    search = search_boundary(time, 300_000, OffsetAtTime(first, int(stamps[first])), len(stamps))
    position = next(search)
    boundary = None
    while boundary is None:
        reads, rest = reads + 1, np.arange(position, len(stamps))
        try:
            position = search.send(Sample.take(rest, stamps[rest], rest, len(stamps)))
        except StopIteration as end:
            boundary = end.value
    assert boundary.offset == pytest.approx(np.searchsorted(arrival, time), abs=5)
    assert reads <= 20


def test_first_record_from_a_fast_clock_does_not_open_the_feed_late() -> None:
    for ahead in (2 * HOUR, 400 * DAY):
        arrival, stamps = simulate(7, 60, 0, 0)
        stamps[0] += ahead
        world = World(list(map(int, stamps)), START + 7 * HOUR)
        assert world.state.first_window == START
        world.pin()
        bounds = [0, *(int(np.searchsorted(arrival, START + n * HOUR)) for n in range(1, 6))]
        assert [world.find_window(START + n * HOUR) for n in range(5)] == [Range(a, b) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("an_hour", [20, 60, 600])
@pytest.mark.parametrize("ahead", [2 * MINUTE, 55 * MINUTE, 2 * HOUR, 400 * DAY])
@pytest.mark.parametrize("late", [0, 0.2])
def test_no_hour_is_empty_and_hourly_runs_and_catch_ups_agree(an_hour: int, ahead: int, late: float) -> None:
    """Hourly runs and one catch-up; where few records tell, to within a few."""
    for seed in range(3):
        arrival, stamps = simulate(seed, an_hour, ahead, 0.2, late)
        hours = [START + n * HOUR for n in range(HOURS - 1)]
        steady, caught_up = World([], START, opens=START), World(stamps.tolist(), START + HOURS * HOUR, opens=START)
        for hour in hours:
            steady.now = hour + HOUR + 10 * MINUTE
            steady.log.stamped = stamps[: np.searchsorted(arrival, steady.now)].tolist()
            steady.pin()
        caught_up.pin()
        for hour in hours:
            ranges = [world.find_window(hour) for world in (steady, caught_up)]
            right = np.searchsorted(arrival, [hour, hour + HOUR])
            for range_ in ranges:
                assert range_ is not None
                assert range_.span
                assert abs(range_.start - right[0]) <= max(4, an_hour // 12), (seed, hour)
            assert abs(ranges[0].start - ranges[1].start) <= (0 if an_hour == 600 else 4), (seed, hour)  # type: ignore


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
