"""Count values that are not null, in JSON and in the rows from it, without the loops that type records.

    quote                             +1, and on to the closing quote
    :                                 −1: the string before it was a name
    first byte of number or literal   +1, except n (null)

Promise: a record and its row have equal counts, since each value is in a column or in `_extra`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import BYTES, ENDS, I64, Array, byte, compiled, int64
from sluice.pipelines.schema.arrays import int64s
from sluice.pipelines.schema.layout import make_layout
from sluice.pipelines.schema.schema import EXTRA, Kind, Schema, Type


@compiled(BYTES, ENDS, I64)
def _count(texts: Array, ends: Array, counts: Array) -> None:
    """The numbers, strings and truths of texts that are JSON, without the names of members."""
    for row in range(counts.size):
        at, end = int64(ends[row]), int64(ends[row + 1])
        if at < 0 or at > end or end > texts.size:
            raise IndexError("texts outside of their buffer")
        if end - at >= 3 and byte(texts, at) == 0xEF:  # a byte order mark: nothing else begins so
            at += 3
        values = int64(0)
        inside = int64(0)  # of a number or literal: its first byte
        while at < end:
            b = byte(texts, at)
            at += 1
            if b == 0x22:
                values += 1
                while at < end and byte(texts, at) != 0x22:
                    at += 2 if byte(texts, at) == 0x5C else 1
                at += 1
            elif b == 0x3A:  # the string before it was a name
                values -= 1
            elif b > 0x20 and b != 0x2C and b != 0x7B and b != 0x7D and b != 0x5B and b != 0x5D:
                if inside == 0:
                    values += b != 0x6E
                inside = b
                continue
            inside = int64(0)
        counts[row] = values


def values_of_texts(texts: pa.Array) -> Array:
    """How many values that are not null each JSON text holds; 0 for a null."""
    counts = np.zeros(len(texts), np.int64)
    _, ends, data = texts.buffers()
    if len(texts) and data is not None:
        offsets = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1]
        _count(np.frombuffer(data, np.uint8), offsets, counts)
    return counts * _there(texts)


def values_of_rows(rows: pa.Table, schema: Schema) -> Array:
    """Returns the number of values that are not null in each landed row: in columns of the schema, without headers and
    copies of other columns, and in `_extra`."""
    counts = np.zeros(rows.num_rows, np.int64)
    for name, kind in (*((f.name, f.type) for f in make_layout(schema).own), (EXTRA, Type(Kind.JSON))):
        if name in rows.schema.names:
            counts += _values(rows.column(name).combine_chunks(), kind)
    return counts


def _values(column: pa.Array, kind: Type) -> Array:
    match kind.kind:
        case Kind.STRUCT:
            inside = [
                _values(column.field(f.name), f.type) for f in kind.fields if column.type.get_field_index(f.name) >= 0
            ]
            return _there(column) * sum(inside, np.zeros(len(column), np.int64))
        case Kind.LIST:
            return _there(column) * _sums(column, _values(column.values, kind.fields[0].type))
        case Kind.MAP:
            return _there(column) * _sums(column, _values(column.items, kind.fields[0].type))
        case Kind.JSON:
            return values_of_texts(column.cast(pa.string()))
    return _there(column)


def _sums(column: pa.Array, inside: Array) -> Array:
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(inside)])
    ends = int64s(column.offsets.cast(pa.int64()))
    totals: Array = sums[ends[1:]] - sums[ends[:-1]]
    return totals


def _there(column: pa.Array) -> Array:
    return int64s(column.is_valid().cast(pa.int64())) if column.null_count else np.ones(len(column), np.int64)
