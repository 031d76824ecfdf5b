"""The protocol of describing any group: values to kafka-python's requests, responses to values.

Promises: reports of members (assignments as bytes, hosts and ids as text) are read as data that may be malformed.
kafka-python has no ConsumerGroupDescribe (KIP-848): its schema lies next to this file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from kafka.errors import GroupIdNotFoundError, KafkaError
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment

from sluice.pipelines.model.consumer_groups import (
    AssignedPartitions,
    Broker,
    GroupMember,
    GroupState,
    GroupView,
    ListedGroup,
)
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.protocol.group_api import Seat, ask_commit
from sluice.resources.kafka.protocol.kafka_errors import error_of
from sluice.resources.kafka.protocol.messages import top_error

_NOBODY = ""
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
    return ask_commit(Seat(group, _NOBODY, _NO_GENERATION), offsets)
