"""A feed's edges, opened: Kafka, the lake, Spark. Only this module chooses what the stages see as ports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.rights import rights_of
from sluice.pipelines.operating.migrate_offsets import Stores
from sluice.pipelines.ports import Edges, Groups
from sluice.pipelines.vocabulary.errors import UsageError
from sluice.resources.both_stores import BothGroup, BothGroups
from sluice.resources.kafka.cluster import KafkaCluster
from sluice.resources.kafka.group import KafkaGroup
from sluice.resources.kafka.groups import KafkaGroups
from sluice.resources.lakes import open_lake
from sluice.resources.liveness import LakeLiveness
from sluice.resources.spark.engine import SparkEngine
from sluice.resources.spark.executor import Wiring
from sluice.resources.spark.preflight import Ports
from sluice.resources.zookeeper.group import ZooKeeperGroup
from sluice.resources.zookeeper.groups import ZooKeeperGroups


def now() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


@contextmanager
def open_edges(feed: Feed) -> Iterator[Edges]:
    """The feed's edges; connections are closed when the block ends. Raises KafkaUnavailable, SetupError."""
    lake = open_lake(feed)
    with closing(KafkaCluster(feed.kafka)) as cluster, closing(_group(feed)) as group:
        yield Edges(
            cluster=cluster,
            group=group,
            lake=lake,
            engine=SparkEngine(feed.spark, lambda: Ports.of(feed.kafka, lake), feed.fetch.tasks_per_broker),
            liveness=LakeLiveness(lake, feed.name, now),
            clock=now,
            wiring=Wiring.of(feed),
            parallelism=os.cpu_count() or 1,
        )


def open_groups(feed: Feed) -> AbstractContextManager[Groups]:
    """The groups of the store that the feed's offsets are in; no connection is opened before the first question."""
    return closing(_groups(feed))


@contextmanager
def open_stores(feed: Feed) -> Iterator[Stores]:
    """Both stores of the feed's group, whichever its offsets are in. Raises UsageError without ZooKeeper's address."""
    with closing(_zookeeper_group(feed)) as zookeeper, closing(KafkaGroups(feed.kafka)) as kafka:
        yield Stores(feed.group, zookeeper, kafka)


# -- where offsets are kept: each store is chosen here, and nowhere else


def _group(feed: Feed) -> KafkaGroup | ZooKeeperGroup | BothGroup:
    if feed.offsets.dual_commit:
        kafka, zookeeper = _kafka_group(feed), _zookeeper_group(feed)
        return BothGroup(kafka, zookeeper, _both(kafka.close, zookeeper.close))
    return _zookeeper_group(feed) if feed.offsets.in_zookeeper else _kafka_group(feed)


def _groups(feed: Feed) -> KafkaGroups | ZooKeeperGroups | BothGroups:
    if feed.offsets.dual_commit:
        kafka, zookeeper = KafkaGroups(feed.kafka), ZooKeeperGroups(_connect(feed))
        return BothGroups(kafka, zookeeper, _both(kafka.close, zookeeper.close))
    return ZooKeeperGroups(_connect(feed)) if feed.offsets.in_zookeeper else KafkaGroups(feed.kafka)


def _kafka_group(feed: Feed) -> KafkaGroup:
    asked = {"session": feed.kafka.session_timeout_ms, "transaction": feed.kafka.transaction_timeout_ms}
    seconds = {name: ms / 1000 for name, ms in asked.items() if ms is not None}
    return KafkaGroup(feed.kafka, feed.group, **seconds, rights=rights_of(feed))


def _zookeeper_group(feed: Feed) -> ZooKeeperGroup:
    return ZooKeeperGroup(_connect(feed), feed.group, patience=feed.offsets.patience / 1000)


def _connect(feed: Feed) -> str:
    if feed.offsets.connect is None:
        raise UsageError(
            f"feed {feed.name} does not say where ZooKeeper is",
            remedy="write it in the feed: offsets: {connect: host:2181/chroot}",
        )
    return feed.offsets.connect


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def close() -> None:
        try:
            first()
        finally:
            second()

    return close
