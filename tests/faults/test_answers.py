"""Brokers do what runs ask them for, and the answer is lost: once, often, or for as long as a run has patience."""

from __future__ import annotations

import random

import pytest

from sluice.pipelines.errors import CommitFenced, KafkaUnavailable, Unknown
from tests.faults.account import SEED
from tests.faults.field import Field
from tests.faults.kinds import Kind, become, each_letter_once, history, kinds
from tests.faults.nemeses.answers import answers_lost
from tests.resources.kafka.tools import until

pytestmark = pytest.mark.faults

RATE = 40
OFTEN = 6
"""Answers of a kind that are lost before they come again, in the midst of a run."""
LETTERS, _, PLAIN = kinds()

READING = ["Metadata", "ListOffsets", "OffsetForLeaderEpoch", "OffsetFetch", "FindCoordinator", "Fetch"]
JOINING = ["DescribeGroups", "JoinGroup", "SyncGroup", "LeaveGroup"]
TRANSACTION = ["InitProducerId", "AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"]


def apis(kind: Kind) -> list[str]:
    return [*READING, *JOINING, *(["OffsetCommit"] if kind.commit == "plain" else TRANSACTION)]


@pytest.mark.parametrize("kind", [LETTERS, PLAIN], ids=["with-letters", "plain"])
def test_the_first_answer_of_each_kind_is_lost(field: Field, kind: Kind) -> None:
    """No run fails for it."""
    become(field, kind)
    history(field)
    with field.producing(RATE):
        field.normal(1)
        for api in apis(kind):
            with answers_lost(field, api, 1) as losing:
                ran = field.run()
                assert ran.clean, ran
                assert losing.lost
        field.recovered()
    proven(field, kind)


@pytest.mark.parametrize("kind", [LETTERS, PLAIN], ids=["with-letters", "plain"])
def test_answers_of_each_kind_are_lost_for_a_while(field: Field, kind: Kind) -> None:
    """The run that was under way has the patience."""
    become(field, kind)
    history(field)
    with field.producing(RATE):
        field.normal(1)
        for api in apis(kind):
            with answers_lost(field, api) as losing:
                running = field.start()
                until(lambda losing=losing, p=running.process: losing.lost >= OFTEN or p.poll() is not None, 120)
                assert losing.lost
            ran = field.ended(running)
            if not ran.clean:
                ran.stopped_by(KafkaUnavailable, CommitFenced)
        field.recovered()
    proven(field, kind)


def test_answers_are_lost_for_as_long_as_a_run_asks(field: Field) -> None:
    """It ends by itself, and says what it does not know."""
    become(field, LETTERS)
    history(field)
    draw = random.Random(SEED)
    with field.producing(RATE):
        field.normal(1)
        for api in [draw.choice([*READING, *JOINING[:-1]]), draw.choice(TRANSACTION)]:
            with answers_lost(field, api) as losing:
                ran = field.run()
                assert losing.lost
                if not ran.clean:
                    ran.stopped_by(KafkaUnavailable, CommitFenced, Unknown)
        field.recovered()
    proven(field, LETTERS)


def proven(field: Field, kind: Kind) -> None:
    field.proven()
    if kind.letters:
        each_letter_once(field)
