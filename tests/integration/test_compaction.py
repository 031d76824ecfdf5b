"""Compaction and expiry over a real Kafka: whatever is merged or retired, the rest is what a plain consumer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.errors import WindowRetired
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
from tests.integration.support import Place, commit_feed, consumed, edges, offsets, rows, run

HOUR = 3_600_000
START = 1_795_183_200_000 - 1_795_183_200_000 % HOUR - 20_000 * HOUR


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    return Place(tmp_path, kafka, fresh_topic(partitions=2), lake())


def produce(place: Place, hour: int) -> None:
    """300 records in each partition. Not in transactions: their markers would be stamped now."""
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap, linger_ms=5)
    for i in range(600):
        key, value, headers = (b"k", b"%d" % i * (i % 40), [("n", b"%d" % i)]) if i % 7 else (b"", None, None)
        producer.send(place.topic, value, key, headers, i % 2, START + hour * HOUR + i * 1000)
    producer.close()


def check(feed: Feed) -> AuditReport:
    """The audit reconciles, by the files and by Kafka."""
    with edges(feed) as opened:
        ledger = Ledger(opened.lake, feed.name, opened.clock)
        today = {
            k: p
            for p in opened.cluster.partitions([next(iter(ledger.read().current)).topic], feed.isolation)
            for k in ledger.read().known()
            if k.tp == p.tp
        }
        found = audit(ledger, opened.lake, hashes=True)
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        try:
            found = rescan(found, ledger, opened.lake, RAW, CurrentLog(fetcher, feed.isolation, today))
        finally:
            fetcher.close()
    assert found.problems == ()
    return found


@pytest.mark.each_lake
def test_what_was_merged_and_what_was_retired_leaves_the_rest_as_it_was(place: Place) -> None:
    for hour in (0, 1):
        produce(place, hour)
    feed = place.feed()
    for partition in (0, 1):
        for start in range(0, 600, 100):
            run(feed, offsets(place.topic, partition, start, start + 100))
    run(feed)
    commit_feed(feed)
    everything = consumed(place.kafka, place.topic)
    assert rows(feed) == everything

    with edges(feed) as opened:
        before = len(of_feed(feed, START, to=START + 2 * HOUR).paths)
        done = compact(feed, opened, None, new_owner("compact"), lambda progress: None)
    assert done.merged
    assert rows(feed) == everything
    whole = of_feed(feed, START, to=START + 2 * HOUR)
    assert (whole.rows, len(whole.paths) < before) == (len(everything), True)
    assert check(feed).compared == len(everything)
    assert run(feed).batches == ()

    with edges(feed) as opened:
        ledger = Ledger.offline(opened.lake, feed.name, opened.clock, "ada on hal")
        cut = {k.partition: windows.find_boundary(ledger.read(), k, START + HOUR) for k in ledger.read().known()}
        expire(ledger, opened.lake, RetireRequest(START + HOUR, "kept for an hour"), feed.window, opened.liveness)
    kept = [r for r in everything if r["offset"] >= (cut[r["partition"]] or 0)]
    assert 0 < len(kept) < len(everything)
    assert rows(feed) == kept
    with pytest.raises(WindowRetired, match="by ada on hal: kept for an hour"):
        of_feed(feed, START)
    assert of_feed(feed, START + HOUR).rows == len(kept)
    assert check(feed).compared == len(kept)
    assert run(feed).batches == ()
    commit_feed(feed)
