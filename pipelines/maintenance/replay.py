"""Replay: makes rows of quarantined records, after their cause was fixed, and puts them where they belong.

    try each record by the feed's shape of today → plan → old rows and new ones in offset order, the rest stays →
    prove → publish → swap

Guarantees: Kafka is not asked. A record is landed or in quarantine: before, after, and at any crash in between. Landed
rows keep their values, in today's types. Records that stay in quarantine keep their bytes.
Positions, manifests and commits stay as they are. A record that was tried and does not fit gets today's reason, and so
does one that a fix function left alone. One that still does not fit after
mending, or was not selected, keeps its old reason.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import Failed, LakeUnavailable, PartUnreadable, ProofFailed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.landing.landed_rows import Rows, check_source, compare_rows, in_order, read_part_at
from sluice.pipelines.landing.proof import check_account
from sluice.pipelines.landing.writer import PartRole, PartWriter
from sluice.pipelines.ledger import BatchStatus, Ledger
from sluice.pipelines.maintenance.compaction import threads
from sluice.pipelines.maintenance.fixers import Fixer
from sluice.pipelines.maintenance.merging import (
    RewriteContext,
    count_landed,
    staged_path,
    sum_tallies_and_drift,
    visible_path,
)
from sluice.pipelines.maintenance.rewrite import RewriteMethod, Rewriting, company, foresee_free, open_for_rewriting
from sluice.pipelines.maintenance.sorter import NO_OFFSETS, NONE, Sorted, Sorter, Trial, total, with_offsets
from sluice.pipelines.model.kafka import Range, union
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import (
    Counts,
    DriftKind,
    Met,
    Owner,
    Part,
    PartKind,
    Progress,
    Receipt,
    Reporter,
    group_by_sharing,
)
from sluice.pipelines.planning.schema_changes import declare, find_corrected_table, find_shape
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.quarantine.limit import QuarantineKind
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.records.contract_rows.contract_format import RowChecks
from sluice.pipelines.records.rows.row_format import QUARANTINED, Formatted, RawFormat, get_offsets
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.arrays import boolean_array, fixed_width, plain, recast, unfit

OFFSET_WEIGHT = 8 << 10
"""How many bytes of files a re-landed record counts for: in batches of 2 GiB, an entry names some 250,000."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A receipt with quarantined records that were asked for, and the outcome of trying them."""

    receipt: Receipt
    trial: Trial

    @property
    def offset_range(self) -> OffsetRange:
        return self.receipt.offset_range

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.receipt.parts

    @property
    def bytes(self) -> int:
        """The size that bounds a batch: its files, and the offsets of re-landed records in its ledger entry."""
        return sum(p.bytes for p in self.parts) + OFFSET_WEIGHT * self.trial.fit.total()


@dataclass(frozen=True, slots=True)
class ReplayCandidates:
    """The candidates of a replay in order, by the state below entry `number`. `unfit` are offset ranges whose
    landed rows would lose something in today's types, each with the loss. `sharers` are ranges that share a file with
    a candidate: whole files are written again."""

    number: int
    shape: Shape
    candidates: tuple[Candidate, ...]
    unfit: tuple[tuple[OffsetRange, str], ...] = ()
    sharers: tuple[Candidate, ...] = ()

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """The candidates of which a record fits, and those that share a file with one."""
        lost = {s for s, _ in self.unfit}
        groups = group_by_sharing([*self.candidates, *self.sharers])
        chosen = (
            g for g in groups if any(c.trial.fit.total() for c in g) and lost.isdisjoint(c.offset_range for c in g)
        )
        return tuple(c for g in chosen for c in g)


def find(
    feed: Feed, ports: Ports, ledger: Ledger, wanted: Filter, fixer: Fixer | None, report: Reporter = lambda p: None
) -> ReplayCandidates:
    """Try the quarantined records that were asked for. Writes nothing. Raises ProofFailed for a part that is not what
    the ledger says, LakeUnavailable for one that another batch has replaced."""
    state, lake = ledger.read(), ports.lake
    shape = find_shape(feed, state)
    receipts = [r for r in wanted.receipts(ledger, state, feed.window) if r.counts.quarantined]
    total, done = sum(r.counts.quarantined for r in receipts), 0
    candidates: list[Candidate] = []
    for r in receipts:
        with _still_there(ledger, r):
            for part in r.of(PartKind.QUARANTINED):
                check_source(lake, feed.stored, part)
            trial = _try_records(ports, r, wanted, shape, fixer)
        done += r.counts.quarantined
        report(Progress("try", done, total))
        if trial.tried:
            candidates.append(Candidate(r, trial))
    chosen_ranges = {c.offset_range for c in candidates}
    sharers = manifest.with_sharers(ledger, state, [c.receipt for c in candidates if c.trial.fit])
    companions = tuple(Candidate(r, Trial()) for r in sharers if r.offset_range not in chosen_ranges)
    every = ReplayCandidates(state.number, shape, tuple(candidates), sharers=companions)
    reasons = []
    for c in every.fitting:  # also those whose rows are written again only because they share a file
        with _still_there(ledger, c.receipt):
            reasons.append((c.offset_range, _unfit(lake, c.receipt, shape)))
    return replace(every, unfit=tuple((s, why) for s, why in reasons if why))


@contextmanager
def _still_there(ledger: Ledger, r: Receipt) -> Iterator[None]:
    """Raises LakeUnavailable, not damage, when a file cannot be read because its receipt has since been replaced."""
    try:
        yield
    except (PartUnreadable, ProofFailed):
        if not ledger.list_replaced([p.path for p in r.parts]):
            raise
        raise LakeUnavailable(
            f"{r.offset_range}: its files were merged, replayed or landed again while its records were checked",
            remedy="nothing was changed; run it again",
        ) from None


def _try_records(ports: Ports, r: Receipt, wanted: Filter, shape: Shape, fixer: Fixer | None) -> Trial:
    sorter = Sorter(r.offset_range, shape, fixer, ports.writers)
    for part in r.of(PartKind.QUARANTINED):
        for rows in read_part_at(ports.lake, part, part.path):
            chosen, _ = wanted.split(rows, r.offset_range.tp)
            if chosen.num_rows:
                sorter.sort_out(chosen)
    return sorter.trial


def _unfit(lake: Lake, r: Receipt, shape: Shape) -> str:
    """Why the offset range's landed rows do not fit today's types; empty when they do."""
    for part in r.of(PartKind.LANDED):
        if own := shape.datasets.get(part.output):
            with parquet.open_parquet(lake, part.path) as file:
                landed = file.schema_arrow
            if why := unfit(landed, own.landed):
                return why
    return ""


REQUEST = Request(RequestKind.REPLAY)

RELANDED = pa.schema(
    [
        *(QUARANTINED.field(n) for n in ("offset", *QuarantineKind._fields, "batch", "contract")),
        pa.field("mended", pa.bool_(), nullable=False),
    ]
)
"""Stored with the row of a re-landed record: why it was in quarantine."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The re-landed offset ranges, each with its new receipt (None in a dry run), and the `batches` that did it.

    `busy` has by window (None: outside windows) the other live batch that reserves ranges, which were left alone. `met`
    reports these batches: whether their runs are alive, and the remedies.
    """

    candidates: ReplayCandidates
    done: tuple[tuple[Candidate, Receipt | None], ...] = ()
    batches: tuple[int, ...] = ()
    busy: Mapping[int | None, int] = field(default_factory=dict)
    met: tuple[Met, ...] = ()

    @property
    def trial(self) -> Trial:
        """The outcome of trying everything that was asked for."""
        return total(c.trial for c in self.candidates.candidates)

    @property
    def overtaken(self) -> int:
        """The number of offset ranges with fitting records that no other batch reserves, and that did not land: their
        files were replaced while the records were tried."""
        return 0 if self.busy else len(self.candidates.fitting) - len(self.done)

    @property
    def outcome(self) -> Trial:
        """The outcome for the offset ranges that were written again, or would be."""
        return total(c.trial for c, _ in self.done)


def foresee_replay(feed: Feed, ports: Ports, wanted: Filter, fixer: Fixer | None, report: Reporter) -> Replayed:
    """Returns what `replay` would do now. Writes nothing. Raises SchemaChanged."""
    ledger = Ledger.offline(ports.lake, feed.stored, ports.clock)
    find_corrected_table(feed, find_shape(feed, ledger.read()), ledger, ledger.read())
    candidates = find(feed, ports, ledger, wanted, fixer, report)
    free, busy, met = foresee_free(feed, ports, ledger, group_by_sharing(candidates.fitting), candidates.number)
    return Replayed(candidates, tuple((c, None) for c in free), busy=busy, met=met)


def replay(feed: Feed, ports: Ports, wanted: Filter, fixer: Fixer | None, owner: Owner, report: Reporter) -> Replayed:
    """Land the records that fit now, batch by batch. A finished batch stays even if the next one fails.

    A fix function is called twice for each record. Rewriting batches of dead runs are given up first, and reported.
    Raises SchemaChanged, PlanBusy while another run replays, OwnershipLost, ProofFailed for a part that differs from
    the ledger, LakeFull, LakeUnavailable.
    """
    with open_for_rewriting(feed, ports, owner, REQUEST.kind, report) as ledger:
        batches = ledger.read().batches  # notes of abandoned ones are about records that they would have landed
        for path in list(ports.lake.list(paths.relanded_folder(ledger.feed))):
            batch = batches.get(paths.relanded_batch(path) or 0)
            if batch is not None and batch.status is BatchStatus.ABANDONED:
                ports.lake.remove(path)
        # Rows are typed by today's schema, which the ledger must have before a receipt names it.
        if ledger.read().origins:  # else nothing is in quarantine, and only a landing may begin a ledger
            declare(feed, ledger)
        candidates = find(feed, ports, ledger, wanted, fixer, report)
        # One thread calls a fix function, which need not be thread-safe.
        at_once = 1 if fixer else threads(feed.compaction, os.cpu_count() or 1)
        how: RewriteMethod[Candidate] = RewriteMethod(
            REQUEST,
            "replay",
            lambda context: Replayer(context, wanted, candidates.shape, fixer, ports.writers).write,
            at_once,
        )
        run = Rewriting(feed, ports, ledger, owner, report, how)
        run.all(candidates.fitting, candidates.number)
        met = company(feed.name, ledger, ports.liveness, run.busy.values())
    return Replayed(candidates, tuple(run.done), tuple(run.batches), run.busy, met)


@dataclass(frozen=True, slots=True)
class Replayer:
    """Carries out the replays of one batch."""

    context: RewriteContext
    wanted: Filter
    shape: Shape
    fixer: Fixer | None
    writers: WriterSchemas | None

    def write(self, candidates: Sequence[Candidate]) -> list[Receipt]:
        """Stage the parts of each offset range. Raises as `replay`."""
        return [*map(self.replay, candidates)]

    def replay(self, c: Candidate) -> Receipt:
        """Stage the parts of one offset range and return its receipt. A failure leaves none behind.

        Raises ProofFailed, LakeFull, LakeUnavailable, and Failed for a landed value that today's types do not hold.
        """
        for part in c.parts:
            check_source(self.context.lake, self.context.feed, part)
        work = _RangeReplay(self, c.receipt)
        try:
            return work.carry_out()
        except pa.ArrowInvalid as error:
            work.abandon()
            raise Failed(
                f"{c.offset_range}: {error}", remedy="nothing was changed; widen the schema and run it again"
            ) from None
        except BaseException:
            work.abandon()
            raise


class _RangeReplay:
    """One offset range on its way from its old parts to its new ones."""

    def __init__(self, by: Replayer, receipt: Receipt) -> None:
        self._by, self._old, self._desk = by, receipt, by.context
        self._shapes = by.shape.datasets
        self._sorter = Sorter(receipt.offset_range, by.shape, by.fixer, by.writers)
        contracts = {output: shape.contract for output, shape in self._shapes.items()}
        self._checks = {output: RowChecks(contract) for output, contract in contracts.items() if contract}
        self._writers: dict[PartRole, PartWriter] = {}
        self._new: list[Any] = [NO_OFFSETS]
        self._mended: list[Any] = [NO_OFFSETS]
        self._notes = paths.relanded_path(self._desk.feed, self._desk.batch, receipt.offset_range)

    def carry_out(self) -> Receipt:
        book = pa.BufferOutputStream()
        with pq.ParquetWriter(book, RELANDED, compression="zstd", store_schema=False) as notes, _Spool() as new:
            for output, rows in self._reland(notes):
                new.add(output, rows)
            for output in dict.fromkeys((*self._old.outputs, *new.outputs)):
                for rows in in_order([self._before(output), new.rows(output)]):
                    self._write(PartRole(PartKind.LANDED, output), rows)
        receipt = self._receipt(tuple(p for _, w in sorted(self._writers.items()) for p in w.close()))
        self._check_same(receipt)
        self._desk.lake.put(self._notes, book.getvalue().to_pybytes())
        return receipt

    def _write(self, role: PartRole, rows: pa.RecordBatch) -> None:
        if role not in self._writers:
            schema = rows.schema.remove_metadata()
            self._writers[role] = self._desk.writer(self._old.offset_range, role, schema)
        self._writers[role].write(rows)

    def abandon(self) -> None:
        """Leave nothing behind."""
        for writer in self._writers.values():
            with suppress(Exception):
                writer.abandon()
        with suppress(Exception):
            self._desk.lake.remove(self._notes)

    def _before(self, output: str) -> Rows:
        """The rows that had landed, in today's types. Today's contract sees them, too."""
        split, shape = self._by.shape.split, self._shapes.get(output)
        first = split.find_first_place(output) if split else 0
        for rows in self._desk.rows((self._old,), PartRole(PartKind.LANDED, output), visible_path):
            now = recast(rows, shape.landed) if shape else rows
            if checks := self._checks.get(output):
                tallies = (replace(t, expectation=first + t.expectation) for t in checks.check(now).tallies)
                self._sorter.seen.add(Formatted(now, tallies=tuple(tallies), output=output))
            yield now

    def _reland(self, notes: pq.ParquetWriter) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows that fit now, with their output. On the way, the others are written to the new, smaller
        quarantine."""
        for rows in in_order([self._refused_before(output) for output in self._old.outputs]):
            outputs = np.array(rows.column(_OUTPUT).to_pylist(), object)
            rows = rows.drop_columns(_OUTPUT)
            chosen, rest = self._by.wanted.split(rows, self._old.offset_range.tp)
            result = self._sorter.sort_out(chosen) if chosen.num_rows else NONE
            if rest.num_rows and self._checks:
                self._sorter.look_at(rest)
            self._stay(rows, outputs, result)
            self._note(notes, chosen, result)
            for output, batches in result.landed.items():
                yield output, in_offset_order(batches)

    def _refused_before(self, output: str) -> Rows:
        """The rows that were in the quarantine of an output, with its name."""
        for rows in self._desk.rows((self._old,), PartRole(PartKind.QUARANTINED, output), visible_path):
            yield rows.append_column(_OUTPUT, pa.repeat(output, rows.num_rows))

    def _stay(self, rows: pa.RecordBatch, outputs: Any, result: Sorted) -> None:
        refused = [get_offsets(batch) for batches in result.refused.values() for batch in batches]
        same = np.flatnonzero(~np.isin(get_offsets(rows), np.concatenate([result.offsets, *refused])))
        for output in sorted({*outputs[same], *result.refused}):
            unchanged = rows.take(fixed_width(pa.int64(), same[outputs[same] == output]))
            batches = [recast(batch, plain(QUARANTINED)) for batch in (unchanged, *result.refused.get(output, ()))]
            self._write(PartRole(PartKind.QUARANTINED, output), recast(in_offset_order(batches), QUARANTINED))

    def _note(self, notes: pq.ParquetWriter, rows: pa.RecordBatch, result: Sorted) -> None:
        """Note why the records that fit were in quarantine."""
        if not len(result.offsets):
            return
        self._new.append(result.offsets)
        self._mended.append(result.mended)
        were = with_offsets(rows, result.offsets)
        mended = np.isin(get_offsets(were), result.mended)
        notes.write_batch(recast(were.append_column(RELANDED.field("mended"), boolean_array(mended)), RELANDED))

    def _receipt(self, parts: tuple[Part, ...]) -> Receipt:
        """The new receipt: today's counts and contract results, and the drift seen when the records were read."""
        old, new, mended = self._old, _ranges(self._new), _ranges(self._mended)
        n = sum(r.span for r in new)
        landed = count_landed(parts)
        rows = sum(landed.values()) - sum(count_landed(old.parts).values())
        counts = old.counts + Counts(landed=n, quarantined=-n, copies=rows - n)
        # A field stays missing when no re-landed record has it either.
        missing = [d.field for d in old.drift if d.kind is DriftKind.MISSING]
        more = tuple(self._sorter.missing[f] for f in missing if f in self._sorter.missing)
        before = [old, replace(old, tallies=(), drift=more)]
        receipt = replace(
            old,
            counts=counts,
            parts=parts,
            attempt=self._desk.attempt,
            timings={},
            format=self._by.shape.name,
            tallies=self._sorter.seen.tallies,
            drift=sum_tallies_and_drift(before, landed)[1],
            relanded=union((*old.relanded, *new)),
            mended=union((*old.mended, *mended)),
            adopted=False,
        )
        check_account(receipt)
        return receipt

    def _check_same(self, receipt: Receipt) -> None:
        """Read back: apart from re-landed records, the rows of both kinds are unchanged."""
        new = np.concatenate(self._new)
        for output in receipt.outputs:
            role, shape = PartRole(PartKind.LANDED, output), self._shapes.get(output)
            before = self._desk.rows((self._old,), role, visible_path)
            after = self._desk.rows((receipt,), role, staged_path)
            schema = plain(shape.landed) if shape else None
            self._demand_same(role.kind, _see_as(before, schema, NO_OFFSETS), _see_as(after, schema, new))
        # Records that still do not fit may belong to another output today.
        before, after = (
            in_order([self._desk.rows((r,), PartRole(PartKind.QUARANTINED, output), locate) for output in r.outputs])
            for r, locate in ((self._old, visible_path), (receipt, staged_path))
        )
        raw = plain(RawFormat.schema)
        self._demand_same(PartKind.QUARANTINED, _see_as(before, raw, new), _see_as(after, raw, NO_OFFSETS))

    def _demand_same(self, kind: PartKind, before: Rows, after: Rows) -> None:
        if not compare_rows(before, after):
            raise ProofFailed(
                f"{self._old.offset_range}: the {kind} rows that a replay must not change were changed",
                remedy="nothing was changed; this is a bug in the replay, or a faulty disk: report it",
            )


_OUTPUT = "output"


class _Spool:
    """Rows by output, in temporary files until the landed rows are read with them."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[BinaryIO, pa.RecordBatchStreamWriter]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file, _ in self._files.values():
            file.close()

    @property
    def outputs(self) -> Sequence[str]:
        return [*self._files]

    def add(self, output: str, rows: pa.RecordBatch) -> None:
        """Append rows. Those of an output have one schema."""
        if output not in self._files:
            file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - `__exit__` closes it
            self._files[output] = file, pa.ipc.new_stream(file, rows.schema)
        self._files[output][1].write_batch(rows)

    def rows(self, output: str) -> Rows:
        """The rows of an output, after the last was added."""
        if output in self._files:
            file, writer = self._files[output]
            writer.close()
            file.seek(0)
            with pa.ipc.open_stream(file) as stream:
                yield from stream


def _see_as(rows: Rows, schema: pa.Schema | None, but: Any) -> Rows:
    """The rows in these columns (None: in all), without those at the offsets `but`."""
    for batch in rows:
        keep = np.flatnonzero(~np.isin(get_offsets(batch), but))
        if len(keep):
            retained = batch.take(fixed_width(pa.int64(), keep))
            yield recast(retained, schema) if schema else retained


def in_offset_order(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all batches in one, in offset order."""
    together = pa.concat_batches(batches)
    return together.take(fixed_width(pa.int64(), np.argsort(get_offsets(together), kind="stable")))


def _ranges(offsets: Sequence[Any]) -> tuple[Range, ...]:
    """Increasing offsets as ranges."""
    all_ = np.concatenate(offsets)
    if not len(all_):
        return ()
    cuts = np.flatnonzero(np.diff(all_) != 1) + 1
    starts, ends = all_[np.concatenate([[0], cuts])], all_[np.concatenate([cuts - 1, [len(all_) - 1]])] + 1
    return tuple(Range(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True))
