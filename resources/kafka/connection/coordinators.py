"""Requests to the coordinator of a group or a transactional id, wherever it moves.

Promises: every wait has an end. If a retry could hide the effect of a lost attempt, the request ends in `Unknown`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kafka import errors as kafka_errors
from kafka.errors import KafkaError

from sluice.pipelines.errors import Unknown
from sluice.pipelines.model.consumer_groups import Broker
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.connection.connections import Patience, Wire
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import GROUP
from sluice.resources.kafka.protocol.kafka_errors import AnswerLost, error_text

_MAYBE_DONE = (
    AnswerLost,
    kafka_errors.RequestTimedOutError,
    kafka_errors.CoordinatorNotAvailableError,  # also sent when replicas are slow
    kafka_errors.UnknownError,
)

_NOTICE_SECONDS = 3.0

Errors = Callable[[Any], set[type[KafkaError]]]
"""Extracts the errors of a response."""


class Coordinators:
    """All coordinators of one cluster. `patience`: seconds to wait for an absent one."""

    def __init__(self, wire: Wire, patience: float) -> None:
        self.wire = wire
        self.patience = patience

    async def ask(
        self,
        kind: int,
        key: str,
        request: Callable[[], Any],
        errors: Errors,
        seconds: float | None = None,
        *,
        final: bool = False,
    ) -> Any:
        """Return the response; retry while the coordinator moves, loads, or finishes a transaction.

        All requests here are idempotent. But after a lost answer, a refused retry does not show whether the first
        attempt took effect: a `final` request then ends in Unknown.
        """
        patience, maybe_done = Patience(self.wire, self.patience), False
        while True:
            try:
                return await self._once(kind, key, request, errors, seconds)
            except KafkaError as error:
                self.wire.forget_coordinator(kind, key)
                maybe_done = maybe_done or isinstance(error, _MAYBE_DONE)
                try:
                    await self._bear(patience, error)
                except KafkaError as last:
                    if final and maybe_done:
                        raise _unknown_commit(key, last) from None
                    raise

    async def ask_once(self, kind: int, key: str, request: Any, seconds: float) -> Any:
        """Return the response to one attempt. The connection stays open after a timeout: others may use it."""

        async def ask() -> Any:
            return await self.wire.send(await self.wire.coordinator(kind, key), request)

        return await self.wire.within(self.wire.spawn(ask), seconds)

    async def notify(self, kind: int, key: str, request: Any) -> None:
        """Send a request that only lets others go on sooner: once, for at most 3 s, errors ignored."""
        with contextlib.suppress(KafkaError):
            await self.ask_once(kind, key, request, _NOTICE_SECONDS)

    async def fetch_offsets(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Return the group's committed offsets, with require_stable (KIP-447)."""
        request = partial(group_api.ask_committed, group, partitions)
        return group_api.read_committed(await self.ask(GROUP, group, request, group_api.committed_errors))

    async def broker(self, kind: int, key: str) -> Broker:
        """Look up the coordinator again; wait while there is none."""
        patience = Patience(self.wire, self.patience)
        while True:
            try:
                coordinator = await self.wire.find_coordinator(kind, key)
                return Broker(coordinator.node, f"{coordinator.host}:{coordinator.port}")
            except KafkaError as error:
                await patience.trouble(error)

    async def _once(
        self, kind: int, key: str, request: Callable[[], Any], errors: Errors, seconds: float | None
    ) -> Any:
        node = await self.wire.coordinator(kind, key)
        response = await self.wire.send(node, request(), seconds)
        for error in errors(response):
            raise error()
        return response

    @staticmethod
    async def _bear(patience: Patience, error: KafkaError) -> None:
        if isinstance(error, kafka_errors.UnknownTopicOrPartitionError):
            raise error  # offsets of a deleted topic: a retry cannot help
        await patience.trouble(error)


def _unknown_commit(key: str, error: KafkaError) -> Unknown:
    return Unknown(
        f"the answer to a commit was lost, of {key}: {error_text(error)}",
        remedy="read the committed offsets back; the next run does",
    )
