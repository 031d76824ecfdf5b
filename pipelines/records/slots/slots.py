"""The columns of formats whose loops leave values in slots, blocks of these, and room for them.

A slot is the number itself, or the span of a text; `there` marks slots in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.columns.builders import (
    NO_FAULTS,
    ColumnBuilder,
    Faults,
    Numbers,
    allocate,
    get_time_bounds,
    grow,
    make_faults,
)
from sluice.pipelines.records.columns.loops import OUT_OF_RANGE
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.pieces import PieceBuilder
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.slots.binary_loops import BlockResults
from sluice.pipelines.schema.arrays import text_array
from sluice.pipelines.schema.schema import Kind


class Slots(Numbers):
    """A column whose slots hold its items themselves."""

    def __init__(self, node: SchemaNode, items: int, kind: Any = np.int64) -> None:
        super().__init__(node, items, kind)
        self._there: list[Array] = []

    def append_slots(self, data: Array, slots: Array, there: Array) -> Faults:
        """Append the items of a block. Returns those that the type cannot hold."""
        n = len(slots)
        self._out = grow(self._out, self.items * self.width, (self.items + n) * self.width)
        self._there.append(there.copy())
        self._nulls += n - int(np.count_nonzero(there))
        faults = self._take(data, slots)
        self.items += n
        return faults

    def _take(self, data: Array, slots: Array) -> Faults:
        self._out[self.items : self.items + len(slots)] = slots
        return NO_FAULTS

    @property
    def validity(self) -> pa.Buffer | None:
        if not self._nulls:
            return None
        return pa.py_buffer(np.packbits(np.concatenate(self._there), bitorder="little"))


class SlotNumbers(Slots):
    """Whole numbers, floats and times. A time outside of the years 1 to 9999 is a fault."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        t = node.type
        # Each number of nanoseconds in 64 bits is a time of these years.
        is_bound = t.kind is Kind.DATE or (t.kind is Kind.TIMESTAMP and t.unit != "ns")
        self._bounds = get_time_bounds(t) if is_bound else None
        kinds: dict[Kind, Any] = {Kind.FLOAT32: np.uint32, Kind.FLOAT64: np.int64, Kind.DATE: np.int32}
        is_32_bit = t.kind in (Kind.INT32, Kind.UINT32)
        super().__init__(node, items, np.dtype(str(t.kind)) if is_32_bit else kinds.get(t.kind, np.int64))

    def _take(self, data: Array, slots: Array) -> Faults:
        super()._take(data, slots)
        if self._bounds is None:
            return NO_FAULTS
        bad = np.flatnonzero((slots < self._bounds[0]) | (slots > self._bounds[1]))
        return make_faults(self.items + bad, OUT_OF_RANGE)


class SlotTruths(Slots):
    """Booleans."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items, np.uint8)

    def _narrow(self, data: Array) -> Array:
        return np.packbits(data, bitorder="little")


class SlotSymbols(Slots):
    """Enums: the indices of their symbols, which become texts at the end."""

    def __init__(self, node: SchemaNode, items: int, symbols: Sequence[str]) -> None:
        super().__init__(node, items, np.int32)
        self._symbols = text_array(symbols)

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        data = pa.py_buffer(self._out[: self.items])
        return self._symbols.take(pa.Array.from_buffers(pa.int32(), self.items, [self.validity, data]))


class SlotPiece(PieceBuilder):
    """Builds one piece of such records, block by block."""

    def take(self, data: Array, t: Any, results: BlockResults, out: int, bad: int) -> None:
        """Append the block of `out` rows and `bad` refused records that the tables hold, and empty the slots."""

        def append(node: SchemaNode, column: ColumnBuilder, n: int) -> Faults:
            base = int(t.bases[node.index])
            slots, there = t.spans[base : base + n], t.there[base : base + n]
            own = column.append_slots(data, slots, there) if isinstance(column, Slots) else column.append(data, slots)
            slots[:] = 0
            there[:] = 0
            return own

        self.add(results.source[:out], [a[:bad] for a in results[1:]], t.counts, append)


_Room = TypeVar("_Room", bound=Any)


def with_room(t: _Room, nodes: tuple[SchemaNode, ...], room: Array) -> _Room:
    """The same tables with empty slots: `room` gives the number of elements of each level."""
    sizes = room[[n.level for n in nodes]]
    t.bases[:] = np.cumsum(sizes) - sizes
    t.counts[:] = 0
    total = int(sizes.sum())
    spans, there = allocate(total, np.int64), allocate(total, np.uint8)
    spans[:], there[:] = 0, 0
    enlarged: _Room = t._replace(spans=spans, there=there, room=room)
    return enlarged
