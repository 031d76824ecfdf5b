"""Checks this machine: Python, Java, the packages that Sluice needs, space for temporary files."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sluice.pipelines.errors import SetupError
from sluice.pipelines.model.health import Diagnosis, of_error, report_failure, report_ok, report_warning
from sluice.pipelines.util.extras import BRINGS
from sluice.resources.health import Check
from sluice.resources.local import java

OURS = "sluice"
ROOM, LITTLE = 2 << 30, 200 << 20
"""Free bytes: with less than the first it may become too little, with less than the second a run fails."""


def python(_: None) -> Iterator[Diagnosis]:
    here, needed = platform.python_version(), metadata.metadata(OURS)["Requires-Python"] or ""
    if SpecifierSet(needed).contains(here, prereleases=True):
        yield report_ok("Python", f"{here}, {sys.executable}")
    else:
        yield report_failure(
            "Python", f"{here}; Sluice needs {needed}", f"make the environment again with Python {needed}"
        )


def packages(_: None) -> Iterator[Diagnosis]:
    """Compare installed packages with this release's requirements; of the extras, only the installed ones."""
    needed = [r for r in map(Requirement, metadata.requires(OURS) or ()) if _is_required(r)]
    wrong = [problem for r in needed if (problem := _wrong(r))]
    if wrong:
        yield report_failure("packages", "; ".join(wrong), "reinstall Sluice with its dependencies: pip install sluice")
    else:
        listed = [r for r in needed if r.name in ("dagster", "pyspark", "kafka-python", "pyarrow")]
        versions = ", ".join(f"{r.name} {_version(r)}" for r in listed)
        yield report_ok("packages", f"all {len(needed)} as Sluice {metadata.version(OURS)} needs them: {versions}")


def _is_required(needed: Requirement) -> bool:
    """Returns whether it belongs to Sluice alone, or to an extra of users' and is installed."""
    if not needed.marker or needed.marker.evaluate():
        return True
    extras = {*BRINGS.values()}
    brought = any(needed.marker.evaluate({"extra": extra}) for extra in extras) and needed.name != OURS
    return brought and _version(needed) is not None


def _version(needed: Requirement) -> str | None:
    try:
        return metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return None


def _wrong(needed: Requirement) -> str:
    if (version := _version(needed)) is None:
        return f"{needed.name} is missing"
    if needed.specifier.contains(version, prereleases=True):
        return ""
    return f"{needed.name} is {version}, not {needed.name}{needed.specifier}"


def java_here(_: None) -> Iterator[Diagnosis]:
    try:
        java_home = java.find_java()
    except SetupError as error:
        yield of_error("Java", error)
    else:
        yield report_ok("Java", f"{java.major(java_home)}, {java_home}")


def scratch(_: None) -> Iterator[Diagnosis]:
    """Check the folders for temporary files of tasks, uploads and Spark."""
    folders = {tempfile.gettempdir(), *filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(","))}
    yield from (room("scratch", Path(folder), "TMPDIR or SPARK_LOCAL_DIRS") for folder in sorted(folders))


def room(title: str, path: Path, name_of_it: str) -> Diagnosis:
    """Returns a diagnosis of the free space at `place`. Raises OSError."""
    free = shutil.disk_usage(path).free
    summary, remedy = (
        f"{free / (1 << 30):.1f} GiB free in {path}",
        f"make room there, or name another place: {name_of_it}",
    )
    if free < LITTLE:
        return report_failure(title, summary, remedy)
    return report_warning(title, summary, remedy) if free < ROOM else report_ok(title, summary)


CHECKS: tuple[Check[None], ...] = (
    Check("Python", python),
    Check("Java", java_here),
    Check("packages", packages),
    Check("scratch", scratch),
)
