"""Avro feeds on a real Kafka with a real registry: Confluent's own serializers write, fastavro says what is right."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import fastavro
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from sluice.cli.main import main
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.quarantine.listing import Filter
from sluice.resources.lake import open_lake
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.registry.confluent import RegistryClient
from tests.integration.conftest import Lines
from tests.integration.support import Place, asked, consumed, edges, rescanned, run, visible

pytestmark = pytest.mark.kafka

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "amount", "type": ["null", "double"], "default": None},
        {"name": "lines", "type": {"type": "array", "items": "Line"}, "default": []},
    ],
}
LINE = {"type": "record", "name": "Line", "namespace": "shop", "fields": [{"name": "sku", "type": "string"}]}
FIRST = ORDER | {"fields": [*ORDER["fields"][:2], {"name": "lines", "type": {"type": "array", "items": LINE}}]}
SECOND = FIRST | {"fields": [*FIRST["fields"], {"name": "country", "type": "string", "default": "DE"}]}


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    return Place(tmp_path, kafka, fresh_topic(), lake())


def avro_feed(place: Place, url: str, schema: Any = FIRST, **settings: Any) -> Feed:
    path = place.root / "schemas" / "order.avsc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(schema))
    given = {"format": "avro", "schema_file": "schemas/order.avsc", "registry": f"{{url: '{url}', timeout: 5s}}"}
    return place.feed(**given | settings)


def serialized(registry: LocalRegistry, topic: str, schema: Any, orders: Iterable[Any]) -> list[bytes]:
    """The orders as Confluent's serializer writes them; it registers the schema under `topic-value`."""
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        serialize = AvroSerializer(client, json.dumps(schema))
        return [serialize(o, SerializationContext(topic, MessageField.VALUE)) for o in orders]


def send(place: Place, values: Iterable[bytes | None]) -> None:
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap})
    for value in values:
        producer.produce(place.topic, value, key=b"k")
    assert producer.flush(30) == 0


def order(i: int, **more: Any) -> dict[str, Any]:
    return {"id": f"o{i}", "amount": None if i % 3 else i / 4, "lines": [{"sku": f"s{j}"} for j in range(i % 4)]} | more


def landed(feed: Feed) -> list[dict[str, Any]]:
    return asked(feed, "select * from read_parquet($files) order by kafka_offset", visible(feed)).to_pylist()


def held(feed: Feed) -> list[dict[str, Any]]:
    lake = open_lake(feed)
    found = (lake.open(path) for path in lake.list(f"quarantine/{feed.name}"))
    return sorted((row for file in found for row in pq.read_table(file).to_pylist()), key=lambda r: int(r["offset"]))


def told_by(url: str, value: bytes) -> Any:
    """What fastavro reads by the schema that the registry has for the record."""
    return fastavro.schemaless_reader(io.BytesIO(value[5:]), _known(url, struct.unpack(">I", value[1:5])[0]))


@cache
def _known(url: str, number: int) -> Any:
    with SchemaRegistryClient({"url": url, "timeout": 20}) as client:
        schema = client.get_schema(number)
    return fastavro.parse_schema(json.loads(str(schema.schema_str)))


def test_bytes_as_whole_values_and_keys_land_as_confluents_serializer_has_them(
    place: Place, registry: LocalRegistry
) -> None:
    """It writes them without Avro's length; of a union, with it."""
    values = [b"", b"\x04ab", b"abc", b"\xff" * 70]
    keys = serialized(registry, f"{place.topic}-keys", "bytes", values)
    written = [
        *serialized(registry, place.topic, "bytes", values),
        *serialized(registry, place.topic, ["null", "bytes"], values),
    ]
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap})
    for value, key in zip(written, [*keys, *keys], strict=True):
        producer.produce(place.topic, value, key=key, partition=0)
    assert producer.flush(30) == 0
    feed = avro_feed(place, registry.url, "bytes", key="{format: avro, schema_file: schemas/order.avsc}")
    assert run(feed)
    assert [(r["value"], r["key_value"]) for r in landed(feed)] == [*zip(values, values, strict=True)] * 2
    assert held(feed) == []


@pytest.mark.each_lake
def test_records_of_two_versions_land_as_one_table_and_need_no_registry_later(
    place: Place, registry: LocalRegistry
) -> None:
    first = serialized(registry, place.topic, FIRST, (order(i) for i in range(200)))
    second = serialized(registry, place.topic, SECOND, (order(i, country="FR") for i in range(200, 400)))
    mixed = [v for pair in zip(first, second, strict=True) for v in pair]
    bad = [b"\0\0\0\xff\xff\x02", b"no Avro", mixed[0][:-1]]
    send(place, [*mixed, *bad, None])
    feed = avro_feed(place, registry.url, SECOND)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (401, 3)
    assert [(r["reason"], r["value"]) for r in held(feed)] == [
        ("unknown_schema", bad[0]),
        ("not_avro", bad[1]),
        ("not_avro", bad[2]),
    ]
    rows = landed(feed)
    read = [r["value"] for r in consumed(place.kafka, place.topic)]
    for row in rows[:-1]:
        expected = told_by(registry.url, read[row["kafka_offset"]])
        assert {k: row[k] for k in ("id", "amount", "lines")} == {k: expected[k] for k in ("id", "amount", "lines")}
        assert row["country"] == expected.get("country", "DE")
    assert rows[-1]["kafka_tombstone"] is True
    # Years later: the audit reconciles against Kafka, without a registry.
    gone = avro_feed(place, "http://127.0.0.1:9", SECOND)
    report = rescanned(gone)
    assert (report.problems, report.compared) == ((), 401)


def test_a_registry_that_is_away_holds_up_the_batch_and_guesses_nothing(place: Place, registry: LocalRegistry) -> None:
    send(place, serialized(registry, place.topic, FIRST, (order(i) for i in range(50))))
    away = avro_feed(place, "http://127.0.0.1:9")
    with pytest.raises(SluiceError, match=r"127\.0\.0\.1:9 cannot be asked"):
        run(away)
    assert visible(away) == []
    feed = avro_feed(place, registry.url)
    run(feed)
    assert [r["id"] for r in landed(feed)] == [f"o{i}" for i in range(50)]


class Gate:
    """In front of a registry: lets through so many questions for schemas, and then answers nothing more."""

    def __init__(self, registry: LocalRegistry, most: int) -> None:
        gate, self.left, self.asked = self, most, list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gate.asked.append(self.path)
                gate.left -= 1
                if gate.left < 0:
                    self.close_connection = True
                    return
                with urlopen(f"{registry.url}{self.path}", timeout=20) as found:
                    body = found.read()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_registry_that_is_lost_in_mid_run(place: Place, registry: LocalRegistry) -> None:
    """Of two schemas it tells one, and is gone: nothing lands half; the next run lands all, and asks for the other."""
    first = serialized(registry, place.topic, FIRST, (order(i) for i in range(50)))
    second = serialized(registry, place.topic, SECOND, (order(i, country="FR") for i in range(50, 100)))
    send(place, [*first, *second])
    gate = Gate(registry, most=1)
    try:
        feed = avro_feed(place, gate.url, SECOND)
        with pytest.raises(SluiceError, match="cannot be asked"):
            run(feed)
        assert visible(feed) == []
        gate.left, told = 1, set(gate.asked[:1])
        gate.asked.clear()
        run(feed)
        assert len(gate.asked) == 1
        assert not told & {*gate.asked}
    finally:
        gate.close()
    assert [r["id"] for r in landed(feed)] == [f"o{i}" for i in range(100)]


def test_what_an_older_schema_refused_is_replayed_by_a_newer_one(place: Place, registry: LocalRegistry) -> None:
    old, new = _states("open"), _states("open", "paid")
    send(place, serialized(registry, place.topic, new, [{"state": s} for s in ("open", "paid", "open")]))
    feed = avro_feed(place, registry.url, old)
    run(feed)
    assert [r["state"] for r in landed(feed)] == ["open", "open"]
    assert [(r["reason"], r["field"]) for r in held(feed)] == [("wrong_type", "state")]
    feed = avro_feed(place, registry.url, new)
    with edges(feed) as opened:
        done = replay(feed, opened, Filter(), None, new_owner("test"), lambda progress: None)
    assert done.outcome.fit.total() == 1
    assert [r["state"] for r in landed(feed)] == ["open", "paid", "open"]


def _states(*symbols: str) -> dict[str, Any]:
    kind = {"type": "enum", "name": "State", "symbols": symbols}
    return FIRST | {"fields": [{"name": "state", "type": kind}]}


def test_references_are_resolved_and_kept(place: Place, registry: LocalRegistry) -> None:
    from confluent_kafka.schema_registry import Schema, SchemaReference

    line, subject = f"{place.topic}-line", f"{place.topic}-value"
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        client.register_schema(line, Schema(json.dumps(LINE), "AVRO"))
        whole = Schema(json.dumps(ORDER), "AVRO", [SchemaReference("shop.Line", line, 1)])
        number = client.register_schema(subject, whole)
    found = RegistryClient(RegistrySettings(url=registry.url)).version(subject)
    assert found is not None
    assert (found.id, len(found.texts), found.version) == (number, 2, 1)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(FIRST), order(3))
    send(place, [b"\0" + struct.pack(">I", number) + out.getvalue()])
    feed = avro_feed(place, registry.url)
    run(feed)
    assert [r["lines"] for r in landed(feed)] == [[{"sku": "s0"}, {"sku": "s1"}, {"sku": "s2"}]]
    assert open_lake(feed).get(f"_sluice/orders/schemas/{number}.json")


def test_what_landed_goes_back_as_avro_by_the_feed_s_own_schema(
    place: Place, registry: LocalRegistry, fresh_topic: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    again = fresh_topic()
    orders = [order(i) for i in range(20)]
    values = serialized(registry, place.topic, FIRST, orders)
    send(place, [*values, None])
    run(avro_feed(place, registry.url))
    ranges = ["--offsets", f"{place.topic}:0:0-21"]
    asked_ = ["republish", "orders", "--topic", again, *ranges, "--project", str(place.root)]
    assert main([*asked_, "--yes", "--id", "back"]) == 0
    sent = [r["value"] for r in consumed(place.kafka, again)]
    assert sent == [*values, None]
    assert [told_by(registry.url, v) for v in sent[:-1]] == orders
    assert main(["audit", "orders", "--republished", "back", "--project", str(place.root)]) == 0

    avro_feed(place, registry.url, SECOND)
    assert main([*asked_, "--yes"]) == 3
    assert "register its schema_file as the newest version" in capsys.readouterr().err
    assert main(["audit", "orders", "--republished", "back", "--project", str(place.root)]) == 3
    assert "has another schema than when this republish was planned" in capsys.readouterr().err
