"""`sluice run` on a cluster that is interrupted, or loses Spark: it ends in bounded time by one clear error and leaves
nothing behind. The next run finishes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from bench.spark_cluster import LocalSpark
from sluice.pipelines.feed.feed import Feed
from sluice.resources.spark import pack_archive
from tests.cluster.conftest import AGAIN, MANY_TASKS, configure_spark, has_finished_ranges
from tests.cluster.executors import list_daemons, list_executors
from tests.integration.support import SLUICE, FeedProject, consume_topic, read_rows
from tests.resources.kafka.tools import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
BOUND = 180


@dataclass
class Run:
    """`sluice run orders` in a new session, as from a terminal, with a separate temporary folder."""

    root: Path

    def __post_init__(self) -> None:
        pack_archive.pack()  # slow the first time
        self.temporary = self.root / f"tmp-{time.monotonic_ns()}"
        self.temporary.mkdir()
        with (self.temporary.with_suffix(".err")).open("wb") as log:
            self.process = subprocess.Popen(
                [*SLUICE, "run", "orders"],
                cwd=self.root,
                env={**os.environ, "TMPDIR": str(self.temporary), "COLUMNS": "400"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_begun(self, feed: Feed) -> None:
        wait_until(lambda: has_finished_ranges(feed) or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.output

    @property
    def output(self) -> str:
        return self.temporary.with_suffix(".err").read_text(errors="replace")

    def expect_exit(self, code: int, *texts: str, seconds: float = BOUND) -> str:
        """Wait for the end with that exit code and those texts in the output. Returns the output."""
        try:
            exit_code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end within {seconds} s: {self.output}") from None
        print(self.output)
        assert exit_code == code, self.output
        for text in texts:
            assert text in self.output
        assert "Traceback" not in self.output
        return self.output


def count_applications(cluster: LocalSpark) -> int:
    """Returns the number of active applications, by the master's page."""
    with urlopen(f"http://127.0.0.1:{cluster.conf['spark.master.ui.port']}/json/", timeout=10) as answer:
        return len(json.load(answer)["activeapps"])


def finish_landing(project: FeedProject, feed: Feed) -> None:
    """Run again and assert that all records have landed."""
    Run(project.root).expect_exit(0, seconds=300)
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)


@pytest.mark.loss
def test_run_fails_when_all_workers_are_lost_and_do_not_return(busy: FeedProject, mortal: LocalSpark) -> None:
    feed = busy.write_feed(**configure_spark(mortal, conf=AGAIN, start_timeout="60s"), **MANY_TASKS)
    run = Run(busy.root)
    run.wait_until_begun(feed)
    for worker in mortal.running:
        worker.kill()
    run.expect_exit(1, f"every executor of {mortal.master} was lost, and no other came within 1m")
    wait_until(lambda: not list_executors(mortal), 60)
    for _ in range(2):
        mortal.start_worker()
    wait_until(lambda: mortal.count_registered() == 4, 60)
    finish_landing(busy, feed)


def test_run_fails_when_all_workers_are_lost_in_the_executor_check(busy: FeedProject, mortal: LocalSpark) -> None:
    busy.write_feed(**configure_spark(mortal, conf=AGAIN, start_timeout="60s"))
    run = Run(busy.root)
    # A daemon appears with the first task, so an executor was there.
    wait_until(lambda: list_daemons(mortal) or run.process.poll() is not None, 300)
    for worker in mortal.running:
        worker.kill()
    run.expect_exit(1, f"every executor of {mortal.master} was lost, and no other came within 1m")


def test_interrupted_run_leaves_no_executors_or_files_and_next_run_lands(busy: FeedProject, mortal: LocalSpark) -> None:
    feed = busy.write_feed(**configure_spark(mortal, conf=AGAIN), **MANY_TASKS)
    run = Run(busy.root)
    run.wait_until_begun(feed)
    assert count_applications(mortal) == 1
    os.killpg(run.process.pid, signal.SIGINT)
    run.expect_exit(130, seconds=30)
    wait_until(lambda: count_applications(mortal) == 0, 30)
    wait_until(lambda: not list_executors(mortal), 30)
    assert [p.name for p in run.temporary.iterdir()] == []
    finish_landing(busy, feed)


def test_run_fails_when_the_connect_server_is_lost(busy: FeedProject, tmp_path: Path) -> None:
    with LocalSpark(tmp_path / "spark", workers=0) as cluster:
        address = cluster.start_connect()
        feed = busy.write_feed(spark=f"{{master: '{address}'}}", **MANY_TASKS)
        run = Run(busy.root)
        run.wait_until_begun(feed)
        cluster.running[-1].kill()
        run.expect_exit(1, f"Spark Connect's server at {address} was lost under the job: Connection refused")
        feed = busy.write_feed(spark=f"{{master: '{cluster.start_connect()}'}}", **MANY_TASKS)
        finish_landing(busy, feed)
