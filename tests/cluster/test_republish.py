"""Lanes of a republish on executors without Sluice, also with a lake on S3."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.spark_cluster import LocalSpark
from sluice.cli.main import main
from sluice.pipelines.republishing import republish_plan as plans
from tests.cluster.conftest import MANY_TASKS, configure_spark, land_feed
from tests.integration.support import FeedProject, consume_topic
from tests.resources.kafka.tools import wait_until
from tests.stores import Store

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_context"),
]


def group_by_partition(rows: list[dict[str, Any]]) -> dict[int, list[Any]]:
    by_partition: dict[int, list[Any]] = {}
    for r in rows:
        by_partition.setdefault(r["partition"], []).append((r["key"], r["value"], r["timestamp"]))
    return by_partition


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_republish_lanes_run_on_workers_without_sluice(
    project: FeedProject,
    cluster: LocalSpark,
    fresh_topic: Callable[..., str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    where: str,
) -> None:
    store: Store | None = request.getfixturevalue("s3_store") if where == "s3" else None
    land_feed(project.write_feed(**configure_spark(cluster), **(store.build_feed_settings() if store else {})))
    target = fresh_topic(partitions=4)
    arguments = [
        "republish",
        "orders",
        "--topic",
        target,
        "--id",
        "again",
        "--keep-partitions",
        "--keep-timestamps",
        "--yes",
    ]
    arguments += [word for p in range(4) for word in ("--offsets", f"{project.topic}:{p}:0-1000")]
    monkeypatch.setattr(plans, "LANE_OFFSETS", 1000)
    assert main([*arguments, "--json", "--project", str(project.root)]) == 0, capfd.readouterr().err
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (report["lanes"], report["records_in_all"], report["transactions"]) == (4, 4000, 4)
    records = wait_until(lambda: len(r := consume_topic(project.kafka, target)) >= 4000 and r)
    assert group_by_partition(records) == group_by_partition(consume_topic(project.kafka, project.topic))
    assert main(["audit", "orders", "--republished", "again", "--project", str(project.root)]) == 0
    assert "ModuleNotFoundError" not in cluster.read_output()


def test_lanes_with_speculation_are_refused_and_can_run_locally(
    project: FeedProject, cluster: LocalSpark, fresh_topic: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    land_feed(project.write_feed(**configure_spark(cluster, conf={"spark.speculation": "true"}), **MANY_TASKS))
    target = fresh_topic()
    arguments = [
        "republish",
        "orders",
        "--topic",
        target,
        "--offsets",
        f"{project.topic}:0:0-1000",
        "--id",
        "again",
        "--yes",
    ]
    arguments += ["--project", str(project.root)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LANE_OFFSETS", 250)
        more = ["--offsets", f"{project.topic}:1:0-1000"]
        assert main([*arguments, *more]) == 2
        assert "leave spark.speculation out" in capfd.readouterr().err
        assert consume_topic(project.kafka, target) == []
        assert main([*arguments, *more, "--here"]) == 0
    assert len(wait_until(lambda: len(r := consume_topic(project.kafka, target)) >= 2000 and r)) == 2000
