"""Typed feeds on a real Kafka: landed and quarantined are all there is, with the values that an independent reader
finds in what a plain consumer reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import Class, explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.errors import QuarantineExceeded
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.model.kafka import TopicPartition
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.lake import open_lake
from sluice.resources.local.events import Mix, SendOptions, orders, send
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import Place, asked, consumed, edges, ledger, run, visible

SCHEMA = {
    "order_id": "string not null",
    "customer": "string",
    "ts": "timestamp(ms)",
    "amount": "decimal(12,2)",
    "currency": "string",
    "items": "int32",
    "country": "string",
}
START = 1_700_000_000_000


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    return Place(tmp_path, kafka, fresh_topic(partitions=3), lake())


def produce(place: Place, count: int, **shares: float) -> None:
    kafka = KafkaSettings(bootstrap=place.kafka.bootstrap)
    mix = Mix(seed=count, **shares)  # type: ignore[arg-type]
    how = SendOptions((place.topic,), transactional_id=f"{place.topic}-tx", transaction_records=100)
    send(kafka, orders(mix, count, START, START + 3_600_000), mix, how)


def typed(place: Place, **settings: Any) -> Feed:
    return place.feed(**{"format": "json", "schema": json.dumps(SCHEMA), "window": "15m"} | settings)


def expected(record: dict[str, Any]) -> tuple[Any, ...] | None:
    """The row by Python's own reader; None where the record is no order."""
    where = (record["partition"], record["offset"], record["key"])
    if record["value"] is None:
        return (*where, None, None, None, None, None, True)
    try:
        order = json.loads(record["value"].decode(), parse_float=Decimal)
    except ValueError:
        return None
    if not isinstance(order["items"], int):
        return None
    extra = {k: v for k, v in order.items() if k not in SCHEMA}
    return (*where, order["order_id"], order["ts"], order["amount"], order["items"], extra, False)


def landed(feed: Feed) -> list[tuple[Any, ...]]:
    query = """select kafka_partition, kafka_offset, kafka_key, order_id,
        strftime(ts at time zone 'UTC', '%Y-%m-%dT%H:%M:%S.%gZ'), amount, items, _extra, kafka_tombstone
        from read_parquet($files, hive_partitioning = false) order by all"""
    rows = [tuple(r.values()) for r in asked(feed, query, visible(feed)).to_pylist()]
    return [(*r[:7], json.loads(r[7]) if r[7] else r[7], r[8]) for r in rows]


def quarantined(feed: Feed) -> list[dict[str, Any]]:
    lake = open_lake(feed)
    found = (lake.open(path) for path in lake.list(f"quarantine/{feed.name}"))
    return [row for file in found for row in pq.read_table(file).to_pylist()]


@pytest.mark.each_lake
def test_every_record_is_landed_typed_or_quarantined(place: Place) -> None:
    produce(place, 3000, bad=0.02, tombstones=0.02, headers=0.1, aborted=0.3)
    feed = typed(place)
    counts = run(feed).batches[0].counts
    read = consumed(place.kafka, place.topic)
    good = [row for r in read if (row := expected(r)) is not None]
    bad = [r for r in read if expected(r) is None]
    assert counts.landed == len(good)
    assert counts.quarantined == len(bad) > 20
    assert landed(feed) == sorted(good, key=lambda r: r[:2])
    held = quarantined(feed)
    columns = ("partition", "offset", "key", "value", "headers")
    assert sorted([r[c] for c in columns[:4]] for r in held) == sorted([r[c] for c in columns[:4]] for r in bad)
    assert {r["reason"] for r in held} == {"not_json", "wrong_type", "invalid_utf8"}
    with edges(feed) as opened:
        book = ledger(feed, opened)
        report = audit(book, opened.lake)
        found = {book.read().current[p.tp]: p for p in opened.cluster.partitions([place.topic], feed.isolation)}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        report = rescan(report, book, opened.lake, feed.shape, CurrentLog(fetcher, feed.isolation, found))
        fetcher.close()
        assert (report.problems, report.compared) == ((), len(good))
        where = TopicPartition(place.topic, held[0]["partition"])
        said = explain(book, opened.lake, where, held[0]["offset"])
        assert said.found is Class.QUARANTINED
        assert held[0]["reason"] in said.text
        assert "/quarantine/orders/kafka_window_date=" in said.text
        said = explain(book, opened.lake, TopicPartition(place.topic, good[-1][0]), good[-1][1])
        assert said.found is Class.LANDED


def test_too_many_bad_records_stop_the_batch_until_the_feed_allows_or_reads_them(place: Place) -> None:
    produce(place, 1000, bad=0.2)
    strict = "{quarantine_limit: {at_least: 10}}"
    with pytest.raises(QuarantineExceeded, match="items: wrong_type"):
        run(typed(place, policies=strict))
    assert visible(typed(place)) == []
    read = consumed(place.kafka, place.topic)
    mended = json.dumps({k: v for k, v in SCHEMA.items() if k != "items"})
    with pytest.raises(QuarantineExceeded) as caught:
        run(typed(place, policies=strict, schema=mended))
    assert "items" not in caught.value.message, "with another schema the records are read again"
    result = run(typed(place, policies="{quarantine_limit: {share: 0.5}}"))
    bad = sum(expected(r) is None for r in read)
    assert result.batches[0].counts.quarantined == bad
    assert len(landed(typed(place))) == len(read) - bad
