"""The Spark master (this machine, a cluster, or Spark Connect) and bounded waits for it and its executors."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.request import urlopen

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.sections import SparkSettings
from sluice.pipelines.util import units
from sluice.resources.spark.spark_errors import Ended

TRIES = 3
"""How often a local master runs a task; other masters use `spark.task.maxFailures`."""

_LOCAL = re.compile(r"local(?:\[\s*[0-9*]+\s*(?:,\s*([0-9]+)\s*)?\])?")


def get_master(settings: SparkSettings) -> str:
    """Return the feed's master, or by default all cores of this machine with each task tried three times."""
    return settings.master or f"local[{os.cpu_count() or 1},{TRIES}]"


def is_connect(settings: SparkSettings) -> bool:
    return bool(settings.master and settings.master.startswith("sc://"))


def is_local(settings: SparkSettings) -> bool:
    return _LOCAL.fullmatch(get_master(settings)) is not None


def tries(settings: SparkSettings) -> int:
    """Return how often Spark runs a task before it gives up."""
    match = _LOCAL.fullmatch(get_master(settings))
    if match:
        return int(match[1] or 1)
    return int(settings.conf.get("spark.task.maxFailures", "4"))


_TRY_SECONDS = 5.0
_UI_PORT = "spark.master.ui.port"
"""Spark's own setting for the port where a master reports its workers."""
_SHOWN = 5
_LESS = (
    "ask for less (`spark.conf`: spark.executor.memory, spark.executor.cores), free or add workers,"
    " or wait longer (`tuning.spark_start_timeout`)"
)
_FIREWALL = (
    "see their output (the application's stderr on the workers); open the driver's ports to the workers"
    " (`spark.conf`: spark.driver.host, spark.driver.port), or wait longer (`tuning.spark_start_timeout`)"
)
_DYNAMIC = "spark.dynamicAllocation.enabled"
_POLL = 0.25
_SETTLED = 4
"""Polls without a new executor, after which the present ones count as all."""


def check_answers(settings: SparkSettings) -> None:
    """Check that a master's own address answers; one that only Spark can read (yarn) passes. Raises SetupError."""
    if why := unreachable(settings):
        what = "Spark Connect's server" if is_connect(settings) else "Spark master"
        raise SetupError(
            f"no {what} answers at {settings.master}: {why}",
            remedy="start it, or correct `spark.master` in the feed; run again: nothing was read",
        )


def unreachable(settings: SparkSettings) -> str:
    """Return why no address of a master answers; empty if one does, or only Spark can tell."""
    match = re.fullmatch(r"(?:spark|sc)://([^/;]+).*|k8s://(?:https?://)?([^/]+).*", get_master(settings))
    if not match:
        return ""
    default = 15002 if is_connect(settings) else 443 if match[2] else 7077
    failures = [_probe(address.strip(), default) for address in (match[1] or match[2]).split(",")]
    return "; ".join(failures) if all(failures) else ""


def _probe(address: str, default: int) -> str:
    """Return why the address does not answer; empty if it does."""
    host, port = address, default
    if split := re.fullmatch(r"(.+):(\d+)", address):
        host, port = split[1], int(split[2])
    try:
        socket.create_connection((host.strip("[]"), port), _TRY_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def wait(spark: Any, settings: SparkSettings, cancelled: Callable[[], bool], ended: Ended) -> int:
    """Wait for executors; return how many the context has. Records those that end during the wait.

    Raises SetupError after `start_timeout`, and if the master ends the application.
    """
    deadline = time.monotonic() + settings.start_timeout / 1000
    previous, same = 0, 0
    if spark.getConf().get(_DYNAMIC, "false") == "true":
        spark._jsc.sc().requestExecutors(1)  # by itself it asks for none before there is a job
    while not cancelled():
        ended.look(spark)
        if spark._jsc.sc().isStopped():
            reason, remedy = given_up(settings, ended)
            raise SetupError(reason, remedy=remedy)
        now = count(spark)
        same = same + 1 if now and now == previous else 0
        if same >= _SETTLED:
            return now
        previous = now
        if not now and time.monotonic() > deadline:
            raise none_came(spark, settings, ended)
        time.sleep(_POLL)
    return previous


def count(spark: Any) -> int:
    """Return the current number of executors; if the master was lost, of the remaining ones."""
    return max(0, len(spark._jsc.sc().statusTracker().getExecutorInfos()) - 1)  # the driver is one of them


def given_up(settings: SparkSettings, ended: Ended) -> tuple[str, str]:
    """Return the reason and the remedy if the master ended the application."""
    reason, remedy = ended.summarize()
    unknown = "see in the workers' logs why executors did not start, and whether somebody ended it there"
    return f"{settings.master} ended the application" + (f"; {reason}" if reason else ""), remedy or unknown


def none_came(spark: Any, settings: SparkSettings, ended: Ended) -> SetupError:
    """Return the error: the requested resources, and those there, or the fate of executors that came."""
    resources = _describe_request(spark.getConf())
    there, remedy = ended.summarize()
    if not there:
        there, remedy = _there(spark, settings)
    waited = units.show_duration(settings.start_timeout)
    return SetupError(
        f"{settings.master} gave no executor within {waited}: one asks for {resources}"
        + (f"; {there}" if there else ""),
        remedy=remedy,
    )


def _describe_request(conf: Any) -> str:
    settings: Mapping[str, str] = dict(conf.getAll())
    memory = settings.get("spark.executor.memory", "1g")
    cores = settings.get("spark.executor.cores", "all cores of its worker")
    more = settings.get("spark.cores.max") or settings.get("spark.executor.instances")
    return f"{memory} of memory and {cores}{' core(s)' if cores.isdigit() else ''}" + (
        f" ({more} in all)" if more else ""
    )


def _there(spark: Any, settings: SparkSettings) -> tuple[str, str]:
    """Return a standalone master's report of this application and its workers, and the remedy.

    The report is empty if the master gives none.
    """
    with suppress(Exception):  # it only adds detail, by Spark's own messages
        return _describe_master(spark, settings)
    return "", _LESS


def _describe_master(spark: Any, settings: SparkSettings) -> tuple[str, str]:
    match = re.match(r"spark://([^,:]+):(\d+)", get_master(settings))
    if not match:
        return "", _LESS
    port = spark.getConf().get(_UI_PORT, "8080")
    with urlopen(f"http://{match[1]}:{port}/json/", timeout=_TRY_SECONDS) as answer:
        state = json.load(answer)
    if not match[0].endswith(str(state["url"]).removeprefix("spark://")):
        return "", _LESS  # another master's page
    if any(a["id"] == spark.applicationId and a.get("cores") for a in state["activeapps"]):
        address = f"{spark.getConf().get('spark.driver.host')}:{spark.getConf().get('spark.driver.port')}"
        return f"the master started some, and none of them has reported to the driver at {address}", _FIREWALL
    alive = [w for w in state["workers"] if w["state"] == "ALIVE"]
    if not alive:
        return "the master has no worker", _LESS
    excerpt = [
        f"{w['host']} has {w['memoryfree']} of {w['memory']} MiB and {w['coresfree']} of {w['cores']} core(s) free"
        for w in alive
    ]
    more = f" and {len(excerpt) - _SHOWN} workers more" if len(excerpt) > _SHOWN else ""
    return "; ".join(excerpt[:_SHOWN]) + more, _LESS
