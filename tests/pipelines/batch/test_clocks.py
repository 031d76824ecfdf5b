"""A machine's clock that is ahead of the brokers'."""

from __future__ import annotations

import pytest

from sluice.pipelines.batch.survey import _check_clock
from sluice.pipelines.errors import ClockAhead
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import State
from sluice.testing.cluster import MemoryCluster

HOUR, MINUTE = 3_600_000, 60_000
END = 400_000 * HOUR
FEED = Feed(feed="orders", topics="orders", start="earliest", kafka={"bootstrap": "localhost:9092"})


@pytest.mark.parametrize("lead", [11 * MINUTE, HOUR, 2 * HOUR])
def test_window_that_is_open_by_the_brokers_clock_is_not_closed(lead: int) -> None:
    cluster, now = MemoryCluster(clock_lead=lead), END + 10 * MINUTE
    with pytest.raises(ClockAhead, match="2015-08-19T16:10:00Z, the brokers' about 2015-08-19T1") as error:
        _check_clock(FEED, cluster, State(), now)
    assert "NTP" in error.value.remedy
    assert _check_clock(FEED, cluster, State(boundary_times=(END,)), now) == now, "nothing is left to pin"


@pytest.mark.parametrize(("lead", "at"), [(None, 0), (-HOUR, 0), (0, 0), (20_000, -20_000)])
def test_unknown_clock_or_one_ahead_of_ours_closes_windows(lead: int | None, at: int) -> None:
    now = END + 10 * MINUTE
    assert _check_clock(FEED, MemoryCluster(clock_lead=lead), State(), now) == now + at
