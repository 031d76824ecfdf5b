"""Formats with schemas of their own, as benchmarks send and read them: a line for each in `FORMATS`.

Values begin as a registry's serializers write them: a zero byte and the number of the one schema.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from sluice.pipelines.records.rows.wire_format import PREFIX, WireFormat
from sluice.pipelines.records.shape import READERS
from sluice.resources.local.registered_events import (
    AVRO_SCHEMA,
    PROTOBUF_INDEXES,
    PROTOBUF_SCHEMA,
    encode_avro,
    encode_protobuf,
)

SCHEMA_ID = 1
HEADER = b"\0" + SCHEMA_ID.to_bytes(4, "big")
BEGIN = PREFIX[WireFormat.CONFLUENT]
_TEXT: dict[str, Any] = {"type": "string"}
_JSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order_id": _TEXT,
        "customer": _TEXT,
        "ts": {"type": "string", "format": "date-time"},
        "amount": {"type": "number", "multipleOf": 0.01},
        "currency": _TEXT,
        "items": {"type": "integer"},
        "country": _TEXT,
        "channel": _TEXT,
        "status": _TEXT,
    },
}


@dataclass(frozen=True, slots=True)
class SentFormat:
    """A format of sent values.

    `schema` is the text of the orders' schema. `encoded` encodes an order's JSON, and `reading` returns the decoder of
    a plain loop. `typed` is true if that returns times and decimals instead of texts and floats.
    """

    schema: str
    encoded: Callable[[bytes], bytes]
    reading: Callable[[], Callable[[bytes], Any]]
    typed: bool


def _avro_reading() -> Callable[[bytes], Any]:
    import fastavro

    parsed = fastavro.parse_schema(json.loads(json.dumps(AVRO_SCHEMA)))
    return lambda value: fastavro.schemaless_reader(io.BytesIO(value[BEGIN:]), parsed)


def _protobuf_reading() -> Callable[[bytes], Any]:
    """Google's library, by a class of the orders; a dict of each, as `pyarrow` takes it."""
    from google.protobuf import message_factory
    from google.protobuf.descriptor_pool import DescriptorPool

    from sluice.pipelines.records.protobuf.schema import read_files

    pool = DescriptorPool()
    files, _ = read_files(_in_files("protobuf"))
    for file in files.file:
        pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("sample.Order"))
    begin = BEGIN + len(PROTOBUF_INDEXES)
    names = [f.name for f in kind.DESCRIPTOR.fields]

    def read(value: bytes) -> dict[str, Any]:
        order = kind.FromString(value[begin:])
        row = {name: getattr(order, name) for name in names}
        row["ts"] = order.ts.seconds * 1_000_000 + order.ts.nanos // 1000
        row["amount"] = Decimal(repr(order.amount))
        return row

    return read


def _in_files(format_: str) -> str:
    """The text of a reader by a format's schema."""
    return READERS[format_].read(FORMATS[format_].schema, Path(), "")[-1]


def _json_reading() -> Callable[[bytes], Any]:
    from orjson import loads

    return lambda value: loads(memoryview(value)[BEGIN:])


FORMATS: Mapping[str, SentFormat] = {
    "avro": SentFormat(
        json.dumps(AVRO_SCHEMA), lambda value: encode_avro(json.loads(value)), _avro_reading, typed=True
    ),
    "protobuf": SentFormat(
        PROTOBUF_SCHEMA,
        lambda value: PROTOBUF_INDEXES + encode_protobuf(json.loads(value)),
        _protobuf_reading,
        typed=True,
    ),
    "json_schema": SentFormat(json.dumps(_JSON_SCHEMA), bytes, _json_reading, typed=False),
}
"""By the feed's word for the format."""


def as_sent(rows: pa.Table, format_: str) -> pa.Table:
    """A workload's rows with their values in the format; an empty one is JSON as it is."""
    if not format_:
        return rows
    encoded = FORMATS[format_].encoded
    values = [HEADER + encoded(value) for value in rows.column("value").cast(pa.binary()).to_pylist()]
    return rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values, pa.binary()))
