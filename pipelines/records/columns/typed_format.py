"""The base of formats that type values: typed rows, or quarantined rows with bytes and a reason.

Landed rows have the schema's fields, `_extra`, and the record's coordinates under `kafka_`. Quarantined rows have the
columns of raw feeds and the reason. docs/formats.md specifies the result for every kind of value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.records.columns.nodes import SchemaNode
from sluice.pipelines.records.columns.pieces import RefusedRecords, TypedPiece
from sluice.pipelines.records.columns.reasons import Reasons
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.rows.row_format import (
    COORDINATES,
    KAFKA_FIELDS,
    REFUSED,
    Formatted,
    RawFormat,
    landed_schema,
)
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.rows.writer_schema_lookup import Opened, Opener
from sluice.pipelines.schema.arrays import indices, int64s, text_array
from sluice.pipelines.schema.schema import Schema

_KAFKA = pa.schema(KAFKA_FIELDS)
_COORDINATES = [RawFormat.schema.get_field_index(f.name) for f in COORDINATES]


class Records(NamedTuple):
    """Records of an offset range: unchanged, their coordinates, their offsets, and the values to be typed."""

    offset_range: OffsetRange
    chunk: pa.RecordBatch
    kafka: pa.RecordBatch
    offsets: Array
    opened: Opened


class _Typer(Protocol):
    nodes: tuple[SchemaNode, ...]


class TypedFormat:
    """The base of formats that type values: coordinates next to the columns, refused records next to the rows.

    Records name their schemas as `wire` has it. With `dropping`, records that do not fit are counted and left out
    instead of quarantined.
    """

    _reasons: Reasons
    _typer: _Typer
    _unopened: ClassVar[Collection[WireFormat]] = (WireFormat.BARE,)
    """Wire formats without a prefix, or whose prefix the typer reads."""

    def __init__(self, schema: Schema, wire: WireFormat, *, dropping: bool = False) -> None:
        self.schema = landed_schema(schema)
        self.contract = ""
        self._fields = schema.fields
        self._wire, self._opener = wire, Opener(wire)
        self._raw, self._dropping = RawFormat(), dropping

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """Typed and quarantined rows, both in offset order.

        Yields several pieces when the typed columns take much more memory than the values.
        """
        for records, opened in self._open_records(chunk):
            offsets = int64s(records.column(records.schema.get_field_index("offset")))
            without_values = [*records.columns]
            without_values[records.schema.get_field_index("value")] = pa.nulls(records.num_rows, pa.binary())
            (raw,) = self._raw.convert(s, pa.RecordBatch.from_arrays(without_values, records.schema.names))
            columns = [raw.landed.column(index) for index in _COORDINATES]
            kafka = pa.RecordBatch.from_arrays([*columns, _make_nulls(opened.values)], schema=_KAFKA)
            # Nothing here holds a piece while its rows are written: a contract makes a copy of them, without some.
            yield from map(
                partial(self._format_piece, Records(s, records, kafka, offsets, opened)), self._pieces(opened)
            )

    def _open_records(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        """Yields the records in one part or several, each with the values to be typed."""
        if self._wire in self._unopened:
            return iter([(chunk, Opened(chunk.column(chunk.schema.get_field_index("value"))))])
        return self._opener.open(chunk)

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        """The typed rows of values. A null becomes a row of nulls."""
        raise NotImplementedError

    def _format_piece(self, records: Records, piece: TypedPiece) -> Formatted:
        """One piece of the records, formatted."""
        raise NotImplementedError

    def _finish_piece(
        self,
        records: Records,
        piece: TypedPiece,
        new: Iterable[Drift],
        misfits: Iterable[Drift],
        unnamed: Sequence[str] = (),
    ) -> Formatted:
        """Returns the rows of a piece with its drift: new fields, missing ones, and `misfits`.

        Nodes of refused records beyond those of the schema are indices of `unnamed`, paths of fields that it does not
        name.
        """
        kafka, refused = records.kafka, piece.refused
        n = len(refused.rows)
        # Nothing is copied unless rows were refused.
        rows = take_rows(kafka, piece.rows) if n else kafka.slice(piece.start, piece.stop - piece.start)
        landed = pa.RecordBatch.from_arrays([*piece.arrays, *rows.columns], schema=self.schema)
        typed = landed.num_rows - rows.columns[-1].true_count
        drift = (*new, *self._find_missing(piece.arrays, typed, records.offsets[piece.rows[:1]]), *misfits)
        if not n or self._dropping:
            return Formatted(landed, None, n, drift=drift, typed=typed)
        (raw,) = self._raw.convert(records.offset_range, records.chunk.take(indices(refused.rows)))
        return Formatted(landed, self._make_refused(raw.landed, refused, unnamed), drift=drift, typed=typed)

    def _find_missing(self, arrays: Sequence[pa.Array], typed: int, first: Array) -> Iterator[Drift]:
        """Fields that none of the `typed` rows with a value has, with their types where the schema names their places.
        `first` is the offset of the first row."""
        if typed:
            for f, array in zip(self._fields, arrays, strict=False):
                if array.null_count == len(array):
                    yield Drift(DriftKind.MISSING, f.name, typed, int(first[0]), f.text if f.place else "")

    def _make_refused(self, raw: pa.RecordBatch, refused: RefusedRecords, unnamed: Sequence[str]) -> pa.RecordBatch:
        """The refused records as they came, with reasons. Makes Python objects per kind of reason, never per record."""
        nodes = self._typer.nodes
        paths = ("", *(n.path for n in nodes), *unnamed)
        # A kind is a code, a node and a writer's schema; all records of one kind have the same texts.
        schemas, which = np.unique(np.maximum(self._opener.schemas(raw), -1), return_inverse=True)
        kinds = (refused.codes.astype(np.int64) * len(paths) + refused.nodes + 1) * len(schemas) + which
        distinct, positions = np.unique(kinds, return_inverse=True)
        at = positions.astype(np.int32)
        reasons, fields, details = [], [], []
        for kind in distinct.tolist():
            at_node, schema = divmod(kind, len(schemas))
            code, index = divmod(at_node, len(paths))
            node = nodes[index - 1] if 0 < index <= len(nodes) else None
            reasons.append(self._reasons.get_reason(code))
            fields.append(paths[index])
            details.append(self._describe(code, node, int(schemas[schema])))
        none = np.zeros(len(at), np.int32)
        byte = pa.Array.from_buffers(
            pa.int32(), len(at), [_make_bits(refused.positions >= 0), pa.py_buffer(refused.positions.astype(np.int32))]
        )
        columns = [
            encode_texts([str(reason.stage) for reason in reasons], at),
            encode_texts([str(reason) for reason in reasons], at),
            encode_texts([""], none, none != 0),
            encode_texts(fields, at, refused.nodes >= 0),
            encode_texts(details, at),
        ]
        return pa.RecordBatch.from_arrays([*raw.columns, *columns, byte], schema=REFUSED)

    def _describe(self, code: int, node: SchemaNode | None, schema: int, why: str = "") -> str:
        """A sentence about a refused record, whose schema has this number (below 0: none is known)."""
        return self._reasons.describe(code, node, self._opener.name(schema) if schema >= 0 else None, why)


def _make_nulls(values: pa.Array) -> pa.Array:
    """A boolean array: where an array without offset is null."""
    bitmap = values.buffers()[0]
    if bitmap is None or not values.null_count:
        inverted = np.zeros((len(values) + 7) // 8, np.uint8)
    else:
        inverted = ~np.frombuffer(bitmap, np.uint8)
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(inverted)])


def encode_texts(texts: list[str], positions: Array, valid: Array | None = None) -> pa.DictionaryArray:
    """A column of few texts: the one of each position, null where `valid` is false."""
    bitmap = None if valid is None else _make_bits(valid)
    chosen = pa.Array.from_buffers(pa.int32(), len(positions), [bitmap, pa.py_buffer(positions)])
    return pa.DictionaryArray.from_arrays(chosen, text_array(texts))


def _make_bits(valid: Array) -> pa.Buffer:
    return pa.py_buffer(np.packbits(valid, bitorder="little"))
