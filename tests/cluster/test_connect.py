"""Spark Connect with a server whose Python lacks Sluice: the pack travels with the session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.spark_cluster import LocalSpark
from tests.integration.support import FeedProject, consume_topic, read_rows

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_connect_server_without_sluice_lands_the_topic(project: FeedProject, tmp_path: Path) -> None:
    with LocalSpark(tmp_path / "spark", workers=0) as cluster:
        feed = project.write_feed(spark=f"{{master: '{cluster.start_connect()}'}}")
        command = [sys.executable, "-m", "tests.cluster.lands", str(project.root / "feeds" / "orders.yaml")]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
        assert result.returncode == 0, result.stderr + (tmp_path / "spark" / "connect.log").read_text()[-3000:]
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)
