"""The base of formats whose records are read by compiled loops over binary values: Avro and Protobuf.

Records of several writers' schemas may follow one another: the loop asks for a schema when it meets one for the first
time. Promise: each record of a chunk is either typed or refused; a chunk comes in several pieces when its columns would
take much more memory than its values; the result depends on the values and the writers' schemas alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.records.columns.nodes import SchemaNode, find_holder, grow_room, make_nodes, make_room
from sluice.pipelines.records.columns.pieces import KEPT_SLOTS, PIECE_BYTES, RefusedRecords, TypedPiece
from sluice.pipelines.records.columns.reasons import Explained, Reason, Reasons
from sluice.pipelines.records.columns.typed_format import Records, TypedFormat
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.rows.row_format import Formatted
from sluice.pipelines.records.rows.value_reader import Reader, WriterSchemas
from sluice.pipelines.records.rows.wire_format import NUMBERED, Named, WireFormat
from sluice.pipelines.records.rows.writer_schema_lookup import Opened
from sluice.pipelines.records.slots import binary_loops
from sluice.pipelines.records.slots import binary_loops as pieces
from sluice.pipelines.records.slots.binary_loops import BlockResults
from sluice.pipelines.records.slots.slots import SlotPiece, with_room
from sluice.pipelines.schema.arrays import buffers_of
from sluice.pipelines.util.units import sanitize

_COMMON = {
    binary_loops.NO_SCHEMA: (Reason.UNKNOWN_SCHEMA, "the registry has no schema of this number"),
    binary_loops.INCOMPATIBLE: (Reason.INCOMPATIBLE, "what its schema writes cannot be read as the feed's"),
    binary_loops.BAD_TEXT: (Reason.INVALID_UTF8, "bytes that are not UTF-8"),
    binary_loops.MANY: (Reason.TOO_LARGE, "more elements than a record may have"),
}


def make_reasons(unread: Reason, own: Mapping[int, Explained]) -> Reasons:
    """Returns the reasons of a format: its own, and those of the steps that the loops share."""
    return Reasons(unread, {binary_loops.CUT: (unread, "it ends too early"), **_COMMON, **own})


MOST_SCHEMAS = 10_000
"""How many writers' schemas are kept ready. Beyond that all are forgotten and made again when they are met."""
MOST_CAUSE = 300
"""Characters of the cause why a schema cannot be read as the feed's."""
_NONE = np.zeros(1, np.int64)


class NewField(NamedTuple):
    """A field that the feed's schema does not have: its place, how many records have it, the row of the first, and its
    type where it can become a column."""

    path: str
    records: int
    row: int
    type: str = ""


class BinaryTyper:
    """Types chunk after chunk by one schema. Not safe for two threads at once.

    `news` are the new fields of the last piece; `causes` are the reasons, by a schema's number, for which records of it
    cannot be read. `name_of` returns the registry's name for a schema's number.
    """

    _tables: Any

    def __init__(self, reader: Reader, writers: WriterSchemas | None, name_of: Callable[[int], Named]) -> None:
        self.nodes = make_nodes(reader.columns)
        self.news: list[NewField] = []
        self.causes: dict[int, str] = {}
        self._wire, self._writers, self._named = reader.wire, writers, name_of
        self._block = int(make_room(self.nodes)[0])
        self._found = BlockResults(*(np.empty(self._block, np.int32) for _ in range(5)))

    def pieces(
        self, values: pa.Array, schemas: Array | None = None, paths: Array | None = None, skip: int = 0
    ) -> Iterator[TypedPiece]:
        """The typed rows of a binary array without an Arrow offset. A null becomes a row of nulls.

        `schemas` are the numbers of the records' schemas and `paths` their messages (where a format has such), below 0
        a code for which one is refused, and `skip` bytes are before each record. Without these the records begin as the
        wire format has it.
        """
        if not len(values):
            return
        data, ends, valid = buffers_of(values)
        state = self._tables.state
        schema_codes = pieces.BEFORE if self._wire in NUMBERED else pieces.NOWHERE
        state[pieces.HEADER], state[pieces.SKIPPED] = schema_codes if schemas is None else pieces.GIVEN, skip
        self._given = (_NONE if schemas is None else schemas, _NONE if paths is None else paths)
        state[pieces.ROW], state[pieces.LAST] = 0, len(values)
        while state[pieces.ROW] < len(values):
            yield self._piece(data, ends, valid)
        if len(self._tables.spans) > KEPT_SLOTS:
            self._make_room(make_room(self.nodes))
        self._tidy()

    def _piece(self, data: Array, ends: Array, valid: Array) -> TypedPiece:
        """The next rows of the chunk, from state[ROW] on."""
        state = self._tables.state
        start, last = int(state[pieces.ROW]), int(state[pieces.LAST])
        out = self._begun(last - start)
        limit = PIECE_BYTES + 2 * int(ends[last] - ends[0])
        self._tables.usage[:] = 0
        while state[pieces.ROW] < last and out.nbytes < limit:
            code, read = self._scan(data, ends, valid)
            out.take(read, self._tables, self._found, int(state[pieces.OUT]), int(state[pieces.BAD]))
            self._answer(code, out)
        self.news = list(self._new_fields())
        return out.finish(start, int(state[pieces.ROW]), ends)

    def _begun(self, rows: int) -> SlotPiece:
        """Returns a new piece with room for this number of rows."""
        raise NotImplementedError

    def _scan(self, data: Array, ends: Array, valid: Array) -> tuple[int, Array]:
        """Run the loop for a block. Returns its code, and the bytes that its slots point into."""
        raise NotImplementedError

    def _new_fields(self) -> Iterable[NewField]:
        """The fields of this piece that the feed's schema does not have."""
        raise NotImplementedError

    def _ask(self) -> None:
        """Learn the schema that the loop needs. Raises a SluiceError when the registry is out of reach."""
        raise NotImplementedError

    def _tidy(self) -> None:
        """Forget schemas when there are more than MOST_SCHEMAS."""
        raise NotImplementedError

    def _texts(self, schema: int) -> tuple[str, ...] | None:
        """The texts of the schema of that number; None where there is none."""
        return self._writers.texts(self._named(schema)) if self._writers else None

    def _incompatible(self, schema: int, why: ValueError) -> int:
        """The code, below 0, that refuses records of a schema, whose cause is kept."""
        self.causes[schema] = sanitize(str(why))[:MOST_CAUSE]
        return -pieces.INCOMPATIBLE

    def _answer(self, code: int, out: SlotPiece) -> None:
        """Serve the loop's request for room or a schema, or refuse a record that requests too much."""
        state = self._tables.state
        if code == pieces.WANT:
            self._ask()
        elif code == pieces.GROW_LEVEL:
            level = int(state[pieces.NEED])
            room = grow_room(self.nodes, self._tables.room, level) if level >= 0 else None
            if room is not None:
                self._make_room(room)
            elif not state[pieces.OUT]:  # else it begins the next block, without the elements of the rows before it
                out.refuse(int(state[pieces.ROW]), pieces.MANY, find_holder(self.nodes, level) if level >= 0 else -1)
                state[pieces.ROW] += 1

    def _make_room(self, room: Array) -> None:
        self._tables = with_room(self._tables, self.nodes, room)
        self._tables.state[pieces.OUT] = 0

    def _first_tables(self, slots: int) -> dict[str, Array]:
        """Returns the common tables of all loops; `slots` is the size of their state."""
        room = make_room(self.nodes)
        numbers = np.zeros(len(room), np.int64)
        state = np.zeros(slots, np.int64)
        state[pieces.MOST_OUT] = self._block
        return {
            "bases": np.zeros(len(self.nodes), np.int64),
            "spans": np.empty(0, np.int64),
            "there": np.empty(0, np.uint8),
            "counts": numbers.copy(),
            "room": room,
            "saved": numbers.copy(),
            "at": numbers.copy(),
            "state": state,
        }


class BinaryFormat(TypedFormat):
    """The base of their formats: types records by a typer, and reports drift.

    `_wrong`: the codes of values that do not fit their field, and the kind of drift.
    """

    _typer: BinaryTyper
    _unopened = (WireFormat.BARE, *NUMBERED)
    _wrong: ClassVar[Mapping[int, DriftKind]]

    def __init__(self, reader: Reader, *, dropping: bool) -> None:
        super().__init__(reader.columns, reader.wire, dropping=dropping)

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        return self._typer.pieces(opened.values, opened.schemas, opened.paths, opened.skip)

    def _format_piece(self, records: Records, piece: TypedPiece) -> Formatted:
        offsets = records.offsets
        return self._finish_piece(records, piece, self._new_fields(offsets), self._misfits(piece.refused, offsets))

    def _new_fields(self, offsets: Array) -> Iterator[Drift]:
        """Fields that the feed's schema does not have: how many records have them."""
        fields: dict[str, Drift] = {}
        for path, records, row, type_ in self._typer.news:
            new = Drift(DriftKind.NEW, path, records, int(offsets[row]), type_)
            fields[path] = fields[path] + new if path in fields else new
        yield from fields.values()

    def _misfits(self, refused: RefusedRecords, offsets: Array) -> Iterator[Drift]:
        """Fields whose values made records be refused."""
        for code, kind in self._wrong.items():
            chosen = (refused.codes == code) & (refused.nodes > 0)  # 0 is the record, which is no field
            for node in np.unique(refused.nodes[chosen]).tolist():
                at = offsets[refused.rows[chosen & (refused.nodes == node)]]
                yield Drift(kind, self._typer.nodes[node].path, len(at), int(at.min()), "")

    def _describe(self, code: int, node: SchemaNode | None, schema: int, why: str = "") -> str:
        why = self._typer.causes.get(schema, "") if code == pieces.INCOMPATIBLE else ""
        return super()._describe(code, node, schema, why)
