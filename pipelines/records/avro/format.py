"""The format of Avro feeds: values by any writer's schema become rows of the feed's own schema.

Landed rows have the columns of the feed's schema, `_extra` (always empty in Avro: fields that only the writer has are
skipped, and counted as drift), and the record's coordinates. docs/formats.md specifies the result for every value and
the reasons in quarantine.

Promise: a column's buffers hold exactly the appended values, and do not change after they were handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.loops import AvroTables
from sluice.pipelines.records.avro.programs import IncompatibleSchema, Pool, compile_program
from sluice.pipelines.records.avro.reader_schema import AvroReader, get_nullable, list_branches
from sluice.pipelines.records.avro.schema import AvroKind, AvroType, parse
from sluice.pipelines.records.columns.builders import ColumnBuilder, Faults, Lists, Structs, Texts, make_faults
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.reasons import Reason
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.rows.value_reader import UnusableSchema, WriterSchemas
from sluice.pipelines.records.rows.wire_format import Named, WireFormat
from sluice.pipelines.records.slots import binary_loops
from sluice.pipelines.records.slots.binary import MOST_SCHEMAS, BinaryFormat, BinaryTyper, NewField, make_reasons
from sluice.pipelines.records.slots.slots import SlotNumbers, SlotPiece, Slots, SlotSymbols, SlotTruths, with_room
from sluice.pipelines.schema.schema import Kind

REASONS = make_reasons(
    Reason.NOT_AVRO,
    {
        loops.LONG_VARINT: (Reason.NOT_AVRO, "a number of more than 64 bits"),
        loops.WIDE_INT: (Reason.NOT_AVRO, "an int of more than 32 bits"),
        loops.NO_TRUTH: (Reason.NOT_AVRO, "a boolean that is neither 0 nor 1"),
        loops.NO_BRANCH: (Reason.NOT_AVRO, "a branch that its union does not have"),
        loops.NO_SYMBOL: (Reason.NOT_AVRO, "a symbol that its enum does not have"),
        loops.BAD_SIZE: (Reason.NOT_AVRO, "a negative size"),
        loops.MORE: (Reason.NOT_AVRO, "more after the end of the record"),
        loops.DEEP: (Reason.TOO_DEEP, f"more than {loops.MOST_OPEN:,} lists and recursive records inside one another"),
        loops.OTHER_BRANCH: (Reason.INCOMPATIBLE, "a branch of the writer's union that is not {type}"),
        loops.OTHER_SYMBOL: (Reason.WRONG_TYPE, "a symbol that the feed's schema does not have"),
        loops.NEW_FIELDS: (Reason.UNKNOWN_FIELD, "its schema has fields that the feed's does not have"),
        loops.WIDE_DECIMAL: (Reason.OUT_OF_RANGE, "too large for {type}"),
    },
)


_FAR = 1 << 63


class AvroDecimals(Slots):
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
        return make_faults(items[:n], codes[:n])


def make_columns(nodes: tuple[SchemaNode, ...], reader: AvroType, items: int) -> list[ColumnBuilder]:
    """An empty column for each node, those of rows with room for `items`."""
    symbols = {n.index: t.symbols for n, t in pair_nodes(nodes, reader) if t.kind is AvroKind.ENUM}
    return [_make_column(n, items if n.level == 0 else 0, symbols.get(n.index)) for n in nodes]


def _make_column(node: SchemaNode, items: int, symbols: Sequence[str] | None) -> ColumnBuilder:
    match node.type.kind:
        case Kind.STRUCT:
            return Structs(node, items)
        case Kind.LIST | Kind.MAP:
            return Lists(node, items)
        case Kind.STRING if symbols is not None:
            return SlotSymbols(node, items, symbols)
        case Kind.STRING | Kind.BINARY:
            return Texts(node, items)
        case Kind.BOOL:
            return SlotTruths(node, items)
        case Kind.DECIMAL:
            return AvroDecimals(node, items)
    return SlotNumbers(node, items)


def pair_nodes(nodes: tuple[SchemaNode, ...], reader: AvroType) -> Iterator[tuple[SchemaNode, AvroType]]:
    """Each node that one Avro type is behind, with that type (a nullable one without null)."""
    queue = [(nodes[0], reader)]
    for node, t in queue:
        t = get_nullable(t) or t
        yield node, t
        children = [nodes[c] for c in node.children]
        match t.kind:
            case AvroKind.RECORD:
                queue += zip(children, (f.type for f in t.fields), strict=True)
            case AvroKind.ARRAY | AvroKind.MAP:
                queue.append((children[-1], t.inner[0]))
            case AvroKind.UNION if len(t.inner) > 1:
                queue += zip(children, list_branches(t), strict=True)
            case AvroKind.UNION:
                queue += [(node, b) for b in list_branches(t)]


_BARE = 0
"""The number under which a feed without a registry has its one schema."""


class AvroTyper(BinaryTyper):
    """Types Avro records by one schema. With `closed`, records whose schema has fields that the feed's does not have
    are refused."""

    _tables: AvroTables

    def __init__(
        self,
        reader: AvroReader,
        writers: WriterSchemas | None,
        name_of: Callable[[int], Named] = int,
        *,
        closed: bool = False,
    ) -> None:
        super().__init__(reader, writers, name_of)
        self._reader, self._closed = reader, closed
        self._begin()

    def _begin(self) -> None:
        """Know no schema yet."""
        self._pool, self._ops, self._places = Pool(), list[list[int]](), dict[int, int]()
        self.causes.clear()
        self._unknown: dict[int, Mapping[str, str]] = {}
        self._data = self._read = np.empty(0, np.uint8)
        self._tables = self._empty_tables()
        if self._reader.wire is WireFormat.BARE:
            self._learn(_BARE, self._reader.type)

    def _begun(self, rows: int) -> SlotPiece:
        return SlotPiece(self.nodes, make_columns(self.nodes, self._reader.type, rows))

    def _scan(self, data: Array, ends: Array, valid: Array) -> tuple[int, Array]:
        read = self._with_constants(data)
        return loops.scan(read, ends, valid, self._given[0], self._tables, self._found), read

    def _new_fields(self) -> Iterator[NewField]:
        """The fields that only the writers of this piece have."""
        for schema, slot in self._places.items():
            records, row = self._tables.usage[slot, :2].tolist()
            if records:
                for field, type_ in self._unknown.get(schema, {}).items():
                    yield NewField(field, records, row, type_)

    def _with_constants(self, data: Array) -> Array:
        """The chunk's bytes, with the constants of the programs behind them."""
        if not self._pool.texts:
            self._tables.state[loops.POOL] = len(data)
            return data
        if self._data is not data or len(self._read) != len(data) + len(self._pool.texts):
            self._tables.state[loops.POOL] = len(data)
            self._data, self._read = data, np.concatenate([data, np.frombuffer(bytes(self._pool.texts), np.uint8)])
        return self._read

    def _tidy(self) -> None:
        self._data = self._read = np.empty(0, np.uint8)
        if len(self._places) > MOST_SCHEMAS:
            self._begin()

    def _ask(self) -> None:
        schema = int(self._tables.state[binary_loops.NEED])
        try:
            texts = self._texts(schema)
            writer = parse(texts) if texts else None
        except UnusableSchema as error:
            self._enter_program(schema, self._incompatible(schema, error))
            return
        if writer is None:
            self._enter_program(schema, -binary_loops.NO_SCHEMA)
        else:
            self._learn(schema, writer)

    def _learn(self, schema: int, writer: AvroType) -> None:
        begin = len(self._ops)
        try:
            ops, self._unknown[schema] = compile_program(
                writer, self._reader.type, self.nodes, begin, self._pool, self._wire
            )
        except IncompatibleSchema as error:
            self._enter_program(schema, self._incompatible(schema, error))
            return
        if self._closed and self._unknown[schema]:
            self._enter_program(schema, -loops.NEW_FIELDS)
            return
        self._ops += ops
        table = np.zeros((len(self._ops), loops.OP_FIELDS), np.int64)
        table[:, : len(self._ops[0])] = self._ops
        self._tables = self._tables._replace(ops=table, lists=np.array([*self._pool.lists, 0], np.int64))
        self._enter_program(schema, begin)

    def _enter_program(self, schema: int, start: int) -> None:
        """Enter a program, or why there is none, into the hash table."""
        programs = {s: int(self._tables.starts[p]) for s, p in self._places.items()} | {schema: start}
        counted = {s: self._tables.usage[p].copy() for s, p in self._places.items()}
        size = 1 << (2 * len(programs)).bit_length()
        ids, starts = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        usage = np.zeros((size, loops.OP_FIELDS), np.int64)
        self._places = {}
        for number, begin in programs.items():
            slot = number * binary_loops.SPREAD & (size - 1)
            while ids[slot] >= 0:
                slot = (slot + 1) & (size - 1)
            ids[slot], starts[slot], self._places[number] = number, begin, slot
            if number in counted:
                usage[slot] = counted[number]
        self._tables = self._tables._replace(ids=ids, starts=starts, usage=usage)
        # Without a header, the loop looks where it looked last.
        self._tables.state[binary_loops.KNOWN] = self._places[schema]

    def _empty_tables(self) -> AvroTables:
        table = np.zeros((len(self.nodes), loops.OP_FIELDS), np.int64)
        table[:, binary_loops.NODE_LEVEL] = [n.level for n in self.nodes]
        tables = AvroTables(
            ops=np.zeros((1, loops.OP_FIELDS), np.int64),
            lists=np.zeros(1, np.int64),
            ids=np.full(2, -1, np.int64),
            starts=np.zeros(2, np.int64),
            usage=np.zeros((2, loops.OP_FIELDS), np.int64),
            nodes=table,
            stack=np.zeros(loops.FRAME * loops.MOST_OPEN, np.int64),
            **self._first_tables(loops.SLOTS),
        )
        return with_room(tables, self.nodes, tables.room)


class AvroFormat(BinaryFormat):
    """Types Avro records by a reader. `writers` tells the schemas that they were written by.

    With `closed`, records whose schema has fields that the reader's does not have are quarantined.
    """

    _reasons = REASONS
    _wrong: ClassVar = {
        loops.OTHER_BRANCH: DriftKind.WRONG,
        loops.OTHER_SYMBOL: DriftKind.UNLISTED,
        loops.WIDE_DECIMAL: DriftKind.OUT_OF_RANGE,
    }

    def __init__(
        self, reader: AvroReader, writers: WriterSchemas | None, *, dropping: bool = False, closed: bool = False
    ) -> None:
        super().__init__(reader, dropping=dropping)
        self._typer = AvroTyper(reader, writers, self._opener.name, closed=closed)
