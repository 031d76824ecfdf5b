"""Whole batches over a store on a bad day: nothing lost, nothing twice, and the next run goes on where one stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit import audit
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed import Feed
from sluice.resources.lakes import open_lake
from sluice.resources.local_kafka import LocalKafka
from tests.integration.support import Place, commit_feed, consumed, edges, ledger, rows, run
from tests.resources.s3_faults import Proxy, Rule, proxy
from tests.stores import Store

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process, and so does every pause between two tries."""
    monkeypatch.setattr("sluice.resources.s3_client.pause", lambda attempt: None)
    monkeypatch.setattr("sluice.resources.s3_client.patience", lambda *_: 0)


@pytest.fixture
def between(s3_store: Store) -> Iterator[Proxy]:
    if not s3_store.local:
        pytest.skip("faults are played before moto's server")
    with proxy(s3_store.settings.endpoint or "") as found:
        yield found


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], s3_store: Store, between: Proxy) -> Place:
    lines = {k: v.replace(s3_store.settings.endpoint or "", between.endpoint) for k, v in s3_store.lines().items()}
    there = Place(tmp_path, kafka, fresh_topic(partitions=2), lines)
    produce(there, 200)
    return there


def produce(place: Place, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    for i in range(count):
        producer.send(place.topic, b"%d" % i, partition=i % 2)
    producer.close()


def is_whole(place: Place, feed: Feed) -> bool:
    with edges(feed) as opened:
        report = audit(ledger(feed, opened), opened.lake, feed.name, hashes=True)
        left = list(opened.lake.list("_sluice/orders/staging"))
        begun = list(opened.lake.unfinished("_sluice/orders"))
    return (report.problems, left, begun) == ((), [], []) and rows(feed) == consumed(place.kafka, place.topic)


KINDS = ("PUT .*/log/", "PUT .*/staging/", "PUT .*/data/", "PUT .*/owners/", "GET .*list-type", "GET .*/log/",
         "GET .*/staging/", "HEAD", "DELETE")  # fmt: skip


def test_faults_of_every_kind_on_every_kind_of_request(place: Place, between: Proxy) -> None:
    """Of each three in a row, one fewer than the tries that a request has."""
    feed = place.feed()
    for _ in range(2):
        between.rules = [Rule(kind, how) for kind in KINDS for how in ("refuse", "lose", "reset")]
        run(feed)
        commit_feed(feed)
        assert [r for r in between.rules if r.times] == [], "all were played"
        between.rules = []
        assert is_whole(place, feed)
        produce(place, 20)


@pytest.mark.parametrize(("share", "how"), [(0.35, "refuse"), (0.6, "lose"), (0.8, "lose")])
def test_a_store_that_goes_away_in_the_middle_costs_no_record(
    place: Place, between: Proxy, share: float, how: str
) -> None:
    """From some request on nobody answers any more, until that run has given up."""
    rehearsal = place.feed("rehearsal")
    run(rehearsal)
    requests = len(between.seen)
    feed = place.feed()
    between.rules = [Rule(".", "pass", times=int(requests * share)), Rule(".", how, times=-1)]
    with pytest.raises(SluiceError):
        run(feed)
    between.rules = []
    lake = open_lake(feed)
    for path in lake.list("_sluice/orders/owners"):
        lake.remove(path)  # its beat could not be removed, and its process, ours, lives
    produce(place, 20)
    run(feed)
    commit_feed(feed)
    assert is_whole(place, feed)
