"""The client of schema registries with a scripted server: every failure is one clear error."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest

from sluice.pipelines.errors import Failed, NotAuthorized, Refused, RegistryUnavailable, SetupError, SluiceError
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake.schemas import MOST_UNKNOWN, KeptSchemas
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.resources.registry import confluent
from sluice.resources.registry.confluent import RegistryClient, number_of_own
from sluice.testing.lake import MemoryLake

SECRET = "s3cr3t-word"
Answers = dict[str, Any]
Serve = Callable[[Answers], RegistryClient]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """A registry that answers paths with given JSON, statuses or bytes. It knows one user."""
    monkeypatch.setattr(confluent, "_PAUSE", 0.0)
    answers: Answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.setdefault("asked", []).append(self.path)
            answers["login"] = self.headers.get("Authorization")
            answer = answers.get(self.path, 404)
            status = answer if isinstance(answer, int) else 200
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()

    def start(new_answers: Answers) -> RegistryClient:
        new_answers.setdefault("asked", [])
        answers.clear()
        answers.update(new_answers)
        new_answers["now"] = answers
        url = f"http://127.0.0.1:{server.server_port}/api"
        return RegistryClient(RegistrySettings(url=url, username="me", password=SECRET, timeout="2s"))

    yield start
    server.shutdown()
    server.server_close()


def make_reference(*subjects: str, schema: str = '"int"') -> Answers:
    return {"schema": schema, "references": [{"name": s, "subject": s, "version": 1} for s in subjects]}


def test_schema_is_fetched_with_its_references(serve: Serve) -> None:
    client = serve(
        {
            "/api/schemas/ids/7": make_reference("a", "b", schema="top"),
            "/api/subjects/a/versions/1": make_reference("b", schema="a"),
            "/api/subjects/b/versions/1": {"schema": "b"},
        }
    )
    schema = client.schema(7)
    assert schema is not None
    assert (schema.id, schema.type, schema.texts) == (7, "AVRO", ("b", "a", "top"))
    assert client.schema(8) is None


def test_credentials_are_sent_with_each_request_and_never_shown(serve: Serve) -> None:
    answers: Answers = {"/api/schemas/ids/1": {"schema": '"int"'}}
    client = serve(answers)
    client.schema(1)
    assert answers["now"]["login"].startswith("Basic ")
    assert SECRET not in repr(client) + str(client.settings.model_dump_json())
    assert pickle.loads(pickle.dumps(client)) == client


REFUSED: list[tuple[Answers, type[SluiceError], str]] = [
    ({"/api/schemas/ids/1": 401}, NotAuthorized, "refused the login"),
    ({"/api/schemas/ids/1": 403}, NotAuthorized, "no right"),
    ({"/api/schemas/ids/1": 500}, RegistryUnavailable, "HTTP 500"),
    ({"/api/schemas/ids/1": 302}, Failed, "HTTP 302"),
    ({"/api/schemas/ids/1": b"<html>"}, Failed, "not JSON"),
    ({"/api/schemas/ids/1": b"[" * 100_000}, Failed, "not JSON"),
    ({"/api/schemas/ids/1": b'"' + b"x" * (5 << 20)}, Failed, "larger than"),
    ({"/api/schemas/ids/1": ["a"]}, Failed, "no JSON object"),
    ({"/api/schemas/ids/1": make_reference("a"), "/api/subjects/a/versions/1": []}, Failed, "no JSON object"),
    ({"/api/schemas/ids/1": {"id": 3}}, Failed, "without a schema"),
    ({"/api/schemas/ids/1": {"schema": "x", "references": 3}}, Failed, "no list"),
    ({"/api/schemas/ids/1": make_reference("a")}, Failed, "does not exist"),
    ({"/api/schemas/ids/1": make_reference("a"), "/api/subjects/a/versions/1": make_reference("a")}, Failed, "circle"),
    (
        {"/api/schemas/ids/1": make_reference("s0")}
        | {f"/api/subjects/s{i}/versions/1": make_reference(f"s{i + 1}") for i in range(40)},
        Failed,
        "deeper than",
    ),
    (
        {"/api/schemas/ids/1": make_reference(*(f"s{i}" for i in range(300)))}
        | {f"/api/subjects/s{i}/versions/1": {"schema": '"int"'} for i in range(300)},
        Failed,
        "more than 256",
    ),
]


@pytest.mark.parametrize(("answers", "kind", "message"), REFUSED)
def test_registry_failures_are_clear_errors(
    serve: Serve, answers: Answers, kind: type[SluiceError], message: str
) -> None:
    client = serve(dict(answers))
    with pytest.raises(kind, match=message) as error:
        client.schema(1)
    assert error.value.remedy
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("end", ["\n", "\r", "€"])
def test_token_that_is_invalid_in_a_header_is_never_shown(serve: Serve, end: str) -> None:
    url = serve({"/api/schemas/ids/1": {"schema": '"int"'}}).settings.url
    client = RegistryClient(RegistrySettings(url=url, token=SECRET + end))
    with pytest.raises(SetupError, match="token has a line break") as error:
        client.schema(1)
    assert SECRET not in str(error.getrepr(style="long", showlocals=False))


def test_unreachable_registry_is_an_error() -> None:
    with pytest.raises(RegistryUnavailable, match="cannot be asked"):
        RegistryClient(RegistrySettings(url="http://127.0.0.1:9", timeout="1s")).schema(1)


def test_schemas_are_requested_once_and_stored(serve: Serve) -> None:
    answers: Answers = {"/api/schemas/ids/1": {"schema": '"int"'}}
    client, lake = serve(answers), MemoryLake()
    schemas = KeptSchemas(lake, "orders", client)
    assert schemas.texts(1) == schemas.texts(1) == ('"int"',)
    assert KeptSchemas(lake, "orders").texts(1) == ('"int"',)
    assert KeptSchemas(lake, "orders").texts(2) is None
    assert answers["now"]["asked"] == ["/api/schemas/ids/1"]
    looking = KeptSchemas(other := MemoryLake(), "orders", client, keep=False)
    assert looking.texts(1) == ('"int"',)
    assert list(other.list("_sluice")) == []


def test_unusable_schema_is_stored_with_its_cause(serve: Serve) -> None:
    answers: Answers = {
        "/api/schemas/ids/1": {"schema": 'syntax = "proto3"; message M { Missing x = 1; }', "schemaType": "PROTOBUF"},
        "/api/schemas/ids/2": {"schema": '"int"'},
    }
    client, lake = serve(answers), MemoryLake()
    for registry_ in (client, None):
        schemas = KeptSchemas(lake, "orders", registry_, types=("PROTOBUF",))
        with pytest.raises(UnusableSchema, match=r'does not compile: .*"Missing" is not defined'):
            schemas.texts(1)
        with pytest.raises(UnusableSchema, match="of type AVRO"):
            schemas.texts(2)
    assert len(list(lake.list("_sluice"))) == 2


def test_requests_for_unknown_schema_ids_are_limited() -> None:
    class Empty:
        def schema(self, id: int) -> None:
            return None

        def version(self, subject: str, version: int | None = None) -> None:
            return None

    schemas = KeptSchemas(MemoryLake(), "orders", Empty())
    assert {schemas.texts(i) for i in range(MOST_UNKNOWN)} == {None}
    with pytest.raises(Failed, match="does not know"):
        schemas.texts(MOST_UNKNOWN)


def test_id_of_the_feed_schema_is_looked_up_in_the_registry(serve: Serve, tmp_path: Path) -> None:
    line = {"type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]}
    order = {"type": "record", "name": "Order", "fields": [{"name": "lines", "type": {"type": "array", "items": line}}]}
    parted = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "lines", "type": {"type": "array", "items": "Line"}}],
    }
    older = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}
    for folder in ("feeds", "schemas"):
        (tmp_path / folder).mkdir()
    (tmp_path / "schemas/order.avsc").write_text(json.dumps(order))

    def number(answers: Answers, lines: str = "") -> int:
        url = serve(answers).settings.url
        (tmp_path / "feeds/orders.yaml").write_text(
            "kafka: {bootstrap: 'localhost:9'}\ntopics: orders\nstart: earliest\ngroup: g\nformat: avro\n"
            f"schema_file: schemas/order.avsc\nregistry: {{url: '{url}', subject: mine, version: 2}}\n{lines}"
        )
        return number_of_own(load_feed(tmp_path / "feeds/orders.yaml", {}), ["again", "orders"])

    behind = {"/api/subjects/Line/versions/1": {"schema": json.dumps(line)}}
    latest, there = "/api/subjects/{}-value/versions/latest", {"id": 7, "version": 1, "schema": json.dumps(order)}
    other = {"id": 8, "version": 3, "schema": json.dumps(older)}
    assert number({latest.format("again"): there}) == 7
    assert number({latest.format("again"): other, latest.format("orders"): there}) == 7
    referring = make_reference("Line", schema=json.dumps(parted)) | {"id": 9, "version": 1}
    assert number({latest.format("orders"): referring, **behind}) == 9
    assert number({"/api/subjects/mine/versions/2": there}) == 7
    assert number({}, lines="wire_format: bare\n") == 0
    json_schema = there | {"schemaType": "JSON"}
    with pytest.raises(Refused, match="subjects again-value, orders-value, mine"):
        number({latest.format("again"): json_schema, latest.format("orders"): other})


def make_in_context(*subjects: str, context: str = ":.staging:") -> Answers:
    """Returns a registry with number 1 in the default context, and under these subjects of another context."""
    quoted = {f"/api/schemas/ids/1?subject={quote(s, safe='')}": {"schema": '"string"'} for s in subjects}
    return quoted | {"/api/schemas/ids/1": {"schema": '"int"'}}


@pytest.mark.parametrize(
    ("subject", "names"),
    [
        (":.staging:orders-value", [":.staging:orders-value"]),  # the topic's
        (":.staging:com.acme.Order", [":.staging:com.acme.Order"]),  # the record's
        (":.staging:orders-com.acme.Order", [":.staging:orders-com.acme.Order"]),  # both
        (":.staging:orders-value", [":.staging:"]),  # of a record whose subject is another one of the context
    ],
)
def test_number_is_looked_up_in_the_context_of_the_subject(serve: Serve, subject: str, names: list[str]) -> None:
    url = serve(make_in_context(*names)).settings.url
    client = RegistryClient(RegistrySettings(url=url, subject=subject))
    schema = client.schema(1)
    assert schema is not None
    assert schema.texts == ('"string"',)


@pytest.mark.parametrize("subject", [None, "orders-value"])
def test_number_without_a_context_is_one_of_the_default_context(serve: Serve, subject: str | None) -> None:
    client = RegistryClient(RegistrySettings(url=serve(make_in_context()).settings.url, subject=subject))
    schema = client.schema(1)
    assert schema is not None
    assert schema.texts == ('"int"',)


def test_number_that_a_context_lacks_is_never_one_of_the_default_context(serve: Serve) -> None:
    url = serve(make_in_context()).settings.url
    assert RegistryClient(RegistrySettings(url=url, subject=":.staging:orders-value")).schema(1) is None


def test_references_and_own_schemas_are_looked_up_in_the_context(serve: Serve) -> None:
    inner = quote(":.staging:inner", safe="")
    refers = {"schema": '"outer"', "references": [{"name": "inner", "subject": "inner", "version": 1}]}
    answers: Answers = {
        f"/api/schemas/ids/1?subject={quote(':.staging:o', safe='')}": refers,
        f"/api/subjects/{inner}/versions/1": {"schema": '"of the context"'},
        "/api/subjects/inner/versions/1": {"schema": '"of the default context"'},
    }
    schema = RegistryClient(RegistrySettings(url=serve(answers).settings.url, subject=":.staging:o")).schema(1)
    assert schema is not None
    assert schema.texts == ('"of the context"', '"outer"')


def test_schema_stored_from_another_context_is_looked_up_again(serve: Serve) -> None:
    lake, url = MemoryLake(), serve(make_in_context(":.staging:o")).settings.url
    former = KeptSchemas(lake, "orders", RegistryClient(RegistrySettings(url=url)))
    assert former.texts(1) == ('"int"',)
    settings = RegistrySettings(url=url, subject=":.staging:o")
    today = KeptSchemas(lake, "orders", RegistryClient(settings), context=settings.context)
    assert today.texts(1) == KeptSchemas(lake, "orders").texts(1) == ('"string"',)
    again = KeptSchemas(lake, "orders", RegistryClient(RegistrySettings(url=url)))
    assert again.texts(1) == KeptSchemas(lake, "orders").texts(1) == ('"int"',)
