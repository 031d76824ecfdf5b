"""Kafka's old high-level consumers and Sluice in one group: Kafka 3.9.1 in ZooKeeper mode.

The usual tests run one version and strategy, `make long-tests` the others.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from kafka import KafkaAdminClient, KafkaProducer

from sluice.pipelines.committing.commit import CommitStatus, commit
from sluice.pipelines.errors import GroupHeld
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import TopicPartition
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperGroup
from tests.integration.support import (
    FeedProject,
    build_commit_settings,
    open_feed_ledger,
    open_inline_ports,
    read_rows,
    run,
)
from tests.old_kafka import VERSIONS, OldConsumer, OldKafka, pad_word, run_old_consumer
from tests.zookeepers import LocalZooKeeper

USUAL = "0.10.2.2"
_numbers = itertools.count(1)
pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def old_kafka(tmp_path_factory: pytest.TempPathFactory, zookeeper: LocalZooKeeper) -> Iterator[OldKafka]:
    broker = OldKafka(tmp_path_factory.mktemp("old-kafka"), zookeeper).start()
    yield broker
    broker.stop()


class OldGroup:
    """A topic of three partitions on the old broker, a feed over it, and old consumers of the feed's group."""

    def __init__(self, version: str, strategy: str, root: Path, kafka: OldKafka) -> None:
        self.version, self.strategy, self.root, self.kafka, self.zookeeper = (
            version,
            strategy,
            root,
            kafka,
            kafka.zookeeper,
        )
        self.topic = f"shared-{next(_numbers)}"
        self.produced = 0
        with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
            admin.create_topics({self.topic: {"num_partitions": 3}}, wait_for_metadata=True)
        self.project = FeedProject(root, cast(LocalKafka, kafka), self.topic)
        settings = {"store": "zookeeper", "connect": self.zookeeper.connect, "patience": "1s"}
        self.feed: Feed = self.project.write_feed(offsets=json.dumps(settings))

    def produce(self, count: int) -> list[str]:
        """Produce `count` records into each partition. Returns all values."""
        values = []
        producer = KafkaProducer(bootstrap_servers=self.kafka.bootstrap)
        for partition in range(3):
            for n in range(self.produced, self.produced + count):
                values.append(f"{partition}:{n}")
                producer.send(self.topic, pad_word(values[-1]).encode(), partition=partition)
        producer.flush()
        producer.close()
        self.produced += count
        return values

    def start_consumer(self) -> Any:
        consumers = self.root / "consumers"
        return run_old_consumer(
            self.version, self.zookeeper, consumers, self.feed.group, self.topic, strategy=self.strategy
        )

    def read_committed(self) -> dict[int, str]:
        return self.zookeeper.read_offsets(self.feed.group, self.topic)

    def list_ids(self) -> list[str]:
        return self.zookeeper.list_children(f"/consumers/{self.feed.group}/ids")

    def read_landed(self) -> list[str]:
        return sorted(r["value"].decode().split(" ")[0] for r in read_rows(self.feed))


@pytest.fixture(
    params=[
        pytest.param((v, s), marks=() if (v, s) == (USUAL, "range") else pytest.mark.soak, id=f"{v}-{s}")
        for v in VERSIONS
        for s in ("range", "roundrobin")
    ],
)
def old_group(request: pytest.FixtureRequest, tmp_path: Path, old_kafka: OldKafka) -> OldGroup:
    return OldGroup(*request.param, tmp_path, old_kafka)


def wait(is_done: Callable[[], bool], message: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, message
        time.sleep(0.2)


def test_sluice_and_old_consumer_take_turns_without_loss_or_overlap(old_group: OldGroup) -> None:
    first = old_group.produce(10)
    with old_group.start_consumer() as consumer:
        assert sorted(consumer.wait_for(30)) == sorted(first)
        with pytest.raises(GroupHeld, match=rf"{old_group.feed.group}_.* owns {old_group.topic}:0"):
            run(old_group.feed)
    assert old_group.read_committed() == {0: "10", 1: "10", 2: "10"}

    second = old_group.produce(5)
    run(old_group.feed)  # exactly where the old consumer committed
    assert old_group.read_landed() == sorted(second)

    third = old_group.produce(5)
    with open_inline_ports(old_group.feed) as ports:
        ports.group.own(lambda: [TopicPartition(old_group.topic, p) for p in range(3)], lambda: None)
        with old_group.start_consumer() as consumer:
            wait(lambda: len(old_group.list_ids()) == 2, "the old consumer registers")
            time.sleep(3)  # it has tried to get partitions several times
            assert (consumer.process.alive, consumer.read_words(), old_group.read_committed()) == (
                True,
                [],
                _repeat_offset("10"),
            )
            result = commit(open_feed_ledger(old_group.feed, ports), ports.group, build_commit_settings(old_group.feed))
            assert (result.status, old_group.read_committed()) == (CommitStatus.COMMITTED, _repeat_offset("15"))
            ports.group.close()  # type: ignore[attr-defined]
            # The consumer takes over exactly where Sluice committed: no record twice, none skipped.
            assert sorted(_wait_for_lines(consumer, 15)) == sorted(third)
    assert old_group.read_committed() == _repeat_offset("20")
    assert old_group.list_ids() == []


def _repeat_offset(offset: str) -> dict[int, str]:
    return dict.fromkeys(range(3), offset)


def _wait_for_lines(consumer: OldConsumer, count: int) -> list[str]:
    """Wait until the consumer has read `count` lines, and a second more. Returns all its lines."""
    consumer.wait_for(count)
    time.sleep(1)
    return consumer.read_words()


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_roundrobin_consumer_of_uneven_topics_waits_until_sluice_leaves(
    version: str, tmp_path: Path, old_kafka: OldKafka
) -> None:
    """By `roundrobin` all members must have the same number of streams for every topic."""
    sizes = {f"wide-{next(_numbers)}": 3, f"narrow-{next(_numbers)}": 2}
    with KafkaAdminClient(bootstrap_servers=old_kafka.bootstrap) as admin:
        admin.create_topics({t: {"num_partitions": n} for t, n in sizes.items()}, wait_for_metadata=True)
    group, zookeeper = f"g-{next(iter(sizes))}", old_kafka.zookeeper
    ours = ZooKeeperGroup(zookeeper.connect, group, patience=1)
    ours.own(lambda: [TopicPartition(t, p) for t, n in sizes.items() for p in range(n)], lambda: None)
    with run_old_consumer(version, zookeeper, tmp_path, group, *sizes, strategy="roundrobin") as consumer:
        wait(lambda: len(zookeeper.list_children(f"/consumers/{group}/ids")) == 2, "the old consumer registers")
        time.sleep(3)  # it has tried to get partitions several times
        assert (consumer.process.alive, consumer.read_words()) == (True, [])
        ours.close()
        producer = KafkaProducer(bootstrap_servers=old_kafka.bootstrap)
        records = [(t, p, pad_word(f"{t}:{p}")) for t, n in sizes.items() for p in range(n)]
        for topic, partition, value in records:
            producer.send(topic, value.encode(), partition=partition)
        producer.close()
        assert sorted(consumer.wait_for(len(records))) == sorted(v.split(" ")[0] for _, _, v in records)
