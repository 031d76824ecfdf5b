"""What an operator does, on a real Kafka: backfill below the origin, land again, skip, and accept what happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka import TopicPartition as Plain

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import Class, explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.result import Skip
from sluice.pipelines.errors import NothingToAccept, OffsetsLost, TopicRecreated, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.operating.acceptance import AcceptEvent, accept_log, accept_lost
from sluice.pipelines.publishing import manifest
from sluice.pipelines.records.shape import RAW
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import CATCH_UP, Place, commit_feed, consumed, edges, ledger, offsets, rows, run
from tests.resources.kafka.tools import producing, until

HOUR = 3_600_000
Topics = Callable[..., str]


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines) -> Place:
    return Place(tmp_path, kafka, fresh_topic(partitions=2), lake())


def first_hour() -> int:
    """Six hours before the newest hour that has closed."""
    now = time.time_ns() // 1_000_000
    return now - now % HOUR - 8 * HOUR


def fill(place: Place, start: int, hours: int = 6, each: int = 20) -> None:
    with producing(place.kafka) as producer:
        for h in range(hours):
            for i in range(each):
                stamp = start + h * HOUR + i
                producer.send(place.topic, b"%d" % i, partition=i % 2, timestamp_ms=stamp)


def window(start: int, until_: int | None = None, **how: bool) -> Request:
    return Request(RequestKind.WINDOW, window=start, until=until_, **how)


def proven(feed: Feed, *, comparable: bool = True) -> None:
    """The audit reconciles, by ledger, files and Kafka."""
    with edges(feed) as opened:
        book = ledger(feed, opened)
        report = audit(book, opened.lake, hashes=True)
        state = book.read()
        log = opened.cluster.partitions(sorted({k.topic for k in state.current}), feed.isolation)
        today = {state.current[p.tp]: p for p in log}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        report = rescan(report, book, opened.lake, RAW, CurrentLog(fetcher, feed.isolation, today))
        fetcher.close()
    assert report.problems == ()
    assert (report.not_comparable == 0) is comparable


@pytest.mark.each_lake
def test_backfill_below_the_origin_again_and_after_a_skip(place: Place) -> None:
    start = first_hour()
    fill(place, start)
    feed = place.feed(start="latest")
    run(feed)
    commit_feed(feed)
    with edges(feed) as opened:
        at = opened.group.fetch_committed([TopicPartition(place.topic, p) for p in (0, 1)])
    assert rows(feed) == []

    for h in (4, 1):
        run(feed, window(start + h * HOUR))
    run(feed, window(start + 2 * HOUR, start + 4 * HOUR))
    with pytest.raises(UsageError, match="holds no record of window"):
        run(feed, window(start - HOUR))
    inside = [r for r in consumed(place.kafka, place.topic) if start + HOUR <= r["timestamp"] < start + 5 * HOUR]
    assert rows(feed) == inside
    assert commit_feed(feed).status == "unchanged", "a backfill never moves committed offsets"
    with edges(feed) as opened:
        assert opened.group.fetch_committed(list(at)) == at
        found = manifest.read_window_files(ledger(feed, opened), start + 2 * HOUR, feed.window)
        assert (found.complete, sum(p.rows for p in found.parts)) == (True, 20)
        before = {p.path for p in found.parts}

    landed = run(feed, window(start + 2 * HOUR, replace=True))
    assert set(landed.batches[0].plan.replaces) == before
    assert rows(feed) == inside
    assert run(feed, window(start + 2 * HOUR)).batches == (), "a rerun of what is finished reads nothing"

    fill(place, start + 6 * HOUR, hours=1)
    with edges(feed) as opened:
        skip = Skip(None, "a load test")
        done = land(feed, opened, CATCH_UP, new_owner("test"), lambda progress: None, LandingOptions(skip=skip))
        key = next(s.key for s in done.skipped if s.key.partition == 0)
        assert explain(ledger(feed, opened), opened.lake, key.tp, at[key.tp].offset).found is Class.SKIPPED  # type: ignore[union-attr]
    assert [s.range.span for s in done.skipped] == [10, 10]
    run(feed, offsets(place.topic, 0, done.skipped[0].range.start, done.skipped[0].range.start + 5))
    assert len(rows(feed)) == len(inside) + 5
    proven(feed)


def test_what_happened_is_accepted_and_the_feed_goes_on(place: Place) -> None:
    fill(place, first_hour())
    feed = place.feed()
    run(feed, offsets(place.topic, 0, 0, 10))
    with edges(feed) as opened, pytest.raises(NothingToAccept):
        accept_lost(feed, opened, "?")
    with KafkaAdminClient(bootstrap_servers=place.kafka.bootstrap) as admin:
        admin.delete_records({Plain(place.topic, 0): 40})
        with pytest.raises(OffsetsLost, match=r"\[10, 40\) are gone") as refused:
            run(feed)
        assert "sluice accept orders lost" in refused.value.remedy
        with edges(feed) as opened:
            assert [(r.key.partition, r.range) for r in accept_lost(feed, opened, "INC-7").lost] == [(0, (10, 40))]
        run(feed)
        assert commit_feed(feed).status == "committed"
        proven(feed, comparable=False)

        admin.delete_topics([place.topic])
        until(lambda: place.topic not in admin.list_topics())
        admin.create_topics({place.topic: {"num_partitions": 2}}, wait_for_metadata=True)
    before = rows(feed)
    fill(place, first_hour(), hours=1)
    with pytest.raises(TopicRecreated, match="deleted and created again") as recreated:
        run(feed, Request(RequestKind.CATCH_UP, only=(TopicPartition(place.topic, 0),)))
    assert "sluice accept orders recreated" in recreated.value.remedy
    with edges(feed) as opened:
        done = accept_log(feed, opened, AcceptEvent.RECREATED, "INC-8")
    assert sorted((i.enters.key.partition, i.enters.offset) for i in done.entered) == [(0, 0), (1, 0)]
    run(feed)
    assert len(rows(feed)) == len(before) + 20
    assert {m.after for m in commit_feed(feed).offsets} == {10}
    proven(feed, comparable=False)
