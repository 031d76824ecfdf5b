"""The state of one window: landed, retired, partial, held, pending, failed, running, not closed; and pending ranges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.model.kafka import Key, OpenTransaction, Range


class Standing(StrEnum):
    LANDED = "landed"
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

    key: Key
    ranges: tuple[Range, ...] | None
    held_at: int | None = None
    held_by: OpenTransaction | None = None

    @property
    def span(self) -> int | None:
        return None if self.ranges is None else sum(r.span for r in self.ranges)


@dataclass(frozen=True, slots=True)
class WindowStanding:
    """One window by its start (ms): `done` of its `span` offsets are accounted for.

    `span` is None while a boundary is not resolved. `batch` is the one that works on the window, or failed.
    """

    window: int
    standing: Standing
    done: int
    span: int | None
    pending: tuple[PendingPart, ...] = ()
    batch: int | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether the window is complete and no record arrived in it."""
        return self.standing is Standing.LANDED and self.span == 0
