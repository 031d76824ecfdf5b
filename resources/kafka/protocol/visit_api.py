"""The protocol of inspecting a cluster without reading from it: values to kafka-python's requests, and back.

Promises: none of these requests changes anything. This client's rights are those that brokers report (KIP-430).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kafka.errors import (
    GroupAuthorizationFailedError,
    InvalidProducerIdMappingError,
    KafkaProtocolError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailedError,
)
from kafka.protocol.admin import DescribeClusterRequest, DescribeGroupsRequest, DescribeQuorumRequest
from kafka.protocol.metadata import MetadataRequest

from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import ProducerId
from sluice.resources.kafka.protocol.kafka_errors import error_of
from sluice.resources.kafka.protocol.messages import Code, printed_id, top_error

_OPERATIONS = {3: "READ", 4: "WRITE", 5: "CREATE", 8: "DESCRIBE", 10: "DESCRIBE_CONFIGS"}
"""Kafka's codes of the operations that Sluice uses."""
_NOBODY = -1
_LOG = "__cluster_metadata"


@dataclass(frozen=True, slots=True)
class TopicSeen:
    """One topic as this client sees it. `may`: the client's rights on it, in Kafka's words."""

    error: Code
    id: str
    partitions: int
    may: frozenset[str]

    @property
    def hidden(self) -> bool:
        """True if this client may not even see it."""
        return self.error is TopicAuthorizationFailedError


def ask_topics(topics: Iterable[str]) -> Any:
    """Build a Metadata request with this client's rights on each topic (KIP-430)."""
    topic = MetadataRequest.MetadataRequestTopic
    return MetadataRequest(
        topics=[topic(name=name) for name in topics],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
        min_version=10,
    )


def read_topics(response: Any) -> dict[str, TopicSeen]:
    return {
        t.name: TopicSeen(
            error_of(t.error_code),
            printed_id(t.topic_id) if t.topic_id else "",
            len(t.partitions),
            _operations(t.authorized_operations),
        )
        for t in response.topics
    }


def ask_group_rights(group: str) -> Any:
    """Build a DescribeGroups request with this client's rights (KIP-430).

    Version 5 also answers for groups that do not exist.
    """
    return DescribeGroupsRequest(groups=[group], include_authorized_operations=True, min_version=3, max_version=5)


def read_group_rights(response: Any) -> frozenset[str]:
    return _operations(response.groups[0].authorized_operations)


def ask_cluster_rights() -> Any:
    """Build a DescribeCluster request (KIP-700, Kafka 2.8)."""
    return DescribeClusterRequest(include_cluster_authorized_operations=True)


def read_cluster_rights(response: Any) -> frozenset[str]:
    return _operations(response.authorized_operations)


def ask_to_write(transactional_id: str, group: str) -> Any:
    """Build an AddOffsetsToTxn request of a producer that cannot exist, to test the right to WRITE.

    A broker checks whether this client may WRITE to the transactional id, then whether it may READ the group, then the
    producer, and refuses. Only requests that write show that right; this one changes nothing, in any state of the id.
    """
    return group_api.ask_add_offsets(ProducerId(transactional_id, _NOBODY, 0), group)


def may_write(response: Any) -> bool:
    """Return whether the refusal came from a check after the right to WRITE. Raises KafkaError if it does not show
    that."""
    error = error_of(response.error_code)
    if error in (InvalidProducerIdMappingError, GroupAuthorizationFailedError):
        return True
    if error is TransactionalIdAuthorizationFailedError:
        return False
    raise error() if error else KafkaProtocolError("a broker took a producer that cannot be")


def ask_quorum() -> Any:
    """Build a DescribeQuorum request (KIP-836, KRaft, Kafka 3.3): only its answer has the brokers' clock."""
    topic = DescribeQuorumRequest.TopicData
    return DescribeQuorumRequest(
        topics=[topic(topic_name=_LOG, partitions=[topic.PartitionData(partition_index=0)])], min_version=1
    )


def read_clock(response: Any) -> int | None:
    """Return the clock of the controllers' leader (ms) when it answered; None if not given."""
    if top_error(response):
        return None
    for partition in (p for t in response.topics for p in t.partitions):
        for voter in partition.current_voters:
            if voter.replica_id == partition.leader_id and voter.last_caught_up_timestamp > 0:
                return int(voter.last_caught_up_timestamp)
    return None


def _operations(bits: Any) -> frozenset[str]:
    """Return the operations in an answer; empty if the broker gives none."""
    return frozenset(_OPERATIONS[int(code)] for code in bits or () if int(code) in _OPERATIONS)
