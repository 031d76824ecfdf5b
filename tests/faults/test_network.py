"""Network faults between Sluice and the brokers. Other clients are not affected."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import pytest

from sluice.pipelines.errors import KafkaUnavailable
from tests.faults.field import Field, Running
from tests.faults.nemeses import brokers, expect_clean_or_retryable, network, shorten_timeouts
from tests.resources.kafka.proxy import END_TXN, FETCH, TXN_OFFSET_COMMIT

pytestmark = pytest.mark.faults
RATE = 50
LANDING, COMMITTING = ("leader", FETCH), ("coordinator", TXN_OFFSET_COMMIT)
PHASES = pytest.mark.parametrize(("part", "key"), [LANDING, COMMITTING], ids=["landing", "committing"])


@pytest.fixture
def field(field: Field) -> Field:
    return shorten_timeouts(field)


def wait_for(running: Running, seconds: float) -> None:
    """Wait for the time, or until the run ends."""
    with suppress(subprocess.TimeoutExpired):
        running.process.wait(seconds)


@PHASES
def test_connections_to_a_broker_are_cut(field: Field, part: str, key: int) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        victim = brokers.PARTS[part](field)
        with network.hold_run_at(field, key, victim) as running, network.cut_connections(field, victim):
            wait_for(running, 3)
        expect_clean_or_retryable(field.wait_for_run(running))
        with network.cut_connections(field, victim):
            expect_clean_or_retryable(field.run())
        field.run_until_clean()
    field.verify()


@PHASES
def test_traffic_is_blocked_for_less_than_the_request_timeout(field: Field, part: str, key: int) -> None:
    """The outage is shorter than the request timeout: the run is not affected."""
    with field.run_producers(RATE):
        field.run_baseline()
        victim = brokers.PARTS[part](field)
        with network.hold_run_at(field, key, victim) as running, network.block_traffic(field, victim):
            wait_for(running, 1)
        run = field.wait_for_run(running)
        assert run.clean, run
    field.verify()


@PHASES
def test_traffic_is_blocked_for_longer_than_the_request_timeout(field: Field, part: str, key: int) -> None:
    """The outage is longer than the request timeout, and lasts until the run has ended."""
    with field.run_producers(RATE):
        field.run_baseline()
        victim = brokers.PARTS[part](field)
        with network.hold_run_at(field, key, victim) as running, network.block_traffic(field, victim):
            expect_clean_or_retryable(field.wait_for_run(running))
        field.run_until_clean()
    field.verify()


@pytest.mark.parametrize("inject", [network.cut_connections, network.block_traffic], ids=["cut", "held"])
def test_no_broker_can_be_reached(field: Field, inject: network.Fault) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        with inject(field):
            run = field.run()
            run.expect_error(KafkaUnavailable, mentions="no broker answers")
        field.run_until_clean()
    field.verify()


def test_end_of_the_commit_takes_effect_without_a_response(field: Field) -> None:
    """The offsets are committed, and the run gets no answer. It reads them back."""
    with field.run_producers(RATE):
        field.run_baseline()
        victim = brokers.PARTS["coordinator of transactions"](field)
        with network.hold_run_at(field, END_TXN, victim) as running, network.block_answers(field, victim):
            expect_clean_or_retryable(field.wait_for_run(running))
        field.run_until_clean()
    field.verify()


def test_every_response_is_delayed(field: Field) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        with network.delay_answers(field):
            run = field.run()
            assert run.clean, run
        field.run_until_clean()
    field.verify()


def test_connections_are_cut_at_random(field: Field) -> None:
    with field.run_producers(RATE):
        field.run_baseline()
        with network.cut_at_random(field):
            expect_clean_or_retryable(field.run())
            expect_clean_or_retryable(field.run())
        field.run_until_clean()
    field.verify()
