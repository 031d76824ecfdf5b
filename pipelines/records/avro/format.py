"""The format of Avro feeds: values by whatever schema they were written become rows of the feed's own schema.

Landed rows have the columns of the feed's schema, `_extra` (which Avro leaves empty: fields that only the writer has
are passed over, and counted as drift), and the record's coordinates. docs/formats.md says what becomes of every value.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.reader import AvroReader, WireFormat, WriterSchemas
from sluice.pipelines.records.avro.reasons import detail_of, reason_of
from sluice.pipelines.records.avro.typer import AvroTyper
from sluice.pipelines.records.compiled import Array
from sluice.pipelines.records.format import Formatted
from sluice.pipelines.records.typed.format import TypedFormat, refused_rows
from sluice.pipelines.records.typed.typer import RefusedRecords, TypedPiece, buffers_of, indices
from sluice.pipelines.records.typed.unfit import missing
from sluice.pipelines.vocabulary.receipts import Drift, DriftKind

_WRONG = (loops.OTHER_BRANCH, loops.OTHER_SYMBOL, loops.WIDE_DECIMAL)


class AvroFormat(TypedFormat):
    """Types Avro records by a reader. `writers` tells the schemas that they were written by.

    With `closed`, records whose schema has fields that the reader's does not have are quarantined.
    """

    def __init__(
        self, reader: AvroReader, writers: WriterSchemas | None, *, dropping: bool = False, closed: bool = False
    ) -> None:
        self._typer = AvroTyper(reader, writers, closed=closed)
        self._numbered = reader.wire is WireFormat.CONFLUENT
        super().__init__(reader.columns, self._typer, dropping=dropping)

    def _formatted(self, raw: pa.RecordBatch, kafka: pa.RecordBatch, offsets: Array, piece: TypedPiece) -> Formatted:
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
        nodes = self._typer.nodes
        many = len(nodes) + 1
        schemas = self._schemas(raw)
        kinds = np.stack([refused.codes.astype(np.int64) * many + refused.nodes + 1, schemas], 1)
        found, places = np.unique(kinds, axis=0, return_inverse=True)
        said = []
        for kind, schema in found.tolist():
            code, node = kind // many, nodes[kind % many - 1] if kind % many else None
            said.append((reason_of(code), node.path if node else "", detail_of(code, node, schema)))
        return refused_rows(raw, refused, said, places)

    def _schemas(self, raw: pa.RecordBatch) -> Array:
        """The number of each record's schema, −1 where it has none."""
        data, ends, _ = buffers_of(raw.column(raw.schema.get_field_index("value")))
        found = np.full(raw.num_rows, -1, np.int64)
        begins = ends[:-1].astype(np.int64)
        if self._numbered:
            whole = np.flatnonzero(np.diff(ends) >= loops.HEADER_BYTES)
            whole = whole[data[begins[whole]] == 0]
            numbers = data[begins[whole][:, None] + np.arange(1, loops.HEADER_BYTES)]
            found[whole] = np.ascontiguousarray(numbers).view(">u4")[:, 0]
        return found
