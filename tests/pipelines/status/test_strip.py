"""The standing of windows by the ledger alone, and the windows of a strip."""

from __future__ import annotations

import pytest

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.entries import (
    Boundaries,
    BoundaryEntry,
    KeyRange,
    OriginEntry,
    OriginItem,
    SkipEntry,
)
from sluice.pipelines.model.kafka import Key, OpenTransaction, Range
from sluice.pipelines.status.strip import OutsideFacts, last_windows, standing, standings
from sluice.pipelines.status.window_state import Standing

HOUR = 3_600_000
KEYS = [Key("orders", n, "id-1") for n in range(2)]
HOURLY = WindowSettings()
NOW = 5 * HOUR


def state(*accounted: tuple[int, int, int]) -> State:
    """Returns two partitions, ten offsets an hour from hour 1 to hour 4; `accounted` as (partition, start, end)."""
    origins = tuple(OriginItem(key=k, offset=0, committed=None, why="", opens=HOUR) for k in KEYS)
    pins = tuple(Boundaries(key=k, times=(2 * HOUR, 3 * HOUR, 4 * HOUR), offsets=(10, 20, 30)) for k in KEYS)
    ranges = tuple(KeyRange(key=KEYS[n], range=Range(start, end)) for n, start, end in accounted)
    entries = [OriginEntry(items=origins), BoundaryEntry(items=pins), SkipEntry(ranges=ranges, reason="")]
    return State().extend(entries)


def test_window_without_pending_offsets_is_landed() -> None:
    statuses = standings(state((0, 0, 30), (1, 0, 13)), HOURLY, [HOUR, 2 * HOUR, 3 * HOUR], NOW, OutsideFacts())
    assert [s.state for s in statuses] == [Standing.LANDED, Standing.PARTIAL, Standing.PARTIAL]
    assert [(s.accounted, s.offsets) for s in statuses] == [(20, 20), (13, 20), (10, 20)]
    assert [o.ranges for s in statuses for o in s.pending] == [(Range(13, 20),), (Range(20, 30),)]


def test_facts_outside_ledger_refine_window_status() -> None:
    transaction = OpenTransaction(12, 7, 0)
    nothing = state()
    for facts, expected in (
        (OutsideFacts(), Standing.PENDING),
        (OutsideFacts({KEYS[1]: 12}, {KEYS[1].tp: transaction}), Standing.HELD),
        (OutsideFacts({KEYS[1]: 12}, failed={2 * HOUR: 4}), Standing.FAILED),
        (OutsideFacts({KEYS[1]: 12}, running={2 * HOUR: 5}, failed={2 * HOUR: 4}), Standing.RUNNING),
    ):
        status = standing(nothing, HOURLY, 2 * HOUR, NOW, facts)
        assert status.state is expected
        assert status.batch == {Standing.FAILED: 4, Standing.RUNNING: 5}.get(expected)
    by_partition = standing(
        nothing, HOURLY, 2 * HOUR, NOW, OutsideFacts({KEYS[1]: 12}, {KEYS[1].tp: transaction})
    ).pending
    assert [(o.held_at, o.held_by) for o in by_partition] == [(None, None), (12, transaction)]


def test_closed_window_with_unresolved_end_is_partial_or_pending() -> None:
    caught_up = state((0, 0, 35), (1, 0, 30))
    still_open = standing(caught_up, HOURLY, 4 * HOUR, NOW)
    assert (still_open.state, still_open.accounted, still_open.offsets) == (Standing.OPEN, 5, None)
    later = standing(caught_up, HOURLY, 4 * HOUR, NOW + HOUR)
    assert later.state is Standing.PARTIAL
    assert standing(caught_up, HOURLY, 5 * HOUR, NOW + 2 * HOUR).state is Standing.PENDING
    assert standing(State(), HOURLY, HOUR, NOW).state is Standing.PENDING


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        ("1h", 24, [1, 2, 3, 4, 5]),
        ("1h", 2, [4, 5]),
        ("2h", 24, [0, 2, 4]),
    ],
)
def test_strip_has_newest_windows_up_to_the_open_window(length: str, count: int, expected: list[int]) -> None:
    windows = last_windows(state(), WindowSettings.model_validate(length), NOW, count)
    assert [w // HOUR for w in windows] == expected
    assert not last_windows(State(), HOURLY, NOW, count)
