"""Sluice's own code under every schedule with few deviations: crashes, zombies, lost answers, rivals, Kafka's own
events. `protocol_model.py` has explored the design in this way; here the code must hold what it promises.
"""

from __future__ import annotations

import pytest

from tests.model.explore import Scenario, explored

RUNS = Scenario("one run", (("catch",),))
RIVALS = Scenario("two runs", (("catch",), ("catch",)), budgets={"crash": 1, "append": 1})


@pytest.mark.parametrize("scenario", [RUNS, RIVALS], ids=lambda s: s.name)
def test_every_schedule_holds(scenario: Scenario) -> None:
    explored(scenario, most=400)
