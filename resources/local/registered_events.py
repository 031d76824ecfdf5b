"""The sample order events in formats that have schemas of their own: a line for each in `SAMPLES`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sluice.pipelines.records.rows.wire_format import ID_HEADER, WireFormat, prefix
from sluice.resources.local import avro_events, protobuf_events
from sluice.resources.local.events import CHANNELS, COUNTRIES, CURRENCIES, STATUSES, SampleEvent

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


class Sample(NamedTuple):
    """The events in one format: the schema, the usual ending of such files, and how an order's JSON becomes a
    record's bytes; also one that is malformed, if `spoiled`. `named` is what names its message behind the schema's
    number, by wire formats."""

    schema: str
    suffix: str
    encoded: Callable[[bytes], bytes]
    spoiled: bool
    by_name: Mapping[WireFormat, bytes] = {}


SAMPLES: Mapping[str, Sample] = {
    "avro": Sample(
        json.dumps(avro_events.SCHEMA), "avsc", lambda value: avro_events.encoded(json.loads(value)), spoiled=False
    ),
    "json_schema": Sample(json.dumps(JSON_SCHEMA), "json", bytes, spoiled=True),
    "protobuf": Sample(
        protobuf_events.SCHEMA,
        "proto",
        lambda value: protobuf_events.encoded(json.loads(value)),
        spoiled=False,
        by_name={
            WireFormat.CONFLUENT: protobuf_events.INDEXES,
            WireFormat.CONFLUENT_HEADERS: protobuf_events.INDEXES,
            WireFormat.APICURIO: protobuf_events.NAME,
            WireFormat.APICURIO3: protobuf_events.NAME,
        },
    ),
}
"""By the feed's word for the format. `sluice produce` registers the schema."""


def as_registered(
    events: Iterable[SampleEvent], sample: Sample, wire: WireFormat, number: int
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


WIRES = frozenset(WireFormat) - {WireFormat.GLUE, WireFormat.APICURIO_HEADERS}
"""The wire formats that sample events can have."""
