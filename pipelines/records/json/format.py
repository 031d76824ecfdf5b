"""The format of JSON and JSON Schema feeds. docs/formats.md specifies the result for every kind of value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.receipts import Drift
from sluice.pipelines.records.columns.pieces import RefusedRecords, TypedPiece
from sluice.pipelines.records.columns.typed_format import Records, TypedFormat
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json import scan
from sluice.pipelines.records.json.columns import REASONS, UNKNOWN, WIDE_TEXT
from sluice.pipelines.records.json.typer import Fallback, Typer
from sluice.pipelines.records.json.unfit import NewFields, UnknownFields, find_misfits
from sluice.pipelines.records.rows.row_format import Formatted
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.rows.writer_schema_lookup import Opened, without_prefix, without_wrapper
from sluice.pipelines.schema.arrays import buffers_of, indices
from sluice.pipelines.schema.schema import Schema

_WIDE_HEADS = (0xFFFE, 0xFEFF, 0x7B00, 0x007B)
"""How an object in UTF-16 or UTF-32 begins: with a byte order mark, or a brace."""


class JsonFormat(TypedFormat):
    """Types JSON objects by a schema.

    Records with fields that the schema does not name, in structs of the paths `closed`, are quarantined; in any struct,
    if `closed` is None. `base` is the schema without fields that came from records: values that do not fit these stay
    in `_extra`. Without `finds_new`, such fields are not reported. A schema of Debezium's changes also fits records in
    Kafka Connect's wrapper.
    """

    _reasons = REASONS
    _typer: Typer

    def __init__(
        self,
        schema: Schema,
        wire: WireFormat = WireFormat.BARE,
        *,
        dropping: bool = False,
        closed: Collection[str] | None = (),
        base: Schema | None = None,
        finds_new: bool = True,
    ) -> None:
        super().__init__(schema, wire, dropping=dropping)
        self._typer = Typer(schema)
        self._unknown = UnknownFields(self._typer.nodes, self._typer.tables, closed) if finds_new else None
        self._fallback = Fallback(schema, self._typer.nodes, base) if base else None
        self._columns = schema

    def _open_records(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        for records, opened in super()._open_records(chunk):
            opened = without_wrapper(opened, self._columns)
            yield records, opened if opened.schemas is None else replace(opened, values=without_prefix(opened))

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        pieces, schemas = self._typer.pieces(opened.values), opened.schemas
        return pieces if schemas is None else map(partial(_with_reasons, schemas), pieces)

    def _format_piece(self, records: Records, piece: TypedPiece) -> Formatted:
        offsets, opened = records.offsets, records.opened
        misfits: Iterable[Drift] = ()
        if len(piece.refused.rows):
            refused = piece.refused
            if pa.types.is_dictionary(opened.values.type):
                opened = replace(opened, values=opened.values.dictionary_decode())
            if self._fallback:
                piece, refused = self._fallback.read(piece, opened.values)
            misfits = find_misfits(self._typer.nodes, refused, opened.values, offsets)
            refused = _detect_encoding(piece.refused, opened)
            if opened.cut is not None:
                moved = opened.cut[refused.rows] * (refused.positions >= 0)
                refused = replace(refused, positions=refused.positions + moved)
            piece = replace(piece, refused=refused)
        unknown = self._unknown.of(piece.arrays[-1], offsets[piece.rows]) if self._unknown else None
        if unknown is None:
            return self._finish_piece(records, piece, (), misfits)
        if unknown.has_refused:
            piece = _without_unknown(piece, unknown, len(self._typer.nodes))
        return self._finish_piece(records, piece, unknown.drift, misfits, unknown.called)


def _detect_encoding(refused: RefusedRecords, opened: Opened) -> RefusedRecords:
    """Returns refused records with their own code for those that begin as JSON in UTF-16 or UTF-32."""
    chosen = np.flatnonzero(np.isin(refused.codes, (scan.NO_VALUE, scan.NO_NAME)))
    data, ends, _ = buffers_of(opened.values)
    begins = ends[refused.rows[chosen]].astype(np.int64) + opened.skip
    chosen, begins = (a[begins + 1 < ends[refused.rows[chosen] + 1]] for a in (chosen, begins))
    heads = data[begins].astype(np.int64) << 8 | data[begins + 1]
    codes = refused.codes.copy()
    codes[chosen[np.isin(heads, _WIDE_HEADS)]] = WIDE_TEXT
    return replace(refused, codes=codes)


def _without_unknown(piece: TypedPiece, unknown: NewFields, nodes: int) -> TypedPiece:
    """The piece without rows that have unknown fields. These are refused, each for its first unknown field."""
    bad = np.flatnonzero(unknown.firsts >= 0)
    keep = indices(np.flatnonzero(unknown.firsts < 0).astype(np.int32))
    firsts = unknown.firsts[bad]
    fields = np.where(firsts < len(unknown.called), nodes + firsts, -1)
    more = (piece.rows[bad], np.full(len(bad), UNKNOWN), fields, np.full(len(bad), -1))
    before = (piece.refused.rows, piece.refused.codes, piece.refused.nodes, piece.refused.positions)
    both = [np.concatenate(pair).astype(np.int32) for pair in zip(before, more, strict=True)]
    order = np.argsort(both[0], kind="stable")
    arrays = tuple(a.take(keep) for a in piece.arrays)
    rows = piece.rows[unknown.firsts < 0]
    return TypedPiece(piece.start, piece.stop, arrays, rows, RefusedRecords(*(c[order] for c in both)))


def _with_reasons(schemas: Array, piece: TypedPiece) -> TypedPiece:
    """The piece, with the reason for which records were not opened."""
    why = schemas[piece.refused.rows]
    if not (why < 0).any():
        return piece
    codes = np.where(why < 0, -why, piece.refused.codes).astype(np.int32)
    nodes = np.where(why < 0, -1, piece.refused.nodes).astype(np.int32)
    positions = np.where(why < 0, 0, piece.refused.positions).astype(np.int32)
    return replace(piece, refused=RefusedRecords(piece.refused.rows, codes, nodes, positions))
