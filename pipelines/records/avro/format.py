"""The format of Avro feeds: values by whatever schema they were written become rows of the feed's own schema.

Landed rows have the columns of the feed's schema, `_extra` (which Avro leaves empty: fields that only the writer has
are passed over, and counted as drift), and the record's coordinates. docs/formats.md says what becomes of every value.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.reader import AvroReader
from sluice.pipelines.records.avro.reasons import detail_of, reason_of
from sluice.pipelines.records.avro.typer import AvroTyper
from sluice.pipelines.records.compiled import Array
from sluice.pipelines.records.format import Formatted
from sluice.pipelines.records.opening import Opened, Opener
from sluice.pipelines.records.reader import WriterSchemas
from sluice.pipelines.records.typed.format import Records, TypedFormat, refused_by_schema
from sluice.pipelines.records.typed.reasons import Reason
from sluice.pipelines.records.typed.typer import RefusedRecords, TypedPiece, indices
from sluice.pipelines.records.typed.unfit import missing
from sluice.pipelines.records.wire import WireFormat
from sluice.pipelines.vocabulary.receipts import Drift, DriftKind

_WRONG = (loops.OTHER_BRANCH, loops.OTHER_SYMBOL, loops.WIDE_DECIMAL)


class AvroFormat(TypedFormat):
    """Types Avro records by a reader. `writers` tells the schemas that they were written by.

    With `closed`, records whose schema has fields that the reader's does not have are quarantined.
    """

    def __init__(
        self, reader: AvroReader, writers: WriterSchemas | None, *, dropping: bool = False, closed: bool = False
    ) -> None:
        super().__init__(reader.columns, dropping=dropping)
        self._opener = Opener(reader.wire)
        self._typer = AvroTyper(reader, writers, self._opener.name, closed=closed)
        self._looks_itself = reader.wire in (WireFormat.BARE, WireFormat.CONFLUENT)

    def _opened(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        return super()._opened(chunk) if self._looks_itself else self._opener.open(chunk)

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        return self._typer.pieces(opened.values, opened.schemas, opened.skip)

    def _formatted(self, records: Records, piece: TypedPiece) -> Formatted:
        raw, kafka, offsets, _ = records
        landed, typed = self._landed(kafka, piece)
        first = int(offsets[piece.rows[0]]) if typed else -1
        refused = piece.refused
        drift = (
            *self._new_fields(offsets),
            *missing(self._names, piece.arrays, typed, first),
            *self._misfits(refused, offsets),
        )
        n = len(refused.rows)
        if not n or self._dropping:
            return Formatted(landed, None, n, drift=drift, typed=typed)
        return Formatted(landed, self._refused(raw.take(indices(refused.rows)), refused), drift=drift, typed=typed)

    def _new_fields(self, offsets: Array) -> Iterator[Drift]:
        """Fields that only writers have: how many records have them."""
        found: dict[str, Drift] = {}
        for schema, (records, row) in self._typer.told.items():
            for field, type_ in self._typer.unknown.get(schema, {}).items():
                new = Drift(DriftKind.NEW, field, records, int(offsets[row]), type_)
                found[field] = found[field] + new if field in found else new
        yield from found.values()

    def _misfits(self, refused: RefusedRecords, offsets: Array) -> Iterator[Drift]:
        """Fields whose values made records be refused."""
        chosen = np.isin(refused.codes, _WRONG) & (refused.nodes >= 0)
        for node in np.unique(refused.nodes[chosen]).tolist():
            at = offsets[refused.rows[chosen & (refused.nodes == node)]]
            yield Drift(DriftKind.WRONG, self._typer.nodes[node].path, len(at), int(at.min()), "")

    def _refused(self, raw: pa.RecordBatch, refused: RefusedRecords) -> pa.RecordBatch:
        """The refused records as they came, with reasons. Makes Python objects per kind of reason, never per record."""

        def said(code: int, place: int, schema: int) -> tuple[Reason, str, str]:
            node = self._typer.nodes[place] if place >= 0 else None
            named = self._opener.name(schema) if schema >= 0 else None
            return reason_of(code), node.path if node else "", detail_of(code, node, named)

        return refused_by_schema(raw, refused, np.maximum(self._opener.schemas(raw), -1), said)
