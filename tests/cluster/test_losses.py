"""What dies under a landing on a cluster: nothing is lost, nothing is there twice, nothing stays behind."""

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
from tests.cluster.conftest import AGAIN, MANY_TASKS, begun, landed, on
from tests.cluster.executors import executors
from tests.integration.support import Place, consumed, rows
from tests.resources.kafka.tools import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_context"),
]
ROOT = Path(__file__).parents[2]


@contextmanager
def amid(feed: Feed, do: Callable[[], object]) -> Iterator[None]:
    """Do it once the first offset ranges are finished."""

    def wait() -> None:
        until(lambda: begun(feed), 300)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def proven(place: Place, feed: Feed) -> None:
    assert rows(feed) == consumed(place.kafka, place.topic)


def test_every_executor_is_killed(busy: Place, cluster: LocalSpark) -> None:
    feed = busy.feed(**on(cluster, conf=AGAIN), **MANY_TASKS)
    killed: list[int] = []

    def kill() -> None:
        for pid in executors(cluster):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with amid(feed, kill):
        landed(feed)
    assert killed
    proven(busy, feed)


def test_a_worker_is_killed(busy: Place, mortal: LocalSpark) -> None:
    feed = busy.feed(**on(mortal, conf=AGAIN), **MANY_TASKS)
    with amid(feed, mortal.running[0].kill):
        landed(feed)
    proven(busy, feed)


@pytest.mark.loss
def test_the_master_is_killed(busy: Place, mortal: LocalSpark) -> None:
    assert mortal.head
    feed = busy.feed(**on(mortal), **MANY_TASKS)
    with amid(feed, mortal.head.kill):
        landed(feed)
    proven(busy, feed)
    running = engine._running()
    assert running is not None
    running.stop()
    engine._forget_jvm()
    with pytest.raises(SetupError, match="no Spark master answers"):
        landed(busy.feed("other", **on(mortal)))


def test_the_run_is_killed(busy: Place, mortal: LocalSpark) -> None:
    feed = busy.feed(**on(mortal), **MANY_TASKS)
    ask = [sys.executable, "-m", "tests.cluster.lands", str(busy.root / "feeds" / "orders.yaml")]
    run = subprocess.Popen(ask, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: begun(feed) or run.poll() is not None, 300)
    assert executors(mortal)
    run.kill()
    run.wait()
    until(lambda: not executors(mortal), 60)
    landed(feed)
    proven(busy, feed)


def test_executors_come_and_go_and_tasks_run_twice(busy: Place, cluster: LocalSpark) -> None:
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
    feed = busy.feed(**on(cluster, conf=conf), **MANY_TASKS)
    landed(feed)
    proven(busy, feed)
