"""Processes of a cluster die during a landing: no record is lost or doubled, and no process remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.spark_cluster import LocalSpark
from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.feed import Feed
from sluice.resources.spark import engine
from tests.cluster.conftest import AGAIN, MANY_TASKS, configure_spark, has_finished_ranges, land_feed
from tests.cluster.executors import list_executors
from tests.integration.support import FeedProject, consume_topic, read_rows
from tests.resources.kafka.tools import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_context"),
]
ROOT = Path(__file__).parents[2]


@contextmanager
def run_amid_landing(feed: Feed, function: Callable[[], object]) -> Iterator[None]:
    """Call the function once the first offset ranges are finished."""

    def wait() -> None:
        wait_until(lambda: has_finished_ranges(feed), 300)
        function()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def check_rows(project: FeedProject, feed: Feed) -> None:
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


def test_landing_survives_when_every_executor_is_killed(busy: FeedProject, cluster: LocalSpark) -> None:
    feed = busy.write_feed(**configure_spark(cluster, conf=AGAIN), **MANY_TASKS)
    killed: list[int] = []

    def kill() -> None:
        for pid in list_executors(cluster):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with run_amid_landing(feed, kill):
        land_feed(feed)
    assert killed
    check_rows(busy, feed)


def test_landing_survives_a_killed_worker(busy: FeedProject, mortal: LocalSpark) -> None:
    feed = busy.write_feed(**configure_spark(mortal, conf=AGAIN), **MANY_TASKS)
    with run_amid_landing(feed, mortal.running[0].kill):
        land_feed(feed)
    check_rows(busy, feed)


@pytest.mark.loss
def test_landing_survives_a_killed_master_and_next_landing_is_refused(busy: FeedProject, mortal: LocalSpark) -> None:
    assert mortal.head
    feed = busy.write_feed(**configure_spark(mortal), **MANY_TASKS)
    with run_amid_landing(feed, mortal.head.kill):
        land_feed(feed)
    check_rows(busy, feed)
    running = engine._running()
    assert running is not None
    running.stop()
    engine._forget_jvm()
    with pytest.raises(SetupError, match="no Spark master answers"):
        land_feed(busy.write_feed("other", **configure_spark(mortal)))


def test_killed_run_releases_executors_and_the_next_run_lands(busy: FeedProject, mortal: LocalSpark) -> None:
    feed = busy.write_feed(**configure_spark(mortal), **MANY_TASKS)
    command = [sys.executable, "-m", "tests.cluster.lands", str(busy.root / "feeds" / "orders.yaml")]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: has_finished_ranges(feed) or run.poll() is not None, 300)
    assert list_executors(mortal)
    run.kill()
    run.wait()
    wait_until(lambda: not list_executors(mortal), 60)
    land_feed(feed)
    check_rows(busy, feed)


def test_landing_is_complete_with_dynamic_allocation_and_speculation(busy: FeedProject, cluster: LocalSpark) -> None:
    conf = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.executorIdleTimeout": "2s",
        "spark.speculation": "true",
        "spark.speculation.multiplier": "1.01",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.interval": "50ms",
        "spark.speculation.minTaskRuntime": "50ms",
    }
    feed = busy.write_feed(**configure_spark(cluster, conf=conf), **MANY_TASKS)
    land_feed(feed)
    check_rows(busy, feed)
