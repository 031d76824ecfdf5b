"""Checks this machine: Python, Java, the packages that Sluice needs, space for temporary files."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sluice.pipelines.errors import SetupError, get_address_limit
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import OffsetStore, RecordFormat
from sluice.pipelines.feed.stores import scheme
from sluice.pipelines.model.health import Diagnosis, of_error, report_failure, report_ok, report_skipped, report_warning
from sluice.pipelines.model.receipts import EngineKind
from sluice.pipelines.util.extras import BRINGS, DISTRIBUTION, VERSION, install
from sluice.resources.health import Check
from sluice.resources.lake import CLIENTS
from sluice.resources.local import java
from sluice.resources.spark import executors

ROOM, LITTLE = 2 << 30, 200 << 20
"""Free bytes: with less than the first it may become too little, with less than the second a run fails."""
ADDRESSES = 8 << 30
"""Bytes of addresses with which Java and Spark start."""


def python(_: Sequence[Feed]) -> Iterator[Diagnosis]:
    here, needed = platform.python_version(), _get_needed_python()
    if SpecifierSet(needed).contains(here, prereleases=True):
        yield report_ok("Python", f"{here}, {sys.executable}")
    else:
        yield report_failure(
            "Python", f"{here}; Sluice needs {needed}", f"make the environment again with Python {needed}"
        )


def packages(feeds: Sequence[Feed]) -> Iterator[Diagnosis]:
    """Compare installed packages with this release's requirements.

    Of the extras, check those that are installed or that the feeds need. A package of an extra that belongs to another
    program, as pandas may, is a warning.
    """
    try:
        requirements = [*map(Requirement, metadata.requires(DISTRIBUTION) or ())]
    except metadata.PackageNotFoundError:
        remedy = 'in a checkout: make wheel && pip install "$(ls dist/*.whl)"'
        yield report_failure("packages", f"{DISTRIBUTION} is not installed: Sluice runs from a folder", remedy)
        return
    own, needed = [r for r in requirements if _is_asked(r)], list_needed_extras(feeds)
    others = [r for r in requirements if r.name != DISTRIBUTION and not _is_asked(r)]
    extras = {extra: [r for r in others if _is_asked(r, extra)] for extra in dict.fromkeys(BRINGS.values())}
    present = {e for e, brought in extras.items() if e in needed or all(_version(r) for r in brought)}
    if "dagster" in present or "spark" in present:
        needed, present = needed | {"kafka", "duckdb"} | (present & {"dagster", "spark"}), present | {"kafka", "duckdb"}
    checked = {r.name: r for r in (*own, *(r for e in present for r in extras[e]))}
    if wrong := {name: problem for name, r in checked.items() if (problem := _wrong(r))}:
        lacking = sorted(e for e in present if any(r.name in wrong for r in extras[e]))
        fatal = not needed.isdisjoint(lacking) or any(r.name in wrong for r in own)
        report = report_failure if fatal else report_warning
        yield report("packages", "; ".join(sorted(wrong.values())), install(",".join(lacking)))
        return
    listed = [f"{n} {_version(checked[n])}" for n in ("kafka-python", "pyarrow", "dagster", "pyspark") if n in checked]
    yield report_ok("packages", f"all {len(checked)} as Sluice {VERSION} needs them: {', '.join(listed)}")


def list_needed_extras(feeds: Sequence[Feed]) -> frozenset[str]:
    """Return the extras without which a command on these feeds fails."""
    needs = {
        "zookeeper": any(f.offsets.store is OffsetStore.ZOOKEEPER for f in feeds),
        "protobuf": any(RecordFormat.PROTOBUF in (f.format, f.key and f.key.format) for f in feeds),
        "iceberg": any(d.table and d.table.iceberg for f in feeds for d in f.table_feeds),
        "delta": any(d.table and d.table.delta for f in feeds for d in f.table_feeds),
    }
    stores = {BRINGS[CLIENTS[scheme(f.lake)].package] for f in feeds if f.store}
    return frozenset(stores | {extra for extra, needed in needs.items() if needed})


def _is_asked(needed: Requirement, extra: str = "") -> bool:
    return not needed.marker or needed.marker.evaluate({"extra": extra})


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


def _get_needed_python() -> str:
    try:
        return metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        return ""  # `packages` reports it


def java_here(feeds: Sequence[Feed]) -> Iterator[Diagnosis]:
    """Check for Java: required by feeds that run on Spark; a warning for others."""
    if find_spec("pyspark") is None:
        yield report_skipped("Java", "not needed without PySpark", install("spark"))
        return
    try:
        java_home = java.find_java()
        if not (version := java.major(java_home)):
            raise SetupError(f"{java_home} does not run", remedy=java.INSTALL_HINT)
    except SetupError as error:
        if any(feed.engine is EngineKind.SPARK for feed in feeds):
            yield of_error("Java", executors.name_other_engine(error))
        else:
            needed = "needed for the local Kafka, `.spark()` and `engine: spark`; these feeds land without it"
            yield report_warning("Java", f"{error.message}: {needed}", error.remedy)
    else:
        yield report_ok("Java", f"{version}, {java_home}")


def addresses(_: Sequence[Feed]) -> Iterator[Diagnosis]:
    """Warn of a limit on addresses, of which Java reserves some GiB when it starts."""
    limit = get_address_limit()
    if limit is not None and limit < ADDRESSES:
        text = f"this process may use {limit / 2**30:.1f} GiB of addresses (ulimit -v); Java and Spark may not start"
        yield report_warning("addresses", text, "ulimit -v unlimited")


def scratch(_: Sequence[Feed]) -> Iterator[Diagnosis]:
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


CHECKS: tuple[Check[Sequence[Feed]], ...] = (
    Check("addresses", addresses),
    Check("Python", python),
    Check("Java", java_here),
    Check("packages", packages),
    Check("scratch", scratch),
)
