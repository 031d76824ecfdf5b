"""A contract that changes after Dagster loaded the code location: runs that its pages launch, over a real Kafka."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from kafka import KafkaProducer

from sluice.assets.instance.instance import open_instance
from sluice.assets.instance.internals import LOCATION
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.util.units import show_window
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.assets.test_contracts import NULLS, OFFSETS
from tests.assets.ui import Pages, open_pages
from tests.assets.world import read_checks
from tests.deployment import wait_for_end

pytestmark = [pytest.mark.spark, pytest.mark.slow]
HOUR = 3_600_000
LANDED = landed_key("orders")
LAUNCH = """
mutation ($params: ExecutionParams!) {
  launchPipelineExecution(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on InvalidSubsetError { message }
  }
}"""


def launch_run(pages: Pages, names: Sequence[str], window: str) -> str:
    """Launch a run of `landed` for a window and the selected checks, as the button Materialize does. Returns its id."""
    asset = {"path": [*LANDED.path]}
    params = {
        "selector": {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "jobName": "__ASSET_JOB",
            "assetSelection": [asset],
            "assetCheckSelection": [{"assetKey": asset, "name": name} for name in names],
        },
        "runConfigData": {},
        "executionMetadata": {"tags": [{"key": "dagster/partition", "value": window}]},
    }
    launched = pages.ask(LAUNCH, params=params)["launchPipelineExecution"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run = str(launched["run"]["runId"])
    instance = pages.process.instance
    instance.launch_run(run, pages.process.create_request_context())  # it is queued, and no daemon runs here
    return run


def write_contract(root: Path, *expectations: dict[str, Any]) -> None:
    suite = {"name": "orders", "expectations": expectations, "meta": {"great_expectations_version": "1.24.0"}}
    (root / "feeds" / "orders.contract.json").write_text(json.dumps(suite))


@pytest.fixture
def hours(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> list[int]:
    """The starts of two hours with ten records each, without keys, in the topic of a project."""
    topic = fresh_topic(partitions=1, name="changing")
    now = time.time_ns() // 1_000_000
    starts = [now - now % HOUR - n * HOUR for n in (4, 3)]
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for start in starts:
            for i in range(10):
                producer.send(topic, b"v", partition=0, timestamp_ms=start + i)
    (tmp_path / "feeds").mkdir()
    feed = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: earliest\n"
    (tmp_path / "feeds" / "orders.yaml").write_text(feed)
    return starts


def test_runs_keep_the_checks_that_the_code_location_loaded(
    tmp_path: Path, hours: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_contract(tmp_path, NULLS)
    project, (first, second) = Project(tmp_path), map(show_window, hours)
    with open_instance(project) as instance, open_pages(instance, project, monkeypatch) as pages:
        selected = [n for n in pages.read_check_statuses(LANDED) if n != "feed_health"]
        assert "contract_completeness" in selected
        write_contract(tmp_path, OFFSETS)  # one check is gone, and one is new
        run = launch_run(pages, selected, first)
        assert wait_for_end(instance, run) is dg.DagsterRunStatus.SUCCESS
        removed = read_checks(instance, run, "contract_completeness")[first]
        assert removed.passed
        assert "Reload definitions" in (removed.description or "")
        (observation,) = (r.asset_observation for r in instance.fetch_observations(LANDED, limit=9).records)
        assert observation is not None
        assert "Reload definitions" in (observation.description or "")
        assert observation.metadata["contract_numeric"].value == "passed: 1 expectation met by 10 rows"

        (tmp_path / "feeds" / "orders.contract.json").unlink()
        run = launch_run(pages, selected, second)
        assert wait_for_end(instance, run) is dg.DagsterRunStatus.SUCCESS
        assert read_checks(instance, run, "window_complete")[second].passed
        assert {first, second} <= instance.get_materialized_partitions(LANDED)
