"""The state of one window: landed in full or from the origin on, retired, partial, held, pending, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.model.kafka import Key, OpenTransaction, Range
from sluice.pipelines.model.plans import NO_LOSSES, Losses
from sluice.pipelines.util.documents import Derived, Flat, Internal
from sluice.pipelines.util.units import many


class Standing(StrEnum):
    LANDED = "landed"
    FROM_ORIGIN = "from the origin on"
    RETIRED = "retired"
    PARTIAL = "partial"
    HELD = "held"
    PENDING = "pending"
    FAILED = "failed"
    RUNNING = "running"
    OPEN = "not closed"


@dataclass(frozen=True, slots=True)
class PendingPart:
    """The pending ranges of one partition in a window. `ranges` is None while a boundary of the window is not resolved.

    `held_at` is the last stable offset if it lies below the window's end; `held_by` is the transaction that holds it,
    if known.
    """

    key: Flat[Key]
    ranges: tuple[Range, ...] | None
    held_at: int | None = None
    held_by: OpenTransaction | None = None

    @property
    def span(self) -> int | None:
        return None if self.ranges is None else sum(r.span for r in self.ranges)


@dataclass(frozen=True, slots=True)
class WindowStanding:
    """One window by its start (ms): `accounted` of its `offsets` are accounted for.

    `offsets` is None while a boundary is not resolved. `batch` is the one that works on the window, or failed. Offsets
    of former lives are in `losses` only. `against`: a boundary was decided against a record's stamp.
    """

    start: Internal[int]
    state: Standing
    accounted: int
    offsets: int | None
    pending: tuple[PendingPart, ...] = ()
    batch: int | None = None
    losses: Flat[Losses] = NO_LOSSES
    against: Internal[bool] = False
    window: str = ""
    """Its name."""

    @property
    def empty(self) -> Derived[bool]:
        """Returns whether the window is complete and no record arrived in it, in any life of its partitions."""
        return self.state is Standing.LANDED and self.offsets == 0 and self.losses == NO_LOSSES


def describe_empty(against: bool) -> str:
    """Returns why a window has no offsets. `against`: a boundary of it was decided against a record's stamp."""
    return "by most records' stamps, no record arrived in it" if against else "no record arrived in it"


def describe_complete(s: WindowStanding, accounted: str = "") -> str:
    """Returns the sentence for a complete window: empty or `accounted` for, and its losses."""
    name = f"window {s.window} is complete"
    if s.empty:
        return f"{name} and empty: {describe_empty(s.against)}"
    return f"{name}{accounted}, but {s.losses}" if str(s.losses) else f"{name}{accounted}"


def describe_pending(pending: Sequence[PendingPart], limit: int = 3) -> str:
    """`orders:1 lacks [0, 30); 4 more lack 120 offsets`; partitions that a transaction holds come first."""
    if not pending:
        return "no run has read it"
    if all(o.ranges is None for o in pending):
        return f"its end is not resolved in {many(len(pending), 'partition')}"
    first = sorted(pending, key=lambda o: o.held_at is None)
    first, rest = first[:limit], first[limit:]
    texts = [_describe_part(o) for o in first]
    if rest:
        texts.append(f"{len(rest)} more lack {many(sum(o.span or 0 for o in rest), 'offset')}")
    return "; ".join(texts)


def _describe_part(o: PendingPart) -> str:
    if o.ranges is None:
        return f"{o.key}: its end is not resolved"
    more = f" and {len(o.ranges) - 1} more ranges" if len(o.ranges) > 1 else ""
    holder = "" if o.held_at is None else f", held at {o.held_at:,} by {o.held_by or 'an open transaction'}"
    return f"{o.key} lacks {o.ranges[0]}{more}{holder}"
