"""How remote executors get Sluice: Spark settings that send a pack, or name an archive there.

    spark.archives                    …/sluice-pack-….tar.gz#sluice-env     unpacked into each executor's own folder
    spark.executorEnv.PYTHONPATH      ./sluice-env

Spark itself does it, in the same way on a standalone master, on YARN and on Kubernetes: the driver serves the archive
to those that run a task for it, once for each executor. An address that executors reach by themselves (hdfs:, s3a:,
local:) is left to them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.sections import INSTALLED, PACK, SparkSettings
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.records.compiled import cache
from sluice.resources.spark import pack_archive
from sluice.resources.spark.executors import is_local

FOLDER = "sluice-env"
"""The folder below its working folder where an executor has the archive unpacked."""
ARCHIVES, PYTHONPATH = "spark.archives", "spark.executorEnv.PYTHONPATH"
_GIVEN = os.environ.get("PYSPARK_PYTHON")


def prepare(settings: SparkSettings, report: Reporter) -> None:
    """Do, and report, the work that is slow once for a version: compile loops, or pack for executors.

    Raises SetupError.
    """
    if is_local(settings):
        cache.ready(report)
    else:
        archive(settings, report)


def archive(settings: SparkSettings, report: Reporter = lambda progress: None) -> str | None:
    """Return the archive for executors, by path or URI; None if they have Sluice already.

    A pack that was never made is made. Raises SetupError.
    """
    if settings.environment == INSTALLED:
        return None
    if settings.environment == PACK:
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
    return settings.python or _GIVEN or pack_archive.python()
