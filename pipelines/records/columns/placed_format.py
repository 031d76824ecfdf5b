"""A `Format` that makes the columns of paths and headers from another format's rows.

Promise: a record lands if its value fits and each `not null` column has a value, and is else quarantined as it came.
Rows stay in offset order. Works on whole columns, and copies no values that another column does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.records.columns.loops import find_last
from sluice.pipelines.records.columns.reasons import Reason
from sluice.pipelines.records.columns.typed_format import encode_texts
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.rows.refusals import OFFSET, get_tombstones, refuse_rows
from sluice.pipelines.records.rows.row_format import Format, Formatted, escape_key, landed_schema
from sluice.pipelines.schema.arrays import as_mask, int64s, text_array
from sluice.pipelines.schema.layout import HIDDEN, Layout, Source, Step, make_layout
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Field, Kind, Schema, arrow_type

_HEADERS = f"{KAFKA}headers"
_Fault = tuple[Array, Source, Reason, str]
"""A mask of the rows that do not fit a column, why, and a sentence."""


class PlacedFormat:
    """Adds the columns of paths and headers to the rows of `behind`, which has the reading schema of `columns`.

    With `dropping`, records that do not fit are counted and left out instead of quarantined.
    """

    def __init__(self, behind: Format, columns: Schema, *, dropping: bool = False) -> None:
        self.schema, self.contract = landed_schema(columns), behind.contract
        self._behind, self._layout, self._dropping = behind, make_layout(columns), dropping
        self._read = [behind.schema.get_field_index(f.name) for f in self._layout.reading.fields]

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The other format's pieces with all columns, and without the rows that do not fit these."""
        for piece in self._behind.convert(s, chunk):
            yield self._place(s, chunk, piece)

    def _place(self, s: OffsetRange, chunk: pa.RecordBatch, piece: Formatted) -> Formatted:
        columns, faults = list[pa.Array](), list[_Fault]()
        rows = piece.landed
        for source in self._layout.sources:
            if source.field.header is not None:
                column, broken = read_header(rows.column(rows.schema.get_field_index(_HEADERS)), source.field)
                if broken is not None:
                    faults.append((broken, source, Reason.INVALID_UTF8, "bytes that are not UTF-8"))
            else:
                column = _take(rows.column(self._read[source.column]), source)
            columns.append(column)
            if source.is_copy and source.field.required and column.null_count:
                missing = as_mask(column.is_null()) & ~as_mask(get_tombstones(rows))
                faults.append((missing, source, Reason.MISSING, f"is missing, and should be {source.field.type}"))
        arrays = [*columns, *rows.columns[len(self._read) :]]
        drift = (d for d in piece.drift if d.kind is not DriftKind.MISSING or not d.field.startswith(HIDDEN))
        piece = replace(piece, landed=pa.RecordBatch.from_arrays(arrays, schema=self.schema), drift=tuple(drift))
        if any(mask.any() for mask, *_ in faults):
            piece = _refuse(piece, s, chunk, faults, self._dropping)
        return replace(piece, drift=(*piece.drift, *_find_missing(piece, self._layout)))


def _find_missing(piece: Formatted, layout: Layout) -> Iterator[Drift]:
    """The columns of paths and headers that no row with a value has."""
    if piece.typed:
        first = int(int64s(piece.landed.column(piece.landed.schema.get_field_index(OFFSET)))[0])
        for source, column in zip(layout.sources, piece.landed.columns, strict=False):
            if (source.field.path or source.field.header is not None) and column.null_count == len(column):
                yield Drift(DriftKind.MISSING, source.field.name, piece.typed, first, source.field.text)


def _refuse(
    piece: Formatted, s: OffsetRange, chunk: pa.RecordBatch, faults: Sequence[_Fault], dropping: bool
) -> Formatted:
    """The piece without the rows of any fault. Each is refused for the first."""
    which = np.full(piece.landed.num_rows, -1, np.int32)
    for n, (mask, *_) in reversed([*enumerate(faults)]):
        which[mask] = n
    chosen = which[which >= 0]
    none = np.zeros(len(chosen), np.bool_)
    reasons = [reason for _, _, reason, _ in faults]
    why = [
        encode_texts([str(reason.stage) for reason in reasons], chosen),
        encode_texts([str(reason) for reason in reasons], chosen),
        encode_texts([""], np.zeros(len(chosen), np.int32), none),
        encode_texts([source.field.name for _, source, *_ in faults], chosen),
        encode_texts([f"{detail} ({source.field.place})" for _, source, _, detail in faults], chosen),
        pa.nulls(len(chosen), pa.int32()),
    ]
    return refuse_rows(piece, s, chunk, which < 0, why, dropping)


def read_header(headers: pa.ListArray, f: Field) -> tuple[pa.Array, Array | None]:
    """The values of the column's header, and a mask of those that are not UTF-8 where text is needed (None: there are
    none). The last header of the name counts, as in Kafka's `lastHeader`."""
    lists = np.frombuffer(headers.buffers()[1], np.int32)[headers.offset : headers.offset + len(headers) + 1]
    keys = headers.values.field(0)
    _, ends, data = keys.buffers()
    items = np.empty(len(headers), np.int32)
    name = np.frombuffer(escape_key((f.header or "").encode()).encode(), np.uint8)
    ends = np.frombuffer(ends, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    find_last(lists, ends, np.frombuffer(data or b"", np.uint8), name, items)
    values = headers.values.field(1).take(_make_indices(items, items >= 0))
    return (values, None) if f.type.kind is Kind.BINARY else _as_text(values)


def _as_text(values: pa.Array) -> tuple[pa.Array, Array | None]:
    try:
        return values.cast(pa.string()), None
    except pa.ArrowInvalid:
        broken = np.array([not _is_text(value) for value in values.to_pylist()], np.bool_)
        valid = _make_indices(np.arange(len(values), dtype=np.int32), ~broken)
        return values.take(valid).cast(pa.string()), broken


def _is_text(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _make_indices(indices: Array, there: Array) -> pa.Array:
    """Indices for `take`, null where nothing is there."""
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(pa.int32(), len(indices), [valid, pa.py_buffer(indices)])


def _take(column: pa.Array, source: Source) -> pa.Array:
    """The values that a column's steps lead to, as its type."""
    for step in source.steps:
        column = _step_into(column, step, is_copy=source.is_copy)
    kind = arrow_type(source.field.type)
    return column if column.type.equals(kind) else column.cast(kind)


def _step_into(column: pa.Array, step: Step, *, is_copy: bool) -> pa.Array:
    kind, at = step
    if kind is Kind.STRUCT:
        # A hidden struct comes from JSON: members of a null one are null.
        return pc.struct_field(column, [at]) if is_copy else column.field(at)
    if kind is Kind.MAP:
        return pc.map_lookup(column, text_array([str(at)])[0], "last")
    starts = np.frombuffer(column.offsets.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    there = (np.diff(starts) > int(at)) & as_mask(column.is_valid())
    return column.values.take(_make_indices(np.where(there, starts[:-1] + int(at), 0).astype(np.int32), there))


def restore_rows(rows: pa.RecordBatch, schema: Schema) -> tuple[pa.RecordBatch, Schema]:
    """Rows of a schema with the columns of its reading schema, and that: as records hold the values.

    A hidden struct is there where any column in it has a value, or where `_extra` names it.
    """
    layout = make_layout(schema)
    if layout.is_plain:
        return rows, schema
    at = rows.schema.get_field_index(EXTRA)
    extra = rows.column(at) if at >= 0 else pa.nulls(rows.num_rows, pa.string())
    names = [f.name for f in layout.reading.fields if not f.name.startswith(HIDDEN) and f.name in rows.schema.names]
    names += [name for name in rows.schema.names if name not in {s.field.name for s in layout.sources}]
    hidden = [_restore(rows, f, extra) for f in layout.hidden]
    arrays = [*(rows.column(rows.schema.get_field_index(name)) for name in names), *hidden]
    return pa.RecordBatch.from_arrays(arrays, [*names, *(f.name for f in layout.hidden)]), layout.reading


def _restore(rows: pa.RecordBatch, f: Field, extra: pa.Array) -> pa.Array:
    """A hidden struct of landed columns."""
    if not f.name.startswith(HIDDEN):
        at = rows.schema.get_field_index(f.name)
        return rows.column(at) if at >= 0 else pa.nulls(rows.num_rows, arrow_type(f.type))
    members = [_restore(rows, inside, extra) for inside in f.type.fields]
    there = as_mask(pc.match_substring(extra, f.json_name)) | as_mask(pc.match_substring(extra, "\\"))
    for member in members:
        there |= as_mask(member.is_valid())
    fields = [pa.field(inside.name, member.type) for inside, member in zip(f.type.fields, members, strict=True)]
    bits = pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(pa.struct(fields), rows.num_rows, [bits], children=members)
