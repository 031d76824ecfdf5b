"""How one window stands: landed, retired since, partial, held, owed, failed, at work on, or not closed; and who owes
what of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.vocabulary.kafka import Key, OpenTransaction
from sluice.pipelines.vocabulary.ranges import Range


class Standing(StrEnum):
    LANDED = "landed"
    RETIRED = "retired"
    PARTIAL = "partial"
    HELD = "held"
    OWED = "owed"
    FAILED = "failed"
    RUNNING = "running"
    OPEN = "not closed"


@dataclass(frozen=True, slots=True)
class Owes:
    """What one partition still owes of a window. `ranges` is None while a boundary of it is not resolved.

    `held_at`: the stable end, where that lies below the window's end; `held_by`: the transaction that holds it there,
    where it is known.
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
    """One window: its start (ms), and of its offsets how many are accounted for, of how many.

    `span` is None while a boundary is not resolved; `batch` is the one that is at work on it, or failed.
    """

    window: int
    standing: Standing
    done: int
    span: int | None
    owes: tuple[Owes, ...] = ()
    batch: int | None = None
