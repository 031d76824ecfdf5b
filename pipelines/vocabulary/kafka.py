"""What Kafka says, as values: partitions, offsets, transactions, settings; and the bounds of a fetch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sluice.pipelines.vocabulary.units import show_instant


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """What a topic keeps: `retention_ms` and `retention_bytes` (of each partition), None for no end.

    `deletes` and `compacts` are its cleanup.policy; without `deletes` neither bound means anything.
    """

    retention_ms: int | None = None
    retention_bytes: int | None = None
    deletes: bool = True
    compacts: bool = False


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """In ms; None: the cluster does not tell, or there is no such bound.

    `offsets_retention`: how long an empty group's offsets last (offsets.retention.minutes);
    `transactional_id_expiration`: how long an unused transactional id lasts (transactional.id.expiration.ms);
    `transaction_max_timeout`: how long a transaction may stay open (transaction.max.timeout.ms).
    """

    offsets_retention: int | None = None
    transactional_id_expiration: int | None = None
    transaction_max_timeout: int | None = None


@dataclass(frozen=True, slots=True)
class Configs:
    """Topics whose settings the client may not see are left out; of these, `denied` are refused by name."""

    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    broker: BrokerConfig = BrokerConfig()
    denied: tuple[str, ...] = ()


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


class Key(NamedTuple):
    """What all accounting is by: one partition during one life of its topic.

    `incarnation` is the topic id, followed by `#n` after the n-th accepted truncation of this partition's log.
    """

    topic: str
    partition: int
    incarnation: str

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def topic_id(self) -> str:
        return self.incarnation.partition("#")[0]

    @property
    def life(self) -> str:
        """The incarnation for people, as short as it can be told from others: `27YBcOdd`, `27YBcOdd#1`."""
        return self.topic_id[:8] + self.incarnation[len(self.topic_id) :]

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


class Isolation(StrEnum):
    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition as Kafka describes it at one moment.

    `stable_end` is the end under the feed's isolation (LSO or high watermark); `log_bytes` the size of the
    leader's log, None where the cluster does not tell.
    """

    topic: str
    partition: int
    topic_id: str
    leader: int
    leader_epoch: int
    log_start: int
    stable_end: int
    high_watermark: int
    log_bytes: int | None = None
    rack: str | None = None

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's committed offset with what was stored beside it; `leader_epoch` −1 when unknown."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class OffsetAtTime:
    """The first record stamped at or after the time asked for.

    `by_marker`: transactions' markers hide it, and it was searched for by offset: right where stamps are in order
    there, else near. Then `timestamp` may be no record's: the time asked for.
    """

    offset: int
    timestamp: int
    by_marker: bool = False


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that has not ended: its first offset in a partition, which is the stable end there.

    `name` is its transactional id, empty where the cluster does not tell; `last_written` in ms, −1 when unknown.
    """

    start: int
    producer_id: int
    producer_epoch: int
    last_written: int = -1
    name: str = ""

    def __str__(self) -> str:
        who = f"transaction {self.name!r}" if self.name else "a transaction"
        since = f", last written {show_instant(self.last_written)}" if self.last_written >= 0 else ""
        return f"{who} of producer {self.producer_id}{since}"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of a stream: slices at once, bytes asked for in one answer (in all, of a partition), bytes held ahead."""

    active_slices: int = 16
    request_bytes: int = 16 << 20
    partition_bytes: int = 4 << 20
    ahead_bytes: int = 32 << 20
