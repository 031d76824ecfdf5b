"""A table over a real Kafka while all that writes is killed at random: runs, compactions, replays, landings again,
publishers, several at once. Offset ranges share files, or not. In the end table = ledger = Kafka, and no snapshot on
the way has a row twice, or one that is not in Kafka.

Judged by PyIceberg, deltalake and DuckDB, against a plain consumer.
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
from tests.faults.writers import WRITERS, begin, bring_up, fix, land, merge
from tests.integration.support import Place, consumed, edges, ledger
from tests.table_readers import DeltaReader, IcebergReader, Reader, by_duckdb

pytestmark = [pytest.mark.faults, pytest.mark.kafka]

PARTITIONS, ROUNDS = 12, 60
COLUMNS = ("kafka_partition", "kafka_offset", "amount")


def _feed(place: Place, kind: str) -> Feed:
    iceberg = f"iceberg: {{name: db.orders, catalog: {{type: sql, uri: 'sqlite:///{place.root}/catalog.db'}}}}"
    return place.feed(
        format="json",
        schema="{id: int64 not null, amount: int32}",
        policies="{quarantine_limit: {share: 1.0}}",
        window="{length: 1m, grace: 0s}",
        table=f"{{{iceberg if kind == 'iceberg' else 'delta: {}'}, quarantine: true}}",
    )


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_a_table_while_all_that_writes_is_killed_at_random(
    kind: str, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    chance, place = random.Random(SEED), Place(tmp_path, kafka, fresh_topic(partitions=PARTITIONS))
    feed = _feed(place, kind)
    rows, refused = _readers(place, kind)
    ended, numbers = Counter[tuple[str, str]](), iter(range(1 << 30))
    (tmp_path / "ended").mkdir()
    for number in range(ROUNDS):
        _produce(place, chance, numbers)
        asked = ["land", "bring_up", *chance.choices([*WRITERS], k=2)]
        processes = [begin(tmp_path, what) for what in asked]
        for what, process in zip(asked, processes, strict=True):
            process.join(chance.uniform(0.0, 0.8) if chance.random() < 0.6 else 60)
            if process.is_alive():
                process.kill()
                process.join()
                ended[what, "killed"] += 1
        if number % 5 == 4 and number > 5:
            _check(place, rows)
            _check(place, refused)
    ended.update((note.name.partition("-")[0], note.read_text()) for note in (tmp_path / "ended").iterdir())
    assert all(any(how == "killed" for what, how in ended if what == name) for name in ("land", "bring_up"))

    wrong = ("TableRefused", "TableDiffers", "EntriesLost")
    assert [how for what, how in ended if what == "bring_up" and how.startswith(wrong)] == []
    for write in (land, fix, merge, bring_up):
        write(feed)
    with edges(feed) as opened, open_tables(feed, opened.lake) as tables:
        book = ledger(feed, opened)
        assert audit(book, opened.lake, hashes=True).problems == ()
        for of, table in tables.of_parts:
            assert compare(book, opened.lake, table, table.look(), book.read(), of).same
    logged = consumed(place.kafka, place.topic)
    wanted = sorted((r["partition"], r["offset"], int(json.loads(r["value"])["amount"])) for r in logged)
    newest = rows.snapshots()[-1]
    assert rows.rows(newest, COLUMNS) == wanted
    assert by_duckdb(rows.files(newest), COLUMNS) == wanted
    assert refused.rows(refused.snapshots()[-1], ("partition", "offset")) == []
    _check(place, rows)
    _check(place, refused)


def _produce(place: Place, chance: random.Random, numbers: Any) -> None:
    """Some records now, in all partitions or in two: those have files of their own. A tenth is refused."""
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap, linger_ms=5)
    some = range(PARTITIONS) if chance.random() < 0.5 else chance.sample(range(PARTITIONS), 2)
    for p in some:
        for _ in range(chance.randint(1, 30)):
            n = next(numbers)
            said = {"id": n, "amount": str(n) if n % 10 == 7 else n}
            producer.send(place.topic, json.dumps(said).encode(), b"%d" % n, partition=p)
    producer.close()


def _readers(place: Place, kind: str) -> tuple[Reader, Reader]:
    lake = place.root / ".sluice" / "lake"
    if kind == "delta":
        return DeltaReader(f"{lake}/data/orders"), DeltaReader(f"{lake}/quarantine/orders")
    catalog = {"type": "sql", "uri": f"sqlite:///{place.root}/catalog.db"}
    return IcebergReader("db.orders", catalog), IcebergReader("db.orders_quarantine", catalog)


def _check(place: Place, reader: Reader) -> None:
    """No snapshot has a row twice, or one that is not in Kafka; each file that it names is there."""
    logged = {(r["partition"], r["offset"]) for r in consumed(place.kafka, place.topic)}
    columns = COLUMNS[:2] if "quarantine" not in str(reader) else ("partition", "offset")
    for snapshot in reader.snapshots():
        found = reader.rows(snapshot, columns)
        assert len(found) == len({*found}), "a row is there twice"
        assert logged.issuperset(found)
