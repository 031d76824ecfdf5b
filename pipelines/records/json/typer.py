"""Turns the JSON values of a chunk into columns of the schema, block by block.

`scan` notes the spans of values, and `fill` turns spans into buffers. A block is small, so that its bytes and
spans stay in the processor's caches in between. A chunk comes in several pieces when its columns would take much more
memory than its values.

`Fallback` reads records again that do not fit a field which came from other records (`on_drift: evolve`). Such a field
has the type of its first values, not a declared one. The record is read without the field, so the value stays in
`_make_extra`. A record that does not fit the feed's own fields stays refused.

Promises: each record is either typed or refused, and the result depends on the record alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.json import scan
from sluice.pipelines.records.json.columns import ColumnBuilder, Faults, Lists, Texts, allocate, grow, make_column
from sluice.pipelines.records.json.scan import ScanResults
from sluice.pipelines.records.json.scan_tables import (
    SchemaNode,
    count_elements,
    find_holder,
    make_nodes,
    make_tables,
    with_room,
)
from sluice.pipelines.records.json.unknown import copy_members, no_frames
from sluice.pipelines.schema.arrays import boolean_array, buffers_of, indices
from sluice.pipelines.schema.schema import Field, Kind, Schema, Type, arrow_type, path_below

PIECE_BYTES = 8 << 20
"""Bytes that a piece may take, besides twice the bytes of its chunk."""
KEPT_SLOTS = 1 << 20
"""How many spans are kept from one chunk to the next. Room that a huge record took is given back."""


@dataclass(frozen=True, slots=True)
class RefusedRecords:
    """Records that were not typed, in order.

    For each: its row in the chunk, the code of the reason, the node (−1: the value as a whole), and the byte of the
    value.
    """

    rows: Array
    codes: Array
    nodes: Array
    positions: Array


@dataclass(frozen=True, slots=True)
class TypedPiece:
    """Rows [start, stop) of a chunk, typed.

    `arrays` are the schema's fields and `_make_extra`. `rows` are the rows of the chunk that they came from.
    """

    start: int
    stop: int
    arrays: tuple[pa.Array, ...]
    rows: Array
    refused: RefusedRecords


class Typer:
    """Types chunk after chunk by one schema. Not safe for two threads at once."""

    def __init__(self, schema: Schema) -> None:
        self.nodes = make_nodes(schema)
        self._tables = make_tables(self.nodes)
        self._room = self._tables.room.copy()
        self._block = int(self._room[0])
        self._found = _make_results(self._block, 1 << 16)

    @property
    def tables(self) -> scan.ScanTables:
        """The schema as arrays. Those of its room are replaced when a record needs more."""
        return self._tables

    def pieces(self, values: pa.Array) -> Iterator[TypedPiece]:
        """The typed rows of a binary array without an Arrow offset. A null becomes a row of nulls."""
        if not len(values):
            return
        data, ends, valid = buffers_of(values)
        state = self._tables.state
        state[scan.ROW], state[scan.LAST], state[scan.BITMAP_AT] = 0, len(values), 0
        while state[scan.ROW] < len(values):
            yield self._piece(data, ends, valid)
        if len(self._tables.spans) > KEPT_SLOTS:
            self._tables = with_room(self._tables, self._room.copy())
        if len(self._found.extra) > KEPT_SLOTS:
            self._found = _make_results(self._block, 1 << 16)

    def _piece(self, data: Array, ends: Array, valid: Array) -> TypedPiece:
        state = self._tables.state
        start, last = int(state[scan.ROW]), int(state[scan.LAST])
        columns = [make_column(n, last - start if n.level == 0 else 0) for n in self.nodes]
        out = PieceBuilder(self.nodes, columns)
        limit = PIECE_BYTES + 2 * int(ends[last] - ends[0])
        state[scan.EXTRA] = 0
        while state[scan.ROW] < last and out.nbytes < limit:
            code = scan.scan(data, ends, valid, self._tables, self._found)
            out.add(data, self._tables, self._found)
            if state[scan.INSIDES]:
                rows = self._found.inside[: state[scan.INSIDES]].copy()
                out.add_unnamed(rows, copy_unknown(data, ends, rows, self._tables))
            self._make_room(code, out)
        piece = out.finish(start, int(state[scan.ROW]), ends, self._found.extra)
        if state[scan.EXTRA]:
            self._found = self._found._replace(extra=allocate(1 << 16, np.uint8))
        return piece

    def _make_room(self, code: int, out: PieceBuilder) -> None:
        """Make the room that the loop asked for, or refuse a record that asks for too much."""
        t, state = self._tables, self._tables.state
        if code == scan.GROW_EXTRA:
            used = int(state[scan.EXTRA])
            self._found = self._found._replace(extra=grow(self._found.extra, used, used + int(state[scan.NEED])))
        elif code == scan.GROW_LEVEL:
            level, room = int(state[scan.NEED]), t.room.copy()
            maximum = max(count_elements(self.nodes, level), int(self._room[level]))
            if room[level] < maximum:
                room[level] = min(2 * room[level], maximum)
                self._tables = with_room(t, room)
            else:
                out.refuse(int(state[scan.ROW]), scan.TOO_LARGE, find_holder(self.nodes, level))
                state[scan.ROW] += 1


def _make_results(rows: int, extra: int) -> ScanResults:
    return ScanResults(
        np.empty(rows, np.int32), allocate(extra, np.uint8), *(np.empty(rows, np.int32) for _ in range(6))
    )


def copy_unknown(data: Array, ends: Array, rows: Array, t: scan.ScanTables) -> pa.Array:
    """Returns the members of these records without a field, as JSON."""
    room = int((ends[rows + 1] - ends[rows]).sum(dtype=np.int64)) + 32
    out, text_ends = allocate(room, np.uint8), np.zeros(len(rows) + 1, np.int32)
    copy_members(data, ends, rows, t, no_frames(), out, text_ends)
    return pa.Array.from_buffers(pa.string(), len(rows), [None, pa.py_buffer(text_ends), pa.py_buffer(out)])


class PieceBuilder:
    """Builds one piece, block by block."""

    def __init__(self, nodes: tuple[SchemaNode, ...], columns: Sequence[ColumnBuilder]) -> None:
        self._nodes = nodes
        self._columns = columns
        self._source: list[Array] = []
        self._extra_ends: list[Array] = []
        self._refused: list[tuple[Array, ...]] = []
        self._faults: list[tuple[SchemaNode, Faults]] = []
        self._unnamed: list[tuple[Array, pa.Array]] = []

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self._columns)

    def add(self, data: Array, t: scan.ScanTables, results: ScanResults) -> None:
        """Append the block that the tables hold."""
        out, bad = int(t.state[scan.OUT]), int(t.state[scan.BAD])
        if bad:
            lists = (results.bad_row, results.bad_code, results.bad_node, results.bad_at)
            self._refused.append(tuple(a[:bad].copy() for a in lists))
        if not out:
            return
        self._source.append(results.source[:out].copy())
        self._extra_ends.append(results.extra_ends[:out].copy())
        before = [c.items for c in self._columns]
        for node, column in zip(self._nodes, self._columns, strict=True):
            base = int(t.nodes[node.index, scan.BASE])
            n = int(t.counts[node.level]) if node.level else out
            self._note(node, column.append(data, t.spans[base : base + n]))
        self.check_maps(before)

    def add_unnamed(self, rows: Array, texts: pa.Array) -> None:
        """Note what `_make_extra` has of rows of the chunk with unknown members inside of fields."""
        self._unnamed.append((rows, texts))

    def check_maps(self, before: Sequence[int]) -> None:
        """Note the maps, from these items of each column on, that have a key twice."""
        for node in self._nodes:
            if node.type.kind is Kind.MAP:
                self._note(node, self._find_repeated(node, before[node.index]))

    def refuse(self, row: int, code: int, node: int) -> None:
        """Refuse one record."""
        self._refused.append(tuple(np.array([x], np.int32) for x in (row, code, node, 0)))

    def finish(self, start: int, stop: int, ends: Array, extra: Array) -> TypedPiece:
        """The finished piece, of rows [start, stop) of the chunk. `ends` are the ends of the chunk's values."""
        rows = np.concatenate([np.empty(0, np.int32), *self._source])
        arrays = [self._columns[c].array(self._columns) for c in self._nodes[0].children]
        arrays.append(
            self._make_extra(rows, _make_extra_array(np.concatenate([np.zeros(1, np.int32), *self._extra_ends]), extra))
        )
        if self._faults:
            faulty = self._find_faulty(rows, ends)
            self._refused.append(faulty)
            landed = np.flatnonzero(~np.isin(rows, faulty[0]))
            arrays = take_rows(pa.RecordBatch.from_arrays(arrays, [*map(str, range(len(arrays)))]), landed).columns
            rows = rows[landed]
        return TypedPiece(start, stop, tuple(arrays), rows, self._join_refused())

    def _make_extra(self, rows: Array, members: pa.Array) -> pa.Array:
        """The column `_make_extra` of these rows: members of the records themselves, or what `copy_members` made."""
        if not self._unnamed:
            return members
        inside = np.isin(rows, np.concatenate([rows_of_part for rows_of_part, _ in self._unnamed]))
        return pc.replace_with_mask(
            members, boolean_array(inside), pa.concat_arrays([texts for _, texts in self._unnamed])
        )

    def _note(self, node: SchemaNode, faults: Faults) -> None:
        if len(faults.items):
            self._faults.append((node, faults))

    def _find_repeated(self, node: SchemaNode, first: int) -> Faults:
        """Faults of the maps, from item `first` on, that have a key twice."""
        maps, keys = self._columns[node.index], self._columns[node.children[0]]
        if not isinstance(maps, Lists) or not isinstance(keys, Texts):
            raise TypeError(f"{node.path} is no map")
        items = maps.find_repeated(first, keys).astype(np.int64)
        return Faults(items, np.full(len(items), scan.TWICE, np.int8), np.full(len(items), -1, np.int64))

    def _find_faulty(self, rows: Array, ends: Array) -> tuple[Array, ...]:
        """Records with an item that its type cannot hold: the row, code, node and byte of the first in each."""
        faults = [(self._find_rows(n.level, f.items), f.codes, np.full(len(f.items), n.index), f.starts)
                 for n, f in self._faults]  # fmt: skip
        out, codes, nodes, starts = (np.concatenate(column) for column in zip(*faults, strict=True))
        order = np.lexsort((starts, nodes, out))
        _, firsts = np.unique(out[order], return_index=True)
        chosen = order[firsts]
        records = rows[out[chosen]]
        positions = np.where(starts[chosen] < 0, -1, starts[chosen] - ends[records])
        return tuple(a.astype(np.int32) for a in (records, codes[chosen], nodes[chosen], positions))

    def _find_rows(self, level: int, items: Array) -> Array:
        """The rows in which elements of a level are."""
        while level:
            holder = next(n for n in self._nodes if n.inner == level and n.inner != n.level)
            column = self._columns[holder.index]
            if not isinstance(column, Lists):
                raise TypeError(f"{holder.path} holds no elements")
            items = np.searchsorted(column.ends[1 : column.items + 1], items, side="right")
            level = holder.level
        return items

    def _join_refused(self) -> RefusedRecords:
        if not self._refused:
            return RefusedRecords(*(np.empty(0, np.int32) for _ in range(4)))
        columns = [np.concatenate(column) for column in zip(*self._refused, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return RefusedRecords(*(c[order] for c in columns))


def _make_extra_array(ends: Array, data: Array) -> pa.Array:
    """Unknown fields as JSON texts; null where there are none. An object of unknown fields is never empty."""
    n = len(ends) - 1
    valid = np.packbits(ends[1:] > ends[:-1], bitorder="little")
    buffers = [pa.py_buffer(valid), pa.py_buffer(ends), pa.py_buffer(data[: ends[n]])]
    return pa.Array.from_buffers(pa.string(), n, buffers)


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
        schema, typer = self._get_typer(paths)
        for piece in typer.pieces(values.take(indices(rows))):
            again.add(rows[piece.rows], self._as_columns(schema, piece.arrays))
            numbers = [self._numbers[n.path] for n in typer.nodes]
            nodes = np.where(piece.refused.nodes >= 0, np.array(numbers)[piece.refused.nodes], -1)
            mine = (nodes >= 0) & self._is_added[nodes]
            there = RefusedRecords(rows[piece.refused.rows], piece.refused.codes, nodes, piece.refused.positions)
            again.refused.append(_select_refused(there, ~mine))
            again.faults.append(there)
            yield from self._group_rows(paths, there.rows[mine], nodes[mine]).items()

    def _get_typer(self, paths: _Paths) -> tuple[Schema, Typer]:
        entry = self._typers.pop(paths, None)
        if entry is None:
            schema = Schema(tuple(_without(self._schema.fields, paths)))
            entry = schema, Typer(schema)
        self._typers[paths] = entry
        if len(self._typers) > MOST_TYPERS:
            del self._typers[next(iter(self._typers))]
        return entry

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
        here = path_below(path, parent.kind, f.name) if parent else f.name
        yield here, f
        yield from _walk(f.type.fields, f.type, here)


def _without(fields: Sequence[Field], paths: _Paths, parent: Type | None = None, path: str = "") -> Iterator[Field]:
    for f in fields:
        here = path_below(path, parent.kind, f.name) if parent else f.name
        if here not in paths:
            inside = tuple(_without(f.type.fields, paths, f.type, here))
            yield replace(f, type=replace(f.type, fields=inside))
