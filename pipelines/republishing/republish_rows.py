"""The rows of a republish, in log order, and the records that they become.

Promises: a part is read only while its SHA-256 is the ledger's. Memory holds one batch of rows of each source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.audit.audit import list_live_receipts
from sluice.pipelines.errors import Refused, UsageError
from sluice.pipelines.lake import parquet
from sluice.pipelines.landing.landed_rows import Rows, check_source, in_order, read_rows
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import Range, union
from sluice.pipelines.model.receipts import Part, PartKind, Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.rows.row_format import HEADERS, TO_SEND, get_offsets, has_bytes
from sluice.pipelines.records.rows.row_items import NotWritable
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.republishing.republish_plan import Republish, Source
from sluice.pipelines.republishing.row_filter import Condition
from sluice.pipelines.republishing.values import typed_values
from sluice.pipelines.schema.arrays import fill_int64s, fixed_width, int64s, text_array
from sluice.pipelines.schema.schema import KAFKA

CHUNK_ROWS = 8192
"""The most rows that become records at once."""
_ENTRY = HEADERS.value_type


class Shelf:
    """Where the rows of a plan lie: the receipts that count, by source. Of rows, those that meet the condition."""

    def __init__(
        self, lake: Lake, ledger: Ledger, state: State, plan: Republish, condition: Condition | None = None
    ) -> None:
        self._lake, self._plan, self._condition = lake, plan, condition
        self._checked: set[str] = set()
        self._receipts: list[list[Receipt]] = [[] for _ in plan.sources]
        at = {s.key: n for n, s in enumerate(plan.sources)}
        for receipt in list_live_receipts(ledger, state):
            n = at.get(receipt.offset_range.key)
            if n is not None and any(receipt.offset_range.range.meets(r) for r in plan.sources[n].ranges):
                self._receipts[n].append(receipt)
        for receipts in self._receipts:
            receipts.sort(key=lambda r: r.offset_range.start)

    def list_parts(self) -> Sequence[str]:
        """Returns the lake paths of all files to read."""
        return [p.path for receipts in self._receipts for r in receipts for p in self._select_parts(r)]

    def amount(self, source: int) -> tuple[int, int]:
        """Returns an upper bound of the rows of a source and of the bytes of their files."""
        parts = [p for r in self._receipts[source] for p in self._select_parts(r)]
        return sum(p.rows for p in parts), sum(p.bytes for p in parts)

    def list_replayed(self, source: int) -> Sequence[Range]:
        """Offsets of a source that a replay took out of quarantine and landed."""
        return union(x for r in self._receipts[source] for x in r.relanded)

    def cursor(self, source: int, first: int) -> RowCursor:
        """A cursor over the rows of a source, from offset `first` on."""
        rows = self._rows(r for r in self._receipts[source] if r.offset_range.end > first)
        return RowCursor(self._condition.filter(rows) if self._condition else rows)

    def _select_parts(self, receipt: Receipt) -> Sequence[Part]:
        wishes = self._plan.wishes
        return [p for p in receipt.of(wishes.kind) if wishes.output in ("", p.output)]

    def _rows(self, receipts: Iterator[Receipt]) -> Rows:
        for receipt in receipts:
            parts = self._select_parts(receipt)
            files = [self._part(p) for p in parts]
            # Files by record time, and those of outputs, overlap in offsets; all others follow one another.
            overlapping = receipt.offset_range.by_time or any(p.output for p in parts)
            yield from in_order(files) if overlapping else chain.from_iterable(files)

    def _part(self, part: Part) -> Rows:
        if part.path not in self._checked:
            check_source(self._lake, self._plan.feed, part)
            self._checked.add(part.path)
        with parquet.wrap_read_errors(part.path), self._lake.open(part.path) as opened:
            for rows in read_rows(opened, part):
                # Stand-ins for oversized records are no records to send.
                yield rows.filter(has_bytes(rows)) if part.kind is PartKind.QUARANTINED else rows


class RowCursor:
    """Rows of one source, taken in ascending pieces."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._rest: pa.RecordBatch | None = None

    def read_between(self, start: int, end: int, limit: Callable[[], int]) -> Iterator[pa.RecordBatch]:
        """Yields the rows with offsets in [start, end), in pieces of limited size. Pieces must not go back."""
        while (batch := self._next()) is not None:
            first, stop = (int(n) for n in np.searchsorted(get_offsets(batch), (start, end)))
            stop_here = min(stop, first + limit())
            if stop_here < batch.num_rows:
                self._rest = batch.slice(stop_here)  # before the yield: the caller may stop there
            if first < stop_here:
                yield batch.slice(first, stop_here - first)
            elif stop < batch.num_rows:
                return

    def _next(self) -> pa.RecordBatch | None:
        batch, self._rest = self._rest, None
        return batch if batch is not None else next(self._rows, None)


def records_of(rows: pa.RecordBatch, source: Source, plan: Republish, shape: Shape, now: int) -> pa.RecordBatch:
    """The rows as records to send (`records.format.TO_SEND`). `shape`: the feed's; `now` (ms): the time of records
    whose own is not kept. Raises UsageError, and Refused for a row that its schema has no room for."""
    wishes, typed = plan.wishes, KAFKA + "offset" in rows.schema.names
    prefix = KAFKA if typed else ""
    value = _typed_values(rows, source, plan, shape) if typed else rows.column("value")
    if wishes.keep_timestamps:
        stamps = pc.fill_null(rows.column(f"{prefix}timestamp").cast(pa.timestamp("ms", "UTC")).cast(pa.int64()), -1)
    else:
        stamps = fixed_width(pa.int64(), np.full(rows.num_rows, now, np.int64))
    headers = rows.column(f"{prefix}headers").cast(HEADERS)
    if wishes.headers:
        headers = with_coordinates(headers, source, get_offsets(rows))
    return pa.RecordBatch.from_arrays(
        [rows.column(f"{prefix}key").cast(pa.binary()), value.cast(pa.binary()), stamps, headers], schema=TO_SEND
    )


def _typed_values(rows: pa.RecordBatch, source: Source, plan: Republish, shape: Shape) -> pa.Array:
    if shape.columns is None:
        raise UsageError(
            f"rows of {plan.feed} are typed, and its feed file no longer has a schema",
            remedy="put the schema back to send them",
        )
    try:
        return typed_values(rows, shape, plan.wishes.schema_id)
    except NotWritable as error:
        raise Refused(
            f"the row of {source.key}:{int(get_offsets(rows)[error.item])} does not fit the feed's own schema: {error}",
            remedy="nothing of this transaction was sent; leave such rows out with --where, under a new --id",
        ) from None


_COORDINATES = ("sluice.topic", "sluice.partition", "sluice.offset")


def with_coordinates(headers: pa.Array, source: Source, offsets: np.ndarray) -> pa.Array:
    """Headers with those of the record's old coordinates after them, as in dead letters."""
    rows, width = len(offsets), len(_COORDINATES)
    lists = int64s(headers.offsets.cast(pa.int64())) if rows else np.zeros(1, np.int64)
    counts = fill_int64s(pc.list_value_length(headers).cast(pa.int64()), 0)
    ends = np.concatenate([[0], np.cumsum(counts + width)])
    ours = _coordinate_entries(source, offsets)
    base = len(headers.values)
    # Where each entry comes from: the record's own first, then ours.
    takes = np.empty(int(ends[-1]), np.int64)
    row = np.repeat(np.arange(rows), counts + width)
    within = np.arange(len(takes)) - ends[row]
    own = within < counts[row]
    takes[own] = (lists[:-1][row] + within)[own]
    takes[~own] = (base + row * width + within - counts[row])[~own]
    entries = pa.concat_arrays([headers.values.cast(_ENTRY), ours]).take(fixed_width(pa.int64(), takes))
    return pa.ListArray.from_arrays(fixed_width(pa.int32(), ends.astype(np.int32)), entries, type=HEADERS)


def _coordinate_entries(source: Source, offsets: np.ndarray) -> pa.StructArray:
    """Three for each row. Topic and partition are the same for all."""
    rows, width = len(offsets), len(_COORDINATES)
    texts = pa.concat_arrays(
        [text_array([source.topic, str(source.partition)]), fixed_width(pa.int64(), offsets).cast(pa.string())]
    )
    positions = np.tile(np.arange(width), rows)
    chosen = positions.copy()
    chosen[width - 1 :: width] += np.arange(rows)
    columns = [text_array(_COORDINATES).take(fixed_width(pa.int64(), positions))]
    columns.append(texts.take(fixed_width(pa.int64(), chosen)).cast(pa.binary()))
    return pa.StructArray.from_arrays(columns, fields=list(_ENTRY))
