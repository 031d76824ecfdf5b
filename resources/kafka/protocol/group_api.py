"""The protocol of groups and transactions: values to kafka-python's requests, responses to values.

Promises: versions are pinned to those that carry the features we rely on: require_stable, member id and generation,
leader epochs. Every request may be sent twice: the second has no further effect.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.errors import (
    GroupIdNotFoundError,
    KafkaError,
    OperationNotAttemptedError,
    TransactionalIdNotFoundError,
)
from kafka.protocol.admin import DescribeGroupsRequest, DescribeTransactionsRequest, ListGroupsRequest
from kafka.protocol.consumer import (
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    SyncGroupRequest,
)
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)

from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import Member
from sluice.pipelines.records.rows.wire_format import varint
from sluice.resources.kafka.protocol.kafka_errors import error_of
from sluice.resources.kafka.protocol.messages import Code, by_topic, partition_errors, top_error

GROUP, TRANSACTION = 0, 1
"""Kinds of coordinator."""
_PRODUCE_MS = 15_000
_NAME = "range"
_PRODUCE = struct.Struct(">hi")  # acknowledgements, timeout
_PARTITION = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a group: one join."""

    group: str
    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class ProducerId:
    """A producer as Kafka numbered it; the transactional id is empty if it sends without transactions."""

    transactional_id: str
    id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Coordinator:
    error: Code
    node: int
    host: str
    port: int


def ask_coordinator(kind: int, key: str) -> Any:
    return FindCoordinatorRequest(key=key, key_type=kind, coordinator_keys=[key], max_version=5)


def read_coordinator(response: Any) -> Coordinator:
    coordinator = response.coordinators[0] if response.coordinators else response  # several keys from version 4 on
    return Coordinator(error_of(coordinator.error_code), coordinator.node_id, coordinator.host, coordinator.port)


def ask_coordinators(kind: int, keys: Iterable[str]) -> Any:
    """Build a request for several coordinators at once (KIP-699, version 4)."""
    return FindCoordinatorRequest(
        key="", key_type=kind, coordinator_keys=sorted(set(keys)), min_version=4, max_version=5
    )


def read_coordinators(response: Any) -> dict[str, int]:
    """Return the coordinating broker of each key that has one."""
    return {coordinator.key: coordinator.node_id for coordinator in response.coordinators if not coordinator.error_code}


def ask_committed(group: str, tps: Iterable[TopicPartition]) -> Any:
    """Build an OffsetFetch with require_stable (KIP-447, version 7)."""
    topics = [(name, [p for p, _ in partitions]) for name, partitions in by_topic(dict.fromkeys(tps))]
    one, entry = OffsetFetchRequest.OffsetFetchRequestTopic, OffsetFetchRequest.OffsetFetchRequestGroup
    many = entry.OffsetFetchRequestTopics
    return OffsetFetchRequest(
        group_id=group,
        topics=[one(name=name, partition_indexes=numbers) for name, numbers in topics],
        groups=[entry(group_id=group, topics=[many(name=n, partition_indexes=p) for n, p in topics])],
        require_stable=True,
        min_version=7,
        max_version=8,
    )


def read_committed(response: Any) -> dict[TopicPartition, CommittedOffset | None]:
    """Return the committed offsets of the group; None for partitions without one."""
    return _committed_in(_of_group(response))


def _committed_in(answer: Any) -> dict[TopicPartition, CommittedOffset | None]:
    return {
        TopicPartition(topic.name, p.partition_index): CommittedOffset(
            p.committed_offset, p.committed_leader_epoch, p.metadata or ""
        )
        if p.committed_offset >= 0
        else None
        for topic in answer.topics
        for p in topic.partitions
    }


def ask_committed_of(groups: Mapping[str, Iterable[TopicPartition]]) -> Any:
    """Build the request of `ask_committed` for several groups at once (KIP-709, version 8)."""
    entry = OffsetFetchRequest.OffsetFetchRequestGroup
    topic = entry.OffsetFetchRequestTopics
    wanted = [
        entry(
            group_id=group,
            topics=[topic(name=n, partition_indexes=[p for p, _ in ps]) for n, ps in by_topic(dict.fromkeys(tps))],
        )
        for group, tps in sorted(groups.items())
    ]
    return OffsetFetchRequest(groups=wanted, require_stable=True, min_version=8, max_version=8)


def read_committed_of(response: Any) -> dict[str, dict[TopicPartition, CommittedOffset | None]]:
    """Return the committed offsets by group; groups with an error in the answer are left out."""
    sound = (g for g in response.groups if not (top_error(g) | partition_errors(g)))
    return {g.group_id: _committed_in(g) for g in sound}


def committed_errors(response: Any) -> set[type[KafkaError]]:
    answer = _of_group(response)
    return top_error(answer) | partition_errors(answer)


def _of_group(response: Any) -> Any:
    return response.groups[0] if response.groups else response  # several groups from version 8 on


def ask_group(group: str) -> Any:
    return DescribeGroupsRequest(groups=[group], include_authorized_operations=False)


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as its coordinator describes it. Not `exists`: it has no classic group by that name."""

    exists: bool
    members: tuple[Member, ...]


def read_group(response: Any) -> GroupDescription:
    group = response.groups[0]
    members = (
        Member(m.member_id, m.client_id, m.client_host.removeprefix("/"), m.group_instance_id or None)
        for m in group.members
    )
    absent = error_of(group.error_code) is GroupIdNotFoundError or group.group_state == "Dead"
    return GroupDescription(not absent, tuple(members))


def group_errors(response: Any) -> set[type[KafkaError]]:
    """Return the errors of a description. A group that does not exist is none (an error from version 6 on)."""
    return top_error(response.groups[0]) - {GroupIdNotFoundError}


def ask_groups() -> Any:
    """Build a request for the groups of a coordinator; version 5 (Kafka 3.8) gives their type."""
    return ListGroupsRequest(states_filter=[], types_filter=[])


def read_groups(response: Any) -> dict[str, tuple[str, str]]:
    """Return name → (type, state) in lower case; the type is empty where the broker gives none."""
    return {g.group_id: ((g.group_type or "").lower(), (g.group_state or "").lower()) for g in response.groups}


def ask_join(group: str, member_id: str, topics: Sequence[str], session_ms: int, rebalance_ms: int) -> Any:
    subscription = ConsumerProtocolSubscription(version=0, topics=list(topics), user_data=b"")
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=rebalance_ms,
        member_id=member_id,
        group_instance_id=None,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name=_NAME, metadata=subscription.encode(header=True))],
        reason="Sluice commits",
    )


def ask_sync(seat: Seat) -> Any:
    """Build the SyncGroup of the only member. It takes no partitions: it reads none, it only commits."""
    assignment = ConsumerProtocolAssignment(version=0, assigned_partitions=[], user_data=b"")
    entry = SyncGroupRequest.SyncGroupRequestAssignment
    return SyncGroupRequest(
        group_id=seat.group,
        generation_id=seat.generation,
        member_id=seat.member_id,
        group_instance_id=None,
        protocol_type="consumer",
        protocol_name=_NAME,
        assignments=[entry(member_id=seat.member_id, assignment=assignment.encode(header=True))],
    )


def ask_heartbeat(seat: Seat) -> Any:
    return HeartbeatRequest(
        group_id=seat.group, generation_id=seat.generation, member_id=seat.member_id, group_instance_id=None
    )


def ask_leave(group: str, member_id: str) -> Any:
    identity = LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=None, reason="done")
    return LeaveGroupRequest(group_id=group, member_id=member_id, members=[identity])


def ask_commit(seat: Seat, offsets: Mapping[TopicPartition, CommittedOffset]) -> Any:
    """Build an OffsetCommit under the seat's member id and generation."""
    topic = OffsetCommitRequest.OffsetCommitRequestTopic
    topics = [
        topic(
            name=name,
            partitions=[
                topic.OffsetCommitRequestPartition(
                    partition_index=p,
                    committed_offset=o.offset,
                    committed_leader_epoch=o.leader_epoch,
                    committed_metadata=o.metadata,
                )
                for p, o in partitions
            ],
        )
        for name, partitions in by_topic(offsets)
    ]
    return OffsetCommitRequest(
        group_id=seat.group,
        generation_id_or_member_epoch=seat.generation,
        member_id=seat.member_id,
        group_instance_id=None,
        topics=topics,
        min_version=6,
        max_version=8,
    )


def ask_producer(transactional_id: str, timeout_ms: int) -> Any:
    """Build a request for a producer id: that of this transactional id, unless it is empty."""
    return InitProducerIdRequest(
        transactional_id=transactional_id or None,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
        max_version=4,
    )


def ask_transaction(transactional_id: str) -> Any:
    """Build a request for the state of the id's last transaction (KIP-664, brokers of 3.0 and newer)."""
    return DescribeTransactionsRequest(transactional_ids=[transactional_id])


def collect_transaction_errors(response: Any) -> set[type[KafkaError]]:
    """Return the errors, except that the id is new."""
    errors = {error_of(state.error_code) for state in response.transaction_states}
    return {e for e in errors if e and e is not TransactionalIdNotFoundError}


def read_committed_last(response: Any) -> bool | None:
    """Return whether the id's last transaction is committed, or will be; None if it had none."""
    (state,) = response.transaction_states
    if state.error_code or state.transaction_state in ("Empty", "Dead"):
        return None
    return str(state.transaction_state).endswith("Commit")


def ask_add_offsets(producer: ProducerId, group: str) -> Any:
    return AddOffsetsToTxnRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        group_id=group,
        max_version=3,
    )


def ask_add_partitions(producer: ProducerId, topic: str, partitions: Sequence[int]) -> Any:
    """Build a request to add these partitions to the transaction.

    Version 3 is the last for clients that begin transactions this way.
    """
    topics = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=list(partitions))
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=producer.transactional_id,
        v3_and_below_producer_id=producer.id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=[topics],
        max_version=3,
    )


def added_errors(response: Any) -> set[type[KafkaError]]:
    """Return the errors, without those of partitions not attempted because another one was refused."""
    results = (p for t in response.results_by_topic_v3_and_below for p in t.results_by_partition)
    errors = {e for p in results if (e := error_of(p.partition_error_code))}
    return errors - {OperationNotAttemptedError} or errors


class _Produce(ProduceRequest, init=False):  # type: ignore[misc, call-arg]
    """Encodes as kafka-python would, but copies each batch once instead of four times."""

    def encode(self, version: int | None = None, header: bool = False, framed: bool = False) -> Any:
        if not (header and framed and self.flexible_version_q(self.API_VERSION)):
            return super().encode(version, header, framed)
        (topic,) = self.topic_data
        name, producer = topic.name.encode(), (self.transactional_id or "").encode()
        pieces: list[bytes | memoryview] = [
            self.encode_header(flexible=True),
            varint(len(producer) + 1) + producer if producer else b"\0",
            _PRODUCE.pack(self.acks, self.timeout_ms) + varint(2) + varint(len(name) + 1) + name,
            varint(len(topic.partition_data) + 1),
        ]
        for partition in topic.partition_data:
            pieces += [_PARTITION.pack(partition.index) + varint(len(partition.records) + 1), partition.records, b"\0"]
        pieces.append(b"\0\0")
        return b"".join([_PARTITION.pack(sum(map(len, pieces))), *pieces])


def ask_produce(producer: ProducerId, topic: str, records: Mapping[int, bytes | memoryview]) -> Any:
    """Build a Produce request to partitions of a topic, with one batch for each.

    Up to version 11 (KIP-890), acknowledged by all in-sync replicas.
    """
    data = ProduceRequest.TopicProduceData
    partitions = [data.PartitionProduceData(index=p, records=batch) for p, batch in sorted(records.items())]
    return _Produce(
        transactional_id=producer.transactional_id or None,
        acks=-1,
        timeout_ms=_PRODUCE_MS,
        topic_data=[data(name=topic, partition_data=partitions)],
        min_version=8,
        max_version=11,
    )


@dataclass(frozen=True, slots=True)
class Produced:
    """The answer for one batch.

    `blamed`: the position in it of the first record that was the reason to refuse it; `first`: the offset of its first
    record; `time`: the broker's time (ms) if the topic stamps records itself, else −1.
    """

    error: Code
    blamed: int
    first: int = -1
    time: int = -1


def read_produced(response: Any) -> dict[int, Produced]:
    """Return the answers by partition."""
    return {
        p.index: Produced(
            error_of(p.error_code),
            min((e.batch_index for e in p.record_errors or ()), default=0),
            p.base_offset,
            p.log_append_time_ms,
        )
        for t in response.responses
        for p in t.partition_responses
    }


def ask_commit_in(producer: ProducerId, seat: Seat, offsets: Mapping[TopicPartition, CommittedOffset]) -> Any:
    """Build a TxnOffsetCommit under the seat's member id and generation (KIP-447, version 3)."""
    topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    topics = [
        topic(
            name=name,
            partitions=[
                topic.TxnOffsetCommitRequestPartition(
                    partition_index=p,
                    committed_offset=o.offset,
                    committed_leader_epoch=o.leader_epoch,
                    committed_metadata=o.metadata,
                )
                for p, o in partitions
            ],
        )
        for name, partitions in by_topic(offsets)
    ]
    return TxnOffsetCommitRequest(
        transactional_id=producer.transactional_id,
        group_id=seat.group,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        generation_id=seat.generation,
        member_id=seat.member_id,
        group_instance_id=None,
        topics=topics,
        min_version=3,
        max_version=3,
    )


def ask_end(producer: ProducerId, *, commit: bool) -> Any:
    return EndTxnRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        committed=commit,
        max_version=3,
    )
