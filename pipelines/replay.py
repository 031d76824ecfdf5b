"""Replay: quarantined records made rows after what refused them was mended, and put where they belong.

    try each record by the feed's shape of today → plan → old rows and new ones in offset order, the rest stays →
    prove → publish → swap

Guarantees: Kafka is not asked; a record is landed or in quarantine, before, after and at any crash between; rows that
had landed keep their values, in today's types; what stays in quarantine keeps its bytes, whatever was tried on them.
Positions, manifests and commits stay as they are. A record that was tried and does not fit says why it does not today,
and so does one that a mending function left alone; one that was mended in vain, or not asked for, says what it said.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines import layout, owners, parquet
from sluice.pipelines.batch import Edges
from sluice.pipelines.compaction import open_ledger, threads
from sluice.pipelines.contract.rows import RowChecks
from sluice.pipelines.errors import Failed, LakeUnavailable, PartUnreadable, ProofFailed
from sluice.pipelines.evolution import check_one_table, declare, effective_shape
from sluice.pipelines.feed import Feed
from sluice.pipelines.formats import Formatted, RawFormat, fixed, int64s
from sluice.pipelines.held import Filter, flags, quarantined_parts, without
from sluice.pipelines.ledger import BatchStatus, Ledger
from sluice.pipelines.mending import Botched, Mender, Record
from sluice.pipelines.merging import (
    Desk,
    Rows,
    check_source,
    in_order,
    offsets_of,
    rows_of,
    same_rows,
    staged,
    summed,
    visible,
)
from sluice.pipelines.ports import Lake, Progress, Reporter
from sluice.pipelines.proof import check_account
from sluice.pipelines.publish import roll_forward
from sluice.pipelines.quarantine import Kind, kinds_of
from sluice.pipelines.ranges import Range, union
from sluice.pipelines.recast import plain, recast, unfit
from sluice.pipelines.rewriting import How, Rewriting, company, give_up_dead, is_free, rewriting
from sluice.pipelines.shape import Shape
from sluice.pipelines.task import Seen
from sluice.pipelines.typed.landed import QUARANTINED, quarantined
from sluice.pipelines.values import (
    Counts,
    Drift,
    DriftKind,
    Met,
    Owner,
    Part,
    PartKind,
    Receipt,
    Request,
    RequestKind,
    Slice,
)

REQUEST = Request(RequestKind.REPLAY)
MENDED_BYTES = 24 << 20
"""Mended values that are typed at once."""
OFFSET_WEIGHT = 8 << 10
"""Bytes of files that a re-landed record counts for: with batches of 2 GiB an entry tells of some 250,000."""
_DECODED = pa.schema([f for f in RawFormat.schema if f.name not in ("topic", "partition")])
NO_OFFSETS = np.empty(0, np.int64)
RELANDED = pa.schema(
    [
        *(QUARANTINED.field(n) for n in ("offset", *Kind._fields, "batch", "contract")),
        pa.field("mended", pa.bool_(), nullable=False),
    ]
)
"""What is kept of a re-landed record beside its row: why it was in quarantine."""


# -- tried


@dataclass(slots=True)
class Trial:
    """What came of trying records: by the kind that they were refused as, how many were tried and how many fit; why
    the others do not, with the first of each; how many the mending function left alone, how many of these fit as they
    are, and what went wrong in it.
    """

    tried: Counter[Kind] = field(default_factory=Counter)
    fit: Counter[Kind] = field(default_factory=Counter)
    why: dict[Kind, tuple[int, str]] = field(default_factory=dict)
    mended: int = 0
    left: int = 0
    left_fit: int = 0
    botched: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, other: Trial) -> None:
        self.tried += other.tried
        self.fit += other.fit
        for mine, more in ((self.why, other.why), (self.botched, other.botched)):
            for key, (records, first) in more.items():
                count_first(mine, key, records, first)
        self.mended += other.mended
        self.left += other.left
        self.left_fit += other.left_fit


def count_first(into: dict[Any, tuple[int, str]], key: Any, records: int, first: str) -> None:
    held = into.get(key, (0, first))
    into[key] = (held[0] + records, held[1])


@dataclass(frozen=True, slots=True)
class Sorted:
    """A chunk of tried records: the rows that fit, and those that do not and were not mended, as the quarantine has
    them; `mended` are the offsets of those that fit whose bytes are not the log's."""

    landed: tuple[pa.RecordBatch, ...]
    refused: pa.RecordBatch | None
    mended: Any

    @property
    def offsets(self) -> Any:
        """Of the rows that fit."""
        found = [offsets_of(rows) for rows in self.landed]
        return np.concatenate(found) if found else NO_OFFSETS


class Sorter:
    """Tries the quarantine's records of one slice by a shape, mended before where there is a function for that.

    `trial`, `seen` and `missing` grow with it.
    """

    def __init__(self, s: Slice, shape: Shape, mender: Mender | None) -> None:
        self.trial, self.seen = Trial(), Seen()
        self.missing: dict[str, Drift] = {}
        """By the field, what no re-landed record has so far."""
        self._slice, self._mender = s, mender
        self._alone: list[int] = []
        """The rows at hand that the mending function gave no value for."""
        self._format = replace(shape, dropping=False).format()

    def sort_out(self, rows: pa.RecordBatch) -> Sorted:
        """Try rows of the quarantine. What does not fit is given back with the reason of today."""
        for kind, records, _ in kinds_of(rows):
            self.trial.tried[kind] += records
        landed: list[pa.RecordBatch] = []
        refused: list[pa.RecordBatch] = []
        mended: list[Any] = [NO_OFFSETS]
        for records, changed in self._records(rows):
            for piece in self._format.convert(self._slice, records):
                self._see(piece)
                if piece.landed.num_rows:
                    landed.append(piece.landed)
                    mended.append(np.intersect1d(offsets_of(piece.landed), changed))
                if piece.quarantined is not None:
                    refused.append(self._renewed(rows, piece.quarantined, changed))
        if self._alone:
            refused += self._left_alone(rows)
        found = Sorted(tuple(landed), _together(refused), np.concatenate(mended))
        for kind, n, _ in kinds_of(with_offsets(rows, found.offsets)):
            self.trial.fit[kind] += n
        self.trial.mended += len(found.mended)
        return found

    def _left_alone(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows that no value was given for, as they came: they stay, and say why they do not fit today."""
        alone = rows.take(fixed(pa.int64(), np.array(self._alone, np.int64)))
        for piece in self._format.convert(self._slice, _records(alone)):
            self.seen.add(piece)
            self.trial.left_fit += piece.landed.num_rows
            if piece.quarantined is not None:
                yield self._renewed(rows, piece.quarantined, NO_OFFSETS)

    def _see(self, piece: Formatted) -> None:
        self.seen.add(piece)
        for d in piece.drift:
            if d.kind is DriftKind.MISSING:
                self.missing[d.field] = self.missing[d.field] + d if d.field in self.missing else d

    def look_at(self, rows: pa.RecordBatch) -> None:
        """Let the contract see rows that stay, whatever they are."""
        for piece in self._format.convert(self._slice, _records(rows)):
            self.seen.add(piece)

    def _renewed(self, rows: pa.RecordBatch, refused: pa.RecordBatch, changed: Any) -> pa.RecordBatch:
        """Why records do not fit today, beside the batch that read them; without those that were mended in vain."""
        now = recast(quarantined(refused, 0, self._format.contract), plain(QUARANTINED))
        for kind, records, first in kinds_of(now):
            count_first(self.trial.why, kind, records, f"{self._slice.tp}:{first}")
        now = without(now, changed)
        batches = with_offsets(rows, offsets_of(now)).column("batch")
        return now.set_column(now.schema.get_field_index("batch"), QUARANTINED.field("batch"), batches)

    def _records(self, rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Any]]:
        """The records that are tried, a bounded amount at a time, with the offsets of those with other bytes."""
        if self._mender is None:
            yield _records(rows), NO_OFFSETS
            return
        held: list[tuple[int, bytes]] = []
        for row, value in self._mended(rows):
            held.append((row, value))
            if sum(len(v) for _, v in held[-1024:]) > MENDED_BYTES or len(held) >= 1024:
                yield _with_values(rows, held)
                held = []
        if held:
            yield _with_values(rows, held)

    def _mended(self, rows: pa.RecordBatch) -> Iterator[tuple[int, bytes]]:
        self._alone = []
        for at, record in enumerate(_as_given(rows)):
            try:
                value = self._mender.mend(record) if self._mender else None
            except Botched as what:
                count_first(self.trial.botched, str(what), 1, f"{self._slice.tp}:{record.offset}")
                continue
            if value is None:
                self.trial.left += 1
                self._alone.append(at)
            else:
                yield at, value


def _records(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of the quarantine as the decoder made them, in buffers of their own."""
    fresh = rows.take(fixed(pa.int64(), np.arange(rows.num_rows, dtype=np.int64)))
    return recast(fresh, _DECODED)


def _with_values(rows: pa.RecordBatch, held: Sequence[tuple[int, bytes]]) -> tuple[pa.RecordBatch, Any]:
    """Some of the rows as the decoder would have made them with these values, and the offsets of those that differ."""
    some = _records(rows.take(fixed(pa.int64(), np.array([at for at, _ in held], np.int64))))
    values = _binary([value for _, value in held])
    column = some.schema.get_field_index("value")
    before = some.column(column)
    differs = [not v.is_valid or v.as_buffer() != pa.py_buffer(new) for v, (_, new) in zip(before, held, strict=True)]
    offsets = offsets_of(some)[np.array(differs, np.bool_)]
    return some.set_column(column, _DECODED.field(column), values), offsets


def _binary(values: Sequence[bytes]) -> pa.Array:
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    )


_GIVEN = ("key", "value", "headers", "topic", "partition", "offset", "timestamp", *Kind._fields)


def _as_given(rows: pa.RecordBatch) -> Iterator[Record]:
    """Rows of the quarantine as a mending function gets them."""
    at = rows.schema.get_field_index("timestamp")
    rows = rows.set_column(at, "timestamp", rows.column(at).cast(pa.int64()))
    for row in rows.select(list(_GIVEN)).to_pylist():
        row["headers"] = tuple((h["key"], h["value"]) for h in row["headers"] or ())
        yield Record(**row)


def with_offsets(rows: pa.RecordBatch, offsets: Any) -> pa.RecordBatch:
    """The rows of these offsets, in order."""
    mine = int64s(rows.column(rows.schema.get_field_index("offset")))
    return rows.take(fixed(pa.int64(), np.flatnonzero(np.isin(mine, offsets))))


def _together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch | None:
    return pa.concat_batches(batches) if batches else None


# -- what there is to replay


@dataclass(frozen=True, slots=True)
class Candidate:
    """A receipt with quarantined records that were asked for, and what came of trying them."""

    receipt: Receipt
    trial: Trial

    @property
    def slice(self) -> Slice:
        return self.receipt.slice

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.receipt.parts

    @property
    def bytes(self) -> int:
        """What bounds a batch: the files, and what the offsets of re-landed records take in its ledger entry."""
        return sum(p.bytes for p in self.parts) + OFFSET_WEIGHT * self.trial.fit.total()


@dataclass(frozen=True, slots=True)
class Found:
    """What would come of a replay, by the state below entry `number`: the candidates, in order, of which those count
    where something fits; `unfit` are slices whose landed rows would lose something in today's types, and what."""

    number: int
    shape: Shape
    candidates: tuple[Candidate, ...]
    unfit: tuple[tuple[Slice, str], ...] = ()

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        lost = {s for s, _ in self.unfit}
        return tuple(c for c in self.candidates if c.trial.fit.total() and c.slice not in lost)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was re-landed, with the receipt that took its place, None where it is only foreseen; `batches` did it.

    `busy`: which other live batch reserves it (its id), by window (None: outside windows); that was left alone. `met`:
    these batches, how their runs stand, and the ways out.
    """

    found: Found
    done: tuple[tuple[Candidate, Receipt | None], ...] = ()
    batches: tuple[int, ...] = ()
    busy: Mapping[int | None, int] = field(default_factory=dict)
    met: tuple[Met, ...] = ()

    @property
    def trial(self) -> Trial:
        """What came of all that was asked for."""
        return total(c.trial for c in self.found.candidates)

    @property
    def landed(self) -> Trial:
        """What came of the slices that were written anew, or would be."""
        return total(c.trial for c, _ in self.done)


def total(trials: Iterable[Trial]) -> Trial:
    out = Trial()
    for trial in trials:
        out.add(trial)
    return out


def find(
    feed: Feed, lake: Lake, ledger: Ledger, asked: Filter, mender: Mender | None, report: Reporter = lambda p: None
) -> Found:
    """Try what is in quarantine and asked for. Nothing is written. Raises ProofFailed for a part that is not what the
    ledger says, LakeUnavailable for one that was replaced meanwhile."""
    state = ledger.read()
    shape = effective_shape(feed, state)
    receipts = [r for r in asked.receipts(ledger, state, feed.window) if r.counts.quarantined]
    whole, done = sum(r.counts.quarantined for r in receipts), 0
    candidates: list[Candidate] = []
    for r in receipts:
        with _still_there(ledger, r):
            for part in quarantined_parts(r):
                check_source(lake, feed.name, part)
            trial = _tried(lake, r, asked, shape, mender)
        done += r.counts.quarantined
        report(Progress("try", done, whole))
        if trial.tried:
            candidates.append(Candidate(r, trial))
    reasons = []
    for c in (c for c in candidates if c.trial.fit):
        with _still_there(ledger, c.receipt):
            reasons.append((c.slice, _unfit(lake, c.receipt, shape.landed)))
    return Found(state.number, shape, tuple(candidates), tuple((s, why) for s, why in reasons if why))


@contextmanager
def _still_there(ledger: Ledger, r: Receipt) -> Iterator[None]:
    """A file that cannot be read because the receipt was replaced meanwhile is no damage: LakeUnavailable."""
    try:
        yield
    except (PartUnreadable, ProofFailed):
        if ledger.read().replaced.isdisjoint(p.path for p in r.parts):
            raise
        raise _replaced(r) from None


def _replaced(r: Receipt) -> LakeUnavailable:
    return LakeUnavailable(
        f"{r.slice}: its files went away while its records were tried: it was merged, replayed or landed anew",
        remedy="nothing was changed; run it again",
    )


def _tried(lake: Lake, r: Receipt, asked: Filter, shape: Shape, mender: Mender | None) -> Trial:
    sorter = Sorter(r.slice, shape, mender)
    for part in quarantined_parts(r):
        for rows in rows_of(lake, part.path):
            chosen, _ = asked.split(rows, r.slice.tp)
            if chosen.num_rows:
                sorter.sort_out(chosen)
    return sorter.trial


def _unfit(lake: Lake, r: Receipt, schema: pa.Schema) -> str:
    """Why the slice's landed rows cannot have today's types; empty when they can."""
    for part in r.parts:
        if part.kind is PartKind.LANDED:
            with parquet.opened(lake, part.path) as file:
                landed = file.schema_arrow
            if why := unfit(landed, schema):
                return why
    return ""


def foreseen(feed: Feed, edges: Edges, asked: Filter, mender: Mender | None, report: Reporter) -> Replayed:
    """What `replay` would do now. Writes nothing. Raises SchemaChanged."""
    ledger = open_ledger(feed, edges)
    check_one_table(feed, effective_shape(feed, ledger.read()), ledger.read())
    found, busy = find(feed, edges.lake, ledger, asked, mender, report), dict[int | None, int]()
    state = ledger.read()
    dead = {i for i, said in owners.judged(edges.liveness, rewriting(state)).items() if said.dead}
    free = [c for c in found.fitting if is_free(state, c.slice, found.number, busy, dead)]
    met = company(feed.name, ledger, edges.liveness, busy.values())
    return Replayed(found, tuple((c, None) for c in free), busy=busy, met=met)


# -- carried out


def replay(feed: Feed, edges: Edges, asked: Filter, mender: Mender | None, owner: Owner, report: Reporter) -> Replayed:
    """Land what fits by now, a batch after the other. What a batch put in place stays, whatever stops the next.

    A mending function is asked twice of each record. Batches of dead runs that wrote parts anew are given up first,
    and told to `report`. Raises SchemaChanged, PlanBusy while another one replays, OwnershipLost, ProofFailed for a
    part that is not what the ledger says, LakeFull, LakeUnavailable.
    """
    with edges.liveness.beat(owner):
        ledger = open_ledger(feed, edges, owner.run)
        report(Progress("roll forward"))
        give_up_dead(ledger, edges.liveness, REQUEST.kind, report)
        roll_forward(ledger, edges.lake, feed.name)
        _tidy(ledger, edges.lake)
        if ledger.read().origins:  # else nothing is in quarantine; and it is for a landing to begin a ledger
            declare(feed, ledger)
        found = find(feed, edges.lake, ledger, asked, mender, report)
        # A mending function is asked by one thread: nobody promised that it stands more.
        at_once = 1 if mender else threads(feed.compaction, os.cpu_count() or 1)
        how: How[Candidate] = How(
            REQUEST, "replay", lambda desk: Replayer(desk, asked, found.shape, mender).replay, at_once
        )
        run = Rewriting(feed, edges, ledger, owner, report, how, found.number)
        run.all(found.fitting)
        met = company(feed.name, ledger, edges.liveness, run.busy.values())
    return Replayed(found, tuple(run.done), tuple(run.batches), run.busy, met)


def _tidy(ledger: Ledger, lake: Lake) -> None:
    """Remove what batches that were given up noted of the records that they would have landed."""
    batches = ledger.read().batches
    for path in list(lake.list(layout.relanded_folder(ledger.feed))):
        held = batches.get(layout.relanded_batch(path) or 0)
        if held is not None and held.status is BatchStatus.ABANDONED:
            lake.remove(path)


@dataclass(frozen=True, slots=True)
class Replayer:
    """Carries out the replays of one batch."""

    desk: Desk
    asked: Filter
    shape: Shape
    mender: Mender | None

    def replay(self, c: Candidate) -> Receipt:
        """The receipt of the slice whose parts are staged. One that fails leaves none behind.

        Raises ProofFailed, LakeFull, LakeUnavailable, and Failed for a landed value that today's types do not hold.
        """
        for part in c.parts:
            check_source(self.desk.lake, self.desk.feed, part)
        work = _Work(self, c.receipt)
        try:
            return work.carry_out()
        except pa.ArrowInvalid as error:
            work.abandon()
            raise Failed(
                f"{c.slice}: {error}", remedy="nothing was changed; widen the schema and run it again"
            ) from None
        except BaseException:
            work.abandon()
            raise


class _Work:
    """One slice on its way from its old parts to its new ones."""

    def __init__(self, by: Replayer, receipt: Receipt) -> None:
        self._by, self._old, self._desk = by, receipt, by.desk
        self._schema = by.shape.landed
        self._sorter = Sorter(receipt.slice, by.shape, by.mender)
        self._checks = RowChecks(by.shape.contract) if by.shape.contract else None
        s = receipt.slice
        self._landed = self._desk.writer(s, PartKind.LANDED, self._schema)
        self._refused = self._desk.writer(s, PartKind.QUARANTINED, QUARANTINED)
        self._new: list[Any] = [NO_OFFSETS]
        self._mended: list[Any] = [NO_OFFSETS]
        self._notes = layout.relanded_path(self._desk.feed, self._desk.batch, s)

    def carry_out(self) -> Receipt:
        book = pa.BufferOutputStream()
        with pq.ParquetWriter(book, RELANDED, compression="zstd", store_schema=False) as notes:
            for rows in in_order([self._before(), self._relanded(notes)]):
                self._landed.write(rows)
        made = self._receipt((*self._landed.close(), *self._refused.close()))
        self._check_same(made)
        self._desk.lake.put(self._notes, book.getvalue().to_pybytes())
        return made

    def abandon(self) -> None:
        """Leave nothing behind."""
        for writer in (self._landed, self._refused):
            with suppress(Exception):
                writer.abandon()
        with suppress(Exception):
            self._desk.lake.remove(self._notes)

    def _before(self) -> Rows:
        """The rows that had landed, in today's types; today's contract sees them too."""
        for rows in self._desk.rows((self._old,), PartKind.LANDED, visible):
            now = recast(rows, self._schema)
            if self._checks:
                self._sorter.seen.add(Formatted(now, tallies=self._checks.hold(now).tallies))
            yield now

    def _relanded(self, notes: pq.ParquetWriter) -> Rows:
        """The rows that fit now; the others go into the smaller quarantine on the way."""
        for rows in self._desk.rows((self._old,), PartKind.QUARANTINED, visible):
            chosen, rest = self._by.asked.split(rows, self._old.slice.tp)
            found = self._sorter.sort_out(chosen) if chosen.num_rows else Sorted((), None, NO_OFFSETS)
            if rest.num_rows and self._checks:
                self._sorter.look_at(rest)
            self._stay(rows, found)
            self._note(notes, chosen, found)
            if found.landed:
                yield in_offset_order(found.landed)

    def _stay(self, rows: pa.RecordBatch, found: Sorted) -> None:
        left = without(rows, found.offsets)
        if found.refused is not None:
            kept = without(left, offsets_of(found.refused))
            left = in_offset_order([recast(kept, plain(QUARANTINED)), recast(found.refused, plain(QUARANTINED))])
        self._refused.write(recast(left, QUARANTINED))

    def _note(self, notes: pq.ParquetWriter, rows: pa.RecordBatch, found: Sorted) -> None:
        """Why those that fit were in quarantine."""
        if not len(found.offsets):
            return
        self._new.append(found.offsets)
        self._mended.append(found.mended)
        were = with_offsets(rows, found.offsets)
        mended = np.isin(offsets_of(were), found.mended)
        notes.write_batch(recast(were.append_column(RELANDED.field("mended"), flags(mended)), RELANDED))

    def _receipt(self, parts: tuple[Part, ...]) -> Receipt:
        """The classes as they are now; what the rows say to today's contract, and what drifted when they were read."""
        old, new, mended = self._old, _ranges(self._new), _ranges(self._mended)
        n = sum(r.span for r in new)
        counts = old.counts + Counts(landed=n, quarantined=-n)
        made = replace(
            old,
            counts=counts,
            parts=parts,
            attempt=self._desk.attempt,
            timings={},
            format=self._by.shape.name,
            tallies=self._sorter.seen.tallies,
            drift=self._drift(counts.landed),
            relanded=union((*old.relanded, *new)),
            mended=union((*old.mended, *mended)),
            adopted=False,
        )
        check_account(made)
        return made

    def _drift(self, landed: int) -> tuple[Drift, ...]:
        """As it was seen when the records were read. A field is missing still when no re-landed one has it either."""
        known = [d.field for d in self._old.drift if d.kind is DriftKind.MISSING]
        more = tuple(self._sorter.missing[f] for f in known if f in self._sorter.missing)
        return summed([self._old, replace(self._old, tallies=(), drift=more)], landed)[1]

    def _check_same(self, made: Receipt) -> None:
        """Read back: but for what was re-landed, the rows of both kinds are what they were."""
        new = np.concatenate(self._new)
        self._same(made, PartKind.LANDED, plain(self._schema), before=NO_OFFSETS, after=new)
        self._same(made, PartKind.QUARANTINED, plain(RawFormat.schema), before=new, after=NO_OFFSETS)

    def _same(self, made: Receipt, kind: PartKind, schema: pa.Schema, before: Any, after: Any) -> None:
        old = _seen_as(self._desk.rows((self._old,), kind, visible), schema, before)
        now = _seen_as(self._desk.rows((made,), kind, staged), schema, after)
        if not same_rows(old, now):
            raise ProofFailed(
                f"{made.slice}: the {kind} rows that a replay leaves alone are not what they were",
                remedy="nothing was changed; this is a bug in replaying, or a disk that forgets: report it",
            )


def _seen_as(rows: Rows, schema: pa.Schema, but: Any) -> Rows:
    """The rows in these columns, without those of these offsets."""
    for some in rows:
        keep = np.flatnonzero(~np.isin(offsets_of(some), but))
        if len(keep):
            yield recast(some.take(fixed(pa.int64(), keep)), schema)


def in_offset_order(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all in one."""
    together = pa.concat_batches(batches)
    return together.take(fixed(pa.int64(), np.argsort(offsets_of(together), kind="stable")))


def _ranges(offsets: Sequence[Any]) -> tuple[Range, ...]:
    """Ever larger offsets as ranges."""
    all_ = np.concatenate(offsets)
    if not len(all_):
        return ()
    cuts = np.flatnonzero(np.diff(all_) != 1) + 1
    starts, ends = all_[np.concatenate([[0], cuts])], all_[np.concatenate([cuts - 1, [len(all_) - 1]])] + 1
    return tuple(Range(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True))
