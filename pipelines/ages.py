"""How old what a feed owes is: the stamp of the record at a position, without reading any record.

Kafka is asked for first records by time, all partitions at once. A position at a pinned boundary, which is where a
feed stands that lands whole windows, is found by the first question; the others by bisecting the window they are in.
"""

from __future__ import annotations

from bisect import bisect_right
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
    """The record at `position` is stamped between `low` and `high` (ms)."""

    position: int
    low: int
    high: int
    asked: bool = False
    exact: bool = False

    @property
    def question(self) -> int:
        """First where its window begins; then the middle."""
        return (self.low + self.high) // 2 if self.asked else self.low

    def done(self, now: int) -> bool:
        return self.exact or (self.asked and self.high - self.low <= max(1000, (now - self.low) // _FINENESS))

    def hear(self, hit: OffsetAtTime | None) -> None:
        time, first, self.asked = self.question, not self.asked, True
        if hit is None:
            self.high = time
        elif hit.offset == self.position or (first and hit.offset > self.position):
            self.low, self.exact = hit.timestamp, True
        elif hit.offset > self.position:
            self.high = time
        else:
            # A record before the position that is stamped after all of this tells nothing more.
            self.low, self.exact = (self.low, True) if hit.timestamp >= self.high else (hit.timestamp, False)


def _search(state: State, key: Key, position: int, now: int) -> _Search:
    """Between the boundaries around the position."""
    pins = state.boundaries.get(key, NO_PINS)
    at = bisect_right(pins.offsets, position)
    low = pins.times[at - 1] if at else 0
    high = pins.times[at] if at < len(pins) else now
    return _Search(position, low, max(low, high))
