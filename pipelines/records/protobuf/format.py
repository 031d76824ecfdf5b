"""The format of Protobuf feeds: values by any writer's schema become rows of the feed's own message.

Landed rows have the columns of the feed's message, `_extra` (always empty in Protobuf: fields that the message does not
have are skipped, and counted as drift), and the record's coordinates. docs/formats.md specifies the result for every
value and the reasons in quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.columns.builders import Faults, make_faults
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.pieces import TypedPiece
from sluice.pipelines.records.columns.reasons import Reason
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.protobuf.columns import Documents, Maps, find_last, make_columns
from sluice.pipelines.records.protobuf.loops import ProtobufTables
from sluice.pipelines.records.protobuf.programs import IncompatibleMessage, compare, compile_program
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader
from sluice.pipelines.records.protobuf.schema import (
    ProtoMessage,
    find_message,
    find_numbered_message,
    list_messages,
    parse_descriptor,
)
from sluice.pipelines.records.rows.value_reader import UnusableSchema, WriterSchemas
from sluice.pipelines.records.rows.wire_format import IN_HEADERS, NO_HEADER, Named, WireFormat, reference
from sluice.pipelines.records.rows.writer_schema_lookup import Opened
from sluice.pipelines.records.slots import binary_loops
from sluice.pipelines.records.slots.binary import MOST_SCHEMAS, BinaryFormat, BinaryTyper, NewField, make_reasons
from sluice.pipelines.records.slots.slots import SlotPiece, with_room
from sluice.pipelines.schema.arrays import as_mask

REASONS = make_reasons(
    Reason.NOT_PROTOBUF,
    {
        loops.OTHER_MESSAGE: (Reason.INCOMPATIBLE, "it is of another message than the feed's"),
        loops.NO_MESSAGE: (Reason.NOT_PROTOBUF, "it names a message that its schema does not have"),
        loops.LONG_VARINT: (Reason.NOT_PROTOBUF, "a number of too many bytes"),
        loops.NO_FIELD: (Reason.NOT_PROTOBUF, "a field's number that no field can have"),
        loops.NO_WIRE: (Reason.NOT_PROTOBUF, "a wire type that there is not"),
        loops.NO_GROUP: (Reason.NOT_PROTOBUF, "the end of a group that has not begun"),
        loops.DEEP: (Reason.TOO_DEEP, f"more than {loops.MOST_DEPTH} messages and groups inside one another"),
        loops.NEW_FIELD: (Reason.UNKNOWN_FIELD, "it has a field that the feed's message does not have"),
        loops.OTHER_SYMBOL: (Reason.WRONG_TYPE, "a number that the enum of the feed's schema does not have"),
        loops.MISSING: (Reason.MISSING, "is missing, and is required"),
        loops.NO_DOCUMENT: (Reason.MALFORMED, "holds what JSON cannot say"),
    },
)


MOST_NEWS = 256
"""How many fields that the feed's message does not have are counted in a piece, about."""


class ProtobufTyper(BinaryTyper):
    """Types Protobuf records by one message. With `closed`, records with fields that it does not have are refused."""

    _tables: ProtobufTables

    def __init__(
        self,
        reader: ProtobufReader,
        writers: WriterSchemas | None,
        name_of: Callable[[int], Named] = int,
        *,
        closed: bool = False,
    ) -> None:
        super().__init__(reader, writers, name_of)
        self._reader = reader
        self._program = compile_program(reader.message, self.nodes)
        self._names: dict[tuple[str, int], str] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._tables = self._empty_tables(closed)

    def _begun(self, rows: int) -> SlotPiece:
        self._tables.news[:] = 0
        return _Piece(self.nodes, make_columns(self.nodes, self._program.of, rows))

    def _scan(self, data: Array, ends: Array, valid: Array) -> tuple[int, Array]:
        return loops.scan(data, ends, valid, *self._given, self._tables, self._found), data

    def _new_fields(self) -> Iterator[NewField]:
        """The fields that the loop noted, by the names that writers give them, else by their numbers."""
        for message, number, records, row, _ in self._tables.news[self._tables.news[:, 2] > 0].tolist():
            of, path = self._program.names[message]
            name = self._names.get((of, number), f"#{number}")
            yield NewField(f"{path}.{name}" if path else name, records, row)

    def _ask(self) -> None:
        state = self._tables.state
        schema, path = int(state[binary_loops.NEED]), int(state[loops.PATH])
        self._enter_message(schema, path, self._check_writer(schema, path))

    def _check_writer(self, schema: int, path: int) -> int:
        """Returns 0 if records of this message can be read, else the negative code that refuses them.

        Raises a SluiceError when the registry is out of reach.
        """
        try:
            texts = self._texts(schema)
            if texts is None:
                return -binary_loops.NO_SCHEMA
            file, _ = parse_descriptor(texts[-1])
            own = self._reader.message
            if self._wire is WireFormat.GLUE:
                message = find_numbered_message(file, path - 1)
            else:
                message = (
                    find_message(file, list_indexes(path))
                    if path
                    else next((d for d in list_messages(file) if d.full_name == own.name), None)
                )
            if message is None or message.full_name != own.name:
                return -(loops.NO_MESSAGE if message is None else loops.OTHER_MESSAGE)
            compare(message, own, self._learn)
        except (UnusableSchema, IncompatibleMessage) as error:
            return self._incompatible(schema, error)
        return 0

    def _learn(self, message: ProtoMessage, number: int, name: str) -> None:
        self._names.setdefault((message.name, number), name)

    def _enter_message(self, schema: int, path: int, start: int) -> None:
        """Enter the facts about a schema's message into the hash table."""
        t = self._tables
        verdicts = {s: int(t.starts[p]) for s, p in self._places.items()} | {(schema, path): start}
        size = 1 << (2 * len(verdicts)).bit_length()
        ids, paths, starts = np.full(size, -1, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._places = {}
        for (number, of), begin in verdicts.items():
            slot = (number + of) * binary_loops.SPREAD & (size - 1)
            while ids[slot] >= 0:
                slot = (slot + 1) & (size - 1)
            ids[slot], paths[slot], starts[slot] = number, of, begin
            self._places[number, of] = slot
        usage = np.zeros((size, 2), np.int64)
        self._tables = t._replace(ids=ids, paths=paths, starts=starts, usage=usage)
        self._tables.state[binary_loops.KNOWN] = self._places[schema, path]

    def _tidy(self) -> None:
        if len(self._places) <= MOST_SCHEMAS:
            return
        self._places = {}
        self._names = {}
        self.causes.clear()
        self._tables = self._tables._replace(**_empty_ids())
        self._tables.state[binary_loops.KNOWN] = 0

    def _empty_tables(self, closed: bool) -> ProtobufTables:
        tables = ProtobufTables(
            **self._program.tables(self.nodes),
            **_empty_ids(),
            name=np.frombuffer(reference(self._reader.message.name), np.uint8),
            news=np.zeros((MOST_NEWS, 5), np.int64),
            chain=np.zeros((2 * loops.MOST_CHAIN, 2), np.int64),
            begins=np.zeros(1 + max(n.inner for n in self.nodes), np.int64),
            stack=np.zeros((loops.FRAME + 1) * (loops.MOST_DEPTH + 2), np.int64),
            **self._first_tables(loops.SLOTS),
        )
        tables.state[loops.NAMED], tables.state[loops.CLOSED] = _HOW[self._wire], closed
        return with_room(tables, self.nodes, tables.room)


def list_indexes(path: int) -> tuple[int, ...]:
    """The indexes that a path is made of."""
    indexes: list[int] = []
    while path:
        path, index = divmod(path, loops.INDEX)
        indexes.append(index - 1)
    return tuple(reversed(indexes))


class _Piece(SlotPiece):
    """Builds one piece of Protobuf records, block by block."""

    def take(self, data: Array, t: Any, results: Any, out: int, bad: int) -> None:
        """Append the block in the tables, with defaults for fields that were not written."""
        if out:
            n = room = 2 * len(results.source)
            while n == room:  # there may be more: a record's lists may have many elements
                room *= 2
                bad_item, bad_node = np.empty(room, np.int64), np.empty(room, np.int32)
                n = loops.settle(t, out, bad_item, bad_node)
            for node in np.unique(bad_node[:n]).tolist():
                items = bad_item[:n][bad_node[:n] == node] + self._columns[node].items
                self._note(self._nodes[node], make_faults(items, loops.MISSING))
            self._chain(t)
        super().take(data, t, results, out, bad)

    def _chain(self, t: ProtobufTables) -> None:
        """Tell columns of documents which of theirs have more parts."""
        for node, column in zip(self._nodes, self._columns, strict=True):
            if isinstance(column, Documents):
                base, more = int(t.bases[node.index]), dict[int, list[int]]()
                stop = base + int(t.room[node.level])
                for slot, span in t.chain[: int(t.state[loops.CHAINED]), :2].tolist():
                    if base <= slot < stop and span:
                        more.setdefault(slot - base, []).append(span)
                    else:  # another column's, or the end of parts that were taken back
                        more.pop(slot - base, None)
                column.more = more

    def check_maps(self, before: object) -> None:
        """A key that is there twice is no fault: the column keeps the last."""

    def finish(self, start: int, stop: int, ends: Array) -> TypedPiece:
        """Return the finished piece. A map entry that a later one replaces is not at fault."""
        counting = [(node, self._counting(node, faults)) for node, faults in self._faults]
        self._faults = [(node, faults) for node, faults in counting if len(faults.items)]
        return super().finish(start, stop, ends)

    def _counting(self, node: SchemaNode, faults: Faults) -> Faults:
        """The faults outside of entries that do not count."""
        level, items, counts = node.level, faults.items, np.ones(len(faults.items), np.bool_)
        while level:
            holder = self.get_holder(level)
            ends = holder.ends[: holder.items + 1]
            if isinstance(holder, Maps):
                last = find_last(ends, self._columns[holder.node.children[0]].array(self._columns))
                counts &= np.isin(items, last) if last is not None else True
            level, items = holder.node.level, np.searchsorted(ends[1:], items, side="right")
        return Faults(faults.items[counts], faults.codes[counts], faults.starts[counts])


def _empty_ids() -> dict[str, Array]:
    """The hash table that knows no schema. Where no record names one, its first place counts."""
    return {
        "ids": np.full(2, -1, np.int64),
        "paths": np.zeros(2, np.int64),
        "starts": np.zeros(2, np.int64),
        "usage": np.zeros((2, 2), np.int64),
    }


_HOW = {
    WireFormat.CONFLUENT: loops.INDEXES,
    WireFormat.CONFLUENT_HEADERS: loops.PATHS,
    WireFormat.APICURIO: loops.NAME,
    WireFormat.APICURIO3: loops.NAME,
    WireFormat.APICURIO_HEADERS: loops.PATHS,
    WireFormat.GLUE: loops.NUMBER,
    WireFormat.BARE: loops.UNNAMED,
}


class ProtobufFormat(BinaryFormat):
    """Types Protobuf records by a reader. `writers` tells the schemas that they were written by.

    With `closed`, records with fields that the reader's message does not have are quarantined.
    """

    _reasons = REASONS
    _wrong: ClassVar = {
        loops.OTHER_SYMBOL: DriftKind.UNLISTED,
        loops.NO_DOCUMENT: DriftKind.MALFORMED,
    }

    def __init__(
        self, reader: ProtobufReader, writers: WriterSchemas | None, *, dropping: bool = False, closed: bool = False
    ) -> None:
        super().__init__(reader, dropping=dropping)
        self._message = reader.message.name
        self._typer = ProtobufTyper(reader, writers, self._opener.name, closed=closed)

    def _open_records(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        opened = super()._open_records(chunk)
        if self._wire not in IN_HEADERS:
            return opened
        paths = self._find_paths if self._wire is WireFormat.CONFLUENT_HEADERS else self._own_or_other
        return ((records, replace(o, paths=paths(records))) for records, o in opened)

    def _find_paths(self, records: pa.RecordBatch) -> Array:
        kinds, which = self._opener.behind(records)
        return np.array([parse_path(kind) for kind in kinds], np.int64)[which]

    def _own_or_other(self, records: pa.RecordBatch) -> Array:
        """0 for records whose header names the reader's message. Those that name it before the message, too, as
        Apicurio's serializers do since 3, are refused: read as fields, the name would be wrong values."""
        own = self._message.rpartition(".")[2].encode()
        kinds, which = self._opener.messages(records)
        codes = [-NO_HEADER if not kind else 0 if kind == own else -loops.OTHER_MESSAGE for kind in kinds]
        values = records.column(records.schema.get_field_index("value"))
        twice = as_mask(pc.starts_with(values, reference(self._message)))
        paths: Array = np.where(twice, -NO_HEADER, np.array(codes, np.int64)[which])
        return paths


def parse_path(indexes: bytes) -> int:
    """The message behind the indexes in a header, as one number; below 0 the code that refuses records."""
    numbers, number, shift = list[int](), 0, 0
    for byte in indexes:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number >> 1 ^ -(number & 1))
            number = shift = 0
    if shift or (numbers and numbers[0] != len(numbers) - 1):
        return -NO_HEADER
    path = 0
    for index in numbers[1:]:
        if len(numbers) > loops.MOST_INDEXES + 1 or not 0 <= index < loops.INDEX - 1:
            return -loops.NO_MESSAGE
        path = path * loops.INDEX + index + 1
    return path or 1
