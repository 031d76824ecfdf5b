"""Requests and responses of group administration, and of the topics, rights and clocks that `sluice doctor` checks.

Promises: reports of members (assignments as bytes, hosts and ids as text) are read as data that may be malformed.
kafka-python has no ConsumerGroupDescribe (KIP-848): its schema lies next to this file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kafka.errors import (
    GroupAuthorizationFailedError,
    GroupIdNotFoundError,
    InvalidProducerIdMappingError,
    KafkaError,
    KafkaProtocolError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailedError,
)
from kafka.protocol.admin import DescribeClusterRequest, DescribeGroupsRequest, DescribeQuorumRequest
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment
from kafka.protocol.metadata import MetadataRequest

from sluice.pipelines.model.consumer_groups import (
    AssignedPartitions,
    Broker,
    GroupMember,
    GroupState,
    GroupView,
    ListedGroup,
)
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import ProducerId, Seat, ask_commit
from sluice.resources.kafka.protocol.kafka_errors import error_of
from sluice.resources.kafka.protocol.messages import Code, printed_id, top_error

_NO_MEMBER = ""
_NO_GENERATION = -1


class ConsumerGroupDescribeRequest(ApiMessage, load_json=__package__): ...  # type: ignore[misc, call-arg]


class ConsumerGroupDescribeResponse(ApiMessage, load_json=__package__): ...  # type: ignore[misc, call-arg]


def read_listed(response: Any, broker: int) -> list[ListedGroup]:
    """Return the groups that a broker coordinates; the kind is empty where it gives none (before Kafka 3.8)."""
    return [
        ListedGroup(g.group_id, (g.group_type or "").lower(), g.group_state or "", g.protocol_type or "", broker)
        for g in response.groups
    ]


def read_view(response: Any, coordinator: Broker) -> GroupView:
    """Return a group of the classic protocol; Dead also if the coordinator has none by that name."""
    group = response.groups[0]
    consumers = group.protocol_type == "consumer"
    members = tuple(
        GroupMember(
            m.member_id,
            m.client_id,
            m.client_host.removeprefix("/"),
            m.group_instance_id or None,
            read_assignment(bytes(m.member_assignment)) if consumers else None,
        )
        for m in group.members
    )
    absent = error_of(group.error_code) is GroupIdNotFoundError
    state = GroupState.DEAD if absent else group.group_state
    return GroupView(group.group_id, "classic", state, group.protocol_type, group.protocol_data, coordinator, members)


def read_assignment(data: bytes) -> AssignedPartitions | None:
    """Return the partitions in a ConsumerProtocolAssignment; None for bytes that are none."""
    if not data:
        return ()
    try:
        read = ConsumerProtocolAssignment.decode(data)
        return tuple(sorted(TopicPartition(t.topic, p) for t in read.assigned_partitions for p in t.partitions))
    except (ValueError, IndexError, TypeError, struct.error, KafkaError):
        return None


def ask_newer(group: str) -> Any:
    """Build a ConsumerGroupDescribe request (KIP-848, Kafka 3.7)."""
    return ConsumerGroupDescribeRequest(group_ids=[group], include_authorized_operations=False)


def read_newer(response: Any, coordinator: Broker) -> GroupView:
    """Return a group of the newer consumer protocol."""
    group = response.groups[0]
    members = tuple(
        GroupMember(
            m.member_id,
            m.client_id,
            m.client_host.removeprefix("/"),
            m.instance_id or None,
            tuple(sorted(TopicPartition(t.topic_name, p) for t in m.assignment.topic_partitions for p in t.partitions)),
        )
        for m in group.members
    )
    return GroupView(
        group.group_id, "consumer", group.group_state, "consumer", group.assignor_name, coordinator, members
    )


def newer_errors(response: Any) -> set[type[KafkaError]]:
    return top_error(response.groups[0])


def ask_every_committed(group: str) -> Any:
    """Build an OffsetFetch of all committed offsets of the group, with require_stable (KIP-447, version 7)."""
    entry = OffsetFetchRequest.OffsetFetchRequestGroup
    return OffsetFetchRequest(
        group_id=group,
        topics=None,
        groups=[entry(group_id=group, topics=None)],
        require_stable=True,
        min_version=7,
        max_version=8,
    )


def ask_put(group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> Any:
    """Build an OffsetCommit without a member: a coordinator accepts it only for a group without members."""
    return ask_commit(Seat(group, _NO_MEMBER, _NO_GENERATION), offsets)


_OPERATIONS = {3: "READ", 4: "WRITE", 5: "CREATE", 8: "DESCRIBE", 10: "DESCRIBE_CONFIGS"}
"""Kafka's codes of the operations that Sluice uses."""
_NO_PRODUCER = -1
_LOG = "__cluster_metadata"


@dataclass(frozen=True, slots=True)
class TopicSeen:
    """One topic as this client sees it. `may`: the client's rights on it, in Kafka's words."""

    error: Code
    id: str
    partitions: int
    may: frozenset[str]

    @property
    def is_hidden(self) -> bool:
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
    return group_api.ask_add_offsets(ProducerId(transactional_id, _NO_PRODUCER, 0), group)


def read_write_right(response: Any) -> bool:
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
