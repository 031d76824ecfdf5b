"""What is about to happen, on a real Kafka: retention, a recreated topic, and a transaction that hangs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka import TopicPartition as Plain

from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import TopicConfig, TopicPartition
from sluice.pipelines.status.watch import Finding, WatchResult, view, watch
from sluice.resources.liveness import now
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import Place, edges, run
from tests.resources.kafka.tools import producing, transaction, until

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
Topics = Callable[..., str]


def look(feed: Feed, later: int = 0) -> WatchResult:
    """What the sensor would find so many ms later."""
    with edges(feed) as opened:
        ledger = open_ledger(feed, opened)
        return watch(feed, ledger, opened.cluster, view(opened.cluster, [feed]), now() + later)


def about(seen: WatchResult, kind: str) -> Finding:
    (found,) = [f for f in seen.findings if f.about.startswith(kind)]
    return found


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines) -> Place:
    return Place(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": str(DAY)}), lake())


def produce(place: Place, partition: int, stamps: list[int]) -> None:
    with producing(place.kafka) as producer:
        for stamp in stamps:
            producer.send(place.topic, b"x", partition=partition, timestamp_ms=stamp)


def test_records_are_told_of_before_and_after_retention_takes_them(place: Place) -> None:
    feed, begin = place.feed(alerts="{retention: 6h}"), now() - 10 * HOUR
    produce(place, 0, [begin])
    run(feed)
    produce(place, 0, [begin + n * HOUR for n in range(1, 9)])
    produce(place, 1, [now()])
    seen = look(feed)
    assert [f.about for f in seen.findings] == ["lag"]
    assert seen.outlook is not None
    age = seen.outlook.ages()[seen.outlook.pending[0].key]
    assert 9 * HOUR <= age <= 9.6 * HOUR

    found = about(look(feed, later=10 * HOUR), "retention")
    assert found.severe
    assert found.text.startswith(f"{place.topic}:0 [1, 3) will begin to be deleted in about ")
    assert found.text.endswith("(retention.ms 1d)")

    with KafkaAdminClient(bootstrap_servers=place.kafka.bootstrap) as admin:
        admin.delete_records({Plain(place.topic, 0): 4})
    lost = about(look(feed), "lost")
    assert lost.text.startswith(f"{place.topic}:0: offsets [1, 4) are gone from Kafka")


def test_how_long_things_last_is_read_where_it_may_be(place: Place, fresh_topic: Topics) -> None:
    small = fresh_topic(config={"cleanup.policy": "compact,delete", "retention.bytes": "1000"})
    with edges(place.feed()) as opened:
        found = opened.cluster.configs([place.topic, small, "not-there"])
    assert found.topics == {
        place.topic: TopicConfig(retention_ms=DAY),
        small: TopicConfig(retention_bytes=1000, compacts=True),
    }
    assert found.broker.offsets_retention == 7 * DAY
    assert found.broker.transactional_id_expiration == 7 * DAY
    assert found.broker.transaction_max_timeout == 15 * MINUTE


def test_a_recreated_topic_and_new_partitions_are_seen(place: Place) -> None:
    produce(place, 0, [now()])
    feed = place.feed()
    run(feed)
    assert look(feed).findings == ()
    with KafkaAdminClient(bootstrap_servers=place.kafka.bootstrap) as admin:
        admin.create_partitions({place.topic: 3})
        until(lambda: len(look(feed).findings) == 1)
        assert about(look(feed), "partitions").text == f"{place.topic} has new partitions: 2"
        admin.delete_topics([place.topic])
        until(lambda: any(f.about == "topics" for f in look(feed).findings))
        admin.create_topics({place.topic: {"num_partitions": 2}}, wait_for_metadata=True)
    found = about(look(feed), "changed")
    assert "created again" in found.text
    assert found.text.endswith("; 1 more partition")
    assert "sluice accept orders recreated" in found.remedy
    assert found.severe


def test_a_transaction_that_hangs_is_named_and_the_command_ends_it(place: Place) -> None:
    produce(place, 1, [now()])
    feed = place.feed()
    run(feed)
    with transaction(place.kafka, place.topic, 3, partition=1) as producer:
        produce(place, 1, [now()])
        assert look(feed).findings == (), "it was written to just now"
        found = about(look(feed, later=HOUR), "transaction")
        assert _name(producer) in found.text
        assert found.text.startswith(f"{place.topic}:1 is held at offset 1 by transaction ")
        said, _, command = found.remedy.partition(": kafka-transactions.sh ")
        assert said == "it hangs: none may last longer than 15m here (transaction.max.timeout.ms). Abort it"
        done = place.kafka.tool("org.apache.kafka.tools.TransactionsCommand", *shlex.split(command))
        assert done.returncode == 0, done.stderr
        with edges(feed) as opened:
            until(lambda: not opened.cluster.open_transactions([TopicPartition(place.topic, 1)]))
    assert [f.about for f in look(feed).findings] == []


def _name(producer: KafkaProducer) -> str:
    return str(producer.config["transactional_id"])
