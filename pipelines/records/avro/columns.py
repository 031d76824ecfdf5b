"""Slots into Arrow arrays: for each node of the feed's schema a column that grows block by block.

Most are those of `records.json`; enums and decimals have columns of their own.
Promise: buffers hold what was appended and are not touched again once they are handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.reader_schema import branches, nullable
from sluice.pipelines.records.avro.schema import AvroKind, AvroType
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json.columns import NO_FAULTS, ColumnBuilder, Faults, Lists, Structs
from sluice.pipelines.records.json.scan_tables import SchemaNode
from sluice.pipelines.records.slots.slots import Bytes, Numbers, Slots, Truths, slot_faults
from sluice.pipelines.schema.schema import Kind

_FAR = 1 << 63


class Symbols(Slots):
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


class Decimals(Slots):
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
        return slot_faults(items[:n], codes[:n])


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
