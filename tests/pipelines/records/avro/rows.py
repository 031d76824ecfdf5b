"""Converts Avro records with the format; a registry of schemas in memory."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import fastavro
import pyarrow as pa

from sluice.pipelines.records.avro.format import AvroFormat
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.rows.wire_format import Named, WireFormat
from tests.pipelines.records.json.rows import convert_chunk, make_chunk


class Schemas:
    """`WriterSchemas` from a mapping. `requests` has the ids that were looked up."""

    def __init__(self, schemas: Mapping[Any, Any]) -> None:
        self._schemas, self.requests = schemas, list[Named]()

    def texts(self, id: Named) -> tuple[str, ...] | None:
        self.requests.append(id)
        return (json.dumps(self._schemas[id]),) if id in self._schemas else None


def make_reader(schema: Any, wire: WireFormat = WireFormat.CONFLUENT) -> AvroReader:
    return AvroReader((json.dumps(schema),), wire)


def encode(schema: Any, value: Any, id: int | None = 1) -> bytes:
    """Encode a value with fastavro, after the id of its schema."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return (b"" if id is None else b"\0" + struct.pack(">I", id)) + out.getvalue()


def strip_logical_types(node: Any) -> Any:
    """Return the schema without logical types, for fastavro."""
    if isinstance(node, dict):
        return {k: strip_logical_types(v) for k, v in node.items() if k != "logicalType"}
    return [strip_logical_types(n) for n in node] if isinstance(node, list) else node


def convert(
    reader: AvroReader, values: Sequence[bytes | None], schemas: Schemas | None = None, **options: bool
) -> tuple[pa.Table, pa.Table | None, list[Any]]:
    """Return the landed rows, the quarantined rows and the drift of one chunk. Each record is in one of the two."""
    return convert_chunk(AvroFormat(reader, schemas, **options), make_chunk(values))
