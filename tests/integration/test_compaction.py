"""Compaction and expiry over a real Kafka: the remaining rows are those that a plain consumer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.errors import FeedError, WindowRetired
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.maintenance.compaction import compact
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.planning import windows
from sluice.pipelines.records.shape import RAW
from sluice.reading import of_feed
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import (
    FeedProject,
    commit_feed,
    consume_topic,
    list_files,
    open_inline_ports,
    read_rows,
    request_offsets,
    run,
)

HOUR = 3_600_000
START = 1_795_183_200_000 - 1_795_183_200_000 % HOUR - 20_000 * HOUR


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2), lake())


def produce(project: FeedProject, hour: int) -> None:
    """Produce 300 records into each partition. Not in transactions: their markers would have the current time."""
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, linger_ms=5)
    for i in range(600):
        key, value, headers = (b"k", b"%d" % i * (i % 40), [("n", b"%d" % i)]) if i % 7 else (b"", None, None)
        producer.send(project.topic, value, key, headers, i % 2, START + hour * HOUR + i * 1000)
    producer.close()


def check(feed: Feed) -> AuditReport:
    """Check that the audit reconciles with the files and with Kafka."""
    with open_inline_ports(feed) as ports:
        ledger = Ledger(ports.lake, feed.name, ports.clock)
        partitions = {
            k: p
            for p in ports.cluster.partitions([next(iter(ledger.read().current)).topic], feed.isolation)
            for k in ledger.read().known()
            if k.tp == p.tp
        }
        report = audit(ledger, ports.lake, hashes=True)
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        try:
            report = rescan(report, ledger, ports.lake, RAW, CurrentLog(fetcher, feed.isolation, partitions))
        finally:
            fetcher.close()
    assert report.problems == ()
    return report


def test_landed_and_merged_files_have_bloom_filters(tmp_path: Path, kafka: LocalKafka, fresh_topic: Any) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2))
    produce(project, 0)
    with pytest.raises(FeedError, match="a Bloom filter for a column that the feed does not have"):
        project.write_feed(landing="{bloom_filters: [customer]}")
    feed = project.write_feed(landing="{bloom_filters: [key]}")
    for start in range(0, 300, 100):
        run(feed, request_offsets(project.topic, 0, start, start + 100))
    run(feed)
    counts = [check_filters(feed)]
    with open_inline_ports(feed) as ports:
        compact(feed, ports, None, new_owner("compact"), lambda progress: None)
    counts.append(check_filters(feed))
    assert counts[1] < counts[0]
    check(feed)


def check_filters(feed: Feed) -> int:
    """Check that DuckDB sees Bloom filters of the key in each file, and uses them. Returns the number of files."""
    paths = [Path(feed.lake, path) for path in list_files(feed)]
    for path in paths:
        query = f"select path_in_schema from parquet_metadata('{path}') where bloom_filter_offset is not null"
        assert duckdb.sql(query).fetchall() == [("key",)]
        probe = duckdb.sql(f"select bloom_filter_excludes from parquet_bloom_probe('{path}', 'key', 'x'::blob)")
        assert probe.fetchall() == [(True,)]
    return len(paths)


@pytest.mark.each_lake
def test_compaction_and_expiry_leave_other_rows_unchanged(project: FeedProject) -> None:
    for hour in (0, 1):
        produce(project, hour)
    feed = project.write_feed()
    for partition in (0, 1):
        for start in range(0, 600, 100):
            run(feed, request_offsets(project.topic, partition, start, start + 100))
    run(feed)
    commit_feed(feed)
    records = consume_topic(project.kafka, project.topic)
    assert read_rows(feed) == records

    with open_inline_ports(feed) as ports:
        before = len(of_feed(feed, START, to=START + 2 * HOUR).paths)
        compacted = compact(feed, ports, None, new_owner("compact"), lambda progress: None)
    assert compacted.merged
    assert read_rows(feed) == records
    window = of_feed(feed, START, to=START + 2 * HOUR)
    assert (window.rows, len({*window.paths}) < before) == (len(records), True)
    assert {m.file.partition for m, _ in compacted.merged if m.file} == {0}, "both partitions share a file"
    assert check(feed).compared == len(records)
    assert run(feed).batches == ()

    with open_inline_ports(feed) as ports:
        ledger = Ledger.offline(ports.lake, feed.name, ports.clock, "ada on hal")
        boundaries = {k.partition: windows.find_boundary(ledger.read(), k, START + HOUR) for k in ledger.read().known()}
        expire(ledger, ports.lake, RetireRequest(START + HOUR, "kept for an hour"), feed.window, ports.liveness)
    remaining = [r for r in records if r["offset"] >= (boundaries[r["partition"]] or 0)]
    assert 0 < len(remaining) < len(records)
    assert read_rows(feed) == remaining
    with pytest.raises(WindowRetired, match="by ada on hal: kept for an hour"):
        of_feed(feed, START)
    assert of_feed(feed, START + HOUR).rows == len(remaining)
    assert check(feed).compared == len(remaining)
    assert run(feed).batches == ()
    commit_feed(feed)
