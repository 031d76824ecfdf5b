"""Rights in a secured local Kafka, given and taken by its administrator."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.rights import Right
from sluice.resources.kafka.connection.connection_settings import KafkaAddress, connecting
from sluice.resources.kafka.protocol.kafka_errors import explain
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import USER


def grant(kafka: LocalKafka, rights: Iterable[Right], user: str = USER) -> None:
    """Give the user the rights. Raises SetupError for a plain cluster, KafkaUnavailable."""
    _change(kafka, rights, user, "create_acls")


def revoke(kafka: LocalKafka, rights: Iterable[Right], user: str = USER) -> None:
    """Take the rights from the user; those that it does not have are passed over."""
    _change(kafka, rights, user, "delete_acls")


def _change(kafka: LocalKafka, rights: Iterable[Right], user: str, change: str) -> None:
    # Late, since commands only ask for addresses: the client takes 0.3 s to import.
    from kafka import KafkaAdminClient
    from kafka.admin import ACL, ACLOperation, ACLPermissionType, ACLResourcePatternType, ResourcePattern, ResourceType
    from kafka.errors import KafkaError

    from sluice.resources.kafka.connection.zero_copy_transport import client_of

    if kafka.secured is None:
        raise SetupError("this local Kafka has no users and asks for no rights", remedy="everybody may do everything")
    acls = [
        ACL(
            f"User:{user}",
            "*",
            ACLOperation[right.operation],
            ACLPermissionType.ALLOW,
            ResourcePattern(ResourceType[right.kind.name], right.name, ACLResourcePatternType[right.pattern.name]),
        )
        for right in rights
    ]
    access = KafkaAddress(kafka.bootstrap, kafka.client())
    try:
        client = client_of(KafkaAdminClient, bootstrap_servers=access.bootstrap, **access.client_settings())
        with closing(client):
            getattr(client, change)(acls)
    except (KafkaError, OSError) as error:
        raise explain(error, connecting(access, 1).grantee, f"changing the rights of {user}") from None
