"""Feeds whose schemas are in AWS Glue, on a real Kafka: records by Glue's layout, and moto's Glue on loopback."""

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
from tests.integration.support import Place, rescanned, run, visible
from tests.integration.test_avro import FIRST, SECOND, avro_feed, held, landed, order, send
from tests.integration.test_protobuf import FIRST as PROTO
from tests.integration.test_protobuf import as_google, order_class, protobuf_feed
from tests.integration.test_protobuf import order as proto_order
from tests.pipelines.records.protobuf.rows import read_by_google

pytestmark = pytest.mark.kafka

URL = "glue://eu-central-1/shop"


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    return Place(tmp_path, kafka, fresh_topic(), lake())


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of moto's Glue, which boto3 finds everywhere in this process while the block lasts."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", f"http://{host}:{port}")
    client = boto3.client("glue", "eu-central-1")
    with suppress(client.exceptions.AlreadyExistsException):  # moto's servers of a process share what they hold
        client.create_registry(RegistryName="shop")
    try:
        yield client
    finally:
        client.close()
        server.stop()


def version(glue: Any, topic: str, text: str, format_: str) -> UUID:
    """Register the newest version of the topic's schema: its UUID."""
    named = {"RegistryName": "shop", "SchemaName": topic}
    try:
        found = glue.register_schema_version(SchemaId=named, SchemaDefinition=text)
    except glue.exceptions.EntityNotFoundException:
        found = glue.create_schema(
            RegistryId={"RegistryName": "shop"},
            SchemaName=topic,
            DataFormat=format_,
            Compatibility="NONE",
            SchemaDefinition=text,
        )
    return UUID(found.get("VersionId") or found["SchemaVersionId"])


def framed(schema: UUID, data: bytes, *, packed: bool = False) -> bytes:
    """A record as AWS's serializers write it (`SerializationDataEncoder` of aws-glue-schema-registry)."""
    return b"\3" + (b"\5" if packed else b"\0") + schema.bytes + (zlib.compress(data) if packed else data)


def as_avro(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def test_avro_of_two_versions_lands_and_needs_no_glue_later(
    place: Place, glue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (version(glue, place.topic, json.dumps(s), "AVRO") for s in (FIRST, SECOND))
    values = [framed(first, as_avro(FIRST, order(i)), packed=bool(i % 2)) for i in range(50)]
    values += [framed(second, as_avro(SECOND, order(i, country="FR")), packed=bool(i % 2)) for i in range(50, 100)]
    bad = [framed(UUID(int=9), b"\2x"), b"\0\0\0\0\1\2x", framed(first, b"\2x")[:-1]]
    send(place, [*values, *bad])
    feed = avro_feed(place, URL, SECOND)
    counts = run(feed).batches[0].counts
    assert (counts.landed, counts.quarantined) == (100, 3)
    assert [(r["id"], r["country"]) for r in landed(feed)] == [(f"o{i}", "DE" if i < 50 else "FR") for i in range(100)]
    assert [r["reason"] for r in held(feed)] == ["unknown_schema", "not_avro", "not_avro"]
    assert f"(schema {UUID(int=9)})" in held(feed)[0]["detail"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", "http://127.0.0.1:9")
    report = rescanned(feed)
    assert (report.problems, report.compared) == ((), 100)


def test_protobuf_names_messages_by_number(place: Place, glue: Any) -> None:
    """Of shop.Line, shop.Order and its map's entry, Order is number 1."""
    schema = version(glue, place.topic, PROTO, "PROTOBUF")
    orders = [proto_order(PROTO, i).SerializeToString() for i in range(30)]
    send(place, [*(framed(schema, b"\1" + o) for o in orders), framed(schema, b"\0\x0a\1x")])
    feed = protobuf_feed(place, URL)
    run(feed)
    assert [as_google(r) for r in landed(feed)] == [read_by_google(order_class(PROTO), o) for o in orders]
    assert [r["reason"] for r in held(feed)] == ["incompatible"]


def test_glue_away_holds_up_the_batch(place: Place, glue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = version(glue, place.topic, json.dumps(FIRST), "AVRO")
    send(place, [framed(schema, as_avro(FIRST, order(i))) for i in range(10)])
    feed = avro_feed(place, URL)
    with monkeypatch.context() as away:
        away.setenv("AWS_ENDPOINT_URL_GLUE", "http://127.0.0.1:9")
        with pytest.raises(SluiceError, match="cannot be asked"):
            run(feed)
    assert visible(feed) == []
    run(feed)
    assert len(landed(feed)) == 10
