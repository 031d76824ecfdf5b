"""The sample events as Protobuf: Google's library reads them, and they land in each wire format."""

from __future__ import annotations

import json

import pytest
from google.protobuf import json_format

from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.resources.local.events import Mix, orders
from sluice.resources.local.registered_events import SAMPLES, as_registered
from tests.pipelines.records.protobuf.rows import Schemas, convert, make_message_class, make_reader

SAMPLE = SAMPLES["protobuf"]


def test_google_protobuf_reads_the_orders() -> None:
    mix = Mix(seed=1, bad=0.1, tombstones=0.1)
    plain = [*orders(mix, 300, 0, 10**9)]
    registered = [*as_registered(plain, SAMPLE, WireFormat.CONFLUENT, 7)]
    kind = make_message_class(make_reader(SAMPLE.schema).texts[-1])
    for before, after in zip(plain, registered, strict=True):
        if before.value is None or before.malformed:
            assert after.value == before.value
            continue
        assert after.value is not None
        message = kind.FromString(after.value.removeprefix(b"\0\0\0\0\7\0"))
        read = json_format.MessageToDict(message, preserving_proto_field_name=True)
        expected = json.loads(before.value)
        assert read.pop("ts").removesuffix("Z").ljust(23, "0")[:19] == expected.pop("ts")[:19]
        assert read == expected


@pytest.mark.parametrize("wire", [WireFormat.CONFLUENT, WireFormat.APICURIO, WireFormat.BARE])
def test_orders_land_in_each_wire_format(wire: WireFormat) -> None:
    events = [*as_registered(orders(Mix(seed=1), 50, 0, 10**9), SAMPLE, wire, 7)]
    reader = make_reader(SAMPLE.schema, "", wire)
    landed, quarantined, _ = convert(reader, [e.value for e in events], Schemas({7: SAMPLE.schema}))
    assert (quarantined, landed.num_rows) == (None, 50)
