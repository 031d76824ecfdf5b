"""The sample events as Avro: fastavro reads them as the JSON ones."""

from __future__ import annotations

import io
import json

import fastavro

from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.resources.local.events import Mix, orders
from sluice.resources.local.registered_events import SAMPLES, as_registered


def test_fastavro_reads_the_orders() -> None:
    mix = Mix(seed=1, bad=0.1, tombstones=0.1)
    plain = [*orders(mix, 300, 0, 10**9)]
    registered = [*as_registered(plain, SAMPLES["avro"], WireFormat.CONFLUENT, 7)]
    parsed = fastavro.parse_schema(json.loads(SAMPLES["avro"].schema))
    for before, after in zip(plain, registered, strict=True):
        assert before._replace(value=None) == after._replace(value=None)
        if before.value is None or before.malformed:
            assert after.value == before.value
            continue
        assert after.value is not None
        stream = io.BytesIO(after.value.removeprefix(b"\0\0\0\0\7"))
        read = fastavro.schemaless_reader(stream, parsed)
        expected = json.loads(before.value)
        assert stream.read() == b""
        assert isinstance(read, dict)
        assert float(read.pop("amount")) == expected.pop("amount")
        assert read.pop("ts").isoformat(timespec="milliseconds").replace("+00:00", "Z") == expected.pop("ts")
        assert read == expected
