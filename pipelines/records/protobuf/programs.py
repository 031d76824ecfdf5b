"""Builds the tables by which the compiled loop reads the feed's message, and compares writers' messages with it.

Protobuf's wire does not carry types: a number written as `sint32` reads as another number as `int32`, and a large one
written as `int64`, too. So the feed's field must read all that the writer's field of that number can hold. Source:
"Updating A Message Type" in Protobuf's language guide, without the changes that cut numbers or lists off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.spans import PLAIN, SIZE_BITS
from sluice.pipelines.records.compiled.jit import CELLS, Array
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.protobuf.schema import Meaning, ProtoField, ProtoKind, ProtoMessage, get_kind, is_repeated

_ALSO_READ: Mapping[ProtoKind, Set[ProtoKind]] = {
    ProtoKind.INT64: {ProtoKind.INT32, ProtoKind.UINT32, ProtoKind.BOOL, ProtoKind.ENUM},
    ProtoKind.UINT64: {ProtoKind.UINT32, ProtoKind.BOOL},
    ProtoKind.INT32: {ProtoKind.BOOL, ProtoKind.ENUM},
    ProtoKind.UINT32: {ProtoKind.BOOL},
    ProtoKind.ENUM: {ProtoKind.INT32, ProtoKind.BOOL},  # a number without a name is refused with its record
    ProtoKind.SINT64: {ProtoKind.SINT32},
    ProtoKind.STRING: {ProtoKind.BYTES},
    ProtoKind.BYTES: {ProtoKind.STRING},
}
"""Other types that a feed's field of this type may have been written as."""
Unknown = Callable[[ProtoMessage, int, str], None]
"""Called for a field that only the writer has: (the feed's message, field number, name)."""


class IncompatibleMessage(ValueError):
    """Records of the writer's message cannot be read as the feed's: the place, and why."""


def compare(writer: Any, reader: ProtoMessage, unknown: Unknown, path: str = "") -> None:
    """Compare a writer's descriptor with the feed's message. Raises IncompatibleMessage."""
    own = {f.number: f for f in reader.fields}
    if reader.meaning is Meaning.JSON:
        return
    _check_choices(writer, reader, path)
    for w in writer.fields:
        r = own.get(w.number)
        if r is None:
            unknown(reader, w.number, w.name)
            continue
        where = f"{path}.{r.name}" if path else r.name
        _check(w, r, where)
        if r.message is not None and w.message_type is not None:
            compare(w.message_type, r.message, unknown, where)


def _check_choices(writer: Any, reader: ProtoMessage, path: str) -> None:
    """Members of a oneof must exclude one another in the writer's message, too: of two, the last alone would land."""
    written = {w.number: w.containing_oneof.name if w.containing_oneof else w.name for w in writer.fields}
    for oneof in dict.fromkeys(f.oneof for f in reader.fields if f.oneof):
        if len({written[f.number] for f in reader.fields if f.oneof == oneof and f.number in written}) > 1:
            where = f"{path}.{oneof}" if path else oneof
            raise IncompatibleMessage(f"{where}: fields were written apart, and one of them is read")


def _check(w: Any, r: ProtoField, where: str) -> None:
    kind, group = get_kind(w)
    same = kind is r.kind and group == r.group
    if not same and kind not in _ALSO_READ.get(r.kind, ()):
        raise IncompatibleMessage(f"{where}: {kind} was written, and {r.kind} is read")
    if r.message is not None:
        # Messages of other names read each other's fields, unless one of them means more than a struct.
        more = r.message.meaning in (Meaning.TIME, Meaning.WRAPPER, Meaning.JSON)
        if (
            more or w.message_type.full_name.startswith("google.protobuf.")
        ) and w.message_type.full_name != r.message.name:
            raise IncompatibleMessage(f"{where}: {w.message_type.full_name} was written, and {r.message.name} is read")
    if is_repeated(w) and not r.repeated:
        raise IncompatibleMessage(f"{where}: a list was written, and one value is read")


THERE = (PLAIN << (2 * SIZE_BITS)) - (1 << 64)
"""The slot of a struct, or of an empty text or list, as a number with a sign."""

_OPS = {
    **dict.fromkeys((ProtoKind.INT32, ProtoKind.ENUM), (loops.INT32, loops.VARINT)),
    **dict.fromkeys((ProtoKind.INT64, ProtoKind.UINT64), (loops.INT64, loops.VARINT)),
    ProtoKind.UINT32: (loops.UINT32, loops.VARINT),
    ProtoKind.SINT32: (loops.SINT32, loops.VARINT),
    ProtoKind.SINT64: (loops.SINT64, loops.VARINT),
    ProtoKind.BOOL: (loops.TRUTH, loops.VARINT),
    **dict.fromkeys((ProtoKind.DOUBLE, ProtoKind.FIXED64, ProtoKind.SFIXED64), (loops.FIXED64, loops.EIGHT)),
    **dict.fromkeys((ProtoKind.FLOAT, ProtoKind.FIXED32), (loops.FIXED32, loops.FOUR)),
    ProtoKind.SFIXED32: (loops.SFIXED32, loops.FOUR),
    ProtoKind.STRING: (loops.TEXT, loops.SIZED),
    ProtoKind.BYTES: (loops.BYTES_, loops.SIZED),
}


@dataclass(slots=True)
class Program:
    """The tables of one message (`loops.ProtobufTables`), what each node is of, and of each message its name and
    place."""

    fields: list[list[int]] = field(default_factory=list)
    messages: list[list[int]] = field(default_factory=list)
    lookup: list[int] = field(default_factory=list)
    lists: list[int] = field(default_factory=lambda: [0])
    modes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    of: dict[int, ProtoField] = field(default_factory=dict)
    names: list[tuple[str, str]] = field(default_factory=list)

    def tables(self, nodes: Sequence[SchemaNode]) -> dict[str, Array]:
        """The arrays of these names that `loops.ProtobufTables` has."""
        rows = np.zeros((len(nodes), CELLS), np.int64)
        for n in nodes:
            rows[n.index, loops.LEVEL], rows[n.index, loops.INNER] = n.level, n.inner
            mode, parent, value = self.modes.get(n.index, (loops.MAY_MISS, -1, 0))
            rows[n.index, loops.MODE], rows[n.index, loops.PARENT], rows[n.index, loops.VALUE] = mode, parent, value
        return {
            "fields": _make_table(self.fields),
            "messages": _make_table(self.messages),
            "lookup": np.array(self.lookup, np.int64),
            "lists": np.array(self.lists, np.int64),
            "nodes": rows,
        }


def _make_table(rows: list[list[int]]) -> Array:
    table = np.zeros((max(len(rows), 1), CELLS), np.int64)
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    return table


def compile_program(message: ProtoMessage, nodes: tuple[SchemaNode, ...]) -> Program:
    """The tables of a feed's message, whose columns the nodes are."""
    programmer = _Programmer(nodes)
    programmer.add_struct(message, nodes[0])
    return programmer.out


class _Programmer:
    def __init__(self, nodes: tuple[SchemaNode, ...]) -> None:
        self._nodes = nodes
        self.out = Program()

    def _add_message(self, m: ProtoMessage, node: SchemaNode) -> int:
        """Returns the number of a new message; `_add_fields` adds its fields."""
        self.out.messages.append([0, 0, node.index])
        self.out.names.append((m.name, node.path))
        return len(self.out.messages) - 1

    def _add_fields(self, message: int, rows: list[tuple[int, list[int]]]) -> None:
        """Enter the fields of a message, by their numbers."""
        size = 1 << (2 * max(len(rows), 1)).bit_length()
        table = [0] * (2 * size)
        for number, row in rows:
            self.out.fields.append(row)
            slot = number & (size - 1)
            while table[2 * slot]:
                slot = (slot + 1) & (size - 1)
            table[2 * slot], table[2 * slot + 1] = number, len(self.out.fields) - 1
        self.out.messages[message][:2] = [len(self.out.lookup), size - 1]
        self.out.lookup += table

    def add_struct(self, m: ProtoMessage, node: SchemaNode) -> int:
        """A message whose fields are the children of a node."""
        number = self._add_message(m, node)
        children = [self._nodes[c] for c in node.children]
        rows = [(f.number, self._compile_field(f, child, node)) for f, child in zip(m.fields, children, strict=True)]
        for (_, row), f in zip(rows, m.fields, strict=True):
            if f.oneof:
                row[loops.OTHERS] = self._list_others(f, m.fields, children)
        self._add_fields(number, rows)
        return number

    def _list_others(self, f: ProtoField, fields: Sequence[ProtoField], children: Sequence[SchemaNode]) -> int:
        """The members that a oneof's member excludes, with all that is below them: a place in `lists`."""
        below = [
            [n.index for n in self._list_below(child)]
            for other, child in zip(fields, children, strict=True)
            if other.oneof == f.oneof and other is not f
        ]
        at = len(self.out.lists)
        self.out.lists.append(len(below))
        for indexes in below:
            self.out.lists += [len(indexes), *indexes]
        return at

    def _list_below(self, node: SchemaNode) -> list[SchemaNode]:
        queue = [node]
        for n in queue:
            queue += [self._nodes[c] for c in n.children]
        return queue

    def _compile_field(self, f: ProtoField, node: SchemaNode, parent: SchemaNode) -> list[int]:
        """The row of a field that is a child of a struct."""
        if f.entry is not None:
            self.out.modes[node.index] = (loops.DEFAULT, parent.index, THERE)
            row = self._make_row(loops.ENTER, loops.SIZED, None)
            row[loops.LIST], row[loops.INNER], row[loops.OUTER] = node.index, node.inner, node.level
            row[loops.MESSAGE] = self._add_entry(f.entry, node)
            return row
        if f.repeated:
            self.out.modes[node.index] = (loops.DEFAULT, parent.index, THERE)
            row = self._make_field(f, self._nodes[node.children[0]])
            row[loops.LIST], row[loops.INNER], row[loops.OUTER] = node.index, node.inner, node.level
            row[loops.PACKED] = int(row[loops.WIRE] in (loops.VARINT, loops.FOUR, loops.EIGHT))
            return row
        row = self._make_field(f, node)
        if f.required:
            self.out.modes[node.index] = (loops.REQUIRED, parent.index, 0)
        elif not f.presence:
            self.out.modes[node.index] = (loops.DEFAULT, parent.index, _get_default(f))
        return row

    def _add_entry(self, m: ProtoMessage, node: SchemaNode) -> int:
        """The entries of a map, of which both may be missing."""
        number = self._add_message(m, node)
        key, value = (self._nodes[c] for c in node.children)
        rows = [(f.number, self._make_field(f, child)) for f, child in zip(m.fields, (key, value), strict=True)]
        for f, child in zip(m.fields, (key, value), strict=True):
            self.out.modes[child.index] = (loops.DEFAULT, -1, _get_default(f))
        self._add_fields(number, rows)
        return number

    def _make_field(self, f: ProtoField, node: SchemaNode) -> list[int]:
        """The row of a field whose value goes to a node."""
        self.out.of[node.index] = f
        if f.message is None:
            return self._make_row(*_OPS[f.kind], node)
        wire = loops.GROUP if f.group else loops.SIZED
        match f.message.meaning:
            case Meaning.JSON:
                return self._make_row(loops.DOCUMENT, loops.SIZED, node)
            case Meaning.EMPTY:
                inside, value = self._add_message(f.message, node), 1
                self._add_fields(inside, [])
            case Meaning.TIME:
                inside, value = self._add_message(f.message, node), 0
                seconds, nanos = (
                    self._make_row(op, loops.VARINT, node) for op in (loops.SECONDS, loops.NANOS)
                )  # fmt: skip
                self._add_fields(inside, [(1, seconds), (2, nanos)])
            case Meaning.WRAPPER:
                inside, value = self._add_message(f.message, node), _get_default(f)
                (own,) = f.message.fields
                self._add_fields(inside, [(own.number, self._make_row(*_OPS[own.kind], node))])
            case _:
                inside, value = self.add_struct(f.message, node), THERE
        row = self._make_row(loops.ENTER, wire, node)
        row[loops.MESSAGE], row[loops.VALUE] = inside, value
        return row

    def _make_row(self, op: int, wire: int, node: SchemaNode | None) -> list[int]:
        row = [0] * CELLS
        row[loops.OP], row[loops.WIRE] = op, wire
        row[loops.NODE], row[loops.LEVEL] = (node.index, node.level) if node else (-1, 0)
        row[loops.LIST], row[loops.OTHERS] = -1, -1
        return row


def _get_default(f: ProtoField) -> int:
    """The slot of a value that was not written."""
    if f.message is None:
        return THERE if f.kind in (ProtoKind.STRING, ProtoKind.BYTES) else f.first
    match f.message.meaning:
        case Meaning.EMPTY:
            return 1
        case Meaning.TIME:
            return 0
        case Meaning.WRAPPER:
            return _get_default(f.message.fields[0])
    return THERE
