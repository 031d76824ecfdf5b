"""Brokers that die, stop, come back, or lose leadership during runs."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sluice.pipelines.errors import KafkaUnavailable
from tests.faults.field import Field
from tests.faults.nemeses import brokers, expect_clean_or_retryable, network, shorten_timeouts
from tests.resources.kafka.proxy import END_TXN, FETCH, JOIN_GROUP, TXN_OFFSET_COMMIT

pytestmark = pytest.mark.faults
RATE = 50


@pytest.fixture
def field(field: Field) -> Field:
    return shorten_timeouts(field)


@pytest.mark.parametrize("part", brokers.PARTS)
def test_broker_killed_and_restarted(field: Field, part: str) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        victim = brokers.PARTS[part](field)
        field.account.log(f"broker {victim} is the {part}")
        with brokers.kill_brokers(field, victim):
            expect_clean_or_retryable(field.run())
        field.run_until_clean()
    field.verify()


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
def test_broker_killed(field: Field, part: str, key: int) -> None:
    """The broker dies before it receives the request. The run continues with another broker or fails with an error."""
    with field.run_producers(RATE):
        field.run_baseline()
        victim = brokers.PARTS[part](field)
        with ExitStack() as stack:
            with network.hold_run_at(field, key, victim) as running:
                stack.enter_context(brokers.kill_brokers(field, victim))
            expect_clean_or_retryable(field.wait_for_run(running))
        field.run_until_clean()
    field.verify()


def test_brokers_restarted_one_after_the_other(field: Field) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        for _ in brokers.restart_in_turn(field):
            expect_clean_or_retryable(field.run())
        field.run_until_clean()
    field.verify()


def test_broker_stopped_for_longer_than_its_session(field: Field) -> None:
    """When the broker continues, it still assumes that it leads."""
    with field.run_producers(RATE):
        field.run_baseline()
        victim = field.arena.find_leaders(field.topic)[0]
        with network.hold_run_at(field, FETCH, victim) as running, brokers.freeze_brokers(field, victim):
            field.arena.proxies[victim].heal()
            brokers.wait_until_deposed(field, victim)
            expect_clean_or_retryable(field.wait_for_run(running))
        field.run_until_clean()
    field.verify()


def test_leaders_moved_during_a_read(field: Field) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        with network.hold_run_at(field, FETCH) as running:
            brokers.move_leaders(field)
        run = field.wait_for_run(running)
        assert run.clean, run
        field.run_until_clean()
    field.verify()


def test_most_brokers_killed(field: Field) -> None:
    """Producers that need two in-sync replicas block, and some partitions have no leader. Runs fail with an error."""
    with field.run_producers(RATE):
        field.run_baseline()
        victim = brokers.draw_broker(field)
        others = [b for b in field.arena.kafka.broker_ids if b != victim]
        with brokers.kill_brokers(field, *others):
            field.run().expect_error(KafkaUnavailable, mentions="broker ")
        field.arena.heal()
        field.run_until_clean()
    field.verify()


def test_all_brokers_killed_during_a_run(field: Field) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        with ExitStack() as stack:
            with network.hold_run_at(field, FETCH) as running:
                stack.enter_context(brokers.kill_brokers(field, *field.arena.kafka.broker_ids))
            stack.close()
            expect_clean_or_retryable(field.wait_for_run(running))
        field.arena.heal()
        field.run_until_clean()
    field.verify()
