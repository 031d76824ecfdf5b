"""Quarantine and replay over a real Kafka: each record is where an independent reader expects it, before and after the
feed was fixed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.maintenance.fixers import Fixer, Record
from sluice.pipelines.maintenance.replay import Replayed, Replayer, replay
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.quarantine.listing import Filter, listing
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import (
    FeedProject,
    commit_feed,
    consume_topic,
    list_files,
    open_feed_ledger,
    open_inline_ports,
    query_files,
    run,
)

HOUR = 3_600_000
START = 1_795_183_200_000 - 1_795_183_200_000 % HOUR - 20_000 * HOUR
LARGE = 1 << 40
ALL = Filter()


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2))


def make_value(i: int) -> bytes:
    """Make record `i`: of ten records one has a large amount, one is not JSON, one has its amount as text."""
    amount: Any = {3: LARGE + i, 7: f"{i}"}.get(i % 10, i)
    return b"<%d>" % i if i % 10 == 5 else json.dumps({"id": i, "amount": amount}).encode()


def produce(project: FeedProject, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        producer.send(project.topic, make_value(i), b"%d" % i, [("n", b"%d" % i)], i % 2, START + i * 2 * HOUR // count)
    producer.close()


def write_typed_feed(project: FeedProject, amount: str) -> Feed:
    schema = json.dumps({"id": "int64 not null", "amount": amount})
    return project.write_feed(format="json", schema=schema, policies="{quarantine_limit: {share: 1.0}}")


def run_replay(feed: Feed, fix: Callable[[Record], Any] | None = None) -> Replayed:
    with open_inline_ports(feed) as ports:
        fixer = Fixer(fix, __file__) if fix else None
        return replay(feed, ports, ALL, fixer, new_owner("replay"), lambda progress: None)


def read_landed(feed: Feed) -> dict[tuple[int, int], tuple[Any, ...]]:
    query = """select kafka_partition, kafka_offset, kafka_key, id, amount
        from read_parquet($files, hive_partitioning = false, union_by_name = true)"""
    rows = query_files(feed, query, list_files(feed)).to_pylist()
    landed = {(r["kafka_partition"], r["kafka_offset"]): (r["kafka_key"], r["id"], r["amount"]) for r in rows}
    assert len(landed) == len(rows), "each record once"
    return landed


def expect_rows(records: list[dict[str, Any]], read: Callable[[int], int | None]) -> dict[tuple[int, int], Any]:
    """Returns the expected rows of records from an independent consumer; `read` gives a record's amount, or None."""
    numbers = {(r["partition"], r["offset"]): int(r["key"]) for r in records}
    return {position: (b"%d" % i, i, amount) for position, i in numbers.items() if (amount := read(i)) is not None}


def check(feed: Feed, project: FeedProject) -> None:
    """Check that the audit reconciles with the files and with Kafka."""
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        partitions = {ledger.read().current[p.tp]: p for p in ports.cluster.partitions([project.topic], feed.isolation)}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        try:
            report = audit(ledger, ports.lake, hashes=True)
            report = rescan(report, ledger, ports.lake, feed.shape, CurrentLog(fetcher, feed.isolation, partitions))
        finally:
            fetcher.close()
    assert report.problems == ()


def count_quarantined(feed: Feed) -> Counter[str]:
    """Count the records in quarantine by reason."""
    with open_inline_ports(feed) as ports:
        listed = listing(open_feed_ledger(feed, ports), ports.lake, ALL, feed.window)
    counts: Counter[str] = Counter()
    for group in listed.held:
        counts[group.kind.reason] += group.records
    return counts


def test_quarantined_records_land_after_the_feed_is_fixed(
    project: FeedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(project, 2000)
    feed = write_typed_feed(project, "int32")
    run(feed)
    commit_feed(feed)
    records = consume_topic(project.kafka, project.topic)
    assert read_landed(feed) == expect_rows(records, lambda i: None if i % 10 in (3, 5, 7) else i)
    assert count_quarantined(feed) == {"out_of_range": 200, "not_json": 200, "wrong_type": 200}

    feed = write_typed_feed(project, "int64")
    original_replay = Replayer.replay

    def fail_on_partition_1(self: Replayer, c: Any) -> Any:
        if c.offset_range.partition:
            raise Failed("the disk went away", remedy="run again")
        return original_replay(self, c)

    before = read_landed(feed)
    with monkeypatch.context() as patched:
        patched.setattr(Replayer, "replay", fail_on_partition_1)
        with pytest.raises(Failed, match="the disk went away"):
            run_replay(feed)
    assert read_landed(feed) == before
    check(feed, project)

    replayed = run_replay(feed)
    assert replayed.outcome.fit.total() == 200
    assert read_landed(feed) == expect_rows(records, lambda i: {3: LARGE + i, 5: None, 7: None}.get(i % 10, i))
    assert count_quarantined(feed) == {"not_json": 200, "wrong_type": 200}
    check(feed, project)

    def fix(record: Record) -> Any:
        if record.reason == "wrong_type":
            return {k: int(v) for k, v in json.loads(record.value or b"").items()}
        raise ValueError(record.value)

    replayed = run_replay(feed, fix)
    ((error, (failed, _)),) = replayed.trial.botched.items()
    assert (replayed.outcome.mended, failed, error.partition(" ")[0]) == (200, 200, "ValueError")
    assert read_landed(feed) == expect_rows(records, lambda i: {3: LARGE + i, 5: None}.get(i % 10, i))
    assert count_quarantined(feed) == {"not_json": 200}
    check(feed, project)

    with open_inline_ports(feed) as ports:
        fixed = next(r for r in records if int(r["key"]) == 17)
        explanation = explain(
            open_feed_ledger(feed, ports), ports.lake, TopicPartition(project.topic, 1), fixed["offset"]
        )
    assert explanation.class_ is OffsetClass.LANDED
    assert "fixed: it was quarantined by batch" in explanation.text
    assert "amount: wrong_type" in explanation.text
    assert run(feed).batches == (), "the replay leaves nothing pending"
    assert all(m.before == m.after for m in commit_feed(feed).offsets), "the replay moves no offset"
