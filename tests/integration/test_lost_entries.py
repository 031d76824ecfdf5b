"""A ledger that lost its newest entries, on a real Kafka and both lakes: however many, and whatever else is left, a run
is refused before it does anything, and after a named acceptance the strongest audit closes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.audit.strict_audit import strict
from sluice.pipelines.batch.survey import take_survey
from sluice.pipelines.errors import EntriesLost
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, checkpoint
from sluice.pipelines.operating.acceptance import accept_ledger
from sluice.pipelines.ports import Lake
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark.executor import Wiring
from tests.integration.conftest import Lines
from tests.integration.support import Place, commit_feed, consumed, edges, ledger, rows, run

ROOTS = ("_sluice/orders", "data/orders")


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    there = Place(tmp_path, kafka, fresh_topic(partitions=2), lake())
    produce(there, 40)
    return there


def produce(place: Place, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        producer.send(place.topic, f"value {i}".encode(), partition=i % 2)
    producer.close()


def land(feed: Feed) -> None:
    run(feed)
    commit_feed(feed)


def proven(place: Place, feed: Feed) -> None:
    """`audit --strict --rescan` closes, and every row is there once."""
    with edges(feed) as opened, Wiring.of(feed).open(feed.isolation, feed.shape) as tools:
        book = ledger(feed, opened)
        found = take_survey(feed, opened, book)
        report = audit(book, opened.lake, hashes=True)
        log = CurrentLog(tools.fetcher, feed.isolation, found.partitions)
        report = rescan(report, book, opened.lake, feed.shape, log)
        assert report.is_reconciled, report.problems
        assert strict(book, opened.lake, feed, found, report).problems == ()
    assert rows(feed) == consumed(place.kafka, place.topic)


def files(lake: Lake) -> dict[str, bytes | None]:
    return {p: lake.get(p) for root in ROOTS for p in lake.list(root) if "/owners/" not in p}


def suffixes(feed: Feed) -> Iterator[int]:
    yield from range(1, len(list(open_lake(feed).list(paths.log_folder("orders")))) + 1)


@pytest.mark.parametrize("fold", [False, True], ids=["", "with a checkpoint"])
@pytest.mark.parametrize("mode", [CommitMode.TRANSACTIONAL, CommitMode.NONE], ids=str)
def test_every_lost_suffix_is_noticed_and_gone_on_from(place: Place, mode: CommitMode, fold: bool) -> None:
    """One after the other: each ledger is the one that went on from the loss before."""
    feed = place.feed(commit=str(mode))
    land(feed)
    lake = open_lake(feed)
    for count in suffixes(feed):
        if fold:
            state = Ledger(lake, "orders", lambda: 0).read()
            lake.put(paths.checkpoint_path("orders", state.number), checkpoint.dump(state))
            lake.remove(paths.tip_path("orders"))
        for path in list(lake.list(paths.log_folder("orders")))[-count:]:
            lake.remove(path)
        before = files(lake)
        with pytest.raises(EntriesLost, match="sluice accept orders ledger"):
            run(feed)
        assert files(lake) == before, "nothing was touched"
        with edges(feed) as opened:
            accept_ledger(feed, opened, "the lake was restored from a backup of an hour ago")
        produce(place, 2)
        land(feed)
        proven(place, feed)
