"""The Group port: a consumer group, its members, and joining it as the only one.

Promises: we never disturb other members (we check before we join). Every wait has an end. We are a dynamic member and
leave when the block ends; after a crash the group is free again once `session` has passed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kafka import errors as kafka_errors
from kafka.errors import KafkaError

from sluice.pipelines.errors import FeedError, GroupHeld, SluiceError
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import Member
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.connection.connections import Coordinators, Wire
from sluice.resources.kafka.group.membership import Heart, KafkaMembership
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import GROUP, Seat
from sluice.resources.kafka.protocol.kafka_errors import error_text
from sluice.resources.kafka.protocol.messages import top_error

_TAKEN = (
    kafka_errors.InconsistentGroupProtocolError,
    kafka_errors.GroupMaxSizeReachedError,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.IllegalGenerationError,
)
SESSION_SECONDS, TRANSACTION_SECONDS = 10.0, 20.0
"""Defaults: how long a session and an open transaction last."""
_LOOK_SECONDS = 0.5
_STATIC = " (a static one stays a member until its session.timeout.ms has passed, also after it was stopped)"


class KafkaGroup:
    """One consumer group. Opens no connection before the first request.

    Times in seconds: `session`, after which the coordinator drops us if we crash; `transaction`, after which it aborts
    what we leave open; `patience` with an absent coordinator, by default long enough for a read of committed
    offsets to outlast a transaction.
    """

    def __init__(
        self,
        access: KafkaAccess,
        group: str,
        *,
        session: float = SESSION_SECONDS,
        transaction: float = TRANSACTION_SECONDS,
        patience: float | None = None,
        wire: Wire | None = None,
    ) -> None:
        """`wire`: borrowed connections, with the rights that errors name; without, the group connects by itself."""
        self._wire = wire or Wire(access)
        self._coordinators = Coordinators(self._wire, transaction + 25 if patience is None else patience)
        self._group = group
        self._session = session
        self._transaction = transaction

    def close(self) -> None:
        self._wire.close()

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Return committed offsets, with require_stable (KIP-447): waits while a transaction on them is open.

        Partitions without one have None. Raises NotAuthorized, KafkaUnavailable.
        """
        return self.committed_now(partitions)

    def committed_now(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Return the same, always from Kafka, never from a cache."""
        wanted = sorted(set(partitions))
        doing = f"reading the committed offsets of group {self._group}"
        offsets = self._wire.run(doing, self._coordinators.fetch_offsets, self._group, wanted) if wanted else {}
        return {tp: offsets.get(tp) for tp in wanted}

    def members(self) -> tuple[Member, ...]:
        """Return the current members. Raises GroupHeld for the newer protocol (KIP-848), not listed here."""
        return self._wire.run(f"describing group {self._group}", self._members)

    def check_alone(self) -> None:
        if strangers := [m for m in self.members() if m.client_id != self._wire.client_id]:
            raise self._conflict(strangers)

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None:
        """Do nothing: in Kafka only members own partitions, and we are a member only while we commit."""

    @contextlib.contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[KafkaMembership]:
        """Join as the only member, and leave on exit. Raises GroupHeld if the group has, or gets, another member.

        Waits up to one session for a member with our own client id: a crashed run of ours, or one about to finish.
        """
        doing = f"joining group {self._group}"
        seat = self._wire.run(doing, self._sit_down, sorted(set(topics)))
        beating = Heart(self._coordinators, seat, self._session / 3)
        try:
            yield KafkaMembership(self._coordinators, seat, transactional_id, self._transaction)
        finally:
            beating.stop()
            with contextlib.suppress(SluiceError):
                self._wire.run(doing, self._leave, seat.member_id)

    # -- on the background thread

    async def _members(self) -> tuple[Member, ...]:
        response = await self._coordinators.ask(
            GROUP,
            self._group,
            partial(group_api.ask_group, self._group),
            group_api.group_errors,
        )
        described = group_api.read_group(response)
        if not described.exists:
            await self._not_of_a_newer_protocol()
        return described.members

    async def _not_of_a_newer_protocol(self) -> None:
        response = await self._coordinators.ask(GROUP, self._group, group_api.ask_groups, top_error)
        kind, state = group_api.read_groups(response).get(self._group, ("", ""))
        if kind not in ("", "classic") and state not in ("empty", "dead"):
            raise GroupHeld(
                f"group {self._group} has members of the newer '{kind}' group protocol (it is {state})",
                remedy="stop its consumers, or let the feed commit under a group of its own",
            )

    async def _sit_down(self, topics: Sequence[str]) -> Seat:
        """Join again if answers were so late that the coordinator dropped us; nothing was committed yet."""
        until = time.monotonic() + self._coordinators.patience
        while True:
            try:
                return await self._take_seat(topics)
            except kafka_errors.UnknownMemberIdError:
                if time.monotonic() > until:
                    raise

    async def _take_seat(self, topics: Sequence[str]) -> Seat:
        await self._wait_until_empty()
        try:
            joined = await self._join(topics)
        except kafka_errors.InvalidSessionTimeoutError:
            raise FeedError(
                f"the brokers do not allow a session of {self._session:g} s for group {self._group}",
                remedy="choose a session within group.min.session.timeout.ms and group.max.session.timeout.ms",
            ) from None
        except _TAKEN as error:
            raise self._conflict(error_text(error)) from None
        seat = Seat(self._group, joined.member_id, joined.generation_id)
        try:
            if [m.member_id for m in joined.members] != [seat.member_id]:
                raise self._conflict("somebody joined at the same moment")
            await self._coordinators.ask(GROUP, self._group, partial(group_api.ask_sync, seat), top_error)
        except _TAKEN as error:
            await self._leave(seat.member_id)
            raise self._conflict(error_text(error)) from None
        except (SluiceError, KafkaError):
            await self._leave(seat.member_id)
            raise
        return seat

    async def _wait_until_empty(self) -> None:
        until = time.monotonic() + self._session + 1
        while members := await self._members():
            strangers = [m for m in members if m.client_id != self._wire.client_id]
            if strangers or time.monotonic() > until:
                raise self._conflict(strangers or members)
            await self._wire.sleep(_LOOK_SECONDS)

    async def _join(self, topics: Sequence[str]) -> Any:
        """Get a member id by the first attempt, and join under it by the second (KIP-394)."""
        told_id = await self._ask_to_join("", topics)
        if told_id.error_code == 0:
            return told_id
        try:
            return await self._ask_to_join(told_id.member_id, topics)
        except KafkaError:
            await self._leave(told_id.member_id)
            raise

    async def _ask_to_join(self, member_id: str, topics: Sequence[str]) -> Any:
        times = int(self._session * 1000)
        return await self._coordinators.ask(
            GROUP,
            self._group,
            partial(group_api.ask_join, self._group, member_id, topics, times, times),
            lambda answer: top_error(answer) - ({kafka_errors.MemberIdRequiredError} if not member_id else set()),
            self._session + 15,  # an empty group is held open for a moment, for others to come in
        )

    async def _leave(self, member_id: str) -> None:
        await self._coordinators.notify(GROUP, self._group, group_api.ask_leave(self._group, member_id))

    def _conflict(self, by: Sequence[Member] | str) -> GroupHeld:
        more = ""
        if not isinstance(by, str):
            more = _STATIC if any(m.instance_id for m in by) else ""
            by = ", ".join(map(_describe, by))
        return GroupHeld(
            f"group {self._group} is not ours alone: {by}",
            remedy=f"stop its other consumers{more}, or let the feed commit under a group of its own; landed rows stay",
        )


def _describe(m: Member) -> str:
    return f"{m.client_id} at {m.host}" + (f" (static member {m.instance_id})" if m.instance_id else "")
