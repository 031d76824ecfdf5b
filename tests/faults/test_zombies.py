"""Runs that sleep past every timeout at each of their effects while others take over, and then continue."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sluice.pipelines.errors import CommitFenced, GroupHeld, OwnershipLost, PlanBusy, UsageError
from tests.checker.facts import Evidence
from tests.checker.invariants import check
from tests.faults import points
from tests.faults.account import SEED
from tests.faults.field import TRIES, Field, Run, Running
from tests.faults.kinds import Kind, apply_kind, check_letters, draw_kinds, produce_history
from tests.faults.runner import BOUND_MS, MACHINE, SIGNAL
from tests.resources.kafka.tools import wait_until

pytestmark = pytest.mark.faults
BROKERS = 1

BOUND = 2_000
"""A run whose heartbeat stands still for this time (ms) counts as dead."""
RATE = 40
RIVALS, ROUNDS = 3, 4
REFUSED = (PlanBusy, OwnershipLost, GroupHeld, CommitFenced)
ELSEWHERE = {MACHINE: "another boot of another machine"}
LETTERS, RAW, PLAIN = draw_kinds()

LANDING = {
    "before plan": (),
    "after plan": (OwnershipLost,),
    "before stage": (OwnershipLost,),
    "after receipt": (OwnershipLost,),
    "before publish": (OwnershipLost,),
    "after publish": (CommitFenced,),
    "before show": (CommitFenced,),
    "after show 2": (CommitFenced,),
    "before clean": (CommitFenced,),
}
"""The errors that a run may get after a sleep at the point, if it does not go on harmlessly."""
FENCED = (CommitFenced, GroupHeld)
LATE = (*FENCED, UsageError)
"""A sleep longer than the transaction timeout while sending letters, which the error blames."""


@pytest.fixture
def draw() -> random.Random:
    return random.Random(SEED)


# -- one sleeps, another takes over


@pytest.mark.parametrize("kind", [LETTERS, PLAIN], ids=["with-letters", "plain"])
def test_run_stopped_while_landing_until_another_run_took_over(field: Field, kind: Kind, draw: random.Random) -> None:
    prepare(field, kind)
    with field.run_producers(RATE):
        field.run_baseline(1)
        for point, refusals in LANDING.items():
            sleep_at(field, point, refusals, draw.choice([{}, ELSEWHERE]))
        field.run_until_clean()
    verify(field, kind)


@pytest.mark.parametrize("kind", [LETTERS, RAW, PLAIN], ids=["with-letters", "raw", "plain"])
def test_run_stopped_while_committing_until_another_run_committed(field: Field, kind: Kind) -> None:
    prepare(field, kind)
    with field.run_producers(RATE):
        field.run_baseline(1)
        for point in list_committing_points(kind):
            sleep_at(field, point, LATE if point.endswith("letters") else FENCED, {})
        field.run_until_clean()
    verify(field, kind)


def test_two_stopped_runs_continue_in_either_order(field: Field, draw: random.Random) -> None:
    """The second takes over from the first, a third follows both."""
    prepare(field, LETTERS)
    all_points = [*LANDING, *list_committing_points(LETTERS)]
    with field.run_producers(RATE):
        field.run_baseline(1)
        for _ in range(4):
            first, second = draw.choice(all_points), draw.choice(all_points)
            with stop_at(field, first) as first_run, stop_at(field, second) as second_run:
                for zombie in draw.sample([first_run, second_run], 2):
                    resume(field, zombie)
                take_over(field, {})
            check_lake(field, f"{first}, {second}")
        field.run_until_clean()
    verify(field, LETTERS)


# -- several at once


def test_three_runs_race_on_two_machines(field: Field, draw: random.Random) -> None:
    prepare(field, RAW)
    with field.run_producers(RATE):
        field.run_baseline(1)
        for _ in range(ROUNDS):
            rivals = [field.start(environment=draw.choice([{}, ELSEWHERE])) for _ in range(RIVALS)]
            for run in [field.wait_for_run(rival) for rival in rivals]:
                expect_harmless(run)
            check_lake(field, "of several runs at once")
        field.run_until_clean()
    verify(field, RAW)


def test_batch_of_a_run_killed_elsewhere_is_free_once_heartbeat_stops(field: Field) -> None:
    prepare(field, RAW)
    with field.run_producers(RATE):
        field.run_baseline(1)
        for point in ("after plan", "before publish"):
            killed = field.wait_for_run(field.start(point, ELSEWHERE), about=f"a run elsewhere ({point})")
            assert killed.code == -signal.SIGKILL
            # On a busy machine a short wait would be over before the run first checks the heartbeat.
            field.wait_for_run(field.start(environment={BOUND_MS: str(600_000)})).expect_error(PlanBusy)
            take_over(field, {})
            check_lake(field, point)
        field.run_until_clean()
    verify(field, RAW)


# -- steps


def prepare(field: Field, kind: Kind) -> None:
    apply_kind(field, kind)
    produce_history(field)
    field.environment |= {BOUND_MS: str(BOUND)}


def list_committing_points(kind: Kind) -> list[str]:
    if kind.commit == "plain":
        return ["before intent", *points.list_points("plain"), "before record"]
    letters = ["after letters"] if kind.letters else []
    ends = ["after begin", "after offsets", "after end", "before record"]
    return ["before init", "before intent", "before begin", *letters, *ends]


def sleep_at(field: Field, point: str, refusals: tuple[type, ...], environment: dict[str, str]) -> None:
    """Let a run sleep at the point until another has landed and committed. Then it wakes and must do no harm."""
    with stop_at(field, point) as zombie:
        take_over(field, environment)
        resume(field, zombie, refusals)
    check_lake(field, point)


@contextmanager
def stop_at(field: Field, point: str) -> Iterator[Running]:
    """Start a run that stops at the point, and kill it at the end of the block."""
    for _ in range(TRIES):
        running = field.start(point, {SIGNAL: "SIGSTOP"})
        wait_until(lambda running=running: running.process.poll() is not None or running.is_stopped, 120)
        if running.process.poll() is None:
            break
        expect_harmless(field.wait_for_run(running, about=f"a run ({point})"))
    else:
        raise AssertionError(f"no run got to the point `{point}`")
    field.account.log(f"a run sleeps {point}")
    try:
        yield running
    finally:
        running.end()


def take_over(field: Field, environment: dict[str, str]) -> None:
    """Run until a run is clean. Runs before it may only fail with expected errors."""
    for _ in range(TRIES):
        run = field.wait_for_run(field.start(environment=environment))
        if run.clean:
            return
        expect_harmless(run)
    raise AssertionError(f"{TRIES} runs, and none took the place of the one that sleeps; the last one {run.summary}")


def resume(field: Field, zombie: Running, refusals: tuple[type, ...] = REFUSED) -> None:
    zombie.process.send_signal(signal.SIGCONT)
    expect_harmless(field.wait_for_run(zombie, about="the one that slept"), refusals)


def expect_harmless(run: Run, refusals: tuple[type, ...] = REFUSED) -> None:
    """Assert that a run is clean or failed with one of the errors."""
    if not run.clean:
        run.expect_error(*refusals)


def check_lake(field: Field, where: str) -> None:
    """Assert that the lake alone breaks no invariant."""
    verdict = check(field.folder, Evidence())
    assert verdict.holds, f"after a sleep {where}: {verdict}"


def verify(field: Field, kind: Kind) -> None:
    field.verify()
    if kind.letters:
        check_letters(field)
