"""Runs that Dagster launches for `sluice ui`: canceled at each step, killed, retried, two at once; Dagster killed.

All tests share one `sluice ui` and its feeds: each test continues from the previous one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.runs.run_config import catch_up_config
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import HOUR, show_window
from tests.checker.producers import Noting
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import Field
from tests.faults.nemeses import desk as dagster_ui
from tests.faults.nemeses.desk import Desk
from tests.faults.nemeses.engines import Process, count_held, hold_requests, release_requests
from tests.resources.kafka.proxy import END_TXN, FETCH, LIST_OFFSETS
from tests.resources.kafka.tools import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.spark]
BROKERS = 1
Status = dg.DagsterRunStatus
PARTITIONS, WINDOWS = 3, 2
HELD = {"planning": LIST_OFFSETS, "landing": FETCH, "committing": END_TXN}
"""The request whose holding keeps a run in a step."""
STOPS = {"publishing": ("before publish", "after publish", "after show", "before manifest")}
"""The points of a step, one of which is drawn."""


@dataclass(frozen=True)
class Stage:
    """Two feeds in one Dagster. The second has records in past windows."""

    orders: Field
    past: Field
    windows: tuple[str, ...]
    desk: Desk


@pytest.fixture(scope="module")
def shared_stage(lone_arena: Arena, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("dagster")
    lone_arena.heal()
    orders, past = (_create_feed(lone_arena, root, name) for name in ("orders", "past"))
    windows = _fill_windows(past)
    with dagster_ui.run_desk(root) as desk:
        yield Stage(orders, past, windows, desk)


def _create_feed(arena: Arena, root: Path, name: str) -> Field:
    topic = f"dagster-{name}"
    arena.create(topic, PARTITIONS)
    field = Field(arena, root, topic, PARTITIONS, Account(name, print), name=name)
    field.write_feed()
    return field


def _fill_windows(field: Field) -> tuple[str, ...]:
    """Produce records in each of the latest closed windows. Returns the windows."""
    path = field.root / "past.jsonl"
    field.notes.append(path)
    now = int(time.time() * 1000)
    starts = [now - now % HOUR - n * HOUR for n in range(WINDOWS + 1, 1, -1)]
    for start in starts:
        name = f"past-{start}"
        producer = Noting(path, name, field.arena.kafka.bootstrap, ahead_ms=start - now + 1000)
        for partition in range(field.partitions):
            producer.send(field.topic, partition, 20)
        producer.close()
    return tuple(map(show_window, starts))


@pytest.fixture
def stage(shared_stage: Stage, arena: Arena, account: Account) -> Stage:
    shared_stage.orders.account = shared_stage.past.account = account
    return shared_stage


@pytest.mark.parametrize("step", [*HELD, *STOPS])
def test_run_canceled_in_dagster(stage: Stage, step: str) -> None:
    field, desk = stage.orders, stage.desk
    with field.run_producers():
        field.run_baseline(1)
        with hold_run(stage, step) as (run, worker):
            desk.terminate(run)
            terminated = time.monotonic()
            assert desk.wait_for_run(run) is Status.CANCELED, desk.read_log(run)
            field.account.record_duration("canceled_after_s", time.monotonic() - terminated)
            field.account.log("Dagster shows the run as canceled")
            wait_until(lambda: not desk.list_remaining(worker), 60)
            field.account.log("none of its processes is left")
        field.run_until_clean()
    field.verify()


@contextmanager
def hold_run(stage: Stage, step: str, **tags: str) -> Iterator[tuple[str, Process]]:
    """Launch a run by Dagster and keep it in the step inside the block. Yields the run and its process."""
    field, desk = stage.orders, stage.desk
    point = random.Random(SEED).choice(STOPS.get(step, ("",)))
    if point:
        desk.stop_file.write_text(point)
    else:
        hold_requests(field, PARTITIONS, HELD[step])
    try:
        run = desk.launch("catch_up", catch_up_config("orders", Request(RequestKind.CATCH_UP)), **tags)
        worker = desk.find_worker(run)
        wait_until(
            lambda: desk.is_waiting(worker) if point else count_held(field, HELD[step]) or _expect_running(desk, run),
            900,
        )
        field.account.log(f"a run that Dagster launched is {step} {point}".strip())
        yield run, worker
    finally:
        desk.stop_file.unlink(missing_ok=True)
        release_requests(field)


def _expect_running(desk: Desk, run: str) -> bool:
    assert desk.get_status(run) in (Status.STARTING, Status.STARTED), desk.read_log(run)
    return False


def test_run_killed_under_dagster_is_retried(stage: Stage) -> None:
    field, desk = stage.orders, stage.desk
    with field.run_producers():
        field.run_baseline(1)
        with hold_run(stage, "landing", **{"dagster/max_retries": "1"}) as (run, worker):
            worker.send(signal.SIGKILL)
            field.account.log("its process was killed (SIGKILL)")
            assert desk.wait_for_run(run) is Status.FAILURE, desk.read_log(run)
            wait_until(lambda: not desk.list_remaining(worker), 60)
            field.account.log("Dagster shows the run as failed; none of its processes is left")
        retries = wait_until(lambda: _list_retries(desk, run), 120)
        assert [desk.wait_for_run(r.run_id) for r in retries] == [Status.SUCCESS], desk.read_log(retries[0].run_id)
        field.account.log("the run that Dagster launched for it succeeded")
        field.run_until_clean()
    field.verify()


def _list_retries(desk: Desk, run: str) -> list[dg.DagsterRun]:
    return list(desk.instance.get_runs(dg.RunsFilter(tags={"dagster/parent_run_id": run})))


def test_two_backfills_at_once(stage: Stage) -> None:
    field, desk = stage.past, stage.desk
    backfills = [desk.launch_backfill([field.name], stage.windows[:1]) for _ in range(2)]
    field.account.log("two backfills of the same window were asked for")
    runs = [r for b in backfills for r in desk.wait_for_backfill(b)]
    assert [r.dagster_run.status for r in runs] == [Status.SUCCESS] * 2, [
        desk.read_log(r.dagster_run.run_id) for r in runs
    ]
    times = sorted((r.start_time, r.end_time) for r in runs)
    assert all(before[1] <= after[0] for before, after in pairwise(times)), "the feed's pool lets one in at a time"
    field.account.log("two runs, one after the other, succeeded")
    field.run_until_clean()
    field.verify()


def test_dagster_killed_with_an_active_run(stage: Stage) -> None:
    """The last test: it leaves no Dagster."""
    field, desk = stage.orders, stage.desk
    with field.run_producers():
        field.run_baseline(1)
        with hold_run(stage, "landing") as (run, _):
            desk.ui.process.kill()
            for server in desk.pids.values():
                os.killpg(server, signal.SIGKILL)
            desk.processes.wait_until_gone()
            field.account.log("`sluice ui`, Dagster's servers and the run were killed (SIGKILL); nothing is left")
        assert desk.get_status(run) is Status.STARTED, "nobody could tell Dagster"
        assert field.wait_for_run(field.start_cli()).clean
        assert desk.get_status(run) is Status.FAILURE
        field.account.log("the next run reported the end to Dagster, and landed the pending records")
        field.run_until_clean()
    field.verify()
