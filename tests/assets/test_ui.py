"""Runs from the command line, as Dagster's UI shows them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._cli.utils import TMP_DAGSTER_HOME_PREFIX

from sluice.assets import definitions
from sluice.assets.factory import build
from sluice.assets.instance import internals
from sluice.assets.instance.instance import bury_dead_runs, prepare_home
from sluice.assets.specs.asset_specs import committed_key, landed_key
from sluice.pipelines.errors import KafkaUnavailable, UsageError
from sluice.pipelines.model.plans import Request
from sluice.pipelines.ports import Member
from tests.assets.test_schedule import run_tick
from tests.assets.test_sensors import Sensor
from tests.assets.ui import WORKSPACE, Pages, open_in_process, open_pages
from tests.assets.world import CATCH_UP, P0, World, in_hour, list_versions, read_checks, resolve_landing

LANDED, COMMITTED = landed_key("orders"), committed_key("orders")
JOB = """
query ($job: String!) {
  pipelineOrError(params: {repositoryName: "__repository__", repositoryLocationName: "sluice", pipelineName: $job}) {
    ... on Pipeline { runs { runId status } }
  }
}"""
TIMELINE = """
query ($label: String!) {
  runsOrError(filter: {tags: [{key: ".dagster/repository", value: $label}]}) {
    ... on Runs { results {
      runId repositoryOrigin { repositoryName repositoryLocationName } hasReExecutePermission
    } }
  }
}"""
AGAIN = """
mutation ($run: String!, $strategy: ReexecutionStrategy!) {
  launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: $strategy}) {
    __typename
    ... on LaunchRunSuccess { run { parentRunId pipelineName status stepKeysToExecute } }
    ... on PythonError { message }
  }
}"""


def list_runs_of_job(pages: Pages, job: str) -> list[str]:
    return [r["runId"] for r in pages.ask(JOB, job=job)["pipelineOrError"]["runs"]]


def test_command_line_run_is_listed_and_reexecutable_in_ui(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    catch_up, window = world.run().run_id, world.run(in_hour(0)).run_id
    with open_pages(instance, world.project, monkeypatch) as pages:
        assert (list_runs_of_job(pages, "catch_up"), list_runs_of_job(pages, "__ASSET_JOB")) == (
            [catch_up],
            [window],
        )
        runs = pages.ask(TIMELINE, label="__repository__@sluice")["runsOrError"]["results"]
        assert {r["runId"] for r in runs} == {catch_up, window}
        assert {r["repositoryOrigin"]["repositoryLocationName"] for r in runs} == {"sluice"}
        for run, job in ((catch_up, "catch_up"), (window, "__ASSET_JOB")):
            again = pages.ask(AGAIN, run=run, strategy="ALL_STEPS")["launchRunReexecution"]
            assert again["__typename"] == "LaunchRunSuccess", again
            assert (again["run"]["parentRunId"], again["run"]["pipelineName"]) == (run, job)
            assert again["run"]["stepKeysToExecute"] is None, "all of them"


def test_failed_run_is_reexecuted_from_failed_step(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    failed = world.run(in_hour(0)).run_id
    with open_pages(instance, world.project, monkeypatch) as pages:
        again = pages.ask(AGAIN, run=failed, strategy="FROM_FAILURE")["launchRunReexecution"]
        assert again["__typename"] == "LaunchRunSuccess", again
        assert again["run"]["stepKeysToExecute"] == ["orders__committed"]


# -- the state of checks and partitions


class Gone:
    """A Kafka of which no broker answers."""

    def __getattr__(self, name: str) -> Any:
        def raise_unavailable(*_: object) -> None:
            raise KafkaUnavailable("no broker answers")

        return raise_unavailable


def disconnect_kafka(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "cluster", Gone())


def create_killed_run(world: World, instance: dg.DagsterInstance, window: str) -> None:
    """Create a run over a window whose process was killed before its first step."""
    job = resolve_landing(build(world.project))
    tags = {"dagster/partition": window}
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
    (prepare_home(world.project) / "attended").mkdir(exist_ok=True)
    (prepare_home(world.project) / "attended" / run.run_id).touch()


FAILED = {
    "no_gaps": "SUCCEEDED",
    "window_boundaries": "SUCCEEDED",
    "window_complete": "SUCCEEDED",
    "feed_health": "FAILED",
}
"""After a failed run: complete partitions stay green, and the check `feed_health` reports the failure."""
GOOD = {
    "no_gaps": "SUCCEEDED",
    "window_boundaries": "SUCCEEDED",
    "window_complete": "SUCCEEDED",
    "feed_health": "SUCCEEDED",
}


def test_landed_checks_pass_after_first_successful_run(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_pages(instance, world.project, monkeypatch) as pages:
        # The newest hour first, as the UI offers it: no commit has passed it yet.
        for request, frontier in ((in_hour(3), "FAILED"), (CATCH_UP, "SUCCEEDED")):
            assert world.run(request).exit_code == 0
            assert (pages.read_check_statuses(LANDED), pages.read_check_statuses(COMMITTED)) == (
                GOOD,
                {"offsets_committed": frontier},
            ), request
        texts = pages.list_descriptions(LANDED) | pages.list_descriptions(COMMITTED)
        assert all(text.startswith("Passes when ") for text in texts.values()), texts


def test_complete_window_stays_green_when_later_run_fails(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    with open_in_process(instance, world.project) as pages, monkeypatch.context() as away:
        disconnect_kafka(world, away)
        failed = world.run(in_hour(1))
        assert failed.exit_code == 1
        assert (pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)) == (0, 0)
        assert (pages.read_check_statuses(LANDED), pages.read_check_statuses(COMMITTED)) == (
            FAILED,
            {"offsets_committed": "SUCCEEDED"},
        )
    assert len(set(list_versions(instance, LANDED, "2024-05-01T01:00"))) == 1, "nothing runs again because of it"


@pytest.mark.parametrize("by", [in_hour(4), CATCH_UP])
def test_failed_run_is_shown_in_health_check_without_sensor(
    by: Request, world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the last successful run does not cover the hours that failed since."""
    world.run()
    world.grow(0, 110)
    world.at(8)
    with open_in_process(instance, world.project) as pages:
        for hour in (6, 7):
            with monkeypatch.context() as away:
                disconnect_kafka(world, away)
                assert world.run(by if by == CATCH_UP else in_hour(hour)).exit_code == 1
            assert pages.read_check_statuses(LANDED)["feed_health"] == "FAILED"
            description = find_latest_evaluation(instance, "feed_health").description or ""
            assert description.startswith("the last run failed: no broker answers")
        world.engine.failing = {P0}
        assert world.run().exit_code == 1
        assert "the last run failed: 1 offset ranges failed" in (
            find_latest_evaluation(instance, "feed_health").description or ""
        )
        world.engine.failing = set()
        world.run()
        assert pages.read_check_statuses(LANDED)["feed_health"] == "SUCCEEDED"


def find_latest_evaluation(instance: dg.DagsterInstance, name: str) -> dg.AssetCheckEvaluation:
    """Returns the last evaluation of a check of `landed` without partitions."""
    key = dg.AssetCheckKey(LANDED, name)
    evaluation = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key].evaluation
    assert evaluation is not None
    return evaluation


def test_later_refused_commit_leaves_committed_windows_green(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    world.land_unrecorded(in_hour(1))
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    with open_in_process(instance, world.project) as pages:
        assert world.run(in_hour(0)).exit_code == 3
        assert (pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)) == (0, 0)
        assert (pages.read_check_statuses(LANDED), pages.read_check_statuses(COMMITTED)) == (
            FAILED,
            {"offsets_committed": "FAILED"},
        )
        assert "the last run failed: " in (find_latest_evaluation(instance, "feed_health").description or "")


def test_windows_left_red_by_killed_run_become_green_again(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    with open_in_process(instance, world.project) as pages:
        create_killed_run(world, instance, "2024-05-01T01:00")
        bury_dead_runs(instance, prepare_home(world.project))
        assert (pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)) == (1, 1)
        assert (
            pages.read_check_statuses(LANDED)["window_complete"]
            == pages.read_check_statuses(LANDED)["no_gaps"]
            == "EXECUTION_FAILED"
        )
        world.run()
        assert (pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)) == (0, 0)
        assert (pages.read_check_statuses(LANDED), pages.read_check_statuses(COMMITTED)) == (
            GOOD,
            {"offsets_committed": "SUCCEEDED"},
        )

        ticks = {"NOT_EVALUATED": lambda: run_tick(world, instance), "SUCCEEDED": Sensor(world, instance).run_tick}
        for watch, tick in ticks.items():  # the schedule does not ask Kafka, the sensor does
            create_killed_run(world, instance, "2024-05-01T02:00")
            bury_dead_runs(instance, prepare_home(world.project))
            assert pages.count_failed_partitions(LANDED) == 1
            tick()
            assert (pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)) == (0, 0)
            assert (
                pages.read_check_statuses(LANDED)["window_complete"],
                pages.read_check_statuses(LANDED)["no_gaps"],
            ) == (
                "SUCCEEDED",
                "SUCCEEDED",
            )
            assert pages.read_check_statuses(COMMITTED) == {"offsets_committed": "SUCCEEDED"}
            assert pages.read_check_statuses(LANDED)["feed_health"] == watch
    assert len(set(list_versions(instance, LANDED, "2024-05-01T02:00"))) == 1, "nothing runs again because of it"


def test_feed_checks_name_their_target_materialization(world: World, instance: dg.DagsterInstance) -> None:
    """Otherwise Dagster compares times, which SQLite stores in whole seconds: events within one would be ignored."""
    world.run()
    create_killed_run(world, instance, "2024-05-01T01:00")
    bury_dead_runs(instance, prepare_home(world.project))
    again = world.run().run_id
    newest = instance.fetch_materializations(LANDED, limit=1).records[0]
    assert newest.run_id != again, "it had nothing to land: the killed run's windows were reported without a run"
    for name in ("no_gaps", "feed_health"):
        target = read_checks(instance, again, name)[None].target_materialization_data
        assert target is not None
        assert target.storage_id == newest.storage_id


def test_pending_window_stays_red(world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(in_hour(0))
    with open_in_process(instance, world.project) as pages:
        with monkeypatch.context() as away:
            disconnect_kafka(world, away)
            assert world.run(in_hour(1)).exit_code == 1
        world.run(in_hour(2))
        assert (pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)) == (1, 1)


# -- one home, one name


def test_location_name_matches_workspace_yaml(tmp_path: Path) -> None:
    (ours,) = yaml.safe_load(WORKSPACE.read_text())["load_from"]
    assert ours["python_module"]["module_name"] == internals.MODULE
    assert ours["python_module"]["location_name"] == internals.LOCATION
    (served,) = yaml.safe_load(internals.workspace(tmp_path / "code.sock"))["load_from"]
    assert served["grpc_server"]["location_name"] == internals.LOCATION


def test_temporary_dagster_home_is_refused_with_variable_to_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PROJECT", str(world.project.root))
    assert internals.TEMPORARY == TMP_DAGSTER_HOME_PREFIX
    monkeypatch.setattr(sys, "argv", ["dagster", "--instance-ref", f'{{"dir": "/x/{TMP_DAGSTER_HOME_PREFIX}3"}}'])
    monkeypatch.setenv("DAGSTER_verbose", "")
    with pytest.raises(UsageError, match="without DAGSTER_HOME") as raised:
        definitions.load()
    assert f"DAGSTER_HOME={world.project.dagster_home}" in raised.value.remedy
    monkeypatch.delenv("DAGSTER_verbose")  # `dagster definitions validate` needs no home
    assert definitions.load().resolve_job_def("catch_up")
