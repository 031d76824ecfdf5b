"""Feeds from their files: accepted settings and their meaning, refusals and their messages; secrets are hidden."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from pydantic import BaseModel

from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import CREDENTIALS, KAFKA_OWNED, KafkaSettings
from sluice.pipelines.feed.load import find_feed_file, group_tuning, load_feed, load_feeds
from sluice.pipelines.feed.project_files import load_fleet, load_notify
from sluice.pipelines.feed.sections import (
    TUNING,
    CommitMode,
    Compression,
    OnGroupMoved,
    OnLoss,
    OnUndecodable,
    PublishPolicy,
    Start,
    StartKind,
)
from sluice.pipelines.feed.topic_selection import TopicFilter
from sluice.pipelines.model.kafka import FetchLimits, Isolation
from sluice.pipelines.model.receipts import ENGINE

SECRET = "hunter2-s3cr3t"
LEAST: Mapping[str, Any] = {"kafka": {"bootstrap": "127.0.0.1:9092"}, "topics": "orders", "start": "earliest"}
SASL: Mapping[str, Any] = {
    "bootstrap": "kafka.example:9093",
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "PLAIN",
    "sasl_plain_username": "u",
    "sasl_plain_password": SECRET,
}

MSK = {"sasl_mechanism": "AWS_MSK_IAM"}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a feed file (`text`, or the minimal feed with changes) and returns its path."""
    folder = tmp_path / "feeds"
    folder.mkdir()

    def put(text: str | bytes | None = None, name: str = "orders.yaml", **changes: Any) -> Path:
        path = folder / name
        raw = yaml.safe_dump({**LEAST, **changes}) if text is None else text
        path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        return path

    return put


def read_error(path: Path, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(FeedError) as caught:
        load_feed(path, environ or {})
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None, "Dagster shows the context of the error, which quotes the file"
    assert str(path) in str(error)
    return str(error)


def test_feed_of_the_repository() -> None:
    folder = Path(__file__).parents[3] / "feeds"
    feed = load_feeds(folder, {})["orders"]
    assert (feed.kafka.bootstrap, feed.topics.names, feed.group) == (
        "127.0.0.1:9092",
        ("orders",),
        "sluice-orders",
    )
    assert feed.lake == str(folder.parent / ".sluice/lake")
    assert load_feed(folder / "orders.yaml", {"KAFKA_BOOTSTRAP": "a:1"}).kafka.bootstrap == "a:1"


def test_defaults(write: Write, tmp_path: Path) -> None:
    feed = load_feed(write(), {})
    assert feed.name == "orders"
    assert feed.group == "sluice-orders"
    assert feed.transactional_id == "sluice-sluice-orders-orders"
    assert feed.isolation is Isolation.READ_COMMITTED
    assert feed.commit is CommitMode.TRANSACTIONAL
    assert feed.publish is PublishPolicy.BY_PARTITION
    assert feed.lake == str(tmp_path / ".sluice/lake")
    assert (feed.landing.compression, feed.landing.compression_level) == (Compression.ZSTD, 1)
    assert (feed.limits.records, feed.limits.bytes, feed.limits.slice_bytes) == (None, None, 128 << 20)
    assert (feed.policies.on_loss, feed.policies.on_group_moved) == (OnLoss.FAIL, OnGroupMoved.REFUSE)
    assert feed.policies.on_undecodable is OnUndecodable.QUARANTINE
    assert (feed.policies.quarantine_limit.share, feed.policies.quarantine_limit.at_least) == (0.01, 100)
    assert feed.fetch.limits() == FetchLimits()
    assert feed.kafka.client_settings() == {}


def test_every_key_set(write: Write, tmp_path: Path) -> None:
    text = f"""
    feed: eu_orders
    kafka: {{bootstrap: "a:1, [::1]:2", security_protocol: SSL, ssl_cafile: ca.pem,
             ssl_check_hostname: "${{CHECK}}", session_timeout_ms: 6000, transaction_timeout_ms: 9000}}
    topics: {{include: ["orders\\\\..*"], exclude: [".*\\\\.test"]}}
    group: team.orders
    start: fail
    isolation: read_uncommitted
    format: raw
    lake: {tmp_path}/elsewhere
    commit: plain
    transactional_id: mine
    publish: all_or_nothing
    landing: {{compression: gzip, compression_level: 9}}
    limits: {{records: 10, bytes: 1 GiB}}
    tuning: {{range_bytes: 2MB, task_bytes: 4096, max_tasks: 3, task_memory: 300MiB, row_group_rows: 1000,
             file_bytes: 64MiB, request_bytes: 1MiB, partition_bytes: 1KiB, ahead_bytes: 2MiB, active_ranges: 2,
             tasks_per_broker: 3}}
    policies: {{on_loss: accept, on_group_moved: adopt,
               on_undecodable: drop, quarantine_limit: {{share: 0, at_least: 1}}}}
    fetch: {{rack: r1}}
    spark: {{master: "local[2,3]", conf: {{spark.ui.enabled: false, spark.x: 3}}}}
    """
    feed = load_feed(write(text), {"CHECK": "false"})
    assert (feed.name, feed.group, feed.transactional_id) == ("eu_orders", "team.orders", "mine")
    assert (feed.commit, feed.publish) == (CommitMode.PLAIN, PublishPolicy.ALL_OR_NOTHING)
    assert feed.topics.include == (r"orders\..*",)
    assert feed.start == Start(StartKind.FAIL)
    assert feed.lake == f"{tmp_path}/elsewhere"
    assert feed.kafka.bootstrap == "a:1,[::1]:2"
    ssl_settings = {"security_protocol": "SSL", "ssl_cafile": f"{tmp_path}/ca.pem", "ssl_check_hostname": False}
    assert feed.kafka.client_settings() == ssl_settings
    assert feed.kafka.session_timeout_ms == 6000
    assert feed.kafka.producer_settings() == ssl_settings | {"transaction_timeout_ms": 9000}
    assert (feed.landing.compression, feed.landing.compression_level) == (Compression.GZIP, 9)
    assert (feed.limits.records, feed.limits.bytes, feed.limits.slice_bytes) == (10, 1 << 30, 2_000_000)
    assert feed.fetch.limits() == FetchLimits(2, 1 << 20, 1 << 10, 2 << 20)
    assert (feed.fetch.rack, feed.fetch.tasks_per_broker) == ("r1", 3)
    assert feed.spark.conf == {"spark.ui.enabled": "false", "spark.x": "3"}
    assert pickle.loads(pickle.dumps(feed)) == feed


@pytest.mark.parametrize(
    ("text", "meant", "at_noon"),
    [
        ("earliest", Start(StartKind.EARLIEST), None),
        ("latest", Start(StartKind.LATEST), None),
        ("7d", Start(StartKind.LOOK_BACK, 7 * 86_400_000), 1_795_521_600_000 - 7 * 86_400_000),
        ("12h", Start(StartKind.LOOK_BACK, 43_200_000), 1_795_478_400_000),
        ("30m", Start(StartKind.LOOK_BACK, 1_800_000), 1_795_519_800_000),
        ("2026-11-20T00:00:00Z", Start(StartKind.TIME, 1_795_132_800_000), 1_795_132_800_000),
        ("2026-11-20T01:00:00.5+01:00", Start(StartKind.TIME, 1_795_132_800_500), 1_795_132_800_500),
        ("99999d", Start(StartKind.LOOK_BACK, 99_999 * 86_400_000), 0),
    ],
)
def test_starts(write: Write, text: str, meant: Start, at_noon: int | None) -> None:
    start = load_feed(write(f"kafka: {{bootstrap: 'a:1'}}\ntopics: a\nstart: {text}\n"), {}).start
    assert start == meant
    assert load_feed(write(start=str(start)), {}).start == meant, "a start is parsed from its own text"
    if at_noon is not None:
        assert start.resolve(1_795_521_600_000) == at_noon


@pytest.mark.parametrize(
    "value",
    [
        "yesterday",
        "2026-11-20",
        "2026-11-20T00:00:00",
        "1969-12-31T00:00:00Z",
        "-1d",
        "7",
        7,
        "d",
        True,
        [],
        "9" * 30 + "d",
    ],
)
def test_invalid_start_is_refused_with_the_choices(write: Write, value: object) -> None:
    assert "start: is not a place to start\n  → choose earliest, latest, a time" in read_error(write(start=value))


@pytest.mark.parametrize(
    "text", ["topics: a\nkafka: {bootstrap: 'a:1'}", "topics: a\nkafka: {bootstrap: 'a:1'}\nstart:"]
)
def test_start_has_no_default(write: Write, text: str) -> None:
    assert "start: is missing\n  → choose earliest, latest" in read_error(write(text))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"strat": "latest"}, "strat: is unknown\n  → did you mean `start`?"),
        ({"topic": "orders"}, "topic: is unknown\n  → did you mean `topics`?"),
        ({"auto.offset.reset": "latest"}, "is unknown\n  → did you mean `start`?"),
        ({"kafka": {"bootstrap.servers": "a:1"}}, "did you mean `bootstrap`?"),
        ({"feed": "Orders"}, "feed: is not a feed's name\n  → lower-case letters"),
        ({"feed": "a" * 65}, "feed: "),
        ({"feed": "a\n"}, "feed: "),
        ({"kafka": {}}, "kafka.bootstrap: is missing\n  → write host:port"),
        ({"kafka": "a:1"}, "kafka: "),
        ({"kafka": {"bootstrap": "a"}}, "kafka.bootstrap: is not an address"),
        ({"kafka": {"bootstrap": "a:99999"}}, "kafka.bootstrap: is not an address"),
        ({"kafka": {"bootstrap": "a:1", "sasl.mechanism": "PLAIN"}}, "did you mean `sasl_mechanism`?"),
        ({"kafka": {"bootstrap": "a:1", "group_id": "x"}}, "kafka.group_id: is not for a feed to set"),
        ({"kafka": {"bootstrap": "a:1", "security_protocol": "SASL_SSL"}}, "needs sasl_mechanism"),
        ({"kafka": {"bootstrap": "a:1", "ssl_cafile": "x"}}, "which nothing reads"),
        ({"kafka": {"bootstrap": "a:1", "sasl_mechanism": "PLAIN"}}, "which nothing reads"),
        ({"kafka": {**SASL, "sasl_mechanism": "OAUTHBEARER"}}, "needs sasl_oauth_token_provider"),
        ({"kafka": {**SASL, "sasl_mechanism": "AWS_MSK_IAM", "security_protocol": "SSL"}}, "which nothing"),
        ({"kafka": {"bootstrap": "a:1", **MSK, "security_protocol": "SASL_PLAINTEXT"}}, "SASL_SSL for AWS"),
        ({"kafka": {**SASL, "sasl_plain_password": ""}}, "kafka.sasl_plain_password: "),
        ({"topics": ["orders", "a/b"]}, "topics.1: is not a topic name"),
        ({"topics": {"include": ["("]}}, "topics.include.0: is not a pattern"),
        ({"topics": {"includes": ["a"]}}, "topics.includes: is unknown\n  → did you mean `include`?"),
        ({"topics": []}, "topics: needs a topic name"),
        ({"isolation": "serializable"}, "isolation: "),
        ({"format": "xml"}, "format: should be 'raw', 'json', 'avro', 'json_schema' or 'protobuf'"),
        ({"format": ["avro"]}, "format: should be "),
        ({"format": "avro", "schema_file": "a\0.avsc"}, "which cannot be read"),
        ({"format": "json", "schema": {"a": "string"}, "key": {"format": ["avro"]}}, "key.format: should be "),
        ({"message": "a.B"}, "has `message` without `format: protobuf`"),
        ({"format": "json"}, "`format: json` without `schema`"),
        ({"schema": {"a": "string"}}, "`schema` without `format: json`"),
        ({"format": "json", "schema": {}}, "schema: is not a mapping of names to types"),
        ({"format": "json", "schema": "string"}, "schema: is not a mapping of names to types"),
        ({"format": "json", "schema": {"a": "decimal(39,2)"}}, "schema.a: cannot be read at position 8: a decimal has"),
        ({"format": "json", "schema": {"a": {"b": "list<int"}}}, "schema.a.b: cannot be read at the end: expected `>`"),
        ({"format": "json", "schema": {"a": "string", "A": "string"}}, ": differs from another field by case"),
        ({"format": "json", "schema": {"a": "struct<b: int, B: int>"}}, "schema.a: cannot be read at position"),
        ({"format": "json", "schema": {"kafka_offset": "int64"}}, "schema.kafka_offset: `_extra` and names that begin"),
        ({"format": "json", "schema": {"_extra": "json"}}, "schema._extra: `_extra` and names that begin"),
        ({"format": "json", "schema": {"a.b": "json"}}, "schema.a.b: has a name that cannot be a column's"),
        ({"format": "json", "schema": {"a.b": "json"}}, 'behind its type: `http_method: string from "http.method"`'),
        ({"format": "json", "schema": {"a": 'list<int from "b">'}}, "elements and values have no names"),
        ({"format": "json", "schema": {"a": "int from b"}}, "expected a field's name in double quotes"),
        ({"format": "json", "schema": {"a": 'int from "\\ud800"'}}, "expected a field's name in double quotes"),
        ({"format": "json", "schema": {"a": f'int from "{"x" * 1001}"'}}, "of 1000 bytes at most"),
        ({"format": "json", "schema": {"a": "int", "b": 'int from "a"'}}, "schema.b: is read from a field that"),
        ({"format": "json", "schema": {"a": 'struct<b: int, c: int from "b">'}}, "or are read from one field"),
        ({"format": "json", "schema": {"a": ["json"]}}, "schema.a: is not a type"),
        ({"commit": "maybe"}, "commit: should be 'transactional', 'plain' or 'none'"),
        ({"lake": "s3://"}, "lake: is not s3://bucket/prefix\n  → name a folder, or s3://bucket/prefix"),
        ({"lake": "s3://bucket/a/../b"}, "lake: is not s3://bucket/prefix"),
        ({"lake": "s3://bucket//b"}, "lake: is not s3://bucket/prefix"),
        ({"s3": {"endpoint": "minio:9000"}}, "s3.endpoint: is not an address such as https://"),
        ({"s3": {"access_key_id": SECRET}}, "s3: has only one of access_key_id and secret_access_key"),
        ({"s3": {"session_token": SECRET}}, "s3: has a session_token without the keys"),
        ({"s3": {"profile": "p", "access_key_id": SECRET, "secret_access_key": SECRET}}, "s3: has a profile and keys"),
        ({"s3": {"sse": "AES256", "kms_key": "k"}}, "s3: has a kms_key without `sse: aws:kms`"),
        ({"s3": {"tags": dict.fromkeys("abcdefghijk", "x")}}, "s3.tags: has more than 10 tags"),
        ({"s3": {"part_bytes": "1MiB"}}, "s3.part_bytes: should be greater than or equal to 5242880"),
        ({"s3": {"acces_key_id": "x"}}, "s3.acces_key_id: is unknown\n  → did you mean `access_key_id`?"),
        ({"lake": "hdfs://bucket"}, "lake: is neither a folder nor an address of a store"),
        ({"lake": "s3:/bucket/prefix"}, "lake: is neither a folder nor an address of a store"),
        ({"lake": "~nobody-of-this-name/x"}, "lake: starts with ~"),
        ({"group": "a\nb"}, "group: has characters that cannot be printed"),
        ({"landing": {"compression": "brotli"}}, "landing.compression: should be"),
        ({"landing": {"compression": "snappy", "compression_level": 1}}, "landing: has a compression_level"),
        ({"landing": {"compression": "gzip", "compression_level": 10}}, "landing: has a compression_level"),
        ({"limits": {"slice_bytes": "128 potatoes"}}, "limits.slice_bytes: is not a size"),
        ({"limits": {"slice_bytes": 0}}, "limits.slice_bytes: "),
        ({"limits": {"slice_bytes": -1}}, "limits.slice_bytes: "),
        ({"limits": {"records": True}}, "limits.records: is not a number"),
        ({"limits": {"records": 1.5}}, "limits.records: "),
        ({"policies": {"on_recreated": "refuse"}}, "is not for a feed to set"),
        ({"policies": {"quarantine_limit": {"share": 1.5}}}, "policies.quarantine_limit.share: "),
        ({"policies": {"quarantine_limit": {"sher": 1}}}, "policies.quarantine_limit.sher: is unknown"),
        ({"fetch": {"active_slices": 0}}, "fetch.active_slices: "),
        ({"tuning": {"active_ranges": 0}}, "tuning.active_ranges: should be greater than or equal to 1"),
        ({"tuning": {"range_bytes": "128 potatoes"}}, "tuning.range_bytes: is not a size"),
        ({"tuning": {"ranges_bytes": 1}}, "tuning.ranges_bytes: is unknown\n  → did you mean `range_bytes`?"),
        ({"xyzzy": 1}, "known here: feed, stored_as, retired, kafka, topics, group, "),
        ({"limits": {"slice_byte": 1}}, "limits.slice_byte: is unknown\n  → did you mean `tuning.range_bytes`?"),
        ({"fetch": {"xyzzy": 1}}, "fetch.xyzzy: is unknown\n  → known here: rack, assignor"),
        ({"compaction": {"xyzzy": 1}}, "is unknown\n  → known here: tuning.compaction_file_bytes, "),
        ({"compactions": {}}, "compactions: is unknown\n  → did you mean `tuning`?"),
        ({"tuning": {"x\u001b": 1}}, "is unknown\n  → known here: range_bytes, "),
        ({"tuning": "fast"}, "tuning: is not a section of keys and values"),
        ({"tuning": {"range_bytes": 1}, "limits": "none"}, "limits: is not a section of keys and values"),
        (
            {"tuning": {"range_bytes": 1}, "limits": {"slice_bytes": 1}},
            "tuning.range_bytes: has a value in limits.slice_bytes too\n  → remove limits.slice_bytes",
        ),
        ({"spark": {"conf": {"a": [1]}}}, "spark.conf.a: "),
        ({"window": "7h"}, "window.length: does not divide an hour"),
        ({"window": "30s"}, "window.length: does not divide an hour"),
        ({"window": "90s"}, "window.length: does not divide an hour"),
        ({"window": "45m"}, "window.length: does not divide an hour"),
        ({"window": "90m"}, "window.length: does not divide an hour"),
        ({"window": {"grace": "soon"}}, "window.grace: "),
        ({"window": {"grace": "1m", "settle": "1m"}}, "window: `settle` is the old name of `grace`: remove it"),
        ({"window": {"lenght": "1h"}}, "window.lenght: is unknown\n  → did you mean `length`?"),
        ({"registry": {"url": "http://registry..example"}}, "registry.url: is neither an address such as"),
        ({"registry": {"url": "http://registry.example:99999"}}, "registry.url: is neither an address such as"),
    ],
)  # fmt: skip
def test_error_names_file_key_and_remedy(write: Write, changes: dict[str, Any], complaint: str) -> None:
    assert complaint in read_error(write(**changes))


def test_grace_period_is_read_under_its_key_of_0_1(write: Write) -> None:
    assert load_feed(write(window={"settle": "3m"}), {}).window.grace == 180_000


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("str", "`string`"),
        ("varchar(20)", "`string`"),
        ("datetime", "`timestamp`"),
        ("bigint", "`int64`"),
        ("INTEGER", "`int32`"),
        ("number", "`float64`, or `decimal(p,s)` to keep digits exactly, or `int64`"),
        ("numeric(12,2)", "`decimal(p,s)`"),
        ("epoch_ms", "`epoch(ms)`"),
        ("timstamp(ms)", "`timestamp`"),
        ("list<strng>", "`string`"),
        ("array<string>", "`list<T>`"),
        ("struct<a: object>", "`struct<name:T, …>`"),
        ("bool not null, dict", None),
        ("hunter2", None),
    ],
)
def test_unknown_types_get_suggestions(write: Write, text: str, ours: str | None) -> None:
    message = read_error(write(format="json", schema={"a": text}))
    assert f"did you mean {ours}?" in message if ours else "did you mean" not in message
    assert "hunter2" not in message


def test_all_problems_of_a_file_are_reported_together(write: Write) -> None:
    message = read_error(write(strat=1, start="soon", limits={"records": -1}))
    assert "3 problems" in message
    assert all(key in message for key in ("strat:", "start:", "limits.records:"))


def test_invalid_name_is_reported_once_and_not_for_derived_values(write: Write) -> None:
    message = read_error(write(feed="No Name"))
    assert "group" not in message
    assert "transactional_id" not in message


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a mapping"),
        ("- a\n- b", "is not a mapping"),
        ("just words", "is not a mapping"),
        ("a: b: c", "is not readable YAML: mapping values are not allowed in this context (line 1, column 5)"),
        ("start: 'unclosed", "found unexpected end of stream (line 1, column 17)\n  → close the quote"),
        ("a: 1\nb:\n\tc: 1", "found character that cannot start any token (line 3, column 1)\n  → indent with spaces"),
        ("a: @x", "found character that cannot start any token (line 1, column 4)\n  → put a value that begins with @"),
        ("a: [1,\nb", "did not find expected ',' or ']' (line 3, column 1), while parsing a flow seq"),
        ("a: 1\n---\nb: 2", "is not readable YAML: found another document (line 2, column 1)\n  → write one document"),
        ("a: 1\né: \x07", "control characters are not allowed (line 2, column 4)\n  → remove the character"),
        ("a: 1\na: 2", "has the same key twice (line 2, column 1)"),
        ("kafka: {a: 1, a: 2}", "has the same key twice"),
        ("1: x", "has a key that is not a string"),
        ("[a]: x", "has a key that is not a string"),
        ("a: &x 1\nb: *x", "has an anchor or alias"),
        ("a: *hunter2-s3cr3t", "has an anchor or alias"),
        ("a: !hunter2-s3cr3t x", "is not readable YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not readable YAML"),
        ("a: !!set [x]", "has a tag (!) (line 1, column 4)"),
        ("a: !!bool x", "has a tag (!)"),
        ("a: !!int ''", "has a tag (!)"),
        ('a: !!int "' + "9" * 5000 + '"', "is not readable YAML"),
        ("[" * 5000, "is nested deeper than"),
        ("a: " + "{b: " * 30 + "1" + "}" * 30, "is nested deeper than"),
        ("a: '" + "x" * (300 << 10) + "'", "is larger than 256 KiB"),
        (b"a: \xff\xfe", "not UTF-8"),
    ],
)  # fmt: skip
def test_hostile_yaml_is_refused_in_one_line(write: Write, text: str | bytes, complaint: str) -> None:
    message = read_error(write(text))
    assert complaint in message
    assert SECRET not in message


def test_scalars_have_their_plain_type(write: Write) -> None:
    """YAML 1.1 would read these as a date, a sexagesimal number, an octal and a boolean."""
    text = "kafka: {bootstrap: 'a:1'}\ntopics: [1:30, 010, no, 2026-11-20]\nstart: 2026-11-20T00:00:00Z"
    message = read_error(write(text))
    assert "topics.0: is not a topic name" in message  # 1:30 is a string, and no topic name
    feed = load_feed(write(text.replace("1:30, ", "")), {})
    assert feed.topics.names == ("010", "no", "2026-11-20")


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_invalid_file(write: Write, kind: str) -> None:
    path = write().with_name("ordres.yaml")
    if kind == "folder":
        path.mkdir()
        assert "cannot be read" in read_error(path)
    else:
        assert "does not exist\n  → feeds there: orders.yaml" in read_error(path)


def test_variables(write: Write) -> None:
    path = write(
        kafka={**SASL, "bootstrap": "${HOST}:${PORT:-9092}", "sasl_plain_password": "a$b$${c}${PW}"},
        group="${EMPTY:-fallback}",
        limits={"records": "${N}"},
    )
    feed = load_feed(path, {"HOST": "h", "PW": "${HOST}", "EMPTY": "", "N": "12"})
    assert feed.kafka.bootstrap == "h:9092"
    password = feed.kafka.client_settings()["sasl_plain_password"]
    assert password == "a$b${c}${HOST}", "a filled-in value is not filled in again"
    assert (feed.group, feed.limits.records) == ("fallback", 12)


def test_missing_variables_are_reported_together_with_file_and_key(write: Write) -> None:
    message = read_error(write(group="${GROUP}", topics=["${TOPIC}"], kafka={"bootstrap": "${oops"}))
    assert "group: needs the environment variable GROUP, which is not set" in message
    assert "topics.0: needs the environment variable TOPIC" in message
    assert "kafka.bootstrap: has a `${` that starts no variable" in message


def test_secrets_from_files(write: Write, tmp_path: Path) -> None:
    """Absolute paths, and relative ones from the project's folder; one newline at the end is not part of it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "pw").write_bytes(b"p ${HOST}w\n\r\n")
    (tmp_path / "ends").write_text("s3\n")
    kafka = {**SASL, "sasl_plain_password": "${file:run/pw}", "sasl_plain_username": "u-${file:ends}-${HOST}"}
    path = write(kafka=kafka, s3={"access_key_id": "a", "secret_access_key": f"${{file:{tmp_path}/ends}}"})
    feed = load_feed(path, {"HOST": "h"})
    assert feed.kafka.client_settings()["sasl_plain_password"] == "p ${HOST}w\n", "it is not filled in again"
    assert feed.kafka.sasl_plain_username == "u-s3-h"
    assert feed.s3.secret_access_key is not None
    assert feed.s3.secret_access_key.get_secret_value() == "s3"

    (tmp_path / "ends").write_text("rotated")
    assert load_feed(path, {"HOST": "h"}).kafka.sasl_plain_username == "u-rotated-h", "each load reads it again"
    assert load_feed(write(group="${file:-mine}"), {}).group == "mine", "a variable may be called `file`"


def test_invalid_secret_files_are_reported_together(write: Write, tmp_path: Path) -> None:
    files = {"large": SECRET.encode() * 6000, "binary": b"\xff" + SECRET.encode(), "empty": b"\r\n", "hidden": b"x"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "hidden").chmod(0)
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        "none": "does not exist",
        "large/none": "does not exist",
        "feeds": "is a folder",
        "large": "is larger than 64 KiB",
        "binary": "is not UTF-8",
        "empty": "is empty",
        "pipe": "is no regular file",
        "\0": "cannot be read",
    } | ({"hidden": "this user may not read"} if os.geteuid() else {})
    message = read_error(
        write(kafka={**SASL, "sasl_plain_password": "${file:none}"}, topics=[f"${{file:{n}}}" for n in reasons])
    )
    assert f"kafka.sasl_plain_password: needs the file {tmp_path}/none, which does not exist" in message
    assert "relative paths count from the project's folder" in message
    for i, (name, why) in enumerate(reasons.items()):
        assert re.search(rf"topics\.{i}: needs the file .*, which {why}", message), (name, message)
    assert SECRET not in message

    assert "group: has a `${file:…}` with a default" in read_error(write(group="${file:none:-x}"))
    assert "group: has a `${file:}` that names no file" in read_error(write(group="${file: }"))
    assert "group: has a `${` that starts no variable" in read_error(write(group="${file:/run/${HOME}}"), {"HOME": "x"})


def test_spark_settings_take_files_except_on_a_command_line(write: Write, tmp_path: Path) -> None:
    (tmp_path / "s").write_text(SECRET)
    conf = {"spark.hadoop.fs.azure.account.key.a": "${file:s}", "fs.azure.sas.c.a": "${SAS}", "spark.b": "a${file:s}"}
    feed = load_feed(write(spark={"conf": conf}), {"SAS": SECRET})
    assert feed.spark.conf == dict(zip(conf, [SECRET, SECRET, f"a{SECRET}"], strict=True))
    assert SECRET not in feed.model_dump_json() + repr(feed)
    for exposed in (
        {"spark.driver.extraJavaOptions": "-Dkey=${file:s}"},
        {"spark.jars.repositories": f"https://u:{SECRET}@repo.example/m"},
    ):
        message = read_error(write(spark={"conf": exposed}))
        assert f"in {next(iter(exposed))}: a command line would show it" in message
        assert SECRET not in message


@pytest.mark.parametrize("format", ["avro", "protobuf", "json_schema"])
def test_schema_file_from_a_file_is_refused_without_quoting_it(write: Write, tmp_path: Path, format: str) -> None:
    (tmp_path / "s").write_text(SECRET)
    message = read_error(write(format=format, schema_file="${file:s}"))
    assert "schema_file: has a value from a file" in message
    assert SECRET not in message


def test_login_in_a_token_endpoint_is_refused_without_quoting_it(write: Write) -> None:
    oauth = {"sasl_oauth_client_id": "a", "sasl_oauth_client_secret": "b", "sasl_mechanism": "OAUTHBEARER"}
    endpoint = f"https://u:{SECRET}@idp.example/token"
    kafka = {"bootstrap": "k:9092", "security_protocol": "SASL_SSL", "sasl_oauth_token_endpoint": endpoint, **oauth}
    message = read_error(write(kafka=kafka))
    assert "kafka.sasl_oauth_token_endpoint: has a user or password" in message
    assert SECRET not in message


def test_variables_in_keys_are_not_replaced(write: Write) -> None:
    assert "${HOME}: is unknown" in read_error(write(**{"${HOME}": "x"}), {"HOME": SECRET})


def test_secrets_are_never_shown(write: Write) -> None:
    kafka = {**SASL, "ssl_password": SECRET, "proxy_url": f"socks5://u:{SECRET}@p:1"}
    conf = {"fs.s3a.secret.key": SECRET, "spark.password": SECRET, "my.Token": SECRET, "spark.task.shown": "plain"}
    conf |= {"fs.azure.account.key.a": SECRET, "spark.hadoop.fs.azure.sas.c.a": SECRET, "spark.unknown": SECRET}
    conf["spark.executor.memory"] = f"https://u:{SECRET}@h"
    s3 = dict.fromkeys(("access_key_id", "secret_access_key", "session_token"), SECRET)
    clouds = {"gcs": {"token": SECRET}, "azure": {"account": "acme", "sas_token": f"?sp=r&sig={SECRET}"}}
    feed = load_feed(write(kafka=kafka, spark={"conf": conf}, s3=s3, **clouds), {})
    outputs = [
        str(feed.gcs),
        repr(feed.azure),
        repr(feed),
        str(feed),
        feed.model_dump_json(),
        str(feed.model_dump()),
        repr(feed.spark),
        str(feed.kafka),
    ]
    assert not [output for output in outputs if SECRET in output]
    assert all("plain" in output for output in outputs[2:5])
    assert feed.spark.conf == conf
    assert feed.kafka.client_settings()["ssl_password"] == SECRET
    assert feed.kafka.client_settings()["proxy_url"].endswith("@p:1")


def list_paths(value: object, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in list_paths(v, (*above, k))]
    return [above]


FULL: dict[str, Any] = {
    **LEAST,
    "feed": "orders",
    "kafka": {**SASL, **dict.fromkeys(set(KafkaSettings.model_fields) - set(SASL))},
    "topics": {"include": ["a"], "exclude": ["b"]},
    **dict.fromkeys(["group", "isolation", "format", "lake", "commit", "publish", "transactional_id"]),
    "schema": {"a": None, "b": {"c": None}},
    "landing": dict.fromkeys(
        ["compression", "compression_level", "row_group_rows", "target_file_bytes", "shared_files", "bloom_filters"]
    ),
    "limits": dict.fromkeys(["records", "bytes", "slice_bytes", "max_tasks"]),
    "policies": {"on_loss": None, "on_drift": None, "quarantine_limit": {"share": None}},
    "fetch": dict.fromkeys(["request_bytes", "rack"]),
    "s3": dict.fromkeys(["endpoint", "region", "profile", "access_key_id", "secret_access_key", "tags", "part_bytes"]),
    "spark": {"master": None, "conf": {"a": None}},
    "registry": dict.fromkeys(["url", "username", "password", "token", "subject", "timeout", "ssl_cafile"]),
    "key": dict.fromkeys(["format", "wire_format"]),
    "table": {"iceberg": {"name": None, "catalog": {"uri": None}}, "keep_snapshots": None},
    "wire_format": None,
}


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(list_paths(FULL)),
    bad=st.sampled_from(
        [SECRET, [SECRET], {"a": SECRET}, f"{SECRET}\n", f"7 {SECRET}", f"s3://{SECRET}", f"({SECRET}"]
    ),
)
def test_no_error_quotes_a_value(write: Write, path: tuple[Any, ...], bad: object) -> None:
    document: dict[str, Any] = {**FULL}
    section = document
    for part in path[:-1]:
        section[part] = section = {**section[part]}
    section[path[-1]] = bad
    message = ""
    try:
        load_feed(write(text=yaml.safe_dump(document)), {})
    except FeedError as error:
        message = f"{error} {error.fields()}"
    assert SECRET not in message


CONSUMER, PRODUCER, ADMIN = (set(c.DEFAULT_CONFIG) for c in (KafkaConsumer, KafkaProducer, KafkaAdminClient))


def test_every_kafka_python_setting_is_accepted_or_refused_with_a_reason() -> None:
    taken = set(KafkaSettings.model_fields) - {"bootstrap", *CREDENTIALS}
    assert taken & set(KAFKA_OWNED) == set()
    assert taken | set(KAFKA_OWNED) == CONSUMER | PRODUCER | ADMIN


def test_each_client_accepts_its_settings() -> None:
    special = {
        "bootstrap": "a:1",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "GSSAPI",
        "ssl_check_hostname": True,
        "client_dns_lookup": "use_all_dns_ips",
    }
    names = set(KafkaSettings.model_fields) - {"sasl_oauth_token_provider", *CREDENTIALS}
    kafka_settings = KafkaSettings.model_validate(dict.fromkeys(names, "1000") | special)
    assert set(kafka_settings.client_settings()) <= CONSUMER & PRODUCER & ADMIN
    assert set(kafka_settings.producer_settings()) <= PRODUCER
    assert set(kafka_settings.producer_settings()) | {"bootstrap", "session_timeout_ms"} == names


def test_secrets_match_those_of_the_client() -> None:
    secret = {n for n, f in KafkaSettings.model_fields.items() if "SecretStr" in str(f.annotation)}
    assert {n for n in KafkaSettings.model_fields if "password" in n} <= secret


class Tokens:
    """Stands for a user's token provider."""


class BadTokens:
    def __init__(self) -> None:
        raise RuntimeError(SECRET)


def test_token_provider_is_created_in_the_process_of_the_client(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "site_tokens", __import__("sys").modules[__name__])
    oauth = {"bootstrap": "a:1", "security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
    feed = load_feed(write(kafka={**oauth, "sasl_oauth_token_provider": "site_tokens:Tokens"}), {})
    assert isinstance(feed.kafka.client_settings()["sasl_oauth_token_provider"], Tokens)
    for name in ("site_tokens:Nothing", "no_such_module:X", "site_tokens:BadTokens"):
        bad = load_feed(write(kafka={**oauth, "sasl_oauth_token_provider": name}), {})
        with pytest.raises(FeedError, match="cannot be made") as caught:
            bad.kafka.client_settings()
        assert SECRET not in str(caught.value)
        assert caught.value.__context__ is None


def test_a_folder_of_feeds(write: Write, tmp_path: Path) -> None:
    write(name="orders.yaml")
    write(name="payments.yaml", topics="payments")
    write("not a feed", name="notes.txt")
    feeds = load_feeds(tmp_path / "feeds", {})
    assert list(feeds) == ["orders", "payments"]
    assert all(isinstance(f, Feed) for f in feeds.values())


def test_folder_reports_the_problems_of_all_its_files(write: Write, tmp_path: Path) -> None:
    write(name="good.yaml")
    write(name="bad.yaml", start="soon")
    write("{", name="broken.yaml")
    write(name="worse.yaml", kafka={"bootstrap": "${NOPE}"})
    write(name="other.yml")
    with pytest.raises(FeedError, match="4 problems") as caught:
        load_feeds(tmp_path / "feeds", {})
    message = str(caught.value)
    assert [
        n for n in ("bad.yaml:3:1: start", "broken.yaml: is not", "NOPE", "other.yml: does not end") if n not in message
    ] == []
    assert "good" not in message


TYPED = """\
kafka: {bootstrap: 'a:1'}
topics: orders
start: earliest
format: json
schema:
  http.method: strng
  items:
    - x
  price: decimal(90, 2)
"""


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        (TYPED, ["6:3: schema.http.method: ", "7:3: schema.items: ", "9:3: schema.price: "]),
        ("kafka: {bootstrap: 'a:1'}\ntopics: [orders, 7]\nstart: earliest\n", ["2:18: topics.1: "]),
        ("kafka:\n    bootstrap: 'a:1'\n    group_id: g\ntopics: orders\n", ["3:5: kafka.group_id: ", "start: is mis"]),
        ("kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\npolicies: {x: 1}\n", ["4:12: policies.x: "]),
        ("topics: orders\nstart: earliest\ntuning:\n  max_task: 3\n", ["4:3: tuning.max_task: "]),
        ("topics: orders\nstart: earliest\nkafka: {}\n", ["3:1: kafka.bootstrap: "]),
    ],
)
def test_a_problem_names_the_line_and_the_column_of_its_key(write: Write, text: str, positions: list[str]) -> None:
    path = write(text)
    with pytest.raises(FeedError) as caught:
        load_feed(path, {})
    message = str(caught.value)
    assert [p for p in positions if f"{path}:{p}" not in message and f"{path}: {p}" not in message] == [], message


@pytest.mark.parametrize(
    ("name", "text", "position"),
    [
        ("fleet.yaml", "per_kafka: 3\nfeeds_at_once: 0\n", "fleet.yaml:2:1: feeds_at_once: "),
        ("notify.yaml", "email:\n  server: m\n  sender: a\n  to: [b]\n  prt: 1\n", "notify.yaml:5:3: email.prt: "),
    ],
)
def test_errors_of_project_files_name_lines(tmp_path: Path, name: str, text: str, position: str) -> None:
    (tmp_path / name).write_text(text)
    load = load_fleet if name == "fleet.yaml" else load_notify
    with pytest.raises(FeedError, match=position):
        load(tmp_path, {})


def _in(name: str, catalog: object = None, **more: Any) -> dict[str, Any]:
    """A feed's table of Iceberg."""
    return {"table": {"iceberg": {"name": name} | ({"catalog": catalog} if catalog else {}), **more}}


_REST = {"type": "rest", "uri": "http://catalog:1/iceberg"}


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ({"feed": "a"}, {"feed": "a", "group": "other"}, "feeds/one.yaml too"),
        ({"group": "g"}, {"group": "g"}, "group: is shared with feed `one`"),
        ({"transactional_id": "t"}, {"transactional_id": "t"}, "transactional_id: is shared with feed `one`"),
        (_in("db.a"), _in("db.a"), "`db.a` would be a table of feed `two` and of feed `one`"),
        (_in("db.a"), _in("db.a_windows"), "`db.a_windows` would be a table of feed `two` and of feed `one`"),
        (_in("db.a_windows"), _in("db.a"), "`db.a_windows` would be a table of feed `two` and of feed `one`"),
        (_in("db.a", quarantine=True), _in("db.a_quarantine"), "`db.a_quarantine` would be a table of feed `two`"),
        (_in("db.a", {"uri": "postgresql://u:p@h/c"}), _in("db.a", {"uri": "postgresql://o@h/c"}), "of feed `one`"),
    ],
)
def test_feeds_share_no_name_group_transactional_id_or_table(
    write: Write, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], complaint: str
) -> None:
    write(name="one.yaml", **first)
    write(name="two.yaml", **second)
    with pytest.raises(FeedError) as caught:
        load_feeds(tmp_path / "feeds", {})
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_in("db.a"), _in("db.b")),
        (_in("db.a"), _in("db.a_quarantine")),
        (_in("db.a"), _in("db.a", {"type": "sql", "uri": "sqlite:///other.db"})),
        (_in("db.a", "theirs"), _in("db.a", "ours")),
        (_in("db.a", _REST | {"warehouse": "one"}), _in("db.a", _REST | {"warehouse": "two"})),
        (_in("db.a"), {"table": {"delta": {}}}),
        ({"table": {"delta": {}}}, {"table": {"delta": {}}}),
    ],
)
def test_tables_of_other_names_or_catalogs_are_fine(
    write: Write, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    write(name="one.yaml", **first)
    write(name="two.yaml", **second)
    assert len(load_feeds(tmp_path / "feeds", {})) == 2


def test_the_same_group_on_two_clusters_is_fine(write: Write, tmp_path: Path) -> None:
    write(name="one.yaml", group="g")
    write(name="two.yaml", group="g", kafka={"bootstrap": "elsewhere:1"})
    assert len(load_feeds(tmp_path / "feeds", {})) == 2


def test_feed_without_kafka_uses_the_environment_or_the_local_cluster(write: Write) -> None:
    path = write(kafka=None)
    assert "kafka.bootstrap: is missing" in read_error(path)
    assert "sluice kafka start" in read_error(path)
    local = {"SLUICE_LOCAL_KAFKA": "127.0.0.1:2"}
    assert load_feed(path, local).kafka.bootstrap == "127.0.0.1:2"
    assert load_feed(path, local | {"KAFKA_BOOTSTRAP": "a:1"}).kafka.bootstrap == "a:1"
    tuned = load_feed(write(kafka={"client_id": "me"}), local).kafka
    assert (tuned.bootstrap, tuned.client_id) == ("127.0.0.1:2", "me")
    assert load_feed(write(kafka={"bootstrap": "b:3"}), local | {"KAFKA_BOOTSTRAP": "a:1"}).kafka.bootstrap == "b:3"


def test_missing_folder_of_feeds(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="no folder"):
        load_feeds(tmp_path / "feeds", {})
    (tmp_path / "feeds").mkdir()
    assert load_feeds(tmp_path / "feeds", {}) == {}


DOCS = (Path(__file__).parents[3] / "docs" / "feeds.md").read_text()


def list_keys(model: type[BaseModel]) -> set[str]:
    keys = {f.alias or n for n, f in model.model_fields.items() if not f.exclude}
    for field in model.model_fields.values():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not TopicFilter:
            keys |= list_keys(kind)
    return keys


def test_invalid_file_name_of_a_feed_is_reported(write: Write) -> None:
    path = write().rename(write().with_name("Ord-ers.yaml"))
    with pytest.raises(FeedError) as refusal:
        load_feed(path, {})
    assert "Ord-ers.yaml: has a name that no feed can have" in str(refusal.value)
    assert "rename it, or write `feed:` in it" in str(refusal.value.remedy)


def test_lake_on_s3_keeps_its_address(write: Write) -> None:
    for written, meant in (("s3://bucket", "s3://bucket"), ("s3://bucket/a/b/", "s3://bucket/a/b")):
        assert load_feed(write(lake=written), {}).lake == meant
    clouds = ("gs://bucket/a", "az://container/a", "abfss://container@account.dfs.core.windows.net/a")
    for written in clouds:
        assert load_feed(write(lake=f"{written}/"), {}).lake == written
    feed = load_feed(write(s3={"tags": {"cost": 7}, "endpoint": "http://127.0.0.1:9000/"}), {})
    assert (feed.s3.tags, feed.s3.endpoint) == ({"cost": "7"}, "http://127.0.0.1:9000")


def test_the_docs_name_every_key() -> None:
    old_places = {old_key.rpartition(".")[2] for old_key in TUNING.values()} | {"compaction"}
    documented = list_keys(Feed) - old_places | set(TUNING)
    assert [key for key in sorted(documented) if not re.search(rf"\b{key}\b", DOCS)] == []


def test_known_keys_of_the_feed_include_tuning_but_no_deprecated_section(write: Write) -> None:
    with pytest.raises(FeedError) as refused:
        load_feed(write(xyzzy=1), {})
    candidates = refused.value.remedy.removeprefix("known here: ").split(", ")
    assert "tuning" in candidates
    assert "compaction" not in candidates


@pytest.mark.parametrize("key", TUNING)
def test_tuning_keys_are_read_from_their_old_sections(write: Write, key: str) -> None:
    section, _, name = TUNING[key].partition(".")
    value = "7m" if key == "spark_start_timeout" else 6 << 20 if key.endswith(("bytes", "memory")) else 7
    new = load_feed(write(tuning={key: value}), {})
    old = load_feed(write(**{section: {name: value}}), {})
    assert new == old != load_feed(write(), {})
    document = group_tuning(new.model_dump(mode="json", by_alias=True, exclude_none=True))
    assert document["tuning"][key] == getattr(getattr(new, section), name)
    assert name not in document.get(section, {})


def test_documented_feeds_are_valid_and_the_full_example_shows_the_defaults(write: Write) -> None:
    minimal, full, *others = (
        load_feed(write(text), {"KAFKA_PASSWORD": "x", "KAFKA_BOOTSTRAP": "kafka.example:9092"})
        for text in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    )
    assert full == minimal
    assert len(others) == 5


def test_file_of_a_feed_is_the_one_with_its_name(write: Write) -> None:
    folder = write(name="file.yaml", feed="sales").parent
    write(name="orders.yaml", feed="clicks")
    write(name="returns.yaml", description="feed: of returns")
    (folder / "broken.yaml").write_text("feed: [")
    names = ("sales", "clicks", "returns", "broken", "orders")
    assert [find_feed_file(folder, name).name for name in names] == [
        *("file.yaml", "orders.yaml", "returns.yaml", "broken.yaml", "orders.yaml")
    ]


def test_feeds_in_subfolders_are_loaded(tmp_path: Path) -> None:
    """Relative paths count from the project, wherever the file lies; links of a mounted volume do not matter."""
    team, hidden = tmp_path / "feeds" / "sales" / "eu", tmp_path / "feeds" / "..2026"
    for folder in (team, hidden):
        folder.mkdir(parents=True)
    text = 'kafka: {bootstrap: "127.0.0.1:9"}\ntopics: x\nstart: earliest\n'
    (team / "orders.yaml").write_text(text)
    (hidden / "clicks.yaml").write_text(text)
    (hidden / "views.contract.json").write_text("{}")
    (tmp_path / "feeds" / "clicks.yaml").symlink_to(hidden / "clicks.yaml")
    feeds = load_feeds(tmp_path / "feeds", {})
    assert {name: feed.lake for name, feed in feeds.items()} == dict.fromkeys(
        ("clicks", "orders"), str(tmp_path / ".sluice/lake")
    )
    assert find_feed_file(tmp_path / "feeds", "orders") == team / "orders.yaml"
    (team / "returns.contract.json").write_text("{}")
    with pytest.raises(FeedError, match=r"sales/eu/returns\.contract\.json: has no returns\.yaml in its folder"):
        load_feeds(tmp_path / "feeds", {})


@pytest.mark.parametrize(
    ("keys", "fleet", "environ", "engine"),
    [
        ({}, "", {}, "spark"),
        ({}, "engine: processes", {}, "processes"),
        ({"engine": "spark"}, "engine: processes", {}, "spark"),
        ({"engine": "processes"}, "", {}, "processes"),
        ({"spark": {"conf": {"spark.x": "1"}}}, "engine: processes", {}, "spark"),
        ({"spark": {"master": "local[2]"}, "engine": "processes"}, "", {}, "processes"),
        ({"engine": "spark"}, "", {ENGINE: "processes"}, "processes"),
    ],
)
def test_engine_is_that_of_the_environment_the_feed_or_the_project(
    write: Write, keys: dict[str, Any], fleet: str, environ: dict[str, str], engine: str
) -> None:
    path = write(**keys)
    (path.parents[1] / "fleet.yaml").write_text(fleet or "windows: 5")
    assert load_feed(path, environ).engine == engine


def test_unknown_engine_is_refused_in_the_feed_and_in_the_project(write: Write) -> None:
    assert "engine: " in read_error(write(engine="flink"))
    path = write()
    (path.parents[1] / "fleet.yaml").write_text("engine: flink")
    with pytest.raises(FeedError, match=r"fleet\.yaml:1:1: engine: should be 'spark' or 'processes'"):
        load_feed(path, {})
