"""A table over a real Kafka while all writers are killed at random: runs, compactions, replays, repeated landings,
publishers, several at once. Some offset ranges share files. In the end table = ledger = Kafka, and no snapshot has a
duplicate row or one that is not in Kafka.

PyIceberg, deltalake and DuckDB read the table, which is compared with a plain consumer.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.tables.check import compare
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_tables
from tests.faults.account import SEED
from tests.faults.writers import WRITERS, bring_up, fix, land, merge, start_writer
from tests.integration.support import FeedProject, consume_topic, open_feed_ledger, open_inline_ports
from tests.table_readers import DeltaReader, IcebergReader, Reader, read_by_duckdb

pytestmark = [pytest.mark.faults, pytest.mark.kafka]

PARTITIONS, ROUNDS = 12, 60
COLUMNS = ("kafka_partition", "kafka_offset", "amount")


def _write_feed(project: FeedProject, kind: str) -> Feed:
    iceberg = f"iceberg: {{name: db.orders, catalog: {{type: sql, uri: 'sqlite:///{project.root}/catalog.db'}}}}"
    return project.write_feed(
        format="json",
        schema="{id: int64 not null, amount: int32}",
        policies="{quarantine_limit: {share: 1.0}}",
        window="{length: 1m, grace: 0s}",
        table=f"{{{iceberg if kind == 'iceberg' else 'delta: {}'}, quarantine: true}}",
    )


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_table_matches_kafka_while_writers_are_killed_at_random(
    kind: str, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    chance, project = random.Random(SEED), FeedProject(tmp_path, kafka, fresh_topic(partitions=PARTITIONS))
    feed = _write_feed(project, kind)
    rows, quarantine = _open_readers(project, kind)
    ends, numbers = Counter[tuple[str, str]](), iter(range(1 << 30))
    (tmp_path / "ended").mkdir()
    for number in range(ROUNDS):
        _produce(project, chance, numbers)
        names = ["land", "bring_up", *chance.choices([*WRITERS], k=2)]
        processes = [start_writer(tmp_path, writer) for writer in names]
        for writer, process in zip(names, processes, strict=True):
            process.join(chance.uniform(0.0, 0.8) if chance.random() < 0.6 else 60)
            if process.is_alive():
                process.kill()
                process.join()
                ends[writer, "killed"] += 1
        if number % 5 == 4 and number > 5:
            _check(project, rows)
            _check(project, quarantine)
    ends.update((note.name.partition("-")[0], note.read_text()) for note in (tmp_path / "ended").iterdir())
    assert all(any(how == "killed" for writer, how in ends if writer == name) for name in ("land", "bring_up"))

    unexpected = ("TableRefused", "TableDiffers", "EntriesLost")
    assert [how for writer, how in ends if writer == "bring_up" and how.startswith(unexpected)] == []
    for write in (land, fix, merge, bring_up):
        write(feed)
    with open_inline_ports(feed) as ports, open_tables(feed, ports.lake) as tables:
        ledger = open_feed_ledger(feed, ports)
        assert audit(ledger, ports.lake, hashes=True).problems == ()
        for of, table in tables.of_parts:
            assert compare(ledger, ports.lake, table, table.look(), ledger.read(), of).same
    records = consume_topic(project.kafka, project.topic)
    expected = sorted((r["partition"], r["offset"], int(json.loads(r["value"])["amount"])) for r in records)
    newest = rows.list_snapshots()[-1]
    assert rows.read_rows(newest, COLUMNS) == expected
    assert read_by_duckdb(rows.list_files(newest), COLUMNS) == expected
    assert quarantine.read_rows(quarantine.list_snapshots()[-1], ("partition", "offset")) == []
    _check(project, rows)
    _check(project, quarantine)


def _produce(project: FeedProject, chance: random.Random, numbers: Any) -> None:
    """Produce records to all partitions or to two, which get separate files. A tenth is quarantined."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    partitions = range(PARTITIONS) if chance.random() < 0.5 else chance.sample(range(PARTITIONS), 2)
    for p in partitions:
        for _ in range(chance.randint(1, 30)):
            n = next(numbers)
            value = {"id": n, "amount": str(n) if n % 10 == 7 else n}
            producer.send(project.topic, json.dumps(value).encode(), b"%d" % n, partition=p)
    producer.close()


def _open_readers(project: FeedProject, kind: str) -> tuple[Reader, Reader]:
    lake = project.root / ".sluice" / "lake"
    if kind == "delta":
        return DeltaReader(f"{lake}/data/orders"), DeltaReader(f"{lake}/quarantine/orders")
    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
    return IcebergReader("db.orders", catalog), IcebergReader("db.orders_quarantine", catalog)


def _check(project: FeedProject, reader: Reader) -> None:
    """Assert that no snapshot has a duplicate row, a row that is not in Kafka, or a missing file."""
    records = {(r["partition"], r["offset"]) for r in consume_topic(project.kafka, project.topic)}
    columns = COLUMNS[:2] if "quarantine" not in str(reader) else ("partition", "offset")
    for snapshot in reader.list_snapshots():
        rows_of_snapshot = reader.read_rows(snapshot, columns)
        assert len(rows_of_snapshot) == len({*rows_of_snapshot}), "a row is there twice"
        assert records.issuperset(rows_of_snapshot)
