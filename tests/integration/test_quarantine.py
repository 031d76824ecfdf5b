"""Quarantine and replay over a real Kafka: each record is where an independent reader says, before and after the feed
was fixed, also when Kafka does not hold it any more."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import Class, explain
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.maintenance.fixers import Fixer, Record
from sluice.pipelines.maintenance.replay import Replayed, Replayer, replay
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.quarantine.listing import Filter, listing
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import Place, asked, commit_feed, consumed, edges, ledger, run, visible

HOUR = 3_600_000
START = 1_795_183_200_000 - 1_795_183_200_000 % HOUR - 20_000 * HOUR
LARGE = 1 << 40
ALL = Filter()


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> Place:
    return Place(tmp_path, kafka, fresh_topic(partitions=2))


def value(i: int) -> bytes:
    """Of ten records one has a large amount, one is no JSON, one has its amount as text."""
    amount: Any = {3: LARGE + i, 7: f"{i}"}.get(i % 10, i)
    return b"<%d>" % i if i % 10 == 5 else json.dumps({"id": i, "amount": amount}).encode()


def produce(place: Place, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        producer.send(place.topic, value(i), b"%d" % i, [("n", b"%d" % i)], i % 2, START + i * 2 * HOUR // count)
    producer.close()


def typed(place: Place, amount: str) -> Feed:
    schema = json.dumps({"id": "int64 not null", "amount": amount})
    return place.feed(format="json", schema=schema, policies="{quarantine_limit: {share: 1.0}}")


def replayed(feed: Feed, fix: Callable[[Record], Any] | None = None) -> Replayed:
    with edges(feed) as opened:
        fixer = Fixer(fix, __file__) if fix else None
        return replay(feed, opened, ALL, fixer, new_owner("replay"), lambda progress: None)


def landed(feed: Feed) -> dict[tuple[int, int], tuple[Any, ...]]:
    query = """select kafka_partition, kafka_offset, kafka_key, id, amount
        from read_parquet($files, hive_partitioning = false, union_by_name = true)"""
    rows = asked(feed, query, visible(feed)).to_pylist()
    found = {(r["kafka_partition"], r["kafka_offset"]): (r["kafka_key"], r["id"], r["amount"]) for r in rows}
    assert len(found) == len(rows), "each record once"
    return found


def expected(records: list[dict[str, Any]], read: Callable[[int], int | None]) -> dict[tuple[int, int], Any]:
    """What `read` makes of each record's number, by an independent consumer's word."""
    numbers = {(r["partition"], r["offset"]): int(r["key"]) for r in records}
    return {place: (b"%d" % i, i, amount) for place, i in numbers.items() if (amount := read(i)) is not None}


def check(feed: Feed, place: Place) -> None:
    """The audit reconciles, by the files and by Kafka."""
    with edges(feed) as opened:
        book = ledger(feed, opened)
        today = {book.read().current[p.tp]: p for p in opened.cluster.partitions([place.topic], feed.isolation)}
        fetcher = KafkaFetcher(feed.kafka, feed.isolation)
        try:
            report = audit(book, opened.lake, hashes=True)
            report = rescan(report, book, opened.lake, feed.shape, CurrentLog(fetcher, feed.isolation, today))
        finally:
            fetcher.close()
    assert report.problems == ()


def held(feed: Feed) -> Counter[str]:
    """How many records are in quarantine now, by reason."""
    with edges(feed) as opened:
        found = listing(ledger(feed, opened), opened.lake, ALL, feed.window)
    out: Counter[str] = Counter()
    for h in found.held:
        out[h.kind.reason] += h.records
    return out


def test_what_was_quarantined_lands_after_the_feed_was_mended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    produce(place, 2000)
    feed = typed(place, "int32")
    run(feed)
    commit_feed(feed)
    records = consumed(place.kafka, place.topic)
    assert landed(feed) == expected(records, lambda i: None if i % 10 in (3, 5, 7) else i)
    assert held(feed) == {"out_of_range": 200, "not_json": 200, "wrong_type": 200}

    feed = typed(place, "int64")
    carry_out = Replayer.replay

    def dying(self: Replayer, c: Any) -> Any:
        if c.offset_range.partition:
            raise Failed("the disk went away", remedy="run again")
        return carry_out(self, c)

    before = landed(feed)
    with monkeypatch.context() as patched:
        patched.setattr(Replayer, "replay", dying)
        with pytest.raises(Failed, match="the disk went away"):
            replayed(feed)
    assert landed(feed) == before
    check(feed, place)

    done = replayed(feed)
    assert done.outcome.fit.total() == 200
    assert landed(feed) == expected(records, lambda i: {3: LARGE + i, 5: None, 7: None}.get(i % 10, i))
    assert held(feed) == {"not_json": 200, "wrong_type": 200}
    check(feed, place)

    def fix(record: Record) -> Any:
        if record.reason == "wrong_type":
            return {k: int(v) for k, v in json.loads(record.value or b"").items()}
        raise ValueError(record.value)

    done = replayed(feed, fix)
    ((what, (failed, _)),) = done.trial.botched.items()
    assert (done.outcome.mended, failed, what.partition(" ")[0]) == (200, 200, "ValueError")
    assert landed(feed) == expected(records, lambda i: {3: LARGE + i, 5: None}.get(i % 10, i))
    assert held(feed) == {"not_json": 200}
    check(feed, place)

    with edges(feed) as opened:
        mended = next(r for r in records if int(r["key"]) == 17)
        told = explain(ledger(feed, opened), opened.lake, TopicPartition(place.topic, 1), mended["offset"])
    assert told.found is Class.LANDED
    assert "fixed: it was quarantined by batch" in told.text
    assert "amount: wrong_type" in told.text
    assert run(feed).batches == (), "nothing is pending by it"
    assert all(m.before == m.after for m in commit_feed(feed).offsets), "and no offset moves"
