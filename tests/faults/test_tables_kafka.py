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
from tests.table_readers import DeltaReader, IcebergReader, Reader, Row, read_by_duckdb

pytestmark = [pytest.mark.faults, pytest.mark.kafka]

PARTITIONS, ROUNDS = 12, 60
COLUMNS = ("kafka_partition", "kafka_offset", "amount")


def _write_feed(project: FeedProject, kind: str) -> Feed:
    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
    iceberg = {"iceberg": {"name": "db.orders", "catalog": catalog}, "quarantine": True}
    delta, schema = {"delta": {}, "quarantine": True}, {"id": "int64 not null", "amount": "int32"}
    rows: dict[str, Any] = {"schema": schema, "table": iceberg if kind == "iceberg" else delta}
    if kind == "split":
        into = {"odd": {"schema": schema, "table": iceberg}, "even": {"schema": schema, "table": delta}}
        rows = {"split": {"by": {"header": "kind"}, "into": into}}
    return project.write_feed(
        format="json",
        policies="{quarantine_limit: {share: 1.0}}",
        window="{length: 1m, grace: 0s}",
        **{key: json.dumps(value) for key, value in rows.items()},
    )


@pytest.mark.parametrize("kind", ["iceberg", "delta", "split"])
def test_table_matches_kafka_while_writers_are_killed_at_random(
    kind: str, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    chance, project = random.Random(SEED), FeedProject(tmp_path, kafka, fresh_topic(partitions=PARTITIONS))
    feed = _write_feed(project, kind)
    readers = _open_readers(project, kind)
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
            _check(project, readers)
    ends.update((note.name.partition("-")[0], note.read_text()) for note in (tmp_path / "ended").iterdir())
    assert all(any(how == "killed" for writer, how in ends if writer == name) for name in ("land", "bring_up"))

    unexpected = ("TableRefused", "TableDiffers", "EntriesLost")
    assert [how for writer, how in ends if writer == "bring_up" and how.startswith(unexpected)] == []
    for write in (land, fix, merge, bring_up):
        write(feed)
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        assert audit(ledger, ports.lake, hashes=True).problems == ()
        for dataset in feed.table_feeds:
            with open_tables(dataset, ports.lake) as tables:
                for of, table in tables.of_parts:
                    assert compare(ledger, ports.lake, table, table.look(), ledger.read(), of).same
    expected = _read_expected(project)
    for output, (rows, quarantine) in readers.items():
        newest = rows.list_snapshots()[-1]
        assert rows.read_rows(newest, COLUMNS) == expected[output]
        assert read_by_duckdb(rows.list_files(newest), COLUMNS) == expected[output]
        assert quarantine.read_rows(quarantine.list_snapshots()[-1], ("partition", "offset")) == []
    _check(project, readers)


def _read_expected(project: FeedProject) -> dict[str, list[Row]]:
    """Returns the records of each output, and of all under the empty name, by a plain consumer."""
    expected: dict[str, list[Row]] = {"": [], "odd": [], "even": []}
    for r in consume_topic(project.kafka, project.topic):
        value = json.loads(r["value"])
        row = (r["partition"], r["offset"], int(value["amount"]))
        for output in ("", "odd" if value["id"] % 2 else "even"):
            expected[output].append(row)
    return {output: sorted(rows) for output, rows in expected.items()}


def _produce(project: FeedProject, chance: random.Random, numbers: Any) -> None:
    """Produce records to all partitions or to two, which get separate files. A tenth is quarantined."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    partitions = range(PARTITIONS) if chance.random() < 0.5 else chance.sample(range(PARTITIONS), 2)
    for p in partitions:
        for _ in range(chance.randint(1, 30)):
            n = next(numbers)
            value = {"id": n, "amount": str(n) if n % 10 == 7 else n}
            headers = [("kind", b"odd" if n % 2 else b"even")]
            producer.send(project.topic, json.dumps(value).encode(), b"%d" % n, headers, partition=p)
    producer.close()


Readers = dict[str, tuple[Reader, Reader]]
"""By output, readers of the tables of its rows and of its quarantine."""


def _open_readers(project: FeedProject, kind: str) -> Readers:
    lake, below = project.root / ".sluice" / "lake", "orders/even" if kind == "split" else "orders"
    catalog = {"type": "sql", "uri": f"sqlite:///{project.root}/catalog.db"}
    delta = DeltaReader(f"{lake}/data/{below}"), DeltaReader(f"{lake}/quarantine/{below}")
    iceberg = IcebergReader("db.orders", catalog), IcebergReader("db.orders_quarantine", catalog)
    return {"odd": iceberg, "even": delta} if kind == "split" else {"": iceberg if kind == "iceberg" else delta}


def _check(project: FeedProject, readers: Readers) -> None:
    """Assert that no snapshot has a duplicate row, a row of another output, or a missing file."""
    expected = _read_expected(project)
    for output, pair in readers.items():
        records = {row[:2] for row in expected[output]}
        for reader, columns in zip(pair, (COLUMNS[:2], ("partition", "offset")), strict=True):
            for snapshot in reader.list_snapshots():
                rows_of_snapshot = reader.read_rows(snapshot, columns)
                assert len(rows_of_snapshot) == len({*rows_of_snapshot}), "a row is there twice"
                assert records.issuperset(rows_of_snapshot)
