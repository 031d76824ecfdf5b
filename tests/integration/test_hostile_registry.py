"""Whole runs against a registry that answers wrongly: good records land, each bad one is quarantined or named.

Later, with an honest registry, the rest lands, and the account of the feed closes.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fastavro
import pytest

from sluice.pipelines.errors import BatchIncomplete
from sluice.pipelines.feed.feed import Feed
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import FeedProject, rescan_feed, run
from tests.integration.test_avro import FIRST, make_order, read_landed, read_quarantined, send, write_avro_feed
from tests.integration.test_protobuf import FIRST as PROTO
from tests.integration.test_protobuf import make_order as make_message
from tests.integration.test_protobuf import write_protobuf_feed

pytestmark = pytest.mark.kafka

GOOD = 1
Answer = tuple[int, bytes]


class Registry:
    """Answers each number with its status and body; `requests` are the paths."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.requests: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.requests.append(self.path)
                number = self.path.partition("?")[0].rpartition("/")[2]
                status, body = registry.answers.get(int(number) if number.isdecimal() else -1, (404, b"{}"))
                self.send_response(status)
                self.send_header("Location", "http://127.0.0.1:9/")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(ConnectionError):  # a client that has read enough
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def registry() -> Iterator[Registry]:
    server = Registry()
    Thread(target=server.http.serve_forever, daemon=True).start()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic())


def nest(depth: int) -> Any:
    """Returns a record whose types double with each level."""
    inner: Any = "int"
    for level in range(depth):
        fields = [
            {"name": name, "type": inner if name == "a" else f"R{level - 1}" if level else "int"} for name in "ab"
        ]
        inner = {"type": "record", "name": f"R{level}", "fields": fields}
    return inner


def answer(schema: Any, **more: Any) -> Answer:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return 200, json.dumps({"schema": text} | more).encode()


AVRO = {
    "a bomb": nest(60),
    "recursive": {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "Order"}]},
    "no schema": "no schema",
    "hostile names": {"type": "record", "name": "../../x", "fields": [{"name": "<script>", "type": "int"}]},
    "another record": {"type": "record", "name": "Other", "fields": [{"name": "x", "type": "int"}]},
    "deep": "[" * 50_000,
}
PROTOBUF = {
    "a bomb": "".join(f"message M{n} {{ M{n + 1} a = 1; M{n + 1} b = 2; }}\n" for n in range(60)) + "message M60 {}",
    "recursive": "message Order { Order id = 1; }",
    "no schema": "no schema",
    "another file": 'import "../../../../etc/passwd"; message Order { string id = 1; }',
    "another message": "message Other { int32 x = 1; }",
    "deep": "message A { " * 5_000 + "}" * 5_000,
}
BAD: dict[str, dict[str, Answer]] = {
    "avro": {name: answer(schema) for name, schema in AVRO.items()} | {"not there": (404, b"{}")},
    "protobuf": {name: answer(f'syntax = "proto3"; {text}', schemaType="PROTOBUF") for name, text in PROTOBUF.items()},
}
UNAVAILABLE: dict[str, Answer] = {
    "no JSON": (200, b"<html>Please log in</html>"),
    "huge": (200, b" " * (64 << 20)),
    "a redirect": (302, b""),
}


def build_frame(number: int, value: bytes, kind: str) -> bytes:
    return b"\0" + struct.pack(">I", number) + (b"" if kind == "avro" else b"\2\2") + value


@pytest.fixture(params=["avro", "protobuf"])
def feed(
    request: pytest.FixtureRequest, project: FeedProject, registry: Registry
) -> tuple[Feed, Callable[[int], bytes]]:
    """The feed, and its records by the number that they name."""
    kind = request.param
    if kind == "avro":
        feed = write_avro_feed(project, registry.url)
        registry.answers[GOOD] = answer(FIRST)
        schema = fastavro.parse_schema(FIRST)
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, make_order(3))
        value = out.getvalue()
    else:
        feed = write_protobuf_feed(project, registry.url)
        registry.answers[GOOD] = answer(PROTO, schemaType="PROTOBUF")
        value = make_message(PROTO, 3).SerializeToString()
    return feed, lambda number: build_frame(number, value, kind)


def test_schemas_that_read_nothing_send_their_records_to_the_quarantine(
    feed: tuple[Feed, Callable[[int], bytes]], registry: Registry, project: FeedProject
) -> None:
    orders, make = feed
    bad = BAD[orders.format]
    registry.answers |= dict(enumerate(bad.values(), GOOD + 1))
    send(project, [v for number, _ in enumerate(bad, GOOD + 1) for v in (make(number), make(GOOD))])
    run(orders)
    assert len(read_landed(orders)) == len(bad)
    quarantined = read_quarantined(orders)
    assert {r["offset"]: name for r, name in zip(quarantined, bad, strict=True)} == dict(
        zip(range(0, 2 * len(bad), 2), bad, strict=True)
    )
    assert {r["reason"] for r in quarantined} <= {"incompatible", "unknown_schema", "not_protobuf"}
    assert len(registry.requests) < 50
    assert rescan_feed(orders).problems == ()


@pytest.mark.parametrize("name", [*UNAVAILABLE])
def test_ranges_wait_for_a_registry_that_gives_no_schemas(
    name: str, feed: tuple[Feed, Callable[[int], bytes]], registry: Registry, project: FeedProject
) -> None:
    orders, make = feed
    registry.answers[GOOD + 1] = UNAVAILABLE[name]
    send(project, [make(GOOD), make(GOOD + 1), make(GOOD)])
    with pytest.raises(BatchIncomplete, match="the schema registry"):
        run(orders)
    assert len(registry.requests) < 50
    registry.answers[GOOD + 1] = registry.answers[GOOD]
    run(orders)
    assert len(read_landed(orders)) == 3
    assert rescan_feed(orders).problems == ()
