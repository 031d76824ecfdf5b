"""Writes the parts of adjoining offset ranges again as parts of one range, with every row as it was and in order.

Promises: a part is read only while its SHA-256 is the ledger's. Each written part is read back and compared, row by
row, with its source. Memory holds a few row groups, however large the parts are. Settings, folders, names and file
metadata are as in landing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from threading import Event
from typing import cast

import pyarrow as pa

from sluice.pipelines.errors import Failed, ProofFailed
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.landing.landed_rows import Rows, check_source, compare_rows, in_order, read_part_at
from sluice.pipelines.landing.proof import check_account
from sluice.pipelines.landing.sharing import SharedFiles, UnwrittenRange
from sluice.pipelines.landing.writer import ROW_GROUP_BYTES, PartRole, PartTarget, PartWriter
from sluice.pipelines.model.kafka import Key, Range, intersect, subtract, union
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift, DriftKind, Part, PartKind, Receipt, Tally, sum_counts
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.rows.row_format import without_offsets

MERGE_BYTES = 128 << 20
"""What one merge takes, at most, of rows that are not huge."""


@dataclass(frozen=True)
class Merge:
    """Receipts of offset ranges that follow each other without a gap. `offset_range` covers them all.

    `file` is the first offset range of the file that its rows share with other merges; None: they have their own.
    """

    receipts: tuple[Receipt, ...]
    file: OffsetRange | None = None

    @cached_property
    def offset_range(self) -> OffsetRange:
        first, last = self.receipts[0].offset_range, self.receipts[-1].offset_range
        return replace(first, end=last.end, leader_epoch=last.leader_epoch, estimated_bytes=self.bytes)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(p for r in self.receipts for p in r.parts)

    @cached_property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.parts)


def count_files_after(merges: Iterable[Merge]) -> int:
    """Returns the number of files afterwards: one of each kind in each folder, for each merge or for all that share."""
    return len({(m.file or m.offset_range, p.kind, p.path.rpartition("/")[0]) for m in merges for p in m.parts})


@dataclass(frozen=True, slots=True)
class RewriteContext:
    """Shared by the threads of one batch that read and rewrite parts. Once `stop` is set, they end with
    Failed."""

    lake: Lake
    feed: str
    batch: int
    plan_hash: str
    attempt: str
    settings: LandingSettings
    stop: Event

    def writer(self, s: OffsetRange, role: PartRole, schema: pa.Schema) -> PartWriter:
        """A writer for the offset range's rows of one role."""
        target = PartTarget(self.feed, self.batch, self.plan_hash, self.attempt, s, *role)
        return PartWriter(self.lake, target, schema, self.settings, ROW_GROUP_BYTES)

    def rows(self, receipts: Sequence[Receipt], role: PartRole, locate: Callable[[Part], str]) -> Rows:
        """The rows of the receipts' parts of one role, in offset order."""
        for r in receipts:
            files = [self.rows_of(p, locate(p)) for p in r.of(role.kind) if p.output == role.output]
            # Files by record time are adjacent in the order; all others follow one another.
            yield from in_order(files) if r.offset_range.by_time and len(files) > 1 else chain.from_iterable(files)

    def rows_of(self, part: Part, path: str) -> Rows:
        """The rows of one part, in batches that take little memory."""
        for rows in read_part_at(self.lake, part, path):
            if self.stop.is_set():
                raise Failed("it was ended early", remedy="nothing was changed; run it again")
            yield rows


@dataclass(frozen=True, slots=True)
class Merger:
    """Carries out the merges of one batch. Rows at `erased` offsets are left out."""

    context: RewriteContext
    erased: Mapping[Key, tuple[Range, ...]] = field(default_factory=dict)

    def write(self, merges: Sequence[Merge]) -> list[Receipt]:
        """Stage the parts of merges that share a file, or of one. Raises as `merge`."""
        return [self.merge(m) for m in merges] if merges[0].file is None else self._gather(merges)

    def _gather(self, merges: Sequence[Merge]) -> list[Receipt]:
        """Stage the rows of several partitions in one file of each role, by partition and offset."""
        context, first = self.context, cast(OffsetRange, merges[0].file)
        target = PartTarget(context.feed, context.batch, context.plan_hash, context.attempt, first)
        files = SharedFiles(target, context.settings, context.lake)
        try:
            for m in sorted(merges, key=lambda m: (m.offset_range.partition, m.offset_range.start)):
                for part in m.parts:
                    check_source(context.lake, context.feed, part)
                rows = {
                    role: [batch.replace_schema_metadata(None) for batch in self._read_sources(m, role)]
                    for role in list_roles(m.parts)
                }
                files.add(UnwrittenRange(replace(self._receipt(m, m.parts), parts=()), rows))
            receipts = files.close()
            # Without files, too: else no roll-forward would meet the batch, and hide the replaced parts.
            receipt_files.put(context.feed, context.batch, [*receipts.values()], context.lake)
            for m in merges:
                for role in list_roles(m.parts):
                    self._check_same(m, receipts[m.offset_range], role)
        except BaseException:
            files.abandon()
            raise
        return [receipts[m.offset_range] for m in merges]

    def merge(self, m: Merge) -> Receipt:
        """Stage the parts of one offset range and return its receipt. A failure leaves none behind.

        Raises ProofFailed, LakeFull, LakeUnavailable.
        """
        for part in m.parts:
            check_source(self.context.lake, self.context.feed, part)
        writers: list[PartWriter] = []
        roles = list_roles(m.parts)
        try:
            for role in roles:
                self._write(m, role, writers)
            receipt = self._receipt(m, tuple(p for w in writers for p in w.close()))
            check_account(receipt)
            for role in roles:
                self._check_same(m, receipt, role)
            if not receipt.parts:  # else no roll-forward would meet the batch, and hide the replaced parts
                context = self.context
                context.lake.put(paths.build_replaced_note_path(context.feed, context.batch), b"{}\n")
        except BaseException:
            for writer in writers:
                with suppress(Exception):
                    writer.abandon()
            raise
        return receipt

    def _write(self, m: Merge, role: PartRole, writers: list[PartWriter]) -> None:
        writer: PartWriter | None = None
        for rows in self._read_sources(m, role):
            if writer is None:
                writer = self.context.writer(m.offset_range, role, rows.schema.remove_metadata())
                writers.append(writer)
            writer.write(rows)

    def _read_sources(self, m: Merge, role: PartRole) -> Rows:
        """The rows of the sources that stay."""
        erased = self._list_erased(m)
        for rows in self.context.rows(m.receipts, role, visible_path):
            retained = without_offsets(rows, erased) if erased else rows
            if retained.num_rows:
                yield retained

    def _list_erased(self, m: Merge) -> tuple[Range, ...]:
        now = intersect(self.erased.get(m.offset_range.key, ()), m.offset_range.range)
        return union((*now, *(x for r in m.receipts for x in r.erased)))

    def _receipt(self, m: Merge, parts: tuple[Part, ...]) -> Receipt:
        """The merged receipt: the sums of counts and input bytes, and the tallies and drift of all rows."""
        rs, last = m.receipts, m.receipts[-1]
        erased = self._list_erased(m)
        landed, quarantined = (sum(p.rows for p in parts if p.kind is kind) for kind in PartKind)
        before = sum_counts(rs)
        counts = replace(before, landed=landed, quarantined=quarantined, erased=sum(x.span for x in erased), copies=0)
        if before.copies:  # without an erasure as many as before
            copies = counts.total - m.offset_range.span
            counts = replace(counts, landed=landed - copies, copies=copies)
        tallies, drift = sum_tallies_and_drift(rs, count_landed(parts))
        return Receipt(
            m.offset_range,
            last.position,
            counts,
            parts,
            self.context.attempt,
            sum(r.input_bytes for r in rs),
            format=last.format,
            tallies=tallies,
            drift=drift,
            relanded=union(rest for r in rs for x in r.relanded for rest in subtract(x, erased)),
            mended=union(rest for r in rs for x in r.mended for rest in subtract(x, erased)),
            erased=erased,
            batch_bytes=min((r.batch_bytes for r in rs if r.batch_bytes), default=0),
        )

    def _check_same(self, m: Merge, receipt: Receipt, role: PartRole) -> None:
        before, after = self._read_sources(m, role), self.context.rows((receipt,), role, staged_path)
        if not compare_rows(before, after):
            raise ProofFailed(
                f"{m.offset_range}: the {role.kind} rows of its merged parts are not those of its {len(m.parts)} parts",
                remedy="nothing was changed; this is a bug in merging, or a disk that forgets: report it",
            )


def list_roles(parts: Iterable[Part]) -> list[PartRole]:
    """Returns the roles of the parts, sorted."""
    return sorted({PartRole(p.kind, p.output) for p in parts})


def count_landed(parts: Iterable[Part]) -> Mapping[str, int]:
    """Returns the number of landed rows of each output."""
    rows = Counter[str]()
    for part in parts:
        if part.kind is PartKind.LANDED:
            rows[part.output] += part.rows
    return rows


def sum_tallies_and_drift(
    receipts: Iterable[Receipt], landed: Mapping[str, int]
) -> tuple[tuple[Tally, ...], tuple[Drift, ...]]:
    """The tallies and drift of offset ranges of one format, added up. A field is missing only if none of the `landed`
    rows of its output has it.
    """
    tallies: dict[int, Tally] = {}
    drifts: dict[tuple[DriftKind, str], Drift] = {}
    for r in receipts:
        for t in r.tallies:
            tallies[t.expectation] = tallies[t.expectation] + t if t.expectation in tallies else t
        for d in r.drift:
            drifts[d.kind, d.field] = drifts[d.kind, d.field] + d if (d.kind, d.field) in drifts else d
    entries = ((d, landed.get(d.field.partition("/")[0], landed.get("", 0))) for _, d in sorted(drifts.items()))
    drift = tuple(d for d, rows in entries if d.kind is not DriftKind.MISSING or d.records == rows)
    return tuple(t for _, t in sorted(tallies.items())), drift


def visible_path(part: Part) -> str:
    """Where readers find the part."""
    return part.path


def staged_path(part: Part) -> str:
    """Where the part was staged."""
    return part.staged
