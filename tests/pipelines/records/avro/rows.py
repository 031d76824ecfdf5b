"""Avro records through the format, and schemas in memory instead of a registry."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import fastavro
import pyarrow as pa

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.avro.format import AvroFormat
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.rows.wire_format import Named, WireFormat
from tests.pipelines.records.json.rows import FIRST, chunk


class Schemas:
    """`WriterSchemas` from a mapping; `asked` are the numbers that were asked for."""

    def __init__(self, known: Mapping[Any, Any]) -> None:
        self._known, self.asked = known, list[Named]()

    def texts(self, id: Named) -> tuple[str, ...] | None:
        self.asked.append(id)
        return (json.dumps(self._known[id]),) if id in self._known else None


def reader_of(schema: Any, wire: WireFormat = WireFormat.CONFLUENT) -> AvroReader:
    return AvroReader((json.dumps(schema),), wire)


def encoded(schema: Any, value: Any, id: int | None = 1) -> bytes:
    """A value as fastavro writes it, behind the number of its schema."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return (b"" if id is None else b"\0" + struct.pack(">I", id)) + out.getvalue()


def convert(
    reader: AvroReader, values: Sequence[bytes | None], schemas: Schemas | None = None, **how: bool
) -> tuple[pa.Table, pa.Table | None, list[Any]]:
    """Landed and quarantined rows of one chunk, and its drift; all of its records, each once."""
    form = AvroFormat(reader, schemas, **how)
    pieces = list(form.convert(OffsetRange("orders", 3, "id", FIRST, FIRST + len(values)), chunk(values)))
    for piece in pieces:
        piece.landed.validate(full=True)
    assert sum(p.total for p in pieces) == len(values)
    landed = pa.Table.from_batches([p.landed for p in pieces], form.schema)
    held = [p.quarantined for p in pieces if p.quarantined is not None]
    for batch in held:
        batch.validate(full=True)
    quarantined = pa.Table.from_batches(held) if held else None
    return landed, quarantined, [d for p in pieces for d in p.drift]
