"""Protected feeds in memory: hashes of other formats and of keys, changes of rules, replays, refused feed files."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import FeedError, SchemaChanged, UsageError
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import SchemaEntry
from sluice.pipelines.planning.schema_changes import describe_protection, find_newest_name, shape_named
from sluice.pipelines.records.rows.wire_format import AVRO, RegisteredSchema
from sluice.reading import Windows
from sluice.streaming import of_feed
from sluice.testing import LandedMessages, Message, land
from sluice.testing.lake import MemoryLake
from tests.pipelines.records.avro.rows import encode

KEY, OTHER_KEY = "0123456789abcdef-one", "0123456789abcdef-two"
FEED = """
topics: people
start: earliest
format: json
schema: {id: int64, email: string, user: {ip: string, name: string}}
policies: {quarantine_limit: {share: 1}}
"""
AVRO_FEED = """
topics: people
start: earliest
format: avro
schema_file: person.avsc
registry: {url: 'http://127.0.0.1:9'}
policies: {quarantine_limit: {share: 1}}
"""
PERSON: dict[str, Any] = {
    "type": "record",
    "name": "Person",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "email", "type": "string"},
        {"name": "born", "type": {"type": "int", "logicalType": "date"}},
    ],
}


def hash_text(text: str, key: str = KEY) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


class Project:
    def __init__(self, root: Path) -> None:
        self.root, self.lake = root, MemoryLake()
        (root / "feeds").mkdir()
        self.feed = root / "feeds" / "people.yaml"

    def land(self, text: str, *messages: Message, key: str = KEY) -> LandedMessages:
        self.feed.write_text(text)
        return land(self.feed, messages, lake=self.lake, environ={"KEY": key})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def protect(text: str, **rules: Any) -> str:
    return text + f"protect: {json.dumps(rules)}\n"


HASH = {"hmac": "${KEY}"}


def test_hashes_equal_those_of_python_and_join_feeds_of_other_formats(project: Project, tmp_path: Path) -> None:
    rules = {"id": HASH, "email": HASH, "_key": HASH}
    landed = project.land(
        protect(FEED, **rules), Message(b'{"id": 42, "email": "ann@example.com"}', key=b"ann@example.com")
    )
    (of_json,) = landed.rows.to_pylist()
    (tmp_path / "person.avsc").write_text(json.dumps(PERSON))
    avro_lake = MemoryLake()
    KeptSchemas(avro_lake, "people").keep(RegisteredSchema(1, AVRO, (json.dumps(PERSON),)))
    project.feed.write_text(protect(AVRO_FEED, **rules, born=HASH))
    person = encode(PERSON, {"id": 42, "email": "ann@example.com", "born": 7}, 1)
    landed = land(project.feed, [Message(person, key=b"ann@example.com")], lake=avro_lake, environ={"KEY": KEY})
    (of_avro,) = landed.rows.to_pylist()
    for row in (of_json, of_avro):
        assert row["email"] == hash_text("ann@example.com") == row["kafka_key"].decode()
        assert row["id"] == hash_text("42")
    assert of_avro["born"] == hash_text("1970-01-08")


def test_a_typed_key_is_protected_with_its_columns(project: Project, tmp_path: Path) -> None:
    key = {"type": "record", "name": "Key", "fields": [{"name": n, "type": "string"} for n in ("customer", "shop")]}
    (tmp_path / "key.avsc").write_text(json.dumps(key))
    KeptSchemas(project.lake, "people").keep(RegisteredSchema(1, AVRO, (json.dumps(key),)))
    feed = FEED + "registry: {url: 'http://127.0.0.1:9'}\nkey: {format: avro, schema_file: key.avsc}\n"
    message = Message(b'{"id": 1}', key=encode(key, {"customer": "ann", "shop": "s1"}, 1))
    bad = Message(b'{"id": 1}', key=b"ann")
    landed = project.land(protect(feed, key_customer=HASH), message, bad)
    assert [(r["key_customer"], r["key_shop"], r["kafka_key"]) for r in landed.rows.to_pylist()] == [
        (hash_text("ann"), "s1", None)
    ]
    assert [(r["key"], r["withheld_bytes"]) for r in landed.quarantined.to_pylist()] == [(None, 9)]
    landed = project.land(protect(feed, _key="drop"), message)
    assert {"key_customer", "key_shop"}.isdisjoint(landed.rows.column_names)


def test_rules_and_key_identifiers_are_in_the_ledger_and_old_windows_stay(project: Project) -> None:
    value = b'{"id": 1, "email": "ann"}'
    states = [FEED, protect(FEED, email=HASH), protect(FEED, email=HASH), protect(FEED, email="drop")]
    keys = [KEY, KEY, OTHER_KEY, OTHER_KEY]
    rows = [project.land(text, Message(value), key=key).rows for text, key in zip(states, keys, strict=True)]
    assert [r.to_pylist()[0].get("email") for r in rows] == ["ann", hash_text("ann"), hash_text("ann", OTHER_KEY), None]
    assert "email" not in rows[-1].column_names
    ledger = Ledger(project.lake, "people", lambda: 0)
    entries = [e for _, e in ledger.entries() if isinstance(e, SchemaEntry)]
    assert [e.format for e in entries[1:]] == [6, 6, 6]
    assert [e.reason for e in entries[1:]] == [
        "protect email: no protection to hmac",
        "protect email: another key: hashes before and after do not join",
        "protect email: hmac to drop",
    ]
    assert entries[-1].landed == {"id": "int64", "user": "struct<ip:string, name:string>"}
    log = b"".join(project.lake.get(path) or b"" for path in project.lake.list(""))
    assert KEY.encode() not in log
    assert OTHER_KEY.encode() not in log

    state, feed = ledger.read(), load_feed(project.feed, {"KEY": OTHER_KEY, "SLUICE_LOCAL_KAFKA": "memory:9092"})
    second, third = list(state.shapes)[1:3]
    hashing = load_feed(project.feed.with_name("people.yaml"), {"KEY": OTHER_KEY, "SLUICE_LOCAL_KAFKA": "m:9"})
    assert hashing.shape.name == find_newest_name(state)
    old = shape_named(ledger, state, second, feed.shape.protection)
    assert old is not None
    assert old.protection is not None
    assert old.protection.lacks_keys
    other = shape_named(ledger, state, third)
    assert describe_protection(old.protection, other.protection if other else None) == [
        "protect email: another key: hashes before and after do not join"
    ]


SPLIT_FEED = FEED.replace("schema:", "split: {by: {field: id}, into: {one: {values: ['1'], schema:").replace(
    "name: string}}\n", "name: string}}}}, otherwise: quarantine}\n"
)


@pytest.mark.parametrize(("text", "output"), [(FEED, ""), (SPLIT_FEED, "one")])
@pytest.mark.parametrize("begins", [False, True])
def test_reading_windows_of_other_rules_notes_them(project: Project, text: str, output: str, begins: bool) -> None:
    value = b'{"id": 1, "email": "ann"}'
    protected = protect(text, email=HASH)
    first, second = (text, protected) if begins else (protected, text)
    project.land(first, Message(value))
    project.land(second, Message(value))
    feed = load_feed(project.feed, {"KEY": KEY, "SLUICE_LOCAL_KAFKA": "memory:9092"})
    feed = next((o for o in feed.outputs if o.output == output), feed)
    ledger = Ledger(project.lake, "people", lambda: 0)
    starts = sorted(w for w in ledger.read().published_in if w is not None)
    assert len(starts) == 2
    from sluice.pipelines.model.receipts import PartKind

    notes = Windows.of(feed, ledger, project.lake, starts, PartKind.LANDED).notes
    change = "no protection to hmac" if begins else "hmac to no protection"
    assert [note.partition(": ")[2] for note in notes] == [
        f"landed under other rules than now: protect email: {change}"
    ]


def test_a_column_that_landed_as_a_number_is_not_hashed_in_place(project: Project) -> None:
    project.land(FEED, Message(b'{"id": 1}'))
    with pytest.raises(SchemaChanged, match="id is string, and has landed as int64"):
        project.land(protect(FEED, id=HASH), Message(b'{"id": 1}'))
    renamed = FEED.replace("id: int64", "id_hash: 'int64 from \"id\"'")
    (row,) = project.land(protect(renamed, id_hash=HASH), Message(b'{"id": 1}')).rows.to_pylist()
    assert row["id_hash"] == hash_text("1")


def test_columns_from_records_are_protected(project: Project) -> None:
    feed = protect(FEED + "\n", **{"*.ssn": "drop", "*.phone": HASH}).replace(
        "{quarantine_limit", "{on_drift: evolve, quarantine_limit"
    )
    value = b'{"id": 1, "ssn": "s", "phone": 12, "user": {"ssn": "t", "phone": 13}}'
    rows = [project.land(feed, Message(value)).rows.to_pylist()[0] for _ in range(3)]
    assert rows[0]["_extra"] == json.dumps(
        {"phone": hash_text("12"), "user": {"phone": hash_text("13")}}, separators=(",", ":")
    )
    assert rows[-1]["phone"] == hash_text("12")
    assert rows[-1]["user"] == {"ip": None, "name": None, "phone": hash_text("13")}
    assert all("ssn" not in row and "ssn" not in row["user"] for row in rows)


def test_copies_of_protected_places_are_protected(project: Project) -> None:
    schema = """{id: int64, items: "list<struct<sku:string, n:int32>>", first: "string at items[0].sku",
  owner: "string at repo.owner", token: "string header X-Token", trace: "string header trace"}"""
    feed = FEED.replace("{id: int64, email: string, user: {ip: string, name: string}}", schema)
    value = b'{"id": 1, "items": [{"sku": "s1", "n": 1}], "repo": {"owner": "ann", "id": 7}}'
    message = Message(value, headers=[("X-Token", b"secret"), ("trace", b"t1")])
    for rules in ({"items.sku": HASH}, {"first": HASH}):
        (row,) = project.land(protect(feed, **rules), message).rows.to_pylist()
        assert (row["first"], row["items"]) == (hash_text("s1"), [{"sku": hash_text("s1"), "n": 1}])
    for rules in ({"owner": HASH, "token": "drop"}, {"repo.owner": HASH, "_headers.x-token": "drop"}):
        (row,) = project.land(protect(feed, **rules), message).rows.to_pylist()
        assert (row["owner"], row["_extra"], row["trace"]) == (hash_text("ann"), '{"repo":{"id":7}}', "t1")
        assert [h["key"] for h in row["kafka_headers"]] == ["trace"]
        assert "token" not in row
    (row,) = project.land(protect(feed, items="drop"), message).rows.to_pylist()
    assert {"items", "first"}.isdisjoint(row)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"emial": "drop"}, "emial, which is no field of the schema.*did you mean `email`"),
        ({"user.x": "drop"}, "user.x, which is no field of the schema"),
        ({"kafka_key": "drop"}, r"kafka_key, which is no field of the schema.*`_key` is the key"),
        (
            {"email": "hash"},
            r"protect.email: is none of `drop`, .* and `\{encrypt: KEY\}`",
        ),
        ({"email": {"hmac": "short"}}, "protect.email.hmac: is shorter than 16 bytes.*openssl rand"),
        ({"email": {"keep_last": 0}}, "protect.email.keep_last"),
        ({"email": {"hmac": "x" * 16, "keep_last": 1}}, "protect.email: is none of"),
        ({"id": "drop", "email": "drop", "user": "drop"}, "drops all columns"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(project: Project, rules: Any, problem: str) -> None:
    with pytest.raises(FeedError, match=f"(?s){problem}") as refused:
        project.land(protect(FEED, **rules))
    assert '"short"' not in str(refused.value)


def test_a_raw_feed_protects_keys_and_headers_only(project: Project) -> None:
    raw = "topics: people\nstart: earliest\n"
    for path in ("email", "*.ssn", "value"):
        with pytest.raises(
            FeedError, match=r"(?s)whose values have no fields.*give the feed a schema, or protect only"
        ):
            project.land(protect(raw, **{path: "drop"}))
    landed = project.land(
        protect(raw, **{"_key": HASH, "_headers.a": "drop"}), Message(b"value", key=b"ann", headers=[("a", b"1")])
    )
    (row,) = landed.rows.to_pylist()
    assert (row["key"], row["value"], row["headers"]) == (hash_text("ann").encode(), b"value", [])


def test_batches_are_checked_as_they_land(project: Project) -> None:
    def contract(type_: str, column: str, **more: Any) -> None:
        item = {"type": type_, "kwargs": {"column": column, **more}, "severity": "warning"}
        project.feed.with_suffix(".contract.json").write_text(json.dumps({"expectations": [item]}))

    feed = protect(FEED, email=HASH, **{"user.ip": "drop"})
    ann, bob = Message(b'{"id": 1, "email": "ann"}'), Message(b'{"id": 2, "email": "bob"}')
    contract("expect_column_values_to_be_unique", "email")
    assert [o.passed for o in project.land(feed, ann, bob).expectations] == [True]
    assert [o.passed for o in project.land(feed, ann, ann).expectations] == [False]
    contract("expect_column_distinct_values_to_be_in_set", "email", value_set=["ann"])
    with pytest.raises(FeedError, match="about email, which lands by `hmac`"):
        project.land(feed, ann)
    contract("expect_column_values_to_be_in_set", "email", value_set=["ann"])
    (outcome,) = project.land(feed, ann, bob).expectations
    assert (outcome.checked, outcome.unexpected) == (2, 1)


def test_records_as_they_came_are_not_streamed(project: Project) -> None:
    project.feed.write_text(protect(FEED, email=HASH))
    feed = load_feed(project.feed, {"KEY": KEY, "SLUICE_LOCAL_KAFKA": "127.0.0.1:9"})
    with pytest.raises(UsageError, match="protects fields") as refused:
        of_feed(feed, 1)
    assert "typed=True" in refused.value.remedy
