"""Avro feeds on a real Kafka with a real registry: Confluent's own serializers write, fastavro is the oracle."""

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
from confluent_kafka.schema_registry import SchemaRegistryClient, record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from sluice.cli.main import main
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.registry.confluent import RegistryClient
from tests.integration.conftest import Lines
from tests.integration.support import (
    FeedProject,
    consume_topic,
    list_files,
    query_files,
    replay_feed,
    rescan_feed,
    run,
)

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
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(), lake())


def write_avro_feed(project: FeedProject, url: str, schema: Any = FIRST, **settings: Any) -> Feed:
    path = project.root / "schemas" / "order.avsc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(schema))
    options = {"format": "avro", "schema_file": "schemas/order.avsc", "registry": f"{{url: '{url}', timeout: 5s}}"}
    return project.write_feed(**options | settings)


def serialize_orders(registry: LocalRegistry, topic: str, schema: Any, orders: Iterable[Any]) -> list[bytes]:
    """Serialize the orders with Confluent's serializer, which registers the schema under `topic-value`."""
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        serialize = AvroSerializer(client, json.dumps(schema))
        return [serialize(o, SerializationContext(topic, MessageField.VALUE)) for o in orders]


def send(project: FeedProject, values: Iterable[bytes | None]) -> None:
    producer = Producer({"bootstrap.servers": project.kafka.bootstrap})
    for value in values:
        producer.produce(project.topic, value, key=b"k")
    assert producer.flush(30) == 0


def make_order(i: int, **more: Any) -> dict[str, Any]:
    return {"id": f"o{i}", "amount": None if i % 3 else i / 4, "lines": [{"sku": f"s{j}"} for j in range(i % 4)]} | more


def read_landed(feed: Feed) -> list[dict[str, Any]]:
    return query_files(feed, "select * from read_parquet($files) order by kafka_offset", list_files(feed)).to_pylist()


def read_quarantined(feed: Feed) -> list[dict[str, Any]]:
    lake = open_lake(feed)
    files = (lake.open(path) for path in lake.list(f"quarantine/{feed.name}"))
    return sorted((row for file in files for row in pq.read_table(file).to_pylist()), key=lambda r: int(r["offset"]))


def decode_by_fastavro(url: str, value: bytes) -> Any:
    """Decode a record with fastavro and the schema that the registry has for it."""
    return fastavro.schemaless_reader(io.BytesIO(value[5:]), _fetch_schema(url, struct.unpack(">I", value[1:5])[0]))


@cache
def _fetch_schema(url: str, number: int) -> Any:
    with SchemaRegistryClient({"url": url, "timeout": 20}) as client:
        schema = client.get_schema(number)
    return fastavro.parse_schema(json.loads(str(schema.schema_str)))


def test_top_level_bytes_match_the_confluent_serializer(project: FeedProject, registry: LocalRegistry) -> None:
    """The serializer writes plain bytes without Avro's length prefix, and bytes in a union with it."""
    values = [b"", b"\x04ab", b"abc", b"\xff" * 70]
    keys = serialize_orders(registry, f"{project.topic}-keys", "bytes", values)
    written = [
        *serialize_orders(registry, project.topic, "bytes", values),
        *serialize_orders(registry, project.topic, ["null", "bytes"], values),
    ]
    producer = Producer({"bootstrap.servers": project.kafka.bootstrap})
    for value, key in zip(written, [*keys, *keys], strict=True):
        producer.produce(project.topic, value, key=key, partition=0)
    assert producer.flush(30) == 0
    feed = write_avro_feed(project, registry.url, "bytes", key="{format: avro, schema_file: schemas/order.avsc}")
    assert run(feed)
    assert [(r["value"], r["key_value"]) for r in read_landed(feed)] == [*zip(values, values, strict=True)] * 2
    assert read_quarantined(feed) == []


@pytest.mark.each_lake
def test_records_of_two_versions_land_as_one_table_and_need_no_registry_later(
    project: FeedProject, registry: LocalRegistry
) -> None:
    first = serialize_orders(registry, project.topic, FIRST, (make_order(i) for i in range(200)))
    second = serialize_orders(registry, project.topic, SECOND, (make_order(i, country="FR") for i in range(200, 400)))
    mixed = [v for pair in zip(first, second, strict=True) for v in pair]
    bad = [b"\0\0\0\xff\xff\x02", b"no Avro", mixed[0][:-1]]
    send(project, [*mixed, *bad, None])
    feed = write_avro_feed(project, registry.url, SECOND)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (401, 3)
    assert [(r["reason"], r["value"]) for r in read_quarantined(feed)] == [
        ("unknown_schema", bad[0]),
        ("not_avro", bad[1]),
        ("not_avro", bad[2]),
    ]
    rows = read_landed(feed)
    read = [r["value"] for r in consume_topic(project.kafka, project.topic)]
    for row in rows[:-1]:
        expected = decode_by_fastavro(registry.url, read[row["kafka_offset"]])
        assert {k: row[k] for k in ("id", "amount", "lines")} == {k: expected[k] for k in ("id", "amount", "lines")}
        assert row["country"] == expected.get("country", "DE")
    assert rows[-1]["kafka_tombstone"] is True
    # Years later: the audit reconciles against Kafka, without a registry.
    offline = write_avro_feed(project, "http://127.0.0.1:9", SECOND)
    report = rescan_feed(offline)
    assert (report.problems, report.compared) == ((), 401)


def test_unreachable_registry_stops_the_batch_until_the_next_run(project: FeedProject, registry: LocalRegistry) -> None:
    send(project, serialize_orders(registry, project.topic, FIRST, (make_order(i) for i in range(50))))
    away = write_avro_feed(project, "http://127.0.0.1:9")
    with pytest.raises(SluiceError, match=r"127\.0\.0\.1:9 cannot be asked"):
        run(away)
    assert list_files(away) == []
    feed = write_avro_feed(project, registry.url)
    run(feed)
    assert [r["id"] for r in read_landed(feed)] == [f"o{i}" for i in range(50)]


class Gate:
    """A proxy for a registry: forwards a limited number of requests, and then drops connections."""

    def __init__(self, registry: LocalRegistry, limit: int) -> None:
        gate, self.remaining, self.paths = self, limit, list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gate.paths.append(self.path)
                gate.remaining -= 1
                if gate.remaining < 0:
                    self.close_connection = True
                    return
                with urlopen(f"{registry.url}{self.path}", timeout=20) as response:
                    body = response.read()
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


def test_run_lands_nothing_if_the_registry_is_lost_midway(project: FeedProject, registry: LocalRegistry) -> None:
    """The registry fails after the first of two schemas: nothing lands; the next run fetches only the second one."""
    first = serialize_orders(registry, project.topic, FIRST, (make_order(i) for i in range(50)))
    second = serialize_orders(registry, project.topic, SECOND, (make_order(i, country="FR") for i in range(50, 100)))
    send(project, [*first, *second])
    gate = Gate(registry, limit=1)
    try:
        feed = write_avro_feed(project, gate.url, SECOND)
        with pytest.raises(SluiceError, match="cannot be asked"):
            run(feed)
        assert list_files(feed) == []
        gate.remaining, fetched = 1, set(gate.paths[:1])
        gate.paths.clear()
        run(feed)
        assert len(gate.paths) == 1
        assert not fetched & {*gate.paths}
    finally:
        gate.close()
    assert [r["id"] for r in read_landed(feed)] == [f"o{i}" for i in range(100)]


def test_records_refused_by_an_old_schema_are_replayed_by_a_new_schema(
    project: FeedProject, registry: LocalRegistry
) -> None:
    old, new = _build_state_schema("open"), _build_state_schema("open", "paid")
    send(project, serialize_orders(registry, project.topic, new, [{"state": s} for s in ("open", "paid", "open")]))
    feed = write_avro_feed(project, registry.url, old)
    run(feed)
    assert [r["state"] for r in read_landed(feed)] == ["open", "open"]
    assert [(r["reason"], r["field"]) for r in read_quarantined(feed)] == [("wrong_type", "state")]
    feed = write_avro_feed(project, registry.url, new)
    assert replay_feed(feed).outcome.fit.total() == 1
    assert [r["state"] for r in read_landed(feed)] == ["open", "paid", "open"]


def _build_state_schema(*symbols: str) -> dict[str, Any]:
    kind = {"type": "enum", "name": "State", "symbols": symbols}
    return FIRST | {"fields": [{"name": "state", "type": kind}]}


def test_references_are_resolved_and_stored(project: FeedProject, registry: LocalRegistry) -> None:
    from confluent_kafka.schema_registry import Schema, SchemaReference

    line, subject = f"{project.topic}-line", f"{project.topic}-value"
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        client.register_schema(line, Schema(json.dumps(LINE), "AVRO"))
        schema = Schema(json.dumps(ORDER), "AVRO", [SchemaReference("shop.Line", line, 1)])
        number = client.register_schema(subject, schema)
    version = RegistryClient(RegistrySettings(url=registry.url)).version(subject)
    assert version is not None
    assert (version.id, len(version.texts), version.version) == (number, 2, 1)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(FIRST), make_order(3))
    send(project, [b"\0" + struct.pack(">I", number) + out.getvalue()])
    feed = write_avro_feed(project, registry.url)
    run(feed)
    assert [r["lines"] for r in read_landed(feed)] == [[{"sku": "s0"}, {"sku": "s1"}, {"sku": "s2"}]]
    assert open_lake(feed).get(f"_sluice/orders/schemas/{number}.json")


def test_landed_rows_are_republished_as_avro_with_the_feed_schema(
    project: FeedProject, registry: LocalRegistry, fresh_topic: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = fresh_topic()
    orders = [make_order(i) for i in range(20)]
    values = serialize_orders(registry, project.topic, FIRST, orders)
    send(project, [*values, None])
    run(write_avro_feed(project, registry.url))
    ranges = ["--offsets", f"{project.topic}:0:0-21"]
    command = ["republish", "orders", "--topic", target, *ranges, "--project", str(project.root)]
    assert main([*command, "--yes", "--id", "back"]) == 0
    sent = [r["value"] for r in consume_topic(project.kafka, target)]
    assert sent == [*values, None]
    assert [decode_by_fastavro(registry.url, v) for v in sent[:-1]] == orders
    assert main(["audit", "orders", "--republished", "back", "--project", str(project.root)]) == 0

    write_avro_feed(project, registry.url, SECOND)
    assert main([*command, "--yes"]) == 3
    assert "register its schema_file as the newest version" in capsys.readouterr().err
    assert main(["audit", "orders", "--republished", "back", "--project", str(project.root)]) == 3
    assert "has another schema than when this republish was planned" in capsys.readouterr().err


REFUND: dict[str, Any] = {
    "type": "record",
    "name": "Refund",
    "namespace": "shop",
    "fields": [{"name": "id", "type": "string"}, {"name": "cents", "type": "long"}],
}


@pytest.mark.parametrize("by", ["message", "subject"])
def test_one_topic_becomes_datasets_by_the_names_of_records(
    project: FeedProject, registry: LocalRegistry, by: str
) -> None:
    """Under RecordNameStrategy, by Confluent's serializer; records of a third name have no output."""
    schemas = {"shop.Order": FIRST, "shop.Refund": REFUND, "shop.Gift": REFUND | {"name": "Gift"}}
    settings: dict[str, Any] = {"subject.name.strategy": record_subject_name_strategy}
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        serialize = {n: AvroSerializer(client, json.dumps(s), conf=settings) for n, s in schemas.items()}
        context, names = SerializationContext(project.topic, MessageField.VALUE), [*schemas] * 20
        bodies = [make_order(i) if n == "shop.Order" else {"id": f"r{i}", "cents": i} for i, n in enumerate(names)]
        values = [serialize[n](body, context) for n, body in zip(names, bodies, strict=True)]
        assert set(client.get_subjects()) >= {*schemas}
    bad = [b"\0\0\0\xff\xff\x02", b"no Avro"]
    send(project, [*values, *bad, None])
    folder = project.root / "schemas"
    folder.mkdir()
    into = {}
    for name, schema in [*schemas.items()][:2]:
        (folder / f"{name}.avsc").write_text(json.dumps(schema))
        into[name.lower().replace(".", "_")] = {"values": [name], "schema_file": f"schemas/{name}.avsc"}
    split = json.dumps({"by": {by: True}, "into": into, "otherwise": "quarantine"})
    options: dict[str, Any] = {"format": "avro", "split": split, "policies": "{quarantine_limit: {share: 1}}"}
    feed = project.write_feed(**options, registry=f"{{url: '{registry.url}', timeout: 5s}}")
    run(feed)
    by_output: dict[str, dict[int, Any]] = {}
    lake = open_lake(feed)
    for path in list_files(feed):
        rows = pq.read_table(lake.open(path)).to_pylist()
        by_output.setdefault(path.split("/")[2], {}).update({row["kafka_offset"]: row for row in rows})
    assert {o: [*rows] for o, rows in by_output.items()} == {
        "shop_order": [*range(0, 60, 3)],
        "shop_refund": [*range(1, 60, 3)],
    }
    for rows in by_output.values():
        for offset, row in rows.items():
            expected = decode_by_fastavro(registry.url, values[offset])
            assert {k: row[k] for k in expected} == expected
    refused = {r["offset"]: (r["reason"], r["detail"], r["value"]) for r in read_quarantined(feed)}
    third = {o: ("no output", "message = shop.Gift", values[o]) for o in range(2, 60, 3)}
    assert refused == third | {
        60: ("no message name", "the registry has no schema 65535", bad[0]),
        61: ("no message name", "it does not name its schema as the feed's wire_format has it", bad[1]),
        62: ("no output", "message is missing", None),
    }
    report = rescan_feed(project.write_feed(**options, registry="{url: 'http://127.0.0.1:9', timeout: 5s}"))
    assert (report.problems, report.compared) == ((), 40)
