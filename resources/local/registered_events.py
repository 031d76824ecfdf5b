"""The sample order events as Avro, JSON Schema and Protobuf: one entry of `SAMPLES` for each format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import schema_asked
from sluice.pipelines.records.avro.encode import write_long
from sluice.pipelines.records.rows.wire_format import ID_HEADER, WireFormat, prefix, reference, varint
from sluice.pipelines.records.shape import READERS
from sluice.resources.local.events import CHANNELS, COUNTRIES, CURRENCIES, STATUSES, SampleEvent
from sluice.resources.registry.confluent import RegistryClient

AVRO_SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "sample",
    "fields": [
        {"name": "order_id", "type": "string"},
        {"name": "customer", "type": "string"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "currency", "type": "string"},
        {"name": "items", "type": "int"},
        {"name": "country", "type": "string"},
        {"name": "channel", "type": ["null", "string"], "default": None},
        {"name": "status", "type": "string"},
    ],
}
"""Avro schema of the events."""


def encode_avro(order: dict[str, Any]) -> bytes:
    """An order as Avro's bytes, by AVRO_SCHEMA."""
    stamp = int(datetime.fromisoformat(order["ts"]).timestamp() * 1000 + 0.5)
    cents = int(Decimal(str(order["amount"])) * 100)
    amount = cents.to_bytes(cents.bit_length() // 8 + 1, "big", signed=True)
    return b"".join(
        (
            _avro_text(order["order_id"]),
            _avro_text(order["customer"]),
            write_long(stamp),
            write_long(len(amount)) + amount,
            _avro_text(order["currency"]),
            write_long(order["items"]),
            _avro_text(order["country"]),
            b"\x02" + _avro_text(order["channel"]),
            _avro_text(order["status"]),
        )
    )


def _avro_text(text: str) -> bytes:
    data = text.encode()
    return write_long(len(data)) + data


PROTOBUF_SCHEMA = """\
syntax = "proto3";

package sample;

import "google/protobuf/timestamp.proto";

message Order {
  string order_id = 1;
  string customer = 2;
  google.protobuf.Timestamp ts = 3;
  double amount = 4;
  string currency = 5;
  int32 items = 6;
  string country = 7;
  optional string channel = 8;
  string status = 9;
}
"""
"""Protobuf schema of the events."""
PROTOBUF_INDEXES = b"\0"
"""Names the message as Confluent's serializers do: the first of its file."""
PROTOBUF_NAME = reference("Order")
"""Names it as Apicurio's serializers do."""


def encode_protobuf(order: dict[str, Any]) -> bytes:
    """An order as Protobuf's bytes, by PROTOBUF_SCHEMA."""
    stamp = int(datetime.fromisoformat(order["ts"]).timestamp() * 1000 + 0.5)
    time = b"\x08" + varint(stamp // 1000) + b"\x10" + varint(stamp % 1000 * 1_000_000)
    return b"".join(
        (
            _protobuf_text(1, order["order_id"]),
            _protobuf_text(2, order["customer"]),
            b"\x1a" + varint(len(time)) + time,
            b"\x21" + struct.pack("<d", order["amount"]),
            _protobuf_text(5, order["currency"]),
            b"\x30" + varint(order["items"]),
            _protobuf_text(7, order["country"]),
            _protobuf_text(8, order["channel"]),
            _protobuf_text(9, order["status"]),
        )
    )


def _protobuf_text(number: int, text: str) -> bytes:
    data = text.encode()
    return bytes([number << 3 | 2]) + varint(len(data)) + data


JSON_SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {
        "order_id": {"type": "string", "pattern": "^o-[0-9]{10}-[0-9a-f]{6}$"},
        "customer": {"type": "string", "maxLength": 20},
        "ts": {"type": "string", "format": "date-time"},
        "amount": {"type": "number", "multipleOf": 0.01, "minimum": 0},
        "currency": {"type": "string", "enum": sorted(set(CURRENCIES))},
        "items": {"type": "integer", "minimum": 1},
        "country": {"type": "string", "enum": sorted(COUNTRIES)},
        "channel": {"oneOf": [{"type": "null"}, {"type": "string", "enum": sorted(CHANNELS)}]},
        "status": {"type": "string", "enum": sorted(STATUSES)},
    },
    "required": ["order_id", "customer", "ts", "amount", "currency", "items", "country", "status"],
}


class SampleFormat(NamedTuple):
    """The events in one format: the schema, the usual ending of such files, and how an order's JSON becomes a
    record's bytes; also one that is malformed, if `spoiled`. `named` is what names its message behind the schema's
    number, by wire formats."""

    schema: str
    suffix: str
    encoded: Callable[[bytes], bytes]
    spoiled: bool
    by_name: Mapping[WireFormat, bytes] = {}


SAMPLES: Mapping[str, SampleFormat] = {
    "avro": SampleFormat(json.dumps(AVRO_SCHEMA), "avsc", lambda value: encode_avro(json.loads(value)), spoiled=False),
    "json_schema": SampleFormat(json.dumps(JSON_SCHEMA), "json", bytes, spoiled=True),
    "protobuf": SampleFormat(
        PROTOBUF_SCHEMA,
        "proto",
        lambda value: encode_protobuf(json.loads(value)),
        spoiled=False,
        by_name={
            WireFormat.CONFLUENT: PROTOBUF_INDEXES,
            WireFormat.CONFLUENT_HEADERS: PROTOBUF_INDEXES,
            WireFormat.APICURIO: PROTOBUF_NAME,
            WireFormat.APICURIO3: PROTOBUF_NAME,
        },
    ),
}
"""By the feed's word for the format. `sluice produce` registers the schema."""


def in_format(
    feed: Feed, events: Iterator[SampleEvent], folder: Path, environ: Mapping[str, str]
) -> Iterator[SampleEvent]:
    """The events in the feed's format. `folder`: that of feed files.

    Where the format has schemas of its own, theirs is registered under the subject that the feed names. Raises
    UsageError for a wire format that they cannot have.
    """
    reader = feed.reader
    if reader is None:
        return events
    sample, number = SAMPLES[reader.format], 0
    if reader.wire not in _WIRES:
        raise UsageError(
            f"feed {feed.name} has `wire_format: {reader.wire}`, which sample events do not support",
            remedy=f"use one of {', '.join(sorted(_WIRES))}",
        )
    if feed.registry is not None:
        subject, type_ = schema_asked(folder, feed.name, environ).subject, READERS[reader.format].registered
        number = RegistryClient(feed.registry).register(subject, sample.schema, type_)
    return as_registered(events, sample, reader.wire, number)


def as_registered(
    events: Iterable[SampleEvent], sample: SampleFormat, wire: WireFormat, number: int
) -> Iterator[SampleEvent]:
    """The same events in another format; each names the schema of that number. Those that are malformed stay so."""
    payload = sample.by_name.get(wire, b"")
    in_header = wire is WireFormat.CONFLUENT_HEADERS
    before = prefix(wire, number) + (b"" if in_header else payload)
    header = (ID_HEADER, prefix(WireFormat.CONFLUENT, number) + payload)
    for event in events:
        if event.value is None or (event.malformed and not sample.spoiled):
            yield event
            continue
        more = [header] if in_header else []
        yield event._replace(value=before + sample.encoded(event.value), headers=[*event.headers, *more])


_WIRES = frozenset(WireFormat) - {WireFormat.GLUE, WireFormat.APICURIO_HEADERS}
"""The wire formats that sample events can have."""
