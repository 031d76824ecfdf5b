"""What the ways back share that write rows as a format's bytes again: items of columns, and what cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.schema.arrays import fixed_width, int64s

Written = list[bytes]
"""The bytes of each item of a column."""


class NotWritable(ValueError):
    """The schema has no room for an item. `item` is its place in the column, `place` the path in the schema."""

    def __init__(self, item: int, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}" if place else what)
        self.item, self.place, self.what = item, place, what


def at(places: np.ndarray, write: Callable[[], Written]) -> Written:
    """What is written of items that are at these places of their column: errors name them there."""
    try:
        return write()
    except NotWritable as error:
        raise NotWritable(int(places[error.item]), error.place, error.what) from None


def chosen(column: pa.Array, places: np.ndarray) -> pa.Array:
    """The items at these places."""
    return column if len(places) == len(column) else column.take(fixed_width(pa.int64(), places))


def joined(parts: Sequence[Written], count: int) -> Written:
    """Of each item, its parts one after the other."""
    return [b"".join(one) for one in zip(*parts, strict=True)] if parts else [b""] * count


def symbols(column: pa.Array, known: Mapping[str, bytes], place: str, what: str) -> Written:
    """The bytes that are known of each item's symbol. Raises NotWritable, which says what an unknown one is not."""
    found = [known.get(symbol) for symbol in column.to_pylist()]
    made = [data for data in found if data is not None]
    if len(made) < len(found):
        raise NotWritable(found.index(None), place, f"it is no {what} of the schema's enum")
    return made


def truths(column: pa.Array) -> np.ndarray:
    """A boolean column as numpy's; null is false."""
    return int64s(pc.fill_null(column, False).cast(pa.int64())).astype(bool)


def floats(column: pa.Array, kind: pa.DataType) -> Written:
    """Numbers as they lie in memory: IEEE 754, the lowest byte first."""
    made, size = column.cast(kind), kind.bit_width // 8
    data = made.buffers()[1].to_pybytes()[made.offset * size :] if len(made) else b""
    return [data[n : n + size] for n in range(0, len(made) * size, size)]
