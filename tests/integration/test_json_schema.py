"""JSON Schema feeds on a real Kafka with a real registry: Confluent's own serializers write, `jsonschema` judges."""

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
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.quarantine.listing import Filter
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.local.registered_events import SAMPLES
from tests.integration.conftest import Lines
from tests.integration.support import Place, edges, rescanned, run
from tests.integration.test_avro import held, landed, send

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
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    return Place(tmp_path, kafka, fresh_topic(), lake())


def json_feed(place: Place, url: str, schema: Any = ORDER, **settings: Any) -> Feed:
    path = place.root / "schemas" / "order.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(schema))
    given = {"format": "json_schema", "schema_file": "schemas/order.json", "registry": f"{{url: '{url}'}}"}
    return place.feed(**given | settings)


def serialized(registry: LocalRegistry, topic: str, schema: Any, orders: Iterable[Any]) -> list[bytes]:
    """The orders as Confluent's serializer writes them. It checks nothing, so that we have to."""
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        serialize = JSONSerializer(json.dumps(schema), client, conf={"validate": False})
        return [serialize(o, SerializationContext(topic, MessageField.VALUE)) for o in orders]


def order(i: int, **more: Any) -> dict[str, Any]:
    lines = [{"sku": f"s{j}"} for j in range(i % 4)]
    return {"id": f"o{i}", "amount": None if i % 3 else i / 4, "state": "open", "lines": lines} | more


def test_what_jsonschema_allows_lands_and_the_account_closes_without_the_registry(
    place: Place, registry: LocalRegistry
) -> None:
    orders = [order(i) for i in range(150)]
    wrong = [order(1, state="lost"), order(2, id="x"), order(3, amount=-1), order(4, amount="much"), {"id": "o5"}]
    first = serialized(registry, place.topic, ORDER, [*orders, *wrong])
    later = serialized(registry, place.topic, LATER, [order(i, country="FR") for i in range(150, 200)])
    send(place, [*first, *later, b'{"id":"o1","state":"open"}', None])
    feed = json_feed(place, registry.url)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (201, 6)
    rows = landed(feed)
    assert [r["id"] for r in rows] == [*(f"o{i}" for i in range(200)), None]
    assert {r["_extra"] for r in rows[150:200]} == {'{"country":"FR"}'}
    judge = jsonschema.Draft7Validator(ORDER)
    assert [judge.is_valid(o) for o in (*orders, *wrong)] == [True] * 150 + [False] * 5
    refused = held(feed)
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
    gone = json_feed(place, "http://127.0.0.1:9")
    report = rescanned(gone)
    assert (report.problems, report.compared) == ((), 201)


def test_what_a_schema_refused_is_replayed_by_a_mended_one(place: Place, registry: LocalRegistry) -> None:
    send(place, serialized(registry, place.topic, ORDER, [order(0), order(1, state="sent"), order(2)]))
    feed = json_feed(place, registry.url)
    run(feed)
    assert [(r["reason"], r["field"]) for r in held(feed)] == [("not_in_set", "state")]
    states = ORDER["properties"] | {"state": {"type": "string", "enum": ["open", "paid", "sent"]}}
    feed = json_feed(place, registry.url, ORDER | {"properties": states})
    with edges(feed) as opened:
        done = replay(feed, opened, Filter(), None, new_owner("test"), lambda progress: None)
    assert done.outcome.fit.total() == 1
    assert [r["state"] for r in landed(feed)] == ["open", "sent", "open"]


def test_schemas_named_in_headers_as_confluents_serializers_do(place: Place, registry: LocalRegistry) -> None:
    """By number and by GUID. Apicurio tells no GUIDs, so that the serializer's own part writes what it would."""
    whole = serialized(registry, place.topic, ORDER, (order(i) for i in range(20)))
    number, guid = struct.unpack(">I", whole[0][1:5])[0], "c0ffee00-0000-4000-8000-000000000001"
    named = SchemaId("JSON", schema_id=number).id_to_bytes(), SchemaId("JSON", guid=guid).guid_to_bytes()
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap})
    for i, value in enumerate(whole):
        producer.produce(place.topic, value[5:], headers=[("trace", b"x"), ("__value_schema_id", named[i % 2])])
    producer.produce(place.topic, b'{"id":"o99","state":"open"}')
    producer.produce(place.topic, b'{"id":"o99"}', headers=[("__value_schema_id", named[1])])
    assert producer.flush(30) == 0
    feed = json_feed(place, registry.url, wire_format="confluent_headers")
    run(feed)
    assert [r["id"] for r in landed(feed)] == [f"o{i}" for i in range(20)]
    assert [r["reason"] for r in held(feed)] == ["not_json", "missing"]
    assert held(feed)[1]["detail"].endswith(f"(schema {guid})")


@pytest.fixture
def sluice(place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command in the place: its exit code and its document."""
    monkeypatch.chdir(place.root)

    def command(*arguments: str) -> tuple[int, Any]:
        capfd.readouterr()
        code = main([*arguments, "--json"])
        return code, json.loads(capfd.readouterr().out)

    return command


def test_commands_know_the_schema(place: Place, registry: LocalRegistry, sluice: Callable[..., Any]) -> None:
    line = {"$schema": ORDER["$schema"], "type": "object", "properties": {"sku": {"type": "string"}}}
    whole = LATER | {"properties": LATER["properties"] | {"line": {"$ref": "line.json"}}}
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        client.register_schema(f"{place.topic}-line", Schema(json.dumps(line), "JSON"))
        references = [SchemaReference("line.json", f"{place.topic}-line", 1)]
        number = client.register_schema(f"{place.topic}-value", Schema(json.dumps(whole), "JSON", references))
    states = {"state": {"type": "string", "enum": ["open"]}}
    json_feed(place, registry.url, ORDER | {"properties": ORDER["properties"] | states})
    code, shown = sluice("schema", "show", "orders")
    assert (code, shown["columns"]["id"]) == (0, "string not null")
    assert shown["expects"] == ["id matches ^o[0-9]+$", "amount is at least 0", 'state is "open"']
    code, found = sluice("schema", "diff", "orders")
    assert (code, found["id"], [c["column"] for c in found["changes"]]) == (1, number, ["country", "line"])
    assert found["expects"] == {"added": ['state is one of "open", "paid"'], "dropped": ['state is "open"']}
    code, pulled = sluice("schema", "pull", "orders")
    assert (code, pulled["columns"]["line"]) == (0, "struct<sku:string>")
    assert sluice("schema", "diff", "orders")[0] == 0
    assert "has the columns" in sluice("feeds", "check")[1]["schemas"]["orders"]["said"]
    send(place, [b"\0" + struct.pack(">I", number) + json.dumps(order(i)).encode() for i in range(3)])
    _, peeked = sluice("peek", f"{place.topic}:0:0")
    assert [r["fields"]["id"] for r in peeked["records"]] == ["o0", "o1", "o2"]


@pytest.mark.parametrize("wire", ["confluent", "confluent_headers"])
def test_produce_writes_what_the_feed_reads(
    place: Place, registry: LocalRegistry, sluice: Callable[..., Any], wire: str
) -> None:
    feed = json_feed(place, registry.url, json.loads(SAMPLES["json_schema"].schema), wire_format=wire)
    code, sent = sluice("produce", "orders", "--records", "200", "--bootstrap", place.kafka.bootstrap)
    assert (code, sent["committed"]) == (0, 200)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (200, 0)
