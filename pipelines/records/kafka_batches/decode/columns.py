"""Preallocated Arrow buffers: compiled loops fill them with rows, and full chunks are handed out as record batches.

Schema: key, value (binary, null kept apart from empty), offset (int64), timestamp (milliseconds, UTC, any int64),
timestampType (0 CreateTime, 1 LogAppendTime, −1 none), headers (null when there are none, as in Spark's Kafka source).

Promises: a chunk holds exactly the rows written, and never changes after it was handed out. Buffers grow as needed,
also for one huge value. An error takes back the position and the rows of its batch, except rows already handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.kafka_batches.decode import loops
from sluice.pipelines.records.kafka_batches.decode.decompression import REASONS, LogPlace
from sluice.pipelines.records.kafka_batches.decode.loops import ChunkBuffers, Frame
from sluice.pipelines.records.rows.row_format import escape_keys

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
        """Returns a capacity of at least `need`; a capacity that is too small at least doubles."""
        pairs = ((getattr(self, f), getattr(need, f)) for f in self.__dataclass_fields__)
        return Capacity(*(have if have >= want else max(want, 2 * have) for have, want in pairs))


def allocate(capacity: Capacity) -> ChunkBuffers:
    """Empty buffers. Offsets begin with 0 and bitmaps are all ones; the rest is uninitialised."""
    return ChunkBuffers(*(_allocate_buffer(capacity, *layout) for layout in _LAYOUT))


def enlarge(columns: ChunkBuffers, capacity: Capacity) -> ChunkBuffers:
    """The same rows in buffers of at least the given capacity. Buffers that suffice are kept."""
    return ChunkBuffers(
        *(_enlarge_buffer(old, capacity, *layout) for old, layout in zip(columns, _LAYOUT, strict=True))
    )


def _get_length(capacity: Capacity, measure: str, how: str) -> int:
    n: int = getattr(capacity, measure)
    return {"item": n, "ends": n + 1, "bits": (n + 7) // 8}[how]


def _allocate_buffer(capacity: Capacity, kind: Any, measure: str, how: str) -> Array:
    # Arrow's pool reuses freed memory: memory fresh from the system costs as much as decoding into it.
    n = _get_length(capacity, measure, how)
    new = np.frombuffer(pa.allocate_buffer(n * np.dtype(kind).itemsize), kind) if n else np.empty(0, kind)
    if how == "bits":
        new.fill(0xFF)
    elif how == "ends":
        new[0] = 0
    return new


def _enlarge_buffer(old: Array, capacity: Capacity, kind: Any, measure: str, how: str) -> Array:
    if _get_length(capacity, measure, how) <= len(old):
        return old
    new = _allocate_buffer(capacity, kind, measure, how)
    new[: len(old)] = old
    return new


def to_arrow(columns: ChunkBuffers, state: Array) -> pa.RecordBatch:
    """Returns the written rows without a copy. The buffers then belong to the record batch."""
    c, rows = columns, int(state[loops.ROWS])
    arrays = [
        _make_blobs(c.keys, c.key_offsets, rows, _make_validity(c.key_valid, state[loops.NULL_KEYS])),
        _make_blobs(c.values, c.value_offsets, rows, _make_validity(c.value_valid, state[loops.NULL_VALUES])),
        _make_numbers("offset", c.offsets, rows),
        _make_numbers("timestamp", c.timestamps, rows),
        _make_numbers("timestampType", c.timestamp_types, rows),
        _make_headers(c, state, rows),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _make_numbers(name: str, data: Array, rows: int) -> pa.Array:
    return pa.Array.from_buffers(SCHEMA.field(name).type, rows, [None, pa.py_buffer(data[:rows])])


def _make_blobs(data: Array, ends: Array, n: int, validity: pa.Buffer | None = None) -> pa.Array:
    buffers = [validity, pa.py_buffer(ends[: n + 1]), pa.py_buffer(data[: ends[n]])]
    return pa.Array.from_buffers(pa.binary(), n, buffers)


def _make_validity(bitmap: Array, nulls: int) -> pa.Buffer | None:
    return pa.py_buffer(bitmap) if nulls else None


def _make_headers(c: ChunkBuffers, state: Array, rows: int) -> pa.Array:
    n = int(state[loops.HEADERS])
    validity = _make_validity(c.header_values_valid, state[loops.NULL_HEADER_VALUES])
    keys = escape_keys(_make_blobs(c.header_keys, c.header_key_offsets, n))
    values = _make_blobs(c.header_values, c.header_value_offsets, n, validity)
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(HEADERS.value_type))
    validity = _make_validity(c.header_lists_valid, state[loops.NULL_HEADERS])
    buffers = [validity, pa.py_buffer(c.header_lists[: rows + 1])]
    return pa.Array.from_buffers(HEADERS, rows, buffers, children=[pairs])


_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of a decoder.

    A chunk is yielded when one more record would bring it above `chunk_rows` rows or `chunk_bytes` bytes of keys,
    values and headers (8 more for each header; a larger record makes a chunk of its own). `max_batch_bytes` bounds the
    records of one batch, decompressed, and each record (16 bytes more for each header).
    """

    read_committed: bool = True
    check_crc: bool = True
    max_batch_bytes: int = 256 << 20
    chunk_rows: int = 1 << 17
    chunk_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not (1 <= self.chunk_rows < _MOST and 1 <= self.chunk_bytes <= _MOST and 1 <= self.max_batch_bytes <= _MOST):
            raise ValueError("chunks need at least a row; chunks and batches hold from 1 to 2**31 - 1 bytes")


class RangeRows:
    """Makes the rows of one offset range, chunk after chunk."""

    def __init__(self, origin: LogPlace, start: int, end: int, options: DecodeOptions) -> None:
        self.spent_ns = 0
        self._place, self._end = origin, end
        self._chunk_rows, self._chunk_bytes = options.chunk_rows, options.chunk_bytes
        self._capacity: Capacity | None = None
        self._columns: ChunkBuffers | None = None
        self._state = np.zeros(loops.SLOTS, np.int64)
        self._state[loops.POSITION] = start
        self._state[loops.END] = end
        self._state[loops.MAX_ROWS] = options.chunk_rows
        self._state[loops.MAX_BYTES] = options.chunk_bytes
        self._state[loops.CHECK_CRC] = options.check_crc
        self._state[loops.MOST_RECORD] = options.max_batch_bytes

    @property
    def position(self) -> int:
        """The next offset to read."""
        return int(self._state[loops.POSITION])

    @property
    def totals(self) -> tuple[int, int, int]:
        """Numbers of records that became rows, of control records, and of records of aborted transactions."""
        s = self._state
        return int(s[loops.ALL_ROWS] + s[loops.ROWS]), int(s[loops.ALL_CONTROL]), int(s[loops.ALL_ABORTED])

    def decode(self, raw: Array, scratch: Array, table: Array) -> Iterator[pa.RecordBatch]:
        """Decode frames that are checked and decompressed. Yields full chunks. Raises CorruptBatch, OversizedBatch."""
        self._state[loops.FRAME], self._state[loops.AT] = 0, -1
        while (code := self._run(raw, scratch, table)) != loops.DONE:
            if code != loops.FULL:
                frame = Frame(*table[self._state[loops.FRAME]].tolist())
                if code == loops.OVERSIZED:
                    raise self._place.make_oversized(frame, int(self._state[loops.MOST_RECORD]))
                raise self._place.make_corrupt(REASONS[code], frame.first, frame.last, int(self._state[loops.ERROR_AT]))
            yield self._take_chunk()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The remaining rows, at most one chunk."""
        if self._state[loops.ROWS]:
            yield self._take_chunk()

    def overfull(self) -> Iterator[pa.RecordBatch]:
        """The chunk if a large record has filled it: it does not wait in memory for the next record."""
        state = self._state
        if state[loops.SIZES].sum() + (loops.HEADER_BYTES - 1) * state[loops.HEADERS] > self._chunk_bytes:
            yield self._take_chunk()

    def stand_ins(self, end: int, time: int, time_type: int) -> Iterator[pa.RecordBatch]:
        """Rows without key, value and headers for the offsets from the position to `end`. No other rows may wait."""
        while (start := self.position) < end:
            n = min(end - start, self._chunk_rows)
            columns = {
                "offset": _make_numbers("offset", np.arange(start, start + n), n),
                "timestamp": _make_numbers("timestamp", np.full(n, time, np.int64), n),
                "timestampType": _make_numbers("timestampType", np.full(n, time_type, np.int32), n),
            }
            self._state[loops.POSITION] = start + n
            self._state[loops.ALL_ROWS] += n
            arrays = [columns[f.name] if f.name in columns else pa.nulls(n, f.type) for f in SCHEMA]
            yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def _run(self, raw: Array, scratch: Array, table: Array) -> int:
        """Run the loop, making room as it asks. Returns the first other code."""
        began = perf_counter_ns()
        if self._columns is None:
            self._capacity = self._capacity or self._first_capacity(table)
            self._columns = allocate(self._capacity)
        while (code := loops.decode(raw, scratch, table, self._columns, self._state)) == loops.GROW:
            need = Capacity(*self._state[loops.NEEDS].tolist())
            self._capacity = need if self._capacity is None else self._capacity.grown(need)
            self._columns = enlarge(self._columns, self._capacity)
        self.spent_ns += perf_counter_ns() - began
        return code

    def _first_capacity(self, table: Array) -> Capacity:
        """Room for a whole chunk of records like these. Memory that is not written to costs nothing."""
        rows = min(self._chunk_rows, self._end - self.position)
        t = table[(table[:, loops.MODE] == loops.EMIT) & (table[:, loops.COUNT] > 0)]
        size = int((t[:, loops.TO] - t[:, loops.FROM]).sum()) // max(int(t[:, loops.COUNT].sum()), 1)
        data = min(rows * size, self._chunk_bytes)
        return Capacity(rows, data // 4, data, rows, data // 8, data // 8)

    def _take_chunk(self) -> pa.RecordBatch:
        """Returns the rows as a chunk that owns its buffers. The next chunk gets the same capacity."""
        if self._columns is None:
            raise RuntimeError("rows without buffers")
        state = self._state
        chunk = to_arrow(self._columns, state)
        sizes = (min(n + n // 8, self._chunk_bytes) for n in state[loops.SIZES].tolist())
        self._capacity = Capacity(min(self._chunk_rows, max(self._end - self.position, 0)), *sizes)
        self._columns = None
        state[loops.ALL_ROWS] += state[loops.ROWS]
        state[loops.CHUNK] = 0
        state[loops.FIRST_ROW], state[loops.FIRST_POSITION] = 0, state[loops.POSITION]
        return chunk
