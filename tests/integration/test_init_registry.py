"""`sluice init` on topics whose values name schemas of a registry, each proposal followed to its landed rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, topic_record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable
from kafka import KafkaProducer

from sluice.pipelines.records.protobuf.reader_schema import from_file
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from tests.integration import test_avro as avro
from tests.integration import test_json_schema as json_schema
from tests.integration import test_protobuf as protobuf
from tests.integration.conftest import Call
from tests.integration.support import FeedProject
from tests.integration.test_current import AVRO_ENVELOPE, make_changes, make_typed_change
from tests.pipelines.records.protobuf.rows import NOWHERE, make_message_class

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic())


def send(project: FeedProject, values: Iterable[bytes | None], keys: Iterable[bytes] = ()) -> None:
    names, producer = iter(keys), KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for value in values:
        producer.send(project.topic, value, next(names, b"k"))
    producer.close()


def propose(project: FeedProject, call: Call, *words: str) -> tuple[int, Any]:
    return call("init", "orders", "--bootstrap", project.kafka.bootstrap, "--topic", project.topic, *words, "--json")


@pytest.mark.parametrize("form", [avro, json_schema, protobuf])
def test_values_of_a_registry_get_the_schema_of_their_subject(
    form: Any, project: FeedProject, registry: LocalRegistry, call: Call
) -> None:
    sent = {
        avro: lambda: avro.serialize_orders(registry, project.topic, avro.FIRST, map(avro.make_order, range(40))),
        json_schema: lambda: json_schema.serialize_orders(
            registry, project.topic, json_schema.ORDER, map(json_schema.make_order, range(40))
        ),
        protobuf: lambda: protobuf.serialize_orders(
            registry, project.topic, [protobuf.make_order(protobuf.FIRST, i) for i in range(40)]
        ),
    }[form]()
    send(project, [*sent, None])
    code, proposal = propose(project, call, "--registry", registry.url)
    assert code == 0, proposal
    assert proposal["format"] == form.__name__.rpartition("test_")[2]
    assert (proposal["fit"], proposal["misfits"]) == (41, [])
    assert (project.root / proposal["outputs"][0]["schema_file"]).exists()
    assert "id" in proposal["columns"]
    code, printed = call("feeds", "check")
    assert code == 0, printed
    code, printed = call("run", "orders", "--no-dagster", "--engine", "processes")
    assert code == 0, printed
    code, checked = call("audit", "orders", "--rescan", "--json")
    assert (code, checked["feeds"][0]["landed"] if "feeds" in checked else 41) == (0, 41)


def test_changes_of_debezium_get_the_key_of_the_keys_schema(
    project: FeedProject, registry: LocalRegistry, call: Call
) -> None:
    changes = make_changes(random.Random(5), 120, truncations=False)
    values = avro.serialize_orders(registry, project.topic, AVRO_ENVELOPE, map(make_typed_change, changes))
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        serialize, context = (
            AvroSerializer(client, json.dumps(KEY)),
            SerializationContext(project.topic, MessageField.KEY),
        )
        keys = [serialize({"id": (value["after"] or value["before"])["id"]}, context) for _, value in changes]
    send(project, values, keys)
    code, proposal = propose(project, call, "--registry", registry.url)
    assert code == 0, proposal
    assert "changes: {format: debezium, key: [id]}" in proposal["text"]
    path = project.root / "feeds" / "orders.yaml"
    path.write_text(path.read_text() + "table: {delta: {}, current: true}\n")
    code, printed = call("run", "orders", "--no-dagster", "--engine", "processes")
    assert code == 0, printed
    rows: dict[int, Any] = {}
    for _, value in changes:
        rows |= {value["after"]["id"]: value["after"]["name"]} if value["after"] else {}
        if value["op"] == "d":
            del rows[value["before"]["id"]]
    read = DeltaTable(f"{project.root}/.sluice/lake/tables/orders_current").to_pyarrow_table().to_pylist()
    assert {row["id"]: row["name"] for row in read} == rows


@pytest.mark.parametrize("form", ["avro", "protobuf"])
def test_values_of_several_messages_are_split_by_message(
    form: str, project: FeedProject, registry: LocalRegistry, call: Call
) -> None:
    """Subjects are those of the record-name strategy, so that no subject of the topic has a schema."""
    sent, values = list[bytes](), {"shop.Order": 30, "shop.Refund": 20, "shop.Rare": 2}
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        conf = {"subject.name.strategy": topic_record_subject_name_strategy}
        for name, number in values.items():
            context = SerializationContext(project.topic, MessageField.VALUE)
            if form == "avro":
                fields = [{"name": f"{name[5:].lower()}_id", "type": "long"}]
                schema = {"type": "record", "name": name, "fields": fields}
                serialize = AvroSerializer(client, json.dumps(schema), conf=conf)
                sent += [serialize({fields[0]["name"]: i}, context) for i in range(number)]
            else:
                text = f'syntax = "proto3"; package shop; message {name[5:]} {{ int64 {name[5:].lower()}_id = 1; }}'
                message = make_message_class(from_file(text, NOWHERE, name)[0])
                to_bytes = ProtobufSerializer(message, client, conf | {"use.deprecated.format": False})
                sent += [to_bytes(message(**{f"{name[5:].lower()}_id": i}), context) for i in range(number)]
    send(project, sent)
    code, proposal = propose(project, call, "--registry", registry.url)
    assert code == 0, proposal
    assert (proposal["split"], proposal["rest"], proposal["format"]) == ({"message": "true"}, {"shop.Rare": 2}, form)
    assert {o["name"]: o["values"] for o in proposal["outputs"]} == {
        "shop_order": ["shop.Order"],
        "shop_refund": ["shop.Refund"],
    }
    assert (proposal["fit"], len(proposal["misfits"])) == (50, 2)
    code, printed = call("feeds", "check")
    assert code == 0, printed
    code, printed = call("run", "orders", "--no-dagster", "--engine", "processes")
    assert code == 0, printed
    for output, column, number in (("shop_order", "order_id", 30), ("shop_refund", "refund_id", 20)):
        files = f"{project.root}/.sluice/lake/data/orders/{output}/**/*.parquet"
        rows = duckdb.sql(f"select {column} from '{files}' where {column} >= 0").fetchall()
        assert sorted(n for (n,) in rows) == list(range(number))


def test_records_without_a_registry_stay_raw_with_the_remedy(
    project: FeedProject, registry: LocalRegistry, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors leave no file: not the feed's, and not the schema's."""
    send(project, avro.serialize_orders(registry, project.topic, avro.FIRST, map(avro.make_order, range(10))))
    assert propose(project, call, "--registry", "http://127.0.0.1:9")[0] == 1
    assert propose(project, call, "--registry", registry.url, "--registry", "password=open")[0] == 2
    assert [path for path in project.root.rglob("*") if path.is_file()] == []
    code, proposal = propose(project, call)
    assert (code, proposal["format"]) == (0, "raw")
    assert "--registry URL gives columns" in proposal["text"]
    (project.root / "feeds/orders.yaml").unlink()
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", registry.url)
    code, proposal = propose(project, call)
    assert (code, proposal["format"], proposal["fit"]) == (0, "avro", 10)
    assert registry.url not in proposal["text"]


def test_unknown_numbers_of_schemas_are_an_error_with_remedies(
    project: FeedProject, registry: LocalRegistry, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    send(project, [b"\0\0\0\xff\xff1234567"] * 10)
    code, document = propose(project, call, "--registry", registry.url)
    assert code == 1
    assert "has no schema 65535" in json.dumps(document)
    assert propose(project, call, "--raw")[0] == 0


def test_schema_without_columns_is_an_error_and_leaves_no_file(
    project: FeedProject, registry: LocalRegistry, call: Call
) -> None:
    node = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        number = client.register_schema(f"{project.topic}-value", Schema(json.dumps(node), "AVRO"))
    send(project, [b"\0" + number.to_bytes(4, "big") + b"\0"] * 10)
    code, document = propose(project, call, "--registry", registry.url)
    assert code == 1
    assert "makes no columns" in json.dumps(document)
    assert [path for path in project.root.rglob("*") if path.is_file()] == []
