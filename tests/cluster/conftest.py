"""A standalone Spark whose workers have a bare Python, and a feed that lands on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from bench.spark_cluster import LocalSpark
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.feed.feed import Feed
from sluice.resources.lake import open_lake
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_ports
from sluice.resources.spark import engine
from tests.integration.support import CATCH_UP, Place

PARTITIONS, MANY = 4, 48
MANY_TASKS = {"limits": "{slice_bytes: 2KiB, task_bytes: 4KiB}"}
RACK = "rack-2"
AGAIN = {"spark.task.maxFailures": "20"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSpark]:
    """A master and two workers of one core for the whole session: who kills one of them takes a cluster of its own.
    Its machines say that they are in RACK."""
    with LocalSpark(tmp_path_factory.mktemp("spark"), environment={"SLUICE_RACK": RACK}) as found:
        yield found


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> Place:
    """A project with a topic of some records."""
    topic = fresh_topic(partitions=PARTITIONS, name="clustered")
    send(kafka, topic, 4000)
    return Place(tmp_path, kafka, topic)


def send(kafka: LocalKafka, topic: str, records: int, partitions: int = PARTITIONS) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    for i in range(records):
        producer.send(topic, b"value %d" % i, b"key %d" % i, partition=i % partitions)
    producer.flush()
    producer.close()


def on(cluster: LocalSpark, **more: Any) -> dict[str, str]:
    """What a feed says to run on it: the value of `spark`, as YAML."""
    conf = cluster.conf | more.pop("conf", {})
    said = {"master": cluster.master, "conf": "{" + ", ".join(f"'{k}': '{v}'" for k, v in conf.items()) + "}", **more}
    return {"spark": "{" + ", ".join(f"{k}: {v}" for k, v in said.items()) + "}"}


def landed(feed: Feed) -> Landed:
    """One catch-up by the real engine. Raises what was not landed."""
    with open_ports(feed) as edges:
        done = land(feed, edges, CATCH_UP, new_owner("test"), lambda progress: None)
    done.check()
    return done


@pytest.fixture
def own_context() -> Iterator[None]:
    """The test's runs have an application of their own, which ends with the test."""
    yield
    if (running := engine._running()) is not None:
        running.stop()
        engine._forget_jvm()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[LocalSpark]:
    """A cluster for one test."""
    with LocalSpark(tmp_path / "spark") as found:
        yield found


@pytest.fixture
def busy(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> Place:
    """A topic of more partitions, which many tasks read."""
    topic = fresh_topic(partitions=MANY, name="busy")
    send(kafka, topic, 24_000, MANY)
    return Place(tmp_path, kafka, topic)


def begun(feed: Feed, ranges: int = 3) -> bool:
    """Return whether tasks have finished that number of offset ranges."""
    lake = open_lake(feed)
    return sum(p.endswith(".json") for p in lake.list(f"_sluice/{feed.name}/staging")) >= ranges
