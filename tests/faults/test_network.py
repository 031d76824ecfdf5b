"""The network between Sluice and the brokers fails, for everybody else all is well."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import pytest

from sluice.pipelines.errors import KafkaUnavailable
from tests.faults.field import Field, Running
from tests.faults.nemeses import brokers, endured, hasty, network
from tests.resources.kafka.proxy import END_TXN, FETCH, TXN_OFFSET_COMMIT

pytestmark = pytest.mark.faults
RATE = 50
LANDING, COMMITTING = ("leader", FETCH), ("coordinator", TXN_OFFSET_COMMIT)
PHASES = pytest.mark.parametrize(("part", "key"), [LANDING, COMMITTING], ids=["landing", "committing"])


@pytest.fixture
def field(field: Field) -> Field:
    return hasty(field)


def goes_on(running: Running, seconds: float) -> None:
    """So long at least, unless it ends before."""
    with suppress(subprocess.TimeoutExpired):
        running.process.wait(seconds)


@PHASES
def test_cut_off_from(field: Field, part: str, key: int) -> None:
    with field.producing(RATE):
        field.normal()
        away = brokers.PARTS[part](field)
        with network.caught(field, key, away) as running, network.cut(field, away):
            goes_on(running, 3)
        endured(field.ended(running))
        with network.cut(field, away):
            endured(field.run())
        field.recovered()
    field.proven()


@PHASES
def test_nothing_passes_for_a_while(field: Field, part: str, key: int) -> None:
    """For less than a request may take: the run goes on as if nothing had been."""
    with field.producing(RATE):
        field.normal()
        away = brokers.PARTS[part](field)
        with network.caught(field, key, away) as running, network.held(field, away):
            goes_on(running, 1)
        ran = field.ended(running)
        assert ran.clean, ran
    field.proven()


@PHASES
def test_nothing_passes_for_long(field: Field, part: str, key: int) -> None:
    """For longer than a request may take, until the run has ended, or found a way around."""
    with field.producing(RATE):
        field.normal()
        away = brokers.PARTS[part](field)
        with network.caught(field, key, away) as running, network.held(field, away):
            endured(field.ended(running))
        field.recovered()
    field.proven()


@pytest.mark.parametrize("how", [network.cut, network.held], ids=["cut", "held"])
def test_no_broker_can_be_reached(field: Field, how: network.Fault) -> None:
    with field.producing(RATE):
        field.normal()
        with how(field):
            ran = field.run()
            ran.stopped_by(KafkaUnavailable, says="no broker answers")
        field.recovered()
    field.proven()


def test_the_end_of_the_commit_is_carried_out_and_not_answered(field: Field) -> None:
    """One way only: the offsets are committed, and nobody tells the run; it reads them back."""
    with field.producing(RATE):
        field.normal()
        away = brokers.PARTS["coordinator of transactions"](field)
        with network.caught(field, END_TXN, away) as running, network.mute(field, away):
            endured(field.ended(running))
        field.recovered()
    field.proven()


def test_every_answer_is_late(field: Field) -> None:
    with field.producing(RATE):
        field.normal()
        with network.slow(field):
            ran = field.run()
            assert ran.clean, ran
        field.recovered()
    field.proven()


def test_connections_come_and_go(field: Field) -> None:
    with field.producing(RATE):
        field.normal()
        with network.flapping(field):
            endured(field.run())
            endured(field.run())
        field.recovered()
    field.proven()
