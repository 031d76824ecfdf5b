"""The account of offsets: how many are in each class. Each offset from a partition's origin on is in exactly one.

Receipts count the offsets that were read (`Counts`). The ledger records ranges that no receipt covers: lost, skipped or
retired. All others are pending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.ledger.fold import State
from sluice.pipelines.model.kafka import Key, Range, intersect
from sluice.pipelines.model.receipts import Counts
from sluice.pipelines.util.documents import Flat


class OffsetClass(StrEnum):
    """The class of an offset, or the reason why it has none yet."""

    LANDED = "landed"
    QUARANTINED = "quarantined"
    NO_RECORD = "no record"
    DROPPED = "dropped by policy"
    ERASED = "erased"
    LOST = "lost"
    SKIPPED = "skipped"
    RETIRED = "retired"
    BELOW_ORIGIN = "below the origin"
    RESERVED = "reserved by a live batch"
    PENDING = "not read yet"
    UNKNOWN_PARTITION = "no partition of this feed"


def list_unread(state: State, key: Key) -> Mapping[OffsetClass, tuple[Range, ...]]:
    """Returns the ranges of a partition that are accounted for without a receipt, by class."""
    classes = {OffsetClass.LOST: state.lost, OffsetClass.SKIPPED: state.skipped, OffsetClass.RETIRED: state.retired}
    return {name: ranges.get(key, ()) for name, ranges in classes.items()}


@dataclass(frozen=True, slots=True)
class OffsetAccount:
    """The number of offsets in each class.

    `counts` are those that were read. `lost` were gone from Kafka before, `skipped` was a decision, and the rows of
    `retired` ones have been removed.
    """

    counts: Flat[Counts]
    lost: int = 0
    skipped: int = 0
    retired: int = 0

    @property
    def total(self) -> int:
        return self.counts.total + self.lost + self.skipped + self.retired

    def __add__(self, other: OffsetAccount) -> OffsetAccount:
        lost, skipped, retired = self.lost + other.lost, self.skipped + other.skipped, self.retired + other.retired
        return OffsetAccount(self.counts + other.counts, lost, skipped, retired)


def build_account(state: State, key: Key, counts: Counts, within: Range | None = None) -> OffsetAccount:
    """Returns the account of a partition, or of a range `within` it. `counts` are those of its receipts there."""
    lost, skipped, retired = (
        sum(r.span for r in (ranges if within is None else intersect(ranges, within)))
        for ranges in list_unread(state, key).values()
    )
    return OffsetAccount(counts, lost, skipped, retired)
