"""Dead letters: quarantined records, sent to a topic in the transaction of the commit.

Design: docs/developers/design/dead-letters.md

A mark `n` in Kafka is written in one transaction with the offsets and the letters of all publications below entry n.
So a commit sends the letters of publications since the newest mark.

Guarantees: an offset's letter is in at most one transaction that took effect, through crashes, refusals, lost answers,
merges, replays and re-landing. A record that came into quarantine between two commits is in the second one, unless it
was landed again from an offset range whose letters were sent. Only rows that the ledger names are sent, checked by
SHA-256. Memory holds a few megabytes of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import LakeUnavailable, ProofFailed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.landed_rows import in_order, read_rows
from sluice.pipelines.landing.proof import hash_file
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ledger.fold import by_key
from sluice.pipelines.model.kafka import Key, Range, intersect, subtract
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part, PartKind, Receipt
from sluice.pipelines.ports import DeadLetter, Lake
from sluice.pipelines.records.rows.row_format import WITHHELD, inside
from sluice.pipelines.schema.arrays import fixed_width, int64s

_READ_ROWS = 1 << 12
"""The most rows of a file that are made letters at once."""
_WHERE = ("topic", "partition", "offset", "timestamp")
_WHY = ("stage", "reason", "field", "expectation", "detail", "batch")
_HEADERS = (*_WHERE, *_WHY, "feed", "contract")
_COLUMNS = ["key", "value", "headers", *_WHERE, *_WHY, "contract", WITHHELD.name]


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a feed's dead letters go, and the lake that holds their records."""

    feed: str
    topic: str
    lake: Lake

    @classmethod
    def of(cls, feed: Feed, lake: Lake) -> Outlet | None:
        """Returns None for a feed without dead letters."""
        return cls(feed.name, feed.dead_letters.topic, lake) if feed.dead_letters else None


@dataclass(frozen=True, slots=True)
class LetterSource:
    """Files of an offset range's quarantined rows, and the offsets whose letters are pending."""

    offset_range: OffsetRange
    parts: tuple[Part, ...]
    ranges: tuple[Range, ...]


def list_pending_letters(ledger: Ledger, state: State, since: int) -> tuple[LetterSource, ...]:
    """Returns the sources of the letters that a commit at `state` must send if the newest mark is `since`.

    They are in log order, and empty when nothing is pending. `ranges` separate the due rows of a file from its others.
    """
    first: list[tuple[Key, Range]] = []
    again: list[tuple[Key, Range]] = []
    lying: list[Receipt] = []
    for batch in state.batches.published_since(since):
        # What replaces a part is published later than the part, so nothing due lies in an older batch.
        entry = ledger.publication(batch)
        lying += [r for r in state.receipts(batch.published or 0, entry) if r.of(PartKind.QUARANTINED)]
        (again if batch.request.replace else first).extend(_refused_ranges(batch, entry))
    # What lost entries had committed has no letters to come: they went with its offsets.
    uncommitted = ((key, rest) for key, r in first for rest in subtract(r, [Range(0, state.ahead.get(key, 0))]))
    due = by_key((*uncommitted, *_ranges_without_letter(ledger, state, again, since)))
    return tuple(sorted(_sources(lying, due), key=lambda s: (s.offset_range.key, s.offset_range.start)))


def build_letters(outlet: Outlet, ledger: Ledger, state: State, since: int, partitions: int) -> Letters | None:
    """The pending letters, for a topic of `partitions` partitions; None when there are none."""
    sources = list_pending_letters(ledger, state, since)
    return Letters(outlet, sources, partitions) if sources else None


def _refused_ranges(batch: Batch, entry: PublishEntry) -> list[tuple[Key, Range]]:
    """The offset ranges in which the batch quarantined records when it landed them."""
    receipts = () if batch.rewrites else entry.receipts
    return [(r.offset_range.key, r.offset_range.range) for r in receipts if r.counts.quarantined]


def _ranges_without_letter(
    ledger: Ledger, state: State, again: Sequence[tuple[Key, Range]], since: int
) -> Iterator[tuple[Key, Range]]:
    """The ranges that were landed again and of which no letter can have been sent."""
    before = [b for b in state.batches.values() if b.published is not None and b.published <= since] if again else []
    landed = (b for b in before if not b.rewrites)
    refused = by_key(item for b in landed for item in _refused_ranges(b, ledger.publication(b)))
    return ((key, rest) for key, r in again for rest in subtract(r, refused.get(key, ())))


def _sources(lying: Iterable[Receipt], due: Mapping[Key, Sequence[Range]]) -> Iterator[LetterSource]:
    """The quarantined parts of the receipts, where letters of them are due."""
    for r in lying:
        if ranges := intersect(due.get(r.offset_range.key, ()), r.offset_range.range):
            yield LetterSource(r.offset_range, r.of(PartKind.QUARANTINED), ranges)


# -- the letters themselves


class Letters:
    """The letters of the sources, made one by one as they are taken. `taken` counts them.

    A letter is the record as quarantine has it (key, value, headers, timestamp) with our headers after its own. It goes
    to the partition with its record's number, modulo the `partitions` of the topic, so that order is kept.
    """

    def __init__(self, outlet: Outlet, sources: Sequence[LetterSource], partitions: int) -> None:
        self._outlet, self._sources, self._partitions = outlet, sources, partitions
        self.topic = outlet.topic
        self.taken = 0

    def __iter__(self) -> Iterator[DeadLetter]:
        """Raises LakeUnavailable for a part that is gone, ProofFailed for one that the ledger contradicts."""
        for source in self._sources:
            files = [_rows(self._outlet.lake, part, source.ranges) for part in source.parts]
            # Files cut by record time, and those of outputs, overlap in offsets; all others follow one another.
            overlapping = source.offset_range.by_time or any(p.output for p in source.parts)
            for rows in in_order(files) if overlapping else chain.from_iterable(files):
                for row in rows.to_pylist():
                    self.taken += 1
                    yield self._letter(row)

    def _letter(self, row: Mapping[str, Any]) -> DeadLetter:
        source = f"{row['topic']}:{row['partition']}:{row['offset']}"
        theirs = tuple((h["key"], h["value"]) for h in row["headers"] or ())
        stamp = -1 if row["timestamp"] is None else row["timestamp"]
        where = row["partition"] % self._partitions
        value = row["value"] if row.get(WITHHELD.name) is None else None
        return DeadLetter(where, stamp, row["key"], value, (*theirs, *self._headers(row)), source)

    def _headers(self, row: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
        for name in _HEADERS:
            value = self._outlet.feed if name == "feed" else row.get(name)
            yield f"sluice.{name}", b"" if value is None else str(value).encode()
        if (size := row.get(WITHHELD.name)) is not None:
            yield f"sluice.{WITHHELD.name}", str(size).encode()


@contextmanager
def _open_part(lake: Lake, part: Part) -> Iterator[BinaryIO]:
    """The part, visible or still staged: the run that published it may have died before showing it."""
    file: BinaryIO | None = None
    for path in (part.path, part.staged):
        with suppress(FileNotFoundError):
            file = lake.open(path)
            break
    if file is None:
        raise _gone(part)
    try:
        with file:
            if hash_file(file) != part.sha256:
                raise _not_itself(part)
            file.seek(0)
            yield file
    except FileNotFoundError:
        raise _gone(part) from None
    except (pa.ArrowException, OSError):
        raise _not_itself(part) from None


def _rows(lake: Lake, part: Part, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
    """The due rows of a part, in its order, a few at a time."""
    with _open_part(lake, part) as opened:
        for rows in read_rows(opened, part, _COLUMNS, _READ_ROWS):
            stamps = rows.column("timestamp").cast(pa.int64())
            stamped = rows.set_column(rows.schema.get_field_index("timestamp"), "timestamp", stamps)
            due = np.flatnonzero(inside(int64s(rows.column("offset")), ranges))
            if len(due):
                yield stamped.take(fixed_width(pa.int64(), due))


def _gone(part: Part) -> LakeUnavailable:
    return LakeUnavailable(
        f"{part.path} was removed before its dead letters were sent: it is being merged, replayed or landed again",
        remedy="nothing was sent; the next run tries again. If this error repeats, run: sluice audit"
        f" {paths.feed_of(part.path)}",
    )


def _not_itself(part: Part) -> ProofFailed:
    return ProofFailed(
        f"{part.path} is not the file that the ledger records: its dead letters cannot be sent",
        remedy=f"nothing was sent, and landing continues; {paths.find_part_remedy(paths.feed_of(part.path))}",
    )
