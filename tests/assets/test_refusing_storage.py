"""A run keeps its result if Dagster+ refuses storage calls to user code, or a new Dagster lacks private names."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.event_log import SqliteEventLogStorage

from sluice.assets.factory import build
from sluice.assets.instance import internals
from sluice.assets.instance.instance import open_instance
from sluice.assets.operations.dead_runs import free_leaked_slots
from sluice.assets.runs.run_session import AGAIN_TAG, ERROR_TAG
from sluice.assets.specs.asset_specs import committed_key, landed_key
from sluice.pipelines.errors import BatchIncomplete, GroupHeld, KafkaUnavailable
from sluice.pipelines.ports import Member
from tests.assets.conftest import ON_FILES
from tests.assets.test_many_feeds import Fleet, fleet  # noqa: F401 - a fixture
from tests.assets.test_schedule import run_tick
from tests.assets.test_sensors import Sensor
from tests.assets.test_ui import disconnect_kafka, find_latest_evaluation
from tests.assets.world import CATCH_UP, P0, World, in_hour, read_windows, resolve_landing

pytestmark = ON_FILES
LANDED, COMMITTED = landed_key("orders"), committed_key("orders")
REFUSED_BY_AGENTS = (
    *("get_asset_check_execution_history", "get_asset_check_partition_info", "get_concurrency_run_ids"),
    *("get_freshness_state_records", "update_asset_cached_status_data", "watch", "end_watch"),
)
"""The calls of an event log that dagster-cloud 1.13.27 refuses to user code."""
FOR_PICTURES = (
    *REFUSED_BY_AGENTS,
    "get_latest_asset_check_execution_by_key",
    "get_latest_asset_partition_materialization_attempts_without_materializations",
    "get_materialized_partitions",
)
"""All calls that serve only Dagster's pages."""


def refuse(monkeypatch: pytest.MonkeyPatch, *calls: str) -> None:
    def raise_not_callable(*_: Any, **__: Any) -> None:
        raise NotImplementedError("Not callable from user cloud")

    for call in calls:
        assert hasattr(SqliteEventLogStorage, call)
        monkeypatch.setattr(SqliteEventLogStorage, call, raise_not_callable)


def test_simulated_refusals_match_dagster_cloud_package() -> None:
    """Skipped without dagster-cloud. Its agent is not started, since it needs an account."""
    if (package := importlib.util.find_spec("dagster_cloud")) is None or package.origin is None:
        pytest.skip("dagster-cloud is not installed")
    source = (Path(package.origin).parent / "storage" / "event_logs" / "storage.py").read_text()
    refused = {
        function.name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(n, ast.Name) and n.id == "NotImplementedError" for n in ast.walk(function))
    }
    assert refused == {*REFUSED_BY_AGENTS}


@pytest.mark.slow
@pytest.mark.parametrize("calls", [REFUSED_BY_AGENTS, FOR_PICTURES], ids=["as agents do", "all for pictures"])
def test_run_keeps_its_result_and_error_when_calls_are_refused(
    calls: tuple[str, ...], world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, *calls)
    for request in (in_hour(0), CATCH_UP):
        assert world.run(request).error is None
    with monkeypatch.context() as away:
        disconnect_kafka(world, away)
        for request in (in_hour(1), CATCH_UP):
            lost = world.run(request)
            assert isinstance(lost.error, KafkaUnavailable)
            run = instance.get_run_by_id(lost.run_id)
            assert run is not None
            assert (run.tags[ERROR_TAG], run.tags[AGAIN_TAG]) == ("KafkaUnavailable", "KafkaUnavailable")
    world.grow(0, 130)
    world.engine.failing = {P0}
    assert isinstance(world.run().error, BatchIncomplete)
    world.engine.failing = set()
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    assert isinstance(world.run().error, GroupHeld)
    world.group.others = []
    assert world.run().error is None
    assert {"2024-05-01T00:00", "2024-05-01T03:00"} <= {*read_windows(instance, LANDED)}
    assert "2024-05-01T00:00" in read_windows(instance, COMMITTED)


def test_schedule_and_sensor_tick_when_calls_are_refused(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(in_hour(0))
    refuse(monkeypatch, *FOR_PICTURES)
    assert run_tick(world, instance) == ["01:00-04:00"]
    with monkeypatch.context() as away:
        disconnect_kafka(world, away)
        assert isinstance(world.run(in_hour(1)).error, KafkaUnavailable)
    assert run_tick(world, instance) == ["01:00-04:00"]  # the lost window is requested again
    assert "findings" in Sensor(world, instance).run_tick()[0]
    assert free_leaked_slots(instance) == ()


def test_failed_run_is_shown_in_health_check(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as refusing:
        refuse(refusing, *REFUSED_BY_AGENTS)
        world.run()
        disconnect_kafka(world, refusing)
        world.run(in_hour(1))
    assert "no broker answers" in (find_latest_evaluation(instance, "feed_health").description or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", internals.PRIVATE)
def test_feeds_land_when_a_private_name_is_missing(
    name: str,
    fleet: Fleet,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(internals, "PRIVATE", internals.PRIVATE | {name: "_core.gone"})
    assert [n for n, result in fleet.land().items() if result.error] == []
    fleet.at(7)
    assert fleet.run(in_hour(5)).error is None


def test_feeds_land_when_all_private_names_are_missing(
    fleet: Fleet,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(internals, "PRIVATE", dict.fromkeys(internals.PRIVATE, "_core.gone"))
    monkeypatch.setattr(dg, "deserialize_value", lambda _: 1 / 0)  # nor the stored forms
    assert [name for name, result in fleet.land().items() if result.error] == []
    fleet.at(7)
    assert fleet.run(in_hour(5)).error is None
    fleet.away = frozenset({"orders"})
    results = fleet.land()
    assert {name for name, result in results.items() if result.error} == {"orders"}
    assert isinstance(results["orders"].error, KafkaUnavailable)
    with open_instance(fleet.project) as instance:
        assert "2024-05-01T05:00" in read_windows(instance, LANDED)
    assert resolve_landing(build(fleet.project, fleet.make_session())).asset_selection
