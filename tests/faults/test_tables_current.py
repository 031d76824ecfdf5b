"""A table of current rows over a real Kafka, while runs, repeated landings, compactions and publishers are killed at
random. After each round, every new snapshot has the rows of a dictionary that is folded from Kafka's records up to the
snapshot's mark. PyIceberg or deltalake reads it, DuckDB reads its files, and where `make readers` names its Python,
Spark reads it with a filter.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.operating.feed_tables import compare_tables
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_tables
from tests import spark_reader
from tests.faults.account import SEED
from tests.faults.writers import bring_up, land, land_again, merge, start_writer
from tests.integration.support import FeedProject, consume_topic, open_feed_ledger, open_inline_ports
from tests.table_readers import DeltaReader, IcebergReader, Reader, read_by_duckdb

pytestmark = [pytest.mark.faults, pytest.mark.kafka]

ROUNDS, KEYS = 30, 40
COLUMNS = ("id", "amount")


@pytest.fixture
def spark(kind: str, tmp_path: Path) -> Iterator[spark_reader.Session | None]:
    with spark_reader.Session(kind, tmp_path) if spark_reader.PYTHON in os.environ else nullcontext() as session:
        yield session


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_current_rows_match_a_dictionary_while_writers_are_killed(
    kind: str,
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    spark: spark_reader.Session | None,
) -> None:
    chance, project = random.Random(SEED), FeedProject(tmp_path, kafka, fresh_topic(partitions=3))
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    iceberg = {"iceberg": {"name": "db.orders", "catalog": catalog}, "current": "db.orders_now"}
    feed = project.write_feed(
        changes="{format: debezium, key: id}",
        schema="{id: int64, amount: int32}",
        table=json.dumps(iceberg if kind == "iceberg" else {"delta": {}, "current": True}),
        window="{length: 1m, grace: 0s}",
    )
    reader: Reader = IcebergReader("db.orders_now", catalog)
    table = "sluice.db.orders_now"
    if kind == "delta":
        reader = DeltaReader(path := f"{tmp_path}/.sluice/lake/tables/orders_current")
        table = f"delta.`{path}`"
    rows, ends = dict[int, int](), Counter[tuple[str, str]]()
    (tmp_path / "ended").mkdir()
    began = time.time()
    for _ in range(ROUNDS):
        _produce(project, chance, rows)
        names = ["land", "bring_up", chance.choice(["land", "land_again", "merge", "bring_up"])]
        processes = [start_writer(tmp_path, writer) for writer in names]
        for writer, process in zip(names, processes, strict=True):
            process.join(chance.uniform(0.0, chance.choice([0.2, 1.5])) if chance.random() < 0.6 else 60)
            if process.is_alive():
                process.kill()
                process.join()
                ends[writer, "killed"] += 1
        _check(project, feed, reader, spark, table)
    ends.update((note.name.partition("-")[0], note.read_text()) for note in (tmp_path / "ended").iterdir())
    assert all(any(how == "killed" for writer, how in ends if writer == name) for name in ("land", "bring_up"))
    unexpected = ("TableRefused", "TableDiffers", "EntriesLost")
    assert [how for _, how in ends if how.startswith(unexpected)] == []
    time.sleep(max(0.0, 60 - began % 60 + began + 1 - time.time()))  # `land_again` takes the minute before this one
    for write in (land, land_again, merge, bring_up):
        write(feed)
    _check(project, feed, reader, spark, table)
    assert dict(reader.read_rows(reader.list_snapshots()[-1], COLUMNS)) == rows
    with open_inline_ports(feed) as ports, open_tables(feed, ports.lake) as tables:
        assert all(compared.right for _, compared in compare_tables(feed, ports, tables))


def _produce(project: FeedProject, chance: random.Random, rows: dict[int, int]) -> None:
    """Produce changes of random rows, with a tombstone behind each deletion, and apply them to `rows`."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    for _ in range(chance.randint(1, 60)):
        id, amount = chance.randrange(KEYS), chance.randrange(1 << 20)
        before = {"id": id, "amount": rows[id]} if id in rows else None
        key, after = json.dumps({"id": id}).encode(), {"id": id, "amount": amount}
        is_deletion = before is not None and chance.random() < 0.4
        value = {"op": "d" if is_deletion else "u" if before else "c", "before": before, "source": {}}
        producer.send(project.topic, json.dumps(value | {"after": None if is_deletion else after}).encode(), key)
        if is_deletion:
            producer.send(project.topic, None, key)
            del rows[id]
        else:
            rows[id] = amount
    producer.close()


def _check(project: FeedProject, feed: Feed, reader: Reader, spark: spark_reader.Session | None, table: str) -> None:
    """Assert that the newest snapshot has the rows of all records that had landed before its mark."""
    with open_inline_ports(feed) as ports, open_tables(feed, ports.lake) as tables:
        assert tables.current
        if (head := tables.current.table.look()) is None or head.snapshot is None:
            return
        landed = set[tuple[int, int]]()
        for number, entry in open_feed_ledger(feed, ports).entries():
            if number < head.mark and isinstance(entry, PublishEntry):
                for s in (r.offset_range for r in entry.receipts):
                    landed.update((s.partition, offset) for offset in range(s.start, s.end))
    expected: dict[Any, Any] = {}
    for record in consume_topic(project.kafka, project.topic):
        if (record["partition"], record["offset"]) not in landed or record["value"] is None:
            continue
        value = json.loads(record["value"])
        if value["after"]:
            expected[value["after"]["id"]] = value["after"]["amount"]
        else:
            expected.pop(value["before"]["id"])
    rows = reader.read_rows(head.snapshot, COLUMNS)
    assert dict(rows) == expected
    assert len(rows) == len(expected)
    assert read_by_duckdb(reader.list_files(head.snapshot), COLUMNS) == rows
    if spark:
        filtered = spark.read_rows(
            f"SELECT id, amount FROM {table} VERSION AS OF {head.snapshot} WHERE id >= {KEYS // 2}"
        )
        assert sorted(filtered) == sorted((i, amount) for i, amount in expected.items() if i >= KEYS // 2)
