"""`sluice report`: the path of a batch's report, which is built again if it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.inspect import report
from sluice.pipelines.errors import UsageError
from tests.assets.world import World, in_hour
from tests.cli.conftest import Invoke


def test_report_is_built_for_the_newest_or_a_given_batch(world: World, invoke: Invoke, tmp_path: Path) -> None:
    world.land_unrecorded(in_hour(0))
    world.bury()
    world.land_unrecorded(in_hour(1))
    first, second = world.state().batches
    result = invoke(report.report, "orders", output=tmp_path / "out.html")
    document = result.document
    assert (document["batch"], document["status"], document["rows"], document["quarantined"]) == (
        second,
        "published",
        50,
        0,
    )
    assert (document["path"], document["rebuilt"]) == (f"memory://_sluice/orders/reports/0/{second}.html", True)
    assert result.text == f"{tmp_path / 'out.html'}\n"
    data = (tmp_path / "out.html").read_bytes()
    assert data == world.lake.files[f"_sluice/orders/reports/0/{second}.html"]
    assert len(data) == document["size"]
    again = invoke(report.report, "orders", batch=second)
    assert (again.document["rebuilt"], again.document["output"]) == (False, None)
    assert again.text == f"{document['path']}\n"
    assert invoke(report.report, "orders", batch=first).document["batch"] == first


def test_report_of_a_missing_batch_is_rejected(world: World, invoke: Invoke) -> None:
    with pytest.raises(UsageError, match="no batch yet"):
        invoke(report.report, "orders")
    with pytest.raises(UsageError, match="no batch 99"):
        invoke(report.report, "orders", batch=99)
