"""Compares landed and quarantined records with the current log in Kafka (invariants 1 and 3).

Rows are decoded again with their original shape from the ledger, so the feed's schema and contract may have changed
since. The quarantine has the rows that the contract refused; their bytes are compared with the log's. A re-landed row
must match one of the shapes that its offset range has had. Rows with repaired bytes are not compared, nor are records
that Kafka has deleted since: below the log start, or, in a compacted topic, anywhere. Erased records are left out.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from threading import Event, Lock
from typing import Any, cast

import numpy as np
import pyarrow as pa

from sluice.pipelines.audit.audit import AuditProblem, AuditReport
from sluice.pipelines.audit.receipt_rows import NEVER, ReceiptRow
from sluice.pipelines.errors import OffsetsLost, OversizedBatch, PartUnreadable, Terminal
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.model.kafka import FetchLimits, Isolation, Key, PartitionState, Range
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import PartKind, Progress, Receipt, Reporter
from sluice.pipelines.planning.schema_changes import shape_named
from sluice.pipelines.ports import Fetcher, FetchFailed, Lake
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions
from sluice.pipelines.records.rows.protected import protect_records
from sluice.pipelines.records.rows.row_format import (
    HEADERS,
    Format,
    RawFormat,
    get_former_text,
    get_offsets,
    inside,
    offset_column,
    without_offsets,
)
from sluice.pipelines.records.rows.split_rule import OTHERWISE, Otherwise
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.rows.writer_schema_lookup import Opened, Opener, without_prefix, without_wrapper
from sluice.pipelines.records.shape import Shape, Split
from sluice.pipelines.records.split_format import SplitFormat
from sluice.pipelines.schema.arrays import as_mask, find_equal, fixed_width, int64s
from sluice.pipelines.schema.schema import Schema
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.parallel import AT_ONCE


@dataclass(frozen=True, slots=True)
class RangeComparison:
    """The comparison of one offset range: the number of compared records, the first difference, if any, and the number
    of its rows whose records Kafka has deleted."""

    records: int
    problem: AuditProblem | None
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class CurrentLog:
    """The current log in Kafka: its partitions, and a reader for them.

    `compacted`: whether Kafka compacts each topic, without topics whose policy is unknown.
    """

    fetcher: Fetcher
    isolation: Isolation
    partitions: Mapping[Key, PartitionState]
    compacted: Mapping[str, bool] = field(default_factory=dict)


def rescan(
    report: AuditReport,
    ledger: Ledger,
    lake: Lake,
    shape: Shape,
    log: CurrentLog,
    report_progress: Reporter = lambda progress: None,
) -> AuditReport:
    """Compare every landed offset range that Kafka still holds, unless an earlier rescan did. Returns the extended
    report.

    `shape` is the feed's, for ranges whose shape the ledger does not have.
    Ranges of other incarnations, or below the log start, count as not comparable. Unreadable data, in the lake or in
    the log, is a problem and ends the comparison of its range only. Progress counts offsets.
    """
    unproven = report.list_uncompared()
    # Kafka has deleted the records of the others.
    there = [row for row in unproven if _log_holds(row, log.partitions)]
    total, done, compared, deleted = sum(row.range.span for row in there), 0, 0, 0
    files = {p.file for p in report.problems if p.file}
    problems: list[AuditProblem] = []
    right: list[ReceiptRow] = []
    with closing(_compare_all(ledger, lake, shape, log, _receipts(ledger, there))) as results:
        for row, result in results:
            compared, deleted = compared + result.records, deleted + result.deleted
            # A missing or damaged file is a problem already, with a better text.
            problems += [p for p in [result.problem] if p and p.file not in files]
            # A range with records that compaction has deleted since is not proved as a whole.
            right += [] if result.problem or result.deleted else [row]
            done += row.range.span
            report_progress(Progress("compare", done, total))
    rows = report.audited.rows
    return replace(
        report,
        problems=report.problems + tuple(problems),
        compared=compared,
        not_comparable=max(sum(r.landed for r in unproven) - sum(r.landed for r in there), 0) + deleted,
        compared_before=int(rows.column("landed")[rows.column("compared") != NEVER].sum()),
        audited=replace(report.audited, rows=rows.mark("compared", right, report.at // 1000)),
    )


def _receipts(ledger: Ledger, rows: Iterable[ReceiptRow]) -> Iterator[tuple[ReceiptRow, Receipt]]:
    """Yields the receipts of the rows, entry by entry."""
    by_entry: dict[int, dict[tuple[Key, Range], ReceiptRow]] = {}
    for row in rows:
        by_entry.setdefault(row.number, {})[row.key, row.range] = row
    for number, wanted in sorted(by_entry.items()):
        entry = ledger.entry(number)
        for r in entry.receipts if isinstance(entry, PublishEntry) else ():
            if (receipt := wanted.pop((r.offset_range.key, r.offset_range.range), None)) is not None:
                yield receipt, r


_TOGETHER = 1024
"""The most receipts that are in memory at once."""
_PIECE_RANGES, _PIECE_OFFSETS = 128, 1 << 18
"""The ranges of a partition that a thread compares at a time, and their offsets."""
_LIMITS = FetchLimits(request_bytes=4 << 20, ahead_bytes=8 << 20)
"""For each of up to eight threads."""

Pair = tuple[ReceiptRow, Receipt]


def _cut(batch: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yields receipts of one partition, in log order, that one stream of fetches can read."""
    for of_key in group_by(batch, lambda pair: pair[0].key).values():
        piece, offsets = list[Pair](), 0
        for pair in sorted(of_key, key=lambda pair: pair[0].range.start):
            if len(piece) >= _PIECE_RANGES or offsets >= _PIECE_OFFSETS:
                yield piece
                piece, offsets = [], 0
            piece.append(pair)
            offsets += pair[0].range.span
        yield piece


def _compare_all(
    ledger: Ledger, lake: Lake, shape: Shape, log: CurrentLog, rows: Iterator[Pair]
) -> Generator[tuple[ReceiptRow, RangeComparison], None, None]:
    """Yields results by partition and offset, of `_TOGETHER` receipts at a time. Close it to end early.

    Each core has a thread: decoding, reading and comparing rows let others run.
    """
    cores, lock, ended = min(os.cpu_count() or 1, AT_ONCE), Lock(), Event()
    free = [_Makers(ledger, shape, lake) for _ in range(cores)]  # formats have a state: one thread has them at a time

    def compare(piece: Sequence[Pair]) -> list[RangeComparison]:
        makers, results = free.pop(), list[RangeComparison]()
        with closing(_LogReader(log, [r for _, r in piece], ended)) as reader:
            for _, r in piece:
                with lock:
                    own = makers.of(r)
                results.append(_compare_range(ledger.feed, r, own, lake, reader))
                if ended.is_set():
                    break
        free.append(makers)
        return results

    with ThreadPoolExecutor(cores, "sluice-rescan") as pool:
        try:
            while batch := list(islice(rows, _TOGETHER)):
                pieces = [*_cut(batch)]
                for piece, results in zip(pieces, pool.map(compare, pieces), strict=True):
                    yield from zip((row for row, _ in piece), results, strict=True)
        finally:
            ended.set()


def _log_holds(row: ReceiptRow, partitions: Mapping[Key, PartitionState]) -> bool:
    today = partitions.get(row.key)
    return today is not None and today.log_start <= row.range.start and row.range.end <= today.high_watermark


@dataclass(frozen=True, slots=True)
class _Maker:
    """A shape and the format that makes its rows, without its contract. Of records that no output takes, none lands."""

    shape: Shape
    format: Format
    lands: bool = True


class _Makers:
    """Finds the shapes that made the rows of a receipt."""

    def __init__(self, ledger: Ledger, shape: Shape, lake: Lake) -> None:
        self._ledger, self._state, self._own = ledger, ledger.read(), shape
        self._writers = KeptSchemas(lake, ledger.feed)
        self._made: dict[str, _Maker] = {}

    def of(self, r: Receipt) -> list[_Maker]:
        """Returns the maker of the receipt's rows and, after a replay, those of the receipts that it replaced."""
        names = [r.format]
        if r.relanded:
            names += [b.format for b in self._before(r)]
        return [self._find_maker(name) for name in dict.fromkeys(names)]

    def _before(self, r: Receipt) -> Iterator[Receipt]:
        """Returns every receipt ever published for the range's offsets."""
        published = (e for _, e in self._ledger.entries() if isinstance(e, PublishEntry))
        mine = (b for e in published for b in e.receipts if b.offset_range.key == r.offset_range.key)
        return (
            b for b in mine if b.offset_range.start < r.offset_range.end and r.offset_range.start < b.offset_range.end
        )

    def _find_maker(self, name: str) -> _Maker:
        if name not in self._made:
            shape = shape_named(self._ledger, self._state, name, self._own.protection) or self._own
            self._made[name] = _Maker(shape, _without_checks(shape).format(self._writers))
        return self._made[name]


def _without_checks(shape: Shape) -> Shape:
    """The shape without its contracts, which drops no record."""
    split = shape.split
    if split is not None:
        split = Split(split.rule, {name: _without_checks(own) for name, own in split.shapes.items()})
    return replace(shape, contract=None, dropping=False, split=split)


class _LogUnreadable(Exception):
    pass


class _LogDeleted(Exception):
    """Retention has deleted records of the range since the partitions were described."""


class _LogReader:
    """Reads offset ranges of a partition from the current log, in one stream of fetches, until `ended` is set."""

    def __init__(self, log: CurrentLog, receipts: Sequence[Receipt], ended: Event) -> None:
        self.log, self._ended = log, ended
        self._indices = {r.offset_range: index for index, r in enumerate(receipts)}
        self._stream = log.fetcher.stream([r.offset_range for r in receipts], _LIMITS)

    def read(self, r: Receipt) -> Iterator[tuple[OversizedBatch | None, pa.RecordBatch]]:
        """Yields the chunks of `BatchDecoder.read`; batches are oversized that were so when the receipt was written.

        Skips the rest of ranges before it.
        """
        s, committed = r.offset_range, self.log.isolation is Isolation.READ_COMMITTED
        options = DecodeOptions(read_committed=committed)
        options = replace(options, max_batch_bytes=r.batch_bytes or options.max_batch_bytes)
        decoder = BatchDecoder(s.topic, s.partition, s.start, s.end, options)
        for fetched in self._stream:
            if self._ended.is_set():
                raise _LogUnreadable("the audit was interrupted")
            if fetched.index != self._indices[s]:
                continue
            if isinstance(fetched, FetchFailed):
                raise (_LogDeleted if isinstance(fetched.error, OffsetsLost) else _LogUnreadable)(fetched.error.message)
            yield from decoder.read(fetched.records, fetched.aborted)
            if fetched.last:
                break
        yield from ((None, chunk) for chunk in decoder.finish())

    def close(self) -> None:
        """End the stream."""
        cast(Any, self._stream).close()


def _compare_range(feed: str, r: Receipt, makers: Sequence[_Maker], lake: Lake, reader: _LogReader) -> RangeComparison:
    """Compare one offset range's files, damaged or not, with its log."""
    s, remedy = r.offset_range, paths.landing_remedy(feed, str(r.offset_range))
    if any(m.shape.protection and m.shape.protection.lacks_keys for m in makers):
        return RangeComparison(0, None, r.counts.landed)
    try:
        compacted = reader.log.compacted.get(s.topic)
        comparers = _list_comparers(r, makers, lake, compacted)
        return _compare_log(r, makers, comparers, reader.read(r), compacted)
    except (_LogDeleted, OversizedBatch):
        return RangeComparison(0, None, r.counts.landed)
    except PartUnreadable as e:
        return RangeComparison(0, AuditProblem(3, e.message, e.path, remedy, (s,)))
    except _LogUnreadable as e:
        return RangeComparison(0, AuditProblem(1, f"{s}: cannot be read again: {e}"))
    except Terminal as e:  # the log does not parse, or the lake refuses a file
        return RangeComparison(0, AuditProblem(1, f"{s}: cannot be compared: {e.message}", "", e.remedy))
    except parquet.DAMAGE as e:  # readable, but not the content of a part
        return RangeComparison(
            0,
            AuditProblem(3, f"{s}: its files cannot be compared with the log: {parquet.shorten_error(e)}", "", remedy),
        )


def _list_comparers(
    r: Receipt, makers: Sequence[_Maker], lake: Lake, compacted: bool | None
) -> dict[str, _RangeComparer]:
    """Returns a comparer of the range's files for each output of any maker.

    That under the empty name is of a feed without `split`, or of records that no output takes.
    """
    shape, of = makers[0].shape, dict[str, list[_Maker]]()
    if shape.split is None:
        return {"": _RangeComparer(r, makers, lake, compacted)}
    for maker in makers:
        if (split := maker.shape.split) is None:
            continue
        form, rest = cast(SplitFormat, maker.format), maker.shape.datasets[OTHERWISE]
        drops = split.rule.otherwise is Otherwise.DROP
        own = {name: _Maker(shape, form.outputs[name].format) for name, shape in split.shapes.items()}
        own[OTHERWISE] = _Maker(rest, form.rest)
        own[""] = _Maker(replace(rest, dropping=drops), form.rest, lands=False)
        for name, mine in own.items():
            of.setdefault(name, []).append(mine)
    return {name: _RangeComparer(shape.select(r, name), own, lake, compacted) for name, own in of.items()}


def _distribute(
    s: OffsetRange, makers: Sequence[_Maker], comparers: Mapping[str, _RangeComparer], chunk: pa.RecordBatch
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The records of each output that has any.

    After a replay, a record is that of the outputs to which a maker's rule leads it, the newest first, of which one
    has it.
    """
    if len(makers) == 1:
        yield from cast(SplitFormat, makers[0].format).distribute(s, chunk)
        return
    there = get_offsets(chunk)
    chosen, rest = {name: np.zeros(len(there), bool) for name in comparers}, np.ones(len(there), bool)
    own = {name: comparer.mark_own(there) for name, comparer in comparers.items()}
    for maker, must_have in (*((m, True) for m in makers), (makers[0], False)):
        routed = cast(SplitFormat, maker.format).distribute(s, chunk)
        shares = {name: rest & np.isin(there, get_offsets(share)) for name, share in routed}
        taken = np.any([mine & own[name] if must_have else mine for name, mine in shares.items()], axis=0)
        for name, mine in shares.items():
            chosen[name] |= mine & taken
        rest &= ~taken
    for name, mine in chosen.items():
        if mine.any():
            yield name, chunk.take(fixed_width(pa.int32(), np.flatnonzero(mine).astype(np.int32)))


def _compare_log(
    r: Receipt,
    makers: Sequence[_Maker],
    comparers: Mapping[str, _RangeComparer],
    log: Iterator[tuple[OversizedBatch | None, pa.RecordBatch]],
    compacted: bool | None,
) -> RangeComparison:
    """Compare chunk by chunk, each record with the files of its output, up to the first difference."""

    def find_problem() -> AuditProblem | None:
        form, s = makers[0].format, r.offset_range
        for oversized, records in log:
            # Erased records are still in the log, and in no file.
            chunk = without_offsets(records, r.erased) if r.erased else records
            shares: Iterable[tuple[str, pa.RecordBatch]] = [("", chunk)] if len(chunk) else ()
            if len(chunk) and isinstance(form, SplitFormat) and oversized is None:
                shares = _distribute(s, makers, comparers, chunk)
            for name, share in shares:
                if problem := comparers[name].compare_chunk(share, readable=oversized is None):
                    return problem
        if problem := next(filter(None, (c.compare_rest() for c in comparers.values())), None):
            return problem
        # Dropped records are in no file: only their number can be compared.
        missing, dropped = sum(c.dropped for c in comparers.values()), r.counts.dropped
        message = f"{s}: {missing} records are missing, but {dropped} were dropped"
        if missing > dropped:
            return AuditProblem(1, message)
        if missing < dropped and not compacted:
            return AuditProblem(1, message, remedy=_MAYBE_COMPACTED if compacted is None else _LOST_SINCE)
        return None

    problem = find_problem()
    compared, deleted = (sum(getattr(c, name) for c in comparers.values()) for name in ("compared", "deleted"))
    return RangeComparison(min(compared, r.counts.landed), problem, 0 if problem else min(deleted, r.counts.landed))


_MAYBE_COMPACTED = (
    "compaction may have removed it, and this client may not see whether Kafka compacts the topic: allow it to"
    " DESCRIBE_CONFIGS of the topic, and repeat"
)

_LOST_SINCE = (
    "if the file passes --hashes, Kafka lost the record since, unless it compacted the topic for a while: compare the"
    " replicas' logs (kafka-dump-log)"
)


class _RangeComparer:
    """Compares one offset range's files with its log. `compacted`: whether Kafka compacts the topic; None: unknown."""

    def __init__(self, r: Receipt, makers: Sequence[_Maker], lake: Lake, compacted: bool | None) -> None:
        self._receipt, self._makers, self._raw = r, makers, RawFormat()
        self._compacted, self.deleted = compacted, 0
        self._landed, self._refused = (_RowCursor(_parts(r, lake, kind)) for kind in PartKind)
        self._mended = [m for m in r.mended if m.start < r.offset_range.end]
        self.compared = self.dropped = 0

    def mark_own(self, offsets: Array) -> Array:
        """Returns a mask of the offsets, the next in order, whose records the files have."""
        return np.isin(offsets, np.concatenate([c.look_ahead(int(offsets[-1])) for c in (self._landed, self._refused)]))

    def compare_rest(self) -> AuditProblem | None:
        """The difference after the last chunk: rows that the log does not have."""
        end = self._receipt.offset_range.end
        rest = [self._keep(cursor.upto(end), np.empty(0, np.int64)) for cursor in (self._landed, self._refused)]
        more = any(rows is not None for rows in rest)
        return self._build_lack(3, "the files have more rows than the log") if more else None

    def compare_chunk(self, chunk: pa.RecordBatch, *, readable: bool) -> AuditProblem | None:
        """Compare the records of a chunk, which is not empty. Returns the first difference."""
        there = get_offsets(chunk)
        landed, refused = (self._keep(rows.upto(int(there[-1])), there) for rows in (self._landed, self._refused))
        mine, bad = _offsets(landed), _offsets(refused)
        if not readable:
            self.deleted += len(mine)  # landed with more memory: not comparable
            return self._check_places(there, mine, bad) or self._same_bytes(chunk, there, refused, bad)
        return (
            self._check_places(there, mine, bad)
            or self._same_bytes(chunk, there, refused, bad)
            or self._same_rows(chunk, landed, mine, bad)
            or self._as_many_values(chunk, there, landed, mine)
        )

    def _keep(self, rows: pa.Table | None, there: Array) -> pa.Table | None:
        """Returns the rows without those whose records compaction may have removed from the log; None for none."""
        if rows is None or not self._compacted:
            return rows
        positions = np.flatnonzero(np.isin(_offsets(rows), there))
        self.deleted += rows.num_rows - len(positions)
        return _rows_at(rows, positions) if len(positions) else None

    def _build_lack(self, invariant: int, what: str) -> AuditProblem:
        """Returns the problem of a log that lacks records."""
        remedy = _MAYBE_COMPACTED if self._compacted is None else _LOST_SINCE
        return AuditProblem(invariant, f"{self._receipt.offset_range}: {what}", remedy=remedy)

    def _check_places(self, there: Array, mine: Array, bad: Array) -> AuditProblem | None:
        """Check that each record of the log is in exactly one file, and that the files have no others."""
        s, ours = self._receipt.offset_range, np.concatenate([mine, bad])
        if np.array_equal(ours, there):  # nearly always, and far cheaper than looking for each
            return None
        strange = ours[~np.isin(ours, there)]
        if len(strange):
            return self._build_lack(3, f"offset {strange.min()} is not in the log")
        if len(np.unique(ours)) < len(ours):
            return AuditProblem(3, f"{s}: an offset is there twice")
        absent = there[~np.isin(there, ours)]
        if len(absent) and not self._makers[0].shape.dropping:
            return AuditProblem(1, f"{s}: offset {absent[0]} is not landed")
        self.dropped += len(absent)
        return None

    def _same_bytes(
        self, chunk: pa.RecordBatch, there: Array, refused: pa.Table | None, bad: Array
    ) -> AuditProblem | None:
        """Check that quarantined records have the log's bytes, or what one of the makers leaves of them."""
        if refused is None:
            return None
        records = chunk.take(fixed_width(pa.int32(), np.searchsorted(there, bad).astype(np.int32)))
        (raw,) = self._raw.convert(self._receipt.offset_range, records)
        differ, stored = np.ones(len(bad), np.bool_), refused.select(raw.landed.schema.names)
        for maker in self._makers:
            expected = protect_records(maker.format, raw.landed)
            differ &= ~equal_rows(stored, pa.Table.from_batches([expected]))
        wrong = np.flatnonzero(differ)
        return self._problem(bad[wrong[0]], "in quarantine is not the log's") if len(wrong) else None

    def _same_rows(
        self, chunk: pa.RecordBatch, landed: pa.Table | None, mine: Array, bad: Array
    ) -> AuditProblem | None:
        """Check that one of the makers decodes each record to its landed row."""
        unfixed = ~inside(mine, self._mended)
        self.compared += int(unfixed.sum())
        differ: list[str] = []
        for maker in self._makers:
            remade = pa.Table.from_batches([p.landed for p in maker.format.convert(self._receipt.offset_range, chunk)])
            remade = remade if maker.lands else remade.slice(0, 0)
            offsets = _offsets(remade)
            if problem := self._fitting(maker, offsets, mine, bad):
                return problem
            if landed is None or not unfixed.any():
                continue
            both = np.flatnonzero(unfixed if np.array_equal(mine, offsets) else unfixed & np.isin(mine, offsets))
            positions = np.searchsorted(offsets, mine[both])
            equal = equal_rows(_rows_at(landed, both), _rows_at(remade, positions))
            unfixed[both[equal]] = False
            if not equal.all():
                first = np.flatnonzero(~equal)[:1]
                differ = different_columns(_rows_at(landed, both[first]), _rows_at(remade, positions[first]))
        wrong = np.flatnonzero(unfixed)
        self.compared -= len(wrong)
        what = f"differs from the landed row: {', '.join(differ)}" if differ else "differs from the landed row"
        return self._problem(mine[wrong[0]], what) if len(wrong) else None

    def _as_many_values(
        self, chunk: pa.RecordBatch, there: Array, landed: pa.Table | None, mine: Array
    ) -> AuditProblem | None:
        """Check that a JSON record has as many values as its row. A replay may involve several shapes: not checked."""
        shape = self._makers[0].shape
        if landed is None or self._receipt.relanded or shape.protection:
            return None
        if (records := json_values(shape, chunk)) is None:
            return None
        from sluice.pipelines.records.json.counting import values_of_rows, values_of_texts  # late: it takes numba

        wanted = values_of_texts(records)[np.searchsorted(there, mine)]
        counts = values_of_rows(landed, shape.of_values or Schema(()))
        wrong = np.flatnonzero((wanted != counts) & ~inside(mine, self._mended))
        if not len(wrong):
            return None
        first = wrong[0]
        return self._problem(mine[first], f"has {wanted[first]} values, and its row {counts[first]}")

    def _fitting(self, maker: _Maker, offsets: Array, mine: Array, bad: Array) -> AuditProblem | None:
        """Check that no valid record is in quarantine or dropped, without a contract and before any replay."""
        if self._receipt.relanded or maker.shape.contract or np.array_equal(offsets, mine):
            return None
        kept_back = offsets[~np.isin(offsets, mine)]
        where = "fits, and is in quarantine" if np.isin(kept_back[:1], bad).any() else "fits, and was dropped"
        return self._problem(kept_back[0], where) if len(kept_back) else None

    def _problem(self, offset: int, what: str) -> AuditProblem:
        return AuditProblem(3, f"{self._receipt.offset_range}: the record at offset {offset} {what}")


def json_values(shape: Shape, chunk: pa.RecordBatch) -> pa.Array | None:
    """Returns the records of a chunk as JSON, without prefixes; None if they are not JSON."""
    if shape.columns is None or (shape.reader is not None and shape.reader.format != JsonSchemaReader.format):
        return None
    if shape.reader is None or shape.reader.wire is WireFormat.BARE:
        return without_wrapper(Opened(chunk.column(chunk.schema.get_field_index("value"))), shape.columns).values
    return pa.concat_arrays([without_prefix(opened) for _, opened in Opener(shape.reader.wire).open(chunk)])


def _offsets(rows: pa.Table | None) -> Array:
    if rows is None or not rows.num_rows:
        return np.empty(0, np.int64)
    return int64s(rows.column(offset_column(rows.schema)).combine_chunks())


def _rows_at(rows: pa.Table, positions: Array) -> pa.Table:
    is_complete = len(positions) == rows.num_rows
    return rows if is_complete else rows.take(fixed_width(pa.int64(), positions.astype(np.int64)))


def equal_rows(mine: pa.Table, remade: pa.Table) -> Array:
    """Returns a mask of the rows that are equal in all columns of `mine`. Columns that were not made are null."""
    same = np.ones(mine.num_rows, np.bool_)
    for f, column in zip(mine.schema, mine.columns, strict=True):
        if f.name not in remade.schema.names:
            same &= as_mask(column.is_null())
            continue
        try:
            other = remade.column(f.name)
            other = other if other.type.equals(f.type) else other.cast(f.type)
        except pa.ArrowInvalid:  # a type that does not hold the value: not made by this shape
            return np.zeros(mine.num_rows, np.bool_)
        if column.equals(other):
            continue
        equal = find_equal(column, other)
        if f.type.equals(HEADERS) and not equal.all():  # a file written before keys of headers were escaped
            equal |= find_equal(column, pa.chunked_array([_former_headers(other)]))
        same &= equal
    return same


def different_columns(mine: pa.Table, remade: pa.Table) -> list[str]:
    """Returns the columns of `mine` in which any row differs."""
    return [name for name in mine.schema.names if not equal_rows(mine.select([name]), remade).all()]


def _former_headers(column: pa.ChunkedArray) -> pa.Array:
    pairs = ([(get_former_text(h["key"]), h["value"]) for h in row] if row else row for row in column.to_pylist())
    return pa.array([[{"key": k, "value": v} for k, v in row] if row else row for row in pairs], HEADERS)


def _parts(r: Receipt, lake: Lake, kind: PartKind) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a kind in offset order. Files cut by record time are merged."""
    batches = _batches(r, lake, kind)
    if not r.offset_range.by_time:
        yield from batches
    elif read_batches := list(batches):
        table = pa.Table.from_batches(read_batches)
        yield from table.sort_by(offset_column(table.schema)).to_batches(1 << 16)


def _batches(r: Receipt, lake: Lake, kind: PartKind) -> Iterator[pa.RecordBatch]:
    for part in r.parts:
        if part.kind is kind:
            yield from parquet.read_part(lake, part, part.path, 1 << 16, use_threads=False)


class _RowCursor:
    """Rows in offset order, taken up to a given offset each time."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._next: pa.RecordBatch | None = next(batches, None)

    def upto(self, last: int) -> pa.Table | None:
        """Returns the next rows up to the offset `last`; None if there are none."""
        taken: list[pa.RecordBatch] = []
        while self._next is not None:
            offsets = get_offsets(self._next)
            n = int(np.searchsorted(offsets, last, side="right"))
            taken += [self._next.slice(0, n)] if n else []
            if n < len(offsets):
                self._next = self._next.slice(n)
                break
            self._next = next(self._batches, None)
        return pa.Table.from_batches(taken) if taken else None

    def look_ahead(self, last: int) -> Array:
        """Returns the offsets of the next rows up to the offset `last`. They stay the next ones."""
        if (rows := self.upto(last)) is not None:
            self._batches = chain(rows.to_batches(), () if self._next is None else (self._next,), self._batches)
            self._next = next(self._batches)
        return _offsets(rows)
