"""How old what a feed owes is: the stamp of the record at a position, without reading any record.

Kafka is asked for first records by time, all partitions at once. A position at a pinned boundary, which is where a
feed stands that lands whole windows, is found by the first question; the others by bisecting the window they are in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.fold import NO_PINS
from sluice.pipelines.ports import Cluster
from sluice.pipelines.values import Key, OffsetAtTime

QUESTIONS = 8
"""Requests to each leader at most, however many partitions."""
_FINENESS = 16
"""An age is told to a 16th of it; never younger than it is, where stamps are in order."""


def stamps(cluster: Cluster, state: State, positions: Mapping[Key, int], now: int) -> dict[Key, int]:
    """When (ms) the first record at or above each position was stamped, or shortly before; left out: no such record.

    Where stamps are out of order, the start of the position's window may serve: nobody knows better without reading.
    """
    searches = {k: _search(state, k, position, now) for k, position in positions.items()}
    for _ in range(QUESTIONS):
        open_ = {k: s for k, s in searches.items() if not s.done(now)}
        if not open_:
            break
        found = cluster.offsets_at({k.tp: s.question for k, s in open_.items()})
        for key, search in open_.items():
            search.hear(found.get(key.tp))
    return {k: s.low for k, s in searches.items() if s.low}


@dataclass(slots=True)
class _Search:
    """The record at `position` is stamped between `low` and `high` (ms), and most likely at `hint` or soon after."""

    position: int
    hint: int
    low: int
    high: int
    asked: bool = False
    exact: bool = False

    @property
    def question(self) -> int:
        """The hint, then the log's first record where nothing is known before the position, then the middle."""
        return (self.low and (self.low + self.high) // 2) if self.asked else self.hint

    def done(self, now: int) -> bool:
        return self.exact or (self.asked and self.high - self.low <= max(1000, (now - self.low) // _FINENESS))

    def hear(self, hit: OffsetAtTime | None) -> None:
        time, first, self.asked = self.question, not self.asked, True
        if hit is None or hit.offset > self.position:  # the record is older than that, or there is none
            self.high, self.exact = time, time == 0
            self.low = hit.timestamp if hit and self.exact else self.low
        elif hit.offset == self.position:
            self.low, self.exact = hit.timestamp, True
        elif hit.timestamp >= self.high:  # a record before the position, stamped after all of this, hides the rest
            self.low, self.exact = (time if first else self.low), True
        else:
            self.low = max(hit.timestamp, 1)


def _search(state: State, key: Key, position: int, now: int) -> _Search:
    """Between the boundaries around the position. Where one is just there, a late record may be older than it."""
    pins = state.boundaries.get(key, NO_PINS)
    before, at = bisect_left(pins.offsets, position), bisect_right(pins.offsets, position)
    low = pins.times[before - 1] if before else 0
    hint = pins.times[at - 1] if at else 0
    high = pins.times[at] if at < len(pins) else now
    return _Search(position, hint, low, max(hint, high))
