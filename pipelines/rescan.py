"""Proof against Kafka itself: what landed, compared value by value with what the log holds now (invariants 1 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines import layout
from sluice.pipelines.audit import AuditReport, Problem, live_receipts
from sluice.pipelines.decode import BatchDecoder
from sluice.pipelines.formats import Format
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ports import Fetcher, FetchFailed, FetchLimits, Lake
from sluice.pipelines.values import Isolation, Key, PartitionState, PartKind, Receipt, Slice


@dataclass(frozen=True, slots=True)
class Compared:
    """What comparing one slice gave: records compared, and the first difference if there is one."""

    records: int
    problem: Problem | None


def rescan(
    report: AuditReport,
    ledger: Ledger,
    lake: Lake,
    fetcher: Fetcher,
    format: Format,
    isolation: Isolation,
    partitions: Mapping[Key, PartitionState],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AuditReport:
    """The report with every landed slice that Kafka still holds read again and compared.

    `partitions` is today's log by key; slices of other incarnations, or below the log start, are counted as not
    comparable. `progress` hears (offsets done, of all).
    """
    receipts = live_receipts(ledger, ledger.read())
    held = [r for r in receipts if _held(r, partitions)]
    total, done, compared = sum(r.slice.span for r in held), 0, 0
    problems: list[Problem] = []
    for r in held:
        result = _compare(r, lake, fetcher, format, isolation)
        compared += result.records
        problems += [result.problem] if result.problem else []
        done += r.slice.span
        progress(done, total)
    rest = sum(r.counts.landed for r in receipts) - sum(r.counts.landed for r in held)
    return replace(report, problems=report.problems + tuple(problems), compared=compared, not_comparable=max(rest, 0))


def _held(r: Receipt, partitions: Mapping[Key, PartitionState]) -> bool:
    today = partitions.get(r.slice.key)
    return today is not None and today.log_start <= r.slice.start and r.slice.end <= today.high_watermark


def _compare(r: Receipt, lake: Lake, fetcher: Fetcher, format: Format, isolation: Isolation) -> Compared:
    landed = _Rows(_parts(r, lake))
    records = 0
    try:
        for chunk in _from_kafka(r.slice, fetcher, format, isolation):
            rows = landed.take(chunk.num_rows)
            if rows is None or not rows.equals(pa.Table.from_batches([chunk]).cast(rows.schema)):
                return Compared(records, _difference(r, chunk, rows))
            records += chunk.num_rows
    except _Failed as e:
        return Compared(records, Problem(1, f"{r.slice}: cannot be read again: {e}"))
    if landed.take(1) is not None:
        return Compared(records, Problem(3, f"{r.slice}: more rows landed than the log holds"))
    return Compared(records, None)


class _Failed(Exception):
    pass


def _from_kafka(s: Slice, fetcher: Fetcher, format: Format, isolation: Isolation) -> Iterator[pa.RecordBatch]:
    committed = isolation is Isolation.READ_COMMITTED
    decoder = BatchDecoder(s.topic, s.partition, s.start, s.end, read_committed=committed)
    for fetched in fetcher.stream([s], FetchLimits()):
        if isinstance(fetched, FetchFailed):
            raise _Failed(fetched.error.message)
        yield from _formatted(decoder.feed(fetched.records, fetched.aborted), s, format)
    yield from _formatted(decoder.finish(), s, format)


def _formatted(chunks: Iterator[pa.RecordBatch], s: Slice, format: Format) -> Iterator[pa.RecordBatch]:
    for chunk in chunks:
        for piece in format.convert(s, chunk):
            if piece.landed.num_rows:
                yield piece.landed


def _parts(r: Receipt, lake: Lake) -> Iterator[pa.RecordBatch]:
    """The landed rows in offset order; by record time, a slice's files are sorted together."""
    batches = _batches(r, lake)
    if not r.slice.by_time:
        yield from batches
    elif held := list(batches):
        table = pa.Table.from_batches(held)
        yield from table.sort_by(layout.offset_column(table.schema)).to_batches(1 << 16)


def _batches(r: Receipt, lake: Lake) -> Iterator[pa.RecordBatch]:
    for part in r.parts:
        if part.kind is PartKind.LANDED:
            with lake.open(part.path) as f:
                yield from pq.ParquetFile(f).iter_batches(batch_size=1 << 16)


class _Rows:
    """Rows of a part, taken as many at a time as the other side has."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._held: list[pa.RecordBatch] = []

    def take(self, count: int) -> pa.Table | None:
        """The next `count` rows; None when there are fewer."""
        have = sum(b.num_rows for b in self._held)
        while have < count:
            batch = next(self._batches, None)
            if batch is None:
                return None
            self._held.append(batch)
            have += batch.num_rows
        table = pa.Table.from_batches(self._held)
        self._held = table.slice(count).to_batches()
        return table.slice(0, count)


def _difference(r: Receipt, chunk: pa.RecordBatch, rows: pa.Table | None) -> Problem:
    if rows is None:
        return Problem(1, f"{r.slice}: the log holds more records than landed")
    name = layout.offset_column(chunk.schema)
    there = chunk.column(chunk.schema.get_field_index(name)).to_pylist()
    mine: Sequence[int] = rows.column(name).to_pylist()
    for i, (a, b) in enumerate(zip(there, mine, strict=True)):
        if a != b:
            missing = a < b
            return Problem(
                1 if missing else 3, f"{r.slice}: offset {min(a, b)} is {'not landed' if missing else 'not in the log'}"
            )
        if chunk.slice(i, 1).to_pylist() != rows.slice(i, 1).to_pylist():
            return Problem(3, f"{r.slice}: the record at offset {a} is not what landed")
    return Problem(3, f"{r.slice}: differs in type from what landed")
