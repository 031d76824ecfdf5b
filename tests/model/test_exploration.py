"""Sluice's own code under every schedule with few deviations: crashes, zombies, lost answers, concurrent runs, and
Kafka's own events. `protocol_model.py` explored the design in this way; here the code must keep the same invariants.

`make test` runs a fixed part of it; `make long-tests` runs thousands of schedules of each scenario, and random walks.
"""

from __future__ import annotations

import pytest

from tests.model.explore import Explorer, Scenario, explore_scenario
from tests.model.programs import forget_early, run_deterministically
from tests.model.scenarios import BY_NAME, SCENARIOS, make_random_scenario
from tests.model.scheduler import Outcome


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_schedules_with_few_deviations(scenario: Scenario) -> None:
    explore_scenario(scenario, max_runs=40)


def test_copy_ends_after_its_file_was_replaced_and_its_run_died() -> None:
    """The next run removes the file again."""
    with run_deterministically(), forget_early():
        explorer = Explorer(BY_NAME["again, slow copies"])
        ends = _find_copy(explorer.run_schedule(), 0)
        rival = (ends, "r2")
        appeared = _find_copy(explorer.run_schedule([rival]), ends + 1) + 1
        outcome = explorer.run_schedule([rival, (appeared, "r1 crashes")])
    assert any(line.startswith("r1 crashes before: read log/") for line in outcome.trace)
    assert outcome.broken == ""


def _find_copy(outcome: Outcome, after: int) -> int:
    return next(i for i, line in enumerate(outcome.trace) if i >= after and line.startswith("r1: the copy to data/"))


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_many_schedules(scenario: Scenario) -> None:
    explore_scenario(scenario, max_runs=5000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(500))
def test_random_walks(seed: int) -> None:
    with run_deterministically(), forget_early():
        explorer = Explorer(make_random_scenario(seed))
        for walk in range(20):
            explorer.walk(1000 * seed + walk, busy=0.15)


def test_the_same_deviations_give_the_same_run() -> None:
    scenario = next(s for s in SCENARIOS if s.name == "two runs")
    with run_deterministically(), forget_early():
        explorer = Explorer(scenario)
        first, second = (explorer.run_schedule([(20, "r2"), (40, "r1")]) for _ in range(2))
    assert first.trace == second.trace
    assert first.broken == ""
