"""Brokers that die, stop, come back, or lose leadership, while runs go on."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sluice.pipelines.errors import KafkaUnavailable
from tests.faults.field import Field
from tests.faults.nemeses import brokers, endured, hasty, network
from tests.resources.kafka.proxy import END_TXN, FETCH, JOIN_GROUP, TXN_OFFSET_COMMIT

pytestmark = pytest.mark.faults
RATE = 50


@pytest.fixture
def field(field: Field) -> Field:
    return hasty(field)


@pytest.mark.parametrize("part", brokers.PARTS)
def test_broker_killed_and_restarted(field: Field, part: str) -> None:
    with field.producing(RATE):
        field.normal()
        victim = brokers.PARTS[part](field)
        field.account.did(f"broker {victim} is the {part}")
        with brokers.killed(field, victim):
            endured(field.run())
        field.recovered()
    field.proven()


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("leader", FETCH),
        ("coordinator", JOIN_GROUP),
        ("coordinator", TXN_OFFSET_COMMIT),
        ("coordinator of transactions", END_TXN),
    ],
    ids=["fetch", "join", "offsets", "end"],
)
def test_broker_killed_in_the_midst_of(field: Field, part: str, key: int) -> None:
    """It dies before it sees the request; the run goes on with another, or says what is wrong."""
    with field.producing(RATE):
        field.normal()
        victim = brokers.PARTS[part](field)
        with ExitStack() as stack:
            with network.caught(field, key, victim) as running:
                stack.enter_context(brokers.killed(field, victim))
            endured(field.ended(running))
        field.recovered()
    field.proven()


def test_brokers_restarted_one_after_the_other(field: Field) -> None:
    with field.producing(RATE):
        field.normal()
        for _ in brokers.bounced(field):
            endured(field.run())
        field.recovered()
    field.proven()


def test_broker_stopped_for_longer_than_its_session(field: Field) -> None:
    """It believes that it still leads when it goes on."""
    with field.producing(RATE):
        field.normal()
        victim = field.arena.leaders(field.topic)[0]
        with network.caught(field, FETCH, victim) as running, brokers.stopped(field, victim):
            field.arena.proxies[victim].heal()
            brokers.deposed(field, victim)
            endured(field.ended(running))
        field.recovered()
    field.proven()


def test_leaders_moved_in_the_midst_of_a_read(field: Field) -> None:
    with field.producing(RATE):
        field.normal()
        with network.caught(field, FETCH) as running:
            brokers.leaders_moved(field)
        ran = field.ended(running)
        assert ran.clean, ran
        field.recovered()
    field.proven()


def test_most_brokers_killed(field: Field) -> None:
    """Producers that ask for two replicas in sync are blocked, nobody leads some partitions: runs say so."""
    with field.producing(RATE):
        field.normal()
        victim = brokers.drawn_broker(field)
        others = [b for b in field.arena.kafka.broker_ids if b != victim]
        with brokers.killed(field, *others):
            field.run().stopped_by(KafkaUnavailable, says="broker ")
        field.arena.heal()
        field.recovered()
    field.proven()


def test_all_brokers_killed_under_a_run(field: Field) -> None:
    with field.producing(RATE):
        field.normal()
        with ExitStack() as stack:
            with network.caught(field, FETCH) as running:
                stack.enter_context(brokers.killed(field, *field.arena.kafka.broker_ids))
            stack.close()
            endured(field.ended(running))
        field.arena.heal()
        field.recovered()
    field.proven()
