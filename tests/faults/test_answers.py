"""Brokers carry out requests, and the answers are lost: once, several times, or for the whole run."""

from __future__ import annotations

import random

import pytest

from sluice.pipelines.errors import CommitFenced, KafkaUnavailable, Unknown
from tests.faults.account import SEED
from tests.faults.field import Field
from tests.faults.kinds import Kind, apply_kind, check_letters, draw_kinds, produce_history
from tests.faults.nemeses.answers import lose_answers
from tests.resources.kafka.tools import wait_until

pytestmark = pytest.mark.faults

RATE = 40
OFTEN = 6
"""The number of lost answers of a kind within a run."""
LETTERS, _, PLAIN = draw_kinds()

READING = ["Metadata", "ListOffsets", "OffsetForLeaderEpoch", "OffsetFetch", "FindCoordinator", "Fetch"]
JOINING = ["DescribeGroups", "JoinGroup", "SyncGroup", "LeaveGroup"]
TRANSACTION = ["InitProducerId", "AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"]


def list_apis(kind: Kind) -> list[str]:
    return [*READING, *JOINING, *(["OffsetCommit"] if kind.commit == "plain" else TRANSACTION)]


@pytest.mark.parametrize("kind", [LETTERS, PLAIN], ids=["with-letters", "plain"])
def test_first_response_of_each_kind_is_lost(field: Field, kind: Kind) -> None:
    """No run fails because of it."""
    apply_kind(field, kind)
    produce_history(field)
    with field.run_producers(RATE):
        field.run_baseline(1)
        for api in list_apis(kind):
            with lose_answers(field, api, 1) as loss:
                run = field.run()
                assert run.clean, run
                assert loss.count
        field.run_until_clean()
    verify(field, kind)


@pytest.mark.parametrize("kind", [LETTERS, PLAIN], ids=["with-letters", "plain"])
def test_responses_of_each_kind_are_lost_for_a_while(field: Field, kind: Kind) -> None:
    """The run in progress retries. If it fails, Kafka was unavailable or the commit was fenced."""
    apply_kind(field, kind)
    produce_history(field)
    with field.run_producers(RATE):
        field.run_baseline(1)
        for api in list_apis(kind):
            with lose_answers(field, api) as loss:
                running = field.start()
                wait_until(lambda loss=loss, p=running.process: loss.count >= OFTEN or p.poll() is not None, 120)
                assert loss.count
            run = field.wait_for_run(running)
            if not run.clean:
                run.expect_error(KafkaUnavailable, CommitFenced)
        field.run_until_clean()
    verify(field, kind)


def test_responses_are_lost_during_a_whole_run(field: Field) -> None:
    """The run ends by itself. If it fails, the error names the outage, the fence, or the unknown outcome."""
    apply_kind(field, LETTERS)
    produce_history(field)
    draw = random.Random(SEED)
    with field.run_producers(RATE):
        field.run_baseline(1)
        for api in [draw.choice([*READING, *JOINING[:-1]]), draw.choice(TRANSACTION)]:
            with lose_answers(field, api) as loss:
                run = field.run()
                assert loss.count
                if not run.clean:
                    run.expect_error(KafkaUnavailable, CommitFenced, Unknown)
        field.run_until_clean()
    verify(field, LETTERS)


def verify(field: Field, kind: Kind) -> None:
    field.verify()
    if kind.letters:
        check_letters(field)
