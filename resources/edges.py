"""A feed's edges, opened: Kafka, the lake, Spark. Only this module chooses what the stages see as ports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.rights import rights_of
from sluice.pipelines.ports import Edges
from sluice.resources.kafka.cluster import KafkaCluster
from sluice.resources.kafka.group import KafkaGroup
from sluice.resources.lakes import open_lake
from sluice.resources.liveness import LakeLiveness
from sluice.resources.spark.engine import SparkEngine
from sluice.resources.spark.executor import Wiring
from sluice.resources.spark.preflight import Ports


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


def _group(feed: Feed) -> KafkaGroup:
    asked = {"session": feed.kafka.session_timeout_ms, "transaction": feed.kafka.transaction_timeout_ms}
    seconds = {name: ms / 1000 for name, ms in asked.items() if ms is not None}
    return KafkaGroup(feed.kafka, feed.group, **seconds, rights=rights_of(feed))
