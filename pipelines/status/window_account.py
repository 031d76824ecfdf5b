"""The account of one window by partition: each offset of its range in one class, from the ledger alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.fold import Accounted
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.ranges import Range, intersect
from sluice.pipelines.model.receipts import Counts, Receipt
from sluice.pipelines.planning import windows


@dataclass(frozen=True, slots=True)
class PartitionAccount:
    """Offsets of one partition in the window. `start` and `end` are None while the boundary is not pinned.

    `counts` are those of the receipts; `lost`, `skipped` and `retired` are numbers of offsets. `pending` is the rest of
    the range; None while its end is not pinned.
    """

    key: Key
    start: int | None
    end: int | None
    counts: Counts
    lost: int = 0
    skipped: int = 0
    retired: int = 0

    @property
    def span(self) -> int | None:
        """The number of offsets in the range."""
        return None if self.start is None or self.end is None else self.end - self.start

    @property
    def pending(self) -> int | None:
        return None if self.span is None else self.span - self.accounted_offsets

    @property
    def accounted_offsets(self) -> int:
        return self.counts.total + self.lost + self.skipped + self.retired


def build_accounts(
    state: State, settings: WindowSettings, window: int, receipts: Iterable[Receipt]
) -> tuple[PartitionAccount, ...]:
    """Returns the account of each partition that the window (its start, ms) has offsets of, from its receipts."""
    counts: dict[Key, Counts] = {}
    for r in receipts:
        counts[r.offset_range.key] = counts.get(r.offset_range.key, Counts()) + r.counts
    keys = sorted({*state.known(), *counts})
    return tuple(_build_account(state, key, settings, window, counts) for key in keys)


def _build_account(
    state: State, key: Key, settings: WindowSettings, window: int, counts: Mapping[Key, Counts]
) -> PartitionAccount:
    start = windows.find_boundary(state, key, window)
    end = windows.find_boundary(state, key, window + settings.length)

    def count(ranges: Accounted) -> int:
        within = () if start is None or end is None else intersect(ranges.get(key, ()), Range(start, end))
        return sum(r.span for r in within)

    lost, skipped, retired = (count(ranges) for ranges in (state.lost, state.skipped, state.retired))
    return PartitionAccount(key, start, end, counts.get(key, Counts()), lost, skipped, retired)
