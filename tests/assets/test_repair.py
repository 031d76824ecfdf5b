"""Repairs of Dagster's state by the ledger: dead runs, and an event log with missing or extra windows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace

import dagster as dg
import pytest
from dagster._core.events import EngineEventData

from sluice.assets.instance.instance import bury_dead_runs, holding, is_held, prepare_home, with_dagster_liveness
from sluice.assets.operations import dead_runs
from sluice.assets.operations.event_log_repair import reconcile
from sluice.assets.runs.run_config import catch_up_config
from sluice.assets.runs.run_session import FEED_TAG
from sluice.assets.specs.asset_specs import committed_key, landed_key
from sluice.pipelines.model.receipts import Life, Verdict
from sluice.pipelines.operating.repairs import RepairKind
from sluice.resources.liveness import Informed, machine
from sluice.testing.engine import MemoryLiveness, owner
from tests.assets.conftest import ON_FILES
from tests.assets.test_ui import create_killed_run
from tests.assets.world import CATCH_UP, World, in_hour, list_versions, read_windows

LANDED, COMMITTED = landed_key("orders"), committed_key("orders")
Status = dg.DagsterRunStatus


@dg.op
def do_nothing() -> None: ...


@dg.job(name="land_orders", tags={FEED_TAG: "orders"})
def land_orders() -> None:
    do_nothing()


@dg.job(name="other")
def other() -> None:
    do_nothing()


def create_run(
    instance: dg.DagsterInstance, status: Status = Status.STARTED, job: dg.JobDefinition = land_orders
) -> str:
    return instance.create_run_for_job(job, status=status, tags=job.tags).run_id


def find_dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        return ended.pid


def report_process_start(instance: dg.DagsterInstance, run: str, pid: int) -> None:
    """Report the event by which Dagster records the start of a run's process."""
    standing = instance.get_run_by_id(run)
    instance.report_engine_event(f"Started process for run (pid: {pid}).", standing, EngineEventData.in_process(pid))


def judge_no_heartbeats(runs: Collection[str]) -> Mapping[str, Verdict]:
    return {}


def judge_runs(
    instance: dg.DagsterInstance,
    world: World,
    heartbeats: dead_runs.Heartbeats = judge_no_heartbeats,
    feed: str | None = None,
) -> dict[str, bool | None]:
    runs = dead_runs.under_way(instance, world.project, heartbeats, feed)
    return {f.id: f.verdict.dead if f.verdict else None for f in runs}


# -- which runs are dead


@ON_FILES
def test_a_run_is_judged_by_its_lock_then_its_heartbeat_then_its_process(
    world: World, instance: dg.DagsterInstance
) -> None:
    home = prepare_home(world.project)
    locked, killed, beating, silent, exited, running, unknown = (create_run(instance) for _ in range(7))
    (home / "attended").mkdir(exist_ok=True)
    (home / "attended" / killed).touch()
    for run in (locked, killed, beating, exited):
        report_process_start(instance, run, find_dead_pid())
    for run in (silent, running):
        report_process_start(instance, run, os.getpid())
    heartbeat_verdicts = {
        beating: Verdict(Life.ALIVE, "its heartbeat goes on"),
        silent: Verdict(Life.DEAD, "its heartbeat did not change"),
    }
    with holding(home, locked):
        verdicts = judge_runs(
            instance, world, lambda runs: {r: heartbeat_verdicts[r] for r in runs if r in heartbeat_verdicts}
        )
    assert verdicts == {
        locked: False, killed: True, beating: False, silent: True, exited: True, running: False, unknown: None,
    }  # fmt: skip


def test_run_that_never_started_is_dead_after_start_timeout(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, _ = create_run(instance, Status.NOT_STARTED), create_run(instance, Status.SUCCESS)
    assert judge_runs(instance, world) == {launched: False}
    now = dead_runs.clock() + instance.run_monitoring_start_timeout_seconds + 1
    monkeypatch.setattr(dead_runs, "clock", lambda: now)
    assert judge_runs(instance, world) == {launched: True}


def test_runs_are_filtered_by_feed(world: World, instance: dg.DagsterInstance) -> None:
    mine, _ = create_run(instance), create_run(instance, job=other)
    assert list(judge_runs(instance, world, feed="orders")) == [mine]


@pytest.mark.parametrize(("stood", "became"), [(Status.STARTED, Status.FAILURE), (Status.CANCELING, Status.CANCELED)])
@ON_FILES
def test_ending_a_dead_run_logs_reason_and_frees_its_slots(
    world: World, instance: dg.DagsterInstance, stood: Status, became: Status
) -> None:
    run = create_run(instance, stood)
    report_process_start(instance, run, find_dead_pid())
    log = instance.event_log_storage
    log.initialize_concurrency_limit_to_default("sluice_orders")
    log.claim_concurrency_slot("sluice_orders", run, "orders__landed")
    (dead_run,) = dead_runs.under_way(instance, world.project, judge_no_heartbeats)
    assert dead_runs.end(instance, world.project, dead_run) == ("sluice_orders",)
    standing = instance.get_run_by_id(run)
    assert standing is not None
    assert standing.status is became
    assert log.get_concurrency_run_ids() == set()
    assert "gone from this machine" in (instance.all_logs(run)[-1].message or "")
    assert judge_runs(instance, world) == {}


def test_slots_of_ended_runs_are_freed(world: World, instance: dg.DagsterInstance) -> None:
    ended, alive = create_run(instance, Status.FAILURE), create_run(instance)
    log = instance.event_log_storage
    log.set_concurrency_slots("sluice_orders", 2)
    for run in (ended, alive):
        log.claim_concurrency_slot("sluice_orders", run, "orders__landed")
    assert dead_runs.free_leaked_slots(instance) == (ended,)
    assert log.get_concurrency_run_ids() == {alive}


# -- locks


def test_lock_is_not_released_before_its_run_ends(world: World, instance: dg.DagsterInstance) -> None:
    home, run = prepare_home(world.project), create_run(instance)
    assert is_held(home, run) is None
    with holding(home, run):
        with holding(home, run):  # a step, in the process that holds it for the whole run
            assert is_held(home, run)
        assert is_held(home, run), "the end of the step does not release the run's lock"
        assert bury_dead_runs(instance, home) == []
    assert is_held(home, run) is None
    assert list((home / "attended").iterdir()) == []


def test_lock_is_judged_across_containers_but_not_across_machines(world: World, instance: dg.DagsterInstance) -> None:
    home, run, boot = prepare_home(world.project), create_run(instance), machine().partition(" ")[0]
    (home / "attended").mkdir(exist_ok=True)
    other = boot[::-1]
    for text, is_ours in ((f"{boot} pid:[1]", True), (f"{other} pid:[1]", False), (other, False), (machine(), True)):
        (home / "attended" / run).write_text(text)
        assert is_held(home, run) is (False if is_ours else None)


def test_lock_from_before_reboot_is_judged_only_on_same_host(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power failure; also in a container, which restarts under the same name."""
    home, run, boot = prepare_home(world.project), create_run(instance), machine().partition(" ")[0]
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    with holding(home, run):
        lock = (home / "attended" / run).read_text()
    (home / "attended" / run).write_text(lock.replace(boot, boot[::-1]))
    for name in ("node-2", "localhost"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert is_held(home, run) is None
        assert bury_dead_runs(instance, home) == []
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    assert bury_dead_runs(instance, home) == [run]


def test_unused_home_is_not_written_to(world: World, instance: dg.DagsterInstance) -> None:
    """A code server may have a read-only home if its runs execute on other machines."""
    home = prepare_home(world.project)
    assert bury_dead_runs(instance, home) == []
    assert judge_runs(instance, world) == {}
    assert is_held(home, "a-run") is None
    assert not (home / "attended").exists()


def test_run_is_alive_after_process_of_a_step_died(world: World, instance: dg.DagsterInstance) -> None:
    """Dagster's multiprocess executor goes on with other steps."""
    home, alive, dead = prepare_home(world.project), create_run(instance), create_run(instance)
    (home / "attended").mkdir(exist_ok=True)
    for run, pid in ((alive, os.getpid()), (dead, find_dead_pid())):
        report_process_start(instance, run, pid)
        (home / "attended" / run).write_text(machine())
    assert judge_runs(instance, world) == {alive: False, dead: True}
    assert bury_dead_runs(instance, home) == [dead]
    assert [instance.get_run_by_id(r).status for r in (alive, dead)] == [Status.STARTED, Status.FAILURE]
    instance.report_run_failed(instance.get_run_by_id(alive))
    assert bury_dead_runs(instance, home) == []
    assert list((home / "attended").iterdir()) == []


def test_lock_of_killed_step_is_taken_over_by_next_step(world: World, instance: dg.DagsterInstance) -> None:
    home, run = prepare_home(world.project), create_run(instance)
    holder = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom sluice.assets.instance.instance import holding\n"
        "with holding(Path(sys.argv[1]), sys.argv[2]):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", holder, str(home), run], check=False)
    assert is_held(home, run) is False
    with holding(home, run):
        assert is_held(home, run)
        assert bury_dead_runs(instance, home) == []
    assert is_held(home, run) is None
    assert list((home / "attended").iterdir()) == []


def test_step_launched_by_dagster_holds_lock_of_its_run(world: World, instance: dg.DagsterInstance) -> None:
    """Runs from the UI and schedules are not started by Sluice, so each step holds the lock."""
    from sluice.assets.factory import build

    lock_states: list[bool | None] = []
    run = world.engine.run

    def check_locks_and_run(job, tasks):  # type: ignore[no-untyped-def]
        lock_states.extend(is_held(prepare_home(world.project), r.run_id) for r in instance.get_runs())
        return run(job, tasks)

    world.engine.run = check_locks_and_run  # type: ignore[method-assign]
    job = build(world.project, world.make_session()).resolve_job_def("catch_up")
    assert job.execute_in_process(catch_up_config("orders", CATCH_UP), instance=instance).success
    assert lock_states == [True]
    assert is_held(prepare_home(world.project), instance.get_runs()[0].run_id) is None


# -- takeover of batches


def test_owner_of_run_that_ended_in_dagster_is_dead_immediately(world: World, instance: dg.DagsterInstance) -> None:
    failed, alive = create_run(instance, Status.FAILURE), create_run(instance)
    heartbeats = MemoryLiveness(dead={"beatless"}, suspects={"suspect"})
    with world.open_ports(world.make_session().feed("orders")) as ports:
        liveness = with_dagster_liveness(replace(ports, liveness=heartbeats), instance).liveness
    runs = {"failed": failed, "alive": alive, "beatless": alive, "elsewhere": "unknown", "suspect": alive}
    owners = [owner(token, run) for token, run in runs.items()]
    at_once, watched = (liveness.judge(owners, watch=watch) for watch in (False, True))
    assert at_once["failed"].why == "Dagster knows it as FAILURE"
    assert {t: v.life for t, v in at_once.items()} == {
        "failed": Life.DEAD, "alive": Life.ALIVE, "beatless": Life.DEAD, "elsewhere": Life.ALIVE,
        "suspect": Life.UNKNOWN,
    }  # fmt: skip
    assert watched == at_once | {"suspect": Verdict(Life.ALIVE, "set by the test")}


def test_with_dagster_liveness_changes_only_the_liveness_port(world: World, instance: dg.DagsterInstance) -> None:
    with world.open_ports(world.make_session().feed("orders")) as ports:
        informed = with_dagster_liveness(ports, instance)
    assert isinstance(informed.liveness, Informed)
    assert replace(informed, liveness=ports.liveness) == ports


# -- the event log compared with the ledger


def test_landed_windows_are_reported_to_fresh_dagster_home(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(0))
    world.land_unrecorded(in_hour(1))
    repairs = list(reconcile(instance, world.open_ledger_view(), dry_run=True))
    assert read_windows(instance, LANDED) == {}
    assert list(reconcile(instance, world.open_ledger_view())) == repairs
    batches, hours = repairs
    assert (batches.kind, batches.act, len(batches.items)) == (RepairKind.UNTOLD, "reported to Dagster", 2)
    assert hours.items == ("2024-05-01T00:00", "2024-05-01T01:00", "2024-05-01T04:00"), "the last one is quiet"
    assert list(read_windows(instance, LANDED)) == list(hours.items)
    assert list(reconcile(instance, world.open_ledger_view())) == []


def test_windows_recorded_only_in_dagster_are_reported(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    world.run(in_hour(1))
    assert list(reconcile(instance, world.open_ledger_view())) == []
    world.lake.files.clear()
    world.group.offsets.clear()
    world.land_unrecorded(in_hour(0))
    batch, window, overtold = reconcile(instance, world.open_ledger_view())
    assert (batch.kind, window.kind) == (RepairKind.UNTOLD, RepairKind.UNTOLD)
    assert window.items == ("2024-05-01T00:00",), "it landed again, in another ledger"
    assert overtold.kind is RepairKind.OVERTOLD
    assert overtold.text == "1 window green in Dagster and pending by the ledger, 2024-05-01T01:00"
    assert "sluice run orders --from 2024-05-01T01:00 --to 2024-05-01T02:00" in overtold.remedy[0]
    world.run(in_hour(1))
    assert list(reconcile(instance, world.open_ledger_view())) == []
    assert len(list_versions(instance, LANDED, "2024-05-01T01:00")) == 2


def test_window_left_red_by_killed_run_is_reported_again(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    create_killed_run(world, instance, "2024-05-01T01:00")
    bury_dead_runs(instance, prepare_home(world.project))
    for dry_run in (True, False):
        (repair,) = reconcile(instance, world.open_ledger_view(), dry_run=dry_run)
        assert (repair.kind, repair.items) == (RepairKind.UNTOLD, ("2024-05-01T01:00",))
        assert "left red" in repair.text
    assert list(reconcile(instance, world.open_ledger_view())) == []
    assert len(set(list_versions(instance, LANDED, "2024-05-01T01:00"))) == 1
