"""Turns the JSON values of a chunk into columns of the schema, block by block.

`scan` notes the spans of values, and `fill` turns spans into buffers. A block is small, so that its bytes and
spans stay in the processor's caches in between.

`Fallback` reads records again that do not fit a field which came from other records (`on_drift: evolve`). Such a field
has the type of its first values, not a declared one. The record is read without the field, so the value stays in
`_extra`. A record that does not fit the feed's own fields stays refused.

Promises: each record is either typed or refused, and the result depends on the record alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.records.columns.builders import ColumnBuilder, Faults, allocate, grow
from sluice.pipelines.records.columns.nodes import SchemaNode, find_holder, grow_room, make_nodes, make_room
from sluice.pipelines.records.columns.pieces import KEPT_SLOTS, PIECE_BYTES, PieceBuilder, RefusedRecords, TypedPiece
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json import scan
from sluice.pipelines.records.json.columns import make_column
from sluice.pipelines.records.json.scan import ScanResults
from sluice.pipelines.records.json.scan_tables import make_tables, with_room
from sluice.pipelines.records.json.unknown import copy_members, no_frames
from sluice.pipelines.schema.arrays import boolean_array, find_spans, indices
from sluice.pipelines.schema.schema import Field, Schema, Type, arrow_type, join_path


class Typer:
    """Types chunk after chunk by one schema. Not safe for two threads at once."""

    def __init__(self, schema: Schema) -> None:
        self.nodes = make_nodes(schema)
        self._tables = make_tables(self.nodes)
        self._block = int(self._tables.room[0])
        self._found = _make_results(self._block, 1 << 16)

    @property
    def tables(self) -> scan.ScanTables:
        """The schema as arrays. Those of its room are replaced when a record needs more."""
        return self._tables

    def pieces(self, values: pa.Array) -> Iterator[TypedPiece]:
        """The typed rows of values, as `find_spans` takes them. A null becomes a row of nulls."""
        if not len(values):
            return
        source = JsonValues(*find_spans(values))
        state = self._tables.state
        state[scan.ROW], state[scan.LAST], state[scan.BITMAP_AT] = 0, len(values), 0
        while state[scan.ROW] < len(values):
            yield self._piece(source)
        if len(self._tables.spans) > KEPT_SLOTS:
            self._tables = with_room(self._tables, make_room(self.nodes))
        if len(self._found.extra) > KEPT_SLOTS:
            self._found = _make_results(self._block, 1 << 16)

    def _piece(self, values: JsonValues) -> TypedPiece:
        state = self._tables.state
        start, last = int(state[scan.ROW]), int(state[scan.LAST])
        columns = [make_column(n, last - start if n.level == 0 else 0) for n in self.nodes]
        out = JsonPiece(self.nodes, columns)
        limit = PIECE_BYTES + 2 * int((values.stops - values.starts).sum(dtype=np.int64))
        state[scan.EXTRA] = 0
        while state[scan.ROW] < last and out.nbytes < limit:
            code = scan.scan(*values, self._tables, self._found)
            out.take(values, self._tables, self._found)
            self._make_room(code, out)
        piece = out.finish(start, int(state[scan.ROW]), values.starts)
        if state[scan.EXTRA]:
            self._found = self._found._replace(extra=allocate(1 << 16, np.uint8))
        return piece

    def _make_room(self, code: int, out: JsonPiece) -> None:
        """Make the room that the loop asked for, or refuse a record that asks for too much."""
        t, state = self._tables, self._tables.state
        if code == scan.GROW_EXTRA:
            used = int(state[scan.EXTRA])
            self._found = self._found._replace(extra=grow(self._found.extra, used, used + int(state[scan.NEED])))
        elif code == scan.GROW_LEVEL:
            level = int(state[scan.NEED])
            room = grow_room(self.nodes, t.room, level)
            if room is None:
                out.refuse(int(state[scan.ROW]), scan.TOO_LARGE, find_holder(self.nodes, level))
                state[scan.ROW] += 1
            else:
                self._tables = with_room(t, room)


def _make_results(rows: int, extra: int) -> ScanResults:
    return ScanResults(
        np.empty(rows, np.int32), allocate(extra, np.uint8), *(np.empty(rows, np.int32) for _ in range(6))
    )


class JsonValues(NamedTuple):
    """Bytes of records, the start and the stop of each value, and the validity bitmap (empty: all are valid)."""

    data: Array
    starts: Array
    stops: Array
    valid: Array


def copy_unknown(values: JsonValues, rows: Array, slots: Array, t: scan.ScanTables) -> pa.Array:
    """Returns the members of these records without a field, as JSON. `slots` are theirs in the block of the tables."""
    room = int((values.stops[rows] - values.starts[rows]).sum(dtype=np.int64)) + 32
    out, text_ends = allocate(room, np.uint8), np.zeros(len(rows) + 1, np.int32)
    spans = values.data, values.starts, values.stops
    copy_members(*spans, rows, slots.astype(np.int32), t, no_frames(), out, text_ends)
    return pa.Array.from_buffers(pa.string(), len(rows), [None, pa.py_buffer(text_ends), pa.py_buffer(out)])


class JsonPiece(PieceBuilder):
    """Builds one piece of JSON records, block by block."""

    def __init__(self, nodes: tuple[SchemaNode, ...], columns: Sequence[ColumnBuilder]) -> None:
        super().__init__(nodes, columns)
        self._ends = [np.zeros(1, np.int32)]
        self._extra = np.empty(0, np.uint8)
        self._unnamed: list[tuple[Array, pa.Array]] = []

    def take(self, values: JsonValues, t: scan.ScanTables, results: ScanResults) -> None:
        """Append the block that the tables hold."""

        def append(node: SchemaNode, column: ColumnBuilder, n: int) -> Faults:
            base = int(t.nodes[node.index, scan.BASE])
            return column.append(values.data, t.spans[base : base + n])

        out = int(t.state[scan.OUT])
        self._ends.append(results.extra_ends[:out].copy())
        self._extra = results.extra
        refused = results.bad_row, results.bad_code, results.bad_node, results.bad_at
        self.add(results.source[:out], [a[: t.state[scan.BAD]] for a in refused], t.counts, append)
        if t.state[scan.INSIDES]:
            rows = results.inside[: t.state[scan.INSIDES]].copy()
            slots = np.searchsorted(results.source[:out], rows)
            self._unnamed.append((rows, copy_unknown(values, rows, slots, t)))

    def _make_extra(self, rows: Array) -> pa.Array:
        """The column `_extra` of these rows: members of the records themselves, or what `copy_members` made."""
        ends = np.concatenate(self._ends)
        # An object of unknown members is never empty.
        valid = np.packbits(ends[1:] > ends[:-1], bitorder="little")
        buffers = [pa.py_buffer(valid), pa.py_buffer(ends), pa.py_buffer(self._extra[: ends[-1]])]
        members = pa.Array.from_buffers(pa.string(), len(rows), buffers)
        if not self._unnamed:
            return members
        inside = np.isin(rows, np.concatenate([rows_of_part for rows_of_part, _ in self._unnamed]))
        if inside.all():
            return pa.concat_arrays([texts for _, texts in self._unnamed])
        return pc.replace_with_mask(
            members, boolean_array(inside), pa.concat_arrays([texts for _, texts in self._unnamed])
        )


_MOST = 4
"""Fields that a record is read without, one by one; one that does not fit more of them is read without any."""

MOST_TYPERS = 64
"""Typers without some fields that are kept, the last used ones. Each takes some 400 KB."""
MOST_ARRAYS = 256
"""Small arrays of one column that are kept apart."""
_Paths = frozenset[str]


class Fallback:
    """Reads records of pieces again that were refused for fields that `base` does not have. `nodes` are all fields."""

    def __init__(self, schema: Schema, nodes: Sequence[SchemaNode], base: Schema) -> None:
        self._schema, self._nodes = schema, nodes
        self._numbers = {n.path: n.index for n in nodes}
        self._added = frozenset(self._numbers) - {path for path, _ in _walk(base.fields)} - {""}
        self._is_added = np.array([n.path in self._added for n in nodes])
        self._typers: dict[_Paths, tuple[Schema, Typer]] = {}

    def read(self, piece: TypedPiece, values: pa.Array) -> tuple[TypedPiece, RefusedRecords]:
        """Add the records to the piece that fit without added fields. Returns it, and all that did not fit with them.

        `values` are the chunk's.
        """
        refused = piece.refused
        mine = (refused.nodes >= 0) & self._is_added[refused.nodes]
        if not mine.any():
            return piece, refused
        again = _Again([_select_refused(refused, ~mine)], [refused])
        todo = self._group_rows(frozenset(), refused.rows[mine], refused.nodes[mine])
        while todo:
            paths, rows = todo.popitem()
            for without, more in self._read(paths, rows, values, again):
                todo[without] = np.sort(np.concatenate([todo.get(without, more[:0]), more]))
        return self._merge_piece(piece, again), _concat_refused(again.faults)

    def _group_rows(self, paths: _Paths, rows: Array, nodes: Array) -> dict[_Paths, Array]:
        """The records by the fields that they are to be read without."""
        groups: dict[_Paths, Array] = {}
        for node in np.unique(nodes).tolist():
            without = paths | {self._nodes[node].path}
            key = without if len(without) <= _MOST else self._added
            groups[key] = np.sort(np.concatenate([groups.get(key, rows[:0]), rows[nodes == node]]))
        return groups

    def _read(self, paths: _Paths, rows: Array, values: pa.Array, again: _Again) -> Iterator[tuple[_Paths, Array]]:
        """Read these records without the fields of these paths. Yields those that are to be read without more."""
        # The typers of the paths that were read last stay.
        entry = self._typers.pop(paths, None)
        if entry is None:
            schema = Schema(tuple(_without(self._schema.fields, paths)))
            entry = schema, Typer(schema)
        self._typers[paths] = entry
        if len(self._typers) > MOST_TYPERS:
            del self._typers[next(iter(self._typers))]
        schema, typer = entry
        for piece in typer.pieces(values.take(indices(rows))):
            again.add(rows[piece.rows], self._as_columns(schema, piece.arrays))
            numbers = [self._numbers[n.path] for n in typer.nodes]
            nodes = np.where(piece.refused.nodes >= 0, np.array(numbers)[piece.refused.nodes], -1)
            mine = (nodes >= 0) & self._is_added[nodes]
            there = RefusedRecords(rows[piece.refused.rows], piece.refused.codes, nodes, piece.refused.positions)
            again.refused.append(_select_refused(there, ~mine))
            again.faults.append(there)
            yield from self._group_rows(paths, there.rows[mine], nodes[mine]).items()

    def _as_columns(self, schema: Schema, arrays: Sequence[pa.Array]) -> list[pa.Array]:
        """The columns of the whole schema: null where these have none."""
        there = dict(zip((f.name for f in schema.fields), arrays, strict=False))
        rows = len(arrays[-1])
        columns = [
            there[f.name].cast(arrow_type(f.type)) if f.name in there else pa.nulls(rows, arrow_type(f.type))
            for f in self._schema.fields
        ]
        return [*columns, arrays[-1]]

    def _merge_piece(self, piece: TypedPiece, again: _Again) -> TypedPiece:
        rows = np.concatenate([piece.rows, *again.rows])
        order = np.argsort(rows, kind="stable")
        columns = zip(piece.arrays, *again.arrays, strict=True)
        arrays = tuple(pa.concat_arrays(column).take(indices(order.astype(np.int32))) for column in columns)
        refused = _concat_refused(again.refused)
        return TypedPiece(
            piece.start, piece.stop, arrays, rows[order], _select_refused(refused, np.argsort(refused.rows))
        )


@dataclass(slots=True)
class _Again:
    """Records that stay refused, all that did not fit, and rows that were made of records in the end."""

    refused: list[RefusedRecords]
    faults: list[RefusedRecords]
    rows: list[Array] = field(default_factory=list)
    arrays: list[list[pa.Array]] = field(default_factory=list)

    def add(self, rows: Array, arrays: list[pa.Array]) -> None:
        """Add rows. Many small arrays are joined: each takes far more room than its items."""
        self.rows.append(rows)
        self.arrays.append(arrays)
        if len(self.rows) >= MOST_ARRAYS:
            self.rows[:] = [np.concatenate(self.rows)]
            self.arrays[:] = [[pa.concat_arrays(column) for column in zip(*self.arrays, strict=True)]]


def _split_columns(refused: RefusedRecords) -> tuple[Array, ...]:
    return refused.rows, refused.codes, refused.nodes, refused.positions


def _select_refused(refused: RefusedRecords, chosen: Array) -> RefusedRecords:
    return RefusedRecords(*(c[chosen] for c in _split_columns(refused)))


def _concat_refused(refused: Sequence[RefusedRecords]) -> RefusedRecords:
    return RefusedRecords(
        *(np.concatenate(c).astype(np.int32) for c in zip(*map(_split_columns, refused), strict=True))
    )


def _walk(fields: Sequence[Field], parent: Type | None = None, path: str = "") -> Iterator[tuple[str, Field]]:
    """All fields with their paths, as `SchemaNode` has them."""
    for f in fields:
        here = join_path(path, parent.kind, f) if parent else f.name
        yield here, f
        yield from _walk(f.type.fields, f.type, here)


def _without(fields: Sequence[Field], paths: _Paths, parent: Type | None = None, path: str = "") -> Iterator[Field]:
    for f in fields:
        here = join_path(path, parent.kind, f) if parent else f.name
        if here not in paths:
            inside = tuple(_without(f.type.fields, paths, f.type, here))
            yield replace(f, type=replace(f.type, fields=inside))
