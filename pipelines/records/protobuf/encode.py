"""Rows of the feed's columns as Protobuf again: the bytes of a record by the feed's own message, column by column.

The reverse of `loops`, in plain Python over whole columns. Fields are written as in Google's library: in the order of
their numbers, without defaults of fields that have no presence, lists packed where the schema packs them. A map's
entries keep their landed order. Raises NotWritable for values that the message does not allow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.protobuf.schema import Meaning, ProtoField, ProtoKind, ProtoMessage
from sluice.pipelines.records.rows.row_items import (
    NotWritable,
    Written,
    at,
    join_parts,
    take_items,
    write_floats,
    write_symbols,
)
from sluice.pipelines.records.rows.wire_format import varint
from sluice.pipelines.schema.arrays import as_mask, int64s
from sluice.pipelines.util.extras import name_missing

_VARINT, _EIGHT, _SIZED, _BEGIN, _END, _FOUR = range(6)
_WIRES = {
    **dict.fromkeys((ProtoKind.DOUBLE, ProtoKind.FIXED64, ProtoKind.SFIXED64), _EIGHT),
    **dict.fromkeys((ProtoKind.FLOAT, ProtoKind.FIXED32, ProtoKind.SFIXED32), _FOUR),
    **dict.fromkeys((ProtoKind.STRING, ProtoKind.BYTES, ProtoKind.MESSAGE), _SIZED),
}
_MASK = (1 << 64) - 1
_FEW = 256  # numbers whose bytes are made once
_SMALL = {n: varint(n) for n in range(_FEW)}
_FIXED = {ProtoKind.FIXED64: "<Q", ProtoKind.SFIXED64: "<q", ProtoKind.FIXED32: "<I", ProtoKind.SFIXED32: "<i"}


def encode_rows(rows: pa.RecordBatch, message: ProtoMessage) -> Written:
    """The bytes of each row. A field whose column is not there is missing."""
    return _write_message(
        {name: rows.column(n) for n, name in enumerate(rows.schema.names)}, message, rows.num_rows, ""
    )


def _write_message(columns: Mapping[str, pa.Array], m: ProtoMessage, count: int, path: str) -> Written:
    _check_choices(columns, m, path)
    parts = []
    for f in sorted(m.fields, key=lambda f: f.number):
        where = f"{path}.{f.name}" if path else f.name
        column = columns.get(f.name)
        if column is not None and not pa.types.is_null(column.type):
            parts.append(_encode_field(column, f, where))
        elif f.required and count:
            raise NotWritable(0, where, "it is null, and the schema requires it")
    return join_parts(parts, count)


def _check_choices(columns: Mapping[str, pa.Array], m: ProtoMessage, path: str) -> None:
    """Of a oneof one member is there at most: a reader would take the last one for the only one."""
    for oneof in {f.oneof for f in m.fields if f.oneof}:
        members = [columns[f.name] for f in m.fields if f.oneof == oneof and f.name in columns]
        several = np.flatnonzero(sum((as_mask(c.is_valid()).astype(int) for c in members), np.zeros(1, int)) > 1)
        if len(several):
            where = f"{path}.{oneof}" if path else oneof
            raise NotWritable(int(several[0]), where, "several of its members are there, of which one may be")


def _encode_field(column: pa.Array, f: ProtoField, path: str) -> Written:
    """The field of each item with its tag; nothing where it is not written."""
    if f.repeated:
        return _write_lists(column, f, path) if f.entry is None else _write_maps(column, f, f.entry, path)
    there = as_mask(column.is_valid())
    positions = np.flatnonzero(there)
    if f.required and len(positions) < len(column):
        raise NotWritable(int(np.flatnonzero(~there)[0]), path, "it is null, and the schema requires it")
    present = take_items(column, positions)
    values = at(positions, partial(_write_values, present, f, path))
    tag = _tag(f)
    if f.presence or f.message is not None:
        encoded = [tag + value for value in values]
    else:
        encoded = [
            tag + value if is_written else b""
            for value, is_written in zip(values, _list_presence(present, f, values), strict=True)
        ]
    if len(positions) == len(column):
        return encoded
    out = [b""] * len(column)
    for n, data in zip(positions.tolist(), encoded, strict=True):
        out[n] = data
    return out


def _list_presence(column: pa.Array, f: ProtoField, values: Written) -> list[bool]:
    """Returns which values are not the default. Without field presence, defaults need not be written."""
    if f.kind in (ProtoKind.FLOAT, ProtoKind.DOUBLE):
        return [any(value) for value in values]  # -0.0 is no default
    default = (
        _write_value(f, f.first) if f.kind is ProtoKind.ENUM else b"\0" * _SIZES.get(_WIRES.get(f.kind, _VARINT), 1)
    )
    return [value != default for value in values]


_SIZES = {_EIGHT: 8, _FOUR: 4}


def _write_lists(column: pa.Array, f: ProtoField, path: str) -> Written:
    ends = int64s(column.offsets.cast(pa.int64()))
    first, stop = int(ends[0]), int(ends[-1])
    items = _write_inside(column.values.slice(first, stop - first), f, f"{path}[]", ends)
    bounds = [(a - first, b - first) for a, b in pairwise(ends.tolist())]
    tag = _tag(f)
    if f.packed:
        tag = varint(f.number << 3 | _SIZED)
        return [tag + _with_size(b"".join(items[a:b])) if b > a else b"" for a, b in bounds]
    items = [tag + item for item in items]
    return [b"".join(items[a:b]) for a, b in bounds]


def _write_maps(column: pa.Array, f: ProtoField, entry: ProtoMessage, path: str) -> Written:
    """Each entry is a message of a key and a value, both of which are written."""
    key, value = entry.fields
    ends = int64s(column.offsets.cast(pa.int64()))
    first, stop = int(ends[0]), int(ends[-1])
    keys = _write_inside(_write_keys(column.keys.slice(first, stop - first), key), key, f"{path}{{}}", ends)
    values = _write_inside(column.items.slice(first, stop - first), value, f"{path}{{}}", ends)
    tag, of_key, of_value = _tag(f), _tag(key), _tag(value)
    entries = [tag + _with_size(of_key + k + of_value + v) for k, v in zip(keys, values, strict=True)]
    return [b"".join(entries[a - first : b - first]) for a, b in pairwise(ends.tolist())]


def _write_keys(texts: pa.Array, key: ProtoField) -> pa.Array:
    """A map's keys, which landed as texts."""
    if key.kind is ProtoKind.STRING:
        return texts
    if isinstance(texts, pa.DictionaryArray):
        texts = texts.dictionary_decode()
    unsigned = key.kind in (ProtoKind.UINT64, ProtoKind.FIXED64)
    return texts.cast(pa.bool_() if key.kind is ProtoKind.BOOL else pa.uint64() if unsigned else pa.int64())


def _write_inside(items: pa.Array, f: ProtoField, path: str, ends: np.ndarray) -> Written:
    """The values in lists or maps that end there."""
    owner = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    if items.null_count:
        first = int(np.flatnonzero(as_mask(items.is_null()))[0])
        raise NotWritable(int(owner[first]), path, "it is null, and a list or a map of Protobuf holds no null")
    return at(owner, partial(_write_values, items, f, path))


def _write_values(column: pa.Array, f: ProtoField, path: str) -> Written:
    """The bytes of each value behind its tag. None is null."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if f.message is not None:
        bodies = _write_bodies(column, f.message, path)
        if f.group:
            end = varint(f.number << 3 | _END)
            return [body + end for body in bodies]
        return [_with_size(body) for body in bodies]
    match f.kind:
        case ProtoKind.DOUBLE:
            return write_floats(column, pa.float64())
        case ProtoKind.FLOAT:
            return write_floats(column, pa.float32())
        case ProtoKind.STRING | ProtoKind.BYTES:
            return [_with_size(data) for data in column.cast(pa.binary()).to_pylist()]
        case ProtoKind.ENUM:
            return write_symbols(column, {name: _write_value(f, number) for number, name in f.symbols}, path, "name")
    return [_write_value(f, n) for n in column.to_pylist()]


def _write_value(f: ProtoField, n: Any) -> bytes:
    """A number's bytes."""
    if (fixed := _FIXED.get(f.kind)) is not None:
        return struct.pack(fixed, n)
    if f.kind in (ProtoKind.SINT32, ProtoKind.SINT64):
        n = n << 1 ^ n >> 63
    return _SMALL.get(n) or varint(int(n) & _MASK)


def _write_bodies(column: pa.Array, m: ProtoMessage, path: str) -> Written:
    """The bytes of each message. None is null."""
    match m.meaning:
        case Meaning.EMPTY:
            return [b""] * len(column)
        case Meaning.TIME:
            return [_time(n) for n in column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist()]
        case Meaning.WRAPPER:
            (own,) = m.fields
            return _encode_field(column, own, path)
        case Meaning.JSON:
            write = _make_writer(m.name)
            return [write(text) for text in column.to_pylist()]
    return _write_message({f.name: column.field(f.name) for f in column.type}, m, len(column), path)


def _time(micros: int) -> bytes:
    """A google.protobuf.Timestamp: seconds, and nanoseconds that are never below zero."""
    seconds, rest = divmod(micros, 1_000_000)
    return (b"\x08" + varint(seconds & _MASK) if seconds else b"") + (b"\x10" + varint(rest * 1000) if rest else b"")


@lru_cache
def _make_writer(name: str) -> Callable[[str], bytes]:
    """Returns a function from a JSON text to a google.protobuf.Struct, Value or ListValue."""
    with name_missing():
        from google.protobuf import json_format, struct_pb2
    kind: Any = getattr(struct_pb2, name.rpartition(".")[2])

    def write(text: str) -> bytes:
        data: bytes = json_format.Parse(text, kind()).SerializeToString(deterministic=True)
        return data

    return write


def _tag(f: ProtoField) -> bytes:
    return varint(f.number << 3 | (_BEGIN if f.group else _WIRES.get(f.kind, _VARINT)))


def _with_size(data: bytes) -> bytes:
    return (_SMALL.get(len(data)) or varint(len(data))) + data
