"""Runs that Dagster launches for `sluice ui`: canceled at each step, killed, tried again, two at once; Dagster killed.

One `sluice ui` and one feed for all: each test goes on where the one before it left them.
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

from sluice.pipelines.util.units import HOUR, show_window
from tests.checker.producers import Noting
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import Field
from tests.faults.nemeses import desk as dagster_ui
from tests.faults.nemeses.desk import Desk
from tests.faults.nemeses.engines import Process, healed, held, waiting
from tests.resources.kafka.proxy import END_TXN, FETCH, LIST_OFFSETS
from tests.resources.kafka.tools import until

pytestmark = [pytest.mark.faults, pytest.mark.spark]
BROKERS = 1
Status = dg.DagsterRunStatus
PARTITIONS, WINDOWS = 3, 2
HELD = {"planning": LIST_OFFSETS, "landing": FETCH, "committing": END_TXN}
"""What keeps a run in a step: requests that no broker sees."""
STOPS = {"publishing": ("before publish", "after publish", "after show", "before manifest")}
"""Where a run waits in a step; drawn."""


@dataclass(frozen=True)
class Stage:
    """Two feeds, of which the second has windows of hours ago, and Dagster over both."""

    orders: Field
    past: Field
    windows: tuple[str, ...]
    desk: Desk


@pytest.fixture(scope="module")
def shared_stage(lone_arena: Arena, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("dagster")
    lone_arena.heal()
    orders, past = (_feed(lone_arena, root, name) for name in ("orders", "past"))
    windows = _filled(past)
    with dagster_ui.opened(root) as desk:
        yield Stage(orders, past, windows, desk)


def _feed(arena: Arena, root: Path, name: str) -> Field:
    topic = f"dagster-{name}"
    arena.create(topic, PARTITIONS)
    made = Field(arena, root, topic, PARTITIONS, Account(name, print), name=name)
    made.feed()
    return made


def _filled(field: Field) -> tuple[str, ...]:
    """Some records in each of the windows that closed last."""
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
def test_run_canceled_in_dagster_while(stage: Stage, step: str) -> None:
    field, desk = stage.orders, stage.desk
    with field.producing():
        field.normal(1)
        with kept(stage, step) as (run, worker):
            desk.terminate(run)
            asked = time.monotonic()
            assert desk.ended(run) is Status.CANCELED, desk.log(run)
            field.account.measured("canceled_after_s", time.monotonic() - asked)
            field.account.did("Dagster says that it is canceled")
            until(lambda: not desk.left_by(worker), 60)
            field.account.did("none of its processes is left")
        field.recovered()
    field.proven()


@contextmanager
def kept(stage: Stage, step: str, **tags: str) -> Iterator[tuple[str, Process]]:
    """A run that Dagster launched and that does not leave the step, and its process."""
    field, desk = stage.orders, stage.desk
    point = random.Random(SEED).choice(STOPS.get(step, ("",)))
    if point:
        desk.stop.write_text(point)
    else:
        held(field, PARTITIONS, HELD[step])
    try:
        run = desk.launch("catch_up_orders", **tags)
        worker = desk.worker(run)
        until(lambda: desk.waits(worker) if point else waiting(field, HELD[step]) or _over(desk, run), 900)
        field.account.did(f"a run that Dagster launched is {step} {point}".strip())
        yield run, worker
    finally:
        desk.stop.unlink(missing_ok=True)
        healed(field)


def _over(desk: Desk, run: str) -> bool:
    assert desk.status(run) in (Status.STARTING, Status.STARTED), desk.log(run)
    return False


def test_run_killed_under_dagster_is_tried_again(stage: Stage) -> None:
    field, desk = stage.orders, stage.desk
    with field.producing():
        field.normal(1)
        with kept(stage, "landing", **{"dagster/max_retries": "1"}) as (run, worker):
            worker.send(signal.SIGKILL)
            field.account.did("its process was killed (SIGKILL)")
            assert desk.ended(run) is Status.FAILURE, desk.log(run)
            until(lambda: not desk.left_by(worker), 60)
            field.account.did("Dagster says that it failed; none of its processes is left")
        again = until(lambda: _children(desk, run), 120)
        assert [desk.ended(r.run_id) for r in again] == [Status.SUCCESS], desk.log(again[0].run_id)
        field.account.did("the run that Dagster launched for it succeeded")
        field.recovered()
    field.proven()


def _children(desk: Desk, run: str) -> list[dg.DagsterRun]:
    return list(desk.instance.get_runs(dg.RunsFilter(tags={"dagster/parent_run_id": run})))


def test_two_backfills_at_once(stage: Stage) -> None:
    field, desk = stage.past, stage.desk
    backfills = [desk.backfill([field.name], stage.windows[:1]) for _ in range(2)]
    field.account.did("two backfills of the same window were asked for")
    runs = [r for b in backfills for r in desk.backfilled(b)]
    assert [r.dagster_run.status for r in runs] == [Status.SUCCESS] * 2, [desk.log(r.dagster_run.run_id) for r in runs]
    times = sorted((r.start_time, r.end_time) for r in runs)
    assert all(before[1] <= after[0] for before, after in pairwise(times)), "the feed's pool lets one in at a time"
    field.account.did("two runs, one after the other, succeeded")
    field.recovered()
    field.proven()


def test_dagster_killed_with_a_run_at_work(stage: Stage) -> None:
    """The last one: it leaves no Dagster."""
    field, desk = stage.orders, stage.desk
    with field.producing():
        field.normal(1)
        with kept(stage, "landing") as (run, _):
            desk.ui.process.kill()
            for server in desk.pids.values():
                os.killpg(server, signal.SIGKILL)
            desk.processes.gone()
            field.account.did("`sluice ui`, Dagster's servers and the run were killed (SIGKILL); nothing is left")
        assert desk.status(run) is Status.STARTED, "nobody could tell Dagster"
        assert field.ended(field.start_cli()).clean
        assert desk.status(run) is Status.FAILURE
        field.account.did("the next run told Dagster, and landed what it left")
        field.recovered()
    field.proven()
