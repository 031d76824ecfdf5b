"""A standalone Spark whose workers have Python without packages, and a feed that lands on it."""

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
from tests.integration.support import CATCH_UP, FeedProject

PARTITIONS, MANY = 4, 48
MANY_TASKS = {"limits": "{slice_bytes: 2KiB, task_bytes: 4KiB}"}
RACK = "rack-2"
AGAIN = {"spark.task.maxFailures": "20"}


@pytest.fixture(autouse=True, scope="module")
def _land_on_spark(default_engine: None) -> None: ...


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSpark]:
    """A master and two workers of one core for the whole session. A test that kills one uses `mortal`.

    Its machines are in RACK."""
    with LocalSpark(tmp_path_factory.mktemp("spark"), environment={"SLUICE_RACK": RACK}) as spark_cluster:
        yield spark_cluster


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    """A project with a topic of 4,000 records."""
    topic = fresh_topic(partitions=PARTITIONS, name="clustered")
    produce(kafka, topic, 4000)
    return FeedProject(tmp_path, kafka, topic)


def produce(kafka: LocalKafka, topic: str, records: int, partitions: int = PARTITIONS) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    for i in range(records):
        producer.send(topic, b"value %d" % i, b"key %d" % i, partition=i % partitions)
    producer.flush()
    producer.close()


def configure_spark(cluster: LocalSpark, **options: Any) -> dict[str, str]:
    """Returns the setting `spark` of a feed that runs on the cluster."""
    conf = cluster.conf | options.pop("conf", {})
    settings = {
        "master": cluster.master,
        "conf": "{" + ", ".join(f"'{k}': '{v}'" for k, v in conf.items()) + "}",
        **options,
    }
    return {"spark": "{" + ", ".join(f"{k}: {v}" for k, v in settings.items()) + "}"}


def land_feed(feed: Feed) -> Landed:
    """Run one catch-up by the real engine. Raises if a part did not land."""
    with open_ports(feed) as ports:
        landed = land(feed, ports, CATCH_UP, new_owner("test"), lambda progress: None)
    landed.check()
    return landed


@pytest.fixture
def own_context() -> Iterator[None]:
    """Gives the test's runs a separate Spark application, which ends with the test."""
    yield
    if (running := engine._running()) is not None:
        running.stop()
        engine._forget_jvm()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[LocalSpark]:
    """A cluster for one test, which may kill it."""
    with LocalSpark(tmp_path / "spark") as spark_cluster:
        yield spark_cluster


@pytest.fixture
def busy(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    """A project whose topic has more partitions, which many tasks read."""
    topic = fresh_topic(partitions=MANY, name="busy")
    produce(kafka, topic, 24_000, MANY)
    return FeedProject(tmp_path, kafka, topic)


def has_finished_ranges(feed: Feed, ranges: int = 3) -> bool:
    """Returns true if tasks have finished that number of offset ranges."""
    lake = open_lake(feed)
    return sum(p.endswith(".json") for p in lake.list(f"_sluice/{feed.name}/staging")) >= ranges
