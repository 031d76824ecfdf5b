"""Tables of current rows on a real Kafka, compared with a dictionary that is folded from the raw records."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from kafka import KafkaProducer

pytest.importorskip("pyiceberg")

from dagster import AssetKey

from sluice.assets.instance.instance import open_instance
from sluice.cli.main import main
from sluice.pipelines.errors import TableRefused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.operating.feed_tables import sync_tables
from sluice.pipelines.records.protobuf.reader_schema import from_file
from sluice.pipelines.tables import key_fold
from sluice.pipelines.tables.sync import Synced
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.open_ports import open_tables
from sluice.resources.project import Project
from tests.integration.canaries import read_everything
from tests.integration.conftest import Call
from tests.integration.support import (
    FeedProject,
    consume_topic,
    list_files,
    open_inline_ports,
    query_files,
    request_offsets,
    run,
)
from tests.integration.test_avro import send, serialize_orders
from tests.integration.test_protobuf import serialize_orders as serialize_messages
from tests.pipelines.records.protobuf.rows import NOWHERE, make_message_class
from tests.table_readers import DeltaReader, IcebergReader, Row, read_by_duckdb

COLUMNS = ("id", "name", "balance")
SCHEMA = '{id: int64, name: string, balance: "decimal(18,2) from text"}'


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic())


class Customers:
    """A feed of changes with a table of current rows, and its readers."""

    def __init__(self, project: FeedProject, changes: str, **settings: Any) -> None:
        self.project = project
        catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
        table = {"iceberg": {"name": "db.customers", "catalog": catalog}, "current": "db.customers_now"}
        self.settings = {"schema": SCHEMA, "table": json.dumps(table), "changes": changes} | settings
        self.reader = IcebergReader("db.customers_now", catalog)
        self.settings = {k: v for k, v in self.settings.items() if v}
        self.feed: Feed = project.write_feed("customers", **self.settings)

    def sync(self, **options: Any) -> Synced:
        with open_inline_ports(self.feed) as ports, open_tables(self.feed, ports.lake) as tables:
            done, _ = sync_tables(self.feed, ports, tables, **options)
        assert done.current is not None
        return done.current

    def read(self, columns: tuple[str, ...] = COLUMNS) -> list[Row]:
        """Returns the rows as PyIceberg and DuckDB read them."""
        newest = self.reader.list_snapshots()[-1]
        rows = self.reader.read_rows(newest, columns)
        assert sorted(read_by_duckdb(self.reader.list_files(newest), columns), key=repr) == sorted(rows, key=repr)
        return rows

    def produce(self, *records: tuple[Any, Any], partition: int = 0, stamp: int | None = None) -> None:
        producer = KafkaProducer(bootstrap_servers=self.project.kafka.bootstrap)
        for key, value in records:
            packed = [None if part is None else json.dumps(part).encode() for part in (key, value)]
            producer.send(self.project.topic, packed[1], packed[0], partition=partition, timestamp_ms=stamp)
        producer.close()


def build_row(id: int, name: str, balance: str = "1.00") -> dict[str, Any]:
    return {"id": id, "name": name, "balance": balance}


def build_change(
    op: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, lsn: int = 0
) -> tuple[Any, Any]:
    key = {"id": (after or before or {}).get("id")} if op != "t" else None
    source = {"lsn": lsn, "file": f"mysql-bin.{lsn // 20:06}", "pos": lsn % 20 * 60, "table": "customers"}
    return key, {"op": op, "before": before, "after": after, "source": source, "ts_ms": 1_700_000_000_000}


def map_names(rows: Iterable[Row]) -> dict[Any, Any]:
    return {r[0]: r[1] for r in rows}


def test_last_value_of_a_key_is_its_row(project: FeedProject) -> None:
    customers = Customers(project, "{format: upsert}", format="json")
    customers.produce((1, build_row(1, "Ada")), (2, build_row(2, "Bea")), (1, build_row(1, "Ada L.")))
    run(customers.feed)
    assert customers.sync().commits == 1
    assert map_names(customers.read()) == {1: "Ada L.", 2: "Bea"}
    customers.produce((2, None), (3, build_row(3, "Cyd")), (1, None), (1, build_row(1, "Ada again")))
    run(customers.feed)
    assert customers.sync().commits == 1
    assert map_names(customers.read()) == {1: "Ada again", 3: "Cyd"}
    assert customers.sync().commits == 0


def test_fields_of_any_name_are_a_key_and_tombstones_name_it_by_kafkas_key(project: FeedProject) -> None:
    schema = '{row: int64, b: string, is_null: "list<struct<a:int32>>", "key text": string}'
    customers = Customers(project, '{format: upsert, key: [row, "key text"]}', format="json", schema=schema)
    values = [{"row": n, "b": f"b{n}", "is_null": [{"a": n}], "key text": "é'"} for n in range(4)]
    customers.produce(*((None, value) for value in values))
    run(customers.feed)
    customers.sync()
    customers.produce(({"row": 1, "key text": "é'"}, None), ({"payload": values[2], "schema": {}}, None))
    customers.produce((None, values[3] | {"b": "new"}))
    run(customers.feed)
    customers.sync()
    assert customers.read(("row", "b")) == [(0, "b0"), (3, "new")]
    assert [r[1] for r in customers.read(("row", "is_null"))] == [[{"a": 0}], [{"a": 3}]]
    customers.produce((5, None))
    run(customers.feed)
    with pytest.raises(TableRefused, match=r"1 change has no key, such as topic.*:0:7"):
        customers.sync()


def test_raw_records_by_kafkas_key(project: FeedProject) -> None:
    customers = Customers(project, "{format: upsert}", schema="")
    customers.produce(("a", 1), ("b", 2), ("a", 3), ("b", None))
    run(customers.feed)
    customers.sync()
    assert customers.read(("key", "value")) == [(b'"a"', b"3")]


def test_debezium(project: FeedProject) -> None:
    customers = Customers(project, "{format: debezium, key: [id], deletes: remove}")
    customers.produce(build_change("r", None, build_row(1, "Ada")), build_change("c", None, build_row(2, "Bea")))
    run(customers.feed)
    customers.sync()
    assert map_names(customers.read()) == {1: "Ada", 2: "Bea"}
    customers.produce(
        build_change("u", build_row(1, "Ada"), build_row(1, "Ada L.")),
        build_change("d", build_row(2, "Bea"), None),
        ({"id": 2}, None),
        build_change("c", None, build_row(3, "Cyd")),
    )
    run(customers.feed)
    customers.sync()
    assert map_names(customers.read()) == {1: "Ada L.", 3: "Cyd"}
    customers.produce(build_change("t", None, None), build_change("c", None, build_row(4, "Dot")))
    run(customers.feed)
    customers.sync()
    assert map_names(customers.read()) == {4: "Dot"}
    customers.produce(build_change("d", build_row(4, "Dot"), None))
    run(customers.feed)
    customers.sync()
    assert customers.read() == []


def wrap(part: Any) -> Any:
    """Returns a key or a value as Kafka Connect's JSON converter sends it, with its schema."""
    return part and {"schema": {"type": "struct", "fields": [{"field": "payload", "type": "int64"}]}, "payload": part}


def test_debezium_with_schemas_in_its_records(project: FeedProject, call: Call) -> None:
    """Records with and without their schema are alike, and no schema lands."""
    customers = Customers(project, "{format: debezium, key: id}")
    chance = random.Random(5)
    for key, value in make_changes(chance, 80):
        customers.produce((wrap(key), wrap(value)) if chance.random() < 0.8 else (key, value))
        if value["op"] == "d":
            customers.produce((wrap(key), None))
    assert call("run", "customers", "--no-dagster")[0] == 0
    values = [json.loads(r["value"]) if r["value"] else None for r in consume_topic(project.kafka, project.topic)]
    values = [value["payload"] if value and "payload" in value else value for value in values]
    assert map_names(customers.read()) == fold_values(filter(None, values), {})
    query = "select op, _extra from read_parquet($files) order by kafka_offset"
    landed = query_files(customers.feed, query, list_files(customers.feed))
    assert landed.column("op").to_pylist() == [value and value["op"] for value in values]
    assert landed.column("_extra").null_count == len(values)
    code, printed = call("audit", "customers", "--rescan", "--table")
    assert code == 0, printed


AVRO_ROW = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": {"type": "long", "connect.default": 0}, "default": 0},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "born", "type": ["null", {"type": "int", "connect.name": "io.debezium.time.Date"}], "default": None},
        {
            "name": "balance",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2},
        },
    ],
    "connect.name": "shop.public.customers.Value",
}
AVRO_SOURCE = {
    "type": "record",
    "name": "Source",
    "namespace": "io.debezium.connector.postgresql",
    "fields": [
        {"name": "ts_ms", "type": "long"},
        {
            "name": "snapshot",
            "type": [
                {"type": "string", "connect.name": "io.debezium.data.Enum", "connect.default": "false"},
                "null",
            ],
            "default": "false",
        },
        {"name": "lsn", "type": ["null", "long"], "default": None},
    ],
}
AVRO_ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "shop.public.customers",
    "fields": [
        {"name": "before", "type": ["null", AVRO_ROW], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "source", "type": AVRO_SOURCE},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
    "connect.name": "shop.public.customers.Envelope",
}
"""As Debezium's connector for PostgreSQL registers it."""


def make_typed_change(change: tuple[Any, Any]) -> dict[str, Any]:
    """Returns a change with values as Avro's serializer takes them."""
    value = change[1]
    rows = {side: value[side] and value[side] | {"balance": Decimal(value[side]["balance"])} for side in SIDES}
    return value | rows | {"source": {"ts_ms": 1, "snapshot": "false", "lsn": value["source"]["lsn"]}}


SIDES = ("before", "after")


@pytest.mark.parametrize("order_by", ["", ", order_by: source.lsn"])
def test_debezium_with_avro_and_a_registry(
    order_by: str, project: FeedProject, registry: LocalRegistry, call: Call
) -> None:
    settings = {"format": "avro", "schema_file": "customers.avsc", "registry": f"{{url: '{registry.url}'}}"}
    (project.root / "customers.avsc").write_text(json.dumps(AVRO_ENVELOPE))
    customers = Customers(project, "{format: debezium, key: id" + order_by + "}", schema="", **settings)
    changes = make_changes(random.Random(4), 120)
    for half in (changes[:60], changes[60:]):
        sent = serialize_orders(registry, project.topic, AVRO_ENVELOPE, map(make_typed_change, half))
        for value, change in zip(sent, half, strict=True):
            send(project, [value, None] if change[1]["op"] == "d" else [value])
        code, printed = call("run", "customers", "--no-dagster")
        assert code == 0, printed
    assert map_names(customers.read()) == fold_values([value for _, value in changes], {})
    code, printed = call("table", "check", "customers")
    assert code == 0, printed


def fold_values(values: Iterable[Mapping[str, Any]], rows: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the name of each row after these changes."""
    rows = dict(rows)
    for value in values:
        if value["op"] == "t":
            rows.clear()
        elif value["op"] == "d":
            rows.pop(value["before"]["id"], None)
        else:
            rows[value["after"]["id"]] = value["after"]["name"]
    return rows


PROTOBUF_ENVELOPE = """\
syntax = "proto3";
package shop;
message Value { int64 id = 1; optional string name = 2; string balance = 3; }
message Source { int64 ts_ms = 1; int64 lsn = 2; }
message Envelope {
  optional Value before = 1;
  optional Value after = 2;
  Source source = 3;
  string op = 4;
  optional int64 ts_ms = 5;
}
"""


def test_debezium_with_protobuf_and_a_registry(project: FeedProject, registry: LocalRegistry, call: Call) -> None:
    settings = {"format": "protobuf", "schema_file": "customers.proto", "registry": f"{{url: '{registry.url}'}}"}
    (project.root / "customers.proto").write_text(PROTOBUF_ENVELOPE)
    settings |= {"message": "shop.Envelope"}
    customers = Customers(project, "{format: debezium, key: id, order_by: source.lsn}", schema="", **settings)
    message = make_message_class(from_file(PROTOBUF_ENVELOPE, NOWHERE, "shop.Envelope")[0])
    values = [value for _, value in make_changes(random.Random(4), 80)]
    sides = [{k: v for k, v in value.items() if v is not None} for value in values]
    changes = [message(**side | {"source": {"lsn": side["source"]["lsn"]}}) for side in sides]
    send(project, serialize_messages(registry, project.topic, changes))
    code, printed = call("run", "customers", "--no-dagster")
    assert code == 0, printed
    assert map_names(customers.read()) == fold_values(values, {})
    assert call("table", "check", "customers")[0] == 0


def apply_changes(records: Iterable[Mapping[str, Any]], *, by_lsn: bool = False) -> dict[Any, Any]:
    """Returns the name of each row after these records of Kafka, applied one after the other."""
    parsed = [(r, json.loads(r["value"]) if r["value"] else None) for r in records]

    def order(pair: tuple[Mapping[str, Any], Any]) -> Any:
        record, value = pair
        return value["source"]["lsn"] if by_lsn else (record["partition"], record["offset"])

    rows: dict[Any, Any] = {}
    for record, value in sorted(parsed, key=order):
        if value is None or value["op"] == "d":
            rows.pop(json.loads(record["key"])["id"], None)
        elif value["op"] == "t":
            rows.clear()
        else:
            rows[value["after"]["id"]] = value["after"]["name"]
    return rows


def make_changes(chance: random.Random, count: int, truncations: bool = True) -> list[tuple[Any, Any]]:
    """Returns random changes of few rows, with rising sequence numbers, as a source would send them."""
    rows: dict[int, Any] = {}
    out: list[tuple[Any, Any]] = []
    for lsn in range(90, 90 + count):
        id, new = chance.randrange(12), build_row(chance.randrange(12), f"n{lsn}")
        new["id"] = id
        if truncations and chance.random() < 0.03:
            rows.clear()
            out.append(build_change("t", None, None, lsn))
        elif id in rows and chance.random() < 0.4:
            out.append(build_change("d", rows.pop(id), None, lsn))
        else:
            out.append(build_change("u" if id in rows else chance.choice("cr"), rows.get(id), new, lsn))
            rows[id] = new
    return out


@pytest.mark.parametrize(("seed", "bucket_rows"), [(0, key_fold.BUCKET_ROWS), (1, 2)])
def test_ranges_that_land_in_any_order_and_again_give_the_rows_of_the_log(
    project: FeedProject, seed: int, bucket_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_fold, "BUCKET_ROWS", bucket_rows)
    chance = random.Random(seed)
    customers = Customers(project, "{format: debezium, key: id}")
    for change in make_changes(chance, 120):
        customers.produce(change, *([(change[0], None)] if change[1]["op"] == "d" else []))
    records = consume_topic(project.kafka, project.topic)
    cuts = [0, *sorted(chance.sample(range(1, len(records)), 7)), len(records)]
    ranges = list(pairwise(cuts))
    chance.shuffle(ranges)
    landed = list[Mapping[str, Any]]()
    for number, (start, end) in enumerate(ranges):
        run(customers.feed, request_offsets(project.topic, 0, start, end))
        landed += records[start:end]
        if number == 4:
            run(customers.feed, replace(request_offsets(project.topic, 0, *ranges[1]), replace=True))
        customers.sync()
        assert map_names(customers.read()) == apply_changes(landed)
    files = customers.reader.list_files(customers.reader.list_snapshots()[-1])
    assert (len(files) > 1) == (bucket_rows == 2)


@pytest.mark.parametrize("fields", ["source.lsn", "kafka_timestamp", "[source.file, source.pos]"])
def test_changes_of_two_partitions_are_ordered_by_a_field(
    fields: str, tmp_path: Path, kafka: LocalKafka, fresh_topic: Any
) -> None:
    chance, project = random.Random(7), FeedProject(tmp_path, kafka, fresh_topic(partitions=2))
    customers = Customers(project, "{format: debezium, key: id, order_by: " + fields + "}")
    for change in make_changes(chance, 60):
        stamp = 1_700_000_000_000 + change[1]["source"]["lsn"]
        customers.produce(change, partition=chance.randrange(2), stamp=stamp)
    records = consume_topic(project.kafka, project.topic)
    ends = Counter(r["partition"] for r in records)
    landed = list[Mapping[str, Any]]()
    for partition, first in [(1, 15), (0, 20), (1, 0), (0, 0)]:
        end = ends[partition] if first else {0: 20, 1: 15}[partition]
        run(customers.feed, request_offsets(project.topic, partition, first, end))
        landed += [r for r in records if r["partition"] == partition and first <= r["offset"] < end]
        customers.sync()
        assert map_names(customers.read()) == apply_changes(landed, by_lsn=True)


def test_row_with_changes_in_two_partitions_needs_an_order(tmp_path: Path, kafka: LocalKafka, fresh_topic: Any) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2))
    customers = Customers(project, "{format: debezium, key: id}")
    customers.produce(build_change("c", None, build_row(1, "Ada"), 1))
    customers.produce(build_change("c", None, build_row(2, "Bea"), 2), partition=1)
    run(customers.feed)
    customers.sync()
    customers.produce(build_change("u", build_row(1, "Ada"), build_row(1, "Ada L."), 3), partition=1)
    run(customers.feed)
    with pytest.raises(TableRefused, match="partitions 0 and 1") as refusal:
        customers.sync()
    assert "order_by: source.lsn" in refusal.value.remedy
    assert map_names(customers.read()) == {1: "Ada", 2: "Bea"}
    customers.settings["changes"] = "{format: debezium, key: id, order_by: source.lsn}"
    customers.feed = project.write_feed("customers", **customers.settings)
    customers.sync()
    assert map_names(customers.read()) == {1: "Ada L.", 2: "Bea"}


def test_refused_current_rows_leave_the_other_table_reported(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2))
    customers = Customers(project, "{format: debezium, key: id}")
    customers.produce(build_change("c", None, build_row(1, "Ada"), 1))
    customers.produce(build_change("u", build_row(1, "Ada"), build_row(1, "Ada L."), 3), partition=1)
    assert main(["run", "customers", "--project", str(tmp_path)]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "partitions 0 and 1" in printed
    assert "order_by: source.lsn" in printed
    with open_instance(Project(tmp_path)) as instance:
        keys = [AssetKey(["customers", name]) for name in ("table", "current")]
        rows, current = (instance.get_latest_materialization_event(key) for key in keys)
    assert current is None
    assert rows is not None
    assert rows.asset_materialization is not None
    assert rows.asset_materialization.metadata["dagster/row_count"].value == 2
    assert main(["table", "sync", "customers", "--project", str(tmp_path)]) == 1
    printed = " ".join(capfd.readouterr().out.split())
    assert "all landed rows were in it already" in printed


def test_row_that_lands_in_the_quarantine_the_second_time_is_undone(project: FeedProject) -> None:
    settings = {"format": "json", "policies": "{quarantine_limit: {share: 1.0}}"}
    customers = Customers(project, "{format: upsert}", **settings)
    customers.produce((1, build_row(1, "Ada")), (2, build_row(2, "Bea")), (3, None))
    run(customers.feed)
    customers.produce((1, build_row(1, "Bad")), (3, build_row(3, "Bad")))
    run(customers.feed)
    customers.sync()
    assert map_names(customers.read()) == {1: "Bad", 2: "Bea", 3: "Bad"}
    rule = {"type": "expect_column_values_to_not_be_in_set", "kwargs": {"column": "name", "value_set": ["Bad"]}}
    contract = project.root / "feeds" / "customers.contract.json"
    contract.write_text(json.dumps({"name": "customers", "expectations": [rule]}))
    customers.feed = project.write_feed("customers", **customers.settings)
    run(customers.feed, replace(request_offsets(project.topic, 0, 3, 5), replace=True))
    customers.sync()
    assert map_names(customers.read()) == {1: "Ada", 2: "Bea"}


def test_table_that_others_changed_is_reported_with_its_remedy(project: FeedProject, call: Call) -> None:
    customers = Customers(project, "{format: upsert}", format="json")
    customers.produce(*((n, build_row(n, f"n{n}")) for n in range(20)))
    assert call("run", "customers", "--no-dagster")[0] == 0
    rows = customers.read()
    assert len(rows) == 20
    code, printed = call("table", "check", "customers")
    assert (code, "the rows of 20 keys" in printed) == (0, True), printed

    (file,) = customers.reader.list_files(customers.reader.list_snapshots()[-1])
    pq.write_table(pq.read_table(file).slice(1), file)  # a file that lost its first row
    code, printed = call("table", "check", "customers", "--json")
    assert (code, len(printed["current"]["keys_differ"])) == (1, 1), printed
    remedy = "sluice table sync customers --repair"
    assert remedy in call("table", "check", "customers")[1]
    assert call("audit", "customers")[0] == 0
    code, printed = call("audit", "customers", "--table")
    assert (code, "1 key in table db.customers_now" in printed, remedy in printed) == (1, True, True), printed
    assert call(*remedy.split()[1:])[0] == 0
    assert customers.read() == rows
    assert call("table", "check", "customers")[0] == call("audit", "customers", "--table")[0] == 0

    customers.reader._load_table().delete("id = 3")
    customers.produce((20, build_row(20, "n20")))
    code, printed = call("run", "customers", "--no-dagster")
    assert remedy in printed, printed
    code, printed = call("table", "status", "customers")
    assert remedy in printed, printed
    assert call("table", "check", "customers")[0] == 1
    assert call(*remedy.split()[1:])[0] == 0
    assert len(customers.read()) == 21

    customers.reader.drop()
    code, printed = call("table", "rebuild", "customers", "--yes", "--json")
    assert code == 0, printed
    assert len(customers.read()) == 21
    code, printed = call("table", "check", "customers")
    assert code == 0, printed


def test_expired_history_stays_in_the_table(project: FeedProject, call: Call) -> None:
    customers = Customers(project, "{format: upsert}", format="json", window="1h")
    for hour in range(2):
        customers.produce((hour, build_row(hour, f"n{hour}")), stamp=1_700_000_000_000 + hour * 3_600_000)
    assert call("run", "customers", "--no-dagster")[0] == 0
    code, printed = call("expire", "customers", "--before", "2023-11-14T23:00", "--reason", "old", "--yes")
    assert code == 0, printed
    customers.produce((1, None))
    assert call("run", "customers", "--no-dagster")[0] == 0
    assert map_names(customers.read()) == {0: "n0"}
    code, printed = call("table", "check", "customers")
    assert code == 0, printed
    code, printed = call("table", "rebuild", "customers", "--yes")
    assert code != 0
    assert "cannot be folded again" in printed
    assert map_names(customers.read()) == {0: "n0"}


def test_other_key_folds_history_again_and_old_files_are_removed(project: FeedProject) -> None:
    customers = Customers(project, "{format: upsert}", format="json")
    customers.produce((1, build_row(7, "Ada")), (2, build_row(7, "Bea")))
    run(customers.feed)
    customers.sync()
    assert map_names(customers.read(("kafka_offset", "name"))) == {0: "Ada", 1: "Bea"}
    customers.settings["changes"] = "{format: upsert, key: id}"
    customers.feed = project.write_feed("customers", **customers.settings)
    customers.produce((9, build_row(8, "Cyd")))
    run(customers.feed)
    customers.sync()
    assert map_names(customers.read()) == {7: "Bea", 8: "Cyd"}
    customers.settings["table"] = customers.settings["table"].replace("{", '{"keep_snapshots": "0s", ', 1)
    customers.feed = project.write_feed("customers", **customers.settings)
    customers.produce((9, build_row(9, "Dot")))
    run(customers.feed)
    assert customers.sync().cleaned != ()
    assert len(customers.read()) == 3
    folder = Path(customers.feed.lake, "tables", "customers_current")
    assert len([*folder.glob("*.parquet")]) == len([*folder.glob("deleted/*.parquet")]) == 1


def test_dagster_shows_the_table_of_current_rows(project: FeedProject, call: Call) -> None:
    customers = Customers(project, "{format: debezium, key: id}")
    customers.produce(build_change("c", None, build_row(1, "Ada")), build_change("c", None, build_row(2, "Bea")))
    code, printed = call("run", "customers")
    assert code == 0, printed
    assert map_names(customers.read()) == {1: "Ada", 2: "Bea"}
    with open_instance(Project(project.root)) as instance:
        event = instance.get_latest_materialization_event(AssetKey(["customers", "current"]))
        assert event is not None
        assert event.asset_materialization is not None
        assert event.asset_materialization.metadata["dagster/row_count"].value == 2


def test_delta_table_of_current_rows(project: FeedProject, call: Call) -> None:
    pytest.importorskip("deltalake")
    customers = Customers(project, "{format: debezium, key: id}", table="{delta: {}, current: true}")
    chance = random.Random(3)
    reader = DeltaReader(f"{project.root}/.sluice/lake/tables/customers_current")
    for _ in range(3):
        customers.produce(*make_changes(chance, 40))
        assert call("run", "customers", "--no-dagster")[0] == 0
        newest = reader.list_snapshots()[-1]
        rows = reader.read_rows(newest, COLUMNS)
        assert map_names(rows) == apply_changes(consume_topic(project.kafka, project.topic))
        assert read_by_duckdb(reader.list_files(newest), COLUMNS) == rows
    code, printed = call("table", "check", "customers")
    assert code == 0, printed


def test_erased_records_leave_the_table_of_current_rows(project: FeedProject, call: Call) -> None:
    customers = Customers(project, "{format: debezium, key: id}")
    customers.produce(*(build_change("c", None, build_row(n, f"canary-{n}-x")) for n in range(4)))
    customers.produce(build_change("d", build_row(3, "canary-3-x"), None))
    assert call("run", "customers", "--no-dagster")[0] == 0
    condition = "coalesce(after.id, before.id) in (2, 3)"
    code, printed = call("erase", "customers", "--where", condition, "--reason", "asked", "--yes")
    assert code == 0, printed
    assert map_names(customers.read()) == {0: "canary-0-x", 1: "canary-1-x"}
    written = [(name, data) for name, data in read_everything(project.root / ".sluice") if "current" in str(name)]
    assert [name for name, data in written if b"canary-2" in data] == []
    assert any(b"canary-1" in data for _, data in written)
    deleted = Path(customers.feed.lake, "tables", "customers_current", "deleted")
    assert [pq.read_table(p).num_rows for p in deleted.iterdir()] == [0]
    assert call("table", "check", "customers")[0] == 0


def test_example_of_the_page_about_tables(project: FeedProject, call: Call) -> None:
    """The feed lands changes as Debezium sends them, and the queries read both tables."""
    page = (Path(__file__).parents[2] / "docs/tables.md").read_text().partition("## Current rows")[2]
    feed, queries = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("yaml", "sql"))
    lines = feed.replace("shop.public.customers", project.topic)
    (project.root / "feeds").mkdir()
    path = project.root / "feeds" / "customers.yaml"
    path.write_text(f"kafka: {{bootstrap: '{project.kafka.bootstrap}'}}\n{lines}")
    customers = Customers.__new__(Customers)
    customers.project = project
    rows = [build_row(41, "Ada", "3.00"), build_row(42, "Bea", "1.50"), build_row(42, "Bea B.", "4.25")]
    customers.produce(build_change("r", None, rows[0]), build_change("c", None, rows[1]))
    customers.produce(build_change("u", rows[1], rows[2]), build_change("d", rows[0], None), ({"id": 41}, None))
    code, printed = call("run", "customers", "--no-dagster")
    assert code == 0, printed
    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/.sluice/catalog.db"}
    with duckdb.connect() as db:
        db.execute("create schema db")
        for name in ("customers", "customers_now"):
            reader = IcebergReader(f"db.{name}", catalog)
            files = reader.list_files(reader.list_snapshots()[-1])
            db.execute(f"create table db.{name} as from read_parquet({files}, hive_partitioning = false)")
        current, changes = (db.execute(q).fetchall() for q in queries.strip().removesuffix(";").split(";"))
    assert current == [(42, "Bea B.", Decimal("4.25"))]
    assert changes == [("c", None), ("u", Decimal("2.75"))]
