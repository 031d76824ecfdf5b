"""What formats share whose loops leave values in slots: columns of these, blocks of them, room for them.

A slot is the number itself, or the span of a text as `json.scan` packs it; `there` marks slots in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json import fill
from sluice.pipelines.records.json.columns import NO_FAULTS, ColumnBuilder, Faults, Texts, allocate, grow
from sluice.pipelines.records.json.scan_tables import SchemaNode, count_elements
from sluice.pipelines.records.json.typer import PieceBuilder, TypedPiece
from sluice.pipelines.schema.schema import Kind

_UNITS = {"ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY_SECONDS = 86_400


class Slots(ColumnBuilder):
    """A column whose slots hold its items themselves, `width` numbers of `kind` each."""

    width = 1

    def __init__(self, node: SchemaNode, items: int, kind: Any = np.int64) -> None:
        super().__init__(node, items)
        self._out = allocate(items * self.width, kind)
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
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return int(self._out.itemsize) * self.items * self.width

    @property
    def validity(self) -> pa.Buffer | None:
        if not self._nulls:
            return None
        return pa.py_buffer(np.packbits(np.concatenate(self._there), bitorder="little"))

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        data = self._out[: self.items * self.width]
        return pa.Array.from_buffers(self.type, self.items, [self.validity, pa.py_buffer(data)])


class SlotNumbers(Slots):
    """Whole numbers, floats and times. A time outside of the years 1 to 9999 is a fault."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        self._bounds = _get_bounds(node)
        t = node.type
        kinds: dict[Kind, Any] = {Kind.FLOAT32: np.uint32, Kind.FLOAT64: np.int64, Kind.DATE: np.int32}
        is_32_bit = t.kind in (Kind.INT32, Kind.UINT32)
        super().__init__(node, items, np.dtype(str(t.kind)) if is_32_bit else kinds.get(t.kind, np.int64))

    def _take(self, data: Array, slots: Array) -> Faults:
        self._out[self.items : self.items + len(slots)] = slots
        if self._bounds is None:
            return NO_FAULTS
        bad = np.flatnonzero((slots < self._bounds[0]) | (slots > self._bounds[1]))
        return make_faults(self.items + bad, np.full(len(bad), fill.OUT_OF_RANGE))


def _get_bounds(node: SchemaNode) -> tuple[int, int] | None:
    """The first and the last time that the column takes, in its units; None where that is no question."""
    match node.type.kind:
        case Kind.DATE:
            return fill.FIRST_DAY, fill.LAST_DAY
        case Kind.TIMESTAMP if node.type.unit != "ns":
            units = _UNITS[node.type.unit] * _DAY_SECONDS
            return fill.FIRST_DAY * units, (fill.LAST_DAY + 1) * units - 1
    return None


def make_faults(items: Array, codes: Array) -> Faults:
    return Faults(items.astype(np.int64), codes.astype(np.int8), np.full(len(items), -1, np.int64))


class SlotTruths(Slots):
    """Booleans."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items, np.uint8)

    def _take(self, data: Array, slots: Array) -> Faults:
        self._out[self.items : self.items + len(slots)] = slots
        return NO_FAULTS

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        bits = np.packbits(self._out[: self.items], bitorder="little")
        return pa.Array.from_buffers(self.type, self.items, [self.validity, pa.py_buffer(bits)])


class Bytes(Texts):
    """Strings and binaries as they are in the record."""

    def _fill(self, values: Array, spans: Array) -> Faults:
        used = int(self.ends[self.items])
        self._make_room(used, fill.measure(spans), len(spans))
        fill.texts(values, spans, self.items, self.data, self.ends, self._valid, self._state)
        return NO_FAULTS


class _LoopTables(Protocol):
    """Tables of all such loops: the first slot of each node, and the elements of each level."""

    @property
    def bases(self) -> Array: ...
    @property
    def spans(self) -> Array: ...
    @property
    def there(self) -> Array: ...
    @property
    def counts(self) -> Array: ...


class _Results(Protocol):
    """The results of all such loops besides slots: the record of each row, and refused records."""

    @property
    def source(self) -> Array: ...
    @property
    def bad_row(self) -> Array: ...
    @property
    def bad_code(self) -> Array: ...
    @property
    def bad_node(self) -> Array: ...
    @property
    def bad_at(self) -> Array: ...


class SlotPiece(PieceBuilder):
    """Builds one piece of such records, block by block."""

    def take(self, data: Array, t: _LoopTables, results: _Results, out: int, bad: int) -> None:
        """Append the block of `out` rows and `bad` refused records that the tables hold, and empty the slots."""
        if bad:
            lists = (results.bad_row, results.bad_code, results.bad_node, results.bad_at)
            self._refused.append(tuple(a[:bad].copy() for a in lists))
        if not out:
            return
        self._source.append(results.source[:out].copy())
        self._extra_ends.append(np.zeros(out, np.int32))
        before = [c.items for c in self._columns]
        for node, column in zip(self._nodes, self._columns, strict=True):
            base, n = int(t.bases[node.index]), int(t.counts[node.level]) if node.level else out
            slots, there = t.spans[base : base + n], t.there[base : base + n]
            append: Any = getattr(column, "append_slots", None)
            self._note(node, append(data, slots, there) if append else column.append(data, slots))
            slots[:] = 0
            there[:] = 0
        self.check_maps(before)

    def finish_piece(self, start: int, stop: int, ends: Array) -> TypedPiece:
        """Return the finished piece, of rows [start, stop) of the chunk."""
        return self.finish(start, stop, ends, np.empty(0, np.uint8))


_Room = TypeVar("_Room", bound=Any)


def make_room(nodes: tuple[SchemaNode, ...], rows: int) -> Array:
    room = np.full(1 + max(n.inner for n in nodes), 2 * rows, np.int64)
    room[0] = rows
    return room


def grow_room(nodes: tuple[SchemaNode, ...], room: Array, level: int) -> Array | None:
    """Room for twice the elements of a level; None when it has all that a record may take."""
    maximum = max(count_elements(nodes, level), int(room[level]))
    if room[level] >= maximum:
        return None
    more = room.copy()
    more[level] = min(2 * room[level], maximum)
    return more


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
