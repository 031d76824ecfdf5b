"""Brokers that die, stop, come back, or lose leadership, while runs go on."""

from __future__ import annotations

import pytest

from tests.faults.field import Field

pytestmark = pytest.mark.faults


def test_broker_killed_and_restarted(field: Field) -> None:
    with field.producing():
        field.normal()
        victim = field.arena.leaders(field.topic)[0]
        field.arena.kafka.kill_broker(victim)
        field.account.did(f"broker {victim} was killed (SIGKILL): it led partition 0")
        field.run()
        field.run()
        field.arena.heal()
        field.account.did("it was started again, all replicas are in sync")
        field.recovered()
    field.proven()
