"""Some rows of many, where few are left out: whole runs between them are copied, column by column, by compiled loops.

Promise: the result equals that of Arrow's own `take`, with the dictionaries of the given rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import (
    BYTES,
    ENDS,
    I32,
    I64,
    INTEGER,
    U8,
    Array,
    compiled,
    copy,
    int32,
    int64,
)
from sluice.pipelines.schema.arrays import fixed_width

LEAST_RUN = 16
"""From this average length of a run of rows on, copying whole runs is faster than copying single rows."""


def take_rows(rows: pa.RecordBatch, positions: Array) -> pa.RecordBatch:
    """The rows at these places, which must ascend."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    if (len(cuts) + 1) * LEAST_RUN > len(positions):
        return rows.take(fixed_width(pa.int64(), positions.astype(np.int64)))
    first = np.concatenate([[0], cuts]).astype(np.int64)
    runs = _Runs(positions[first].astype(np.int64), np.diff(first, append=len(positions)).astype(np.int64))
    return pa.RecordBatch.from_arrays([_take_column(column, runs) for column in rows.columns], schema=rows.schema)


class _Runs(NamedTuple):
    """Runs of items: where each starts, and how many it has."""

    starts: Array
    sizes: Array

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    def from_(self, offset: int) -> _Runs:
        """The same runs, counted from `offset` items before."""
        return _Runs(self.starts + offset, self.sizes) if offset else self

    def within(self, ends: Array) -> _Runs:
        """The runs of what these items hold, by where each item ends."""
        starts = ends[self.starts].astype(np.int64)
        return _Runs(starts, ends[self.starts + self.sizes] - starts)


def _take_column(column: pa.Array, runs: _Runs) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(
            _take_column(column.indices, runs), column.dictionary, ordered=kind.ordered
        )
    if pa.types.is_struct(kind):
        fields = [_take_column(column.field(i), runs) for i in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, runs.total, [_take_validity(column, runs)], children=fields)
    at = runs.from_(column.offset)
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, runs.total, [_take_validity(column, runs), _bits(column.buffers()[1], at)])
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        ends = _ends(column)
        inside = at.within(ends)
        data = [_take_validity(column, runs), _take_ends(ends, at), _copy_ranges(column.buffers()[2], inside, 1)]
        return pa.Array.from_buffers(kind, runs.total, data)
    if pa.types.is_list(kind):
        ends = _ends(column)
        items = _take_column(column.values, at.within(ends))
        return pa.Array.from_buffers(
            kind, runs.total, [_take_validity(column, runs), _take_ends(ends, at)], children=[items]
        )
    if pa.types.is_primitive(kind) or pa.types.is_decimal128(kind) or pa.types.is_fixed_size_binary(kind):
        values = _copy_ranges(column.buffers()[1], at, kind.bit_width // 8)
        return pa.Array.from_buffers(kind, runs.total, [_take_validity(column, runs), values])
    return pa.concat_arrays([column.slice(*run) for run in zip(*(part.tolist() for part in runs), strict=True)])


def _take_validity(column: pa.Array, runs: _Runs) -> pa.Buffer | None:
    return _bits(column.buffers()[0], runs.from_(column.offset)) if column.null_count else None


def _bits(bitmap: pa.Buffer, runs: _Runs) -> pa.Buffer:
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return pa.py_buffer(
        np.packbits(np.frombuffer(_copy_ranges(pa.py_buffer(bits), runs, 1), np.uint8), bitorder="little")
    )


def _ends(column: pa.Array) -> Array:
    """Where each item of the whole buffer ends, after where the first begins."""
    return np.frombuffer(column.buffers()[1], np.int32, column.offset + len(column) + 1)


def _take_ends(ends: Array, runs: _Runs) -> pa.Buffer:
    """The ends of the runs' items, one after the other."""
    out = np.empty(runs.total + 1, np.int32)
    _move_ends(ends, runs.starts, runs.sizes, out)
    return pa.py_buffer(out)


def _copy_ranges(buffer: Any, runs: _Runs, width: int) -> pa.Buffer:
    """The runs' items of `width` bytes, one after the other."""
    out = np.empty(runs.total * width, np.uint8)
    if len(out):
        _copy_runs(np.frombuffer(buffer, np.uint8), runs.starts, runs.sizes, width, out)
    return pa.py_buffer(out)


@compiled(BYTES, I64, I64, INTEGER, U8)
def _copy_runs(data: Array, starts: Array, sizes: Array, width: int, out: Array) -> None:
    at = int64(0)
    for i in range(starts.size):
        size = sizes[i] * width
        copy(out, at, data, starts[i] * width, size)
        at += size


@compiled(ENDS, I64, I64, I32)
def _move_ends(ends: Array, starts: Array, sizes: Array, out: Array) -> None:
    out[0], at = 0, int64(0)
    for i in range(starts.size):
        start, size = starts[i], sizes[i]
        if start < 0 or size < 0 or start + size >= ends.size or at + size >= out.size:
            raise IndexError("a run outside of its column")
        by = int32(out[at] - ends[start])
        for k in range(size):
            out[at + 1 + k] = ends[start + 1 + k] + by
        at += size
