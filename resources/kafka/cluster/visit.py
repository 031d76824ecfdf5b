"""Checks whether a feed can work with a cluster: reachability, rights, clock.

Promises: nothing is changed, no group is joined; each request ends soon, whichever broker is absent: addresses and
brokers get `SECONDS`, however patient the feed would be. Looking up a coordinator makes the brokers create their
internal topics for groups and transactions if they do not exist yet, as every client's lookup does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

from kafka.errors import KafkaError

from sluice.pipelines.model.consumer_groups import Broker, GroupView
from sluice.pipelines.model.kafka import BrokerConfig
from sluice.resources.kafka.cluster.cluster import KafkaCluster, measure_lead
from sluice.resources.kafka.connection.connection_settings import KafkaAccess, KafkaAddress
from sluice.resources.kafka.connection.connections import Coordinators, Wire
from sluice.resources.kafka.group.all_groups import KafkaGroups
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.admin_api import (
    TopicSeen,
    ask_cluster_rights,
    ask_group_rights,
    ask_to_write,
    ask_topics,
    read_cluster_rights,
    read_group_rights,
    read_topics,
    read_write_right,
)
from sluice.resources.kafka.protocol.group_api import GROUP, TRANSACTION
from sluice.resources.kafka.protocol.kafka_errors import error_of, is_passing

SECONDS = 5.0


class KafkaVisit:
    """Checks of one cluster. Opens no connection before the first request; several threads may call it."""

    def __init__(self, access: KafkaAccess) -> None:
        limit, client = int(SECONDS * 1000), access.client_settings()
        bounds = {name: min(limit, client.get(name, limit)) for name in ("bootstrap_timeout_ms", "request_timeout_ms")}
        self._address = KafkaAddress(access.bootstrap, client | bounds)
        self._wire = Wire(self._address)
        self._coordinators = Coordinators(self._wire, SECONDS)

    def close(self) -> None:
        self._wire.close()

    def reach(self, address: str) -> None:
        """Connect to this bootstrap address alone, with the feed's TLS and login. Raises the error that prevents it."""
        with closing(Wire(KafkaAddress(address, self._address.client))) as wire:
            wire.run("reaching Kafka", wire.brokers)

    def brokers(self) -> tuple[Broker, ...]:
        """Return every broker at its advertised address, sorted by id."""
        brokers = self._wire.run("asking for the brokers", self._wire.brokers)
        return tuple(sorted((Broker(b.node_id, f"{b.host}:{b.port}") for b in brokers), key=lambda b: b.id))

    def release(self, broker: int) -> tuple[int, ...]:
        """Return the broker's release, such as (4, 1), as far as its protocol shows it. Connects to the broker."""
        return self._wire.run(f"reaching broker {broker}", self._wire.release, broker)

    def ahead(self) -> float | None:
        """Return by how many seconds this machine's clock is ahead of the brokers', at least; None if unknown.

        Zero if the brokers' time lies between request and answer. Needs DESCRIBE on the cluster.
        """
        return self._wire.run("asking for the time", measure_lead, self._wire.send)

    def topics(self) -> Mapping[str, str]:
        """Return every visible topic, name → id (empty for brokers too old to have ids)."""
        return self._wire.run("listing topics", self._wire.layout, None).topics

    def topics_seen(self, topics: Iterable[str]) -> Mapping[str, TopicSeen]:
        """Return each of the topics, with this client's rights on it."""
        request = ask_topics(sorted(topics))
        return read_topics(self._wire.run("describing topics", self._wire.send, None, request))

    def group_rights(self, group: str) -> frozenset[str]:
        """Return this client's rights on the group, which need not exist yet. Raises NotAuthorized."""
        ask = partial(self._coordinators.ask, GROUP, group, partial(ask_group_rights, group), group_api.group_errors)
        return read_group_rights(self._wire.run(f"describing group {group}", ask))

    def cluster_rights(self) -> frozenset[str]:
        """Return this client's rights on the cluster as a whole."""
        request = ask_cluster_rights()
        return read_cluster_rights(self._wire.run("describing the cluster", self._wire.send, None, request))

    def group(self, group: str) -> GroupView:
        """Return the group as it is. Raises NotAuthorized."""
        with closing(KafkaGroups(self._address, SECONDS)) as groups:
            return groups.view(group)

    def coordinator(self, transactional_id: str) -> Broker:
        """Return the coordinator of the transactional id. Raises NotAuthorized without DESCRIBE on it."""
        doing = f"looking for the coordinator of {transactional_id}"
        return self._wire.run(doing, self._coordinators.broker, TRANSACTION, transactional_id)

    def may_write(self, transactional_id: str, group: str) -> bool:
        """Return whether this client may WRITE to the transactional id of that group's feed. Begins no transaction."""
        doing = f"asking for the rights on transactional id {transactional_id}"
        request = partial(ask_to_write, transactional_id, group)

        def find_passing_errors(response: Any) -> set[type[KafkaError]]:
            """Return a passing error: the coordinator moves, or loads."""
            error = error_of(response.error_code)
            return {error} if error and is_passing(error) else set()

        ask = partial(self._coordinators.ask, TRANSACTION, transactional_id, request, find_passing_errors)
        return read_write_right(self._wire.run(doing, ask))

    def limits(self) -> BrokerConfig:
        """Return the brokers' time limits; those that this client may not see are None."""
        with closing(KafkaCluster(self._address, SECONDS)) as cluster:
            return cluster.configs(()).broker

    # -- on the background thread
