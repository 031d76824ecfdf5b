"""Typed feeds on a real Kafka: every record is landed or quarantined, with the values that an independent reader finds
in the records of a plain consumer."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.errors import QuarantineExceeded
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.model.kafka import TopicPartition
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.lake import open_lake
from sluice.resources.local.events import Mix, SendOptions, orders, send
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import (
    FeedProject,
    consume_topic,
    list_files,
    open_feed_ledger,
    open_inline_ports,
    query_files,
    run,
)

pytestmark = pytest.mark.usefixtures("default_engine")

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
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3), lake())


def produce(project: FeedProject, count: int, **shares: float) -> None:
    kafka = KafkaSettings(bootstrap=project.kafka.bootstrap)
    mix = Mix(seed=count, **shares)  # type: ignore[arg-type]
    options = SendOptions((project.topic,), transactional_id=f"{project.topic}-tx", transaction_records=100)
    send(kafka, orders(mix, count, START, START + 3_600_000), mix, options)


def write_typed_feed(project: FeedProject, **settings: Any) -> Feed:
    return project.write_feed(**{"format": "json", "schema": json.dumps(SCHEMA), "window": "15m"} | settings)


def expect_row(record: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the expected row by Python's own JSON reader, or None if the record is not a valid order."""
    position = (record["partition"], record["offset"], record["key"])
    if record["value"] is None:
        return (*position, None, None, None, None, None, True)
    try:
        order = json.loads(record["value"].decode(), parse_float=Decimal)
    except ValueError:
        return None
    if not isinstance(order["items"], int):
        return None
    extra = {k: v for k, v in order.items() if k not in SCHEMA}
    return (*position, order["order_id"], order["ts"], order["amount"], order["items"], extra, False)


def read_landed(feed: Feed) -> list[tuple[Any, ...]]:
    query = """select kafka_partition, kafka_offset, kafka_key, order_id,
        strftime(ts at time zone 'UTC', '%Y-%m-%dT%H:%M:%S.%gZ'), amount, items, _extra, kafka_tombstone
        from read_parquet($files, hive_partitioning = false) order by all"""
    rows = [tuple(r.values()) for r in query_files(feed, query, list_files(feed)).to_pylist()]
    return [(*r[:7], json.loads(r[7]) if r[7] else r[7], r[8]) for r in rows]


def read_quarantined(feed: Feed) -> list[dict[str, Any]]:
    lake = open_lake(feed)
    files = (lake.open(path) for path in lake.list(f"quarantine/{feed.name}"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.each_lake
def test_every_record_is_landed_typed_or_quarantined(project: FeedProject) -> None:
    produce(project, 3000, bad=0.02, tombstones=0.02, headers=0.1, aborted=0.3)
    feed = write_typed_feed(project)
    counts = run(feed).batches[0].counts
    records = consume_topic(project.kafka, project.topic)
    good = [row for r in records if (row := expect_row(r)) is not None]
    bad = [r for r in records if expect_row(r) is None]
    assert counts.landed == len(good)
    assert counts.quarantined == len(bad) > 20
    assert read_landed(feed) == sorted(good, key=lambda r: r[:2])
    quarantined = read_quarantined(feed)
    columns = ("partition", "offset", "key", "value", "headers")
    assert sorted([r[c] for c in columns[:4]] for r in quarantined) == sorted([r[c] for c in columns[:4]] for r in bad)
    assert {r["reason"] for r in quarantined} == {"not_json", "wrong_type", "invalid_utf8"}
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        report = audit(ledger, ports.lake)
        partitions = {ledger.read().current[p.tp]: p for p in ports.cluster.partitions([project.topic], feed.isolation)}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        report = rescan(report, ledger, ports.lake, feed.shape, CurrentLog(fetcher, feed.isolation, partitions))
        fetcher.close()
        assert (report.problems, report.compared) == ((), len(good))
        partition = TopicPartition(project.topic, quarantined[0]["partition"])
        explanation = explain(ledger, ports.lake, partition, quarantined[0]["offset"])
        assert explanation.class_ is OffsetClass.QUARANTINED
        assert quarantined[0]["reason"] in explanation.text
        assert "/quarantine/orders/kafka_window_date=" in explanation.text
        explanation = explain(ledger, ports.lake, TopicPartition(project.topic, good[-1][0]), good[-1][1])
        assert explanation.class_ is OffsetClass.LANDED


def test_too_many_bad_records_stop_the_batch_until_the_feed_changes(project: FeedProject) -> None:
    produce(project, 1000, bad=0.2)
    strict = "{quarantine_limit: {at_least: 1}}"
    with pytest.raises(QuarantineExceeded, match="items: wrong_type"):
        run(write_typed_feed(project, policies=strict))
    assert list_files(write_typed_feed(project)) == []
    records = consume_topic(project.kafka, project.topic)
    fixed_schema = json.dumps({k: v for k, v in SCHEMA.items() if k != "items"})
    with pytest.raises(QuarantineExceeded) as caught:
        run(write_typed_feed(project, policies=strict, schema=fixed_schema))
    assert "items" not in caught.value.message, "with another schema the records are read again"
    result = run(write_typed_feed(project, policies="{quarantine_limit: {share: 0.5}}"))
    bad = sum(expect_row(r) is None for r in records)
    assert result.batches[0].counts.quarantined == bad
    assert len(read_landed(write_typed_feed(project))) == len(records) - bad
