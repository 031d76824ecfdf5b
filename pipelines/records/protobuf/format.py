"""The format of Protobuf feeds: values by whatever schema they were written become rows of the feed's own message.

Landed rows have the columns of the feed's message, `_extra` (which Protobuf leaves empty: fields that the message does
not have are passed over, and counted as drift), and the record's coordinates. docs/formats.md says what becomes of
every value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.compiled import Array
from sluice.pipelines.records.format import Formatted
from sluice.pipelines.records.opening import Opened, Opener
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.protobuf.reader import ProtobufReader
from sluice.pipelines.records.protobuf.reasons import detail_of, reason_of
from sluice.pipelines.records.protobuf.typer import ProtobufTyper
from sluice.pipelines.records.reader import WriterSchemas
from sluice.pipelines.records.typed.format import Records, TypedFormat, refused_by_schema
from sluice.pipelines.records.typed.reasons import Reason
from sluice.pipelines.records.typed.typer import RefusedRecords, TypedPiece, indices
from sluice.pipelines.records.typed.unfit import missing
from sluice.pipelines.records.wire import NO_HEADER, WireFormat
from sluice.pipelines.vocabulary.receipts import Drift, DriftKind

_WRONG = (loops.OTHER_SYMBOL, loops.NO_DOCUMENT)


class ProtobufFormat(TypedFormat):
    """Types Protobuf records by a reader. `writers` tells the schemas that they were written by.

    With `closed`, records with fields that the reader's message does not have are quarantined.
    """

    def __init__(
        self, reader: ProtobufReader, writers: WriterSchemas | None, *, dropping: bool = False, closed: bool = False
    ) -> None:
        super().__init__(reader.columns, dropping=dropping)
        self._opener = Opener(reader.wire)
        self._typer = ProtobufTyper(reader, writers, self._opener.name, closed=closed)
        self._wire = reader.wire

    def _opened(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        if self._wire in (WireFormat.BARE, WireFormat.CONFLUENT):
            return super()._opened(chunk)
        if self._wire is WireFormat.CONFLUENT_HEADERS:
            return ((records, replace(o, paths=self._paths(records))) for records, o in self._opener.open(chunk))
        return self._opener.open(chunk)

    def _paths(self, records: pa.RecordBatch) -> Array:
        kinds, which = self._opener.behind(records)
        return np.array([_path(kind) for kind in kinds], np.int64)[which]

    def _pieces(self, opened: Opened) -> Iterator[TypedPiece]:
        return self._typer.pieces(opened.values, opened.schemas, opened.paths, opened.skip)

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
        """Fields that the feed's message does not have: how many records have them."""
        found: dict[str, Drift] = {}
        for path, records, row in self._typer.news:
            new = Drift(DriftKind.NEW, path, records, int(offsets[row]), "")
            found[path] = found[path] + new if path in found else new
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


def _path(indexes: bytes) -> int:
    """The message that the indexes in a header name, as one number; below 0 the code for which records are refused."""
    numbers, number, shift = list[int](), 0, 0
    for byte in indexes:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number >> 1 ^ -(number & 1))
            number = shift = 0
    if shift or (numbers and numbers[0] != len(numbers) - 1):
        return -NO_HEADER
    path = 0
    for index in numbers[1:]:
        if len(numbers) > loops.MOST_INDEXES + 1 or not 0 <= index < loops.INDEX - 1:
            return -loops.NO_MESSAGE
        path = path * loops.INDEX + index + 1
    return path or 1
