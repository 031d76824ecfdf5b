"""Turns the Avro values of a chunk into columns of the feed's schema, block by block (`records.slots.binary`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.columns import columns_of
from sluice.pipelines.records.avro.loops import Tables
from sluice.pipelines.records.avro.programs import Incompatible, Pool, program
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.avro.schema import AvroType, parse
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.rows.value_reader import UnusableSchema, WriterSchemas
from sluice.pipelines.records.rows.wire_format import Named, WireFormat
from sluice.pipelines.records.slots import binary_loops
from sluice.pipelines.records.slots.binary import MOST_SCHEMAS, BinaryTyper, NewField
from sluice.pipelines.records.slots.slots import SlotPiece, with_room

_BARE = 0
"""The number under which a feed without a registry has its one schema."""


class AvroTyper(BinaryTyper):
    """Types Avro records by one schema. With `closed`, records whose schema has fields that the feed's does not have
    are refused."""

    _tables: Tables

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
        self._tables = self._no_tables()
        if self._reader.wire is WireFormat.BARE:
            self._learn(_BARE, self._reader.type)

    def _begun(self, rows: int) -> SlotPiece:
        return SlotPiece(self.nodes, columns_of(self.nodes, self._reader.type, rows))

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
            self._know(schema, self._incompatible(schema, error))
            return
        if writer is None:
            self._know(schema, -binary_loops.NO_SCHEMA)
        else:
            self._learn(schema, writer)

    def _learn(self, schema: int, writer: AvroType) -> None:
        begin = len(self._ops)
        try:
            ops, self._unknown[schema] = program(writer, self._reader.type, self.nodes, begin, self._pool)
        except Incompatible as error:
            self._know(schema, self._incompatible(schema, error))
            return
        if self._closed and self._unknown[schema]:
            self._know(schema, -loops.NEW_FIELDS)
            return
        self._ops += ops
        table = np.zeros((len(self._ops), loops.OP_FIELDS), np.int64)
        table[:, : len(self._ops[0])] = self._ops
        self._tables = self._tables._replace(ops=table, lists=np.array([*self._pool.lists, 0], np.int64))
        self._know(schema, begin)

    def _know(self, schema: int, start: int) -> None:
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

    def _no_tables(self) -> Tables:
        table = np.zeros((len(self.nodes), loops.OP_FIELDS), np.int64)
        table[:, binary_loops.NODE_LEVEL] = [n.level for n in self.nodes]
        tables = Tables(
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
