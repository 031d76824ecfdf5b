"""The place where Spark runs, by its master's address: this machine, a cluster, or Spark Connect."""

from __future__ import annotations

import os
import re

from sluice.pipelines.feed.sections import SparkSettings

TRIES = 3
"""How often a local master runs a task; other masters use `spark.task.maxFailures`."""

_LOCAL = re.compile(r"local(?:\[\s*[0-9*]+\s*(?:,\s*([0-9]+)\s*)?\])?")


def master(settings: SparkSettings) -> str:
    """Return the feed's master, or by default all cores of this machine with each task tried three times."""
    return settings.master or f"local[{os.cpu_count() or 1},{TRIES}]"


def is_connect(settings: SparkSettings) -> bool:
    return bool(settings.master and settings.master.startswith("sc://"))


def is_local(settings: SparkSettings) -> bool:
    return _LOCAL.fullmatch(master(settings)) is not None


def tries(settings: SparkSettings) -> int:
    """Return how often Spark runs a task before it gives up."""
    match = _LOCAL.fullmatch(master(settings))
    if match:
        return int(match[1] or 1)
    return int(settings.conf.get("spark.task.maxFailures", "4"))
