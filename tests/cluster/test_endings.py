"""How `sluice run` on a cluster ends when somebody ends it, or what it runs on: in bounded time, by one clear error,
with nothing left behind. The next run finishes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from bench.spark_cluster import LocalSpark
from sluice.pipelines.feed.feed import Feed
from sluice.resources.spark import pack_archive
from tests.cluster.conftest import AGAIN, MANY_TASKS, begun, on
from tests.cluster.executors import daemons, executors
from tests.integration.support import Place, consumed, rows
from tests.resources.kafka.tools import until

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
SLUICE = "import sys; from sluice.cli.entry import main; sys.exit(main())"
BOUND = 180


@dataclass
class Run:
    """`sluice run orders` in a session of its own, as in a terminal of its own, with temporary files of its own."""

    root: Path

    def __post_init__(self) -> None:
        pack_archive.pack()  # what takes long once is no part of a run
        self.temporary = self.root / f"tmp-{time.monotonic_ns()}"
        self.temporary.mkdir()
        with (self.temporary.with_suffix(".err")).open("wb") as noise:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SLUICE, "run", "orders"],
                cwd=self.root,
                env={**os.environ, "TMPDIR": str(self.temporary), "COLUMNS": "400"},
                stdout=noise,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_begun(self, feed: Feed) -> None:
        until(lambda: begun(feed) or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.said

    @property
    def said(self) -> str:
        return self.temporary.with_suffix(".err").read_text(errors="replace")

    def ended(self, code: int, *says: str, seconds: float = BOUND) -> str:
        """What it said, once it ended so within the seconds."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end within {seconds} s: {self.said}") from None
        print(self.said)
        assert found == code, self.said
        for text in says:
            assert text in self.said
        assert "Traceback" not in self.said
        return self.said


def applications(cluster: LocalSpark) -> int:
    """How many the master has now, by its own page."""
    with urlopen(f"http://127.0.0.1:{cluster.conf['spark.master.ui.port']}/json/", timeout=10) as answer:
        return len(json.load(answer)["activeapps"])


def finished(place: Place, feed: Feed) -> None:
    """Another run lands the rest."""
    Run(place.root).ended(0, seconds=300)
    assert rows(feed) == consumed(place.kafka, place.topic)


@pytest.mark.loss
def test_all_workers_are_lost_and_none_comes_back(busy: Place, mortal: LocalSpark) -> None:
    feed = busy.feed(**on(mortal, conf=AGAIN, start_timeout="60s"), **MANY_TASKS)
    run = Run(busy.root)
    run.until_begun(feed)
    for worker in mortal.running:
        worker.kill()
    run.ended(1, f"every executor of {mortal.master} was lost, and no other came within 1m")
    until(lambda: not executors(mortal), 60)
    for _ in range(2):
        mortal.start_worker()
    until(lambda: mortal.count_registered() == 4, 60)
    finished(busy, feed)


def test_all_workers_are_lost_while_executors_are_asked(busy: Place, mortal: LocalSpark) -> None:
    busy.feed(**on(mortal, conf=AGAIN, start_timeout="60s"))
    run = Run(busy.root)
    until(lambda: daemons(mortal) or run.process.poll() is not None, 300)  # a task runs, so an executor was there
    for worker in mortal.running:
        worker.kill()
    run.ended(1, f"every executor of {mortal.master} was lost, and no other came within 1m")


def test_interrupted(busy: Place, mortal: LocalSpark) -> None:
    feed = busy.feed(**on(mortal, conf=AGAIN), **MANY_TASKS)
    run = Run(busy.root)
    run.until_begun(feed)
    assert applications(mortal) == 1
    os.killpg(run.process.pid, signal.SIGINT)
    run.ended(130, seconds=30)
    until(lambda: applications(mortal) == 0, 30)
    until(lambda: not executors(mortal), 30)
    assert [p.name for p in run.temporary.iterdir()] == []
    finished(busy, feed)


def test_connects_server_is_lost(busy: Place, tmp_path: Path) -> None:
    with LocalSpark(tmp_path / "spark", workers=0) as cluster:
        address = cluster.start_connect()
        feed = busy.feed(spark=f"{{master: '{address}'}}", **MANY_TASKS)
        run = Run(busy.root)
        run.until_begun(feed)
        cluster.running[-1].kill()
        run.ended(1, f"Spark Connect's server at {address} was lost under the job: Connection refused")
        feed = busy.feed(spark=f"{{master: '{cluster.start_connect()}'}}", **MANY_TASKS)
        finished(busy, feed)
