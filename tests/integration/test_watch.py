"""Warnings of the watch on a real Kafka: retention, a recreated topic, and a hanging transaction."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka import TopicPartition as Plain

from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import TopicConfig, TopicPartition
from sluice.pipelines.operating.feed_status import WatchResult, watch
from sluice.pipelines.operating.findings import Finding
from sluice.resources.liveness import now
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import FeedProject, open_inline_ports, run
from tests.resources.kafka.tools import open_producer, open_transaction, wait_until

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
Topics = Callable[..., str]


def watch_feed(feed: Feed, later: int = 0) -> WatchResult:
    """Run the sensor's watch as if it were `later` ms from now."""
    with open_inline_ports(feed) as ports:
        ledger = open_ledger(feed, ports)
        return watch(replace(ports, clock=lambda: now() + later), feed, ledger)


def get_finding(result: WatchResult, kind: str) -> Finding:
    (finding,) = [f for f in result.findings if f.about.startswith(kind)]
    return finding


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Topics, lake: Lines) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": str(DAY)}), lake())


def produce(project: FeedProject, partition: int, stamps: list[int]) -> None:
    with open_producer(project.kafka) as producer:
        for stamp in stamps:
            producer.send(project.topic, b"x", partition=partition, timestamp_ms=stamp)


def test_records_are_reported_before_and_after_retention_deletes_them(project: FeedProject) -> None:
    feed, begin = project.write_feed(alerts="{retention: 6h}"), now() - 10 * HOUR
    produce(project, 0, [begin])
    run(feed)
    produce(project, 0, [begin + n * HOUR for n in range(1, 9)])
    produce(project, 1, [now()])
    result = watch_feed(feed)
    assert [f.about for f in result.findings] == ["lag"]
    assert result.outlook is not None
    age = result.outlook.ages()[result.outlook.pending[0].key]
    assert 9 * HOUR <= age <= 9.6 * HOUR

    finding = get_finding(watch_feed(feed, later=10 * HOUR), "retention")
    assert finding.severe
    assert finding.text.startswith(f"{project.topic}:0 [1, 3) will begin to be deleted in about ")
    assert finding.text.endswith("(retention.ms 1d)")

    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.delete_records({Plain(project.topic, 0): 4})
    lost = get_finding(watch_feed(feed), "lost")
    assert lost.text.startswith(f"{project.topic}:0: offsets [1, 4) are gone from Kafka")


def test_retention_is_read_with_sufficient_rights(project: FeedProject, fresh_topic: Topics) -> None:
    small = fresh_topic(config={"cleanup.policy": "compact,delete", "retention.bytes": "1000"})
    with open_inline_ports(project.write_feed()) as ports:
        configs = ports.cluster.configs([project.topic, small, "not-there"])
    assert configs.topics == {
        project.topic: TopicConfig(retention_ms=DAY),
        small: TopicConfig(retention_bytes=1000, compacts=True),
    }
    assert configs.broker.offsets_retention == 7 * DAY
    assert configs.broker.transactional_id_expiration == 7 * DAY
    assert configs.broker.transaction_max_timeout == 15 * MINUTE


def test_recreated_topic_and_new_partitions_are_detected(project: FeedProject) -> None:
    produce(project, 0, [now()])
    feed = project.write_feed()
    run(feed)
    assert watch_feed(feed).findings == ()
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap) as admin:
        admin.create_partitions({project.topic: 3})
        wait_until(lambda: len(watch_feed(feed).findings) == 1)
        assert get_finding(watch_feed(feed), "partitions").text == f"{project.topic} has new partitions: 2"
        admin.delete_topics([project.topic])
        wait_until(lambda: any(f.about == "topics" for f in watch_feed(feed).findings))
        admin.create_topics({project.topic: {"num_partitions": 2}}, wait_for_metadata=True)
    finding = get_finding(watch_feed(feed), "changed")
    assert "created again" in finding.text
    assert finding.text.endswith("; 1 more partition")
    assert "sluice accept orders recreated" in finding.remedy
    assert finding.severe


def test_hanging_transaction_is_named_and_ended_by_the_command(project: FeedProject) -> None:
    produce(project, 1, [now()])
    feed = project.write_feed()
    run(feed)
    with open_transaction(project.kafka, project.topic, 3, partition=1) as producer:
        produce(project, 1, [now()])
        assert watch_feed(feed).findings == (), "the transaction has just written"
        finding = get_finding(watch_feed(feed, later=HOUR), "transaction")
        assert _name(producer) in finding.text
        assert finding.text.startswith(f"{project.topic}:1 is held at offset 1 by transaction ")
        advice, _, command = finding.remedy.partition(": kafka-transactions.sh ")
        assert advice == "it hangs: none may last longer than 15m here (transaction.max.timeout.ms). Abort it"
        done = project.kafka.tool("org.apache.kafka.tools.TransactionsCommand", *shlex.split(command))
        assert done.returncode == 0, done.stderr
        with open_inline_ports(feed) as ports:
            wait_until(lambda: not ports.cluster.open_transactions([TopicPartition(project.topic, 1)]))
    assert [f.about for f in watch_feed(feed).findings] == []


def _name(producer: KafkaProducer) -> str:
    return str(producer.config["transactional_id"])
