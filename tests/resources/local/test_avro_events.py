"""The sample events as Avro are what fastavro reads, and make a feed's rows."""

from __future__ import annotations

import io
import json

import fastavro

from sluice.resources.local.avro_events import SCHEMA, as_avro
from sluice.resources.local.events import Mix, orders


def test_fastavro_reads_the_orders() -> None:
    mix = Mix(seed=1, bad=0.1, tombstones=0.1)
    plain, made = ([*stream] for stream in (orders(mix, 300, 0, 10**9), as_avro(orders(mix, 300, 0, 10**9), b"head")))
    parsed = fastavro.parse_schema(json.loads(json.dumps(SCHEMA)))
    for before, after in zip(plain, made, strict=True):
        assert before._replace(value=None) == after._replace(value=None)
        if before.value is None or before.malformed:
            assert after.value == before.value
            continue
        assert after.value is not None
        stream = io.BytesIO(after.value.removeprefix(b"head"))
        read = fastavro.schemaless_reader(stream, parsed)
        said = json.loads(before.value)
        assert stream.read() == b""
        assert isinstance(read, dict)
        assert float(read.pop("amount")) == said.pop("amount")
        assert read.pop("ts").isoformat(timespec="milliseconds").replace("+00:00", "Z") == said.pop("ts")
        assert read == said
