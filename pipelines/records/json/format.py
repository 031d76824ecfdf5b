"""The formats of JSON and JSON Schema feeds: values become typed rows, or quarantined rows with bytes and a reason.

Landed rows have the schema's fields, `_extra`, and the record's coordinates under `kafka_`. Quarantined rows have the
columns of raw feeds and the reason. docs/formats.md specifies the result for every kind of value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.compiled.take_rows import take_rows
from sluice.pipelines.records.json import scan
from sluice.pipelines.records.json.columns import UNKNOWN, WIDE_TEXT, Reason, get_detail, get_reason, stage_of
from sluice.pipelines.records.json.typer import Fallback, RefusedRecords, TypedPiece, Typer
from sluice.pipelines.records.json.unfit import NewFields, UnknownFields, find_misfits, find_missing
from sluice.pipelines.records.rows import wire_format as wire
from sluice.pipelines.records.rows.row_format import (
    COORDINATES,
    KAFKA_FIELDS,
    REFUSED,
    Formatted,
    RawFormat,
    landed_schema,
)
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.rows.writer_schema_lookup import Opened, Opener, without_prefix
from sluice.pipelines.schema.arrays import buffers_of, indices, int64s, text_array
from sluice.pipelines.schema.schema import Schema

_KAFKA = pa.schema(KAFKA_FIELDS)
_WIDE_HEADS = (0xFFFE, 0xFEFF, 0x7B00, 0x007B)
"""How an object in UTF-16 or UTF-32 begins: with a byte order mark, or a brace."""
_COORDINATES = [RawFormat.schema.get_field_index(f.name) for f in COORDINATES]


class Records(NamedTuple):
    """Records of an offset range: unchanged, their coordinates, their offsets, and the values to be typed."""

    raw: pa.RecordBatch
    kafka: pa.RecordBatch
    offsets: Array
    opened: Opened


class TypedFormat:
    """The base of formats that type values: coordinates next to the columns, refused records next to the rows.

    With `dropping`, records that do not fit are counted and left out instead of quarantined.
    """

    def __init__(self, schema: Schema, *, dropping: bool = False) -> None:
        self.schema = landed_schema(schema)
        self.contract = ""
        self._names = [f.name for f in schema.fields]
        self._raw, self._dropping = RawFormat(), dropping

    def convert(self, s: OffsetRange, chunk: pa.RecordBatch) -> Iterator[Formatted]:
        """Typed and quarantined rows, both in offset order.

        Yields several pieces when the typed columns take much more memory than the values.
        """
        for records, opened in self._open_records(chunk):
            offsets = int64s(records.column(records.schema.get_field_index("offset")))
            (raw,) = self._raw.convert(s, records)
            columns = [raw.landed.column(index) for index in _COORDINATES]
            kafka = pa.RecordBatch.from_arrays([*columns, _make_nulls(opened.values)], schema=_KAFKA)
            # Nothing here holds a piece while its rows are written: a contract makes a copy of them, without some.
            yield from map(
                partial(self._format_piece, Records(raw.landed, kafka, offsets, opened)), self._pieces(opened)
            )

    def _open_records(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        """Yields the records in one part or several, each with the values to be typed."""
        yield chunk, Opened(chunk.column(chunk.schema.get_field_index("value")))

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        """The typed rows of values. A null becomes a row of nulls."""
        raise NotImplementedError

    def _format_piece(self, records: Records, piece: TypedPiece) -> Formatted:
        """One piece of the records, formatted."""
        raise NotImplementedError

    def _make_landed(self, kafka: pa.RecordBatch, piece: TypedPiece) -> tuple[pa.RecordBatch, int]:
        """The rows that land, and how many of them have a value."""
        rows = _make_coordinates(kafka, piece)
        landed = pa.RecordBatch.from_arrays([*piece.arrays, *rows.columns], schema=self.schema)
        return landed, landed.num_rows - rows.columns[-1].true_count


class JsonFormat(TypedFormat):
    """Types JSON objects by a schema.

    Records with fields that the schema does not name, in structs of the paths `closed`, are quarantined; in any struct,
    if `closed` is None. `base` is the schema without fields that came from records: values that do not fit these stay
    in `_extra`.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dropping: bool = False,
        closed: Collection[str] | None = (),
        base: Schema | None = None,
    ) -> None:
        super().__init__(schema, dropping=dropping)
        self._typer = Typer(schema)
        self._unknown = UnknownFields(self._typer.nodes, self._typer.tables, closed)
        self._fallback = Fallback(schema, self._typer.nodes, base) if base else None

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        return self._typer.pieces(opened.values)

    def _format_piece(self, records: Records, piece: TypedPiece) -> Formatted:
        raw, kafka, offsets, opened = records
        faults: Iterable[Drift] = ()
        if len(piece.refused.rows):
            refused = piece.refused
            if self._fallback:
                piece, refused = self._fallback.read(piece, opened.values)
            faults = find_misfits(self._typer.nodes, refused, opened.values, offsets)
            piece = replace(piece, refused=_detect_encoding(piece.refused, opened))
        unknown = self._unknown.of(piece.arrays[-1], offsets[piece.rows])
        if unknown and unknown.has_refused:
            piece = _without_unknown(piece, unknown, len(self._typer.nodes))
        landed, typed = self._make_landed(kafka, piece)
        first = int(offsets[piece.rows[0]]) if typed else -1
        drift = (*(unknown.drift if unknown else ()), *find_missing(self._names, piece.arrays, typed, first), *faults)
        return self._split_piece(landed, raw, piece.refused, unknown, typed, drift)

    def _split_piece(
        self,
        landed: pa.RecordBatch,
        raw: pa.RecordBatch,
        refused: RefusedRecords,
        unknown: NewFields | None,
        typed: int,
        drift: tuple[Drift, ...],
    ) -> Formatted:
        n = len(refused.rows)
        if not n or self._dropping:
            return Formatted(landed, None, n, drift=drift, typed=typed)
        rows = self._make_refused(raw.take(indices(refused.rows)), refused, unknown.called if unknown else ())
        return Formatted(landed, rows, drift=drift, typed=typed)

    def _make_refused(self, raw: pa.RecordBatch, refused: RefusedRecords, unknown: tuple[str, ...]) -> pa.RecordBatch:
        """The refused records as they came, with reasons. Makes Python objects per kind of reason, never per record."""
        known_nodes = self._typer.nodes
        called = [*(n.path for n in known_nodes), *unknown]
        many = len(called) + 1
        kinds, positions = np.unique(refused.codes.astype(np.int64) * many + refused.nodes + 1, return_inverse=True)
        codes, nodes = (kinds // many).tolist(), (kinds % many - 1).tolist()
        fields = [known_nodes[n] if 0 <= n < len(known_nodes) else None for n in nodes]
        paths = [called[n] if n >= 0 else "" for n in nodes]
        reasons = [
            (get_reason(code), f, get_detail(code, node)) for code, f, node in zip(codes, paths, fields, strict=True)
        ]
        return make_refused_rows(raw, refused, reasons, positions)


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


Explain = Callable[[int, int, int], tuple[Reason, str, str]]


def make_refused_by_schema(
    raw: pa.RecordBatch, refused: RefusedRecords, schemas: Array, explain: Explain
) -> pa.RecordBatch:
    """Refused records, each with its reason: `explain` takes a code, a node (−1: none) and a schema's number."""
    many = int(refused.nodes.max()) + 2
    kinds = np.stack([refused.codes.astype(np.int64) * many + refused.nodes + 1, schemas], 1)
    distinct, positions = np.unique(kinds, axis=0, return_inverse=True)
    texts = [explain(kind // many, kind % many - 1, schema) for kind, schema in distinct.tolist()]
    return make_refused_rows(raw, refused, texts, positions)


def make_refused_rows(
    raw: pa.RecordBatch, refused: RefusedRecords, explanations: Sequence[tuple[Reason, str, str]], positions: Array
) -> pa.RecordBatch:
    """Records as they came, with reasons: `explanations[positions[i]]` (reason, path, detail) is row i's."""
    at = positions.reshape(-1).astype(np.int32)
    stages = _encode_texts([str(stage_of(reason)) for reason, _, _ in explanations], at)
    reasons = _encode_texts([str(reason) for reason, _, _ in explanations], at)
    expectations = _encode_texts([""], np.zeros(len(at), np.int32), np.zeros(len(at), np.bool_))
    fields = _encode_texts([path for _, path, _ in explanations], at, refused.nodes >= 0)
    where = pa.Array.from_buffers(
        pa.int32(), len(at), [_make_bits(refused.positions >= 0), pa.py_buffer(refused.positions.astype(np.int32))]
    )
    details = _encode_texts([detail for _, _, detail in explanations], at)
    return pa.RecordBatch.from_arrays(
        [*raw.columns, stages, reasons, expectations, fields, details, where], schema=REFUSED
    )


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


def _make_coordinates(kafka: pa.RecordBatch, piece: TypedPiece) -> pa.RecordBatch:
    """The Kafka coordinates of a piece's rows. Copies nothing unless rows were refused."""
    if len(piece.refused.rows):
        return take_rows(kafka, piece.rows)
    return kafka.slice(piece.start, piece.stop - piece.start)


def _make_nulls(values: pa.Array) -> pa.Array:
    """A boolean array: where an array without offset is null."""
    bitmap = values.buffers()[0]
    if bitmap is None or not values.null_count:
        inverted = np.zeros((len(values) + 7) // 8, np.uint8)
    else:
        inverted = ~np.frombuffer(bitmap, np.uint8)
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(inverted)])


def _encode_texts(texts: list[str], positions: Array, valid: Array | None = None) -> pa.DictionaryArray:
    bitmap = None if valid is None else _make_bits(valid)
    chosen = pa.Array.from_buffers(pa.int32(), len(positions), [bitmap, pa.py_buffer(positions)])
    return pa.DictionaryArray.from_arrays(chosen, text_array(texts))


def _make_bits(valid: Array) -> pa.Buffer:
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


_UNREAD = {
    wire.NO_HEADER: (Reason.NOT_JSON, wire.UNNAMED),
    wire.NOT_INFLATED: (Reason.NOT_JSON, wire.UNZIPPED),
}


class JsonSchemaFormat(JsonFormat):
    """Types JSON objects by a schema. A record that does not name its schema as `wire` has it is refused.

    The schema of a record is not fetched: refused records name it.
    """

    def __init__(
        self,
        schema: Schema,
        wire_format: WireFormat,
        *,
        dropping: bool = False,
        closed: Collection[str] | None = (),
        base: Schema | None = None,
    ) -> None:
        super().__init__(schema, dropping=dropping, closed=closed, base=base)
        self._opener = Opener(wire_format) if wire_format is not WireFormat.BARE else None

    def _open_records(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        if self._opener is None:
            yield from super()._open_records(chunk)
            return
        for records, opened in self._opener.open(chunk):
            yield records, replace(opened, values=without_prefix(opened))

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        for piece in super()._pieces(opened):
            yield piece if opened.schemas is None else _with_reasons(piece, opened.schemas)

    def _make_refused(self, raw: pa.RecordBatch, refused: RefusedRecords, unknown: tuple[str, ...]) -> pa.RecordBatch:
        nodes = self._typer.nodes
        called = [*(n.path for n in nodes), *unknown]
        opener = self._opener

        def explain(code: int, index: int, schema: int) -> tuple[Reason, str, str]:
            if code in _UNREAD:
                reason, detail = _UNREAD[code]
            else:
                node = nodes[index] if 0 <= index < len(nodes) else None
                reason, detail = get_reason(code), get_detail(code, node)
            suffix = f" (schema {opener.name(schema)})" if opener and schema >= 0 else ""
            return reason, called[index] if index >= 0 else "", detail + suffix

        schemas = np.full(raw.num_rows, -1, np.int64) if opener is None else np.maximum(opener.schemas(raw), -1)
        return make_refused_by_schema(raw, refused, schemas, explain)


def _with_reasons(piece: TypedPiece, schemas: Array) -> TypedPiece:
    """The piece, with the reason for which records were not opened."""
    why = schemas[piece.refused.rows]
    if not (why < 0).any():
        return piece
    codes = np.where(why < 0, -why, piece.refused.codes).astype(np.int32)
    nodes = np.where(why < 0, -1, piece.refused.nodes).astype(np.int32)
    positions = np.where(why < 0, 0, piece.refused.positions).astype(np.int32)
    return replace(piece, refused=RefusedRecords(piece.refused.rows, codes, nodes, positions))
