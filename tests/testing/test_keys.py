"""Keys with a schema of their own through a feed in memory: their columns, invalid keys, and the ledger."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import FeedError
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.planning.schema_changes import find_newest_name, shape_named
from sluice.pipelines.records.rows.wire_format import AVRO, KEY_ID_HEADER, RegisteredSchema
from sluice.testing import LandedMessages, Message, land
from sluice.testing.lake import MemoryLake
from tests.pipelines.records.avro.rows import encode

FEED = "topics: orders\nstart: latest\nformat: json\nschema: {id: int64}\n"
AVRO_KEY = "registry: {url: 'http://127.0.0.1:9'}\nkey: {format: avro, schema_file: key.avsc}\n"
KEY: dict[str, Any] = {
    "type": "record",
    "name": "Key",
    "fields": [{"name": "customer", "type": "string"}, {"name": "shop", "type": ["null", "int"], "default": None}],
}
OLD_KEY = KEY | {"fields": KEY["fields"][:1]}


class Project:
    def __init__(self, root: Path) -> None:
        self.root, self.lake = root, MemoryLake()
        (root / "feeds").mkdir()
        self.feed = root / "feeds" / "orders.yaml"

    def land(self, feed: str, key: Any, *messages: Message) -> LandedMessages:
        self.feed.write_text(feed)
        (self.root / "key.avsc").write_text(json.dumps(key))
        return land(self.feed, messages, lake=self.lake, environ={})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_avro_keys_with_json_values(project: Project) -> None:
    schemas = KeptSchemas(project.lake, "orders")
    schemas.keep(RegisteredSchema(1, AVRO, (json.dumps(KEY),)))
    schemas.keep(RegisteredSchema(2, AVRO, (json.dumps(OLD_KEY),)))
    landed = project.land(
        FEED + AVRO_KEY,
        KEY,
        Message(b'{"id":1}', key=encode(KEY, {"customer": "a", "shop": 7}, 1)),
        Message(b'{"id":2}', key=encode(OLD_KEY, {"customer": "b"}, 2)),
        Message(b'{"id":3}', key=b"plain"),
        Message(b'{"id":"x"}', key=b"plain"),
        Message(b'{"id":4}'),
        Message(None, key=encode(KEY, {"customer": "c", "shop": None}, 1)),
        Message(b'{"id":5}', key=b"\0" + struct.pack(">I", 1) + b"\x02d\x07"),
    )
    assert landed.rows.select(["id", "key_customer", "key_shop", "kafka_tombstone"]).to_pylist() == [
        {"id": 1, "key_customer": "a", "key_shop": 7, "kafka_tombstone": False},
        {"id": 2, "key_customer": "b", "key_shop": None, "kafka_tombstone": False},
        {"id": 4, "key_customer": None, "key_shop": None, "kafka_tombstone": False},
        {"id": None, "key_customer": "c", "key_shop": None, "kafka_tombstone": True},
    ]
    refused = landed.quarantined.select(["key", "value", "reason", "field", "detail"]).to_pylist()
    assert [(h["value"], h["reason"], h["field"]) for h in refused] == [
        (b'{"id":3}', "not_avro", None),
        (b'{"id":"x"}', "wrong_type", "id"),
        (b'{"id":5}', "not_avro", "key_shop"),
    ]
    assert refused[0]["key"] == b"plain"
    assert refused[2]["detail"].endswith("(schema 1) (in the key)")
    ledger = Ledger(project.lake, "orders", lambda: 0)
    state = ledger.read()
    assert shape_named(ledger, state, find_newest_name(state) or "") == landed.feed.shape


def test_json_schema_constraints_of_keys_join_the_contract(project: Project) -> None:
    schema = {"type": "object", "properties": {"c": {"type": "string", "enum": ["a", "b"]}}, "required": ["c"]}
    feed = FEED + "key: {format: json_schema, schema_file: key.avsc}\n"
    landed = project.land(
        feed,
        schema,
        Message(b'{"id":1}', key=b'{"c":"a"}'),
        Message(b'{"id":2}', key=b'{"c":"z"}'),
        Message(b'{"id":3}', key=b"{}"),
    )
    assert landed.rows.select(["id", "key_c"]).to_pylist() == [{"id": 1, "key_c": "a"}]
    assert landed.quarantined.select(["reason", "field"]).to_pylist() == [
        {"reason": "not_in_set", "field": "key_c"},
        {"reason": "missing", "field": "key_c"},
    ]


def test_keys_with_schema_id_in_a_header(project: Project) -> None:
    KeptSchemas(project.lake, "orders").keep(RegisteredSchema(1, AVRO, (json.dumps(KEY),)))
    feed = FEED + AVRO_KEY.replace("key.avsc}", "key.avsc, wire_format: confluent_headers}")
    bare = encode(KEY, {"customer": "a", "shop": 7}, None)
    header = (KEY_ID_HEADER, b"\0" + struct.pack(">I", 1))
    landed = project.land(
        feed, KEY, Message(b'{"id":1}', key=bare, headers=[("x", b"y"), header]), Message(b'{"id":2}', key=bare)
    )
    assert landed.rows["key_customer"].to_pylist() == ["a"]
    assert landed.quarantined["reason"].to_pylist() == ["not_avro"]


def test_keys_with_schema_id_in_apicurio_header(project: Project) -> None:
    KeptSchemas(project.lake, "orders").keep(RegisteredSchema("globalId-1", AVRO, (json.dumps(KEY),)))
    feed = FEED + AVRO_KEY.replace("key.avsc}", "key.avsc, wire_format: apicurio_headers}")
    feed = feed.replace("127.0.0.1:9", "127.0.0.1:9/apis/ccompat/v7")
    number = ("apicurio.key.globalId", struct.pack(">q", 1))
    bare = encode(KEY, {"customer": "a", "shop": 7}, None)
    landed = project.land(feed, KEY, Message(b'{"id":1}', key=bare, headers=[number]), Message(b'{"id":2}', key=bare))
    assert landed.rows["key_customer"].to_pylist() == ["a"]
    assert landed.quarantined["reason"].to_pylist() == ["not_avro"]


def test_unknown_key_fields_do_not_become_columns(project: Project) -> None:
    """A column for them would be read from the value."""
    schema = {"type": "object", "properties": {"c": {"type": "string"}}}
    feed = FEED + "key: {format: json_schema, schema_file: key.avsc}\npolicies: {on_drift: evolve}\n"
    message = Message(b'{"id":1,"b":true}', key=b'{"c":"a","region":"eu"}')
    project.land(feed, schema, message)
    rows = project.land(feed, schema, message, message).rows
    assert [name for name in rows.column_names if not name.startswith("kafka_")] == ["id", "key_c", "b", "_extra"]


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (FEED + AVRO_KEY.replace("key.avsc}", "key.avsc, wire_format: apicurio_headers}"), "/apis/ccompat/v7"),
        ("topics: o\nstart: latest\n" + AVRO_KEY, "under `format: raw`"),
        (FEED + "key: {format: avro, schema_file: key.avsc, wire_format: confluent}\n", "needs `registry`"),
        (FEED + "key: {format: xml, schema_file: key.avsc}\n", "another format"),
        (FEED.replace("id:", "KEY_customer:") + AVRO_KEY, "key_customer, the value has too"),
        (FEED + AVRO_KEY.replace("key.avsc", "other.avsc"), "key.schema_file: names"),
    ],
)
def test_invalid_key_settings_are_refused(project: Project, feed: str, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        project.land(feed, KEY)
