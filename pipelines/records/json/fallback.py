"""Reads records whose values do not fit fields that came from other records (`on_drift: evolve`).

Such a field has the type of the values that were there when it came; nobody has asked for that type. A record that does
not fit is read without the field: the value stays in `_extra`, as it did before the field came. Promise: the result
depends on the record alone, and a record that does not fit the feed's own fields stays refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json.scan_tables import SchemaNode
from sluice.pipelines.records.json.typer import RefusedRecords, TypedPiece, Typer
from sluice.pipelines.schema.arrays import indices
from sluice.pipelines.schema.schema import Field, Schema, Type, arrow_type, path_below

_MOST = 4
"""Fields that a record is read without, one by one; one that does not fit more of them is read without any."""

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
        """The piece with the records that fit without fields which came from records; and all that did not fit with
        these. `values` are the chunk's."""
        refused = piece.refused
        mine = (refused.nodes >= 0) & self._is_added[refused.nodes]
        if not mine.any():
            return piece, refused
        again = _Again([_only(refused, ~mine)], [refused])
        todo = self._group_rows(frozenset(), refused.rows[mine], refused.nodes[mine])
        while todo:
            paths, rows = todo.popitem()
            for without, more in self._read(paths, rows, values, again):
                todo[without] = np.sort(np.concatenate([todo.get(without, more[:0]), more]))
        return self._merge_piece(piece, again), _together(again.faults)

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
        schema, typer = self._typer(paths)
        for piece in typer.pieces(values.take(indices(rows))):
            again.rows.append(rows[piece.rows])
            again.arrays.append(self._as_columns(schema, piece.arrays))
            numbers = [self._numbers[n.path] for n in typer.nodes]
            nodes = np.where(piece.refused.nodes >= 0, np.array(numbers)[piece.refused.nodes], -1)
            mine = (nodes >= 0) & self._is_added[nodes]
            there = RefusedRecords(rows[piece.refused.rows], piece.refused.codes, nodes, piece.refused.positions)
            again.refused.append(_only(there, ~mine))
            again.faults.append(there)
            yield from self._group_rows(paths, there.rows[mine], nodes[mine]).items()

    def _typer(self, paths: _Paths) -> tuple[Schema, Typer]:
        if paths not in self._typers:
            schema = Schema(tuple(_without(self._schema.fields, paths)))
            self._typers[paths] = (schema, Typer(schema))
        return self._typers[paths]

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
        refused = _together(again.refused)
        return TypedPiece(piece.start, piece.stop, arrays, rows[order], _only(refused, np.argsort(refused.rows)))


@dataclass(slots=True)
class _Again:
    """Records that stay refused, all that did not fit, and rows that were made of records in the end."""

    refused: list[RefusedRecords]
    faults: list[RefusedRecords]
    rows: list[Array] = field(default_factory=list)
    arrays: list[list[pa.Array]] = field(default_factory=list)


def _columns(refused: RefusedRecords) -> tuple[Array, ...]:
    return refused.rows, refused.codes, refused.nodes, refused.positions


def _only(refused: RefusedRecords, chosen: Array) -> RefusedRecords:
    return RefusedRecords(*(c[chosen] for c in _columns(refused)))


def _together(refused: Sequence[RefusedRecords]) -> RefusedRecords:
    return RefusedRecords(*(np.concatenate(c).astype(np.int32) for c in zip(*map(_columns, refused), strict=True)))


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
            yield Field(f.name, Type(f.type.kind, f.type.precision, f.type.scale, f.type.unit, inside), f.required)
