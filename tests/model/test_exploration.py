"""Sluice's own code under every schedule with few deviations: crashes, zombies, lost answers, rivals, Kafka's own
events. `protocol_model.py` has explored the design in this way; here the code must hold what it promises.

`make test` runs a part of it, the same every time; `make long-tests` thousands of schedules of each scenario, and
random walks.
"""

from __future__ import annotations

import pytest

from tests.model.explore import Explorer, Scenario, explored
from tests.model.programs import as_one, forgetful
from tests.model.scenarios import SCENARIOS, random_scenario


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_schedules_with_few_deviations(scenario: Scenario) -> None:
    explored(scenario, most=40)


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
