"""One task: turns the record bytes of its offset ranges into staged parts and receipts.

    adopt finished ranges of an earlier attempt → fetch ─► decode ─► format ─► Parquet → receipt next to the parts

Guarantees: each range has one outcome. A receipt is written only when the range was read to its end, its counts add up
to its span, and its parts are whole in staging; tasks of many ranges write those of a second together. A range that
fails stops no other. A transient error is raised after the other ranges are done, so that the engine tries the task
again; the new attempt adopts finished ranges. On the last try the error becomes a RangeFailure. `Assignment.memory`
bounds memory for any records.

Small ranges share files (`sharing`): such a range is held in memory until it was read to its end, and its receipt is
written with those of the other ranges. One with more rows than estimated gets files of its own.

One thread does the work while the fetcher reads ahead in another. The engine runs one task per core.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pyarrow as pa

from sluice.pipelines.errors import (
    CorruptBatch,
    Failed,
    KafkaUnavailable,
    OversizedBatch,
    ProofFailed,
    RegistryUnavailable,
)
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.landing.proof import (
    Claim,
    are_files_intact,
    check_account,
    check_classes,
    check_together,
    is_final,
    read_receipts,
    to_failure,
)
from sluice.pipelines.landing.sharing import SMALL_BYTES, WAITING_BYTES, Sharing, UnwrittenRange, may_share
from sluice.pipelines.landing.writer import ROW_GROUP_BYTES, PartRole, PartTarget, PartWriter
from sluice.pipelines.model.kafka import FetchLimits, Isolation, Range
from sluice.pipelines.model.plans import MANY_RANGES, OffsetRange, Task
from sluice.pipelines.model.receipts import Counts, Drift, Outcome, PartKind, Receipt, Tally, group_by_sharing
from sluice.pipelines.ports import Fetched, Fetcher, FetchFailed, Lake
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions
from sluice.pipelines.records.rows.row_format import (
    Format,
    Formatted,
    RawFormat,
    quarantine_rows,
    refuse_oversized,
    without_offsets,
)
from sluice.pipelines.records.shape import SPLIT
from sluice.pipelines.validation.drift import Drifts

CHUNK_BYTES = (1 << 20, ROW_GROUP_BYTES)
"""The least and the most bytes of rows that one offset range holds in memory, and so the bounds of a row group."""
TOGETHER_SECONDS = 1.0
"""A task of `MANY_RANGES` writes the receipts of this time into one file. A kill costs it that time."""
_NOTE_SECONDS = 2.0
"""Between notes of a task's progress; a shorter task writes none."""
SCRATCH_BYTES = 4 << 20
"""The memory of a decoder without its rows."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The common settings of all tasks of a batch.

    `attempt` names this one execution. `memory` is in bytes. `shape` is the name of the shape that rows get. `fresh`:
    no earlier attempt can have finished an offset range, so none is looked for. With `dropping`, the records of
    oversized batches are counted and kept nowhere. Records at the `erased` offsets of a range do not land.
    """

    feed: str
    batch: int
    plan_hash: str
    isolation: Isolation
    attempt: str
    landing: LandingSettings
    limits: FetchLimits
    memory: int
    shape: str = "raw"
    fresh: bool = False
    dropping: bool = False
    erased: Mapping[OffsetRange, tuple[Range, ...]] = field(default_factory=dict)

    @property
    def batch_bytes(self) -> int:
        """The most bytes of records of one batch. Larger batches are oversized."""
        return self.limits.batch_bytes(self.memory)


@dataclass(frozen=True, slots=True)
class Tools:
    """The ports that a task works with."""

    fetcher: Fetcher
    lake: Lake
    format: Format


def run_task(task: Task, work: Assignment, tools: Tools, *, last_try: bool = True) -> list[Outcome]:
    """Land every offset range of the task. Returns one outcome per range, in the task's order.

    Raises the first error that may pass (KafkaUnavailable, LakeUnavailable, Unknown, anything unforeseen), unless this
    is the `last_try`. A schema registry has been asked several times already: its failure is no reason to try again.
    Record bytes that do not match their CRC are fetched once more, from the leader, before the range fails.
    """
    landed = {} if work.fresh else adopt(task.offset_ranges, work, tools)
    fresh, failed = _Reading([s for s in task.offset_ranges if s not in landed], work, tools).run()
    landed |= fresh
    if damaged := [s for s, e in failed.items() if isinstance(e, CorruptBatch)]:
        limits = replace(work.limits, leaders_only=True)  # a follower's disk may have damaged them
        fresh, still = _Reading(damaged, replace(work, limits=limits), tools).run()
        landed |= fresh
        failed = {s: e for s, e in failed.items() if s not in fresh} | still
    if not last_try:
        for error in failed.values():
            if not is_final(error) and not isinstance(error, RegistryUnavailable):
                raise error
    return [landed[s] if s in landed else to_failure(s, failed[s]) for s in task.offset_ranges]


def salvage_task(task: Task, work: Assignment, tools: Tools, why: str) -> list[Outcome]:
    """The outcomes of a task that its engine gave up, with the engine's reason `why`. Reads nothing from Kafka.

    Offset ranges that an earlier try finished are receipts; the others are failures.
    """
    landed = adopt(task.offset_ranges, work, tools)
    ended = Failed(f"not finished when its task failed: {why}", remedy="run again: only the missing offsets are read")
    return [landed[s] if s in landed else to_failure(s, ended) for s in task.offset_ranges]


def adopt(ranges: Sequence[OffsetRange], work: Assignment, tools: Tools) -> dict[OffsetRange, Receipt]:
    """The offset ranges that an earlier attempt at this batch finished, with their receipts.

    A receipt counts if it is of exactly this range and this shape (the feed's schema may have changed since), has no
    oversized batch that would fit now, lies where its attempt wrote it, would pass the proof, and its files have the
    SHA-256 that it names. Hashing a file is far cheaper than reading its range again. Without the proof, a bad receipt
    would return indefinitely. Ranges of a shared file are adopted together, or not at all.
    """
    wanted = {paths.name_range(s): s for s in ranges}
    earlier: list[Receipt] = []
    for path in tools.lake.list(paths.staging_folder(work.feed, work.batch)):
        there = read_receipts(path, tools.lake) if paths.parse_receipt_path(path) in wanted else ()
        if there and path == receipt_files.build_path(work.feed, work.batch, there):
            earlier += there
    adopted: dict[OffsetRange, Receipt] = {}
    for together in group_by_sharing(earlier):
        mine = all(wanted.get(paths.name_range(r.offset_range)) == r.offset_range for r in together)
        if mine and not any(r.offset_range in adopted for r in together) and _hold_rows(together, work, tools.lake):
            adopted |= {r.offset_range: replace(r, adopted=True) for r in together}
    return adopted


def _hold_rows(together: Sequence[Receipt], work: Assignment, lake: Lake) -> bool:
    if not all(r.format == work.shape and not 0 < r.batch_bytes < work.batch_bytes for r in together):
        return False
    try:
        check_together(Claim(work.feed, work.batch, work.plan_hash), together, lake)
    except ProofFailed:
        return False
    return are_files_intact(together, lake)


class _Reading:
    """One pass over offset ranges in one fetch stream: receipts of the ranges that succeed, errors of the others."""

    def __init__(self, ranges: Sequence[OffsetRange], work: Assignment, tools: Tools) -> None:
        self.landed: dict[OffsetRange, Receipt] = {}
        self.failed: dict[OffsetRange, Exception] = {}
        self._work, self._tools = work, tools
        self._begun: dict[OffsetRange, _Landing] = {}
        small = may_share(ranges, work.landing)
        self._small = frozenset(small)
        self._ranges = [*(s for s in ranges if s not in self._small), *small]
        self._chunks, self._limits = share_memory(ranges, work, self._small)
        target = PartTarget(work.feed, work.batch, work.plan_hash, work.attempt, small[0]) if small else None
        self._sharing = Sharing(small, work.landing, tools.lake, target)
        self._gathers, self._next_put = len(ranges) >= MANY_RANGES, time.monotonic() + TOGETHER_SECONDS
        self._waiting: list[Receipt] = []
        self._progress_path = paths.get_progress_path(work.feed, work.batch, work.attempt)
        self._next_note, self._is_noted = time.monotonic() + _NOTE_SECONDS, False

    def run(self) -> tuple[dict[OffsetRange, Receipt], dict[OffsetRange, Exception]]:
        """The receipts and the errors. Every offset range is in one of the two; nothing is left half written."""
        error: Exception = KafkaUnavailable("fetching ended before the offset range did", remedy="run again")
        try:
            self._follow()
        except Exception as e:  # noqa: BLE001 - becomes an outcome, or is raised by run_task
            error = e
        except BaseException:
            self._sharing.abandon()
            raise
        finally:
            if self._is_noted:
                with suppress(Exception):  # publishing removes what stays in staging
                    self._tools.lake.remove(self._progress_path)
            for landing in self._begun.values():
                landing.abandon()
        self._sharing.finish()
        self._put_receipts()
        self.failed |= self._sharing.failed
        for s in self._ranges:
            if s not in self.landed:
                self.failed.setdefault(s, error)
        return self.landed, self.failed

    def _follow(self) -> None:
        if not self._ranges:
            return
        stream = self._tools.fetcher.stream(self._ranges, self._limits)
        with closing(cast(Any, stream)):
            for got in stream:
                s = self._ranges[got.index]
                if s not in self.failed:
                    self._take(s, got)
                if not self._gathers or time.monotonic() >= self._next_put:
                    self._put_receipts()
                if time.monotonic() >= self._next_note:
                    # For the driver's progress. A lake that does not answer ends nothing.
                    done = {paths.name_range(s): landing.position - s.start for s, landing in self._begun.items()}
                    self._is_noted = True
                    with suppress(Exception):
                        self._tools.lake.put(self._progress_path, json.dumps(done).encode())
                    self._next_note = time.monotonic() + _NOTE_SECONDS

    def _take(self, s: OffsetRange, got: Fetched | FetchFailed) -> None:
        try:
            if isinstance(got, FetchFailed):
                raise got.error
            if s not in self._begun:
                self._begun[s] = _Landing(s, self._work, self._tools, self._chunks[s], shares_file=s in self._small)
            ended = self._begun[s].take(got)
        except Exception as e:  # noqa: BLE001 - becomes this offset range's outcome, or is raised by run_task
            self.failed[s] = e
            if landing := self._begun.pop(s, None):
                landing.abandon()
            if s in self._small:
                self._sharing.leave_out(s)
            return
        if ended is None:
            return
        del self._begun[s]
        if isinstance(ended, UnwrittenRange):
            self._sharing.take(ended)
        else:
            self._waiting.append(ended)
            if s in self._small:
                self._sharing.leave_out(s)

    def _put_receipts(self) -> None:
        """Write the receipts of offset ranges whose files are whole. Then these have landed."""
        receipts = [*self._waiting, *self._sharing.pop_landed()]
        self._waiting, self._next_put = [], time.monotonic() + TOGETHER_SECONDS
        try:
            if receipts:
                receipt_files.put(self._work.feed, self._work.batch, receipts, self._tools.lake)
                self.landed |= {r.offset_range: r for r in receipts}
        except Exception as e:  # noqa: BLE001 - becomes these offset ranges' outcome, or is raised by run_task
            self.failed |= dict.fromkeys((r.offset_range for r in receipts), e)
            for path in {p.staged for r in receipts for p in r.parts}:
                with suppress(Exception):
                    self._tools.lake.remove(path)


def share_memory(
    ranges: Sequence[OffsetRange], work: Assignment, small: Collection[OffsetRange] = ()
) -> tuple[dict[OffsetRange, int], FetchLimits]:
    """Returns the bytes of rows that each offset range may hold, and fetch limits that fit the task's memory.

    A range's share depends on the range alone, so that its row groups do not depend on other ranges. `small` ranges
    share files: all of their rows are held until they end.
    """
    smallest, largest = CHUNK_BYTES
    chunks = {s: min(max(4 * s.estimated_bytes, smallest), largest) for s in ranges}
    limits = work.limits
    available = limits.free_bytes(work.memory)
    available -= WAITING_BYTES + 2 * ROW_GROUP_BYTES if small else 0
    active = 0
    shares = {s: SMALL_BYTES if s in small else 0 for s in ranges}
    for s in sorted(ranges, key=lambda s: chunks[s] + shares[s], reverse=True):
        # One being filled; what typing and encoding the last one took; gaps left; outputs that wait for another's turn.
        available -= (6 if work.shape.startswith(SPLIT) else 5) * chunks[s] + SCRATCH_BYTES + shares[s]
        if available < 0 or active == limits.active_ranges:
            break
        active += 1
    return chunks, replace(limits, active_ranges=max(active, 1))


class RowFindings:
    """Adds up the findings in the rows of one offset range: tallies of the contract, drift from the schema."""

    def __init__(self) -> None:
        self._tallies: dict[int, Tally] = {}
        self._drift: dict[str, Drifts] = {}

    def add(self, rows: Formatted) -> None:
        """Add the findings of one piece of the offset range."""
        for tally in rows.tallies:
            before = self._tallies.get(tally.expectation)
            self._tallies[tally.expectation] = before + tally if before else tally
        self._drift.setdefault(rows.output, Drifts()).add(rows.drift, rows.typed)

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """One for each row expectation, in the contract's order."""
        return tuple(t for _, t in sorted(self._tallies.items()))

    @property
    def drift(self) -> tuple[Drift, ...]:
        """One for each kind and field of an output."""
        return tuple(d for _, drifts in sorted(self._drift.items()) for d in drifts.all)


class _Landing:
    """One offset range on its way from record bytes to parts. With `shares_file`, its rows are kept for a file that
    ranges share, as long as they take no more than `SMALL_BYTES` and a row group.
    """

    def __init__(
        self, s: OffsetRange, work: Assignment, tools: Tools, chunk_bytes: int, *, shares_file: bool = False
    ) -> None:
        self._range, self._work, self._tools, self._chunk_bytes = s, work, tools, chunk_bytes
        options = DecodeOptions(
            read_committed=work.isolation is Isolation.READ_COMMITTED,
            chunk_rows=work.landing.row_group_rows,
            chunk_bytes=chunk_bytes,
            max_batch_bytes=work.batch_bytes,
        )
        self._raw, self._oversized = RawFormat(), False
        self._erased, self._left_out = work.erased.get(s, ()), 0
        self._decoder = BatchDecoder(s.topic, s.partition, s.start, s.end, options)
        self._writers: dict[PartRole, PartWriter] = {}
        self._held: dict[PartRole, list[pa.RecordBatch]] | None = {} if shares_file else None
        self._held_most = 0, 0
        self._counts = Counts()
        self._seen = RowFindings()
        self._input_bytes = 0
        self._waited = 0
        self._typed = 0
        self._validated = 0

    @property
    def position(self) -> int:
        """The next offset to decode."""
        return max(self._decoder.position, self._range.start)

    def take(self, got: Fetched) -> Receipt | UnwrittenRange | None:
        """Land a fetched chunk. Returns, after the last, the receipt, or the rows that wait for a shared file.

        Raises CorruptBatch, ProofFailed, LakeFull.
        """
        self._input_bytes += len(got.records)
        self._waited += got.waited_ns
        for batch, chunk in self._decoder.read(got.records, got.aborted):
            chunk = self._leave_out_erased(chunk)
            if not chunk.num_rows:
                continue
            if batch is None:
                self._sort_out(chunk)
            else:
                self._refuse(batch, chunk)
            del chunk  # or two of them would be held while the next one is filled
        if not got.last:
            return None
        for chunk in self._decoder.finish():
            if (chunk := self._leave_out_erased(chunk)).num_rows:
                self._sort_out(chunk)
        return self._finish(max(self._decoder.position, got.next_position))

    def _leave_out_erased(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the records that no erasure removed, and counts the others."""
        if not self._erased:
            return chunk
        retained = without_offsets(chunk, self._erased)
        self._left_out += chunk.num_rows - retained.num_rows
        return retained

    def _refuse(self, batch: OversizedBatch, chunk: pa.RecordBatch) -> None:
        """Quarantine or drop records of an oversized batch."""
        self._oversized = True
        if self._work.dropping:
            self._counts += Counts(dropped=chunk.num_rows)
            return
        (raw,) = self._raw.convert(self._range, chunk)
        detail = f"in a batch of {batch.size:,} bytes with more than {batch.limit:,} bytes of records"
        refused = quarantine_rows(refuse_oversized(raw.landed, detail), self._work.batch, self._tools.format.contract)
        self._write(PartRole(PartKind.QUARANTINED), refused)

    def abandon(self) -> None:
        """Remove the unfinished parts. What cannot be removed now goes when the batch's staging does."""
        for writer in self._writers.values():
            with suppress(Exception):
                writer.abandon()

    def _sort_out(self, chunk: pa.RecordBatch) -> None:
        pieces = self._tools.format.convert(self._range, chunk)
        while (rows := self._next(pieces)) is not None:
            self._write(PartRole(PartKind.LANDED, rows.output), rows.landed)
            if rows.quarantined is not None:
                refused = quarantine_rows(rows.quarantined, self._work.batch, rows.contract)
                self._write(PartRole(PartKind.QUARANTINED, rows.output), refused)
            self._counts += Counts(-rows.copies, dropped=rows.dropped, copies=rows.copies)
            self._seen.add(rows)
            self._validated += rows.validate_ns

    def _next(self, pieces: Iterator[Formatted]) -> Formatted | None:
        begun = time.perf_counter_ns()
        try:
            return next(pieces, None)
        finally:
            self._typed += time.perf_counter_ns() - begun

    def _write(self, role: PartRole, rows: pa.RecordBatch) -> None:
        landed = role.kind is PartKind.LANDED
        self._counts += Counts(rows.num_rows) if landed else Counts(quarantined=rows.num_rows)
        if self._held is None:
            self._write_out(role, rows)
            return
        self._held.setdefault(role, []).append(rows)
        # Whole buffers are counted first: what rows take of them is never more, and takes long to find.
        self._held_most = self._held_most[0] + rows.num_rows, self._held_most[1] + rows.get_total_buffer_size()
        too_large = (
            self._held_most[1] > SMALL_BYTES
            and sum(batch.nbytes for batches in self._held.values() for batch in batches) > SMALL_BYTES
        )
        if too_large or self._held_most[0] > self._work.landing.row_group_rows:
            so_far, self._held = self._held, None
            for of, batches in so_far.items():
                for batch in batches:
                    self._write_out(of, batch)

    def _write_out(self, role: PartRole, rows: pa.RecordBatch) -> None:
        writer = self._writers.get(role)
        if writer is None:
            work = self._work
            target = PartTarget(work.feed, work.batch, work.plan_hash, work.attempt, self._range, *role)
            writer = PartWriter(self._tools.lake, target, rows.schema, work.landing, self._chunk_bytes)
            self._writers[role] = writer
        writer.write(rows)
        if len(self._writers) > 1 and sum(w.pending_bytes for w in self._writers.values()) >= 2 * self._chunk_bytes:
            max(self._writers.values(), key=lambda w: w.pending_bytes).flush()

    def _finish(self, position: int) -> Receipt | UnwrittenRange:
        """Close the parts, and check the counts."""
        parts = tuple(part for writer in self._writers.values() for part in writer.close())
        s, work = self._range, self._work
        account, timings = self._account(), self._timings()
        tallies, drift = self._seen.tallies, self._seen.drift
        account_of = position, account, parts, work.attempt, self._input_bytes, timings, work.shape, tallies, drift
        limit = work.batch_bytes if self._oversized else 0
        receipt = Receipt(s, *account_of, erased=self._erased, tail=self._decoder.tail, batch_bytes=limit)
        if self._held is not None:
            check_classes(receipt)
            return UnwrittenRange(receipt, self._held)
        check_account(receipt)
        return receipt

    def _account(self) -> Counts:
        """All counts of the offset range. Offsets that no batch held are compacted. Raises ProofFailed for lost
        records.
        """
        read_counts, counts = self._decoder.counts, self._counts
        if counts.total + self._left_out != read_counts.records:
            raise ProofFailed(
                f"{self._range}: {read_counts.records} records decoded, but {counts} of them accounted for",
                remedy="this is a bug in the feed's format; nothing of this offset range was landed",
            )
        # Also those that Kafka's compaction has removed since.
        erased = sum(r.span for r in self._erased)
        counts += Counts(control=read_counts.control, aborted=read_counts.aborted, erased=erased)
        return replace(counts, compacted=self._range.span - counts.total)

    def _timings(self) -> dict[str, int]:
        writers = self._writers.values()
        return {
            "wait": self._waited,
            **self._decoder.timings,
            "type": self._typed - self._validated,
            "validate": self._validated,
            "encode": sum(w.encode_ns for w in writers),
            "write": sum(w.write_ns for w in writers),
        }
