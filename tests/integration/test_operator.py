"""An operator's actions on a real Kafka: backfill below the origin, land again, skip, and accept events."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka import TopicPartition as Plain

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.result import Skip
from sluice.pipelines.errors import NothingToAccept, OffsetsLost, TopicRecreated, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.operating.acceptance import AcceptEvent, accept_log, accept_lost
from sluice.pipelines.publishing import manifest
from sluice.pipelines.records.shape import RAW
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import (
    CATCH_UP,
    FeedProject,
    commit_feed,
    consume_topic,
    open_feed_ledger,
    open_inline_ports,
    read_rows,
    request_offsets,
    run,
)
from tests.resources.kafka.tools import open_producer, wait_until

HOUR = 3_600_000
Topics = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2), lake())


def find_first_hour() -> int:
    """Returns the start of the hour eight hours before the current one."""
    now = time.time_ns() // 1_000_000
    return now - now % HOUR - 8 * HOUR


def fill(project: FeedProject, start: int, hours: int = 6, records: int = 20) -> None:
    with open_producer(project.kafka) as producer:
        for h in range(hours):
            for i in range(records):
                stamp = start + h * HOUR + i
                producer.send(project.topic, b"%d" % i, partition=i % 2, timestamp_ms=stamp)


def request_window(start: int, until_: int | None = None, **options: bool) -> Request:
    return Request(RequestKind.WINDOW, window=start, until=until_, **options)


def check_reconciled(feed: Feed, *, comparable: bool = True) -> None:
    """Check that the audit reconciles the ledger, the files and Kafka."""
    with open_inline_ports(feed) as ports:
        ledger = open_feed_ledger(feed, ports)
        report = audit(ledger, ports.lake, hashes=True)
        state = ledger.read()
        log = ports.cluster.partitions(sorted({k.topic for k in state.current}), feed.isolation)
        partitions = {state.current[p.tp]: p for p in log}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        report = rescan(report, ledger, ports.lake, RAW, CurrentLog(fetcher, feed.isolation, partitions))
        fetcher.close()
    assert report.problems == ()
    assert (report.not_comparable == 0) is comparable


@pytest.mark.each_lake
def test_windows_land_below_the_origin_again_and_after_a_skip(project: FeedProject) -> None:
    start = find_first_hour()
    fill(project, start)
    feed = project.write_feed(start="latest")
    run(feed)
    commit_feed(feed)
    with open_inline_ports(feed) as ports:
        committed = ports.group.fetch_committed([TopicPartition(project.topic, p) for p in (0, 1)])
    assert read_rows(feed) == []

    for h in (4, 1):
        run(feed, request_window(start + h * HOUR))
    run(feed, request_window(start + 2 * HOUR, start + 4 * HOUR))
    with pytest.raises(UsageError, match="holds no record of window"):
        run(feed, request_window(start - HOUR))
    inside = [
        r for r in consume_topic(project.kafka, project.topic) if start + HOUR <= r["timestamp"] < start + 5 * HOUR
    ]
    assert read_rows(feed) == inside
    assert commit_feed(feed).status == "unchanged", "a backfill never moves committed offsets"
    with open_inline_ports(feed) as ports:
        assert ports.group.fetch_committed(list(committed)) == committed
        window_files = manifest.read_window_files(open_feed_ledger(feed, ports), start + 2 * HOUR, feed.window)
        assert (window_files.complete, sum(p.rows for p in window_files.parts)) == (True, 20)
        before = {p.path for p in window_files.parts}

    landed = run(feed, request_window(start + 2 * HOUR, replace=True))
    assert set(landed.batches[0].plan.replaces) == before
    assert read_rows(feed) == inside
    assert run(feed, request_window(start + 2 * HOUR)).batches == (), "a rerun of a finished window reads nothing"

    fill(project, start + 6 * HOUR, hours=1)
    with open_inline_ports(feed) as ports:
        skip = Skip(None, "a load test")
        done = land(feed, ports, CATCH_UP, new_owner("test"), lambda progress: None, LandingOptions(skip=skip))
        key = next(s.key for s in done.skipped if s.key.partition == 0)
        at = committed[key.tp].offset  # type: ignore[union-attr]
        assert explain(open_feed_ledger(feed, ports), ports.lake, key.tp, at).class_ is OffsetClass.SKIPPED
    assert [s.range.span for s in done.skipped] == [10, 10]
    run(feed, request_offsets(project.topic, 0, done.skipped[0].range.start, done.skipped[0].range.start + 5))
    assert len(read_rows(feed)) == len(inside) + 5
    check_reconciled(feed)


def test_feed_continues_after_lost_offsets_and_recreation_are_accepted(project: FeedProject) -> None:
    fill(project, find_first_hour())
    feed = project.write_feed()
    run(feed, request_offsets(project.topic, 0, 0, 10))
    with open_inline_ports(feed) as ports, pytest.raises(NothingToAccept):
        accept_lost(feed, ports, "?")
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_records({Plain(project.topic, 0): 40})
        with pytest.raises(OffsetsLost, match=r"\[10, 40\) are gone") as refused:
            run(feed)
        assert "sluice accept orders lost" in refused.value.remedy
        with open_inline_ports(feed) as ports:
            assert [(r.key.partition, r.range) for r in accept_lost(feed, ports, "INC-7").lost] == [(0, (10, 40))]
        run(feed)
        assert commit_feed(feed).status == "committed"
        check_reconciled(feed, comparable=False)

        admin.delete_topics([project.topic])
        wait_until(lambda: project.topic not in admin.list_topics())
        admin.create_topics({project.topic: {"num_partitions": 2}}, wait_for_metadata=True)
    before = read_rows(feed)
    fill(project, find_first_hour(), hours=1)
    with pytest.raises(TopicRecreated, match="deleted and created again") as recreated:
        run(feed, Request(RequestKind.CATCH_UP, only=(TopicPartition(project.topic, 0),)))
    assert "sluice accept orders recreated" in recreated.value.remedy
    with open_inline_ports(feed) as ports:
        done = accept_log(feed, ports, AcceptEvent.RECREATED, "INC-8")
    assert sorted((i.enters.key.partition, i.enters.offset) for i in done.entered) == [(0, 0), (1, 0)]
    run(feed)
    assert len(read_rows(feed)) == len(before) + 20
    assert {m.after for m in commit_feed(feed).offsets} == {10}
    check_reconciled(feed, comparable=False)
