"""Diagnoses of this machine."""

from __future__ import annotations

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.health import Health
from sluice.resources.health import examine, machine_checks


def test_this_machine_has_no_failed_checks() -> None:
    diagnoses = examine((), machine_checks.CHECKS)
    assert {d.title for d in diagnoses} == {"Python", "Java", "packages", "scratch"}
    assert Health.FAILED not in {d.health for d in diagnoses}
    assert sys.executable in diagnoses[0].found


def test_missing_and_mismatched_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    set_versions(monkeypatch, pyarrow=None, dagster="1.0.0")
    (diagnosis,) = machine_checks.packages(())
    assert diagnosis.health is Health.FAILED
    assert re.fullmatch(r"dagster is 1\.0\.0, not dagster[<>=,.\d]+; pyarrow is missing", diagnosis.found)


@pytest.mark.parametrize(
    ("free", "health"), [(100 << 20, Health.FAILED), (1 << 30, Health.WARNING), (9 << 30, Health.OK)]
)
def test_health_depends_on_free_disk_space(
    free: int, health: Health, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert machine_checks.room("scratch", tmp_path, "TMPDIR").health is health


def set_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that these versions are installed instead of the locked ones; None: not installed."""
    real = metadata.version

    def get_version(name: str) -> str:
        release = versions.get(name.replace("-", "_"), real(name))
        if release is None:
            raise metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(metadata, "version", get_version)


def test_packages_of_uninstalled_extras_may_have_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster requires SQLAlchemy and protobuf as well, which two extras restrict."""
    others = dict.fromkeys(("pyiceberg", "dagster_postgres", "grpcio_tools"))
    set_versions(monkeypatch, sqlalchemy="2.1.0", protobuf="7.1", **others)
    (diagnosis,) = machine_checks.packages(())
    assert diagnosis.health is Health.OK, diagnosis


def test_packages_of_an_extra_that_a_feed_needs_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "orders.yaml"
    table = "{iceberg: {name: db.orders, catalog: {type: sql, uri: 'sqlite:///catalog.db'}}}"
    file.write_text(f"topics: a\nstart: earliest\nkafka: {{bootstrap: 'a:9'}}\ntable: {table}\n")
    set_versions(monkeypatch, sqlalchemy="2.1.0", pyiceberg=None, dagster_postgres=None)
    (diagnosis,) = machine_checks.packages((load_feed(file, {}),))
    assert (diagnosis.health, diagnosis.remedy) == (Health.FAILED, "pip install 'kafka-sluice[iceberg]'")
    assert diagnosis.found == "pyiceberg is missing; sqlalchemy is 2.1.0, not sqlalchemy<2.1,>=2.0"


def test_mismatched_package_that_no_feed_needs_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    set_versions(monkeypatch, pandas="2.1.0")
    (diagnosis,) = machine_checks.packages(())
    assert (diagnosis.health, diagnosis.found) == (Health.WARNING, "pandas is 2.1.0, not pandas>=2.2")


def test_java_is_not_needed_without_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "find_spec", lambda name: None)
    (diagnosis,) = machine_checks.java_here(())
    assert (diagnosis.health, diagnosis.remedy) == (Health.SKIPPED, "pip install 'kafka-sluice[spark]'")


def test_java_that_does_not_run_is_a_failure_for_feeds_on_spark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_checks.java, "find_java", lambda: tmp_path / "java")
    settings = {"feed": "orders", "kafka": {"bootstrap": "a:1"}, "topics": "orders", "start": "earliest"}
    (diagnosis,) = machine_checks.java_here((Feed.model_validate(settings),))
    assert (diagnosis.health, diagnosis.found) == (Health.FAILED, f"{tmp_path / 'java'} does not run")


@pytest.mark.parametrize(
    ("engine", "health", "remedy"),
    [
        ("processes", Health.WARNING, "install one"),
        (
            "spark",
            Health.FAILED,
            "install one; or land without Spark: `engine: processes` in the feed or in fleet.yaml",
        ),
    ],
)
def test_only_feeds_on_spark_require_java(
    engine: str, health: Health, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise SetupError("no Java", remedy="install one")

    monkeypatch.setattr(machine_checks.java, "find_java", fail)
    settings = {"feed": "orders", "kafka": {"bootstrap": "a:1"}, "topics": "orders", "start": "earliest"}
    feed = Feed.model_validate(settings | {"engine": engine})
    (diagnosis,) = machine_checks.java_here((feed,))
    assert (diagnosis.health, diagnosis.remedy) == (health, remedy)
