"""One run over a feed in a separate process: land pending records, then commit; `sluice run` without Dagster and Spark.

    python -m tests.faults.runner FEED.yaml [POINT]

With a POINT of `points` it is killed there. It prints its steps as JSON lines; a run that fails prints the error and
exits with 1. `ForkedRun` starts it from a fork server that has loaded all modules: loading takes seconds of CPU.

Environment variables set another SIGNAL than SIGKILL, a shorter BOUND_MS of its liveness, a shorter SESSION with
ZooKeeper (seconds), another CLOCK, and another MACHINE for its identity. A store's requests are retried without pauses.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger, log, segments
from sluice.resources import liveness, open_ports
from sluice.resources.lake import open_lake
from sluice.resources.liveness import now
from sluice.resources.zookeeper import zookeeper_group
from tests.faults.clock import CLOCK, shift_clock
from tests.faults.points import interrupt_at
from tests.faults.writers import bring_up
from tests.integration.support import commit_feed, run

SIGNAL, BOUND_MS, MACHINE, SESSION = (f"SLUICE_FAULTS_{name}" for name in ("SIGNAL", "BOUND_MS", "MACHINE", "SESSION"))
CHECKPOINT_EVERY = 20
"""Entries. Checkpoints are far more frequent here than in production."""

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "tests.faults.runner",
        "tests.integration.republish_cut",
        "sluice.pipelines.landing.task",
        "sluice.pipelines.records.kafka_batches.encode",
        "sluice.pipelines.records.json.format",
        "sluice.pipelines.records.contract_rows.contract_format",
        "sluice.resources.kafka.fetch.fetch",
        "sluice.resources.lake.s3",
        "boto3",
        "duckdb",
        "pandas",  # imported by Arrow's conversion to Python objects
        "pyspark.sql",  # imported by each task, for the number of its attempt
    ]
)


class ForkedRun:
    """A running process with the interface of `subprocess.Popen`. Output goes to `out`, errors to `.err` next to it."""

    def __init__(
        self,
        arguments: Sequence[str],
        out: Path,
        environment: Mapping[str, str] | None = None,
        target: Callable[..., int] | None = None,
    ) -> None:
        """`target`: a module's function that takes the arguments, by default `main`."""
        self.args = arguments
        out.touch()
        out.with_suffix(".err").touch()  # a run may be killed before it opens them
        call = (tuple(arguments), str(out), dict(environment or {}), target or main)
        self._process: Any = _server.Process(target=_run_child, args=call, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, seconds or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_child(arguments: Sequence[str], out: str, environment: Mapping[str, str], target: Callable[..., int]) -> None:
    os.environ.update(environment)
    for number, path in ((1, out), (2, str(Path(out).with_suffix(".err")))):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.exit(target(*arguments))


def say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, "at": time.time(), **more}), flush=True)


def main(path: str, point: str = "") -> int:
    feed = load_feed(Path(path), {})
    with ExitStack() as stack:
        stack.enter_context(patch.object(log, "CHECKPOINT_EVERY", CHECKPOINT_EVERY))
        if bound := int(os.environ.get(BOUND_MS, 0)):
            with_bound = partial(liveness.LakeLiveness, bound_ms=bound, heartbeat_ms=bound // 5)
            stack.enter_context(patch.object(open_ports, "LakeLiveness", with_bound))
        if session := float(os.environ.get(SESSION, 0)):
            with_session = partial(zookeeper_group.ZooKeeperGroup, session=session)
            stack.enter_context(patch.object(zookeeper_group, "ZooKeeperGroup", with_session))
        if machine := os.environ.get(MACHINE):
            stack.enter_context(patch.object(liveness, "machine", lambda: machine))
        if ahead := os.environ.get(CLOCK):
            stack.enter_context(shift_clock(ahead))
        if feed.lake.startswith("s3://"):
            stack.enter_context(patch("sluice.resources.lake.s3.pause", lambda attempt: None))
            stack.enter_context(patch("sluice.resources.lake.s3.patience", lambda *_: 0))
        elif "://" in feed.lake:
            stack.enter_context(patch("sluice.resources.lake.obstore_client.choose_pause", lambda _: 0))
            backoff = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=100)}
            stack.enter_context(patch.dict("sluice.resources.lake.obstore_client._BACKOFF", backoff))
        if point:
            sign = signal.Signals[os.environ.get(SIGNAL, "SIGKILL")]
            stack.enter_context(interrupt_at(point, sign, type(open_lake(feed))))
        say("begun")
        try:
            if "pack" in point:
                with patch.object(segments, "ENTRIES", CHECKPOINT_EVERY // 4):
                    say("packed", segments=Ledger(open_lake(feed), feed.name, now).pack())
            landed = run(feed)
            say("landed", batches=[b.number for b in landed.batches], records=count_landed(landed))
            say("committed", status=str(commit_feed(feed).status))
            if feed.table_feeds:
                bring_up(feed)
        except SluiceError as e:
            say("failed", **e.fields())
            return 1
    return 0


def count_landed(landed: Any) -> int:
    return sum(r.counts.landed for b in landed.batches for r in b.receipts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
