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
from tests.assets.test_schedule import tick as schedule_tick
from tests.assets.test_sensors import Sensor
from tests.assets.ui import WORKSPACE, Pages, open_in_process, opened
from tests.assets.world import CATCH_UP, P0, World, checks, in_hour, versions

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


def runs_of_job(pages: Pages, job: str) -> list[str]:
    return [r["runId"] for r in pages.ask(JOB, job=job)["pipelineOrError"]["runs"]]


def test_a_run_from_the_command_line_is_as_good_as_one_of_the_ui(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, window = world.run().run_id, world.run(in_hour(0)).run_id
    with opened(instance, world.project, monkeypatch) as pages:
        assert (runs_of_job(pages, "catch_up_orders"), runs_of_job(pages, "land_orders")) == ([whole], [window])
        shown = pages.ask(TIMELINE, label="__repository__@sluice")["runsOrError"]["results"]
        assert {r["runId"] for r in shown} == {whole, window}
        assert {r["repositoryOrigin"]["repositoryLocationName"] for r in shown} == {"sluice"}
        for run, job in ((whole, "catch_up_orders"), (window, "land_orders")):
            again = pages.ask(AGAIN, run=run, strategy="ALL_STEPS")["launchRunReexecution"]
            assert again["__typename"] == "LaunchRunSuccess", again
            assert (again["run"]["parentRunId"], again["run"]["pipelineName"]) == (run, job)
            assert again["run"]["stepKeysToExecute"] is None, "all of them"


def test_a_failed_run_is_executed_again_from_where_it_failed(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    failed = world.run(in_hour(0)).run_id
    with opened(instance, world.project, monkeypatch) as pages:
        again = pages.ask(AGAIN, run=failed, strategy="FROM_FAILURE")["launchRunReexecution"]
        assert again["__typename"] == "LaunchRunSuccess", again
        assert again["run"]["stepKeysToExecute"] == ["orders__committed"]


# -- green is green


class Gone:
    """Kafka, when no broker answers anything."""

    def __getattr__(self, name: str) -> Any:
        def asked(*_: object) -> None:
            raise KafkaUnavailable("no broker answers")

        return asked


def kafka_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "cluster", Gone())


def killed(world: World, instance: dg.DagsterInstance, window: str) -> None:
    """A run over a window whose process was killed before its first step."""
    job = build(world.project).resolve_job_def("land_orders")
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
"""After a run that failed: whatever is complete stays green, and the check `feed_health` tells of the failure."""
GOOD = {
    "no_gaps": "SUCCEEDED",
    "window_boundaries": "SUCCEEDED",
    "window_complete": "SUCCEEDED",
    "feed_health": "SUCCEEDED",
}


def test_after_a_first_good_run_all_is_well(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(instance, world.project, monkeypatch) as pages:
        # The newest hour first: the UI offers that one. No commit has passed it then.
        for asked, frontier in ((in_hour(3), "FAILED"), (CATCH_UP, "SUCCEEDED")):
            assert world.run(asked).exit_code == 0
            assert (pages.checks(LANDED), pages.checks(COMMITTED)) == (GOOD, {"offsets_committed": frontier}), asked
        texts = pages.list_descriptions(LANDED) | pages.list_descriptions(COMMITTED)
        assert all(text.startswith("Passes when ") for text in texts.values()), texts


def test_a_window_that_is_complete_stays_green_whatever_fails(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    with open_in_process(instance, world.project) as pages, monkeypatch.context() as away:
        kafka_is_away(world, away)
        failed = world.run(in_hour(1))
        assert failed.exit_code == 1
        assert (pages.failed(LANDED), pages.failed(COMMITTED)) == (0, 0)
        assert (pages.checks(LANDED), pages.checks(COMMITTED)) == (FAILED, {"offsets_committed": "SUCCEEDED"})
    assert len(set(versions(instance, LANDED, "2024-05-01T01:00"))) == 1, "nothing runs again because of it"


@pytest.mark.parametrize("by", [in_hour(4), CATCH_UP])
def test_a_run_that_fails_shows_in_the_check_watch_without_the_sensor(
    by: Request, world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last good run saw says nothing of the hours that failed since."""
    world.run()
    world.grow(0, 110)
    world.at(8)
    with open_in_process(instance, world.project) as pages:
        for hour_ in (6, 7):
            with monkeypatch.context() as away:
                kafka_is_away(world, away)
                assert world.run(by if by == CATCH_UP else in_hour(hour_)).exit_code == 1
            assert pages.checks(LANDED)["feed_health"] == "FAILED"
            said = latest(instance, "feed_health").description or ""
            assert said.startswith("the last run failed: no broker answers")
        world.engine.failing = {P0}
        assert world.run().exit_code == 1
        assert "the last run failed: 1 offset ranges failed" in (latest(instance, "feed_health").description or "")
        world.engine.failing = set()
        world.run()
        assert pages.checks(LANDED)["feed_health"] == "SUCCEEDED"


def latest(instance: dg.DagsterInstance, name: str) -> dg.AssetCheckEvaluation:
    """The last result of a check of `landed` without partitions."""
    key = dg.AssetCheckKey(LANDED, name)
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key].evaluation
    assert found is not None
    return found


def test_a_commit_that_is_refused_later_leaves_what_was_committed(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    world.land_unrecorded(in_hour(1))
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    with open_in_process(instance, world.project) as pages:
        assert world.run(in_hour(0)).exit_code == 3
        assert (pages.failed(LANDED), pages.failed(COMMITTED)) == (0, 0)
        assert (pages.checks(LANDED), pages.checks(COMMITTED)) == (FAILED, {"offsets_committed": "FAILED"})
        assert "the last run failed: " in (latest(instance, "feed_health").description or "")


def test_what_a_killed_run_left_the_next_one_tells(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    with open_in_process(instance, world.project) as pages:
        killed(world, instance, "2024-05-01T01:00")
        bury_dead_runs(instance, prepare_home(world.project))
        assert (pages.failed(LANDED), pages.failed(COMMITTED)) == (1, 1)
        assert pages.checks(LANDED)["window_complete"] == pages.checks(LANDED)["no_gaps"] == "EXECUTION_FAILED"
        world.run()
        assert (pages.failed(LANDED), pages.failed(COMMITTED)) == (0, 0)
        assert (pages.checks(LANDED), pages.checks(COMMITTED)) == (GOOD, {"offsets_committed": "SUCCEEDED"})

        ticks = {"NOT_EVALUATED": lambda: schedule_tick(world, instance), "SUCCEEDED": Sensor(world, instance).tick}
        for watch, tick in ticks.items():  # the schedule does not look at Kafka, the sensor does
            killed(world, instance, "2024-05-01T02:00")
            bury_dead_runs(instance, prepare_home(world.project))
            assert pages.failed(LANDED) == 1
            tick()
            assert (pages.failed(LANDED), pages.failed(COMMITTED)) == (0, 0)
            assert (pages.checks(LANDED)["window_complete"], pages.checks(LANDED)["no_gaps"]) == (
                "SUCCEEDED",
                "SUCCEEDED",
            )
            assert pages.checks(COMMITTED) == {"offsets_committed": "SUCCEEDED"}
            assert pages.checks(LANDED)["feed_health"] == watch
    assert len(set(versions(instance, LANDED, "2024-05-01T02:00"))) == 1, "nothing runs again because of it"


def test_checks_of_the_feed_name_the_materialization_that_they_speak_of(
    world: World, instance: dg.DagsterInstance
) -> None:
    """Else Dagster compares times, of which SQLite keeps whole seconds: what is told within one would not count."""
    world.run()
    killed(world, instance, "2024-05-01T01:00")
    bury_dead_runs(instance, prepare_home(world.project))
    again = world.run().run_id
    newest = instance.fetch_materializations(LANDED, limit=1).records[0]
    assert newest.run_id != again, "it had nothing to land: what the killed run left was told without a run"
    for name in ("no_gaps", "feed_health"):
        target = checks(instance, again, name)[None].target_materialization_data
        assert target is not None
        assert target.storage_id == newest.storage_id


def test_a_window_that_is_pending_stays_red(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(in_hour(0))
    with open_in_process(instance, world.project) as pages:
        with monkeypatch.context() as away:
            kafka_is_away(world, away)
            assert world.run(in_hour(1)).exit_code == 1
        world.run(in_hour(2))
        assert (pages.failed(LANDED), pages.failed(COMMITTED)) == (1, 1)


# -- one home, one name


def test_the_location_is_named_as_in_workspace_yaml(tmp_path: Path) -> None:
    (ours,) = yaml.safe_load(WORKSPACE.read_text())["load_from"]
    assert ours["python_module"]["module_name"] == internals.MODULE
    assert ours["python_module"]["location_name"] == internals.LOCATION
    (served,) = yaml.safe_load(internals.workspace(tmp_path / "code.sock"))["load_from"]
    assert served["grpc_server"]["location_name"] == internals.LOCATION


def test_dagster_in_a_home_for_a_moment_says_what_to_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PROJECT", str(world.project.root))
    assert internals.TEMPORARY == TMP_DAGSTER_HOME_PREFIX
    monkeypatch.setattr(sys, "argv", ["dagster", "--instance-ref", f'{{"dir": "/x/{TMP_DAGSTER_HOME_PREFIX}3"}}'])
    monkeypatch.setenv("DAGSTER_verbose", "")
    with pytest.raises(UsageError, match="without DAGSTER_HOME") as raised:
        definitions.load()
    assert f"DAGSTER_HOME={world.project.dagster_home}" in raised.value.remedy
    monkeypatch.delenv("DAGSTER_verbose")  # `dagster definitions validate` needs no home
    assert definitions.load().resolve_job_def("land_orders")
