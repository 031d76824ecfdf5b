"""Spark Connect, whose server's Python has nothing of ours: the pack travels with the session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.spark_cluster import LocalSpark
from tests.integration.support import Place, consumed, rows

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_a_bare_server_lands_what_is_there(place: Place, tmp_path: Path) -> None:
    with LocalSpark(tmp_path / "spark", workers=0) as cluster:
        feed = place.feed(spark=f"{{master: '{cluster.start_connect()}'}}")
        ask = [sys.executable, "-m", "tests.cluster.lands", str(place.root / "feeds" / "orders.yaml")]
        done = subprocess.run(ask, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
        assert done.returncode == 0, done.stderr + (tmp_path / "spark" / "connect.log").read_text()[-3000:]
    assert rows(feed) == consumed(place.kafka, place.topic)
