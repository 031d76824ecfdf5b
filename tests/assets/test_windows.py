"""Windows in Dagster: a partition is green once its window is complete, by whichever run, and never before."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sluice.assets import execution
from sluice.assets.checks.feed_checks import BOUNDARIES, NO_GAPS, OFFSETS_COMMITTED, WINDOW_COMPLETE
from sluice.assets.events import landed_metadata
from sluice.assets.factory import build
from sluice.assets.instance.instance import open_instance
from sluice.assets.instance.internals import BACKFILL_TAG, RANGE_TAGS, planned_evaluations, unmaterialized_partitions
from sluice.assets.operations.event_log_repair import reconcile
from sluice.assets.runs.run_config import OPEN_WINDOWS_TAG, LandConfig, catch_up_config
from sluice.assets.runs.run_session import AGAIN_TAG, ERROR_TAG
from sluice.assets.specs.asset_specs import committed_key, landed_key, quarantined_key
from sluice.assets.steps import land_step
from sluice.pipelines.errors import (
    BatchIncomplete,
    CorruptBatch,
    KafkaUnavailable,
    PlanBusy,
    SluiceError,
    Unknown,
    UsageError,
    WindowHeld,
    WindowIncomplete,
    WindowOpen,
)
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.model.kafka import CommittedOffset, Range, TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.windows import LISTED
from sluice.pipelines.status import strip
from sluice.pipelines.status.window_state import Standing
from sluice.pipelines.util.units import show_window
from tests.assets.test_schedule import evaluate_tick
from tests.assets.ui import Pages, open_in_process
from tests.assets.world import (
    CATCH_UP,
    FEED,
    P0,
    P1,
    World,
    at_hour,
    in_hour,
    list_versions,
    read_cells,
    read_checks,
    read_metadata,
    read_windows,
    resolve_landing,
)

LANDED, QUARANTINED, COMMITTED = landed_key("orders"), quarantined_key("orders"), committed_key("orders")
DAY = "2024-05-01T"


def test_window_run_materializes_its_partition(world: World, instance: dg.DagsterInstance) -> None:
    outcome = world.run(in_hour(0))

    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert (run.job_name, run.tags["dagster/partition"]) == ("__ASSET_JOB", f"{DAY}00:00")
    landed = read_windows(instance, LANDED)
    assert sorted(landed) == [f"{DAY}00:00", f"{DAY}04:00"], "the quiet hour is reported too"
    first = landed[f"{DAY}00:00"]
    assert (first["dagster/partition_row_count"], first["rows"], first["files"]) == (50, 50, 2)
    assert first["dagster/uri"] == "memory://data/orders/kafka_window_date=2024-05-01/kafka_window_hour=00"
    assert read_cells(first["boundaries"])[0] == {
        "partition": "orders:0", "start": 0, "end": 25, "landed": 25, "quarantined": 0, "no_record": 0, "files": 1,
    }  # fmt: skip
    assert landed[f"{DAY}04:00"]["rows"] == 0
    quiet = read_checks(instance, outcome.run_id, WINDOW_COMPLETE)[f"{DAY}04:00"]
    assert quiet.description == "the window is complete and empty: no record arrived in it"
    assert read_metadata(instance, LANDED) == [], "the window covers the whole batch"
    assert read_checks(instance, outcome.run_id, WINDOW_COMPLETE)[f"{DAY}00:00"].passed
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 25, P1: 25}
    assert read_checks(instance, outcome.run_id, OFFSETS_COMMITTED)[f"{DAY}00:00"].passed
    landed_metadata.require_reported(instance, world.open_ledger_view())


def test_the_log_reports_offsets_of_another_committer(world: World, instance: dg.DagsterInstance) -> None:
    world.group.offsets[P0] = CommittedOffset(5, metadata="")
    outcome = world.run(in_hour(0))
    messages = [e.message for e in instance.all_logs(outcome.run_id)]
    assert any("is not used in 1 of 2 partitions" in m and "give the feed a group" in m for m in messages)


def test_offsets_check_fails_when_feed_commits_nothing(world: World, instance: dg.DagsterInstance) -> None:
    file = world.project.root / "feeds" / "orders.yaml"
    file.write_text(file.read_text() + "commit: none\n")
    outcome = world.run(in_hour(0))
    check = read_checks(instance, outcome.run_id, OFFSETS_COMMITTED)[f"{DAY}00:00"]
    assert (check.passed, check.description) == (False, "nothing is committed: the feed has `commit: none`")


def test_searched_boundary_is_a_warning_in_adjacent_windows(world: World, instance: dg.DagsterInstance) -> None:
    world.cluster.hidden[P1] = 25
    outcome = world.run(CATCH_UP)
    evaluations = read_checks(instance, outcome.run_id, BOUNDARIES)
    warned = [w for w, e in evaluations.items() if not e.passed]
    assert warned == [f"{DAY}00:00", f"{DAY}01:00"]
    assert evaluations[warned[0]].severity is dg.AssetCheckSeverity.WARN
    assert "in 1 partition, transaction markers" in (evaluations[warned[0]].description or "")
    assert all(e.passed for e in read_checks(instance, outcome.run_id, WINDOW_COMPLETE).values())
    outcome = world.run(in_hour(1))
    assert not read_checks(instance, outcome.run_id, BOUNDARIES)[f"{DAY}01:00"].passed, "pinned boundaries stay"


def test_windows_landed_out_of_order_are_committed_when_gap_closes(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    late = world.run(in_hour(2))
    waiting = read_checks(instance, late.run_id, OFFSETS_COMMITTED)[f"{DAY}02:00"]
    assert late.exit_code == 0
    assert (waiting.passed, waiting.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert read_cells(waiting.metadata["behind"].value)[0] == {
        "partition": "orders:0",
        "frontier": 25,
        "window_end": "75",
        "waits_for": "window 2024-05-01T01:00, pending from offset 25 on",
    }
    assert f"{DAY}02:00" in read_windows(instance, COMMITTED), "the commit is reported nevertheless"
    assert not read_checks(instance, late.run_id, NO_GAPS)[None].passed

    early = world.run(in_hour(1))
    passed = read_checks(instance, early.run_id, OFFSETS_COMMITTED)
    assert {w: e.passed for w, e in passed.items()} == {f"{DAY}01:00": True, f"{DAY}02:00": True}
    assert world.group.offsets[P0].offset == 75


def test_window_beyond_committed_offsets_is_a_warning(world: World, instance: dg.DagsterInstance) -> None:
    """A new feed's first run lands the newest hour, as the UI offers it first; nothing of it is committed."""
    newest = world.run(in_hour(3))
    frontier, account = (read_checks(instance, newest.run_id, name) for name in (OFFSETS_COMMITTED, NO_GAPS))
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 0, P1: 0}
    assert (frontier[f"{DAY}03:00"].passed, frontier[f"{DAY}03:00"].severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "have not passed this window in 2 partitions" in (frontier[f"{DAY}03:00"].description or "")
    assert read_cells(frontier[f"{DAY}03:00"].metadata["behind"].value)[0]["frontier"] == 0
    assert account[None].passed
    assert read_cells(account[None].metadata["account"].value)[0]["holes"] == "[0, 75)"


def test_empty_window_is_not_committed_before_earlier_windows(world: World, instance: dg.DagsterInstance) -> None:
    first = world.run(in_hour(0))
    assert {w: c.passed for w, c in read_checks(instance, first.run_id, OFFSETS_COMMITTED).items()} == {
        f"{DAY}00:00": True,
        f"{DAY}04:00": False,
    }
    rest = world.run()
    assert read_checks(instance, rest.run_id, OFFSETS_COMMITTED)[f"{DAY}04:00"].passed


def test_partly_landed_hole_is_a_warning(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(3))
    world.run(in_hour(0, only=(P1,)))
    again = world.run(in_hour(3))
    check = read_checks(instance, again.run_id, NO_GAPS)[None]
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.WARN), "hour 0 landed in part"
    assert not read_checks(instance, again.run_id, OFFSETS_COMMITTED)[f"{DAY}03:00"].passed


def test_catch_up_reports_every_completed_window(world: World, instance: dg.DagsterInstance) -> None:
    world.grow(0, 110)  # it is six, and hour 5 is in its grace period: new records may still belong to it
    outcome = world.run()

    every = [f"{DAY}0{h}:00" for h in range(5)]
    assert outcome.landed is not None
    assert list(read_windows(instance, LANDED)) == list(read_windows(instance, COMMITTED)) == every
    assert [w["rows"] for w in read_windows(instance, LANDED).values()] == [50, 50, 50, 50, 0]
    (batch,) = read_metadata(instance, LANDED)
    assert batch["rows"] == 210
    assert {w: e.passed for w, e in read_checks(instance, outcome.run_id, WINDOW_COMPLETE).items()} == dict.fromkeys(
        every, True
    )

    world.at(8)
    world.run(in_hour(5))
    assert read_windows(instance, LANDED)[f"{DAY}05:00"]["rows"] == 10, "landed before, whole now"


def test_repeated_run_of_complete_window_reports_same_metadata(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    before = read_windows(instance, LANDED)[f"{DAY}00:00"]
    again = world.run(in_hour(0))
    assert again.exit_code == 0
    assert read_windows(instance, LANDED)[f"{DAY}00:00"] == before
    first, second = list_versions(instance, LANDED, f"{DAY}00:00")
    assert first == second


def test_partly_landed_window_is_not_materialized(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.failing = {P1}
    outcome = world.run(in_hour(0))

    assert isinstance(outcome.error, BatchIncomplete)
    assert f"{DAY}00:00" not in read_windows(instance, LANDED)
    assert [s["rows"] for s in read_metadata(instance, LANDED)] == [25], (
        "published records are reported, without a partition"
    )
    check = read_checks(instance, outcome.run_id, WINDOW_COMPLETE)[f"{DAY}00:00"]
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert read_cells(check.metadata["failed"].value)[0]["range"] == "orders:1:0-25"
    assert f"{DAY}00:00" not in read_windows(instance, COMMITTED)
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 25, P1: 0}, "each to its frontier"

    world.engine.failing = set()
    world.run(in_hour(0))
    assert read_windows(instance, LANDED)[f"{DAY}00:00"]["rows"] == 50, "both batches of it"
    assert world.group.offsets[P1].offset == 25


def test_blocked_window_fails_and_is_tagged_for_retry(world: World, instance: dg.DagsterInstance) -> None:
    world.cluster.hold(P0, 10)
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, WindowHeld)
    assert f"{DAY}00:00" not in read_windows(instance, LANDED)
    assert read_metadata(instance, LANDED)[0]["rows"] == 25, "the other partition landed"
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 0, P1: 25}, "and is committed"
    assert f"{DAY}00:00" not in read_windows(instance, COMMITTED)
    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert run.tags[AGAIN_TAG] == "WindowHeld", "it passes by itself: the schedule goes on trying"


def test_window_of_another_active_run_is_tagged_for_retry(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.raising = RuntimeError("it goes on elsewhere")
    with pytest.raises(RuntimeError):
        world.land_unrecorded(in_hour(0))
    world.engine.raising = None
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, PlanBusy)
    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert run.tags[AGAIN_TAG] == "PlanBusy"


@pytest.mark.parametrize("error", [KafkaUnavailable("no answer"), CorruptBatch("its checksum is wrong")])
def test_window_is_tagged_for_retry_only_if_kafka_is_unreachable(
    error: SluiceError, world: World, instance: dg.DagsterInstance
) -> None:
    """As in a cluster whose executors may not connect to the brokers, unlike the driver."""
    world.engine.failing, world.engine.failure = {P1}, error
    outcome = world.run(in_hour(0))
    assert isinstance(outcome.error, BatchIncomplete)
    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert run.tags.get(AGAIN_TAG, "") == ("BatchIncomplete" if isinstance(error, KafkaUnavailable) else "")


@pytest.mark.parametrize("error", [None, CorruptBatch("its checksum is wrong")])
def test_reexecuted_run_has_no_error_of_its_parent(
    error: SluiceError | None, world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster copies a parent's tags, and a retry tag would count a killed run as one that passes by itself."""
    start = execution.execute_job
    inherited = {ERROR_TAG: "KafkaUnavailable", AGAIN_TAG: "KafkaUnavailable"}
    monkeypatch.setattr(execution, "execute_job", lambda *a: start(*a[:-1], a[-1] | inherited))
    world.engine.failing, world.engine.failure = {P1} if error else set(), error
    run = instance.get_run_by_id(world.run(in_hour(0)).run_id)
    assert run is not None
    assert (run.tags[ERROR_TAG], run.tags[AGAIN_TAG]) == ("BatchIncomplete" if error else "", "")


def test_window_is_tagged_for_retry_after_unconfirmed_ledger_write(world: World, instance: dg.DagsterInstance) -> None:
    """A store that is read-only for a while answers each run so."""

    def hang(path: str) -> None:
        raise Unknown("no answer confirmed whether it was created", remedy="run again")

    world.lake.before["put_if_absent"] = hang
    outcome = world.run(in_hour(0))
    world.lake.before.clear()
    assert isinstance(outcome.error, Unknown)
    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert run.tags[AGAIN_TAG] == "Unknown"


def test_run_ended_by_its_limits_leaves_window_partial(root: Path) -> None:
    world = World(root, {"orders": FEED + "limits: {records: 30}\n"})
    errors = [world.run(in_hour(0)).error for _ in range(2)]
    assert [type(e) for e in errors] == [WindowIncomplete, type(None)]


def test_window_is_complete_once_every_partition_landed(world: World, instance: dg.DagsterInstance) -> None:
    assert world.run(in_hour(0, only=(P1,))).exit_code == 0
    assert f"{DAY}00:00" not in read_windows(instance, LANDED)
    assert world.run(in_hour(0, only=(P0,))).exit_code == 0
    assert read_windows(instance, LANDED)[f"{DAY}00:00"]["rows"] == 50


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (at_hour(7), "not closed yet"),
        (at_hour(0) + 60_000, "not the start of a window"),
        (at_hour(-1), "Kafka holds no record"),
    ],
)
def test_invalid_window_is_refused_with_reason(world: World, window: int, message: str) -> None:
    world.land_unrecorded(in_hour(0))
    outcome = world.run(in_hour(0).__class__(in_hour(0).kind, window=window))
    assert isinstance(outcome.error, UsageError | WindowOpen)
    assert message in outcome.error.message


def test_windows_completed_by_dead_run_are_reported_by_next_run(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded()
    world.run(in_hour(2))
    landed = read_windows(instance, LANDED)
    assert [w["rows"] for w in landed.values()] == [50, 50, 50, 50, 0]
    assert landed[f"{DAY}00:00"]["run"] == "dead-run"
    assert len(read_metadata(instance, LANDED)) == 1
    assert world.group.offsets[P0].offset == 100


TYPED = FEED + "format: json\nschema: {n: int64}\n"


def test_quarantine_of_typed_feed_is_reported_with_landed_windows(root: Path) -> None:
    world = World(root, {"orders": TYPED})
    world.engine.bad = 3
    graph = build(world.project).resolve_asset_graph()
    assert graph.get(COMMITTED).parent_keys == {LANDED}

    world.run(in_hour(0))
    world.run()
    with open_instance(world.project) as instance:
        landed, quarantined = read_windows(instance, LANDED), read_windows(instance, QUARANTINED)
    assert list(landed) == list(quarantined)
    assert [landed[f"{DAY}0{h}:00"]["rows"] for h in range(2)] == [44, 44]
    first, second = (quarantined[f"{DAY}0{h}:00"] for h in range(2))
    assert (first["rows"], first["share"], second["rows"]) == (6, 0.12, 6), "of its own run, and of a catch-up"
    assert read_cells(first["reasons"]) == [
        {"stage": "decode", "reason": "not_json", "expectation": "", "field": "", "rows": 6}
    ]
    assert first["dagster/uri"] == "memory://quarantine/orders/kafka_window_date=2024-05-01/kafka_window_hour=00"


# -- an asset by itself


def test_materializing_only_landed_asset_commits(world: World, instance: dg.DagsterInstance) -> None:
    """As from its own page, or in a backfill."""
    job = build(world.project, world.make_session()).resolve_implicit_job_def_def_for_assets([LANDED])
    assert job is not None
    for _ in range(2):
        run = job.execute_in_process(instance=instance, asset_selection=[LANDED], partition_key=f"{DAY}00:00")
        assert run.success
        assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 25, P1: 25}
        assert f"{DAY}00:00" in read_windows(instance, COMMITTED)
        assert read_checks(instance, run.run_id, OFFSETS_COMMITTED)[f"{DAY}00:00"].passed


def run_backfill(world: World, instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey], last: str) -> dg.DagsterRun:
    """Run these assets over the windows from the day's first to `last`, as a backfill does.

    Dagster's daemon ends a backfill whose runs materialize an asset of it without a partition.
    """
    job = build(world.project, world.make_session()).resolve_implicit_job_def_def_for_assets([*keys])
    assert job is not None
    ended = job.execute_in_process(
        instance=instance,
        asset_selection=[*keys],
        tags=dict(zip(RANGE_TAGS, (f"{DAY}00:00", DAY + last), strict=True)) | {BACKFILL_TAG: "of the day"},
        raise_on_error=False,
    )
    materializations = instance.get_records_for_run(
        ended.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
    ).records
    assert None not in {r.partition_key for r in materializations}
    run = instance.get_run_by_id(ended.run_id)
    assert run is not None
    return run


@pytest.mark.parametrize("keys", [(LANDED, COMMITTED), (LANDED,)])
def test_backfill_of_consecutive_windows_is_one_run(
    world: World, instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]
) -> None:
    world.run(in_hour(1))
    before = list_versions(instance, LANDED, f"{DAY}01:00")
    run = run_backfill(world, instance, keys, "03:00")
    assert run.is_success
    of_day = [f"{DAY}0{h}:00" for h in range(4)]
    landed = read_windows(instance, LANDED)
    assert [landed[w]["rows"] for w in of_day] == [50] * 4
    assert [landed[w]["dagster/uri"][-2:] for w in of_day] == ["00", "01", "02", "03"], "each has its own"
    assert list_versions(instance, LANDED, of_day[1]) == before * 2, (
        "that one had landed: nothing runs again because of it"
    )
    assert set(of_day) <= set(read_windows(instance, COMMITTED))
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 100, P1: 100}
    for name in (WINDOW_COMPLETE, BOUNDARIES, OFFSETS_COMMITTED):
        evaluations = read_checks(instance, run.run_id, name)
        assert set(of_day) <= set(evaluations), name
        assert None not in evaluations
        assert all(s.passed and s.target_materialization_data for s in evaluations.values())
    check_keys = [dg.AssetCheckKey(LANDED, WINDOW_COMPLETE), dg.AssetCheckKey(COMMITTED, OFFSETS_COMMITTED)]
    assert planned_evaluations(instance, check_keys, of_day) == []
    assert read_metadata(instance, COMMITTED) == []
    landed_metadata.require_reported(instance, world.open_ledger_view())


def test_complete_windows_of_failed_backfill_are_green(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.cluster.hold(P1, 60)
    assert run_backfill(world, instance, (LANDED, COMMITTED), "03:00").status is dg.DagsterRunStatus.FAILURE
    assert sorted(set(read_windows(instance, LANDED)) - {f"{DAY}04:00"}) == [f"{DAY}00:00", f"{DAY}01:00"]
    assert unmaterialized_partitions(instance, LANDED) == {f"{DAY}02:00", f"{DAY}03:00"}
    assert world.group.offsets[P1].offset >= 50, "landed records are committed"
    world.cluster.hold(P1, 100)
    assert run_backfill(world, instance, (LANDED, COMMITTED), "03:00").is_success
    assert unmaterialized_partitions(instance, LANDED) == unmaterialized_partitions(instance, COMMITTED) == set()

    def raise_unavailable() -> Mapping[str, str]:
        raise KafkaUnavailable("no broker answers")

    monkeypatch.setattr(world.cluster, "topics", raise_unavailable)
    assert run_backfill(world, instance, (LANDED, COMMITTED), "03:00").status is dg.DagsterRunStatus.FAILURE
    assert unmaterialized_partitions(instance, LANDED) == unmaterialized_partitions(instance, COMMITTED) == set()


# -- windows in their grace period


def read_observations(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, str]:
    """Returns the descriptions of the asset's observations by partition."""
    observations = (r.asset_observation for r in instance.fetch_observations(key, limit=100).records)
    return {o.partition: o.description or "" for o in observations if o and o.partition}


def read_log(instance: dg.DagsterInstance, run: str) -> str:
    return "\n".join(e.user_message for e in instance.all_logs(run))


def count_failed_partitions(pages: Pages) -> tuple[int, int]:
    return pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)


@pytest.mark.parametrize("keys", [(LANDED, COMMITTED), (LANDED,)])
def test_backfill_skips_window_in_grace_period(
    world: World, instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]
) -> None:
    world.at(6, minutes=5)
    run = run_backfill(world, instance, keys, "05:00")
    assert run.is_success
    settled = {f"{DAY}0{h}:00" for h in range(5)}
    assert {*read_windows(instance, LANDED)} == {*read_windows(instance, COMMITTED)} == settled
    assert {tp: o.offset for tp, o in world.group.offsets.items()} == {P0: 100, P1: 100}
    message = f"window {DAY}05:00 is still open: it can be landed from {DAY}06:10:00Z on"
    assert message in read_log(instance, run.run_id)
    assert run.tags[OPEN_WINDOWS_TAG] == f"{DAY}05:00"
    assert read_observations(instance, LANDED) == {f"{DAY}05:00": message}
    assert f"{DAY}05:00" not in read_checks(instance, run.run_id, WINDOW_COMPLETE)
    with open_in_process(instance, world.project) as pages:
        assert count_failed_partitions(pages) == (0, 0), "it is missing, not red"


@pytest.mark.parametrize("keys", [(LANDED, COMMITTED), (LANDED,)])
def test_window_in_grace_period_is_skipped_and_landed_by_schedule(
    world: World, instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]
) -> None:
    world.at(6, minutes=5)
    assets_job = build(world.project, world.make_session()).resolve_implicit_job_def_def_for_assets([*keys])
    assert assets_job is not None
    run = assets_job.execute_in_process(instance=instance, asset_selection=[*keys], partition_key=f"{DAY}05:00")
    assert run.success
    assert not read_windows(instance, LANDED)
    assert not read_windows(instance, COMMITTED)
    assert f"window {DAY}05:00 is still open" in read_log(instance, run.run_id)
    with open_in_process(instance, world.project) as pages:
        assert count_failed_partitions(pages) == (0, 0)
        assert pages.read_check_statuses(LANDED)["window_complete"] in ("SKIPPED", "NOT_EVALUATED")
        world.at(6, minutes=11)
        (first,) = evaluate_tick(world, instance).run_requests or ()
        assert first.partition_key == f"{DAY}05:00", "the schedule asks for it once the grace period is over"
        job = resolve_landing(build(world.project, world.make_session()))
        landed = job.execute_in_process(
            instance=instance, partition_key=first.partition_key, run_config=first.run_config, tags=first.tags
        )
        assert landed.success
        assert f"{DAY}05:00" in read_windows(instance, LANDED)
        assert f"{DAY}05:00" in read_windows(instance, COMMITTED)
        assert count_failed_partitions(pages) == (0, 0)


def test_run_of_several_windows_skips_open_windows(world: World, instance: dg.DagsterInstance) -> None:
    world.at(6, minutes=5)
    job = resolve_landing(build(world.project, world.make_session()))
    config = {"ops": {"orders__landed": {"config": {"until": f"{DAY}07:00"}}}}
    run = job.execute_in_process(instance=instance, partition_key=f"{DAY}03:00", run_config=config)
    assert run.success
    assert {f"{DAY}03:00", f"{DAY}04:00"} == {*read_windows(instance, LANDED)}
    assert {*read_observations(instance, LANDED)} == {f"{DAY}05:00", f"{DAY}06:00"}


def test_catch_up_job_names_window_in_grace_period(world: World, instance: dg.DagsterInstance) -> None:
    world.at(6, minutes=5)
    job = build(world.project, world.make_session()).resolve_job_def("catch_up")
    for first, settled in ((3, {f"{DAY}03:00", f"{DAY}04:00"}), (5, set())):
        request = Request(RequestKind.WINDOW, window=at_hour(first), until=at_hour(6))
        run = job.execute_in_process(instance=instance, run_config=catch_up_config("orders", request))
        assert run.success
        assert f"window {DAY}05:00 is still open" in read_log(instance, run.run_id)
        assert settled <= {*read_windows(instance, LANDED)}
        assert f"{DAY}05:00" not in read_windows(instance, LANDED)


def test_failed_run_does_not_turn_open_window_red(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.at(6, minutes=5)
    monkeypatch.setattr(land_step, "now", world.clock)
    world.engine.failing = {P0}
    job = resolve_landing(build(world.project, world.make_session()))
    config = {"ops": {"orders__landed": {"config": {"until": f"{DAY}06:00"}}}}
    job.execute_in_process(instance=instance, partition_key=f"{DAY}02:00", run_config=config, raise_on_error=False)
    assert f"{DAY}03:00" in unmaterialized_partitions(instance, LANDED)
    assert f"{DAY}05:00" not in unmaterialized_partitions(instance, LANDED)


def test_run_with_landed_and_committed_assets_commits_once(world: World, instance: dg.DagsterInstance) -> None:
    outcome = world.run(in_hour(0))
    materializations = instance.get_records_for_run(
        outcome.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
    ).records
    keys = [
        r.asset_materialization.asset_key
        for r in materializations
        if r.asset_materialization and r.partition_key == f"{DAY}00:00"
    ]
    assert sorted(keys) == [COMMITTED, LANDED]


def test_landed_asset_can_be_selected_without_quarantine(root: Path) -> None:
    """`dagster asset materialize --select 'key:"orders/landed"+'`."""
    world = World(root, {"orders": TYPED})
    world.engine.bad = 3
    defs = build(world.project, world.make_session())
    keys = dg.AssetSelection.from_string('key:"orders/landed"+').resolve(defs.resolve_asset_graph())
    assert keys == {LANDED, COMMITTED}
    job = defs.resolve_implicit_job_def_def_for_assets([*keys])
    assert job is not None
    with open_instance(world.project) as instance:
        assert job.execute_in_process(instance=instance, asset_selection=[*keys], partition_key=f"{DAY}00:00").success
        assert read_windows(instance, QUARANTINED)[f"{DAY}00:00"]["rows"] == 6


# -- the code location


def test_partitions_start_at_first_window_of_feed(root: Path) -> None:
    world = World(root, {"orders": FEED.replace("2024-05-01T00:00:00Z", "earliest"), "daily": FEED + "window: 1d\n"})

    def find_first_partition(feed: str) -> str:
        partitions = build(world.project, world.make_session()).resolve_assets_def(landed_key(feed)).partitions_def
        assert isinstance(partitions, dg.TimeWindowPartitionsDefinition)
        return partitions.get_first_partition_key() or ""

    assert find_first_partition("orders") > "2025"
    assert find_first_partition("daily") == f"{DAY}00:00"
    world.cluster.stamps[P0] = [s + 3_600_000 for s in world.cluster.stamps[P0]]
    world.cluster.stamps[P1] = [s + 3_600_000 for s in world.cluster.stamps[P1]]
    world.run(CATCH_UP)
    assert find_first_partition("orders") == f"{DAY}01:00", "the first window that holds anything"


@pytest.mark.parametrize(
    ("length", "cron", "closing", "keys"),
    [
        ("15m", "*/15 * * * *", "10-59/15 * * * *", ["00:00", "00:15"]),
        ("1h", "0 * * * *", "10 * * * *", ["00:00", "01:00"]),
        ("6h", "0 */6 * * *", "10 * * * *", ["00:00", "06:00"]),
    ],
)
def test_partitions_and_schedule_follow_window_length(
    tmp_path: Path, length: str, cron: str, closing: str, keys: list[str]
) -> None:
    world = World(tmp_path, {"orders": FEED + f"window: {length}\n"})
    defs = build(world.project)
    partitions = defs.resolve_assets_def(LANDED).partitions_def
    assert isinstance(partitions, dg.TimeWindowPartitionsDefinition)
    assert partitions.cron_schedule == cron
    assert partitions.get_partition_keys()[:2] == [DAY + k for k in keys]
    assert defs.resolve_schedule_def("land_orders_windows").cron_schedule == [closing, "*/5 * * * *"]


def test_record_from_1970_does_not_report_fifty_years_of_windows(world: World, instance: dg.DagsterInstance) -> None:
    feed = world.project.feeds_folder / "orders.yaml"
    feed.write_text(FEED.replace("start: 2024-05-01T00:00:00Z", "start: earliest"))
    world.cluster.stamps[P0][0] = 5
    outcome = world.run()
    assert outcome.error is None
    landed = read_windows(instance, LANDED)
    assert landed["1970-01-01T00:00"]["rows"] == 1
    assert {f"{DAY}{h:02}:00" for h in range(5)} <= set(landed)
    assert len(landed) < LISTED + 10
    assert set(read_windows(instance, COMMITTED)) == set(landed)


def test_window_landed_again_is_reported_with_new_version(world: World) -> None:
    """Reports then run over it again. The catch-up job lands it, since the request is more than a window."""
    world.run(in_hour(1))
    with open_instance(world.project) as instance:
        before = list_versions(instance, LANDED, "2024-05-01T01:00")
    world.run(Request(RequestKind.WINDOW, window=at_hour(1), replace=True))
    with open_instance(world.project) as instance:
        after = list_versions(instance, LANDED, "2024-05-01T01:00")
    assert len(before) == 1
    assert len(set(after)) == 2


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_interrupt_during_reporting_of_windows_loses_no_event(
    root: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Events of the windows' earlier runs do not replace those of the interrupted run."""
    world = World(root, {"orders": TYPED})
    world.engine.bad = 3
    world.run()
    again = Request(RequestKind.WINDOW, window=at_hour(1), until=at_hour(4), replace=True)
    with monkeypatch.context() as patched:
        _interrupt_after(nth, patched)
        with pytest.raises(KeyboardInterrupt):
            world.run(again)
    world.bury()
    assert world.run().exit_code == 0
    view = world.open_ledger_view()
    with open_instance(world.project) as instance:
        for key in (LANDED, QUARANTINED):
            newest = {w: list_versions(instance, key, show_window(w))[-1] for w in view.complete}
            assert newest == {w: view.format_window_version(w) for w in view.complete}
        landed_metadata.require_reported(instance, view)


def _interrupt_after(nth: int, patched: pytest.MonkeyPatch) -> None:
    """Raise SIGINT after the nth materialization is stored."""
    store, count = dg.DagsterInstance.handle_new_event, itertools.count(1)

    def store_then_interrupt(self: dg.DagsterInstance, event: Any, **options: Any) -> None:
        store(self, event, **options)
        reports = event.dagster_event and event.dagster_event.event_type_value == "ASSET_MATERIALIZATION"
        if reports and next(count) == nth:
            signal.raise_signal(signal.SIGINT)

    patched.setattr(dg.DagsterInstance, "handle_new_event", store_then_interrupt)


# -- many windows at once


def test_run_lands_and_shows_windows_until_its_configured_end(world: World, instance: dg.DagsterInstance) -> None:
    job = resolve_landing(build(world.project, world.make_session()))
    config = {"ops": {"orders__landed": {"config": {"until": f"{DAY}03:00"}}}}
    assert job.execute_in_process(instance=instance, partition_key=f"{DAY}00:00", run_config=config).success
    green = {f"{DAY}{n:02}:00" for n in (0, 1, 2, 4)}  # nothing was produced in hour 4
    assert {*read_windows(instance, LANDED)} == {*read_windows(instance, COMMITTED)} == green
    assert len(world.state().batches) == 1


def test_requested_windows_that_did_not_land_are_red(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.failing = {P0}
    job = resolve_landing(build(world.project, world.make_session()))
    config = {"ops": {"orders__landed": {"config": {"until": f"{DAY}03:00"}}}}
    run = job.execute_in_process(
        instance=instance, partition_key=f"{DAY}00:00", run_config=config, raise_on_error=False
    )
    assert not run.success
    find_failed_attempts = (
        instance.event_log_storage.get_latest_asset_partition_materialization_attempts_without_materializations
    )
    assert {f"{DAY}01:00", f"{DAY}02:00"} <= find_failed_attempts(LANDED).keys()


# -- a Dagster that is new


def test_new_dagster_gets_past_windows_in_portions_newest_first(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landed_metadata, "PORTION", 2)
    world.land_unrecorded()
    past, now = [f"{DAY}{n:02}:00" for n in range(5)], {f"{DAY}05:00", f"{DAY}06:00"}
    world.at(7)
    first = world.run(in_hour(5))
    assert {*read_windows(instance, LANDED)} == {*past[3:], *now}
    log = " ".join(e.user_message for e in instance.all_logs(first.run_id))
    assert "lacks 5 windows of orders that landed before: this run adds the newest 2" in log
    world.run()
    assert {*read_windows(instance, LANDED)} == {*read_windows(instance, COMMITTED)} == {*past[1:], *now}
    list(reconcile(instance, world.open_ledger_view()))
    assert {*read_windows(instance, LANDED)} == {*past, *now}


# -- the first hour, and days


@pytest.mark.parametrize(("start", "committed", "cut"), [("T00:30:00Z", {}, 1), ("T00:00:00Z", {P0: 10, P1: 60}, 3)])
def test_hours_that_an_origin_cuts_are_complete_after_their_own_runs(
    start: str, committed: dict[TopicPartition, int], cut: int, world: World
) -> None:
    """The group's offsets of two partitions may lie in different hours."""
    feed = world.project.root / "feeds" / "orders.yaml"
    feed.write_text(FEED.replace("T00:00:00Z", start))
    world.group.offsets.update({tp: CommittedOffset(at, metadata="") for tp, at in committed.items()})
    world.run()
    hours = [at_hour(n) for n in range(4)]
    view = world.open_ledger_view()
    assert [w in view.complete for w in hours] == [view.is_complete(w) for w in hours] == [n >= cut for n in range(4)]
    states = strip.standings(world.state(), WindowSettings(), hours, world.clock(), strip.LEDGER_ALONE)
    assert [s.state is Standing.FROM_ORIGIN for s in states] == [n < cut for n in range(4)]
    for n in reversed(range(cut)):
        assert world.run(in_hour(n)).error is None
    view = world.open_ledger_view()
    assert view.complete >= {*hours}
    for n, window in enumerate(hours):
        ranges = {windows.find_range(world.state(), k, window, WindowSettings()) for k in view.frontiers}
        assert ranges == {Range(25 * n, 25 * n + 25)}


@pytest.mark.parametrize(("text", "length", "number"), [("2024-05-01", "1h", 24), ("2024-05-01T06", "15m", 4)])
def test_configured_date_or_hour_is_all_of_its_windows(text: str, length: str, number: int) -> None:
    split = WindowSettings.model_validate(length)
    request = LandConfig(window=text).request(split)
    assert request.window is not None
    assert request.until == request.window + number * split.length
    assert LandConfig(window=f"{text[:10]}T06:00").request(split).until is None
