"""The feed's job over memory: its landed records, its events in Dagster, and its commits."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sluice.assets.checks.feed_checks import NO_GAPS
from sluice.assets.events import landed_metadata
from sluice.assets.factory import build
from sluice.assets.instance.instance import DAGSTER_YAML, bury_dead_runs, holding, open_instance, prepare_home
from sluice.assets.specs import asset_specs
from sluice.assets.specs.asset_specs import committed_key, landed_key, topic_key
from sluice.pipelines.committing.commit import CommitStatus
from sluice.pipelines.errors import (
    BatchIncomplete,
    BatchRefused,
    Failed,
    GroupHeld,
    KafkaUnavailable,
    LakeUnavailable,
    LogTruncated,
    OffsetsLost,
    UsageError,
)
from sluice.pipelines.model.kafka import Configs, TopicConfig, TopicPartition
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import BrokerTraffic, Latency, TaskTraffic
from sluice.pipelines.ports import Member
from tests.assets.conftest import ON_FILES
from tests.assets.world import (
    FEED,
    HOUR,
    P0,
    P1,
    SECRET,
    World,
    in_hour,
    read_cells,
    read_checks,
    read_metadata,
    read_windows,
    resolve_landing,
)

LANDED, COMMITTED = landed_key("orders"), committed_key("orders")


# -- a whole run


def test_broker_traffic_is_reported_as_numeric_metadata(world: World, instance: dg.DagsterInstance) -> None:
    traffic = BrokerTraffic(1, "b1:9092", 4, 0, 3_000_000, Latency.of(250_000), throttled=1, throttle_ms=2000)
    other = BrokerTraffic(2, requests=1, errors={"no answer": 1})
    world.engine.traffic = (
        TaskTraffic((traffic,), {"orders:0": 130}),
        TaskTraffic((traffic, other), {"orders:1": 100}),
    )
    world.run()
    (metadata,) = read_metadata(instance, LANDED)
    assert (metadata["fetches"], metadata["fetched_bytes"], metadata["throttled_seconds"]) == (9.0, 6e6, 4.0)
    assert (metadata["fetch_p50_ms"], metadata["fetch_p99_ms"], metadata["fetch_wait_seconds"]) == (250.0, 250.0, 0.5)
    assert [(r["broker"], r["fetches"], r["mb"], r["errors"]) for r in read_cells(metadata["brokers"])] == [
        ("1 b1:9092", 8, 6.0, ""),
        ("2", 1, 0.0, "no answer 1"),
    ]
    assert read_cells(metadata["topics"]) == [{"topic": "orders", "records": 200, "mb": 0.002, "behind": 30}]
    assert metadata["brokers_noted"].startswith("broker 1 at b1:9092 throttled this client for 4.0 s")


def test_a_run_lands_records_and_commits(world: World, instance: dg.DagsterInstance) -> None:
    outcome = world.run()

    assert (outcome.exit_code, outcome.error) == (0, None)
    assert outcome.landed is not None
    assert outcome.landed.batches[0].counts.landed == 200
    assert outcome.committed is not None
    assert outcome.committed.status is CommitStatus.COMMITTED
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 100, P1: 100}

    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert (run.status, run.job_name) == (dg.DagsterRunStatus.SUCCESS, "catch_up")
    (metadata,) = read_metadata(instance, LANDED)
    batch = outcome.landed.batches[0]
    assert metadata["rows"] == 200
    assert metadata["dagster/uri"] == "memory://data/orders"
    assert (metadata["batch"], metadata["plan"], metadata["publish_entry"]) == (
        batch.batch,
        batch.plan.hash,
        batch.number,
    )
    assert metadata["bytes"] == batch.bytes
    assert metadata["rows_per_second"] == round(200 / metadata["seconds"])
    assert metadata["task_ns_per_record"] == 40
    assert [(r["activity"], r["ns_per_record"], r["share"]) for r in read_cells(metadata["task_time"])] == [
        ("wait", 10, 0.25),
        ("encode", 30, 0.75),
    ]
    assert read_cells(metadata["ranges"]) == [
        {
            "partition": f"orders:{p}",
            "start": 0,
            "end": 100,
            "landed": 100,
            "quarantined": 0,
            "no_record": 0,
            "files": 4,
        }
        for p in (0, 1)
    ]
    (commit,) = read_metadata(instance, COMMITTED)
    assert (commit["status"], commit["committed_offsets"], commit["group"]) == ("committed", 200, "sluice-orders")
    assert read_checks(instance, outcome.run_id, NO_GAPS)[None].passed


def test_run_records_observation_of_its_topic(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    (record,) = instance.fetch_observations(topic_key("orders"), limit=10).records
    assert record.asset_observation is not None
    metadata = {k: v.value for k, v in record.asset_observation.metadata.items()}
    assert (metadata["partitions"], metadata["offsets"], metadata["lag_orders"]) == (2, 200, 0)


def test_next_run_lands_only_new_records(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    world.grow(1, 130)
    world.run()
    assert [s["rows"] for s in read_metadata(instance, LANDED)] == [200, 30]
    assert read_cells(read_metadata(instance, LANDED)[1]["ranges"])[0]["start"] == 100


def test_run_without_pending_records_reports_no_materialization(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    outcome = world.run()
    assert outcome.exit_code == 0
    assert outcome.committed is not None
    assert outcome.committed.status is CommitStatus.UNCHANGED
    assert len(read_metadata(instance, LANDED)) == 1


def test_explicit_offsets_are_stored_in_run_config(world: World, instance: dg.DagsterInstance) -> None:
    request = Request(RequestKind.OFFSETS, (AskedRange("orders", 0, 40, 60),))
    outcome = world.run(request)
    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    config = run.run_config["ops"]["land_and_commit"]["config"]
    assert config["feed"] == "orders"
    assert config["offsets"] == [{"topic": "orders", "partition": 0, "start": 40, "end": 60}]
    assert read_metadata(instance, LANDED)[0]["rows"] == 20
    # Landed above the frontier: a hole below it, named and not an error.
    check = read_checks(instance, outcome.run_id, NO_GAPS)[None]
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert read_cells(check.metadata["account"].value)[0]["holes"] == "[0, 40)"
    assert outcome.exit_code == 0


def test_catch_up_is_limited_to_selected_partitions(world: World) -> None:
    outcome = world.run(Request(RequestKind.CATCH_UP, only=(P1,)))
    assert outcome.landed is not None
    assert {s.tp for b in outcome.landed.batches for s in b.plan.offset_ranges} == {P1}


def test_progress_is_reported_by_stage(world: World) -> None:
    world.run()
    first = [p.stage for p in world.progress]
    assert {"plan", "land", "prove", "publish"} <= set(first)
    world.progress = []
    world.run()
    assert "publish" not in [p.stage for p in world.progress]


# -- failures


def test_partial_batch_fails_run_and_landed_records_are_committed(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.failing = {P1}
    outcome = world.run()

    assert isinstance(outcome.error, BatchIncomplete)
    assert outcome.exit_code == 1
    assert outcome.committed is not None
    assert {m.key.tp: m.after for m in outcome.committed.offsets} == {P0: 100, P1: 0}
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 100, P1: 0}
    (committed,) = read_metadata(instance, COMMITTED)
    assert committed["committed_offsets"] == 100
    assert [s["rows"] for s in read_metadata(instance, LANDED)] == [100], "published records are reported"
    assert list(read_windows(instance, LANDED)) == ["2024-05-01T04:00"], (
        "only the hour in which nothing happened is whole"
    )
    check = read_checks(instance, outcome.run_id, NO_GAPS)[None]
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert read_cells(check.metadata["failed"].value)[0]["range"] == "orders:1:0-25"
    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert run.status == dg.DagsterRunStatus.FAILURE

    world.engine.failing = set()
    outcome = world.run()

    assert outcome.exit_code == 0
    assert [s["rows"] for s in read_metadata(instance, LANDED)] == [100, 100]
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 100, P1: 100}


def test_lost_pending_records_do_not_block_commit_of_other_partitions(
    world: World, instance: dg.DagsterInstance
) -> None:
    """Even if nothing new lands: records that an earlier run landed and could not commit are committed as well."""
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    world.run(Request(RequestKind.CATCH_UP, only=(P0,)))
    world.group.others = []
    world.cluster.states[P1] = replace(world.cluster.states[P1], log_start=40)

    outcome = world.run()

    assert isinstance(outcome.error, OffsetsLost)
    assert outcome.landed is not None
    assert outcome.landed.batches == ()
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 100, P1: 0}
    assert len(read_metadata(instance, COMMITTED)) == 1


def test_truncated_log_keeps_its_committed_offset(world: World) -> None:
    """The frontier belongs to an earlier log of the same name."""
    world.run(Request(RequestKind.OFFSETS, (AskedRange("orders", 0, 0, 50), AskedRange("orders", 1, 0, 50))))
    world.cluster.states[P1] = replace(world.cluster.states[P1], last_stable_offset=20, high_watermark=20)

    outcome = world.run()

    assert isinstance(outcome.error, LogTruncated)
    assert outcome.committed is not None
    assert [k.tp for k in outcome.committed.left_out] == [P1]
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 100, P1: 50}


def test_failed_run_that_cannot_commit_reports_both_errors(world: World) -> None:
    world.engine.failing = {P1}
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    outcome = world.run()
    assert isinstance(outcome.error, BatchIncomplete)
    assert outcome.exit_code == 1
    assert isinstance(outcome.uncommitted, GroupHeld)


def test_refused_batch_does_not_block_commit_of_earlier_batch(root: Path) -> None:
    world = World(root, {"orders": FEED + "policies: {quarantine_limit: {at_least: 1}}\n"})
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    world.run(in_hour(0))
    world.group.others, world.engine.bad = [], 10
    outcome = world.run()
    assert isinstance(outcome.error, BatchRefused)
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 25, P1: 25}


def test_batch_of_dead_run_is_reported_and_committed_by_next_run(world: World, instance: dg.DagsterInstance) -> None:
    unrecorded = world.land_unrecorded()
    assert read_metadata(instance, LANDED) == []

    outcome = world.run()

    assert outcome.landed is not None
    assert outcome.landed.batches == ()
    (rolled,) = read_metadata(instance, LANDED)
    assert (rolled["batch"], rolled["plan"]) == (unrecorded.batches[0].batch, unrecorded.batches[0].plan.hash)
    assert rolled["rows"] == 200
    assert rolled["run"] == "dead-run"
    assert world.group.offsets[P0].offset == 100
    world.run()
    assert len(read_metadata(instance, LANDED)) == 1


def test_rolled_forward_metadata_has_keys_of_regular_metadata(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    world.grow(0, 150)
    world.land_unrecorded()
    world.run()
    own, rolled = read_metadata(instance, LANDED)
    assert own.keys() == rolled.keys()


def test_commit_requires_materialization_of_landed_batches(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded()
    with pytest.raises(Failed, match="no materialization of orders/landed for batch"):
        landed_metadata.require_reported(instance, world.open_ledger_view())
    landed_metadata.roll_forward(instance, world.open_ledger_view())
    landed_metadata.require_reported(instance, world.open_ledger_view())


def test_materialization_from_other_ledger_does_not_count(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    world.lake.files.clear()
    world.group.offsets.clear()
    world.land_unrecorded()
    assert landed_metadata.find_unreported_batches(instance, world.open_ledger_view()) != []


def test_group_with_foreign_member_fails_only_the_commit(world: World, instance: dg.DagsterInstance) -> None:
    world.group.others = [Member("m", "console", "/10.0.0.1")]
    outcome = world.run()
    assert isinstance(outcome.error, GroupHeld)
    assert outcome.exit_code == 3
    assert outcome.landed is not None
    assert len(read_metadata(instance, LANDED)) == 1
    assert read_metadata(instance, COMMITTED) == []

    world.group.others = []
    assert world.run().exit_code == 0
    assert len(read_metadata(instance, COMMITTED)) == 1
    assert world.group.offsets[P0].offset == 100


def test_an_error_keeps_its_remedy_and_exit_code(world: World, instance: dg.DagsterInstance) -> None:
    outcome = world.run(Request(RequestKind.OFFSETS, (AskedRange("orders", 0, 90, 900),)))
    assert isinstance(outcome.error, UsageError)
    assert outcome.exit_code == 2
    (failure,) = instance.get_records_for_run(outcome.run_id, of_type=dg.DagsterEventType.STEP_FAILURE).records
    failure_data = failure.event_log_entry.dagster_event.step_failure_data.user_failure_data
    assert failure_data.description == outcome.error.message
    assert failure_data.metadata["remedy"].value == outcome.error.remedy
    assert failure_data.metadata["error"].value == "UsageError"


def test_unexpected_exception_is_reraised_and_run_is_marked_failed(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.raising = ZeroDivisionError("planted")
    with pytest.raises(ZeroDivisionError, match="planted"):
        world.run()
    (run,) = instance.get_runs()
    assert run.status == dg.DagsterRunStatus.FAILURE


def test_an_interrupt_cancels_the_engine_and_the_run(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.raising = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.run()
    (run,) = instance.get_runs()
    assert run.status == dg.DagsterRunStatus.CANCELED
    assert world.engine.canceled == 1

    world.engine.raising = None
    world.bury()
    assert world.run().exit_code == 0
    assert world.group.offsets[P1].offset == 100


_OF_A_RUN = ["PIPELINE_START", "RESOURCE_INIT_STARTED", "ENGINE_EVENT", "STEP_START"]
_OF_A_RUN += ["ASSET_MATERIALIZATION", "ASSET_CHECK_EVALUATION", "STEP_SUCCESS", "PIPELINE_SUCCESS"]


@pytest.mark.parametrize("moment", _OF_A_RUN)
def test_interrupt_between_steps_does_not_fail_the_run(
    moment: str, world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending, done = _interrupt_at(moment, monkeypatch), moment == "PIPELINE_SUCCESS"
    with nullcontext() if done else pytest.raises(KeyboardInterrupt):
        world.run()
    assert pending == [""]
    (run,) = instance.get_runs()
    assert run.status == (dg.DagsterRunStatus.SUCCESS if done else dg.DagsterRunStatus.CANCELED)


def _interrupt_at(moment: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Raise SIGINT after the first event of that type is stored; the list then holds ""."""
    handle_new_event, pending = dg.DagsterInstance.handle_new_event, [moment]

    def handle_and_interrupt(self: dg.DagsterInstance, event: Any, **options: Any) -> None:
        handle_new_event(self, event, **options)
        if event.dagster_event and event.dagster_event.event_type_value == pending[0]:
            pending[0] = ""
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(dg.DagsterInstance, "handle_new_event", handle_and_interrupt)
    return pending


def test_run_succeeds_when_observation_after_landing_fails(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_unavailable(*_: object) -> dict[str, str]:
        raise KafkaUnavailable("no broker answers")

    monkeypatch.setattr(world.engine, "cancel", lambda: None)
    run = world.engine.run

    def lose_kafka_and_run(job: Any, tasks: Any) -> Any:
        monkeypatch.setattr(world.cluster, "topics", raise_unavailable)
        return run(job, tasks)

    monkeypatch.setattr(world.engine, "run", lose_kafka_and_run)
    outcome = world.run()
    assert outcome.exit_code == 0
    assert instance.fetch_observations(topic_key("orders"), limit=1).records == []


def test_step_output_goes_to_compute_log_and_not_to_terminal(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = world.engine.run

    def print_and_run(job: Any, tasks: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            print("printed by a library", file=stream, flush=True)
        return run(job, tasks)

    monkeypatch.setattr(world.engine, "run", print_and_run)
    world.run()
    assert "library" not in "".join(capfd.readouterr())
    suffixes = [p.suffix for p in world.project.state.rglob("compute_logs/*") if b"library" in p.read_bytes()]
    assert sorted(suffixes) == [".err", ".out"]


def test_stored_files_contain_no_secret(world: World) -> None:
    world.engine.failing = {P1}
    world.run()
    files = [p for p in world.project.state.rglob("*") if p.is_file()]
    assert files
    assert not [p for p in files if SECRET.encode() in p.read_bytes()]


def test_graph_shows_topics_that_pattern_matched_in_a_run(root: Path) -> None:
    text = FEED.replace("topics: orders", "topics: {include: ['ord.*']}")
    world = World(root, {"orders": text})
    world.run()
    graph = build(world.project, world.make_session()).resolve_asset_graph()
    assert topic_key("orders") in graph.get_all_asset_keys()


# -- observing by itself


def test_observation_shows_end_offsets_and_lag_of_every_feed(root: Path) -> None:
    world = World(root, {"orders": FEED, "audit": FEED})
    world.run(feed="orders")
    world.grow(0, 120)
    metadata = _observe(world, topic_key("orders"))
    assert (metadata["lag_orders"], metadata["lag_audit"], metadata["offsets"]) == (20, 220, 220)
    assert read_cells(metadata["log"])[0] == {
        "partition": 0, "leader": 1, "start": 0, "end": 120, "lag of audit": 120, "lag of orders": 20,
    }  # fmt: skip


def test_observation_shows_time_lag_and_records_at_risk(world: World) -> None:
    world.land_unrecorded(in_hour(0))
    world.cluster.settings = Configs({"orders": TopicConfig(retention_ms=9 * HOUR)})
    metadata = _observe(world, topic_key("orders"))
    assert 5 * 3600 <= metadata["lag_seconds_orders"] <= 5 * 3600 + 120
    first, second = metadata["at_risk_orders"].splitlines()
    assert first.startswith("orders:0 [25, 38) will begin to be deleted in about 3 h 5")
    assert second.startswith("orders:1 ")
    world.land_unrecorded()
    later = _observe(world, topic_key("orders"))
    assert later["lag_seconds_orders"] == 0
    assert "at_risk_orders" not in later


def test_observation_fails_for_unreadable_ledger_and_shows_other_feeds(root: Path) -> None:
    world = World(root, {"orders": FEED, "audit": FEED})
    world.run(feed="orders")

    def refuse(path: str) -> None:
        if "/audit/" in path:
            raise LakeUnavailable("the ledger of audit cannot be read", remedy="start the store")

    world.lake.before["get"] = refuse
    with pytest.raises(dg.Failure, match="the ledger of audit cannot be read"):
        _observe(world, topic_key("orders"))
    with dg.DagsterInstance.ephemeral() as instance:
        assert not _execute_observation(world, instance, topic_key("orders")).success
        (record,) = instance.fetch_observations(topic_key("orders"), limit=10).records
    assert record.asset_observation is not None
    assert record.asset_observation.metadata["lag_orders"].value == 0
    assert "lag_audit" not in record.asset_observation.metadata


def test_observation_names_missing_topics(root: Path) -> None:
    world = World(root, {"orders": FEED.replace("topics: orders", "topics: [orders, refunds]")})
    with pytest.raises(dg.Failure, match="no topic refunds"):
        _observe(world, topic_key("orders"), topic_key("refunds"))


def _execute_observation(
    world: World, instance: dg.DagsterInstance, *keys: dg.AssetKey, raise_on_error: bool = False
) -> dg.ExecuteInProcessResult:
    job = build(world.project, world.make_session()).resolve_implicit_job_def_def_for_assets(list(keys))
    assert job is not None
    return job.execute_in_process(instance=instance, asset_selection=list(keys), raise_on_error=raise_on_error)


def _observe(world: World, *keys: dg.AssetKey) -> dict[str, Any]:
    with dg.DagsterInstance.ephemeral() as instance:
        _execute_observation(world, instance, *keys, raise_on_error=True)
        (record,) = instance.fetch_observations(keys[0], limit=10).records
    assert record.asset_observation is not None
    return {k: v.value for k, v in record.asset_observation.metadata.items()}


# -- the instance


@ON_FILES
def test_project_instance_is_created_once_and_kept(world: World) -> None:
    home = prepare_home(world.project)
    assert (home / "dagster.yaml").read_text() == DAGSTER_YAML
    with open_instance(world.project) as instance:
        assert not instance.telemetry_enabled
        assert instance.run_coordinator is not None
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    prepare_home(world.project)
    assert (home / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"


_OPEN_EACH = """
import sys
from pathlib import Path
from sluice.assets.instance.instance import open_instance
from sluice.resources.project import Project
for line in sys.stdin:
    with open_instance(Project(Path(line.strip()))) as instance:
        instance.all_instigator_state()
    print(instance.get_runs_count(), flush=True)
"""


@ON_FILES
def test_instance_is_usable_when_created_concurrently(tmp_path: Path) -> None:
    start = partial(subprocess.Popen, [sys.executable, "-c", _OPEN_EACH], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with ExitStack() as stack:
        processes = [stack.enter_context(start(text=True, bufsize=1)) for _ in range(3)]
        for name in ("warm", "a", "b", "c", "d", "e"):
            for process in processes:
                assert process.stdin
                process.stdin.write(f"{tmp_path / name}\n")
            for process in processes:
                assert process.stdout
                assert process.stdout.readline() == "0\n", name
        for process in processes:
            process.communicate(timeout=60)


def test_custom_dagster_home_is_unchanged(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "own"))
    assert list(prepare_home(world.project).iterdir()) == []


def test_run_of_dead_process_is_marked_failed(world: World, instance: dg.DagsterInstance) -> None:
    home = prepare_home(world.project)
    job = resolve_landing(build(world.project))
    dead = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    alive = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    (home / "attended").mkdir(exist_ok=True)
    (home / "attended" / dead.run_id).touch()
    with holding(home, alive.run_id):
        assert bury_dead_runs(instance, home) == [dead.run_id]
        statuses = {r.run_id: r.status for r in instance.get_runs()}
        assert statuses == {dead.run_id: dg.DagsterRunStatus.FAILURE, alive.run_id: dg.DagsterRunStatus.STARTED}
    assert bury_dead_runs(instance, home) == []


def test_metadata_tables_are_truncated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asset_specs, "MAX_ROWS", 3)
    world = World(root)
    for i in range(5):
        world.cluster.write(TopicPartition("orders", i), [world.clock()])
    world.run()
    with open_instance(world.project) as instance:
        (metadata,) = read_metadata(instance, LANDED)
    assert [r.data["partition"] for r in metadata["ranges"].records[2:]] == ["orders:2", "… and 2 more"]
