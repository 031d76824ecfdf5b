"""Spark, as a feed names it: whether its master answers; and, when asked for, whether its executors can do the work.

Only a session tells the latter. It takes seconds here and longer on a cluster, so it is started only when asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.health import Diagnosis, report_failure, report_ok, report_skipped, report_warning
from sluice.pipelines.model.receipts import EngineKind
from sluice.pipelines.util import extras
from sluice.resources.health import Check, examine
from sluice.resources.lake import open_lake
from sluice.resources.spark.engine import SparkEngine
from sluice.resources.spark.executors import check_answers, get_master, is_local
from sluice.resources.spark.preflight import ExecutorPorts

MASTER_SECONDS = 20.0
SESSION_SECONDS = 300.0
"""For the start of a session and the requests to its executors, in addition to the feed's `start_timeout`."""


@dataclass(frozen=True)
class SparkAsked:
    """The Spark of a feed, and whether to start a session on it. Executors are asked for that feed's Kafka and lake."""

    feed: Feed
    start: bool


def examine_spark(feed: Feed, *, start: bool) -> list[Diagnosis]:
    """Returns all diagnoses of a feed's Spark."""
    seconds = feed.spark.start_timeout / 1000 + SESSION_SECONDS if start else MASTER_SECONDS
    return examine(SparkAsked(feed, start), CHECKS, seconds)


def master(request: SparkAsked) -> Iterator[Diagnosis]:
    """Check that the master's port is open. For YARN and the like, only Spark knows the address."""
    settings = request.feed.spark
    name = get_master(settings)
    if request.feed.engine is EngineKind.PROCESSES:
        yield report_ok("master", "none: tasks run in processes of this machine (engine: processes)")
        return
    if is_local(settings):
        yield report_ok("master", f"{name}, in this process")
        return
    check_answers(settings)
    if "://" in name:
        yield report_ok("master", f"{name} answers")
    else:
        yield report_skipped("master", f"{name}: only a session shows it", "sluice doctor --spark")


def session(request: SparkAsked) -> Iterator[Diagnosis]:
    """Start a session and run the same checks on its executors that a run makes before it reads."""
    if not (request.start or request.feed.engine is EngineKind.SPARK):
        return
    if not request.start:
        try:
            extras.require("pyspark")
        except SetupError as error:  # reading alone needs none
            yield report_skipped("session", error.message, error.remedy)
        else:
            yield report_skipped("session", "not started: that takes a while", "sluice doctor --spark")
        return
    extras.require("pyspark")
    feed, began = request.feed, time.monotonic()
    check_answers(feed.spark)
    result = SparkEngine(feed.spark, partial(ExecutorPorts.of, feed.kafka, open_lake(feed))).preflight()
    yield report_ok("session", f"started and checked in {time.monotonic() - began:.0f} s")
    for finding in result.findings:
        yield (report_failure if finding.fatal else report_warning)("executors", finding.message, finding.remedy)
    if result.answers and not result.findings:
        hosts = Counter(answer.host for answer in result.answers)
        names = ", ".join(f"{count} on {host}" for host, count in sorted(hosts.items()))
        yield report_ok("executors", f"{names}: Python, packages, clock, Kafka and lake pass")


CHECKS: tuple[Check[SparkAsked], ...] = (
    Check("master", master),
    Check("session", session),
)
