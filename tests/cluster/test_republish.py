"""Lanes of a republish on executors that have nothing of ours, also where the lake is on S3."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.spark_cluster import LocalSpark
from sluice.cli.main import main
from sluice.pipelines.republishing import republish_plan as plans
from tests.cluster.conftest import MANY_TASKS, landed, on
from tests.integration.support import Place, consumed
from tests.resources.kafka.tools import until
from tests.stores import Store

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_context"),
]


def contents(found: list[dict[str, Any]]) -> dict[int, list[Any]]:
    by_partition: dict[int, list[Any]] = {}
    for r in found:
        by_partition.setdefault(r["partition"], []).append((r["key"], r["value"], r["timestamp"]))
    return by_partition


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_lanes_on_bare_workers(
    place: Place,
    cluster: LocalSpark,
    fresh_topic: Callable[..., str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    where: str,
) -> None:
    store: Store | None = request.getfixturevalue("s3_store") if where == "s3" else None
    landed(place.feed(**on(cluster), **(store.lines() if store else {})))
    again = fresh_topic(partitions=4)
    asked = [
        "republish",
        "orders",
        "--topic",
        again,
        "--id",
        "again",
        "--keep-partitions",
        "--keep-timestamps",
        "--yes",
    ]
    asked += [word for p in range(4) for word in ("--offsets", f"{place.topic}:{p}:0-1000")]
    monkeypatch.setattr(plans, "LANE_OFFSETS", 1000)
    assert main([*asked, "--json", "--project", str(place.root)]) == 0, capfd.readouterr().err
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (said["lanes"], said["records_in_all"], said["transactions"]) == (4, 4000, 4)
    found = until(lambda: len(r := consumed(place.kafka, again)) >= 4000 and r)
    assert contents(found) == contents(consumed(place.kafka, place.topic))
    assert main(["audit", "orders", "--republished", "again", "--project", str(place.root)]) == 0
    assert "ModuleNotFoundError" not in cluster.read_output()


def test_lanes_where_tasks_run_twice(
    place: Place, cluster: LocalSpark, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    landed(place.feed(**on(cluster, conf={"spark.speculation": "true"}), **MANY_TASKS))
    again = fresh_topic()
    asked = ["republish", "orders", "--topic", again, "--offsets", f"{place.topic}:0:0-1000", "--id", "again", "--yes"]
    asked += ["--project", str(place.root)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LANE_OFFSETS", 250)
        more = ["--offsets", f"{place.topic}:1:0-1000"]
        assert main([*asked, *more]) == 2
        assert "leave spark.speculation out" in capfd.readouterr().err
        assert consumed(place.kafka, again) == []
        assert main([*asked, *more, "--here"]) == 0
    assert len(until(lambda: len(r := consumed(place.kafka, again)) >= 2000 and r)) == 2000
