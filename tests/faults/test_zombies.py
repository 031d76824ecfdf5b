"""Runs that sleep past every timeout at each of their effects while others take their place, and then go on."""

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
from tests.faults.kinds import Kind, become, each_letter_once, history, kinds
from tests.faults.runner import BOUND_MS, MACHINE, SIGNAL
from tests.resources.kafka.tools import until

pytestmark = pytest.mark.faults
BROKERS = 1

BOUND = 2_000
"""A heartbeat that stands still for so long (ms) is a dead run's."""
RATE = 40
RIVALS, ROUNDS = 3, 4
REFUSED = (PlanBusy, OwnershipLost, GroupHeld, CommitFenced)
ELSEWHERE = {MACHINE: "another boot of another machine"}
LETTERS, RAW, PLAIN = kinds()

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
"""What a run that slept there may be refused for, besides going on harmlessly."""
FENCED = (CommitFenced, GroupHeld)
LATE = (*FENCED, UsageError)
"""It slept while it sent letters, for longer than a transaction may take. It blames the letters."""


@pytest.fixture
def draw() -> random.Random:
    return random.Random(SEED)


# -- one sleeps, another takes its place


@pytest.mark.parametrize("kind", [LETTERS, PLAIN], ids=["with-letters", "plain"])
def test_stopped_while_it_lands_until_another_took_over(field: Field, kind: Kind, draw: random.Random) -> None:
    awake(field, kind)
    with field.producing(RATE):
        field.normal(1)
        for point, refusals in LANDING.items():
            slept(field, point, refusals, draw.choice([{}, ELSEWHERE]))
        field.recovered()
    proven(field, kind)


@pytest.mark.parametrize("kind", [LETTERS, RAW, PLAIN], ids=["with-letters", "raw", "plain"])
def test_stopped_while_it_commits_until_another_has_committed(field: Field, kind: Kind) -> None:
    awake(field, kind)
    with field.producing(RATE):
        field.normal(1)
        for point in committing(kind):
            slept(field, point, LATE if point.endswith("letters") else FENCED, {})
        field.recovered()
    proven(field, kind)


def test_two_sleep_and_wake_in_either_order(field: Field, draw: random.Random) -> None:
    """The second took the first one's place; a third comes after both."""
    awake(field, LETTERS)
    there = [*LANDING, *committing(LETTERS)]
    with field.producing(RATE):
        field.normal(1)
        for _ in range(4):
            first, second = draw.choice(there), draw.choice(there)
            with stopped(field, first) as one, stopped(field, second) as two:
                for zombie in draw.sample([one, two], 2):
                    woken(field, zombie)
                overtaken(field, {})
            sound(field, f"{first}, {second}")
        field.recovered()
    proven(field, LETTERS)


# -- several at once


def test_three_runs_race_on_two_machines(field: Field, draw: random.Random) -> None:
    awake(field, RAW)
    with field.producing(RATE):
        field.normal(1)
        for _ in range(ROUNDS):
            rivals = [field.start(environment=draw.choice([{}, ELSEWHERE])) for _ in range(RIVALS)]
            for ran in [field.ended(rival) for rival in rivals]:
                harmless(ran)
            sound(field, "of several runs at once")
        field.recovered()
    proven(field, RAW)


def test_killed_on_another_machine_its_batch_is_free_once_its_heartbeat_stands_still(field: Field) -> None:
    awake(field, RAW)
    with field.producing(RATE):
        field.normal(1)
        for point in ("after plan", "before publish"):
            killed = field.ended(field.start(point, ELSEWHERE), about=f"a run elsewhere ({point})")
            assert killed.code == -signal.SIGKILL
            # On a busy machine a run that waits for so short a time has waited before it first looks.
            field.ended(field.start(environment={BOUND_MS: str(600_000)})).stopped_by(PlanBusy)
            overtaken(field, {})
            sound(field, point)
        field.recovered()
    proven(field, RAW)


# -- steps


def awake(field: Field, kind: Kind) -> None:
    become(field, kind)
    history(field)
    field.environment |= {BOUND_MS: str(BOUND)}


def committing(kind: Kind) -> list[str]:
    if kind.commit == "plain":
        return ["before intent", *points.both("plain"), "before record"]
    letters = ["after letters"] if kind.letters else []
    ends = ["after begin", "after offsets", "after end", "before record"]
    return ["before init", "before intent", "before begin", *letters, *ends]


def slept(field: Field, point: str, refusals: tuple[type, ...], environment: dict[str, str]) -> None:
    """A run sleeps there until another has landed and committed; then it wakes, and what it does is harmless."""
    with stopped(field, point) as zombie:
        overtaken(field, environment)
        woken(field, zombie, refusals)
    sound(field, point)


@contextmanager
def stopped(field: Field, point: str) -> Iterator[Running]:
    """A run that gets there, and stops. It does not outlive the block."""
    for _ in range(TRIES):
        running = field.start(point, {SIGNAL: "SIGSTOP"})
        until(lambda running=running: running.process.poll() is not None or running.asleep, 120)
        if running.process.poll() is None:
            break
        harmless(field.ended(running, about=f"a run ({point})"))
    else:
        raise AssertionError(f"no run got to the point `{point}`")
    field.account.did(f"a run sleeps {point}")
    try:
        yield running
    finally:
        running.end()


def overtaken(field: Field, environment: dict[str, str]) -> None:
    """Runs until one is clean; those before it say clearly what they wait for."""
    for _ in range(TRIES):
        ran = field.ended(field.start(environment=environment))
        if ran.clean:
            return
        harmless(ran)
    raise AssertionError(f"{TRIES} runs, and none took the place of the one that sleeps; the last one {ran.told}")


def woken(field: Field, zombie: Running, refusals: tuple[type, ...] = REFUSED) -> None:
    zombie.process.send_signal(signal.SIGCONT)
    harmless(field.ended(zombie, about="the one that slept"), refusals)


def harmless(ran: Run, refusals: tuple[type, ...] = REFUSED) -> None:
    """It ended well, or says clearly why it did not."""
    if not ran.clean:
        ran.stopped_by(*refusals)


def sound(field: Field, where: str) -> None:
    """The lake by itself breaks no invariant."""
    verdict = check(field.folder, Evidence())
    assert verdict.holds, f"after a sleep {where}: {verdict}"


def proven(field: Field, kind: Kind) -> None:
    field.proven()
    if kind.letters:
        each_letter_once(field)
