"""`sluice report`: where a batch's report is, made again when nobody wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.inspect import report
from sluice.pipelines.errors import UsageError
from tests.assets.world import World, in_hour
from tests.cli.conftest import Tell


def test_of_the_newest_batch_and_of_another(world: World, tell: Tell, tmp_path: Path) -> None:
    world.land_unrecorded(in_hour(0))
    world.bury()
    world.land_unrecorded(in_hour(1))
    first, second = world.state().batches
    told = tell(report.report, "orders", output=tmp_path / "out.html")
    said = told.document
    assert (said["batch"], said["status"], said["rows"], said["quarantined"]) == (second, "published", 50, 0)
    assert (said["path"], said["rebuilt"]) == (f"memory://_sluice/orders/reports/0/{second}.html", True)
    assert told.text == f"{tmp_path / 'out.html'}\n"
    data = (tmp_path / "out.html").read_bytes()
    assert data == world.lake.files[f"_sluice/orders/reports/0/{second}.html"]
    assert len(data) == said["size"]
    again = tell(report.report, "orders", batch=second)
    assert (again.document["rebuilt"], again.document["output"]) == (False, None)
    assert again.text == f"{said['path']}\n"
    assert tell(report.report, "orders", batch=first).document["batch"] == first


def test_batches_that_are_not_there(world: World, tell: Tell) -> None:
    with pytest.raises(UsageError, match="no batch yet"):
        tell(report.report, "orders")
    with pytest.raises(UsageError, match="no batch 99"):
        tell(report.report, "orders", batch=99)
