"""One preallocated set of Arrow buffers, filled by the compiled loops and handed out as a record batch.

Schema: key, value (binary, null kept apart from empty), offset (int64), timestamp (milliseconds, UTC, any int64),
timestampType (0 CreateTime, 1 LogAppendTime, −1 none), headers (null when there are none, as in Spark's Kafka
source). Promise: buffers hold exactly the rows written, are never touched again once handed out, and grow with what
comes, also for one huge value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.decode import loops
from sluice.pipelines.decode.loops import Array, Columns

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)

_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


# For each buffer: item type, what its length follows, and how: an item each, one more, or a bit each.
_LAYOUT: tuple[tuple[Any, str, str], ...] = (
    (np.uint8, "key_bytes", "item"),
    (np.int32, "rows", "ends"),
    (np.uint8, "rows", "bits"),
    (np.uint8, "value_bytes", "item"),
    (np.int32, "rows", "ends"),
    (np.uint8, "rows", "bits"),
    (np.int64, "rows", "item"),
    (np.int64, "rows", "item"),
    (np.int32, "rows", "item"),
    (np.int32, "rows", "ends"),
    (np.uint8, "rows", "bits"),
    (np.uint8, "header_key_bytes", "item"),
    (np.int32, "headers", "ends"),
    (np.uint8, "header_value_bytes", "item"),
    (np.int32, "headers", "ends"),
    (np.uint8, "headers", "bits"),
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a set of buffers holds: rows, headers, and bytes by column."""

    rows: int
    key_bytes: int
    value_bytes: int
    headers: int = 0
    header_key_bytes: int = 0
    header_value_bytes: int = 0

    def grown(self, need: Capacity) -> Capacity:
        """At least `need`; what is short at least doubles."""
        pairs = ((getattr(self, f), getattr(need, f)) for f in self.__dataclass_fields__)
        return Capacity(*(have if have >= want else max(want, 2 * have) for have, want in pairs))


def allocate(capacity: Capacity) -> Columns:
    """Empty buffers: offsets begin with 0, bitmaps are all ones, the rest is whatever memory held."""
    return Columns(*(_buffer(capacity, *layout) for layout in _LAYOUT))


def enlarge(columns: Columns, capacity: Capacity) -> Columns:
    """The same rows in buffers of at least the given capacity; those that suffice are kept."""
    return Columns(*(_enlarged(old, capacity, *layout) for old, layout in zip(columns, _LAYOUT, strict=True)))


def _length(capacity: Capacity, measure: str, how: str) -> int:
    n: int = getattr(capacity, measure)
    return {"item": n, "ends": n + 1, "bits": (n + 7) // 8}[how]


def _buffer(capacity: Capacity, kind: Any, measure: str, how: str) -> Array:
    # Arrow's pool keeps what was freed: memory fresh from the system costs as much as decoding into it.
    n = _length(capacity, measure, how)
    new = np.frombuffer(pa.allocate_buffer(n * np.dtype(kind).itemsize), kind) if n else np.empty(0, kind)
    if how == "bits":
        new.fill(0xFF)
    elif how == "ends":
        new[0] = 0
    return new


def _enlarged(old: Array, capacity: Capacity, kind: Any, measure: str, how: str) -> Array:
    if _length(capacity, measure, how) <= len(old):
        return old
    new = _buffer(capacity, kind, measure, how)
    new[: len(old)] = old
    return new


def to_arrow(columns: Columns, state: Array) -> pa.RecordBatch:
    """The rows written so far, without a copy: the buffers now belong to the record batch."""
    rows = int(state[loops.ROWS])
    keys = _binary(columns.keys, columns.key_offsets, columns.key_valid, rows, int(state[loops.NULL_KEYS]))
    values = _binary(columns.values, columns.value_offsets, columns.value_valid, rows, int(state[loops.NULL_VALUES]))
    arrays = [
        keys,
        values,
        _fixed(pa.int64(), columns.offsets, rows),
        _fixed(SCHEMA.field("timestamp").type, columns.timestamps, rows),
        _fixed(pa.int32(), columns.timestamp_types, rows),
        _headers(columns, state, rows),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _fixed(kind: pa.DataType, data: Array, rows: int) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(data[:rows])], 0)


def _binary(data: Array, offsets: Array, valid: Array, rows: int, nulls: int) -> pa.Array:
    buffers = [_validity(valid, rows, nulls), pa.py_buffer(offsets[: rows + 1]), pa.py_buffer(data[: offsets[rows]])]
    return pa.Array.from_buffers(pa.binary(), rows, buffers, nulls)


def _validity(valid: Array, rows: int, nulls: int) -> pa.Buffer | None:
    return pa.py_buffer(valid[: (rows + 7) // 8]) if nulls else None


def _headers(columns: Columns, state: Array, rows: int) -> pa.Array:
    n, nulls = int(state[loops.HEADERS]), int(state[loops.NULL_HEADERS])
    keys = _binary(columns.header_keys, columns.header_key_offsets, columns.header_values_valid, n, 0)
    values = _binary(
        columns.header_values,
        columns.header_value_offsets,
        columns.header_values_valid,
        n,
        int(state[loops.NULL_HEADER_VALUES]),
    )
    pairs = pa.StructArray.from_arrays([_text(keys), values], fields=list(HEADERS.value_type))
    buffers = [_validity(columns.header_lists_valid, rows, nulls), pa.py_buffer(columns.header_lists[: rows + 1])]
    return pa.Array.from_buffers(HEADERS, rows, buffers, nulls, children=[pairs])


def _text(keys: pa.Array) -> pa.Array:
    """Header keys as strings. Bytes that are no UTF-8 become U+FFFD, just as Java's String(bytes, UTF_8) puts it."""
    try:
        return keys.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([as_java_reads(k) for k in keys.to_pylist()], pa.string())


def as_java_reads(key: bytes) -> str:
    """UTF-8 with replacement: one U+FFFD for each maximal part of a sequence, and one for a surrogate, cut or not.

    In the second Java differs from Python, which puts one for each byte.
    """
    return _SURROGATE.sub(b"\xef\xbf\xbd", key).decode("utf-8", "replace")
