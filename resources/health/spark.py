"""Spark, as a feed names it: whether it can be reached; whether it works only a session tells, which takes seconds."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sluice.pipelines.feed.sections import SparkSettings
from sluice.pipelines.vocabulary.errors import SluiceError
from sluice.pipelines.vocabulary.health import Diagnosis, failed, of_error, ok, skipped
from sluice.resources.health.examine import Check, examine
from sluice.resources.spark import engine, masters

START_SECONDS = 120.0
_ADDRESS = re.compile(r"(?:spark|sc)://(\[[0-9A-Fa-f:.]+\]|[^:/;,]+)(?::([0-9]+))?")
_PORTS = {"spark": 7077, "sc": 15002}
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class SparkAsked:
    """Which Spark, and whether to start a session on it."""

    settings: SparkSettings
    start: bool


def examine_spark(settings: SparkSettings, *, start: bool) -> list[Diagnosis]:
    """All that there is to tell of one Spark."""
    return examine(SparkAsked(settings, start), CHECKS, START_SECONDS if start else _CONNECT_SECONDS * 2)


def master(asked: SparkAsked) -> Iterator[Diagnosis]:
    """Whether the master takes connections, where its address says where it is."""
    name = masters.master(asked.settings)
    found = _ADDRESS.match(name)
    if found is None:
        yield ok("master", f"{name}, in this process") if name.startswith("local") else skipped("master", name)
        return
    host, port = found[1].strip("[]"), int(found[2] or _PORTS[name.partition(":")[0]])
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        why = error.strerror or "it did not answer in time"
        yield failed("master", f"{name}: {why}", "start it, or mend `spark.master` in the feed")
    else:
        yield ok("master", f"{name} takes connections")


def session(asked: SparkAsked) -> Iterator[Diagnosis]:
    """Whether a session starts."""
    if not asked.start:
        yield skipped("session", "not started: that takes seconds", "sluice doctor --spark")
        return
    began = time.monotonic()
    try:
        engine.SparkEngine(asked.settings).start()
    except SluiceError as error:
        yield of_error("session", error)
    else:
        yield ok("session", f"started in {time.monotonic() - began:.1f} s")


CHECKS: tuple[Check[SparkAsked], ...] = (
    Check("master", master),
    Check("session", session),
)
