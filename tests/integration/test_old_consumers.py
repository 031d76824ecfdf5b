"""Kafka's old high-level consumers themselves beside Sluice, in one group: Kafka 3.9.1 in ZooKeeper mode.

One version and strategy is among the usual tests; `make long-tests` runs the others.
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
from tests.integration.support import Place, edges, ledger, rows, run, settings
from tests.old_kafka import VERSIONS, OldConsumer, OldKafka, long, old_consumer
from tests.zookeepers import LocalZooKeeper

USUAL = "0.10.2.2"
_numbers = itertools.count(1)
pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def old_kafka(tmp_path_factory: pytest.TempPathFactory, zookeeper: LocalZooKeeper) -> Iterator[OldKafka]:
    broker = OldKafka(tmp_path_factory.mktemp("old-kafka"), zookeeper).start()
    yield broker
    broker.stop()


class Old:
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
        self.place = Place(root, cast(LocalKafka, kafka), self.topic)
        told = {"store": "zookeeper", "connect": self.zookeeper.connect, "patience": "1s"}
        self.feed: Feed = self.place.feed(offsets=json.dumps(told))

    def produce(self, count: int) -> list[str]:
        """So many records into each partition. Returns all values."""
        made = []
        producer = KafkaProducer(bootstrap_servers=self.kafka.bootstrap)
        for partition in range(3):
            for n in range(self.produced, self.produced + count):
                made.append(f"{partition}:{n}")
                producer.send(self.topic, long(made[-1]).encode(), partition=partition)
        producer.flush()
        producer.close()
        self.produced += count
        return made

    def consumer(self) -> Any:
        consumers = self.root / "consumers"
        return old_consumer(
            self.version, self.zookeeper, consumers, self.feed.group, self.topic, strategy=self.strategy
        )

    def committed(self) -> dict[int, str]:
        return self.zookeeper.held(self.feed.group, self.topic)

    def ids(self) -> list[str]:
        return self.zookeeper.names(f"/consumers/{self.feed.group}/ids")

    def landed(self) -> list[str]:
        return sorted(r["value"].decode().split(" ")[0] for r in rows(self.feed))


@pytest.fixture(
    params=[
        pytest.param((v, s), marks=() if (v, s) == (USUAL, "range") else pytest.mark.soak, id=f"{v}-{s}")
        for v in VERSIONS
        for s in ("range", "roundrobin")
    ],
)
def old(request: pytest.FixtureRequest, tmp_path: Path, old_kafka: OldKafka) -> Old:
    return Old(*request.param, tmp_path, old_kafka)


def wait(done: Callable[[], bool], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def test_each_goes_on_where_the_other_committed_and_never_reads_what_it_owns(old: Old) -> None:
    first = old.produce(10)
    with old.consumer() as consumer:
        assert sorted(consumer.wait_for(30)) == sorted(first)
        with pytest.raises(GroupHeld, match=rf"{old.feed.group}_.* owns {old.topic}:0"):
            run(old.feed)
    assert old.committed() == {0: "10", 1: "10", 2: "10"}

    second = old.produce(5)
    run(old.feed)  # exactly where the old consumer committed
    assert old.landed() == sorted(second)

    third = old.produce(5)
    with edges(old.feed) as opened:
        opened.group.own(lambda: [TopicPartition(old.topic, p) for p in range(3)], lambda: None)
        with old.consumer() as consumer:
            wait(lambda: len(old.ids()) == 2, "the old consumer registers")
            time.sleep(3)  # it has tried to get partitions several times by now
            assert (consumer.process.alive, consumer.lines(), old.committed()) == (True, [], _every("10"))
            done = commit(ledger(old.feed, opened), opened.group, settings(old.feed))
            assert (done.status, old.committed()) == (CommitStatus.COMMITTED, _every("15"))
            opened.group.close()  # type: ignore[attr-defined]
            # It takes over by itself, exactly where Sluice committed: nothing twice, nothing left out.
            assert sorted(_settled(consumer, 15)) == sorted(third)
    assert old.committed() == _every("20")
    assert old.ids() == []


def _every(offset: str) -> dict[int, str]:
    return dict.fromkeys(range(3), offset)


def _settled(consumer: OldConsumer, count: int) -> list[str]:
    """What it has read once it has read that many, and a moment later."""
    consumer.wait_for(count)
    time.sleep(1)
    return consumer.lines()


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_by_roundrobin_over_topics_of_different_sizes_nothing_is_left_for_it(
    version: str, tmp_path: Path, old_kafka: OldKafka
) -> None:
    """By `roundrobin` all members must have the same number of streams for every topic."""
    sizes = {f"wide-{next(_numbers)}": 3, f"narrow-{next(_numbers)}": 2}
    with KafkaAdminClient(bootstrap_servers=old_kafka.bootstrap) as admin:
        admin.create_topics({t: {"num_partitions": n} for t, n in sizes.items()}, wait_for_metadata=True)
    group, zookeeper = f"g-{next(iter(sizes))}", old_kafka.zookeeper
    ours = ZooKeeperGroup(zookeeper.connect, group, patience=1)
    ours.own(lambda: [TopicPartition(t, p) for t, n in sizes.items() for p in range(n)], lambda: None)
    with old_consumer(version, zookeeper, tmp_path, group, *sizes, strategy="roundrobin") as consumer:
        wait(lambda: len(zookeeper.names(f"/consumers/{group}/ids")) == 2, "the old consumer registers")
        time.sleep(3)  # it has tried to get partitions several times by now
        assert (consumer.process.alive, consumer.lines()) == (True, [])
        ours.close()
        producer = KafkaProducer(bootstrap_servers=old_kafka.bootstrap)
        made = [(t, p, long(f"{t}:{p}")) for t, n in sizes.items() for p in range(n)]
        for topic, partition, value in made:
            producer.send(topic, value.encode(), partition=partition)
        producer.close()
        assert sorted(consumer.wait_for(len(made))) == sorted(v.split(" ")[0] for _, _, v in made)
