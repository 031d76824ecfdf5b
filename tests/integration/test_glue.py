"""Feeds with schemas in AWS Glue, on a real Kafka: records in Glue's wire format, and moto's Glue on loopback."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import boto3
import fastavro
import pytest
from moto.server import ThreadedMotoServer

from sluice.pipelines.errors import SluiceError
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import FeedProject, list_files, rescan_feed, run
from tests.integration.test_avro import FIRST, SECOND, make_order, read_landed, read_quarantined, send, write_avro_feed
from tests.integration.test_protobuf import FIRST as PROTO
from tests.integration.test_protobuf import as_google, load_order_class, write_protobuf_feed
from tests.integration.test_protobuf import make_order as make_proto_order
from tests.pipelines.records.protobuf.rows import read_by_google

pytestmark = pytest.mark.kafka

URL = "glue://eu-central-1/shop"


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(), lake())


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of moto's Glue. For the test, boto3 finds this Glue everywhere in the process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", f"http://{host}:{port}")
    client = boto3.client("glue", "eu-central-1")
    with suppress(client.exceptions.AlreadyExistsException):  # moto's servers share their state within a process
        client.create_registry(RegistryName="shop")
    try:
        yield client
    finally:
        client.close()
        server.stop()


def register_schema(glue: Any, topic: str, text: str, format_: str) -> UUID:
    """Register the newest version of the topic's schema. Returns its UUID."""
    schema_id = {"RegistryName": "shop", "SchemaName": topic}
    try:
        response = glue.register_schema_version(SchemaId=schema_id, SchemaDefinition=text)
    except glue.exceptions.EntityNotFoundException:
        response = glue.create_schema(
            RegistryId={"RegistryName": "shop"},
            SchemaName=topic,
            DataFormat=format_,
            Compatibility="NONE",
            SchemaDefinition=text,
        )
    return UUID(response.get("VersionId") or response["SchemaVersionId"])


def wrap_record(schema: UUID, data: bytes, *, packed: bool = False) -> bytes:
    """Frame a record as AWS's serializers do (`SerializationDataEncoder` of aws-glue-schema-registry)."""
    return b"\3" + (b"\5" if packed else b"\0") + schema.bytes + (zlib.compress(data) if packed else data)


def as_avro(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def test_avro_of_two_versions_lands_and_needs_no_glue_later(
    project: FeedProject, glue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (register_schema(glue, project.topic, json.dumps(s), "AVRO") for s in (FIRST, SECOND))
    values = [wrap_record(first, as_avro(FIRST, make_order(i)), packed=bool(i % 2)) for i in range(50)]
    values += [
        wrap_record(second, as_avro(SECOND, make_order(i, country="FR")), packed=bool(i % 2)) for i in range(50, 100)
    ]
    bad = [wrap_record(UUID(int=9), b"\2x"), b"\0\0\0\0\1\2x", wrap_record(first, b"\2x")[:-1]]
    send(project, [*values, *bad])
    feed = write_avro_feed(project, URL, SECOND)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (100, 3)
    assert [(r["id"], r["country"]) for r in read_landed(feed)] == [
        (f"o{i}", "DE" if i < 50 else "FR") for i in range(100)
    ]
    assert [r["reason"] for r in read_quarantined(feed)] == ["unknown_schema", "not_avro", "not_avro"]
    assert f"(schema {UUID(int=9)})" in read_quarantined(feed)[0]["detail"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", "http://127.0.0.1:9")
    report = rescan_feed(feed)
    assert (report.problems, report.compared) == ((), 100)


def test_protobuf_message_is_identified_by_its_index(project: FeedProject, glue: Any) -> None:
    """Order has index 1 among shop.Line, shop.Order and the entry of Order's map."""
    schema = register_schema(glue, project.topic, PROTO, "PROTOBUF")
    orders = [make_proto_order(PROTO, i).SerializeToString() for i in range(30)]
    send(project, [*(wrap_record(schema, b"\1" + o) for o in orders), wrap_record(schema, b"\0\x0a\1x")])
    feed = write_protobuf_feed(project, URL)
    run(feed)
    assert [as_google(r) for r in read_landed(feed)] == [read_by_google(load_order_class(PROTO), o) for o in orders]
    assert [r["reason"] for r in read_quarantined(feed)] == ["incompatible"]


def test_unreachable_glue_stops_the_batch_until_the_next_run(
    project: FeedProject, glue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = register_schema(glue, project.topic, json.dumps(FIRST), "AVRO")
    send(project, [wrap_record(schema, as_avro(FIRST, make_order(i))) for i in range(10)])
    feed = write_avro_feed(project, URL)
    with monkeypatch.context() as offline:
        offline.setenv("AWS_ENDPOINT_URL_GLUE", "http://127.0.0.1:9")
        with pytest.raises(SluiceError, match="cannot be asked"):
            run(feed)
    assert list_files(feed) == []
    run(feed)
    assert len(read_landed(feed)) == 10
