"""Slots into Arrow arrays: for each node of the feed's message a column that grows block by block.

Most are those of all formats; enums, JSON documents and maps have columns of their own. Promise: buffers hold the
appended items, and do not change after they were handed out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.records.columns.builders import ColumnBuilder, Faults, Lists, Structs, Texts, make_faults
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.spans import SIZE_BITS, get_size, get_start
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.protobuf.programs import THERE
from sluice.pipelines.records.protobuf.schema import Meaning, ProtoField, ProtoKind
from sluice.pipelines.records.slots.slots import SlotNumbers, Slots, SlotSymbols, SlotTruths
from sluice.pipelines.schema.arrays import fixed_width, view_int32s
from sluice.pipelines.schema.schema import Kind
from sluice.pipelines.util.extras import name_missing

_WIDE = {ProtoKind.UINT64: pa.uint64(), ProtoKind.FIXED64: pa.uint64(), ProtoKind.BOOL: pa.bool_()}


class EnumNumbers(SlotSymbols):
    """Enums of numbers, which become their names. A number without a name is a fault."""

    def __init__(self, node: SchemaNode, items: int, symbols: Sequence[tuple[int, str]]) -> None:
        super().__init__(node, items, [name for _, name in symbols])
        self._numbers = np.array([number for number, _ in symbols], np.int64)

    def append_slots(self, data: Array, slots: Array, there: Array) -> Faults:
        positions = np.minimum(np.searchsorted(self._numbers, slots), len(self._numbers) - 1)
        bad = np.flatnonzero((self._numbers[positions] != slots) & (there != 0))
        first = self.items
        super().append_slots(data, positions, there)
        return make_faults(first + bad, loops.OTHER_SYMBOL)


class MapKeys(Slots):
    """A map's keys that are no texts: numbers and booleans, as texts."""

    def __init__(self, node: SchemaNode, items: int, kind: ProtoKind) -> None:
        super().__init__(node, items)
        self._as = _WIDE.get(kind, pa.int64())

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        data = self._out[: self.items]
        packed = np.packbits(data != 0, bitorder="little") if self._as == pa.bool_() else data
        return pa.Array.from_buffers(self._as, self.items, [None, pa.py_buffer(packed)]).cast(pa.string())


class Documents(Texts):
    """google.protobuf.Struct and its like, read by Google's library, as JSON texts
    with their names sorted. What these cannot say is a fault.

    `more` has, by the slots of the block that comes next, the spans of second and later parts.
    """

    def __init__(self, node: SchemaNode, items: int, message: str) -> None:
        super().__init__(node, items)
        self._text = _make_converter(message)
        self.more: Mapping[int, Sequence[int]] = {}

    def append(self, values: Array, spans: Array) -> Faults:
        first, texts, bad = self.items, bytearray(), list[int]()
        sizes = np.zeros(len(spans), np.int64)
        for at in np.flatnonzero(spans >> (2 * SIZE_BITS)).tolist():
            parts = (int(spans[at]), *self.more.get(at, ()))
            text = self._text(b"".join(values[get_start(s) : get_start(s) + get_size(s)].tobytes() for s in parts))
            if text is None:
                bad.append(first + at)
                text = b"null"
            sizes[at] = THERE | len(text) << SIZE_BITS | len(texts)
            texts += text
        super().append(np.frombuffer(bytes(texts) or b"\0", np.uint8), sizes)
        return make_faults(np.array(bad, np.int64), loops.NO_DOCUMENT)


def _make_converter(message: str) -> Callable[[bytes], bytes | None]:
    """Returns a function from such a message's bytes to JSON; it returns None for bytes that JSON cannot express."""
    with name_missing():
        from google.protobuf import json_format, struct_pb2
        from google.protobuf.message import DecodeError
    kind: Any = getattr(struct_pb2, message.rpartition(".")[2])

    def text(data: bytes) -> bytes | None:
        try:
            document = json_format.MessageToDict(kind.FromString(data))
            return json.dumps(
                document, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
            ).encode()
        except (DecodeError, json_format.Error, ValueError, RecursionError):
            return None

    return text


class Maps(Lists):
    """Maps, as lists of key and value. Of a key that is there more than once, the last entry counts."""

    def array(self, columns: Sequence[ColumnBuilder]) -> pa.Array:
        key, value = (columns[c].array(columns) for c in self.node.children)
        ends = self.ends[: self.items + 1]
        retained = find_last(ends, key)
        if retained is not None:
            key, value = (a.take(fixed_width(pa.int64(), retained)) for a in (key, value))
            ends = np.searchsorted(retained, ends).astype(np.int32)
        entries = pa.struct([self.type.key_field, self.type.item_field])
        children = [pa.Array.from_buffers(entries, len(key), [None], children=[key, value])]
        return pa.Array.from_buffers(self.type, self.items, [self.validity, pa.py_buffer(ends)], children=children)


def find_last(ends: Array, keys: pa.Array) -> Array | None:
    """The last entry of each key of each map, ascending; None where that is every entry."""
    if not len(keys) or int(np.diff(ends).max(initial=0)) < 2:
        return None
    numbers = view_int32s(pc.dictionary_encode(keys).indices)
    pairs = np.repeat(np.arange(len(ends) - 1), np.diff(ends)) * (int(numbers.max()) + 1) + numbers
    _, firsts = np.unique(pairs[::-1], return_index=True)
    if len(firsts) == len(pairs):
        return None
    retained: Array = np.sort(len(pairs) - 1 - firsts)
    return retained


def make_columns(nodes: tuple[SchemaNode, ...], of: Mapping[int, ProtoField], items: int) -> list[ColumnBuilder]:
    """An empty column for each node, those of rows with room for `items`. `of`: the fields whose values nodes hold."""
    return [_make_column(n, items if n.level == 0 else 0, of.get(n.index)) for n in nodes]


def _make_column(node: SchemaNode, items: int, f: ProtoField | None) -> ColumnBuilder:
    while f is not None and f.message is not None and f.message.meaning is Meaning.WRAPPER:
        (f,) = f.message.fields
    match node.type.kind:
        case Kind.STRUCT:
            return Structs(node, items)
        case Kind.LIST:
            return Lists(node, items)
        case Kind.MAP:
            return Maps(node, items)
        case Kind.JSON if f is not None and f.message is not None:
            return Documents(node, items, f.message.name)
        case Kind.STRING if f is not None and f.kind is ProtoKind.ENUM:
            return EnumNumbers(node, items, f.symbols)
        case Kind.STRING if f is not None and f.kind is not ProtoKind.STRING:
            return MapKeys(node, items, f.kind)
        case Kind.STRING | Kind.BINARY:
            return Texts(node, items)
        case Kind.BOOL:
            return SlotTruths(node, items)
    return SlotNumbers(node, items)
