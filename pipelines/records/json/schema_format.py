"""The format of JSON Schema feeds: JSON values, behind what names their schema, become rows as in JSON feeds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.json.format import JsonFormat, refused_by_schema
from sluice.pipelines.records.json.reasons import Reason, detail_of, reason_of
from sluice.pipelines.records.json.typer import RefusedRecords, TypedPiece
from sluice.pipelines.records.rows import wire_format as wire
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.rows.writer_schema_lookup import Opened, Opener, without_prefix
from sluice.pipelines.schema.schema import Schema

_UNREAD = {
    wire.NO_HEADER: (Reason.NOT_JSON, wire.UNNAMED),
    wire.NOT_INFLATED: (Reason.NOT_JSON, wire.UNZIPPED),
}


class JsonSchemaFormat(JsonFormat):
    """Types JSON objects by a schema. A record that does not name its schema as `wire` has it is refused.

    The schema that a record names is not asked for: it is told with records that are refused.
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

        def said(code: int, index: int, schema: int) -> tuple[Reason, str, str]:
            if code in _UNREAD:
                reason, detail = _UNREAD[code]
            else:
                node = nodes[index] if 0 <= index < len(nodes) else None
                reason, detail = reason_of(code), detail_of(code, node)
            suffix = f" (schema {opener.name(schema)})" if opener and schema >= 0 else ""
            return reason, called[index] if index >= 0 else "", detail + suffix

        schemas = np.full(raw.num_rows, -1, np.int64) if opener is None else np.maximum(opener.schemas(raw), -1)
        return refused_by_schema(raw, refused, schemas, said)


def _with_reasons(piece: TypedPiece, schemas: Array) -> TypedPiece:
    """The piece, with the reason for which records were not opened."""
    why = schemas[piece.refused.rows]
    if not (why < 0).any():
        return piece
    codes = np.where(why < 0, -why, piece.refused.codes).astype(np.int32)
    nodes = np.where(why < 0, -1, piece.refused.nodes).astype(np.int32)
    positions = np.where(why < 0, 0, piece.refused.positions).astype(np.int32)
    return replace(piece, refused=RefusedRecords(piece.refused.rows, codes, nodes, positions))
