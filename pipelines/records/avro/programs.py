"""Compiles a writer's schema and the feed's own schema into one program for the compiled loop (schema resolution).

A program reads a record in the writer's order, and puts the fields of the feed's schema into the slots of their nodes.
Fields that only the writer has are skipped and reported; fields that only the feed has get their default. Two schemas
that do not match raise `IncompatibleSchema`. A branch of a union, or a symbol, that does not match is refused only when
a record has it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.reader_schema import (
    DURATION,
    get_column_type,
    get_nullable,
    has_no_size,
    is_addable,
    list_branches,
    wrap_in_record,
)
from sluice.pipelines.records.avro.schema import AvroField, AvroKind, AvroType, list_records
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import Kind as ColumnKind
from sluice.pipelines.schema.schema import path_below

MOST_OPS = 200_000


class IncompatibleSchema(ValueError):
    """Records of the writer's schema cannot be read as the feed's: the place, and why."""


class _TooLong(IncompatibleSchema):
    """The whole program is too long, not one branch of a union."""


_PROMOTED = {
    AvroKind.INT: (AvroKind.INT, AvroKind.LONG, AvroKind.FLOAT, AvroKind.DOUBLE),
    AvroKind.LONG: (AvroKind.LONG, AvroKind.FLOAT, AvroKind.DOUBLE),
    AvroKind.FLOAT: (AvroKind.FLOAT, AvroKind.DOUBLE),
    AvroKind.DOUBLE: (AvroKind.DOUBLE,),
    AvroKind.STRING: (AvroKind.STRING, AvroKind.BYTES),
    AvroKind.BYTES: (AvroKind.BYTES, AvroKind.STRING),
    AvroKind.BOOLEAN: (AvroKind.BOOLEAN,),
    AvroKind.NULL: (AvroKind.NULL,),
}
_INTEGERS = (AvroKind.INT, AvroKind.LONG)


_Read = Callable[[AvroType, AvroType, SchemaNode, str], None]


class Pool:
    """Data that all programs of a feed share: translations and jumps (`lists`), bytes of constant texts (`texts`)."""

    def __init__(self) -> None:
        self.lists: list[int] = []
        self.texts = bytearray()

    def keep(self, numbers: Sequence[int]) -> int:
        """Numbers, at the returned place of `lists`."""
        self.lists += numbers
        return len(self.lists) - len(numbers)

    def text(self, data: bytes) -> tuple[int, int]:
        """A text, from and up to these places of `texts`."""
        self.texts += data
        return len(self.texts) - len(data), len(self.texts)


def compile_program(
    writer: AvroType,
    reader: AvroType,
    nodes: tuple[SchemaNode, ...],
    begin: int,
    pool: Pool,
    wire: WireFormat = WireFormat.BARE,
) -> tuple[list[list[int]], dict[str, str]]:
    """The operations, from number `begin` on, and the fields that only the writer has (path → type).

    Raises IncompatibleSchema. `reader` is a record, whose columns the nodes are.
    """
    compiler = _Program(writer, nodes, begin, pool)
    if has_no_size(writer, wire):
        compiler.text = loops.REST
    compiler.emit_root(writer, reader, nodes[0])
    compiler.emit(loops.END)
    compiler.emit_routines()
    return compiler.ops, compiler.unknown


class _Program:
    def __init__(self, writer: AvroType, nodes: tuple[SchemaNode, ...], begin: int, pool: Pool) -> None:
        self._records, self._nodes, self._begin, self._pool = list_records(writer), nodes, begin, pool
        self._calls: list[tuple[list[int], str]] = []
        self.ops: list[list[int]] = []
        self.unknown: dict[str, str] = {}
        self.text = loops.TEXT
        """The operation that reads strings and bytes."""

    @property
    def here(self) -> int:
        """The number of the next operation."""
        return self._begin + len(self.ops)

    def emit(self, op: int, node: SchemaNode | None = None, a: int = 0, b: int = 0, c: int = 0) -> list[int]:
        if len(self.ops) >= MOST_OPS:
            raise _TooLong("its schema takes too many operations")
        row = [op, node.index if node else -1, node.level if node else 0, a, b, c]
        self.ops.append(row)
        return row

    # -- fields of both schemas

    def emit_root(self, w: AvroType, r: AvroType, node: SchemaNode) -> None:
        """A whole value: of a record, or of any other type if the reader's record is one around that."""
        if not r.name:
            self.emit_record(w if w.kind is AvroKind.RECORD and not w.name else wrap_in_record(w), r, node, "")
        elif w.kind is AvroKind.UNION:
            self._emit_written_union(w, r, node, "", self.emit_record)
        else:
            self.emit_record(w, r, node, "")

    def emit_record(self, w: AvroType, r: AvroType, node: SchemaNode, path: str) -> None:
        """Emit all fields of a record; the caller marks the struct as present."""
        if w.kind is not AvroKind.RECORD or not _has_same_name(w, r):
            raise IncompatibleSchema(f"{path or 'the record'}: {_describe(w)} was written, and {_describe(r)} is read")
        children = {self._nodes[c].name: self._nodes[c] for c in node.children}
        wanted = {f.name: f for f in r.fields}
        for f in r.fields:
            for alias in f.aliases:
                wanted.setdefault(alias, f)
        filled: set[str] = set()
        written = {f.name for f in w.fields}
        for f in w.fields:
            target = wanted.get(f.name)
            # A field of its own name goes before an alias.
            if target is None or target.name in filled or (target.name != f.name and target.name in written):
                self.emit_skip(f.type)
                # As a feed spells it. Elements may be null: other writers' may be.
                self.unknown[f"{path}.{f.name}" if path else f.name] = (
                    str(get_column_type(f.type)).replace(" not null", "") if is_addable(f.type) else ""
                )
                continue
            filled.add(target.name)
            self.value(f.type, target.type, children[target.name], f"{path}.{f.name}" if path else f.name)
        for f in r.fields:
            if f.name not in filled:
                self._emit_default(f, children[f.name], f"{path}.{f.name}" if path else f.name)

    def value(self, w: AvroType, r: AvroType, node: SchemaNode, path: str) -> None:
        """One value, read from the writer's type into the node of the reader's."""
        w = self._records[w.name] if w.kind is AvroKind.AGAIN else w
        if w.kind is AvroKind.UNION:
            self._emit_written_union(w, r, node, path, self.value)
        elif r.kind is AvroKind.UNION:
            self._emit_read_union(w, r, node, path)
        else:
            self._emit_plain(w, r, node, path)

    def _emit_written_union(self, w: AvroType, r: AvroType, node: SchemaNode, path: str, read: _Read) -> None:
        jump = self.emit(loops.BRANCH, node, b=len(w.inner))
        at: list[int] = []
        ends: list[list[int]] = []
        fits = 0
        for branch in w.inner:
            at.append(self.here)
            length, unknown = len(self.ops), dict(self.unknown)
            try:
                read(branch, r, node, path)
                fits += 1
            except _TooLong:
                raise
            except IncompatibleSchema:
                del self.ops[length:]
                self.unknown = unknown
                self.emit(loops.FAIL, node, loops.OTHER_BRANCH)
            ends.append(self.emit(loops.JUMP))
        if not fits:
            raise IncompatibleSchema(
                f"{path or 'the record'}: no branch of the union that was written is {_describe(r)}"
            )
        for row in ends:
            row[loops.A] = self.here
        jump[loops.A] = self._pool.keep(at)

    def _emit_read_union(self, w: AvroType, r: AvroType, node: SchemaNode, path: str) -> None:
        """The first branch that matches best: of the same type, else one that the writer's can become."""
        if w.kind is AvroKind.NULL and any(b.kind is AvroKind.NULL for b in r.inner):
            return  # an unwritten slot is null
        branch = next((b for b in r.inner if w.kind is b.kind and _can_become(w, b)), None) or next(
            (b for b in r.inner if _can_become(w, b)), None
        )
        if branch is None:
            raise IncompatibleSchema(f"{path}: {_describe(w)} was written, and no branch of the union is that")
        if get_nullable(r) or len(list_branches(r)) < 2:
            self.value(w, branch, node, path)
            return
        self.emit(loops.PRESENT, node)
        self.value(w, branch, self._find_member(r, branch, node), path)

    def _find_member(self, r: AvroType, branch: AvroType, node: SchemaNode) -> SchemaNode:
        index = next(i for i, b in enumerate(list_branches(r)) if b is branch)
        return self._nodes[node.children[index]]

    def _emit_plain(self, w: AvroType, r: AvroType, node: SchemaNode, path: str) -> None:
        """A value of a writer's and a reader's type that are no unions."""
        if not _can_become(w, r):
            raise IncompatibleSchema(f"{path}: {_describe(w)} was written, and {_describe(r)} is read")
        emit = self.emit
        match r.kind:
            case AvroKind.NULL:
                return
            case AvroKind.RECORD:
                emit(loops.PRESENT, node)
                self.emit_record(w, r, node, path)
            case AvroKind.ARRAY | AvroKind.MAP:
                self._emit_list(w, r, node, path)
            case AvroKind.BOOLEAN:
                emit(loops.TRUTH, node)
            case AvroKind.INT | AvroKind.LONG | AvroKind.FLOAT | AvroKind.DOUBLE:
                # Promoted to the reader's type.
                if w.kind in _INTEGERS:
                    becomes = {AvroKind.FLOAT: loops.AS_FLOAT, AvroKind.DOUBLE: loops.AS_DOUBLE}.get(
                        r.kind, loops.AS_IS
                    )
                    self.emit(loops.LONG, node, becomes, int(w.kind is AvroKind.INT))
                elif w.kind is AvroKind.FLOAT:
                    self.emit(loops.FLOAT, node, loops.AS_DOUBLE if r.kind is AvroKind.DOUBLE else loops.AS_IS)
                else:
                    self.emit(loops.DOUBLE, node)
            case AvroKind.STRING:
                # Text must be UTF-8; bytes need not be.
                emit(self.text, node, 1)
            case AvroKind.BYTES:
                emit(self.text, node)
            case AvroKind.FIXED if r.logical == "duration":
                emit(loops.PRESENT, node)
                for child in node.children:
                    emit(loops.WORD, self._nodes[child])
            case AvroKind.FIXED:
                emit(loops.FIXED, node, r.size)
            case AvroKind.ENUM:
                # A writer's symbol becomes the reader's number of it, or its default's; −1 refuses the record.
                numbers = {s: i for i, s in enumerate(r.symbols)}
                other = numbers.get(r.default or "", -1)
                emit(loops.ENUM, node, self._pool.keep([numbers.get(s, other) for s in w.symbols]), len(w.symbols))

    def _emit_list(self, w: AvroType, r: AvroType, node: SchemaNode, path: str) -> None:
        minimum = count_least_bytes(w.inner[0]) + (r.kind is AvroKind.MAP)
        begun = self.here
        row = self.emit(loops.LIST, node, node.inner, c=minimum)
        children = [self._nodes[c] for c in node.children]
        if r.kind is AvroKind.MAP:
            self.emit(loops.TEXT, children[0], 1)
        kind = ColumnKind.MAP if r.kind is AvroKind.MAP else ColumnKind.LIST
        self.value(w.inner[0], r.inner[0], children[-1], path_below(path, kind, ""))
        self.emit(loops.NEXT, node, begun)
        row[loops.B] = self.here

    # -- fields of the writer alone

    def emit_skip(self, w: AvroType) -> None:
        """Pass over a value, checked as far as its bounds go."""
        emit = self.emit
        match w.kind:
            case AvroKind.NULL:
                return
            case AvroKind.BOOLEAN:
                emit(loops.SKIP, a=1)
            case AvroKind.INT | AvroKind.LONG | AvroKind.ENUM:
                emit(loops.SKIP_LONG)
            case AvroKind.FLOAT:
                emit(loops.SKIP, a=4)
            case AvroKind.DOUBLE:
                emit(loops.SKIP, a=8)
            case AvroKind.BYTES | AvroKind.STRING:
                emit(loops.SKIP_TEXT)
            case AvroKind.FIXED:
                emit(loops.SKIP, a=w.size)
            case AvroKind.RECORD:
                for f in w.fields:
                    self.emit_skip(f.type)
            case AvroKind.AGAIN:
                # A type within itself: its program is called, once its place is known.
                self._calls.append((emit(loops.CALL), w.name))
            case AvroKind.ARRAY | AvroKind.MAP:
                begun = self.here
                # The least size of an element refuses counts that the rest of a record cannot hold.
                row = emit(loops.LIST, a=-1, c=count_least_bytes(w.inner[0]) + (w.kind is AvroKind.MAP))
                if w.kind is AvroKind.MAP:
                    emit(loops.SKIP_TEXT)
                self.emit_skip(w.inner[0])
                emit(loops.NEXT, a=begun)
                row[loops.B] = self.here
            case AvroKind.UNION:
                self._emit_skipped_union(w)

    def _emit_skipped_union(self, w: AvroType) -> None:
        jump, at, ends = self.emit(loops.BRANCH, b=len(w.inner)), list[int](), list[list[int]]()
        for branch in w.inner:
            at.append(self.here)
            self.emit_skip(branch)
            ends.append(self.emit(loops.JUMP))
        for end in ends:
            end[loops.A] = self.here
        jump[loops.A] = self._pool.keep(at)

    def emit_routines(self) -> None:
        """Emit a routine for each recursive record that is skipped, and set the targets of all calls."""
        at: dict[str, int] = {}
        for row, name in self._calls:  # grows
            if name not in at:
                at[name] = self.here
                self.emit_skip(self._records[name])
                self.emit(loops.RETURN)
            row[loops.A] = at[name]

    # -- fields of the reader alone

    def _emit_default(self, f: AvroField, node: SchemaNode, path: str) -> None:
        if not f.has_default:
            raise IncompatibleSchema(f"{path}: was not written, and has no default")
        try:
            self._emit_constant(f.type, f.default, node)
        except (TypeError, ValueError, AttributeError, struct.error, OverflowError) as error:
            raise IncompatibleSchema(f"{path}: its default is not {_describe(f.type)}") from error

    def _emit_constant(self, r: AvroType, value: Any, node: SchemaNode) -> None:
        """A default as JSON has it. Raises TypeError or ValueError for one that is not of its type."""
        emit = self.emit
        match r.kind:
            case AvroKind.NULL:
                _check(value is None)
            case AvroKind.UNION:
                self._emit_constant_union(r, value, node)
            case AvroKind.RECORD:
                # A default becomes part of the program: for the loop, each record of this writer has the value.
                emit(loops.PRESENT, node)
                children = {self._nodes[c].name: self._nodes[c] for c in node.children}
                for f in r.fields:
                    present = f.name in value
                    _check(present or f.has_default)
                    self._emit_constant(f.type, value[f.name] if present else f.default, children[f.name])
            case AvroKind.ARRAY:
                _check(isinstance(value, list))
                emit(loops.LIST_OF, node, node.inner, len(value))
                for v in value:
                    emit(loops.ELEMENT, a=node.inner)
                    self._emit_constant(r.inner[0], v, self._nodes[node.children[0]])
            case AvroKind.MAP:
                _check(isinstance(value, Mapping))
                emit(loops.LIST_OF, node, node.inner, len(value))
                for k, v in value.items():
                    emit(loops.ELEMENT, a=node.inner)
                    emit(loops.CONSTANT, self._nodes[node.children[0]], *self._pool.text(k.encode()))
                    self._emit_constant(r.inner[0], v, self._nodes[node.children[1]])
            case AvroKind.STRING:
                emit(loops.CONSTANT, node, *self._pool.text(value.encode()))
            case AvroKind.BYTES | AvroKind.FIXED:
                # Avro's JSON writes each byte as the character with its number.
                self._emit_bytes(r, value.encode("latin-1"), node)
            case AvroKind.ENUM:
                emit(loops.NUMBER, node, r.symbols.index(value))
            case _:
                emit(loops.NUMBER, node, _get_bits(r.kind, value))

    def _emit_bytes(self, r: AvroType, data: bytes, node: SchemaNode) -> None:
        _check(r.kind is AvroKind.BYTES or len(data) == r.size)
        if r.logical != "duration":
            self.emit(loops.CONSTANT, node, *self._pool.text(data))
            return
        self.emit(loops.PRESENT, node)
        for child, number in zip(node.children, struct.unpack(f"<{len(DURATION)}I", data), strict=True):
            self.emit(loops.NUMBER, self._nodes[child], number)

    def _emit_constant_union(self, r: AvroType, value: Any, node: SchemaNode) -> None:
        """Newer Avro lets a default be of any branch: the first that takes it."""
        for branch in r.inner:
            length = len(self.ops)
            try:
                if branch.kind is not AvroKind.NULL and len(list_branches(r)) > 1:
                    self.emit(loops.PRESENT, node)
                    self._emit_constant(branch, value, self._find_member(r, branch, node))
                else:
                    self._emit_constant(branch, value, node)
                return
            except (TypeError, ValueError, AttributeError, struct.error, OverflowError):
                del self.ops[length:]
        raise ValueError("no branch takes the default")


def _check(right: bool) -> None:
    if not right:
        raise ValueError("not of this type")


def _get_bits(kind: AvroKind, value: Any) -> int:
    """A number as its slot holds it."""
    if kind is AvroKind.BOOLEAN:
        _check(isinstance(value, bool))
        return int(value)
    if kind in _INTEGERS:
        bound = 1 << (31 if kind is AvroKind.INT else 63)
        _check(isinstance(value, int) and not isinstance(value, bool) and -bound <= value < bound)
        return int(value)
    if isinstance(value, str):
        _check(value in ("NaN", "Infinity", "-Infinity", "INF", "-INF"))
        value = float(value.lower())
    _check(isinstance(value, int | float) and not isinstance(value, bool))
    code = "<f" if kind is AvroKind.FLOAT else "<d"
    number = float(value)
    packed = struct.pack(code, number if not math.isnan(number) else math.nan)
    return int.from_bytes(packed, "little", signed=kind is AvroKind.DOUBLE)


def _has_same_name(w: AvroType, r: AvroType) -> bool:
    """Named types match by their names without namespaces, or by an alias of the reader's."""
    if not w.name or not r.name:
        return w.name == r.name
    return w.short == r.short or w.name in r.aliases or w.short in {a.rpartition(".")[2] for a in r.aliases}


def _can_become(w: AvroType, r: AvroType) -> bool:
    """Returns whether the reader's type may accept the writer's, judged by the two alone."""
    if w.logical and r.logical and (w.logical, w.scale) != (r.logical, r.scale):
        return False  # a time in another unit, or other digits: nothing is converted
    if w.kind is not r.kind and "decimal" in (w.logical, r.logical):
        return False  # a text is no decimal's bytes
    if w.kind in _PROMOTED:
        return r.kind in _PROMOTED[w.kind]
    if w.kind is not r.kind:
        return False
    if w.kind is AvroKind.FIXED:
        return w.size == r.size and _has_same_name(w, r)
    return w.kind in (AvroKind.ARRAY, AvroKind.MAP) or _has_same_name(w, r)


def count_least_bytes(w: AvroType) -> int:
    """The fewest bytes that a value takes; 0 only for one that never takes any."""
    match w.kind:
        case AvroKind.NULL:
            return 0
        case AvroKind.FLOAT:
            return 4
        case AvroKind.DOUBLE:
            return 8
        case AvroKind.FIXED:
            return w.size
        case AvroKind.RECORD:
            return min(sum(count_least_bytes(f.type) for f in w.fields), 1 << 30)
        case AvroKind.UNION:
            return 1 + min(map(count_least_bytes, w.inner))
    return 1  # also for AGAIN: a recursion that ends has a union or a list, which takes a byte, in each turn


def _describe(t: AvroType) -> str:
    """Returns a readable type with its name."""
    kind = f"{t.kind} {t.short}" if t.name else str(t.kind)
    return f"{kind} ({t.logical})" if t.logical else kind
