"""Turns the Avro values of a chunk into columns of the feed's schema, block by block.

Records of several writers' schemas may follow one another: the loop asks for a schema when it meets one for the first
time. Promise: each record of a chunk is either typed or refused; a chunk comes in several pieces when its columns would
take much more memory than its values; the result depends on the values and the writers' schemas alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.columns import columns_of
from sluice.pipelines.records.avro.loops import Tables
from sluice.pipelines.records.avro.programs import Incompatible, Pool, program
from sluice.pipelines.records.avro.reader import AvroReader
from sluice.pipelines.records.avro.schema import MOST_DEPTH, AvroSchemaError, AvroType, parse
from sluice.pipelines.records.compiled import Array
from sluice.pipelines.records.pieces import Found
from sluice.pipelines.records.reader import WriterSchemas
from sluice.pipelines.records.typed.slots import SlotPiece, first_room, holder_of, more_room, with_room
from sluice.pipelines.records.typed.tables import BLOCK_ROWS, BLOCK_SLOTS, SchemaNode, nodes_of
from sluice.pipelines.records.typed.typer import KEPT_SLOTS, PIECE_BYTES, TypedPiece, buffers_of
from sluice.pipelines.records.wire import Named, WireFormat

_BARE = 0
"""The number under which a feed without a registry has its one schema."""
MOST_SCHEMAS = 10_000
"""How many writers' schemas are kept ready. Beyond that all are forgotten and made again when they are met."""


class AvroTyper:
    """Types chunk after chunk by one schema. Not safe for two threads at once.

    `told` has, for the piece that came last, each writer's schema with the number of its records and the row of the
    first. `unknown` are, by schema, the fields that only the writer has, with their types. `named` tells what a schema
    of a number is called by its registry.
    """

    def __init__(
        self,
        reader: AvroReader,
        writers: WriterSchemas | None,
        named: Callable[[int], Named] = int,
        *,
        closed: bool = False,
    ) -> None:
        self.nodes = nodes_of(reader.columns)
        self._reader, self._writers, self._named, self._closed = reader, writers, named, closed
        self._begin()

    def _begin(self) -> None:
        """Know no schema yet."""
        self._pool, self._ops, self._places = Pool(), list[list[int]](), dict[int, int]()
        self.unknown: dict[int, Mapping[str, str]] = {}
        self.told: dict[int, tuple[int, int]] = {}
        self._tables = _tables(self.nodes)
        self._block = int(self._tables.room[0])
        self._found = Found(*(np.empty(self._block, np.int32) for _ in range(5)))
        if self._reader.wire is WireFormat.BARE:
            self._learn(_BARE, self._reader.type)

    def pieces(self, values: pa.Array, schemas: Array | None = None, skip: int = 0) -> Iterator[TypedPiece]:
        """The typed rows of a binary array without an Arrow offset. A null becomes a row of nulls.

        `schemas` are the numbers of the records' schemas, below 0 a code for which one is refused, and `skip` bytes are
        before each record. Without these the records begin as the wire format has it.
        """
        if not len(values):
            return
        data, ends, valid = buffers_of(values)
        state = self._tables.state
        state[loops.HEADER], state[loops.SKIPPED] = self._header(schemas), skip
        self._schemas = np.zeros(1, np.int64) if schemas is None else schemas
        state[loops.ROW], state[loops.LAST] = 0, len(values)
        while state[loops.ROW] < len(values):
            yield self._piece(data, ends, valid)
        if len(self._tables.spans) > KEPT_SLOTS:
            self._make_room(first_room(self.nodes, self._block))
        if len(self._places) > MOST_SCHEMAS:
            self._begin()

    def _header(self, schemas: Array | None) -> int:
        """Where the loop finds the number of a record's schema."""
        if schemas is not None:
            return loops.GIVEN
        return loops.BEFORE if self._reader.wire is WireFormat.CONFLUENT else loops.NOWHERE

    def _piece(self, data: Array, ends: Array, valid: Array) -> TypedPiece:
        state = self._tables.state
        start, last = int(state[loops.ROW]), int(state[loops.LAST])
        out = SlotPiece(self.nodes, columns_of(self.nodes, self._reader.type, last - start))
        most = PIECE_BYTES + 2 * int(ends[last] - ends[0])
        self._tables.told[:] = 0
        read, known = self._with_constants(data), len(self._pool.texts)
        while state[loops.ROW] < last and out.nbytes < most:
            if len(self._pool.texts) != known:
                read, known = self._with_constants(data), len(self._pool.texts)
            code = loops.scan(read, ends, valid, self._schemas, self._tables, self._found)
            out.take(read, self._tables, self._found, int(state[loops.OUT]), int(state[loops.BAD]))
            self._answer(code, out)
        told = self._tables.told
        self.told = {
            schema: (int(told[place, 0]), int(told[place, 1]))
            for schema, place in self._places.items()
            if told[place, 0]
        }
        return out.finished(start, int(state[loops.ROW]), ends)

    def _with_constants(self, data: Array) -> Array:
        """The chunk's bytes, with the constants of the programs behind them."""
        self._tables.state[loops.POOL] = len(data)
        if not self._pool.texts:
            return data
        return np.concatenate([data, np.frombuffer(bytes(self._pool.texts), np.uint8)])

    def _answer(self, code: int, out: SlotPiece) -> None:
        """Give the loop what it asked for: room, a schema; or refuse a record that asks for too much."""
        t, state = self._tables, self._tables.state
        if code == loops.WANT:
            self._ask(int(state[loops.NEED]))
        elif code == loops.GROW_LEVEL:
            level = int(state[loops.NEED])
            room = more_room(self.nodes, t.room, level)
            if room is not None:
                self._make_room(room)
            else:
                out.refuse(int(state[loops.ROW]), loops.MANY, holder_of(self.nodes, level))
                state[loops.ROW] += 1

    def _make_room(self, room: Array) -> None:
        self._tables = with_room(self._tables, self.nodes, room)
        self._tables.state[loops.OUT] = 0

    def _ask(self, schema: int) -> None:
        """Learn the schema of that number. Raises a SluiceError when nobody can tell it now."""
        texts = self._writers.texts(self._named(schema)) if self._writers else None
        if texts is None:
            self._know(schema, -loops.NO_SCHEMA)
            return
        try:
            self._learn(schema, parse(texts))
        except AvroSchemaError:
            self._know(schema, -loops.INCOMPATIBLE)

    def _learn(self, schema: int, writer: AvroType) -> None:
        begin = len(self._ops)
        try:
            ops, self.unknown[schema] = program(writer, self._reader.type, self.nodes, begin, self._pool)
        except Incompatible:
            self._know(schema, -loops.INCOMPATIBLE)
            return
        if self._closed and self.unknown[schema]:
            self._know(schema, -loops.NEW_FIELDS)
            return
        self._ops += ops
        table = np.zeros((len(self._ops), loops.OP_FIELDS), np.int64)
        table[:, : len(self._ops[0])] = self._ops
        self._tables = self._tables._replace(ops=table, lists=np.array([*self._pool.lists, 0], np.int64))
        self._know(schema, begin)

    def _know(self, schema: int, start: int) -> None:
        """Enter a program, or why there is none, into the hash table."""
        known = {s: int(self._tables.starts[p]) for s, p in self._places.items()} | {schema: start}
        counted = {s: self._tables.told[p].copy() for s, p in self._places.items()}
        size = 1 << (2 * len(known)).bit_length()
        ids, starts = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        told = np.zeros((size, loops.OP_FIELDS), np.int64)
        self._places = {}
        for number, begin in known.items():
            place = number * loops.SPREAD & (size - 1)
            while ids[place] >= 0:
                place = (place + 1) & (size - 1)
            ids[place], starts[place], self._places[number] = number, begin, place
            if number in counted:
                told[place] = counted[number]
        self._tables = self._tables._replace(ids=ids, starts=starts, told=told)
        # Without a header, the loop looks where it looked last.
        self._tables.state[loops.KNOWN] = self._places[schema]


def _tables(nodes: tuple[SchemaNode, ...]) -> Tables:
    table = np.zeros((len(nodes), loops.OP_FIELDS), np.int64)
    table[:, loops.LEVEL] = [n.level for n in nodes]
    levels = 1 + max(n.inner for n in nodes)
    rows = min(max(BLOCK_SLOTS // len(nodes), BLOCK_ROWS[0]), BLOCK_ROWS[1])
    room = first_room(nodes, rows)
    state = np.zeros(loops.SLOTS, np.int64)
    state[loops.MOST_OUT] = rows
    numbers = np.zeros(levels, np.int64)
    found = Tables(
        ops=np.zeros((1, loops.OP_FIELDS), np.int64),
        lists=np.zeros(1, np.int64),
        ids=np.full(2, -1, np.int64),
        starts=np.zeros(2, np.int64),
        told=np.zeros((2, loops.OP_FIELDS), np.int64),
        nodes=table,
        bases=np.zeros(len(nodes), np.int64),
        spans=np.empty(0, np.int64),
        there=np.empty(0, np.uint8),
        counts=numbers.copy(),
        room=room,
        kept=numbers.copy(),
        at=numbers.copy(),
        stack=np.zeros(loops.FRAME * (MOST_DEPTH + 2), np.int64),
        state=state,
    )
    return with_room(found, nodes, room)
