"""The format of Protobuf feeds: values by whatever schema they were written become rows of the feed's own message.

Landed rows have the columns of the feed's message, `_extra` (which Protobuf leaves empty: fields that the message does
not have are passed over, and counted as drift), and the record's coordinates. docs/formats.md says what becomes of
every value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.compiled.jit import Array
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader
from sluice.pipelines.records.protobuf.reasons import REASONS
from sluice.pipelines.records.protobuf.typer import ProtobufTyper
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.rows.wire_format import IN_HEADERS, NO_HEADER, WireFormat, reference
from sluice.pipelines.records.rows.writer_schema_lookup import Opened
from sluice.pipelines.records.slots.binary import BinaryFormat


class ProtobufFormat(BinaryFormat):
    """Types Protobuf records by a reader. `writers` tells the schemas that they were written by.

    With `closed`, records with fields that the reader's message does not have are quarantined.
    """

    _reasons = REASONS
    _wrong: ClassVar = {
        loops.OTHER_SYMBOL: DriftKind.UNLISTED,
        loops.NO_DOCUMENT: DriftKind.MALFORMED,
    }

    def __init__(
        self, reader: ProtobufReader, writers: WriterSchemas | None, *, dropping: bool = False, closed: bool = False
    ) -> None:
        super().__init__(reader, dropping=dropping)
        self._message = reader.message.name
        self._typer = ProtobufTyper(reader, writers, self._opener.name, closed=closed)

    def _open_records(self, chunk: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Opened]]:
        opened = super()._open_records(chunk)
        if self._wire not in IN_HEADERS:
            return opened
        paths = self._paths if self._wire is WireFormat.CONFLUENT_HEADERS else self._own_or_other
        return ((records, replace(o, paths=paths(records))) for records, o in opened)

    def _paths(self, records: pa.RecordBatch) -> Array:
        kinds, which = self._opener.behind(records)
        return np.array([_path(kind) for kind in kinds], np.int64)[which]

    def _own_or_other(self, records: pa.RecordBatch) -> Array:
        """0 for records whose header names the reader's message. Those that name it before the message, too, as
        Apicurio's serializers do since 3, are refused: read as fields, the name would be wrong values."""
        own = self._message.rpartition(".")[2].encode()
        kinds, which = self._opener.messages(records)
        codes = [-NO_HEADER if not kind else 0 if kind == own else -loops.OTHER_MESSAGE for kind in kinds]
        values = records.column(records.schema.get_field_index("value"))
        twice = pc.fill_null(pc.starts_with(values, reference(self._message)), False)
        paths: Array = np.where(twice.to_numpy(zero_copy_only=False), -NO_HEADER, np.array(codes, np.int64)[which])
        return paths


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
