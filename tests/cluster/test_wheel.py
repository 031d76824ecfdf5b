"""Sluice installed from its wheel, as users have it: what it packs of itself lands on bare workers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from sluice.resources.local.spark_cluster import LocalSpark
from tests.cluster.conftest import on
from tests.cluster.test_endings import SLUICE
from tests.integration.support import Place, consumed, rows
from tests.test_packaging import built

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]


def test_what_a_wheel_installed_lands_on_bare_workers(place: Place, cluster: LocalSpark, tmp_path: Path) -> None:
    """With a module of the user's own, which lies beside the feeds."""
    (tmp_path / "made").mkdir()
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    packages = tmp_path / "venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    with zipfile.ZipFile(built(tmp_path / "made")) as wheel:
        wheel.extractall(packages)
    # What the wheel requires is there already: that folder comes last, and what is editable in it stays out.
    (packages / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (place.root / "company").mkdir()
    (place.root / "company" / "tokens.py").write_text("WHO = 'us'\n")
    feed = place.feed(**on(cluster, modules="[company.tokens]"))
    cache = tmp_path / "cache"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(place.root)}
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", SLUICE, "run", "orders"]
    done = subprocess.run(command, cwd=place.root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + cluster.said()[-3000:]
    assert rows(feed) == consumed(place.kafka, place.topic)
    (made,) = cache.glob("sluice/packs/*.tar.gz")
    with tarfile.open(made) as archive:
        names = set(archive.getnames())
    assert {"sluice/resources/spark/executor.py", "company/tokens.py"} <= names
    assert not [n for n in names if n.startswith(("sluice/cli", "sluice/bench", "sluice/assets"))]
