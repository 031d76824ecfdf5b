"""The schedule requests closed pending windows by the ledger alone, and no window twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sluice.assets.factory import build
from sluice.assets.instance.instance import holding, home_of, open_instance
from sluice.assets.instance.internals import ASSET_JOB, RANGE_TAGS, job_origin
from sluice.assets.runs.run_config import MORE_TAG, UNTIL_TAG, TickPolicy
from sluice.assets.runs.run_session import AGAIN_TAG, FEED_TAG, RunSession
from sluice.assets.schedules import window_scheduler
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.errors import LakeUnavailable
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ports import Ports
from sluice.resources.liveness import machine
from tests.assets.world import FEED, World, in_hour, read_windows, resolve_landing

DAY = "2024-05-01T"


class Deaf:
    """A Kafka that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the schedule asked Kafka for {name}")


def evaluate_tick(world: World, instance: dg.DagsterInstance) -> Any:
    """Returns Dagster's evaluation of a tick, in which Kafka must not be asked."""

    @contextmanager
    def without_kafka(feed: Feed) -> Iterator[Ports]:
        with world.open_ports(feed) as ports:
            yield replace(ports, cluster=Deaf(), group=Deaf())

    session = RunSession(world.project, without_kafka, lambda feed: world.lake)
    defs = build(world.project, session)
    with dg.build_schedule_context(instance, world.time(), repository_def=defs.get_repository_def()) as context:
        return defs.resolve_schedule_def("land_orders_windows").evaluate_tick(context)


def run_tick(world: World, instance: dg.DagsterInstance) -> list[str] | str:
    """Returns the windows that a tick requests, as `first-until` for several in one run, or its reason for none."""
    data = evaluate_tick(world, instance)
    return [*map(format_request, data.run_requests or ())] or data.skip_message or ""


def format_request(request: dg.RunRequest) -> str:
    key, until = (request.partition_key or "").removeprefix(DAY), request.tags.get(UNTIL_TAG, "")
    if until:
        assert request.run_config == {"ops": {"orders__landed": {"config": {"until": until}}}}
    return "-".join([key, *filter(None, [until.removeprefix(DAY)])])


def list_hours(*numbers: int) -> list[str]:
    return [f"{n:02}:00" for n in numbers]


def test_consecutive_pending_windows_are_requested_by_one_run(world: World, instance: dg.DagsterInstance) -> None:
    assert run_tick(world, instance) == list_hours(4), "no ledger yet: the newest window that is closed"
    world.land_unrecorded(in_hour(3))
    assert run_tick(world, instance) == ["00:00-03:00"]
    world.at(12)
    assert run_tick(world, instance) == ["00:00-12:00"], "hours 3 and 4 are whole, and in nobody's way"
    world.land_unrecorded()
    assert run_tick(world, instance) == "no closed window of orders is pending"
    world.at(13, minutes=9)
    assert run_tick(world, instance) == "no closed window of orders is pending", "hour 12 is in its grace period"
    world.at(13, minutes=11)
    assert run_tick(world, instance) == list_hours(12)


def test_backlog_above_limit_is_requested_in_part_and_tagged(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.land_unrecorded(in_hour(3))
    monkeypatch.setattr(window_scheduler, "WINDOWS", 2)
    (request,) = evaluate_tick(world, instance).run_requests
    assert (format_request(request), request.tags[MORE_TAG]) == ("00:00-02:00", "1")


def test_window_with_active_run_is_not_requested(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(2))
    started = dg.DagsterRunStatus.STARTED
    create_run(world, instance, started, "00:00")
    create_run(world, instance, started, "01:00", backfill=True)
    assert run_tick(world, instance) == list_hours(3)
    create_run(world, instance, started, "03:00")
    assert "3 windows are pending, all under way or failed 3 times" in run_tick(world, instance)


def test_run_killed_with_the_code_server_is_marked_as_failed(world: World, instance: dg.DagsterInstance) -> None:
    """It would keep its slot in the pool, and the schedule would wait for it."""
    world.land_unrecorded(in_hour(3))
    create_run(world, instance, dg.DagsterRunStatus.STARTED, "00:00", tags={UNTIL_TAG: f"{DAY}02:00"})
    (run,) = instance.get_runs()
    lock = home_of(world.project, instance) / "attended" / run.run_id
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(machine())  # the system released it when the process died
    assert run_tick(world, instance) == f"marked as failed, since its process died or never began: run {run.run_id[:8]}"
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.FAILURE
    assert not lock.exists()
    assert run_tick(world, instance) == ["00:00-03:00"], "what Dagster has not retried by then"


def test_unlaunched_run_is_marked_failed_and_window_requested_again(world: World, instance: dg.DagsterInstance) -> None:
    """The daemon was killed before the launch; the window would wait forever."""
    world.land_unrecorded(in_hour(3))
    create_run(world, instance, dg.DagsterRunStatus.NOT_STARTED, "00:00", tags={UNTIL_TAG: f"{DAY}03:00"})
    (run,) = instance.get_runs()
    assert "at work on the windows of orders" in run_tick(world, instance), "it may be about to be launched"
    with instance.run_storage.connect() as connection:
        connection.exec_driver_sql("UPDATE runs SET create_timestamp = '2024-05-01 00:00:00'")
    assert run_tick(world, instance) == f"marked as failed, since its process died or never began: run {run.run_id[:8]}"
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.FAILURE
    assert run_tick(world, instance) == ["00:00-03:00"]


def test_windows_of_a_run_in_a_full_queue_are_not_requested_again(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(3))
    queued = dg.DagsterRunStatus.QUEUED
    tags = {"dagster/partition": f"{DAY}00:00", UNTIL_TAG: f"{DAY}03:00", FEED_TAG: "orders"}
    origin = job_origin(world.project, ASSET_JOB)
    instance.add_run(dg.DagsterRun(ASSET_JOB, status=queued, remote_job_origin=origin, tags=tags))
    with instance.run_storage.connect() as connection:
        connection.exec_driver_sql("UPDATE runs SET create_timestamp = '2024-05-01 00:00:00'")
    for _ in range(2):
        assert "at work on the windows of orders" in run_tick(world, instance)
    (run,) = instance.get_runs()
    assert run.status is queued, "it has waited for long, and no process of it can have died"


def test_run_of_live_process_is_not_marked_as_failed(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(3))
    create_run(world, instance, dg.DagsterRunStatus.STARTED, "00:00", tags={UNTIL_TAG: f"{DAY}02:00"})
    (run,) = instance.get_runs()
    with holding(home_of(world.project, instance), run.run_id):
        assert "at work on the windows of orders" in run_tick(world, instance)
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTED


def test_nothing_is_requested_during_run_over_several_windows(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(3))
    create_run(world, instance, dg.DagsterRunStatus.STARTED, "00:00", tags={UNTIL_TAG: f"{DAY}02:00"})
    assert "at work on the windows of orders from 2024-05-01T00:00 on" in run_tick(world, instance)


def test_nothing_is_requested_during_backfill_of_consecutive_windows(
    world: World, instance: dg.DagsterInstance
) -> None:
    world.land_unrecorded(in_hour(3))
    row = dict(zip(RANGE_TAGS, (f"{DAY}00:00", f"{DAY}01:00"), strict=True))
    create_run(world, instance, dg.DagsterRunStatus.STARTED, None, backfill=True, tags=row)
    assert "at work on the windows of orders from 2024-05-01T00:00 on" in run_tick(world, instance)


def test_failed_window_is_requested_separately_until_third_failure(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(4))
    failed, succeeded = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS
    for _ in range(3):
        create_run(world, instance, failed, "00:00", tags={AGAIN_TAG: ""})
        create_run(world, instance, failed, "01:00")
        create_run(world, instance, failed, "02:00", tags={AGAIN_TAG: "KafkaUnavailable"})
    create_run(world, instance, succeeded, "01:00")
    create_run(world, instance, failed, "03:00")
    for run in instance.get_runs():
        for event in ("PIPELINE_START", f"PIPELINE_{run.status.value}"):
            instance.report_dagster_event(dg.DagsterEvent(event, run.job_name), run.run_id)
        instance.event_log_storage.delete_events(run.run_id)  # `sluice prune` leaves the run alone
    assert run_tick(world, instance) == ["01:00-03:00", "03:00"], "succeeded since; passes by itself; once"


def test_runs_that_never_started_do_not_count_as_failures(world: World, instance: dg.DagsterInstance) -> None:
    """As when the code server has no time to start them; the window is requested at each tick."""
    world.land_unrecorded(in_hour(2))
    for _ in range(4):
        create_run(world, instance, dg.DagsterRunStatus.FAILURE, "00:00")
    assert run_tick(world, instance) == ["00:00-04:00"]


def test_tick_checks_when_windows_close_and_after_incomplete_run(world: World, instance: dg.DagsterInstance) -> None:
    def is_due(hours: int, minutes: int) -> bool:
        world.at(hours, minutes)
        return looks.is_due(instance, world.time())

    looks = TickPolicy(ASSET_JOB, [world.make_session().feed("orders").window], tags={FEED_TAG: "orders"})
    assert looks.crons == ["10 * * * *", "*/5 * * * *"]
    assert is_due(10, 12), "this process has not looked yet"
    assert [is_due(*at) for at in ((10, 15), (11, 5), (11, 10), (11, 15))] == [False, False, True, False]
    create_run(world, instance, dg.DagsterRunStatus.SUCCESS, "00:00", tags={MORE_TAG: "1"})
    assert is_due(11, 20)
    create_run(world, instance, dg.DagsterRunStatus.SUCCESS, "00:00")
    assert not is_due(11, 22)
    assert (looks.skip_reason.skip_message or "").endswith("completed its request")
    create_run(world, instance, dg.DagsterRunStatus.STARTED, "01:00", tags={MORE_TAG: "1"})
    assert not is_due(11, 25), "that run is at work"
    assert "has not ended" in (looks.skip_reason.skip_message or "")
    create_run(world, instance, dg.DagsterRunStatus.FAILURE, "02:00", tags={MORE_TAG: "1"})
    assert not is_due(11, 30), "what failed waits for the next closing"
    message = looks.skip_reason.skip_message or ""
    assert "did not succeed: the next look, when a window closes, requests the remaining windows again" in message
    assert is_due(14, 40), "ticks were missed"


def test_clock_skew_of_code_server_does_not_delay_window_by_an_hour(world: World, instance: dg.DagsterInstance) -> None:
    """With the daemon's clock two seconds ahead of the code server's, the first tick finds the window open."""

    def is_due(hours: int, minutes: int) -> bool:
        world.at(hours, minutes)
        return looks.is_due(instance, world.time())

    looks = TickPolicy(ASSET_JOB, [world.make_session().feed("orders").window], lambda: world.clock.now - 2000)
    assert [is_due(*at) for at in ((10, 12), (11, 10), (11, 15), (11, 20))] == [True, True, True, False]


def test_next_tick_checks_again_after_failed_check_or_dropped_request(
    world: World, instance: dg.DagsterInstance
) -> None:
    away = True

    @contextmanager
    def open_ports(feed: Feed) -> Iterator[Ports]:
        if away:
            raise LakeUnavailable("the store does not answer", remedy="wait for it")
        with world.open_ports(feed) as ports:
            yield ports

    defs = build(world.project, RunSession(world.project, open_ports, lambda feed: world.lake))

    def look() -> Any:
        with dg.build_schedule_context(instance, world.time(), repository_def=defs.get_repository_def()) as context:
            return defs.resolve_schedule_def("land_orders_windows").evaluate_tick(context)

    world.at(5, minutes=10)
    with pytest.raises(dg.DagsterError, match="land_orders_windows"):
        look()
    away = False
    world.at(5, minutes=15)
    assert look().run_requests, "this one is too late for Dagster, which drops it"
    assert look().run_requests, "the same tick again"
    world.at(5, minutes=20)
    (request,) = look().run_requests
    create_run(world, instance, dg.DagsterRunStatus.STARTED, "04:00", tags={"dagster/run_key": request.run_key})
    world.at(5, minutes=25)
    assert "no window has closed since the last look" in look().skip_message


def create_run(
    world: World,
    instance: dg.DagsterInstance,
    status: dg.DagsterRunStatus,
    window: str | None,
    *,
    backfill: bool = False,
    tags: dict[str, str] | None = None,
) -> None:
    """Create a run with this status for a window (None: as in `tags`), of the feed's schedule or of a backfill."""
    job = resolve_landing(build(world.project))
    partition = {"dagster/partition": DAY + window} if window else {}
    instance.create_run_for_job(
        job,
        status=status,
        tags=partition | ({} if backfill else {FEED_TAG: "orders"}) | (tags or {}),
        asset_selection=job.asset_selection,
    )


# -- windows of the ledger, in another process


EARLIEST = FEED.replace("2024-05-01T00:00:00Z", "earliest")


def find_first_partition(world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the first partition of a code location that loads now."""
    monkeypatch.setattr("sluice.assets.factory.now", lambda: world.clock.now)
    partitions = build(world.project, world.make_session()).resolve_assets_def(landed_key("orders")).partitions_def
    assert isinstance(partitions, dg.TimeWindowPartitionsDefinition)
    return partitions.get_first_partition_key() or ""


def test_unused_home_shows_and_requests_windows_by_the_ledger(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs' home and the code server's share the lake alone."""
    here, there = root / "code-server", root / "run"
    for home in (here, there):
        home.mkdir()
    server, pod = World(here, {"orders": EARLIEST}), World(there, {"orders": EARLIEST})
    server.lake, server.cluster, server.clock = pod.lake, pod.cluster, pod.clock
    assert find_first_partition(server, monkeypatch) == "2024-04-24T00:00", "as long as Kafka keeps records by default"
    pod.land_unrecorded(in_hour(2))
    assert find_first_partition(server, monkeypatch) == f"{DAY}00:00"
    pod.at(8 * 24)
    with open_instance(server.project) as instance:
        (first, *_) = evaluate_tick(server, instance).run_requests
        assert format_request(first) == "00:00-2024-05-09T00:00", "owed for eight days"
        assert first.partition_key == f"{DAY}00:00"
    pod.at(10 * 24 + 1)
    assert find_first_partition(server, monkeypatch) == f"{DAY}00:00", "ten days later"
    assert [*here.rglob("seen")] == []


def test_windows_before_loaded_partitions_are_requested_by_tag(world: World, instance: dg.DagsterInstance) -> None:
    """The first run found records older than the windows with which the location was loaded."""
    (world.project.feeds_folder / "orders.yaml").write_text(EARLIEST)
    session = RunSession(world.project, world.open_ports)  # its lake has no ledger: loaded before the first run
    world.land_unrecorded(in_hour(3))
    defs = build(world.project, session)
    with dg.build_schedule_context(instance, world.time(), repository_def=defs.get_repository_def()) as context:
        (request,) = defs.resolve_schedule_def("land_orders_windows").evaluate_tick(context).run_requests or ()
    assert request.partition_key is None
    assert (request.tags["dagster/partition"], request.tags[UNTIL_TAG]) == (f"{DAY}00:00", f"{DAY}03:00")
    job = resolve_landing(build(world.project, world.make_session()))
    assert job.execute_in_process(instance=instance, run_config=request.run_config, tags=request.tags).success
    assert {f"{DAY}{n:02}:00" for n in range(4)} <= set(read_windows(instance, landed_key("orders")))


@pytest.mark.parametrize(
    ("pools", "limits"),
    [
        ("{granularity: run}", {"sluice_orders": 1, "others": 5}),
        ("{granularity: run, default_limit: 3}", {"sluice_orders": 3, "others": 5}),
        ("{granularity: op}", {"others": 5}),  # a killed run would keep the only slot
    ],
)
def test_tick_limits_only_pools_of_its_feeds(pools: str, limits: dict[str, int], world: World, tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(f"concurrency: {{pools: {pools}}}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        instance.event_log_storage.set_concurrency_slots("others", 5)
        assert run_tick(world, instance) == list_hours(4)
        assert {p.name: p.limit for p in instance.event_log_storage.get_pool_limits()} == limits
