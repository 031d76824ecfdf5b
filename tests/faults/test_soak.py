"""Random combinations of faults for a given time: `make long-tests MINUTES=30`.

An episode is a feed of a random kind. In each of its rounds, up to three faults occur at once while up to three runs
work in parallel, some of which are killed at a random point. Then all faults are healed, and the checker decides.
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
from tests.faults.kinds import Kind, apply_kind, check_letters, produce_history
from tests.faults.nemeses import answers, brokers, groups, network

pytestmark = pytest.mark.soak

MINUTES = float(os.environ.get("SLUICE_SOAK_MINUTES") or 30)
ROUNDS, AT_ONCE = (3, 6), 3
Draw = random.Random
Nemesis = Callable[[Field, Draw], AbstractContextManager[object]]


def _draw_broker(field: Field, draw: Draw) -> int:
    return draw.choice(field.arena.kafka.broker_ids)


@contextmanager
def _move_leaders(field: Field, draw: Draw) -> Iterator[None]:
    brokers.move_leaders(field)
    yield


def _lose_answers(field: Field, draw: Draw) -> AbstractContextManager[object]:
    return answers.lose_answers(field, draw.choice([*answers.APIS]), draw.randint(1, 4))


# At most one of each group, in this order: a foreign consumer must join before faults begin, and with two brokers down
# nothing heals.
NEMESES: tuple[tuple[Nemesis, ...], ...] = (
    (lambda field, draw: groups.join_group(field),),
    (
        lambda field, draw: brokers.kill_brokers(field, _draw_broker(field, draw)),
        lambda field, draw: brokers.freeze_brokers(field, _draw_broker(field, draw)),
        _move_leaders,
    ),
    (
        lambda field, draw: network.cut_connections(field, _draw_broker(field, draw)),
        lambda field, draw: network.block_traffic(field, _draw_broker(field, draw)),
        lambda field, draw: network.block_answers(field, _draw_broker(field, draw)),
        lambda field, draw: network.delay_answers(field, seconds=draw.random() / 4),
        lambda field, draw: network.cut_at_random(field),
    ),
    (_lose_answers,),
)


def test_random_combinations(arena: Arena, account: Account, tmp_path: Path) -> None:
    draw, end = random.Random(SEED), time.monotonic() + MINUTES * 60
    for number in itertools.count(1):
        report = Account("soak", account.write_line)
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = "failed"
        try:
            play_episode(_create_field(arena, folder, report, number), draw)
            outcome = "passed"
        finally:
            report.record_duration("took_s", report.elapsed)
            report.save(outcome)
        if time.monotonic() > end:
            account.log(f"{number} episodes")
            return
        arena.heal()


def _create_field(arena: Arena, folder: Path, account: Account, number: int) -> Field:
    topic = f"soak-{SEED}-{number}"
    account.log(f"episode {number}")
    arena.create(topic, 3, first=number)
    return Field(arena, folder, topic, 3, account)


def play_episode(field: Field, draw: Draw) -> None:
    kind = _draw_kind(draw)
    apply_kind(field, kind)
    kafka = json.loads(field.settings["kafka"]) | {"request_timeout_ms": 5000, "bootstrap_timeout_ms": 4000}
    field.settings["kafka"] = json.dumps(kafka)
    produce_history(field)
    with field.run_producers(100):
        field.run_baseline(1)
        for _ in range(draw.randint(*ROUNDS)):
            _play_round(field, draw)
        field.arena.heal()
        field.run_until_clean()
    field.verify()
    if kind.letters:
        check_letters(field)


def _draw_kind(draw: Draw) -> Kind:
    typed, commit = draw.random() < 0.6, draw.choice(["transactional", "transactional", "plain"])
    letters = typed and commit == "transactional" and draw.random() < 0.7
    publish, layout = draw.choice(["by_partition", "all_or_nothing"]), draw.choice(["window", "record_time"])
    return Kind(commit, typed, letters, publish, layout)


def _play_round(field: Field, draw: Draw) -> None:
    """Run under faults. Each run must end cleanly, with an error, or killed."""
    with ExitStack() as stack:
        for group in sorted(draw.sample(range(len(NEMESES)), draw.randint(1, 3))):
            stack.enter_context(draw.choice(NEMESES[group])(field, draw))
        runs = [field.start(draw.choice([*points.NAMES, *[""] * 20])) for _ in range(draw.randint(1, AT_ONCE))]
        for running in runs:
            run = field.wait_for_run(running)
            assert run.code in (0, 1, -9), run
            assert "Traceback" not in run.stderr, run.stderr
