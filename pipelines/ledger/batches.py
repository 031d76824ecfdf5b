"""The batches of a ledger: live ones and the newest finished ones in full, and a few columns of all others.

The request and the outcome of a finished batch are stored permanently, in a few bytes. Its hash, owner and planning
time are in the log, from which `Ledger.recall` reads them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import merge

from sluice.pipelines.ledger.columns import NONE
from sluice.pipelines.model.plans import Plan, Request, RequestKind
from sluice.pipelines.model.receipts import Owner
from sluice.pipelines.util.documents import AsText, Derived, Internal

KEPT = 100
"""The number of newest finished batches that are stored in full."""
FORGOTTEN = Owner("", "", "", 0, 0)
"""Stands for an owner that only the log knows."""


class BatchStatus(StrEnum):
    PLANNED = "planned"
    PUBLISHED = "published"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Batch:
    """One plan and its outcome. `published` is the number of its publish entry, `failed` counts its unproven offset
    ranges.

    `plan` is set while the batch is live. Later, `Ledger.plan` reads it from entry `id`. Of older batches, `hash` is
    empty, `owner` FORGOTTEN and `planned_at` 0: `Ledger.recall` reads them, too.
    """

    id: int
    plan: Internal[Plan | None]
    request: AsText[Request]
    hash: str
    owner: Owner
    status: BatchStatus
    planned_at: int
    published: int | None = None
    failed: int = 0
    rows: int = 0

    @property
    def merges(self) -> bool:
        """Returns whether it is a compaction: it merges landed parts into fewer files, and lands nothing new."""
        return self.request.kind is RequestKind.COMPACT

    @property
    def rewrites(self) -> bool:
        """Returns whether it rewrites landed parts. It reads nothing from Kafka and adds nothing to the quarantine."""
        return self.request.kind in (RequestKind.COMPACT, RequestKind.REPLAY, RequestKind.ERASE)

    @property
    def offsets(self) -> Derived[int]:
        """Offsets that the live plan holds."""
        return self.plan.offsets if self.plan else 0


COLUMNS = ("id", "published", "failed", "rows", "request", "window", "until")


class BatchHistory:
    """Columns of finished batches, in order of their ids. `requests` are the distinct requests without windows; the
    column `request` holds indexes into them."""

    __slots__ = ("_places", "columns", "requests")

    def __init__(self, columns: Iterable[array[int]] = (), requests: Iterable[Request] = ()) -> None:
        self.columns = list(columns) or [array("q") for _ in COLUMNS]
        self.requests = list(requests)
        self._places = {r: i for i, r in enumerate(self.requests)}

    def copy(self) -> BatchHistory:
        return BatchHistory((c[:] for c in self.columns), self.requests)

    @property
    def ids(self) -> array[int]:
        return self.columns[0]

    def __eq__(self, other: object) -> bool:
        """The order of `requests` does not matter."""
        return isinstance(other, BatchHistory) and self.ids == other.ids and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def add(self, b: Batch) -> None:
        """Add a finished batch."""
        bare = replace(b.request, window=None, until=None)
        if (request_number := self._places.get(bare)) is None:
            request_number = self._places[bare] = len(self.requests)
            self.requests.append(bare)
        values = (b.published, b.failed, b.rows, request_number, b.request.window, b.request.until)
        at = bisect_left(self.ids, b.id)
        for column, value in zip(self.columns, (b.id, *values), strict=True):
            column.insert(at, NONE if value is None else value)

    def find(self, id: int) -> Batch | None:
        at = bisect_left(self.ids, id)
        return self.at(at) if at < len(self.ids) and self.ids[at] == id else None

    def at(self, index: int) -> Batch:
        of = [None if (v := c[index]) == NONE else v for c in self.columns]
        id, published, failed, rows, request, window, until = of
        bare = self.requests[request or 0]
        restored = bare if window is None and until is None else replace(bare, window=window, until=until)
        status = BatchStatus.ABANDONED if published is None else BatchStatus.PUBLISHED
        return Batch(
            id or 0, None, restored, "", FORGOTTEN, status, 0, published, failed or 0, rows or 0
        )  # fmt: skip

    def _all(self) -> list[Batch]:
        return [self.at(i) for i in range(len(self.ids))]

    def where(self, name: str, above: int) -> Iterator[Batch]:
        """Returns the batches whose column is above a number, in order."""
        column = self.columns[COLUMNS.index(name)]
        return (self.at(i) for i, value in enumerate(column) if value > above)


class Batches(Mapping[int, Batch]):
    """Every batch by its id, oldest first. To avoid reading all of them use `live`, `published_since`,
    `failed_in_part`, or a part of `newest_first`."""

    __slots__ = ("_finished", "_shared", "held", "past")

    def __init__(self, batches: Iterable[Batch] = (), past: BatchHistory | None = None) -> None:
        self.past = past or BatchHistory()
        self._shared = False
        self.held: dict[int, Batch] = {}
        self._finished = 0
        for b in sorted(batches, key=lambda b: b.id):
            self.become(b)

    def copy(self) -> Batches:
        out = Batches()
        out.past, out.held, out._finished = self.past, dict(self.held), self._finished
        out._shared = True  # copied before the first addition
        return out

    # -- queries

    def __getitem__(self, id: int) -> Batch:
        if (batch := self.held.get(id)) is None and (batch := self.past.find(id)) is None:
            raise KeyError(id)
        return batch

    def __iter__(self) -> Iterator[int]:
        return merge(self.past.ids, self.held)

    def __len__(self) -> int:
        return len(self.past.ids) + len(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batches) and (self.held, self.past) == (other.held, other.past)

    __hash__ = None  # type: ignore[assignment]

    def newest_first(self, before: int | None = None) -> Iterator[Batch]:
        """Returns all batches, or those with ids below `before`, newest first."""
        ids = merge(reversed(self.past.ids), reversed(self.held), reverse=True)
        return (self[i] for i in ids if before is None or i < before)

    def live(self) -> tuple[Batch, ...]:
        return tuple(b for b in self.held.values() if b.status is BatchStatus.PLANNED)

    def published_since(self, number: int) -> list[Batch]:
        """Returns the batches whose publish entry is above a number, oldest first."""
        recent = (b for b in self.held.values() if b.published is not None and b.published > number)
        return sorted((*self.past.where("published", number), *recent), key=lambda b: b.id)

    def failed_in_part(self) -> list[Batch]:
        """Returns the published batches with failed offset ranges, oldest first."""
        recent = (b for b in self.held.values() if b.failed and b.published is not None)
        return sorted((*self.past.where("failed", 0), *recent), key=lambda b: b.id)

    def publications(self) -> dict[int, int]:
        """Returns the id of each published batch by the number of its publish entry."""
        ids, published = self.past.columns[:2]
        recent = {b.published: b.id for b in self.held.values() if b.published is not None}
        return {n: i for n, i in zip(published, ids, strict=True) if n != NONE} | recent

    def witness(self) -> str:
        """Returns the id and owner of the newest published batch: together they identify this log."""
        done = (b for b in reversed(self.held.values()) if b.published is not None)
        return next((f"{b.id}/{b.owner.token}" for b in done), "")

    def bears(self, witness: str) -> bool:
        """Returns whether the batch is here as its witness describes it. Also False if it was forgotten since."""
        id, _, token = witness.partition("/")
        batch = self.held.get(int(id)) if id.isdecimal() else None
        return batch is not None and batch.published is not None and batch.owner.token == token

    # -- changes: only by the fold, on its own copy

    def plan(self, b: Batch) -> None:
        self.held[b.id] = b

    def become(self, b: Batch) -> None:
        """Replace a live batch by its new version. Beyond `KEPT`, the oldest finished one moves to `past`."""
        self.held[b.id] = b
        self._finished += b.status is not BatchStatus.PLANNED
        if self._finished > KEPT:
            oldest = next(b for b in self.held.values() if b.status is not BatchStatus.PLANNED)
            if self._shared:
                self.past, self._shared = self.past.copy(), False
            self.past.add(self.held.pop(oldest.id))
            self._finished -= 1

    @property
    def horizon(self) -> int:
        """The id of the oldest batch that is stored in full; 0 while all are."""
        return next(iter(self.held), 0) if len(self.past.ids) else 0


def reverse_batches(newest: Iterable[Batch]) -> Sequence[Batch]:
    """Returns a list of newest-first batches in reverse."""
    return list(newest)[::-1]
