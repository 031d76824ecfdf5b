"""`sluice doctor --spark` on a cluster: the checks of its executors."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from bench.spark_cluster import LocalSpark
from tests.cluster.conftest import configure_spark
from tests.integration.support import SLUICE, FeedProject

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]


def run_doctor(project: FeedProject, lines: dict[str, str]) -> list[dict[str, Any]]:
    """Run `sluice doctor --spark` in a separate process. Returns the checks of Spark."""
    project.write_feed(**lines)
    command = [*SLUICE, "doctor", "orders", "--spark", "--json"]
    result = subprocess.run(command, cwd=project.root, capture_output=True, timeout=300, check=False)
    (group,) = (g for g in json.loads(result.stdout)["groups"] if g["title"].startswith("Spark"))
    checks = group["checks"]
    assert isinstance(checks, list)
    return checks


def test_doctor_checks_executors(project: FeedProject, cluster: LocalSpark) -> None:
    checks = run_doctor(project, configure_spark(cluster))
    assert [(c["title"], c["health"]) for c in checks] == [("master", "ok"), ("session", "ok"), ("executors", "ok")]
    assert checks[2]["found"].startswith("2 on ")
