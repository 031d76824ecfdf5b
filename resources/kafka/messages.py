"""Kafka's protocol as far as Sluice speaks it: values in, kafka-python's requests out; responses in, values out.

With `wire` the only module that touches kafka-python's internal API. Promises: isolation level, epochs and versions
are set explicitly in every request; a topic is never created by asking for it; the answer to a fetch is read without
copying record bytes, every length checked against the bytes that are there.
"""

from __future__ import annotations

import base64
import itertools
import struct
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kafka.errors import (
    GroupIdNotFoundError,
    KafkaError,
    KafkaProtocolError,
    LeaderNotAvailableError,
    UnknownTopicOrPartitionError,
)
from kafka.protocol.admin import DescribeGroupsRequest, DescribeLogDirsRequest, ListGroupsRequest
from kafka.protocol.consumer import (
    FetchRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListOffsetsRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetForLeaderEpochRequest,
    SyncGroupRequest,
)
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from sluice.pipelines.ports import Member
from sluice.pipelines.values import CommittedOffset, Isolation, TopicPartition
from sluice.resources.kafka.failures import error_of

FETCH_API = 1
LATEST, EARLIEST = -1, -2
"""Times that ask ListOffsets for the end (stable under read_committed) and the start of a log."""
GROUP, TRANSACTION = 0, 1
"""Kinds of coordinator."""
_NAME = "range"
_LEVELS = {Isolation.READ_UNCOMMITTED: 0, Isolation.READ_COMMITTED: 1}

Code = type[KafkaError] | None
T = TypeVar("T")


def printed_id(topic_id: uuid.UUID) -> str:
    """A topic id as Kafka's own tools print it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def parsed_id(text: str) -> uuid.UUID:
    """The reverse of `printed_id`."""
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))


# -- where things are ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a partition is led. `leader` −1: nowhere at this moment."""

    tp: TopicPartition
    topic_id: str
    leader: int
    leader_epoch: int
    rack: str | None


@dataclass(frozen=True, slots=True)
class Layout:
    """What a broker knows. `topics` is name → id, without internal ones; `errors` are those that it refused."""

    cluster_id: str
    topics: Mapping[str, str]
    places: Mapping[TopicPartition, Place]
    errors: Mapping[str, type[KafkaError]]


def ask_layout(topics: Iterable[str] | None) -> Any:
    """Metadata of the topics; None: of all. Version 10 (Kafka 2.8) brought topic ids."""
    topic = MetadataRequest.MetadataRequestTopic
    names = None if topics is None else [topic(name=name) for name in topics]
    return MetadataRequest(topics=names, allow_auto_topic_creation=False, min_version=10)


def read_layout(response: Any) -> Layout:
    racks = {broker.node_id: broker.rack for broker in response.brokers}
    good = [t for t in response.topics if t.error_code == 0]
    ids = {t.name: printed_id(t.topic_id) if t.topic_id else "" for t in good}
    places = {
        tp: Place(tp, ids[t.name], p.leader_id, p.leader_epoch, racks.get(p.leader_id))
        for t in good
        for p in t.partitions
        for tp in (TopicPartition(t.name, p.partition_index),)
    }
    errors = {t.name: e for t in response.topics if (e := error_of(t.error_code))}
    named = {t.name: ids[t.name] for t in good if not t.is_internal}
    return Layout(response.cluster_id or "", named, places, errors)


def missing(place: Place | None) -> KafkaError:
    """Why a partition cannot be asked: nobody knows it, or nobody leads it."""
    return UnknownTopicOrPartitionError() if place is None else LeaderNotAvailableError()


@dataclass(frozen=True, slots=True)
class Listed:
    """The answer for one partition: `offset` and `timestamp` −1 when there is no such record."""

    error: Code
    offset: int
    timestamp: int


def ask_offsets(places: Iterable[tuple[Place, int]], isolation: Isolation) -> Any:
    """ListOffsets of each place at a time in ms (or LATEST, EARLIEST)."""
    topic = ListOffsetsRequest.ListOffsetsTopic
    wanted = {place.tp: (place.leader_epoch, time) for place, time in places}
    topics = [
        topic(
            name=name,
            partitions=[
                topic.ListOffsetsPartition(partition_index=p, current_leader_epoch=epoch, timestamp=time)
                for p, (epoch, time) in partitions
            ],
        )
        for name, partitions in _by_topic(wanted)
    ]
    return ListOffsetsRequest(
        replica_id=-1, isolation_level=_LEVELS[isolation], topics=topics, min_version=4, max_version=7
    )


def read_offsets(response: Any) -> dict[TopicPartition, Listed]:
    return {
        TopicPartition(t.name, p.partition_index): Listed(error_of(p.error_code), p.offset, p.timestamp)
        for t in response.topics
        for p in t.partitions
    }


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """Where an epoch ended; `end` −1 when the leader knows no such epoch."""

    error: Code
    end: int


def ask_epoch_ends(places: Iterable[tuple[Place, int]]) -> Any:
    """OffsetForLeaderEpoch (KIP-101) of each place's epoch given."""
    topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    wanted = {place.tp: (place.leader_epoch, epoch) for place, epoch in places}
    topics = [
        topic(
            topic=name,
            partitions=[
                topic.OffsetForLeaderPartition(partition=p, current_leader_epoch=current, leader_epoch=epoch)
                for p, (current, epoch) in partitions
            ],
        )
        for name, partitions in _by_topic(wanted)
    ]
    return OffsetForLeaderEpochRequest(replica_id=-1, topics=topics)


def read_epoch_ends(response: Any) -> dict[TopicPartition, EpochEnd]:
    return {
        TopicPartition(t.topic, p.partition): EpochEnd(error_of(p.error_code), p.end_offset)
        for t in response.topics
        for p in t.partitions
    }


def ask_log_dirs(tps: Iterable[TopicPartition]) -> Any:
    topic = DescribeLogDirsRequest.DescribableLogDirTopic
    topics = [
        topic(topic=name, partitions=[p for p, _ in partitions]) for name, partitions in _by_topic(dict.fromkeys(tps))
    ]
    return DescribeLogDirsRequest(topics=topics)


def read_log_bytes(response: Any) -> dict[TopicPartition, int]:
    """Bytes of each log on the broker that answered; empty where it does not tell."""
    return {
        TopicPartition(t.name, p.partition_index): p.partition_size
        for folder in response.results
        if folder.error_code == 0
        for t in folder.topics
        for p in t.partitions
        if not p.is_future_key
    }


# -- records ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchAsk:
    """One partition of a fetch, from `position`, about `max_bytes`."""

    place: Place
    position: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class FetchPart:
    """A broker's answer for one partition. `replica` ≥ 0 names the broker to read from instead (KIP-392)."""

    error: Code
    high_watermark: int
    stable_end: int
    replica: int
    aborted: tuple[tuple[int, int], ...]
    records: memoryview


@dataclass(slots=True)
class FetchAnswer:
    """The answer to a fetch: partitions by (topic name or printed topic id, partition)."""

    throttle_time_ms: int
    error: Code
    parts: dict[tuple[str, int], FetchPart] = field(default_factory=dict)


def ask_fetch(asks: Sequence[FetchAsk], isolation: Isolation, max_bytes: int, wait_ms: int, rack: str) -> Any:
    """One multi-partition fetch without a session, partitions in the order given.

    Version 13 (Kafka 3.1) names topics by id, so that a recreated topic cannot answer; 12 by name.
    """
    topic = FetchRequest.FetchTopic
    topics = [
        topic(
            topic=name,
            topic_id=parsed_id(topic_id),
            partitions=[
                topic.FetchPartition(
                    partition=ask.place.tp.partition,
                    current_leader_epoch=ask.place.leader_epoch,
                    fetch_offset=ask.position,
                    last_fetched_epoch=-1,
                    log_start_offset=-1,
                    partition_max_bytes=ask.max_bytes,
                )
                for ask in group
            ],
        )
        # Only neighbours share an entry: the broker serves partitions in the order of the request.
        for (name, topic_id), group in itertools.groupby(asks, lambda a: (a.place.tp.topic, a.place.topic_id))
    ]
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=_LEVELS[isolation],
        session_id=0,
        session_epoch=-1,
        topics=topics,
        forgotten_topics_data=[],
        rack_id=rack,
        min_version=12,
        max_version=13,
    )


def read_fetch(data: memoryview, at: int, version: int) -> FetchAnswer:
    """The body of a FetchResponse (version 12 or 13) in `data` from `at`; records are views of `data`.

    Raises KafkaProtocolError when lengths point outside.
    """
    try:
        return _read_fetch(data, at, version)
    except (struct.error, IndexError, ValueError) as error:
        raise KafkaProtocolError("an answer to a fetch that cannot be read") from error


_HEAD = struct.Struct(">ihi")
_PARTITION = struct.Struct(">ihqqq")
_PAIR = struct.Struct(">qq")
_INT32 = struct.Struct(">i")


def _read_fetch(data: memoryview, at: int, version: int) -> FetchAnswer:
    throttle, code, _session = _HEAD.unpack_from(data, at)
    answer = FetchAnswer(throttle, error_of(code))
    topics, at = _count(data, at + _HEAD.size)
    for _ in range(topics):
        topic, at = _topic(data, at, version)
        partitions, at = _count(data, at)
        for _ in range(partitions):
            number, part, at = _partition(data, at)
            answer.parts[topic, number] = part
        at = _skip_tags(data, at)
    return answer


def _topic(data: memoryview, at: int, version: int) -> tuple[str, int]:
    if version >= 13:
        return printed_id(uuid.UUID(bytes=bytes(_slice(data, at, 16)))), at + 16
    size, at = _count(data, at)
    return str(_slice(data, at, size), "utf-8"), at + size


def _partition(data: memoryview, at: int) -> tuple[int, FetchPart, int]:
    number, code, high_watermark, stable_end, _log_start = _PARTITION.unpack_from(data, at)
    count, at = _count(data, at + _PARTITION.size)
    aborted = []
    for _ in range(count):
        aborted.append(_PAIR.unpack_from(data, at))
        at = _skip_tags(data, at + _PAIR.size)
    (replica,) = _INT32.unpack_from(data, at)
    size, at = _count(data, at + _INT32.size)
    records = _slice(data, at, size)
    part = FetchPart(error_of(code), high_watermark, stable_end, replica, tuple(aborted), records)
    return number, part, _skip_tags(data, at + size)


def _slice(data: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(data):
        raise IndexError(at + size)
    return data[at : at + size]


def _count(data: memoryview, at: int) -> tuple[int, int]:
    """A compact length (KIP-482): one more than it says, 0 for null."""
    value, at = _varint(data, at)
    return max(value - 1, 0), at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 35:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a length of more than 5 bytes")


def _skip_tags(data: memoryview, at: int) -> int:
    fields, at = _varint(data, at)
    for _ in range(fields):
        _tag, at = _varint(data, at)
        size, at = _varint(data, at)
        at += size
    return at


# -- groups and transactions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a group: one join."""

    group: str
    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Producer:
    """A transactional producer as its coordinator numbered it."""

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
    found = response.coordinators[0] if response.coordinators else response  # several keys from version 4 on
    return Coordinator(error_of(found.error_code), found.node_id, found.host, found.port)


def ask_committed(group: str, tps: Iterable[TopicPartition]) -> Any:
    """OffsetFetch with require_stable (KIP-447, version 7)."""
    topics = [(name, [p for p, _ in partitions]) for name, partitions in _by_topic(dict.fromkeys(tps))]
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
    """What the group has committed; None where it has nothing."""
    return {
        TopicPartition(topic.name, p.partition_index): CommittedOffset(
            p.committed_offset, p.committed_leader_epoch, p.metadata or ""
        )
        if p.committed_offset >= 0
        else None
        for topic in _of_group(response).topics
        for p in topic.partitions
    }


def committed_errors(response: Any) -> set[type[KafkaError]]:
    answer = _of_group(response)
    return top_error(answer) | partition_errors(answer)


def _of_group(response: Any) -> Any:
    return response.groups[0] if response.groups else response  # several groups from version 8 on


def ask_group(group: str) -> Any:
    return DescribeGroupsRequest(groups=[group], include_authorized_operations=False)


@dataclass(frozen=True, slots=True)
class Described:
    """A group as its coordinator describes it; not `known`: it has no group of the classic kind by that name."""

    known: bool
    members: tuple[Member, ...]


def read_group(response: Any) -> Described:
    group = response.groups[0]
    members = (
        Member(m.member_id, m.client_id, m.client_host.removeprefix("/"), m.group_instance_id or None)
        for m in group.members
    )
    absent = error_of(group.error_code) is GroupIdNotFoundError or group.group_state == "Dead"
    return Described(not absent, tuple(members))


def group_errors(response: Any) -> set[type[KafkaError]]:
    """That the group does not exist is none (an error from version 6 on)."""
    return top_error(response.groups[0]) - {GroupIdNotFoundError}


def ask_groups() -> Any:
    """The groups that a coordinator holds; version 5 (Kafka 3.8) tells their type."""
    return ListGroupsRequest(states_filter=[], types_filter=[])


def read_groups(response: Any) -> dict[str, tuple[str, str]]:
    """Name → (type, state) in lower case; the type empty where the broker does not tell."""
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
    """SyncGroup of the only member. It takes no partitions: it reads none, it only commits."""
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
    """OffsetCommit under the seat's member id and generation."""
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
        for name, partitions in _by_topic(offsets)
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
    return InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
        max_version=4,
    )


def ask_add_offsets(producer: Producer, group: str) -> Any:
    return AddOffsetsToTxnRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        group_id=group,
        max_version=3,
    )


def ask_commit_in(producer: Producer, seat: Seat, offsets: Mapping[TopicPartition, CommittedOffset]) -> Any:
    """TxnOffsetCommit under the seat's member id and generation (KIP-447, version 3)."""
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
        for name, partitions in _by_topic(offsets)
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


def ask_end(producer: Producer, *, commit: bool) -> Any:
    return EndTxnRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        committed=commit,
        max_version=3,
    )


def partition_errors(response: Any) -> set[type[KafkaError]]:
    """The errors in a response that lists topics, partitions and a code for each."""
    return {e for t in response.topics for p in t.partitions if (e := error_of(p.error_code))}


def top_error(response: Any) -> set[type[KafkaError]]:
    """The error of a response that has one for the whole."""
    return {e for e in [error_of(response.error_code)] if e}


def _by_topic(wanted: Mapping[TopicPartition, T]) -> list[tuple[str, list[tuple[int, T]]]]:
    grouped: dict[str, list[tuple[int, T]]] = {}
    for tp, value in wanted.items():
        grouped.setdefault(tp.topic, []).append((tp.partition, value))
    return list(grouped.items())
