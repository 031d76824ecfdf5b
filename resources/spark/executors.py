"""The Spark master, bounded waits for it and its executors, and the packages that are sent to them.

Spark copies an archive to executors before tasks run. An address that executors reach by themselves (hdfs:, s3a:,
local:) is left to them.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import INSTALLED, PACK, SparkSettings
from sluice.pipelines.model.receipts import EngineKind, Reporter
from sluice.pipelines.util import extras, units
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
    from urllib.request import urlopen  # late, like others below: a run on this machine needs none of them

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


FOLDER = "sluice-env"
"""The folder below its working folder where an executor has the archive unpacked."""
ARCHIVES, PYTHONPATH = "spark.archives", "spark.executorEnv.PYTHONPATH"
_GIVEN = os.environ.get("PYSPARK_PYTHON")


def name_other_engine(error: SetupError) -> SetupError:
    """Return the error of a missing Java or PySpark with the engine that needs neither as a second remedy."""
    remedy = f"{error.remedy}; or land without Spark: `engine: processes` in the feed or in fleet.yaml"
    return SetupError(error.message, remedy=remedy)


def check_installed(settings: SparkSettings) -> None:
    """Raise SetupError with both remedies if PySpark or, for a driver of this machine, Java is missing."""
    try:
        extras.require("pyspark")
        if not is_connect(settings):
            from sluice.resources.local import java

            java.find_java()
    except SetupError as error:
        raise name_other_engine(error) from None


def run_here(feed: Feed) -> bool:
    """Return whether the feed's tasks run on this machine: in processes, or in a local Spark."""
    return feed.engine is EngineKind.PROCESSES or is_local(feed.spark)


def prepare(feed: Feed, report: Reporter) -> None:
    """Do, and report, the work that is slow once for a version: pack for executors. Raises SetupError."""
    if not run_here(feed):
        archive(feed.spark, report)


def archive(settings: SparkSettings, report: Reporter = lambda progress: None) -> str | None:
    """Return the archive for executors, by path or URI; None if they have Sluice already.

    A pack that was never made is made. Raises SetupError.
    """
    if settings.environment == INSTALLED:
        return None
    if settings.environment == PACK:
        from sluice.resources.spark import pack_archive

        return str(pack_archive.pack(report, settings.modules).path)
    name = settings.environment
    if "://" not in name and not name.startswith("local:") and not Path(name).is_file():
        raise SetupError(
            f"spark.environment names {name}, and no file is there",
            remedy=f"make it: sluice pack --output {name}; or leave `environment` out",
        )
    return name


def conf(settings: SparkSettings, properties: Mapping[str, str]) -> dict[str, str]:
    """Return the given settings and those that bring the archive to executors. Raises SetupError."""
    where = archive(settings)
    if where is None:
        return {}
    archives = [properties[ARCHIVES]] if properties.get(ARCHIVES) else []
    paths = [properties[PYTHONPATH]] if properties.get(PYTHONPATH) else []
    return {
        ARCHIVES: ",".join([*archives, f"{where}#{FOLDER}"]),
        PYTHONPATH: os.pathsep.join([f"./{FOLDER}", *paths]),
    }


def add_to(session: Any, settings: SparkSettings) -> None:
    """Send the archive to a session of Spark Connect, for its jobs alone. Raises SetupError."""
    where = archive(settings)
    if where is None:
        return
    if "://" in where or where.startswith("local:"):
        raise SetupError(
            f"Spark Connect takes archives of this machine, not {where}",
            remedy="name a file in `spark.environment`, or `installed` where the server's executors have Sluice",
        )
    session.addArtifact(f"{where}#{FOLDER}", archive=True)


class Carried:
    """A function on its way to executors behind Spark Connect, which get no PYTHONPATH from us.

    On its arrival the archive is put on the path first, and only then is anything of ours imported.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrival(), (pickle.dumps(self._function), FOLDER)


def _arrival() -> Callable[[bytes, str], Any]:
    """Return a function without a name in a module: it travels by value."""

    def arrive(sent: bytes, folder: str) -> Any:
        import os
        import pickle
        import sys

        from pyspark import SparkFiles

        for root in (os.getcwd(), SparkFiles.getRootDirectory()):
            path = os.path.join(root, folder)
            if os.path.isdir(path) and path not in sys.path:
                sys.path.insert(0, path)
        return pickle.loads(sent)

    return arrive


def python(settings: SparkSettings) -> str:
    """Return the interpreter of executors: the feed's, the original PYSPARK_PYTHON of this process, or ours by name."""
    from sluice.resources.spark import pack_archive

    return settings.python or _GIVEN or pack_archive.python()
