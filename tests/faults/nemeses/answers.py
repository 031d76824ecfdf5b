"""Requests that brokers carry out, and whose answers nobody gets."""

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
FOR_LONG = 1 << 30


@dataclass(frozen=True)
class Losing:
    """What is being lost: answers of every broker to one kind of request."""

    field: Field
    api: str
    times: int

    @property
    def lost(self) -> int:
        """How many by now, of all brokers."""
        return sum(self.times - proxy.lose.get(APIS[self.api], 0) for proxy in self.field.arena.proxies.values())


@contextmanager
def answers_lost(field: Field, api: str, times: int = FOR_LONG) -> Iterator[Losing]:
    """Each broker's answers to the next requests of that kind are lost, and the connections that they were for."""
    losing = Losing(field, api, times)
    for proxy in field.arena.proxies.values():
        proxy.lose[APIS[api]] = times
    often = "until further notice" if times == FOR_LONG else f"{times} times for each broker"
    field.account.did(f"answers to {api} are lost, {often}")
    try:
        yield losing
    finally:
        lost = losing.lost
        for proxy in field.arena.proxies.values():
            proxy.lose.pop(APIS[api], None)
        field.account.did(f"answers to {api} come again; {lost} were lost")
