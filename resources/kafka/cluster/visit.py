"""One visit to a cluster, to see whether a feed will get on with it: who answers, what this client may do, the time.

Promises: nothing is changed, no group is joined; each question ends soon, whatever is away: addresses and brokers get
`SECONDS`, however long the feed would be patient with them. Looking for a coordinator has the brokers make their own
topics of groups and of transactions, where nobody has used any yet: as every client's looking does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

from kafka.errors import KafkaError

from sluice.pipelines.model.consumer_groups import Broker, GroupView
from sluice.pipelines.model.kafka import BrokerConfig
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAccess, KafkaAddress
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.connection.coordinators import Coordinators
from sluice.resources.kafka.group.all_groups import KafkaGroups
from sluice.resources.kafka.protocol import group_api, visit_api
from sluice.resources.kafka.protocol.group_api import GROUP, TRANSACTION
from sluice.resources.kafka.protocol.kafka_errors import error_of, is_passing
from sluice.resources.kafka.protocol.visit_api import TopicSeen

SECONDS = 5.0


class KafkaVisit:
    """Opens no connection before the first question; the questions may come from several threads."""

    def __init__(self, access: KafkaAccess) -> None:
        self._address = _hasty(access)
        self._wire = Wire(self._address)
        self._coordinators = Coordinators(self._wire, SECONDS)

    def close(self) -> None:
        self._wire.close()

    def reach(self, address: str) -> None:
        """Connect to this bootstrap address alone, with TLS and login as the feed says. Raises what hinders that."""
        with closing(Wire(KafkaAddress(address, self._address.client))) as wire:
            wire.run("reaching Kafka", wire.brokers)

    def brokers(self) -> tuple[Broker, ...]:
        """Every broker at the address that it advertises, sorted."""
        brokers = self._wire.run("asking for the brokers", self._wire.brokers)
        return tuple(sorted((Broker(b.node_id, f"{b.host}:{b.port}") for b in brokers), key=lambda b: b.id))

    def release(self, broker: int) -> tuple[int, ...]:
        """The broker's release, such as (4, 1), as far as its protocol tells; it is connected to for that."""
        return self._wire.run(f"reaching broker {broker}", self._wire.release, broker)

    def ahead(self) -> float | None:
        """How many seconds this machine's clock is ahead of the brokers', at least; None where they do not tell.

        Zero where the brokers' time lies between question and answer. Needs DESCRIBE on the cluster.
        """
        return self._wire.run("asking for the time", self._ahead)

    def topics(self) -> Mapping[str, str]:
        """Every visible topic, name → id (empty where brokers are too old to have one)."""
        return self._wire.run("listing topics", self._wire.layout, None).topics

    def topics_seen(self, topics: Iterable[str]) -> Mapping[str, TopicSeen]:
        """Each of the topics, with what this client may do to it."""
        request = visit_api.ask_topics(sorted(topics))
        return visit_api.read_topics(self._wire.run("describing topics", self._wire.send, None, request))

    def group_rights(self, group: str) -> frozenset[str]:
        """What this client may do to the group, also to one that nobody made yet. Raises NotAuthorized."""
        request = partial(visit_api.ask_group_rights, group)
        response = self._coordinators.run(f"describing group {group}", GROUP, group, request, group_api.group_errors)
        return visit_api.read_group_rights(response)

    def cluster_rights(self) -> frozenset[str]:
        """What this client may do to the cluster as a whole."""
        request = visit_api.ask_cluster_rights()
        return visit_api.read_cluster_rights(self._wire.run("describing the cluster", self._wire.send, None, request))

    def group(self, group: str) -> GroupView:
        """The group as it is. Raises NotAuthorized."""
        with closing(KafkaGroups(self._address, SECONDS)) as groups:
            return groups.view(group)

    def coordinator(self, transactional_id: str) -> Broker:
        """Who coordinates the transactional id. Raises NotAuthorized without DESCRIBE on it."""
        doing = f"looking for the coordinator of {transactional_id}"
        return self._wire.run(doing, self._coordinators.broker, TRANSACTION, transactional_id)

    def may_write(self, transactional_id: str, group: str) -> bool:
        """Whether this client may WRITE to the transactional id that the feed of that group commits by. Begins no
        transaction."""
        doing = f"asking for the rights on transactional id {transactional_id}"
        request = partial(visit_api.ask_to_write, transactional_id, group)

        def refused(response: Any) -> set[type[KafkaError]]:
            """What passes: the coordinator moves, or loads."""
            error = error_of(response.error_code)
            return {error} if error and is_passing(error) else set()

        return visit_api.may_write(self._coordinators.run(doing, TRANSACTION, transactional_id, request, refused))

    def limits(self) -> BrokerConfig:
        """The brokers' time limits; those that this client may not see are None."""
        with closing(KafkaCluster(self._address, SECONDS)) as cluster:
            return cluster.configs(()).broker

    # -- on the background thread

    async def _ahead(self) -> float | None:
        sent_at = time.time()
        response = await self._wire.send(None, visit_api.ask_quorum())
        answered, there = time.time(), visit_api.read_clock(response)
        if there is None:
            return None
        return min(0.0, answered - there / 1000) or max(0.0, sent_at - there / 1000)


def _hasty(access: KafkaAccess) -> KafkaAddress:
    """The same access, in a hurry."""
    limit, client = int(SECONDS * 1000), access.client_settings()
    bounds = {name: min(limit, client.get(name, limit)) for name in ("bootstrap_timeout_ms", "request_timeout_ms")}
    return KafkaAddress(access.bootstrap, client | bounds)
