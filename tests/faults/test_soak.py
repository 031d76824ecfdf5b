"""Random combinations of faults, for as long as one likes: `make long-tests MINUTES=30`.

An episode is a feed of a random kind under fire: in each of its rounds up to three things go wrong at once, while up to
three runs work side by side, some of which are killed at a random point. Then all is healed, and the checker decides.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults import points
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena
from tests.faults.field import Field
from tests.faults.kinds import Kind, become, each_letter_once, history
from tests.faults.nemeses import answers, brokers, groups, network

pytestmark = pytest.mark.soak

MINUTES = float(os.environ.get("SLUICE_SOAK_MINUTES") or 30)
ROUNDS, AT_ONCE = (3, 6), 3
Draw = random.Random
Nemesis = Callable[[Field, Draw], AbstractContextManager[object]]


def _one(field: Field, draw: Draw) -> int:
    return draw.choice(field.arena.kafka.broker_ids)


@contextmanager
def _moved(field: Field, draw: Draw) -> Iterator[None]:
    brokers.leaders_moved(field)
    yield


def _lost(field: Field, draw: Draw) -> AbstractContextManager[object]:
    return answers.answers_lost(field, draw.choice([*answers.APIS]), draw.randint(1, 4))


# Of each group one at most, in this order: a stranger has to get in first, and two brokers away would heal nobody.
NEMESES: tuple[tuple[Nemesis, ...], ...] = (
    (lambda field, draw: groups.joined(field),),
    (
        lambda field, draw: brokers.killed(field, _one(field, draw)),
        lambda field, draw: brokers.stopped(field, _one(field, draw)),
        _moved,
    ),
    (
        lambda field, draw: network.cut(field, _one(field, draw)),
        lambda field, draw: network.held(field, _one(field, draw)),
        lambda field, draw: network.mute(field, _one(field, draw)),
        lambda field, draw: network.slow(field, seconds=draw.random() / 4),
        lambda field, draw: network.flapping(field),
    ),
    (_lost,),
)


def test_random_combinations(arena: Arena, account: Account, tmp_path: Path) -> None:
    draw, end = random.Random(SEED), time.monotonic() + MINUTES * 60
    for number in itertools.count(1):
        told = Account("soak", account.tell)
        place = tmp_path / str(number)
        place.mkdir()
        outcome = "failed"
        try:
            episode(_field(arena, place, told, number), draw)
            outcome = "passed"
        finally:
            told.measured("took_s", told.elapsed)
            told.keep(outcome)
        if time.monotonic() > end:
            account.did(f"{number} episodes")
            return
        arena.heal()


def _field(arena: Arena, place: Path, account: Account, number: int) -> Field:
    topic = f"soak-{SEED}-{number}"
    account.did(f"episode {number}")
    arena.create(topic, 3, first=number)
    return Field(arena, place, topic, 3, account)


def episode(field: Field, draw: Draw) -> None:
    kind = _kind(draw)
    become(field, kind)
    kafka = json.loads(field.settings["kafka"]) | {"request_timeout_ms": 5000, "bootstrap_timeout_ms": 4000}
    field.settings["kafka"] = json.dumps(kafka)
    history(field)
    with field.producing(100):
        field.normal(1)
        for _ in range(draw.randint(*ROUNDS)):
            _round(field, draw)
        field.arena.heal()
        field.recovered()
    field.proven()
    if kind.letters:
        each_letter_once(field)


def _kind(draw: Draw) -> Kind:
    typed, commit = draw.random() < 0.6, draw.choice(["transactional", "transactional", "plain"])
    letters = typed and commit == "transactional" and draw.random() < 0.7
    publish, layout = draw.choice(["by_partition", "all_or_nothing"]), draw.choice(["window", "record_time"])
    return Kind(commit, typed, letters, publish, layout)


def _round(field: Field, draw: Draw) -> None:
    """Things go wrong, runs go on, and end in one of the ways in which runs may end."""
    with ExitStack() as wrong:
        for group in sorted(draw.sample(range(len(NEMESES)), draw.randint(1, 3))):
            wrong.enter_context(draw.choice(NEMESES[group])(field, draw))
        begun = [field.start(draw.choice([*points.NAMES, *[""] * 20])) for _ in range(draw.randint(1, AT_ONCE))]
        for running in begun:
            ran = field.ended(running)
            assert ran.code in (0, 1, -9), ran
            assert "Traceback" not in ran.noise, ran.noise
