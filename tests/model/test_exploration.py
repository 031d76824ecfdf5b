"""Sluice's own code under every schedule with few deviations: crashes, zombies, lost answers, rivals, Kafka's own
events. `protocol_model.py` has explored the design in this way; here the code must hold what it promises.

`make test` runs a part of it, the same every time; `make long-tests` thousands of schedules of each scenario, and
random walks.
"""

from __future__ import annotations

import pytest

from tests.model.explore import Explorer, Scenario, explored
from tests.model.programs import as_one, forgetful
from tests.model.scenarios import BY_NAME, SCENARIOS, random_scenario
from tests.model.scheduler import Ran


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_schedules_with_few_deviations(scenario: Scenario) -> None:
    explored(scenario, most=40)


def test_a_copy_ends_after_its_file_was_replaced_and_its_run_dies() -> None:
    """The next run hides the file again."""
    with as_one(), forgetful():
        explorer = Explorer(BY_NAME["again, slow copies"])
        ends = _find_copy(explorer.one(), 0)
        rival = (ends, "r2")
        appeared = _find_copy(explorer.one([rival]), ends + 1) + 1
        ran = explorer.one([rival, (appeared, "r1 crashes")])
    assert any(line.startswith("r1 crashes before: read log/") for line in ran.trace)
    assert ran.broken == ""


def _find_copy(ran: Ran, after: int) -> int:
    return next(i for i, line in enumerate(ran.trace) if i >= after and line.startswith("r1: the copy to data/"))


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_many_schedules(scenario: Scenario) -> None:
    explored(scenario, most=5000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(500))
def test_random_walks(seed: int) -> None:
    with as_one(), forgetful():
        explorer = Explorer(random_scenario(seed))
        for walk in range(20):
            explorer.walk(1000 * seed + walk, busy=0.15)


def test_the_same_deviations_give_the_same_run() -> None:
    scenario = next(s for s in SCENARIOS if s.name == "two runs")
    with as_one(), forgetful():
        explorer = Explorer(scenario)
        first, second = (explorer.one([(20, "r2"), (40, "r1")]) for _ in range(2))
    assert first.trace == second.trace
    assert first.broken == ""
