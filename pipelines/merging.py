"""Parts of slices that follow each other, written anew as parts of one slice: every row as it was, in its order.

Promises: a part is read only while it is what the ledger says, by its SHA-256; what was written is read back and
compared, row by row, with what it was made of; memory holds a few row groups, whatever the parts hold. All else is as
in landing: settings, folders, names, what a file says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from threading import Event

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines import layout
from sluice.pipelines.errors import Failed, ProofFailed
from sluice.pipelines.feed import LandingSettings
from sluice.pipelines.formats import fixed, int64s
from sluice.pipelines.landing import PartWriter, Target
from sluice.pipelines.ports import Lake
from sluice.pipelines.proof import check_account, sha256
from sluice.pipelines.values import Counts, Part, PartKind, Receipt, Slice

ROW_GROUP_BYTES = 24 << 20
"""Rows in memory that become a row group: the most that landing takes."""
READ_BYTES = 2 << 20
"""Rows that are decoded at once, of one file."""
MERGE_BYTES = 128 << 20
"""What one merge takes, at most, of rows that are not huge."""
Rows = Iterator[pa.RecordBatch]


@dataclass(frozen=True)
class Merge:
    """Receipts of slices that follow each other without a gap; `slice` takes their place."""

    receipts: tuple[Receipt, ...]

    @cached_property
    def slice(self) -> Slice:
        first, last = self.receipts[0].slice, self.receipts[-1].slice
        return replace(first, end=last.end, leader_epoch=last.leader_epoch, estimated_bytes=self.bytes)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(p for r in self.receipts for p in r.parts)

    @cached_property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.parts)

    @property
    def files_after(self) -> int:
        """One of each kind in each folder."""
        return len({(p.kind, p.path.rpartition("/")[0]) for p in self.parts})


@dataclass(frozen=True, slots=True)
class Merger:
    """Carries out the merges of one batch, in several threads at once. Once `stop` is set they end, with Failed."""

    lake: Lake
    feed: str
    batch: int
    plan_hash: str
    attempt: str
    settings: LandingSettings
    stop: Event

    def merge(self, m: Merge) -> Receipt:
        """The receipt of the slice whose parts are staged. One that fails leaves none behind.

        Raises ProofFailed, LakeFull, LakeUnavailable.
        """
        for part in m.parts:
            self._check_source(part)
        writers: list[PartWriter] = []
        try:
            for kind in PartKind:
                self._write(m, kind, writers)
            made = self._receipt(m, tuple(p for w in writers for p in w.close()))
            for kind in PartKind:
                self._check_same(m, made, kind)
        except BaseException:
            for writer in writers:
                with suppress(Exception):
                    writer.abandon()
            raise
        return made

    def _check_source(self, part: Part) -> None:
        with suppress(FileNotFoundError), self.lake.open(part.path) as file:
            if sha256(file) == part.sha256:
                return
        raise ProofFailed(
            f"{part.path} is not the file that the ledger tells of: nothing is merged with it",
            remedy=f"see what else is: sluice audit {self.feed} --hashes; then bring it back from a backup, or land "
            "its offsets anew with --replace",
        )

    def _write(self, m: Merge, kind: PartKind, writers: list[PartWriter]) -> None:
        target = Target(self.feed, self.batch, self.plan_hash, self.attempt, m.slice, kind)
        writer: PartWriter | None = None
        for rows in self._rows(m.receipts, kind, _visible):
            if writer is None:
                schema = rows.schema.remove_metadata()
                writer = PartWriter(self.lake, target, schema, self.settings, ROW_GROUP_BYTES)
                writers.append(writer)
            writer.write(rows)

    def _receipt(self, m: Merge, parts: tuple[Part, ...]) -> Receipt:
        """All classes as they were; what came over the wire, too."""
        last, came = m.receipts[-1], sum(r.input_bytes for r in m.receipts)
        counts = sum((r.counts for r in m.receipts), Counts())
        made = Receipt(m.slice, last.position, counts, parts, self.attempt, came, format=last.format)
        check_account(made)
        return made

    def _check_same(self, m: Merge, made: Receipt, kind: PartKind) -> None:
        before, after = self._rows(m.receipts, kind, _visible), self._rows((made,), kind, _staged)
        if not same_rows(before, after):
            raise ProofFailed(
                f"{m.slice}: the {kind} rows of its merged parts are not those of the {len(m.parts)} parts before",
                remedy="nothing was changed; this is a bug in merging, or a disk that forgets: report it",
            )

    def _rows(self, receipts: Sequence[Receipt], kind: PartKind, place: Callable[[Part], str]) -> Rows:
        """The rows of the receipts' parts of a kind, in offset order."""
        for r in receipts:
            files = [self._of_file(place(p)) for p in r.parts if p.kind is kind]
            # Files by the records' own time lie beside each other in the order, all others one after the other.
            yield from _in_order(files) if r.slice.by_time and len(files) > 1 else chain.from_iterable(files)

    def _of_file(self, path: str) -> Rows:
        with self.lake.open(path) as opened:
            file = pq.ParquetFile(opened)
            for index in range(file.num_row_groups):
                group = file.metadata.row_group(index)
                at_once = max(READ_BYTES * group.num_rows // max(group.total_byte_size, 1), 1)
                for rows in file.iter_batches(min(at_once, 1 << 16), [index], use_threads=False):
                    if self.stop.is_set():
                        raise Failed("merging was ended", remedy="nothing was changed; run it again")
                    yield rows


def _visible(part: Part) -> str:
    return part.path


def _staged(part: Part) -> str:
    return part.staged


def _in_order(files: Sequence[Rows]) -> Rows:
    """The rows of several files that are in offset order each, in that of all. A batch of each is in memory."""
    heads = {file: rows for file in files if (rows := next(file, None)) is not None}
    while heads:
        horizon = min(_offsets(rows)[-1] for rows in heads.values())
        ready = []
        for file, rows in list(heads.items()):
            count = int(np.searchsorted(_offsets(rows), horizon, side="right"))
            ready.append(rows.slice(0, count))
            rest = rows.slice(count) if count < rows.num_rows else next(file, None)
            if rest is None:
                del heads[file]
            else:
                heads[file] = rest
        together = pa.concat_batches(ready)
        yield together.take(fixed(pa.int64(), np.argsort(_offsets(together))))


def _offsets(rows: pa.RecordBatch) -> np.ndarray:
    return int64s(rows.column(rows.schema.get_field_index(layout.offset_column(rows.schema))))


def same_rows(before: Rows, after: Rows) -> bool:
    """Whether both give the same rows in the same order, however they are cut into batches."""
    left, right = next(before, None), next(after, None)
    while left is not None and right is not None:
        both = min(left.num_rows, right.num_rows)
        if not left.slice(0, both).equals(right.slice(0, both)):
            return False
        left = left.slice(both) if left.num_rows > both else next(before, None)
        right = right.slice(both) if right.num_rows > both else next(after, None)
    return left is None and right is None
