"""The client of the AWS Glue registry, tested with moto, and feeds that use one."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from sluice.pipelines.errors import Failed, FeedError, NotAuthorized, RegistryUnavailable, SluiceError
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.feed.load import load_feed, schema_asked
from sluice.resources.health.kafka_checks import examine_registry
from sluice.resources.registry import client_of, writers_of
from sluice.resources.registry.confluent import file_of, find_registered, reader_of
from sluice.resources.registry.glue import GlueClient
from sluice.testing.lake import MemoryLake

URL = "glue://eu-central-1/shop"
FIRST = '{"type":"record","name":"Order","fields":[{"name":"id","type":"string"}]}'
SECOND = FIRST.replace("]}", ',{"name":"country","type":"string","default":""}]}')
FEED = """kafka: {{bootstrap: 'localhost:9092'}}
topics: [orders]
start: earliest
format: avro
schema_file: order.avsc
registry: {{{registry}}}
{more}"""


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """moto's Glue, with two versions of a schema in a registry."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("glue", "eu-central-1")
        client.create_registry(RegistryName="shop")
        options = {"RegistryId": {"RegistryName": "shop"}, "DataFormat": "AVRO", "Compatibility": "BACKWARD"}
        client.create_schema(SchemaName="orders", SchemaDefinition=FIRST, **options)
        schema_id = {"RegistryName": "shop", "SchemaName": "orders"}
        client.register_schema_version(SchemaId=schema_id, SchemaDefinition=SECOND)
        yield client


def make_client(url: str = URL) -> GlueClient:
    glue_client = client_of(RegistrySettings(url=url, timeout="2s"))
    assert isinstance(glue_client, GlueClient)
    return pickle.loads(pickle.dumps(glue_client))


def write_feed_file(root: Path, registry: str = f"url: '{URL}'", more: str = "") -> Path:
    (root / "feeds").mkdir()
    (root / "order.avsc").write_text(FIRST)
    (root / "feeds" / "orders.yaml").write_text(FEED.format(registry=registry, more=more))
    return root / "feeds" / "orders.yaml"


def test_schema_versions_are_fetched_by_uuid_and_by_name(glue: Any, tmp_path: Path) -> None:
    newest, first = make_client().version("orders"), make_client().version("orders", 1)
    assert newest is not None
    assert first is not None
    assert (newest.texts, newest.version, newest.type) == ((SECOND,), 2, "AVRO")
    assert (first.texts, first.version) == ((FIRST,), 1)
    schema = make_client().schema(first.id)
    assert schema is not None
    assert (schema.id, schema.texts) == (first.id, (FIRST,))
    assert make_client().version("nothing") is None
    assert make_client().schema("00000000-0000-4000-8000-000000000009") is None
    # A feed's schema and its writers' schemas, which are cached in the lake.
    path = write_feed_file(tmp_path)
    request = schema_asked(path.parent, path.stem, {})
    assert request.subject == "orders", "Glue's serializers name a schema as the topic"
    there = find_registered(request)
    assert json.loads(file_of(there, request)) == json.loads(SECOND)
    assert list(reader_of(there, request).columns.texts()) == ["id", "country"]
    feed, lake = load_feed(path, {}), MemoryLake()
    assert feed.reader is not None
    assert feed.reader.wire == "glue"
    schemas = writers_of(feed, lake)
    assert schemas is not None
    assert schemas.texts(first.id) == (FIRST,)
    glue.delete_schema(SchemaId={"RegistryName": "shop", "SchemaName": "orders"})
    again = writers_of(feed, lake)
    assert again is not None
    assert again.texts(first.id) == (FIRST,)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("AccessDeniedException", NotAuthorized, "refused the login"),
        ("ExpiredTokenException", NotAuthorized, "refused the login"),
        ("ThrottlingException", RegistryUnavailable, "cannot be asked: ThrottlingException"),
        ("InternalServiceException", RegistryUnavailable, "cannot be asked"),
        ("InvalidInputException", Failed, "gave InvalidInputException"),
    ],
)
def test_glue_failures_are_clear_errors(
    code: str, error: type[SluiceError], message: str, glue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ClientError({"Error": {"Code": code, "Message": "s3cr3t-word"}}, "GetSchemaVersion")

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", refuse)
    with pytest.raises(error, match=message) as raised:
        make_client().schema("00000000-0000-4000-8000-000000000009")
    assert "s3cr3t" not in f"{raised.value} {raised.value.remedy}"


def test_missing_credentials_and_unreachable_address_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", "http://127.0.0.1:9")
    with pytest.raises(NotAuthorized, match="no credentials"):
        make_client().subjects()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(RegistryUnavailable, match="EndpointConnectionError"):
        make_client().subjects()


def test_missing_registry_has_no_schema_versions(glue: Any) -> None:
    assert make_client("glue://eu-central-1/none").version("orders") is None


def test_doctor_counts_schemas(glue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: dict[str, Any] = {
        "": {"Schemas": [{"SchemaName": "orders"}], "NextToken": "more"},
        "more": {"Schemas": [{"SchemaName": "customers"}]},
    }

    def answer_page(self: Any, operation: str, arguments: dict[str, Any]) -> Any:  # moto cannot list schemas
        assert (operation, arguments["RegistryId"]) == ("ListSchemas", {"RegistryName": "shop"})
        return pages[arguments.get("NextToken", "")]

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", answer_page)
    assert make_client().subjects() == ("customers", "orders")
    feed = load_feed(write_feed_file(tmp_path), {})
    assert [d.found for d in examine_registry(feed)] == [f"{URL} answers; 2 subjects"]


@pytest.mark.parametrize(
    ("registry", "more", "message"),
    [
        (f"url: '{URL}', username: a, password: b", "", "AWS's own settings"),
        (f"url: '{URL}'", "wire_format: confluent", "its own is `glue`"),
        ("url: 'http://x:8081'", "wire_format: glue", "glue://REGION/REGISTRY"),
        ("url: 'glue://nowhere'", "", "glue://REGION/REGISTRY"),
    ],
)
def test_conflicting_registry_settings_are_refused(registry: str, more: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FeedError) as raised:
        load_feed(write_feed_file(tmp_path, registry, more), {})
    assert message in str(raised.value)
