"""Rows of the feed's columns as Avro again: the bytes of a record by the feed's own schema, column by column.

The reverse of `loops`, in plain Python over whole columns. Details that landing drops cannot come back: a union of one
type and null has one branch, and arrays and maps are one block each. Raises NotWritable for values that the schema does
not allow, such as a null in a field without null.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro.reader_schema import DURATION, get_column_type, has_no_size, list_branches
from sluice.pipelines.records.avro.schema import AvroField, AvroKind, AvroType
from sluice.pipelines.records.rows.row_items import (
    NotWritable,
    Written,
    at,
    join_parts,
    take_items,
    write_floats,
    write_symbols,
)
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.arrays import as_mask, int64s
from sluice.pipelines.schema.schema import arrow_type

_FEW = 128  # numbers whose bytes are made once


def encode_rows(rows: pa.RecordBatch, t: AvroType, wire: WireFormat = WireFormat.BARE) -> Written:
    """The bytes of each row by the record type `t`. A field whose column is not there is null."""
    columns = {name: rows.column(n) for n, name in enumerate(rows.schema.names)}
    if not t.name and has_no_size(t.fields[0].type, wire):
        (only,) = t.fields
        values = _encode_values(_write_column(columns, only, rows.num_rows), only.type, only.name)
        # Behind the varint at the start.
        return [value[next(n for n, byte in enumerate(value, 1) if byte < 0x80) :] for value in values]
    return join_parts(
        [_encode_values(_write_column(columns, f, rows.num_rows), f.type, f.name) for f in t.fields], rows.num_rows
    )


def _write_column(columns: dict[str, pa.Array], f: AvroField, count: int) -> pa.Array:
    column = next((columns[name] for name in (f.name, *f.aliases) if name in columns), None)
    return pa.nulls(count) if column is None else column


def _encode_values(column: pa.Array, t: AvroType, path: str) -> Written:
    """The bytes of each item, null or not."""
    if t.kind is AvroKind.NULL:
        return [b""] * len(column)
    if t.kind is AvroKind.UNION:
        return _union(column, t, path)
    if column.null_count:
        first = int(np.flatnonzero(as_mask(column.is_null()))[0])
        raise NotWritable(first, path, "it is null, and the schema has no null there")
    return _write_present(column, t, path)


def _write_present(column: pa.Array, t: AvroType, path: str) -> Written:
    """The bytes of each item, of which none is null."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if t.logical == "decimal":
        return _write_decimals(column, t, path)
    if "timestamp" in t.logical:  # rows that landed before the schema had a finer unit
        column = column.cast(arrow_type(get_column_type(t)))
    if t.logical == "duration":
        months, days, millis = (column.field(name).to_pylist() for name in DURATION)
        return [struct.pack("<III", *one) for one in zip(months, days, millis, strict=True)]
    match t.kind:
        case AvroKind.RECORD:
            columns = {f.name: column.field(f.name) for f in column.type}
            parts = [
                _encode_values(_write_column(columns, f, len(column)), f.type, f"{path}.{f.name}") for f in t.fields
            ]
            return join_parts(parts, len(column))
        case AvroKind.ARRAY | AvroKind.MAP:
            return _write_blocks(column, t, path)
        case AvroKind.ENUM:
            return write_symbols(column, {symbol: write_long(n) for n, symbol in enumerate(t.symbols)}, path, "symbol")
        case AvroKind.FIXED:
            return _encode_fixed(column, t, path)
    return _PLAIN[t.kind](column)


def _union(column: pa.Array, t: AvroType, path: str) -> Written:
    """Each item behind the number of its branch. Several branches are a struct's members, of which one is there."""
    others = list_branches(t)
    there = as_mask(column.is_valid())
    out: list[bytes | None] = [None] * len(column)
    kinds = [b.kind for b in t.inner]
    if AvroKind.NULL in kinds:
        null = write_long(kinds.index(AvroKind.NULL))
        for n in np.flatnonzero(~there).tolist():
            out[n] = null
    for branch in others:
        member, theirs = column, there
        if len(others) > 1:
            if pa.types.is_null(column.type):
                break
            member = column.field(branch.short)
            theirs = there & as_mask(member.is_valid())
        positions = np.flatnonzero(theirs)
        if len(positions):
            head = write_long(t.inner.index(branch))
            values = take_items(member, positions)
            for n, data in zip(
                positions.tolist(), at(positions, partial(_write_present, values, branch, path)), strict=True
            ):
                out[n] = head + data
    encoded = [data for data in out if data is not None]
    if len(encoded) < len(out):
        raise NotWritable(out.index(None), path, "it is null, and the schema has no null there")
    return encoded


def _write_blocks(column: pa.Array, t: AvroType, path: str) -> Written:
    """Each list or map as one block and an end."""
    ends = int64s(column.offsets.cast(pa.int64()))
    first, stop = int(ends[0]), int(ends[-1])
    owner = np.repeat(np.arange(len(column)), np.diff(ends))
    if t.kind is AvroKind.ARRAY:
        inside = column.values.slice(first, stop - first)
        items = at(owner, partial(_encode_values, inside, t.inner[0], f"{path}[]"))
    else:
        keys = _PLAIN[AvroKind.STRING](column.keys.slice(first, stop - first))
        inside = column.items.slice(first, stop - first)
        values = at(owner, partial(_encode_values, inside, t.inner[0], f"{path}{{}}"))
        items = [key + value for key, value in zip(keys, values, strict=True)]
    bounds = (ends - first).tolist()
    return [
        write_long(after - before) + b"".join(items[before:after]) + b"\0" if after > before else b"\0"
        for before, after in pairwise(bounds)
    ]


def _encode_fixed(column: pa.Array, t: AvroType, path: str) -> Written:
    values: Written = column.to_pylist()
    for n, data in enumerate(values):
        if len(data) != t.size:
            raise NotWritable(n, path, f"it has {len(data)} bytes, and the schema {t.size}")
    return values


def _write_decimals(column: pa.Array, t: AvroType, path: str) -> Written:
    """Two's complement, big-endian: as few bytes as it takes, or those of a fixed type."""
    out: Written = []
    for n, value in enumerate(column.to_pylist()):
        number = _unscale(value, t.scale)
        bits = (number + (number < 0)).bit_length() + 1
        size = t.size if t.kind is AvroKind.FIXED else (bits + 7) // 8
        if len(str(abs(number))) > t.precision or bits > 8 * size:
            raise NotWritable(n, path, f"it is no decimal({t.precision},{t.scale})")
        data = number.to_bytes(size, "big", signed=True)
        out.append(data if t.kind is AvroKind.FIXED else write_long(size) + data)
    return out


def _unscale(value: Decimal, scale: int) -> int:
    sign, digits, exponent = value.as_tuple()
    number: int = int("".join(map(str, digits))) * 10 ** max(int(exponent) + scale, 0)
    return -number if sign else number


def write_long(value: int) -> bytes:
    """A zigzag varint."""
    rest = (value << 1) ^ (value >> 63)
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


_SMALL = {n: write_long(n) for n in range(-_FEW, _FEW)}


def _write_longs(column: pa.Array) -> Written:
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    return [_SMALL.get(n) or write_long(n) for n in column.cast(pa.int64()).to_pylist()]


def _write_texts(column: pa.Array) -> Written:
    texts = column.cast(pa.binary()).to_pylist()
    return [(_SMALL.get(len(data)) or write_long(len(data))) + data for data in texts]


_PLAIN: dict[AvroKind, Callable[[pa.Array], Written]] = {
    AvroKind.BOOLEAN: lambda column: [b"\1" if v else b"\0" for v in column.to_pylist()],
    AvroKind.INT: _write_longs,
    AvroKind.LONG: _write_longs,
    AvroKind.FLOAT: lambda column: write_floats(column, pa.float32()),
    AvroKind.DOUBLE: lambda column: write_floats(column, pa.float64()),
    AvroKind.BYTES: _write_texts,
    AvroKind.STRING: _write_texts,
}
