"""Slots into Arrow arrays: for each node of the feed's schema a column that grows block by block.

Structs, lists, maps and texts are those of `records.typed`; numbers, enums and decimals have columns of their own.
Promise: buffers hold what was appended and are not touched again once they are handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.reader import branches, nullable
from sluice.pipelines.records.avro.schema import AvroKind, AvroType
from sluice.pipelines.records.compiled import Array
from sluice.pipelines.records.typed import fill
from sluice.pipelines.records.typed.columns import NO_FAULTS, ColumnBuilder, Faults, Lists, Structs, Texts, buffer, grow
from sluice.pipelines.records.typed.tables import SchemaNode
from sluice.pipelines.schema.schema import Kind

_UNITS = {"ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY_SECONDS = 86_400
_FAR = 1 << 63


class _Slots(ColumnBuilder):
    """A column whose slots hold its items themselves, `width` numbers of `kind` each."""

    width = 1

    def __init__(self, node: SchemaNode, items: int, kind: Any = np.int64) -> None:
        super().__init__(node, items)
        self._out = buffer(items * self.width, kind)
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


class Numbers(_Slots):
    """Whole numbers, floats and times. A time outside of the years 1 to 9999 is a fault."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        self._bounds = _bounds(node)
        t = node.type
        kinds: dict[Kind, Any] = {Kind.FLOAT32: np.uint32, Kind.FLOAT64: np.int64, Kind.DATE: np.int32}
        named = t.kind in (Kind.INT32, Kind.UINT32)
        super().__init__(node, items, np.dtype(str(t.kind)) if named else kinds.get(t.kind, np.int64))

    def _take(self, data: Array, slots: Array) -> Faults:
        self._out[self.items : self.items + len(slots)] = slots
        if self._bounds is None:
            return NO_FAULTS
        bad = np.flatnonzero((slots < self._bounds[0]) | (slots > self._bounds[1]))
        return _faults(self.items + bad, np.full(len(bad), fill.OUT_OF_RANGE))


def _bounds(node: SchemaNode) -> tuple[int, int] | None:
    """The first and the last time that the column takes, in its units; None where that is no question."""
    match node.type.kind:
        case Kind.DATE:
            return fill.FIRST_DAY, fill.LAST_DAY
        case Kind.TIMESTAMP if node.type.unit != "ns":
            units = _UNITS[node.type.unit] * _DAY_SECONDS
            return fill.FIRST_DAY * units, (fill.LAST_DAY + 1) * units - 1
    return None


def _faults(items: Array, codes: Array) -> Faults:
    return Faults(items.astype(np.int64), codes.astype(np.int8), np.full(len(items), -1, np.int64))


class Truths(_Slots):
    """Booleans."""

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items, np.uint8)

    def _take(self, data: Array, slots: Array) -> Faults:
        self._out[self.items : self.items + len(slots)] = slots
        return NO_FAULTS

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        bits = np.packbits(self._out[: self.items], bitorder="little")
        return pa.Array.from_buffers(self.type, self.items, [self.validity, pa.py_buffer(bits)])


class Symbols(_Slots):
    """Enums: numbers, which become their symbols at the end."""

    def __init__(self, node: SchemaNode, items: int, symbols: Sequence[str]) -> None:
        super().__init__(node, items, np.int32)
        self._symbols = pa.array(symbols, pa.string())

    def _take(self, data: Array, slots: Array) -> Faults:
        self._out[self.items : self.items + len(slots)] = slots
        return NO_FAULTS

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        data = pa.py_buffer(self._out[: self.items])
        return self._symbols.take(pa.Array.from_buffers(pa.int32(), self.items, [self.validity, data]))


class Decimals(_Slots):
    """128-bit decimals."""

    width = 2

    def __init__(self, node: SchemaNode, items: int) -> None:
        super().__init__(node, items)
        self._most = divmod(10**node.type.precision - 1, _FAR * 2)

    def _take(self, data: Array, slots: Array) -> Faults:
        items, codes = np.empty(len(slots), np.int32), np.empty(len(slots), np.int8)
        high, low = self._most
        low = low - 2 * _FAR if low >= _FAR else low
        n = loops.decimals(data, slots, self.items, self._out, high, low, items, codes)
        return _faults(items[:n], codes[:n])


class Bytes(Texts):
    """Strings and binaries as they are in the record."""

    def _fill(self, values: Array, spans: Array) -> Faults:
        used = int(self.ends[self.items])
        self._make_room(used, fill.measure(spans), len(spans))
        fill.texts(values, spans, self.items, self.data, self.ends, self._valid, self._state)
        return NO_FAULTS


def columns_of(nodes: tuple[SchemaNode, ...], reader: AvroType, items: int) -> list[ColumnBuilder]:
    """An empty column for each node, those of rows with room for `items`."""
    symbols = {n.index: t.symbols for n, t in typed_nodes(nodes, reader) if t.kind is AvroKind.ENUM}
    return [_column(n, items if n.level == 0 else 0, symbols.get(n.index)) for n in nodes]


def _column(node: SchemaNode, items: int, symbols: Sequence[str] | None) -> ColumnBuilder:
    match node.type.kind:
        case Kind.STRUCT:
            return Structs(node, items)
        case Kind.LIST | Kind.MAP:
            return Lists(node, items)
        case Kind.STRING if symbols is not None:
            return Symbols(node, items, symbols)
        case Kind.STRING | Kind.BINARY:
            return Bytes(node, items)
        case Kind.BOOL:
            return Truths(node, items)
        case Kind.DECIMAL:
            return Decimals(node, items)
    return Numbers(node, items)


def typed_nodes(nodes: tuple[SchemaNode, ...], reader: AvroType) -> Iterator[tuple[SchemaNode, AvroType]]:
    """Each node that one Avro type is behind, with that type (a nullable one without null)."""
    queue = [(nodes[0], reader)]
    for node, t in queue:
        t = nullable(t) or t
        yield node, t
        children = [nodes[c] for c in node.children]
        match t.kind:
            case AvroKind.RECORD:
                queue += zip(children, (f.type for f in t.fields), strict=True)
            case AvroKind.ARRAY | AvroKind.MAP:
                queue.append((children[-1], t.inner[0]))
            case AvroKind.UNION if len(t.inner) > 1:
                queue += zip(children, branches(t), strict=True)
            case AvroKind.UNION:
                queue += [(node, b) for b in branches(t)]
