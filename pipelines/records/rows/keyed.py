"""A `Format` that adds columns of records' keys to another format's rows.

Promise: a record lands if its value and its key fit, and is else quarantined as it came, for what its value breaks
first. Rows stay in offset order. Works on whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.rows.refusals import OFFSET, refuse_rows
from sluice.pipelines.records.rows.row_format import REFUSED, Format, Formatted, RawFormat, landed_schema
from sluice.pipelines.records.rows.value_reader import KEY_PREFIX
from sluice.pipelines.records.rows.wire_format import IN_HEADERS, KEY_HEADERS, WireFormat
from sluice.pipelines.schema.arrays import fixed_width, int64s, text_array
from sluice.pipelines.schema.schema import Schema

_WHY = [f.name for f in REFUSED if f.name not in RawFormat.schema.names]


class KeyedFormat:
    """Adds the columns of keys, read by `key`, to the rows of `behind`, in the order of `columns`.

    With `dropping`, records whose key does not fit are counted and left out instead of quarantined.
    """

    def __init__(
        self, behind: Format, key: Format, columns: Schema, wire: WireFormat, *, dropping: bool = False
    ) -> None:
        self.schema, self.contract = landed_schema(columns), behind.contract
        self._behind, self._key, self._dropping = behind, key, dropping
        self._in_headers = wire in IN_HEADERS

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """The other format's pieces with the keys' columns, and without the rows whose key does not fit."""
        keys = _Keys(list(self._key.convert(s, self._replace_values(chunk))), self._key.schema)
        drift = keys.drift
        for piece in self._behind.convert(s, chunk):
            offsets = int64s(piece.landed.column(piece.landed.schema.get_field_index(OFFSET)))
            positions, matched = keys.find_positions(offsets)
            if not matched.all():
                retained = np.flatnonzero(matched)
                why = keys.why(offsets[~matched])
                piece, positions = refuse_rows(piece, s, chunk, matched, why, self._dropping), positions[retained]
            yield replace(piece, landed=self._join_keys(piece.landed, keys, positions), drift=(*piece.drift, *drift))
            drift = ()

    def _replace_values(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        """The records with their keys, and the keys' headers, in place of their values."""
        names = chunk.schema.names
        columns = dict(zip(names, chunk.columns, strict=True))
        columns["value"] = columns["key"]
        if self._in_headers:
            columns["headers"] = _with_other_names(columns["headers"])
        return pa.RecordBatch.from_arrays([columns[name] for name in names], schema=chunk.schema)

    def _join_keys(self, landed: pa.RecordBatch, keys: _Keys, positions: Array) -> pa.RecordBatch:
        own = keys.rows(positions)
        columns = [
            landed.column(at) if (at := landed.schema.get_field_index(f.name)) >= 0
            else own.column(own.schema.get_field_index(f.name.removeprefix(KEY_PREFIX)))
            for f in self.schema
        ]  # fmt: skip
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class _Keys:
    """The keys of a chunk: those that fit as rows, and why the others do not."""

    def __init__(self, pieces: list[Formatted], schema: pa.Schema) -> None:
        self._landed = pa.Table.from_batches([p.landed for p in pieces], schema).combine_chunks()
        quarantined = [p.quarantined for p in pieces if p.quarantined is not None]
        self._refused = pa.Table.from_batches(quarantined, REFUSED).combine_chunks()
        self._offsets = _get_offsets(self._landed, OFFSET)
        self._gone = _get_offsets(self._refused, "offset")
        self.drift = tuple(replace(d, field=KEY_PREFIX + d.field, type="") for p in pieces for d in p.drift)

    def find_positions(self, offsets: Array) -> tuple[Array, Array]:
        """Where the rows of these offsets are, and whether they are there."""
        positions = np.searchsorted(self._offsets, offsets)
        inside = np.minimum(positions, max(len(self._offsets) - 1, 0))
        matched = self._offsets[inside] == offsets if len(self._offsets) else np.zeros(len(offsets), np.bool_)
        return positions, matched

    def rows(self, positions: Array) -> pa.RecordBatch:
        """The rows at these places, which ascend."""
        if not len(positions):
            return pa.RecordBatch.from_pylist([], self._landed.schema)
        if positions[-1] - positions[0] == len(positions) - 1:
            return self._landed.slice(int(positions[0]), len(positions)).combine_chunks().to_batches()[0]
        return take_rows(self._landed.to_batches()[0], positions)

    def why(self, missing: Array) -> list[pa.Array]:
        """Columns of `REFUSED` after the record itself, for keys at these offsets."""
        chosen = self._refused.take(fixed_width(pa.int64(), np.searchsorted(self._gone, missing)))
        reasons = {name: chosen.column(name).combine_chunks() for name in _WHY}
        reasons["field"] = _wrap_texts(reasons["field"], KEY_PREFIX, "")
        reasons["detail"] = _wrap_texts(reasons["detail"], "", " (in the key)")
        return [reasons[name] for name in _WHY]


def _with_other_names(headers: pa.ListArray) -> pa.ListArray:
    """Records' headers, of which the key's schema is named as the value's is."""
    names, values = headers.values.field(0), headers.values.field(1)
    chosen = text_array([""])[0]
    for own, as_value in KEY_HEADERS.items():
        chosen = pc.if_else(pc.equal(names, text_array([own])[0]), text_array([as_value])[0], chosen)
    entries = pa.StructArray.from_arrays([chosen, values], fields=list(headers.type.value_type))
    buffers = headers.buffers()
    return pa.Array.from_buffers(headers.type, len(headers), buffers[:2], offset=headers.offset, children=[entries])


def _get_offsets(rows: pa.Table, name: str) -> Array:
    offsets = rows.column(name)
    return np.concatenate([np.empty(0, np.int64), *map(int64s, offsets.chunks)])


def _wrap_texts(column: pa.DictionaryArray, before: str, after: str) -> pa.DictionaryArray:
    """The column with something around each of its few texts."""
    texts = [before + text + after for text in column.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(column.indices, text_array(texts))
