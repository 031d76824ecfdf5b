"""The Groups port: every group of a cluster, and commits without membership to a group that has no members.

Promises: reading disturbs no group; none is joined or created by it; every wait has an end. A list waits while groups
are without a coordinator; a coordinator that took groups over a moment ago may leave them out, as it does for Kafka's
own tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kafka import errors as kafka_errors
from kafka.errors import KafkaError

from sluice.pipelines.errors import GroupHeld
from sluice.pipelines.feed.rights import right_to_see, rights_to_commit
from sluice.pipelines.model.consumer_groups import GroupState, GroupView, ListedGroup
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.connection.connections import Coordinators, Errors, Patience, Wire
from sluice.resources.kafka.protocol import admin_api, group_api
from sluice.resources.kafka.protocol.group_api import GROUP
from sluice.resources.kafka.protocol.messages import partition_errors, top_error

_HAS_MEMBERS = (
    kafka_errors.UnknownMemberIdError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.RebalanceInProgressError,
)
_PLAIN = "classic"
_KEPT_IN = "__consumer_offsets"


@dataclass(frozen=True, slots=True)
class _BrokerGroups:
    """The groups of one broker.

    `partitions`: those in which groups are kept; `led`: the ones that it led before it listed the groups.
    """

    groups: list[ListedGroup]
    led: frozenset[TopicPartition]
    partitions: frozenset[TopicPartition]


class KafkaGroups:
    """All groups of one Kafka. Opens no connection before the first request.

    `patience`: seconds to wait for absent coordinators.
    """

    def __init__(self, access: KafkaAccess, patience: float = 45.0) -> None:
        self._wire = Wire(access)
        self._coordinators = Coordinators(self._wire, patience)
        self._patience = patience

    def close(self) -> None:
        self._wire.close()

    def list_groups(self) -> tuple[ListedGroup, ...]:
        """Return the groups that this client may see, sorted by name. Raises NotAuthorized, KafkaUnavailable."""
        return self._wire.run("listing groups", self._list_groups)

    def view(self, group: str) -> GroupView:
        """Return one group as it is now; Dead when there is none. Raises NotAuthorized, KafkaUnavailable."""
        return self._wire.run(f"describing group {group}", self._view, group, rights=[right_to_see(group)])

    def fetch_committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """Return all the group's committed offsets, with require_stable. Raises NotAuthorized, KafkaUnavailable."""
        doing = f"reading the committed offsets of group {group}"
        request = partial(admin_api.ask_every_committed, group)
        ask = partial(self._coordinators.ask, GROUP, group, request, group_api.committed_errors)
        response = self._wire.run(doing, ask, rights=[right_to_see(group)])
        return {tp: offset for tp, offset in group_api.read_committed(response).items() if offset is not None}

    def put(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Commit without membership. Raises GroupHeld if the group has members, Unknown if an answer was lost."""
        rights = rights_to_commit(group, {tp.topic for tp in offsets})
        self._wire.run(f"putting the offsets of group {group}", self._put, group, offsets, rights=rights)

    # -- on the background thread

    async def _list_groups(self) -> tuple[ListedGroup, ...]:
        """Ask all brokers again until they report to lead all partitions in which groups are kept."""
        patience = Patience(self._wire, self._patience)
        while True:
            try:
                layout = await self._wire.layout(())
                parts = await self._wire.gather(self._listed_by(broker) for broker in layout.brokers)
                if not set().union(*(p.partitions for p in parts)) <= set().union(*(p.led for p in parts)):
                    raise kafka_errors.LeaderNotAvailableError("some groups have no coordinator at this moment")
            except KafkaError as error:
                await patience.trouble(error)
            else:
                groups = {group.group: group for part in parts for group in part.groups}
                return tuple(groups[name] for name in sorted(groups))

    async def _listed_by(self, broker: int) -> _BrokerGroups:
        leaderships = (await self._wire.layout([_KEPT_IN], broker)).leaders.values()
        response = await self._wire.send(broker, group_api.ask_groups())
        for error in top_error(response):
            raise error()
        led = frozenset(p.tp for p in leaderships if p.leader == broker)
        return _BrokerGroups(admin_api.read_listed(response, broker), led, frozenset(p.tp for p in leaderships))

    async def _view(self, group: str) -> GroupView:
        """Describe by the classic request first: all brokers have it, and it shows that there is no classic group."""
        coordinator = await self._coordinators.broker(GROUP, group)
        response = await self._ask(group, partial(group_api.ask_group, group), group_api.group_errors)
        classic = admin_api.read_view(response, coordinator)
        if classic.exists:
            return classic
        listed = await self._ask(group, group_api.ask_groups, top_error)
        kind, state = group_api.read_groups(listed).get(group, ("", ""))
        if kind == "consumer":
            request = partial(admin_api.ask_newer, group)
            response = await self._ask(group, request, admin_api.newer_errors)
            return admin_api.read_newer(response, coordinator)
        if kind in ("", _PLAIN):
            return classic
        return GroupView(group, kind, state.capitalize() or GroupState.STABLE, kind, "", coordinator, None)

    async def _ask(self, group: str, request: Any, errors: Errors) -> Any:
        return await self._coordinators.ask(GROUP, group, request, errors)

    async def _put(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        request = partial(admin_api.ask_put, group, offsets)
        try:
            await self._coordinators.ask(GROUP, group, request, partition_errors, final=True)
        except _HAS_MEMBERS:
            raise GroupHeld(
                f"group {group} has members: its coordinator refused to move the offsets",
                remedy=f"stop its consumers and repeat; see who: sluice groups describe {group}",
            ) from None
