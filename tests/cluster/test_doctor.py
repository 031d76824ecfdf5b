"""`sluice doctor --spark` on a cluster: what its executors say that they can do."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.spark_cluster import LocalSpark
from tests.cluster.conftest import on
from tests.integration.support import Place

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
SLUICE = "import sys; from sluice.cli.entry import main; sys.exit(main())"


def spark(place: Place, lines: dict[str, str]) -> list[dict[str, Any]]:
    """The lines on Spark of a process of its own."""
    place.feed(**lines)
    command = [sys.executable, "-c", SLUICE, "doctor", "orders", "--spark", "--json"]
    done = subprocess.run(command, cwd=place.root, capture_output=True, timeout=300, check=False)
    (found,) = (g for g in json.loads(done.stdout)["groups"] if g["title"].startswith("Spark"))
    checks = found["checks"]
    assert isinstance(checks, list)
    return checks


def test_executors_are_asked(place: Place, cluster: LocalSpark) -> None:
    found = spark(place, on(cluster))
    assert [(c["title"], c["health"]) for c in found] == [("master", "ok"), ("session", "ok"), ("executors", "ok")]
    assert found[2]["found"].startswith("2 on ")
