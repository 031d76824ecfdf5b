"""A piece of a chunk: rows that were typed, and records that were refused. Promise: each record is in one of the two.

A chunk comes in several pieces when its columns would take much more memory than its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.columns.builders import ColumnBuilder, Faults, Lists, Texts, make_faults
from sluice.pipelines.records.columns.loops import TWICE
from sluice.pipelines.records.columns.nodes import SchemaNode, find_holder
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.schema.schema import Kind

PIECE_BYTES = 8 << 20
"""Bytes that a piece may take, besides twice the bytes of its chunk."""
KEPT_SLOTS = 1 << 20
"""How many slots are kept from one chunk to the next. Room that a huge record took is given back."""


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

    `arrays` are the schema's fields and `_extra`. `rows` are the rows of the chunk that they came from.
    """

    start: int
    stop: int
    arrays: tuple[pa.Array, ...]
    rows: Array
    refused: RefusedRecords


Append = Callable[[SchemaNode, ColumnBuilder, int], Faults]
"""Appends as many items of a node to its column."""


class PieceBuilder:
    """Builds one piece, block by block."""

    def __init__(self, nodes: tuple[SchemaNode, ...], columns: Sequence[ColumnBuilder]) -> None:
        self._nodes = nodes
        self._columns = columns
        self._source: list[Array] = []
        self._refused: list[tuple[Array, ...]] = []
        self._faults: list[tuple[SchemaNode, Faults]] = []

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self._columns)

    def add(self, source: Array, refused: Sequence[Array], counts: Array, append: Append) -> None:
        """Add a block: the records of its rows, the columns of its refused records, and the items of all nodes, which
        `append` appends to columns: as many as rows, or at a level above 0 as `counts` has."""
        if len(refused[0]):
            self._refused.append(tuple(a.copy() for a in refused))
        if not len(source):
            return
        self._source.append(source.copy())
        before = [c.items for c in self._columns]
        for node, column in zip(self._nodes, self._columns, strict=True):
            self._note(node, append(node, column, int(counts[node.level]) if node.level else len(source)))
        self.check_maps(before)

    def check_maps(self, before: Sequence[int]) -> None:
        """Note the maps, from these items of each column on, that have a key twice."""
        for node in self._nodes:
            if node.type.kind is Kind.MAP:
                maps, keys = self._columns[node.index], self._columns[node.children[0]]
                if not isinstance(maps, Lists) or not isinstance(keys, Texts):
                    raise TypeError(f"{node.path} is no map")
                self._note(node, make_faults(maps.find_repeated(before[node.index], keys), TWICE))

    def refuse(self, row: int, code: int, node: int) -> None:
        """Refuse one record."""
        self._refused.append(tuple(np.array([x], np.int32) for x in (row, code, node, 0)))

    def finish(self, start: int, stop: int, begins: Array) -> TypedPiece:
        """The finished piece, of rows [start, stop) of the chunk, whose values begin at `begins`."""
        rows = np.concatenate([np.empty(0, np.int32), *self._source])
        arrays = [*(self._columns[c].array(self._columns) for c in self._nodes[0].children), self._make_extra(rows)]
        if self._faults:
            faulty = self._find_faulty(rows, begins)
            self._refused.append(faulty)
            landed = np.flatnonzero(~np.isin(rows, faulty[0]))
            arrays = take_rows(pa.RecordBatch.from_arrays(arrays, [*map(str, range(len(arrays)))]), landed).columns
            rows = rows[landed]
        return TypedPiece(start, stop, tuple(arrays), rows, self._join_refused())

    def _make_extra(self, rows: Array) -> pa.Array:
        """The column `_extra` of these rows: of formats without unnamed fields, null."""
        return pa.nulls(len(rows), pa.string())

    def _note(self, node: SchemaNode, faults: Faults) -> None:
        if len(faults.items):
            self._faults.append((node, faults))

    def _find_faulty(self, rows: Array, begins: Array) -> tuple[Array, ...]:
        """Records with an item that its type cannot hold: the row, code, node and byte of the first in each."""
        faults = [(self._find_rows(n.level, f.items), f.codes, np.full(len(f.items), n.index), f.starts)
                 for n, f in self._faults]  # fmt: skip
        out, codes, nodes, starts = (np.concatenate(column) for column in zip(*faults, strict=True))
        order = np.lexsort((starts, nodes, out))
        _, firsts = np.unique(out[order], return_index=True)
        chosen = order[firsts]
        records = rows[out[chosen]]
        positions = np.where(starts[chosen] < 0, -1, starts[chosen] - begins[records])
        return tuple(a.astype(np.int32) for a in (records, codes[chosen], nodes[chosen], positions))

    def _find_rows(self, level: int, items: Array) -> Array:
        """The rows in which elements of a level are."""
        while level:
            holder = self.get_holder(level)
            items = np.searchsorted(holder.ends[1 : holder.items + 1], items, side="right")
            level = holder.node.level
        return items

    def get_holder(self, level: int) -> Lists:
        """The column of the list or map that opens a level."""
        column = self._columns[find_holder(self._nodes, level)]
        if not isinstance(column, Lists):
            raise TypeError(f"{column.node.path} holds no elements")
        return column

    def _join_refused(self) -> RefusedRecords:
        if not self._refused:
            return RefusedRecords(*(np.empty(0, np.int32) for _ in range(4)))
        columns = [np.concatenate(column) for column in zip(*self._refused, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return RefusedRecords(*(c[order] for c in columns))
