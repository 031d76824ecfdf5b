"""Protobuf feeds on a real Kafka with a real registry: Confluent's serializer writes, Google's library checks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from sluice.cli.main import main
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.protobuf.reader_schema import from_file
from sluice.pipelines.validation.drift import sum_drift
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from tests.integration.conftest import Lines
from tests.integration.support import (
    FeedProject,
    consume_topic,
    list_files,
    replay_feed,
    rescan_feed,
    run,
)
from tests.integration.test_avro import Gate, read_landed, read_quarantined, send
from tests.pipelines.records.protobuf.rows import NOWHERE, make_message_class, read_by_google

pytestmark = pytest.mark.kafka

FIRST = """\
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
enum State { OPEN = 0; PAID = 1; }
message Line { string sku = 1; }
message Order {
  string id = 1;
  optional double amount = 2;
  repeated Line lines = 3;
  google.protobuf.Timestamp ts = 4;
  State state = 5;
  map<string, int32> counts = 6;
}
"""
SECOND = FIRST.replace("counts = 6;", "counts = 6;\n  string country = 7;").replace("PAID = 1;", "PAID = 1; SENT = 2;")


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(), lake())


def write_protobuf_feed(project: FeedProject, url: str, text: str = FIRST, **settings: Any) -> Feed:
    _write_schema(project, text)
    return project.write_feed(**_build_format_options() | {"registry": f"{{url: '{url}', timeout: 5s}}"} | settings)


def _write_schema(project: FeedProject, text: str) -> None:
    path = project.root / "schemas" / "order.proto"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def _build_format_options() -> dict[str, Any]:
    return {"format": "protobuf", "schema_file": "schemas/order.proto", "message": "shop.Order"}


def load_order_class(text: str) -> Any:
    """Returns Google's message class of an order in a `.proto` text."""
    return make_message_class(from_file(text, NOWHERE, "shop.Order")[0])


def make_order(text: str, i: int, **more: Any) -> Any:
    message = load_order_class(text)(id=f"o{i}", state=i % 2, counts={"a": i, "b": -i}, **more)
    message.ts.FromMicroseconds(1_700_000_000_000_000 + i)
    for j in range(i % 4):
        message.lines.add(sku=f"s{j}")
    if not i % 3:
        message.amount = i / 4
    return message


def serialize_orders(registry: LocalRegistry, topic: str, orders: Iterable[Any]) -> list[bytes]:
    """Serialize the orders with Confluent's serializer, which registers their schema under `topic-value`."""
    orders = list(orders)
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        serialize = ProtobufSerializer(type(orders[0]), client, {"use.deprecated.format": False})
        return [serialize(o, SerializationContext(topic, MessageField.VALUE)) for o in orders]


def as_google(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of a landed row in the form of `read_by_google`."""
    ts, amount = row["ts"].replace(tzinfo=row["ts"].tzinfo or UTC), row["amount"]
    micros = (ts - datetime(1970, 1, 1, tzinfo=UTC)) // (datetime.resolution)
    columns = {k: row[k] for k in ("id", "lines", "state", "country") if k in row}
    return columns | {
        "ts": micros,
        "amount": None if amount is None else repr(amount),
        "counts": sorted(row["counts"]),
    }


@pytest.mark.each_lake
def test_records_of_two_versions_match_google_and_need_no_registry_later(
    project: FeedProject, registry: LocalRegistry
) -> None:
    first = serialize_orders(registry, project.topic, (make_order(FIRST, i) for i in range(100)))
    second = serialize_orders(registry, project.topic, (make_order(SECOND, i, country="FR") for i in range(100, 200)))
    mixed = [v for pair in zip(first, second, strict=True) for v in pair]
    header = first[0][:7]
    assert header[5:] == b"\x02\x02", "the second message of its file"
    bad = [
        b"\0\0\0\xff\xff\0\x0a\0",
        b"no Protobuf",
        mixed[0][:-1],
        header[:5] + b"\0\x0a\x02o1",
        header + b"\x0a\x01\xff",
    ]
    send(project, [*mixed, *bad, None])
    feed = write_protobuf_feed(project, registry.url, SECOND)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (201, 5)
    refused = read_quarantined(feed)
    assert [(r["reason"], r["value"]) for r in refused] == list(
        zip(("unknown_schema", "not_protobuf", "not_protobuf", "incompatible", "invalid_utf8"), bad, strict=True)
    )
    ids = [struct.unpack(">I", v[1:5])[0] for v in (first[0], second[0])]
    assert ids[0] != ids[1]
    assert f"(schema {ids[0]})" in refused[2]["detail"]
    assert refused[4]["byte"] >= 7
    rows = read_landed(feed)
    kind = load_order_class(SECOND)
    assert [as_google(r) for r in rows[:-1]] == [read_by_google(kind, v[7:]) for v in mixed]
    assert rows[-1]["kafka_tombstone"] is True
    hours = {path.rpartition("/")[0].rpartition("/")[2] for path in list_files(feed)}
    assert all(part.startswith("kafka_window_hour=") for part in hours)
    # Years later: the audit reconciles against Kafka, without a registry.
    offline = write_protobuf_feed(project, "http://127.0.0.1:9", SECOND)
    report = rescan_feed(offline)
    assert (report.problems, report.compared) == ((), 201)


def test_run_lands_nothing_if_the_registry_is_lost_midway(project: FeedProject, registry: LocalRegistry) -> None:
    """The registry fails after one of two schemas: nothing lands; the next run lands all, the new field as drift."""
    first = serialize_orders(registry, project.topic, (make_order(FIRST, i) for i in range(20)))
    second = serialize_orders(registry, project.topic, (make_order(SECOND, i, country="FR") for i in range(20, 40)))
    send(project, [*first, *second])
    gate = Gate(registry, limit=1)
    try:
        feed = write_protobuf_feed(project, gate.url)
        with pytest.raises(SluiceError, match="cannot be asked"):
            run(feed)
        assert list_files(feed) == []
        gate.remaining = 100
        (batch,) = run(feed).batches
    finally:
        gate.close()
    assert [r["id"] for r in read_landed(feed)] == [f"o{i}" for i in range(40)]
    drift = [(d.kind, d.field, d.records) for d in sum_drift(batch.receipts) if d.kind is DriftKind.NEW]
    assert drift == [(DriftKind.NEW, "country", 20)]


def test_new_enum_symbol_is_replayed_with_a_newer_schema_file(project: FeedProject, registry: LocalRegistry) -> None:
    orders = [make_order(SECOND, i) for i in range(3)]
    orders[1].state = 2
    send(project, serialize_orders(registry, project.topic, orders))
    feed = write_protobuf_feed(project, registry.url)
    run(feed)
    assert [r["state"] for r in read_landed(feed)] == ["OPEN", "OPEN"]
    assert [(r["reason"], r["field"]) for r in read_quarantined(feed)] == [("wrong_type", "state")]
    feed = write_protobuf_feed(project, registry.url, SECOND)
    assert replay_feed(feed).outcome.fit.total() == 1
    assert [r["state"] for r in read_landed(feed)] == ["OPEN", "SENT", "OPEN"]


def test_bare_records_need_no_registry(project: FeedProject, capsys: pytest.CaptureFixture[str]) -> None:
    values = [make_order(FIRST, i).SerializeToString() for i in range(20)]
    send(project, [*values, b"\x0a\x05o"])
    _write_schema(project, FIRST)
    feed = project.write_feed(**_build_format_options(), wire_format="bare")
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (20, 1)
    kind = load_order_class(FIRST)
    assert [as_google(r) for r in read_landed(feed)] == [read_by_google(kind, v) for v in values]
    assert [(r["reason"], r["value"]) for r in read_quarantined(feed)] == [("not_protobuf", b"\x0a\x05o")]
    assert main(["audit", "orders", "--project", str(project.root)]) == 0


def test_republished_rows_match_confluent_deserializer_and_google(
    project: FeedProject, registry: LocalRegistry, fresh_topic: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is the second of its file: the registry's number and the message's indexes precede it."""
    target, orders = fresh_topic(), [make_order(FIRST, i) for i in range(20)]
    values = serialize_orders(registry, project.topic, orders)
    send(project, [*values, None])
    run(write_protobuf_feed(project, registry.url))
    ranges = ["--offsets", f"{project.topic}:0:0-21"]
    command = ["republish", "orders", "--topic", target, *ranges, "--project", str(project.root)]
    assert main([*command, "--yes", "--id", "back"]) == 0
    sent = [r["value"] for r in consume_topic(project.kafka, target)]
    assert [None if v is None else v[:7] for v in sent] == [None if v is None else v[:7] for v in [*values, None]]
    kind = type(orders[0])
    deserialize = ProtobufDeserializer(kind, {"use.deprecated.format": False})
    assert [deserialize(v, SerializationContext(target, MessageField.VALUE)) for v in sent[:-1]] == orders
    assert main(["audit", "orders", "--republished", "back", "--project", str(project.root)]) == 0

    write_protobuf_feed(project, registry.url, SECOND)
    assert main([*command, "--yes"]) == 3
    assert "register its schema_file as the newest version" in capsys.readouterr().err
    write_protobuf_feed(
        project, registry.url, FIRST.replace("message Line {", "message First { int32 x = 1; }\nmessage Line {")
    )
    assert main([*command, "--yes"]) == 3, "the same message, and other indexes"


MANY = "".join(f"message M{n} {{ string id = 1; }}\n" for n in range(200))
BUS = f'syntax = "proto3";\npackage bus;\n{MANY}message Outer {{ message Inner {{ int64 n = 1; }} string id = 1; }}\n'


def test_one_topic_becomes_datasets_by_the_names_of_messages(project: FeedProject, registry: LocalRegistry) -> None:
    """Messages of one file, whose indexes need one byte or several, and one in another."""
    names = ["bus.M0", "bus.M1", "bus.M63", "bus.M64", "bus.M199", "bus.Outer", "bus.Outer.Inner"]
    classes = {name: make_message_class(from_file(BUS, NOWHERE, name)[0]) for name in names}
    values = []
    with SchemaRegistryClient({"url": registry.url, "timeout": 20}) as client:
        for name, kind in classes.items():
            serialize = ProtobufSerializer(kind, client, {"use.deprecated.format": False})
            own = [kind(n=i) if name.endswith("Inner") else kind(id=f"{name} {i}") for i in range(10)]
            context = SerializationContext(project.topic, MessageField.VALUE)
            values += [(name, m, serialize(m, context)) for m in own]
    values = values[::7] + [v for n, v in enumerate(values) if n % 7]
    _write_schema(project, BUS)
    send(project, [value for _, _, value in values])
    taken = [name for name in names if name != "bus.M1"]
    into = {name.lower().replace(".", "_"): {"values": [name], "message": name} for name in taken}
    feed = project.write_feed(
        format="protobuf",
        schema_file="schemas/order.proto",
        registry=f"{{url: '{registry.url}', timeout: 5s}}",
        split=json.dumps({"by": {"message": True}, "into": into, "otherwise": "drop"}),
    )
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.dropped, counts.quarantined) == (60, 10, 0)
    lake, rows = open_lake(feed), dict[str, list[tuple[int, Any]]]()
    for path in list_files(feed):
        for row in pq.read_table(lake.open(path)).to_pylist():
            rows.setdefault(path.split("/")[2], []).append((row["kafka_offset"], row.get("id", row.get("n"))))
    expected: dict[str, list[tuple[int, Any]]] = {}
    for offset, (name, message, _) in enumerate(values):
        own_value = message.n if name.endswith("Inner") else message.id
        expected.setdefault(name.lower().replace(".", "_"), []).append((offset, own_value))
    assert rows == {output: expected[output] for output in into}
    report = rescan_feed(feed)
    assert (report.problems, report.compared) == ((), 60)
