"""Requests that brokers carry out, whose answers are lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.faults.field import Field

APIS = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "DescribeGroups": 15,
    "InitProducerId": 22,
    "OffsetForLeaderEpoch": 23,
    "AddPartitionsToTxn": 24,
    "AddOffsetsToTxn": 25,
    "EndTxn": 26,
    "TxnOffsetCommit": 28,
}
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class LostAnswers:
    """The loss of every broker's answers to one kind of request."""

    field: Field
    api: str
    times: int

    @property
    def count(self) -> int:
        """The number of lost answers of all brokers."""
        return sum(self.times - proxy.lose.get(APIS[self.api], 0) for proxy in self.field.arena.proxies.values())


@contextmanager
def lose_answers(field: Field, api: str, times: int = UNLIMITED) -> Iterator[LostAnswers]:
    """Drop each broker's answers to the next `times` requests of that kind, with their connections."""
    loss = LostAnswers(field, api, times)
    for proxy in field.arena.proxies.values():
        proxy.lose[APIS[api]] = times
    duration = "until further notice" if times == UNLIMITED else f"{times} times for each broker"
    field.account.log(f"answers to {api} are lost, {duration}")
    try:
        yield loss
    finally:
        count = loss.count
        for proxy in field.arena.proxies.values():
            proxy.lose.pop(APIS[api], None)
        field.account.log(f"answers to {api} come again; {count} were lost")
