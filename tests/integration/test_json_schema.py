"""JSON Schema feeds on a real Kafka with a real registry: Confluent's serializers write, `jsonschema` is the oracle."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.serde import SchemaId
from confluent_kafka.serialization import MessageField, SerializationContext

from sluice.cli.main import main
from sluice.pipelines.feed.feed import Feed
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.local.registered_events import SAMPLES
from tests.integration.conftest import Lines
from tests.integration.support import FeedProject, replay_feed, rescan_feed, run
from tests.integration.test_avro import read_landed, read_quarantined, send

pytestmark = pytest.mark.kafka

ORDER: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^o[0-9]+$"},
        "amount": {"type": ["number", "null"], "minimum": 0},
        "state": {"type": "string", "enum": ["open", "paid"]},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}}}},
    },
    "required": ["id", "state"],
}
LATER = ORDER | {"properties": ORDER["properties"] | {"country": {"type": "string"}}}


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(), lake())


def write_json_feed(project: FeedProject, url: str, schema: Any = ORDER, **settings: Any) -> Feed:
    path = project.root / "schemas" / "order.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(schema))
    options = {"format": "json_schema", "schema_file": "schemas/order.json", "registry": f"{{url: '{url}'}}"}
    return project.write_feed(**options | settings)


def serialize_orders(registry: LocalRegistry, topic: str, schema: Any, orders: Iterable[Any]) -> list[bytes]:
    """Serialize the orders with Confluent's serializer, without its validation."""
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        serialize = JSONSerializer(json.dumps(schema), client, conf={"validate": False})
        return [serialize(o, SerializationContext(topic, MessageField.VALUE)) for o in orders]


def make_order(i: int, **more: Any) -> dict[str, Any]:
    lines = [{"sku": f"s{j}"} for j in range(i % 4)]
    return {"id": f"o{i}", "amount": None if i % 3 else i / 4, "state": "open", "lines": lines} | more


def test_valid_records_land_and_the_audit_needs_no_registry(project: FeedProject, registry: LocalRegistry) -> None:
    orders = [make_order(i) for i in range(150)]
    wrong = [
        make_order(1, state="lost"),
        make_order(2, id="x"),
        make_order(3, amount=-1),
        make_order(4, amount="much"),
        {"id": "o5"},
    ]
    first = serialize_orders(registry, project.topic, ORDER, [*orders, *wrong])
    later = serialize_orders(registry, project.topic, LATER, [make_order(i, country="FR") for i in range(150, 200)])
    send(project, [*first, *later, b'{"id":"o1","state":"open"}', None])
    feed = write_json_feed(project, registry.url)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (201, 6)
    rows = read_landed(feed)
    assert [r["id"] for r in rows] == [*(f"o{i}" for i in range(200)), None]
    assert {r["_extra"] for r in rows[150:200]} == {'{"country":"FR"}'}
    validator = jsonschema.Draft7Validator(ORDER)
    assert [validator.is_valid(o) for o in (*orders, *wrong)] == [True] * 150 + [False] * 5
    refused = read_quarantined(feed)
    assert [(r["stage"], r["reason"], r["field"]) for r in refused] == [
        ("contract", "not_in_set", "state"),
        ("contract", "no_match", "id"),
        ("contract", "out_of_bounds", "amount"),
        ("schema", "wrong_type", "amount"),
        ("schema", "missing", "state"),
        ("decode", "not_json", None),
    ]
    number = struct.unpack(">I", first[0][1:5])[0]
    assert refused[3]["detail"].endswith(f"(schema {number})")
    # Years later: the audit reconciles against Kafka, without a registry.
    offline = write_json_feed(project, "http://127.0.0.1:9")
    report = rescan_feed(offline)
    assert (report.problems, report.compared) == ((), 201)


def test_refused_records_are_replayed_with_a_fixed_schema(project: FeedProject, registry: LocalRegistry) -> None:
    send(
        project,
        serialize_orders(registry, project.topic, ORDER, [make_order(0), make_order(1, state="sent"), make_order(2)]),
    )
    feed = write_json_feed(project, registry.url)
    run(feed)
    assert [(r["reason"], r["field"]) for r in read_quarantined(feed)] == [("not_in_set", "state")]
    states = ORDER["properties"] | {"state": {"type": "string", "enum": ["open", "paid", "sent"]}}
    feed = write_json_feed(project, registry.url, ORDER | {"properties": states})
    assert replay_feed(feed).outcome.fit.total() == 1
    assert [r["state"] for r in read_landed(feed)] == ["open", "sent", "open"]


def test_schema_ids_in_confluent_headers_are_resolved(project: FeedProject, registry: LocalRegistry) -> None:
    """By number and by GUID. Apicurio returns no GUIDs, so the test makes the header values itself by `SchemaId`."""
    framed = serialize_orders(registry, project.topic, ORDER, (make_order(i) for i in range(20)))
    number, guid = struct.unpack(">I", framed[0][1:5])[0], "c0ffee00-0000-4000-8000-000000000001"
    header_values = SchemaId("JSON", schema_id=number).id_to_bytes(), SchemaId("JSON", guid=guid).guid_to_bytes()
    producer = Producer({"bootstrap.servers": project.kafka.bootstrap})
    for i, value in enumerate(framed):
        producer.produce(
            project.topic, value[5:], headers=[("trace", b"x"), ("__value_schema_id", header_values[i % 2])]
        )
    producer.produce(project.topic, b'{"id":"o99","state":"open"}')
    producer.produce(project.topic, b'{"id":"o99"}', headers=[("__value_schema_id", header_values[1])])
    assert producer.flush(30) == 0
    feed = write_json_feed(project, registry.url, wire_format="confluent_headers")
    run(feed)
    assert [r["id"] for r in read_landed(feed)] == [f"o{i}" for i in range(20)]
    assert [r["reason"] for r in read_quarantined(feed)] == ["not_json", "missing"]
    assert read_quarantined(feed)[1]["detail"].endswith(f"(schema {guid})")


@pytest.fixture
def sluice(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs a command in the project's folder, and returns its exit code and document."""
    monkeypatch.chdir(project.root)

    def invoke(*arguments: str) -> tuple[int, Any]:
        capfd.readouterr()
        code = main([*arguments, "--json"])
        return code, json.loads(capfd.readouterr().out)

    return invoke


def test_commands_use_the_registered_schema(
    project: FeedProject, registry: LocalRegistry, sluice: Callable[..., Any]
) -> None:
    line = {"$schema": ORDER["$schema"], "type": "object", "properties": {"sku": {"type": "string"}}}
    registered = LATER | {"properties": LATER["properties"] | {"line": {"$ref": "line.json"}}}
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        client.register_schema(f"{project.topic}-line", Schema(json.dumps(line), "JSON"))
        references = [SchemaReference("line.json", f"{project.topic}-line", 1)]
        number = client.register_schema(f"{project.topic}-value", Schema(json.dumps(registered), "JSON", references))
    states = {"state": {"type": "string", "enum": ["open"]}}
    write_json_feed(project, registry.url, ORDER | {"properties": ORDER["properties"] | states})
    code, schema = sluice("schema", "show", "orders")
    assert (code, schema["columns"]["id"]) == (0, "string not null")
    assert schema["expects"] == ["id matches ^o[0-9]+$", "amount is at least 0", 'state is "open"']
    code, diff = sluice("schema", "diff", "orders")
    assert (code, diff["id"], [c["column"] for c in diff["changes"]]) == (1, number, ["country", "line"])
    assert diff["expects"] == {"added": ['state is one of "open", "paid"'], "dropped": ['state is "open"']}
    code, pulled = sluice("schema", "pull", "orders")
    assert (code, pulled["columns"]["line"]) == (0, "struct<sku:string>")
    assert sluice("schema", "diff", "orders")[0] == 0
    assert "has the columns" in sluice("feeds", "check")[1]["schemas"]["orders"]["said"]
    send(project, [b"\0" + struct.pack(">I", number) + json.dumps(make_order(i)).encode() for i in range(3)])
    _, peeked = sluice("peek", f"{project.topic}:0:0")
    assert [r["fields"]["id"] for r in peeked["records"]] == ["o0", "o1", "o2"]


@pytest.mark.parametrize("wire", ["confluent", "confluent_headers"])
def test_produce_writes_records_that_the_feed_reads(
    project: FeedProject, registry: LocalRegistry, sluice: Callable[..., Any], wire: str
) -> None:
    feed = write_json_feed(project, registry.url, json.loads(SAMPLES["json_schema"].schema), wire_format=wire)
    code, sent = sluice("produce", "orders", "--records", "200", "--bootstrap", project.kafka.bootstrap)
    assert (code, sent["committed"]) == (0, 200)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (200, 0)
