"""The format of Avro feeds: values by whatever schema they were written become rows of the feed's own schema.

Landed rows have the columns of the feed's schema, `_extra` (which Avro leaves empty: fields that only the writer has
are passed over, and counted as drift), and the record's coordinates. docs/formats.md says what becomes of every value.
"""

from __future__ import annotations

from typing import ClassVar

from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.avro.reasons import REASONS
from sluice.pipelines.records.avro.typer import AvroTyper
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.slots.binary import BinaryFormat


class AvroFormat(BinaryFormat):
    """Types Avro records by a reader. `writers` tells the schemas that they were written by.

    With `closed`, records whose schema has fields that the reader's does not have are quarantined.
    """

    _reasons = REASONS
    _wrong: ClassVar = {
        loops.OTHER_BRANCH: DriftKind.WRONG,
        loops.OTHER_SYMBOL: DriftKind.UNLISTED,
        loops.WIDE_DECIMAL: DriftKind.OUT_OF_RANGE,
    }

    def __init__(
        self, reader: AvroReader, writers: WriterSchemas | None, *, dropping: bool = False, closed: bool = False
    ) -> None:
        super().__init__(reader, dropping=dropping)
        self._typer = AvroTyper(reader, writers, self._opener.name, closed=closed)
