"""Dagster beside the ledger: runs that only look alive, and an event log that knows too little or too much."""

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
from sluice.assets.runs.run_session import FEED_TAG
from sluice.assets.specs.asset_specs import committed_key, landed_key
from sluice.pipelines.model.receipts import Life, Verdict
from sluice.pipelines.operating.repairs import RepairKind
from sluice.resources.liveness import Informed, machine
from sluice.testing.engine import MemoryLiveness, owner
from tests.assets.conftest import ON_FILES
from tests.assets.test_ui import killed
from tests.assets.world import World, in_hour, versions, windows

LANDED, COMMITTED = landed_key("orders"), committed_key("orders")
Status = dg.DagsterRunStatus


@dg.op
def nothing() -> None: ...


@dg.job(name="land_orders", tags={FEED_TAG: "orders"})
def land_orders() -> None:
    nothing()


@dg.job(name="other")
def other() -> None:
    nothing()


def begun(instance: dg.DagsterInstance, status: Status = Status.STARTED, job: dg.JobDefinition = land_orders) -> str:
    return instance.create_run_for_job(job, status=status, tags=job.tags).run_id


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        return ended.pid


def noted(instance: dg.DagsterInstance, run: str, pid: int) -> None:
    """What Dagster notes when a process of its begins with the run."""
    standing = instance.get_run_by_id(run)
    instance.report_engine_event(f"Started process for run (pid: {pid}).", standing, EngineEventData.in_process(pid))


def no_heartbeats(runs: Collection[str]) -> Mapping[str, Verdict]:
    return {}


def judged(
    instance: dg.DagsterInstance,
    world: World,
    heartbeats: dead_runs.Heartbeats = no_heartbeats,
    feed: str | None = None,
) -> dict[str, bool | None]:
    found = dead_runs.under_way(instance, world.project, heartbeats, feed)
    return {f.id: f.verdict.dead if f.verdict else None for f in found}


# -- which runs are dead


@ON_FILES
def test_a_run_is_judged_by_its_lock_then_its_heartbeat_then_its_process(
    world: World, instance: dg.DagsterInstance
) -> None:
    home = prepare_home(world.project)
    held, killed, heartbeats, silent, gone, there, unknown = (begun(instance) for _ in range(7))
    (home / "attended").mkdir(exist_ok=True)
    (home / "attended" / killed).touch()
    for run in (held, killed, heartbeats, gone):
        noted(instance, run, dead_pid())
    for run in (silent, there):
        noted(instance, run, os.getpid())
    said = {
        heartbeats: Verdict(Life.ALIVE, "its heartbeat goes on"),
        silent: Verdict(Life.DEAD, "its heartbeat did not change"),
    }
    with holding(home, held):
        found = judged(instance, world, lambda runs: {r: said[r] for r in runs if r in said})
    assert found == {
        held: False, killed: True, heartbeats: False, silent: True, gone: True, there: False, unknown: None,
    }  # fmt: skip


def test_a_run_that_never_began_is_dead_after_dagster_s_own_bound(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, _ = begun(instance, Status.NOT_STARTED), begun(instance, Status.SUCCESS)
    assert judged(instance, world) == {launched: False}
    now = dead_runs.clock() + instance.run_monitoring_start_timeout_seconds + 1
    monkeypatch.setattr(dead_runs, "clock", lambda: now)
    assert judged(instance, world) == {launched: True}


def test_only_the_runs_of_a_feed(world: World, instance: dg.DagsterInstance) -> None:
    mine, _ = begun(instance), begun(instance, job=other)
    assert list(judged(instance, world, feed="orders")) == [mine]


@pytest.mark.parametrize(("stood", "became"), [(Status.STARTED, Status.FAILURE), (Status.CANCELING, Status.CANCELED)])
@ON_FILES
def test_ending_a_dead_run_says_why_and_frees_what_it_held(
    world: World, instance: dg.DagsterInstance, stood: Status, became: Status
) -> None:
    run = begun(instance, stood)
    noted(instance, run, dead_pid())
    log = instance.event_log_storage
    log.initialize_concurrency_limit_to_default("sluice_orders")
    log.claim_concurrency_slot("sluice_orders", run, "orders__landed")
    (found,) = dead_runs.under_way(instance, world.project, no_heartbeats)
    assert dead_runs.end(instance, world.project, found) == ("sluice_orders",)
    standing = instance.get_run_by_id(run)
    assert standing is not None
    assert standing.status is became
    assert log.get_concurrency_run_ids() == set()
    assert "gone from this machine" in (instance.all_logs(run)[-1].message or "")
    assert judged(instance, world) == {}


def test_slots_of_runs_that_have_ended_are_freed(world: World, instance: dg.DagsterInstance) -> None:
    ended, alive = begun(instance, Status.FAILURE), begun(instance)
    log = instance.event_log_storage
    log.set_concurrency_slots("sluice_orders", 2)
    for run in (ended, alive):
        log.claim_concurrency_slot("sluice_orders", run, "orders__landed")
    assert dead_runs.free_leaked_slots(instance) == (ended,)
    assert log.get_concurrency_run_ids() == {alive}


# -- locks


def test_a_lock_is_never_seen_free_while_its_run_lives(world: World, instance: dg.DagsterInstance) -> None:
    home, run = prepare_home(world.project), begun(instance)
    assert is_held(home, run) is None
    with holding(home, run):
        with holding(home, run):  # a step, in the process that holds it for the whole run
            assert is_held(home, run)
        assert is_held(home, run), "the step's end does not let go of the run's"
        assert bury_dead_runs(instance, home) == []
    assert is_held(home, run) is None
    assert list((home / "attended").iterdir()) == []


def test_a_lock_of_another_container_is_judged_and_one_of_another_machine_is_not(
    world: World, instance: dg.DagsterInstance
) -> None:
    home, run, boot = prepare_home(world.project), begun(instance), machine().partition(" ")[0]
    (home / "attended").mkdir(exist_ok=True)
    other = boot[::-1]
    for text, is_ours in ((f"{boot} pid:[1]", True), (f"{other} pid:[1]", False), (other, False), (machine(), True)):
        (home / "attended" / run).write_text(text)
        assert is_held(home, run) is (False if is_ours else None)


def test_a_lock_from_before_a_reboot_is_judged(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power failure, in a container, too: it starts again under its name."""
    home, run, boot = prepare_home(world.project), begun(instance), machine().partition(" ")[0]
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


def test_a_home_that_no_run_has_used_is_only_read(world: World, instance: dg.DagsterInstance) -> None:
    """A code server whose runs have machines of their own may have a read-only home."""
    home = prepare_home(world.project)
    assert bury_dead_runs(instance, home) == []
    assert judged(instance, world) == {}
    assert is_held(home, "a-run") is None
    assert not (home / "attended").exists()


def test_a_run_whose_process_goes_on_without_one_of_a_step_is_alive(world: World, instance: dg.DagsterInstance) -> None:
    """Dagster's multiprocess executor goes on with other steps."""
    home, alive, dead = prepare_home(world.project), begun(instance), begun(instance)
    (home / "attended").mkdir(exist_ok=True)
    for run, pid in ((alive, os.getpid()), (dead, dead_pid())):
        noted(instance, run, pid)
        (home / "attended" / run).write_text(machine())
    assert judged(instance, world) == {alive: False, dead: True}
    assert bury_dead_runs(instance, home) == [dead]
    assert [instance.get_run_by_id(r).status for r in (alive, dead)] == [Status.STARTED, Status.FAILURE]
    instance.report_run_failed(instance.get_run_by_id(alive))
    assert bury_dead_runs(instance, home) == []
    assert list((home / "attended").iterdir()) == []


def test_a_lock_that_a_killed_step_left_is_taken_over_by_the_next_of_its_run(
    world: World, instance: dg.DagsterInstance
) -> None:
    home, run = prepare_home(world.project), begun(instance)
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


def test_a_step_that_dagster_launched_holds_its_run_s_lock(world: World, instance: dg.DagsterInstance) -> None:
    """The runs of the UI and of schedules are not wrapped by us: each step holds the lock."""
    from sluice.assets.factory import build

    seen: list[bool | None] = []
    run = world.engine.run

    def looking(job, tasks):  # type: ignore[no-untyped-def]
        seen.extend(is_held(prepare_home(world.project), r.run_id) for r in instance.get_runs())
        return run(job, tasks)

    world.engine.run = looking  # type: ignore[method-assign]
    job = build(world.project, world.session()).resolve_job_def("catch_up_orders")
    assert job.execute_in_process(instance=instance).success
    assert seen == [True]
    assert is_held(prepare_home(world.project), instance.get_runs()[0].run_id) is None


# -- who may take a batch over


def test_the_owner_whose_run_has_ended_in_dagster_is_dead_at_once(world: World, instance: dg.DagsterInstance) -> None:
    failed, alive = begun(instance, Status.FAILURE), begun(instance)
    heartbeats = MemoryLiveness(dead={"beatless"}, suspects={"suspect"})
    with world.open_ports(world.session().feed("orders")) as edges:
        liveness = with_dagster_liveness(replace(edges, liveness=heartbeats), instance).liveness
    runs = {"failed": failed, "alive": alive, "beatless": alive, "elsewhere": "unknown", "suspect": alive}
    owners = [owner(token, run) for token, run in runs.items()]
    at_once, known = (liveness.judge(owners, watch=watch) for watch in (False, True))
    assert at_once["failed"].why == "Dagster knows it as FAILURE"
    assert {t: v.life for t, v in at_once.items()} == {
        "failed": Life.DEAD, "alive": Life.ALIVE, "beatless": Life.DEAD, "elsewhere": Life.ALIVE,
        "suspect": Life.UNKNOWN,
    }  # fmt: skip
    assert known == at_once | {"suspect": Verdict(Life.ALIVE, "set by the test")}


def test_edges_with_dagster_s_word_are_the_same_edges(world: World, instance: dg.DagsterInstance) -> None:
    with world.open_ports(world.session().feed("orders")) as edges:
        known = with_dagster_liveness(edges, instance)
    assert isinstance(known.liveness, Informed)
    assert replace(known, liveness=edges.liveness) == edges


# -- the event log beside the ledger


def test_a_fresh_dagster_home_is_told_what_landed(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(0))
    world.land_unrecorded(in_hour(1))
    told = list(reconcile(instance, world.books(), dry_run=True))
    assert windows(instance, LANDED) == {}
    assert list(reconcile(instance, world.books())) == told
    batches, hours = told
    assert (batches.kind, batches.act, len(batches.items)) == (RepairKind.UNTOLD, "reported to Dagster", 2)
    assert hours.items == ("2024-05-01T00:00", "2024-05-01T01:00", "2024-05-01T04:00"), "the last one is quiet"
    assert list(windows(instance, LANDED)) == list(hours.items)
    assert list(reconcile(instance, world.books())) == []


def test_windows_that_only_dagster_knows_are_named(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    world.run(in_hour(1))
    assert list(reconcile(instance, world.books())) == []
    world.lake.files.clear()
    world.group.offsets.clear()
    world.land_unrecorded(in_hour(0))
    batch, window, overtold = reconcile(instance, world.books())
    assert (batch.kind, window.kind) == (RepairKind.UNTOLD, RepairKind.UNTOLD)
    assert window.items == ("2024-05-01T00:00",), "it landed again, in another ledger"
    assert overtold.kind is RepairKind.OVERTOLD
    assert overtold.text == "1 window green in Dagster and pending by the ledger, 2024-05-01T01:00"
    assert "sluice run orders --from 2024-05-01T01:00 --to 2024-05-01T02:00" in overtold.remedy[0]
    world.run(in_hour(1))
    assert list(reconcile(instance, world.books())) == []
    assert len(versions(instance, LANDED, "2024-05-01T01:00")) == 2


def test_what_a_killed_run_left_red_is_told_again(world: World, instance: dg.DagsterInstance) -> None:
    world.run()
    killed(world, instance, "2024-05-01T01:00")
    bury_dead_runs(instance, prepare_home(world.project))
    for dry_run in (True, False):
        (found,) = reconcile(instance, world.books(), dry_run=dry_run)
        assert (found.kind, found.items) == (RepairKind.UNTOLD, ("2024-05-01T01:00",))
        assert "left red" in found.text
    assert list(reconcile(instance, world.books())) == []
    assert len(set(versions(instance, LANDED, "2024-05-01T01:00"))) == 1
