"""Helpers for writing rows as a format's bytes again: items of columns, and errors of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from sluice.pipelines.schema.arrays import fixed_width

Written = list[bytes]
"""The bytes of each item of a column."""


class NotWritable(ValueError):
    """The schema has no room for an item. `item` is its place in the column, `place` the path in the schema."""

    def __init__(self, item: int, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.item, self.place, self.what = item, path, what


def at(positions: np.ndarray, write: Callable[[], Written]) -> Written:
    """Write some items of a column; errors name their index in the column (`positions`)."""
    try:
        return write()
    except NotWritable as error:
        raise NotWritable(int(positions[error.item]), error.place, error.what) from None


def take_items(column: pa.Array, positions: np.ndarray) -> pa.Array:
    """The items at these places."""
    return column if len(positions) == len(column) else column.take(fixed_width(pa.int64(), positions))


def join_parts(parts: Sequence[Written], count: int) -> Written:
    """Each item's parts, joined."""
    return [b"".join(one) for one in zip(*parts, strict=True)] if parts else [b""] * count


def write_symbols(column: pa.Array, numbers: Mapping[str, bytes], path: str, what: str) -> Written:
    """The bytes of each item's symbol. Raises NotWritable for an unknown symbol."""
    numbers_or_none = [numbers.get(symbol) for symbol in column.to_pylist()]
    encoded = [data for data in numbers_or_none if data is not None]
    if len(encoded) < len(numbers_or_none):
        raise NotWritable(numbers_or_none.index(None), path, f"it is no {what} of the schema's enum")
    return encoded


def write_floats(column: pa.Array, kind: pa.DataType) -> Written:
    """Numbers as they lie in memory: IEEE 754, the lowest byte first."""
    numbers, size = column.cast(kind), kind.bit_width // 8
    data = numbers.buffers()[1].to_pybytes()[numbers.offset * size :] if len(numbers) else b""
    return [data[n : n + size] for n in range(0, len(numbers) * size, size)]
