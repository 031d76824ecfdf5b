"""Kafka's protocol as far as Sluice uses it: values to kafka-python's requests, responses to values.

Promises: isolation level, epochs and versions are set explicitly in every request; no request creates a topic; the
answer to a fetch is read without copying record bytes, and every length is checked against the bytes received.
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
    KafkaError,
    KafkaProtocolError,
    LeaderNotAvailableError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from kafka.protocol.admin import (
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    DescribeProducersRequest,
    ListTransactionsRequest,
)
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest

from sluice.pipelines.model.kafka import BrokerConfig, Configs, Isolation, OpenTransaction, TopicConfig, TopicPartition
from sluice.resources.kafka.protocol.kafka_errors import error_of

FETCH_API = 1
FETCH_VERSIONS = 12, 13
"""12 is from Kafka 2.7; 13 (Kafka 3.1) names topics by id."""
LATEST, EARLIEST = -1, -2
"""Times for which ListOffsets returns the end (stable under read_committed) and the start of a log."""
_EARLIEST_LOCAL = -4
_LEVELS = {Isolation.READ_UNCOMMITTED: 0, Isolation.READ_COMMITTED: 1}

Code = type[KafkaError] | None
T = TypeVar("T")


def printed_id(topic_id: uuid.UUID) -> str:
    """Return a topic id as Kafka's own tools print it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def parsed_id(text: str) -> uuid.UUID:
    """Parse the output of `printed_id`."""
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))


# -- metadata -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leadership:
    """The leader of a partition. `leader` −1: none at this moment."""

    tp: TopicPartition
    topic_id: str
    leader: int
    leader_epoch: int
    rack: str | None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A broker's metadata. `topics`: name → id, without internal ones; `errors`: of topics that it refused."""

    cluster_id: str
    topics: Mapping[str, str]
    leaders: Mapping[TopicPartition, Leadership]
    errors: Mapping[str, type[KafkaError]]
    brokers: tuple[int, ...] = ()


def ask_layout(topics: Iterable[str] | None) -> Any:
    """Build a Metadata request for the topics; None: for all. Version 10 (Kafka 2.8) brought topic ids."""
    topic = MetadataRequest.MetadataRequestTopic
    names = None if topics is None else [topic(name=name) for name in topics]
    return MetadataRequest(topics=names, allow_auto_topic_creation=False, min_version=10)


def read_layout(response: Any) -> ClusterView:
    racks = {broker.node_id: broker.rack for broker in response.brokers}
    good = [t for t in response.topics if t.error_code == 0]
    ids = {t.name: printed_id(t.topic_id) if t.topic_id else "" for t in good}
    leaders = {
        tp: Leadership(tp, ids[t.name], p.leader_id, p.leader_epoch, racks.get(p.leader_id))
        for t in good
        for p in t.partitions
        for tp in (TopicPartition(t.name, p.partition_index),)
    }
    errors = {t.name: e for t in response.topics if (e := error_of(t.error_code))}
    topics = {t.name: ids[t.name] for t in good if not t.is_internal}
    return ClusterView(response.cluster_id or "", topics, leaders, errors, tuple(racks))


def missing(leadership: Leadership | None) -> KafkaError:
    """Return the error of a partition that is unknown or has no leader."""
    return UnknownTopicOrPartitionError() if leadership is None else LeaderNotAvailableError()


@dataclass(frozen=True, slots=True)
class Listed:
    """The answer for one partition: `offset` and `timestamp` are −1 if no record matches."""

    error: Code
    offset: int
    timestamp: int


def ask_offsets(
    leaderships: Iterable[tuple[Leadership, int]], isolation: Isolation, versions: tuple[int, int] = (4, 7)
) -> Any:
    """Build a ListOffsets request for each partition at a time in ms (or LATEST, EARLIEST)."""
    topic = ListOffsetsRequest.ListOffsetsTopic
    wanted = {leadership.tp: (leadership.leader_epoch, time) for leadership, time in leaderships}
    topics = [
        topic(
            name=name,
            partitions=[
                topic.ListOffsetsPartition(partition_index=p, current_leader_epoch=epoch, timestamp=time)
                for p, (epoch, time) in partitions
            ],
        )
        for name, partitions in by_topic(wanted)
    ]
    lowest, highest = versions
    return ListOffsetsRequest(
        replica_id=-1, isolation_level=_LEVELS[isolation], topics=topics, min_version=lowest, max_version=highest
    )


def ask_local_starts(leaderships: Iterable[Leadership]) -> Any:
    """Build a request for the first offsets on the leader's own disks (KIP-405, Kafka 3.5)."""
    wanted = ((leadership, _EARLIEST_LOCAL) for leadership in leaderships)
    return ask_offsets(wanted, Isolation.READ_UNCOMMITTED, versions=(8, 8))


def read_offsets(response: Any) -> dict[TopicPartition, Listed]:
    return {
        TopicPartition(t.name, p.partition_index): Listed(error_of(p.error_code), p.offset, p.timestamp)
        for t in response.topics
        for p in t.partitions
    }


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end of an epoch; `end` is −1 if the leader does not know the epoch."""

    error: Code
    end: int


def ask_epoch_ends(leaderships: Iterable[tuple[Leadership, int]]) -> Any:
    """Build an OffsetForLeaderEpoch request (KIP-101) for the given epoch of each partition."""
    topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    wanted = {leadership.tp: (leadership.leader_epoch, epoch) for leadership, epoch in leaderships}
    topics = [
        topic(
            topic=name,
            partitions=[
                topic.OffsetForLeaderPartition(partition=p, current_leader_epoch=current, leader_epoch=epoch)
                for p, (current, epoch) in partitions
            ],
        )
        for name, partitions in by_topic(wanted)
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
        topic(topic=name, partitions=[p for p, _ in partitions]) for name, partitions in by_topic(dict.fromkeys(tps))
    ]
    return DescribeLogDirsRequest(topics=topics)


def read_log_bytes(response: Any) -> dict[TopicPartition, int]:
    """Return the bytes of each log on the broker that answered; empty if it does not give them."""
    return {
        TopicPartition(t.name, p.partition_index): p.partition_size
        for folder in response.results
        if folder.error_code == 0
        for t in folder.topics
        for p in t.partitions
        if not p.is_future_key
    }


def ask_producers(tps: Iterable[TopicPartition]) -> Any:
    """Build a DescribeProducers request (KIP-664, Kafka 2.8)."""
    topic = DescribeProducersRequest.TopicRequest
    topics = [topic(name=n, partition_indexes=[p for p, _ in ps]) for n, ps in by_topic(dict.fromkeys(tps))]
    return DescribeProducersRequest(topics=topics)


def read_open(response: Any) -> dict[TopicPartition, tuple[Code, OpenTransaction | None]]:
    """Return the oldest open transaction of each partition, without its name."""
    return {
        TopicPartition(t.name, p.partition_index): (error_of(p.error_code), _oldest(p.active_producers))
        for t in response.topics
        for p in t.partitions
    }


def _oldest(producers: Iterable[Any]) -> OpenTransaction | None:
    values = (
        OpenTransaction(p.current_txn_start_offset, p.producer_id, p.producer_epoch, p.last_timestamp)
        for p in producers
        if p.current_txn_start_offset >= 0
    )
    return min(values, key=lambda t: t.start, default=None)


def ask_transactions(producers: Iterable[int]) -> Any:
    """Build a request for the transactions that a broker coordinates for these producers (KIP-664, Kafka 3.0)."""
    return ListTransactionsRequest(state_filters=[], producer_id_filters=sorted(set(producers)), max_version=0)


def read_names(response: Any) -> dict[int, str]:
    """Return the transactional ids by producer id."""
    return {t.producer_id: t.transactional_id for t in response.transaction_states}


# -- settings -----------------------------------------------------------------------------------------------------

_TOPIC, _BROKER = 2, 4
_DENIED = TopicAuthorizationFailedError.errno
_TOPIC_KEYS = ("cleanup.policy", "retention.ms", "retention.bytes")
_OFFSETS_MINUTES = "offsets.retention.minutes"
_ID_EXPIRATION, _MAX_TIMEOUT = "transactional.id.expiration.ms", "transaction.max.timeout.ms"
_MIN_SESSION, _MAX_SESSION = "group.min.session.timeout.ms", "group.max.session.timeout.ms"


def ask_configs(topics: Iterable[str], broker: int) -> Any:
    """Build a request for the topics' settings and those of `broker`, which alone can answer for itself."""
    resource = DescribeConfigsRequest.DescribeConfigsResource
    wanted = [resource(resource_type=_TOPIC, resource_name=t, configuration_keys=list(_TOPIC_KEYS)) for t in topics]
    keys = [_OFFSETS_MINUTES, _ID_EXPIRATION, _MAX_TIMEOUT, _MIN_SESSION, _MAX_SESSION]
    wanted.append(resource(resource_type=_BROKER, resource_name=str(broker), configuration_keys=keys))
    return DescribeConfigsRequest(resources=wanted)


def read_configs(response: Any) -> Configs:
    """Return the settings that this client may see; the rest is left out, and refused topics are named."""
    topics, broker, denied = {}, BrokerConfig(), list[str]()
    for result in response.results:
        values = {c.name: c.value or "" for c in result.configs}
        if result.error_code == 0 and result.resource_type == _TOPIC:
            policies = {p.strip() for p in values.get("cleanup.policy", "").split(",")}
            bounds = _limit(values, "retention.ms"), _limit(values, "retention.bytes")
            topics[result.resource_name] = TopicConfig(
                *bounds, deletes="delete" in policies, compacts="compact" in policies
            )
        elif result.error_code == 0:
            broker = _broker_config(values)
        elif result.resource_type == _TOPIC and result.error_code == _DENIED:
            denied.append(result.resource_name)
    return Configs(topics, broker, tuple(sorted(denied)))


def _broker_config(values: Mapping[str, str]) -> BrokerConfig:
    minutes = _limit(values, _OFFSETS_MINUTES)
    retention = None if minutes is None else minutes * 60_000
    times = (_limit(values, key) for key in (_ID_EXPIRATION, _MAX_TIMEOUT, _MIN_SESSION, _MAX_SESSION))
    return BrokerConfig(retention, *times)


def _limit(values: Mapping[str, str], key: str) -> int | None:
    """Return a number of ms or bytes; None, for no limit, if it is Kafka's -1 or no number."""
    value = values.get(key, "")
    return int(value) if value.isascii() and value.isdigit() else None


# -- records ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchAsk:
    """One partition of a fetch, from `position`, about `max_bytes`."""

    leadership: Leadership
    position: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class FetchPart:
    """A broker's answer for one partition. `replica` ≥ 0 names the broker to read from instead (KIP-392)."""

    error: Code
    high_watermark: int
    last_stable_offset: int
    replica: int
    aborted: tuple[tuple[int, int], ...]
    records: memoryview
    log_start: int = 0


@dataclass(slots=True)
class FetchAnswer:
    """The answer to a fetch: partitions by (printed topic id, partition), or by name unless `by_id`. `bytes` is its
    whole size."""

    throttle_time_ms: int
    error: Code
    bytes: int = 0
    parts: dict[tuple[str, int], FetchPart] = field(default_factory=dict)
    by_id: bool = True


def ask_fetch(asks: Sequence[FetchAsk], isolation: Isolation, max_bytes: int, wait_ms: int, rack: str) -> Any:
    """Build one multi-partition fetch without a session, with partitions in the order given.

    If topics go by id (KIP-516), a recreated one cannot answer.
    """
    topic = FetchRequest.FetchTopic
    topics = [
        topic(
            topic=name,
            topic_id=parsed_id(topic_id),
            partitions=[
                topic.FetchPartition(
                    partition=ask.leadership.tp.partition,
                    current_leader_epoch=ask.leadership.leader_epoch,
                    fetch_offset=ask.position,
                    last_fetched_epoch=-1,
                    log_start_offset=-1,
                    partition_max_bytes=ask.max_bytes,
                )
                for ask in group
            ],
        )
        # Only neighbours share an entry: the broker serves partitions in the order of the request.
        for (name, topic_id), group in itertools.groupby(asks, lambda a: (a.leadership.tp.topic, a.leadership.topic_id))
    ]
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=_LEVELS[isolation],
        # Without a session (KIP-227), each request names all of its partitions, and the broker remembers none.
        session_id=0,
        session_epoch=-1,
        topics=topics,
        forgotten_topics_data=[],
        rack_id=rack,
        min_version=FETCH_VERSIONS[0],
        max_version=FETCH_VERSIONS[1],
    )


def read_fetch(data: memoryview, at: int, version: int) -> FetchAnswer:
    """Read the body of a FetchResponse (version 12 or 13) in `data` from `at`; records are views of `data`.

    Raises KafkaProtocolError if a length points outside.
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
    answer = FetchAnswer(max(throttle, 0), error_of(code), len(data), by_id=version >= 13)
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
    number, code, high_watermark, last_stable_offset, start = _PARTITION.unpack_from(data, at)
    count, at = _count(data, at + _PARTITION.size)
    aborted = []
    for _ in range(count):
        aborted.append(_PAIR.unpack_from(data, at))
        at = _skip_tags(data, at + _PAIR.size)
    (replica,) = _INT32.unpack_from(data, at)
    size, at = _count(data, at + _INT32.size)
    records = _slice(data, at, size)
    part = FetchPart(error_of(code), high_watermark, last_stable_offset, replica, tuple(aborted), records, start)
    return number, part, _skip_tags(data, at + size)


def _slice(data: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(data):
        raise IndexError(at + size)
    return data[at : at + size]


def _count(data: memoryview, at: int) -> tuple[int, int]:
    """Read a compact length (KIP-482): stored as the length plus one, 0 for null."""
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


def partition_errors(response: Any) -> set[type[KafkaError]]:
    """Return the errors in a response that lists topics, partitions and a code for each."""
    return {e for t in response.topics for p in t.partitions if (e := error_of(p.error_code))}


def top_error(response: Any) -> set[type[KafkaError]]:
    """Return the error of a response that has one for the whole."""
    return {e for e in [error_of(response.error_code)] if e}


def by_topic(wanted: Mapping[TopicPartition, T]) -> list[tuple[str, list[tuple[int, T]]]]:
    grouped: dict[str, list[tuple[int, T]]] = {}
    for tp, value in wanted.items():
        grouped.setdefault(tp.topic, []).append((tp.partition, value))
    return list(grouped.items())
