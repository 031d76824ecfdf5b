"""Turns the Protobuf values of a chunk into columns of the feed's message, block by block.

Records of several writers' schemas may follow one another: the loop asks for a schema when it meets one for the first
time. Promise: each record of a chunk is either typed or refused; a chunk comes in several pieces when its columns would
take much more memory than its values; the result depends on the values and the writers' schemas alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled import Array
from sluice.pipelines.records.pieces import Found
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.protobuf.columns import Documents, columns_of
from sluice.pipelines.records.protobuf.loops import Tables
from sluice.pipelines.records.protobuf.programs import Program, program
from sluice.pipelines.records.protobuf.reader import ProtobufReader
from sluice.pipelines.records.protobuf.schema import ProtoMessage, described, message_at
from sluice.pipelines.records.protobuf.writers import Incompatible, compare
from sluice.pipelines.records.reader import UnusableSchema, WriterSchemas
from sluice.pipelines.records.typed.slots import SlotPiece, first_room, holder_of, more_room, slot_faults, with_room
from sluice.pipelines.records.typed.tables import BLOCK_ROWS, BLOCK_SLOTS, SchemaNode, nodes_of
from sluice.pipelines.records.typed.typer import KEPT_SLOTS, PIECE_BYTES, TypedPiece, buffers_of
from sluice.pipelines.records.wire import Named, WireFormat

MOST_SCHEMAS = 10_000
"""How many writers' messages are kept known. Beyond that all are forgotten and asked for when they are met."""
MOST_NEWS = 256
"""How many fields that the feed's message does not have are counted in a piece, about."""
_NONE = np.zeros(1, np.int64)


class NewField(NamedTuple):
    """A field that the feed's message does not have: its place, how many records have it, the row of the first."""

    path: str
    records: int
    row: int


class ProtobufTyper:
    """Types chunk after chunk by one message. Not safe for two threads at once.

    `news` are, for the piece that came last, the fields that the feed's message does not have. `named` tells what a
    schema of a number is called by its registry. With `closed`, records with such fields are refused.
    """

    def __init__(
        self,
        reader: ProtobufReader,
        writers: WriterSchemas | None,
        named: Callable[[int], Named] = int,
        *,
        closed: bool = False,
    ) -> None:
        self.nodes = nodes_of(reader.columns)
        self._reader, self._writers, self._named = reader, writers, named
        self._program = program(reader.message, self.nodes)
        self._names: dict[tuple[str, int], str] = {}
        self._places: dict[tuple[int, int], int] = {}
        self.news: list[NewField] = []
        self._tables = _tables(self.nodes, self._program, reader)
        self._tables.state[loops.CLOSED] = closed
        self._block = int(self._tables.room[0])
        self._found = Found(*(np.empty(self._block, np.int32) for _ in range(5)))

    def pieces(
        self, values: pa.Array, schemas: Array | None = None, paths: Array | None = None, skip: int = 0
    ) -> Iterator[TypedPiece]:
        """The typed rows of a binary array without an Arrow offset. A null becomes a row of nulls.

        `schemas` are the numbers of the records' schemas and `paths` their messages, below 0 a code for which one is
        refused, and `skip` bytes are before each record. Without these the records begin as the wire format has it.
        """
        if not len(values):
            return
        data, ends, valid = buffers_of(values)
        state = self._tables.state
        given = loops.BEFORE if self._reader.wire is WireFormat.CONFLUENT else loops.NOWHERE
        state[loops.HEADER], state[loops.SKIPPED] = given if schemas is None else loops.GIVEN, skip
        self._given = (_NONE if schemas is None else schemas, _NONE if paths is None else paths)
        state[loops.ROW], state[loops.LAST] = 0, len(values)
        while state[loops.ROW] < len(values):
            yield self._piece(data, ends, valid)
        if len(self._tables.spans) > KEPT_SLOTS:
            self._make_room(first_room(self.nodes, self._block))
        if len(self._places) > MOST_SCHEMAS:
            self._forget()

    def _piece(self, data: Array, ends: Array, valid: Array) -> TypedPiece:
        state = self._tables.state
        start, last = int(state[loops.ROW]), int(state[loops.LAST])
        out = _Piece(self.nodes, columns_of(self.nodes, self._program.of, last - start))
        most = PIECE_BYTES + 2 * int(ends[last] - ends[0])
        self._tables.told[:] = 0
        self._tables.news[:] = 0
        while state[loops.ROW] < last and out.nbytes < most:
            code = loops.scan(data, ends, valid, *self._given, self._tables, self._found)
            out.add_block(data, self._tables, self._found)
            self._answer(code, out)
        self.news = list(self._new_fields())
        return out.finished(start, int(state[loops.ROW]), ends)

    def _new_fields(self) -> Iterator[NewField]:
        """The fields that the loop noted, by the names that writers give them, else by their numbers."""
        for message, number, records, row, _ in self._tables.news[self._tables.news[:, 2] > 0].tolist():
            of, place = self._program.named[message]
            name = self._names.get((of, number), f"#{number}")
            yield NewField(f"{place}.{name}" if place else name, records, row)

    def _answer(self, code: int, out: _Piece) -> None:
        """Give the loop what it asked for: room, a schema; or refuse a record that asks for too much."""
        state = self._tables.state
        if code == loops.WANT:
            schema, path = int(state[loops.NEED]), int(state[loops.PATH])
            self._know(schema, path, self._asked(schema, path))
        elif code == loops.GROW_LEVEL:
            level = int(state[loops.NEED])
            room = more_room(self.nodes, self._tables.room, level) if level >= 0 else None
            if room is not None:
                self._make_room(room)
            elif level >= 0 or not state[loops.OUT]:
                out.refuse(int(state[loops.ROW]), loops.MANY, holder_of(self.nodes, level) if level >= 0 else -1)
                state[loops.ROW] += 1

    def _make_room(self, room: Array) -> None:
        self._tables = with_room(self._tables, self.nodes, room)
        self._tables.state[loops.OUT] = 0

    def _asked(self, schema: int, path: int) -> int:
        """0 when records of this message of a schema can be read, else the code for which they are refused, below 0.

        Raises a SluiceError when nobody can tell now.
        """
        texts = self._writers.texts(self._named(schema)) if self._writers else None
        if texts is None:
            return -loops.NO_SCHEMA
        try:
            file, _ = described(texts[-1])
            own = self._reader.message
            found = message_at(file, _indexes(path)) if path else _of_name(file, own.name)
            if found is None or found.full_name != own.name:
                return -(loops.NO_MESSAGE if found is None else loops.OTHER_MESSAGE)
            compare(found, own, self._learn)
        except (UnusableSchema, Incompatible):
            return -loops.INCOMPATIBLE
        return 0

    def _learn(self, message: ProtoMessage, number: int, name: str) -> None:
        self._names.setdefault((message.name, number), name)

    def _know(self, schema: int, path: int, start: int) -> None:
        """Enter what is known of a schema's message into the hash table."""
        t = self._tables
        known = {s: int(t.starts[p]) for s, p in self._places.items()} | {(schema, path): start}
        size = 1 << (2 * len(known)).bit_length()
        ids, paths, starts = np.full(size, -1, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._places = {}
        for (number, of), begin in known.items():
            place = (number + of) * loops.SPREAD & (size - 1)
            while ids[place] >= 0:
                place = (place + 1) & (size - 1)
            ids[place], paths[place], starts[place] = number, of, begin
            self._places[number, of] = place
        told = np.zeros((size, 2), np.int64)
        self._tables = t._replace(ids=ids, paths=paths, starts=starts, told=told)
        self._tables.state[loops.KNOWN] = self._places[schema, path]

    def _forget(self) -> None:
        self._places = {}
        self._names = {}
        self._tables = self._tables._replace(**_nobody())
        self._tables.state[loops.KNOWN] = 0


def _indexes(path: int) -> tuple[int, ...]:
    """The indexes that a path is made of."""
    found: list[int] = []
    while path:
        path, index = divmod(path, loops.INDEX)
        found.append(index - 1)
    return tuple(reversed(found))


def _of_name(file: Any, name: str) -> Any:
    """The descriptor of that full name in a file; None where there is none."""
    queue = list(file.message_types_by_name.values())
    for d in queue:
        if d.full_name == name:
            return d
        queue += d.nested_types
    return None


class _Piece(SlotPiece):
    """Builds one piece of Protobuf records, block by block."""

    def add_block(self, data: Array, t: Tables, found: Found) -> None:
        """Append the block that the tables hold, with defaults for what was not written."""
        out = int(t.state[loops.OUT])
        if out:
            bad_item, bad_node = np.empty(4 * len(found.source), np.int64), np.empty(4 * len(found.source), np.int32)
            n = loops.settle(t, out, bad_item, bad_node)
            for node in np.unique(bad_node[:n]).tolist():
                items = bad_item[:n][bad_node[:n] == node] + self._columns[node].items
                self._note(self._nodes[node], slot_faults(items, np.full(len(items), loops.MISSING)))
            self._chain(t)
        self.take(data, t, found, out, int(t.state[loops.BAD]))

    def _chain(self, t: Tables) -> None:
        """Tell columns of documents which of theirs have more parts."""
        for node, column in zip(self._nodes, self._columns, strict=True):
            if isinstance(column, Documents):
                base, more = int(t.bases[node.index]), dict[int, list[int]]()
                stop = base + int(t.room[node.level])
                for slot, span in t.chain[: int(t.state[loops.CHAINED]), :2].tolist():
                    if base <= slot < stop:
                        more.setdefault(slot - base, []).append(span)
                column.more = more

    def check_maps(self, before: object) -> None:
        """A key that is there twice is no fault: the column keeps the last."""


def _nobody() -> dict[str, Array]:
    """The hash table that knows no schema. Where no record names one, its first place counts."""
    return {
        "ids": np.full(2, -1, np.int64),
        "paths": np.zeros(2, np.int64),
        "starts": np.zeros(2, np.int64),
        "told": np.zeros((2, 2), np.int64),
    }


_HOW = {
    WireFormat.CONFLUENT: loops.INDEXES,
    WireFormat.CONFLUENT_HEADERS: loops.PATHS,
    WireFormat.APICURIO: loops.NAME,
    WireFormat.GLUE: loops.INDEXES,
    WireFormat.BARE: loops.UNNAMED,
}


def _tables(nodes: tuple[SchemaNode, ...], made: Program, reader: ProtobufReader) -> Tables:
    rows = min(max(BLOCK_SLOTS // len(nodes), BLOCK_ROWS[0]), BLOCK_ROWS[1])
    room = first_room(nodes, rows)
    state = np.zeros(loops.SLOTS, np.int64)
    state[loops.MOST_OUT], state[loops.NAMED] = rows, _HOW[reader.wire]
    numbers = np.zeros(len(room), np.int64)
    found = Tables(
        **made.tables(nodes),
        **_nobody(),
        name=np.frombuffer(_reference(reader.message.name), np.uint8),
        news=np.zeros((MOST_NEWS, 5), np.int64),
        chain=np.zeros((loops.MOST_CHAIN, 2), np.int64),
        bases=np.zeros(len(nodes), np.int64),
        spans=np.empty(0, np.int64),
        there=np.empty(0, np.uint8),
        counts=numbers.copy(),
        room=room,
        kept=numbers.copy(),
        at=numbers.copy(),
        begins=numbers.copy(),
        stack=np.zeros((loops.FRAME + 1) * (loops.MOST_DEPTH + 2), np.int64),
        state=state,
    )
    return with_room(found, nodes, room)


def _reference(name: str) -> bytes:
    """What Apicurio's serializer writes before a record: a message whose first field is the message's own name."""
    own = name.rpartition(".")[2].encode()
    inside = b"\x0a" + _varint(len(own)) + own
    return _varint(len(inside)) + inside


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
