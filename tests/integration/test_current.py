"""Tables of current rows on a real Kafka, compared with a dictionary that is folded from the raw records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

pytest.importorskip("pyiceberg")

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.operating.feed_tables import sync_tables
from sluice.pipelines.tables.sync import Synced
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_tables
from tests.integration.support import FeedProject, open_inline_ports, run
from tests.table_readers import IcebergReader, Row, read_by_duckdb

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

    def produce(self, *records: tuple[Any, Any], partition: int = 0) -> None:
        producer = KafkaProducer(bootstrap_servers=self.project.kafka.bootstrap)
        for key, value in records:
            packed = [None if part is None else json.dumps(part).encode() for part in (key, value)]
            producer.send(self.project.topic, packed[1], packed[0], partition=partition)
        producer.close()


def build_row(id: int, name: str, balance: str = "1.00") -> dict[str, Any]:
    return {"id": id, "name": name, "balance": balance}


def build_change(
    op: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, lsn: int = 0
) -> tuple[Any, Any]:
    key = {"id": (after or before or {}).get("id")} if op != "t" else None
    source = {"lsn": lsn, "db": "shop", "table": "customers"}
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


def apply_changes(
    records: Iterable[Mapping[str, Any]], order: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
) -> dict[Any, Any]:
    """Returns the rows after these raw records of Kafka, by key: applied in order, one after the other."""
    changes = [(r, json.loads(r["value"]) if r["value"] else None) for r in records]
    rows: dict[Any, Any] = {}
    for record, value in sorted(changes, key=lambda c: order(*c)):
        if value is None:
            rows.pop(json.loads(record["key"])["id"], None)
        elif value["op"] == "t":
            rows.clear()
        elif value["op"] == "d":
            rows.pop(value["before"]["id"], None)
        else:
            rows[value["after"]["id"]] = value["after"]["name"]
    return rows
