"""Values reported by Kafka: partitions, offsets, transactions and settings; bounds of a fetch; names of topics.

Also the arithmetic on half-open offset ranges `[start, end)` (docs/developers/design/requests.md).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sluice.pipelines.util.documents import Derived, Internal
from sluice.pipelines.util.units import show_instant


class Range(NamedTuple):
    """Offsets from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def span(self) -> int:
        """How many offsets the range covers."""
        return self.end - self.start

    def meets(self, other: Range) -> bool:
        """Returns true if the two ranges share an offset."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same offsets as sorted ranges that neither overlap nor touch. Empty ranges vanish."""
    out: list[Range] = []
    for r in sorted(r for r in ranges if r.start < r.end):
        if out and r.start <= out[-1].end:
            out[-1] = Range(out[-1].start, max(out[-1].end, r.end))
        else:
            out.append(Range(*r))
    return tuple(out)


def subtract(wanted: Range, taken: Iterable[Range]) -> tuple[Range, ...]:
    """The offsets of `wanted` that no range of `taken` holds, in order."""
    return tuple(_iterate_gaps(wanted, union(taken)))


def _iterate_gaps(wanted: Range, taken: tuple[Range, ...]) -> Iterator[Range]:
    at = wanted.start
    for r in taken:
        if r.end <= at or r.start >= wanted.end:
            continue
        if r.start > at:
            yield Range(at, r.start)
        at = max(at, r.end)
    if at < wanted.end:
        yield Range(at, wanted.end)


def intersect(ranges: Iterable[Range], bound: Range) -> tuple[Range, ...]:
    """The parts of `ranges` that lie inside `bound`, as a union."""
    return union(Range(max(r.start, bound.start), min(r.end, bound.end)) for r in ranges)


def find_contiguous_end(start: int, ranges: Iterable[Range]) -> int:
    """The first offset from `start` on that no range holds: the frontier."""
    at = start
    for r in union(ranges):
        if r.start <= at < r.end:
            at = r.end
    return at


def cut(r: Range, at: Iterable[int]) -> tuple[Range, ...]:
    """`r` cut at the given offsets. Offsets outside of it are ignored."""
    bounds = [r.start, *sorted({x for x in at if r.start < x < r.end}), r.end]
    return tuple(Range(a, b) for a, b in itertools.pairwise(bounds) if a < b)


def is_covered(ranges: Iterable[Range], wanted: Range) -> bool:
    """Returns true if every offset of `wanted` is in one of `ranges`."""
    taken = tuple(ranges)
    for r in taken:
        if r.start <= wanted.start and wanted.end <= r.end:
            return True
    return not subtract(wanted, taken)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """How long a topic keeps records.

    `retention_ms` and `retention_bytes` (per partition) are None where there is no bound. `deletes` and `compacts` are
    its cleanup.policy; without `deletes` neither bound applies.
    """

    retention_ms: int | None = None
    retention_bytes: int | None = None
    deletes: bool = True
    compacts: bool = False

    @property
    def only_deletes(self) -> bool:
        """Returns whether compaction leaves no gaps in its logs, unless the policy was another one before."""
        return self.deletes and not self.compacts


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The brokers' time limits, in ms; None if the cluster does not report it or has no limit.

    `offsets_retention`: how long an empty group's offsets last (offsets.retention.minutes);
    `transactional_id_expiration`: how long an unused transactional id lasts (transactional.id.expiration.ms);
    `transaction_max_timeout`: how long a transaction may stay open (transaction.max.timeout.ms);
    `min_session`, `max_session`: the least and the most that a member of a group may ask for
    (group.min.session.timeout.ms, group.max.session.timeout.ms).
    """

    offsets_retention: int | None = None
    transactional_id_expiration: int | None = None
    transaction_max_timeout: int | None = None
    min_session: int | None = None
    max_session: int | None = None


@dataclass(frozen=True, slots=True)
class Configs:
    """Settings of topics and brokers. Topics whose settings are not visible are left out; `denied` names those of them
    that the cluster refused to show."""

    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    broker: BrokerConfig = BrokerConfig()
    denied: tuple[str, ...] = ()


class TopicPartition(NamedTuple):
    """One partition of a topic, by name. As text: `orders:3`."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


GONE = "#gone"
"""In an incarnation after the topic id: the last one of a partition that is gone."""


class Key(NamedTuple):
    """One partition during one life of its topic. The ledger accounts for offsets by this key.

    `incarnation` is the topic id, followed by `#n` after the n-th accepted truncation of the partition's log.
    """

    topic: str
    partition: int
    incarnation: Internal[str]

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def topic_id(self) -> Derived[str]:
        return self.incarnation.partition("#")[0]

    @property
    def is_ended(self) -> bool:
        """Returns whether this is the last life of a partition that was accepted as gone."""
        return GONE in self.incarnation

    @property
    def life(self) -> str:
        """Returns a short form of the incarnation: `27YBcOdd`, `27YBcOdd#1`."""
        return self.topic_id[:8] + self.incarnation[len(self.topic_id) :]

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


class Isolation(StrEnum):
    """Which records a reader sees, in Kafka's own words."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition as Kafka describes it at one moment.

    `last_stable_offset` is the end of the readable log; with `read_uncommitted` it is the high watermark. `log_bytes`
    is the size of the leader's log (in tiered storage, an estimate), None where the cluster does not tell.
    """

    topic: str
    partition: int
    topic_id: str
    leader: int
    leader_epoch: int
    log_start: int
    last_stable_offset: int
    high_watermark: int
    log_bytes: int | None = None
    rack: str | None = None

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's committed offset with its metadata. `leader_epoch` is −1 when unknown. `settled` is false if a group
    with two stores has another offset, or none, in one of them."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    settled: bool = True


@dataclass(frozen=True, slots=True)
class OffsetAtTime:
    """The first record stamped at or after the requested time (ms).

    `by_marker` is set where transaction markers hide the record and it was searched for by offset. The offset is then
    exact if stamps are in order there, else near, and `timestamp` may be the requested time instead of a record's.
    `against` is set where records stamped so late lie before it, which their neighbours contradict.
    """

    offset: int
    timestamp: int
    by_marker: bool = False
    against: bool = False
    reads: int = field(default=0, compare=False)
    """Reads of the log that decided it."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The last batch of a landed range, in record format v2: one of its offsets, its checksum and its size in bytes.

    The checksum covers times, producer and records. A batch of a log never changes, except by compaction.
    """

    offset: int
    checksum: int
    size: int


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that has not ended.

    `start` is its first offset in a partition, which is the last stable offset there. `name` is its transactional id,
    empty where the cluster does not tell. `last_written` is in ms, −1 when unknown.
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


RESERVED_BYTES = 256 << 20
"""The share of a task's memory for the interpreter and its libraries."""
BATCH_COPIES = 6
"""How often a task holds the bytes of its largest record at once: decompressed, as a row, typed, and in Parquet's
encoder (docs/developers/performance.md).
"""
LEAST_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of a fetch stream.

    `active_ranges` are read at once. One response holds at most `request_bytes`, and `partition_bytes` of each
    partition. `ahead_bytes` may wait in memory for the consumer. With `leaders_only`, no follower in the rack (KIP-392)
    is read.
    """

    active_ranges: int = 16
    request_bytes: int = 16 << 20
    partition_bytes: int = 4 << 20
    ahead_bytes: int = 32 << 20
    leaders_only: bool = False

    @property
    def kept_bytes(self) -> int:
        """The share of `ahead_bytes` for bytes of answers that later ranges of their partitions begin with."""
        return self.ahead_bytes // 4

    def free_bytes(self, memory: int) -> int:
        """Returns the bytes for rows in a task with this memory."""
        return memory - RESERVED_BYTES - self.ahead_bytes - self.request_bytes

    def batch_bytes(self, memory: int) -> int:
        """Returns the most bytes of records of one batch in a task with this memory. Larger batches are oversized."""
        return max(self.free_bytes(memory) // BATCH_COPIES, LEAST_BATCH_BYTES)


MAX_ENCODED = 160
"""The most characters of an encoded topic. With partition, offsets and batch a file name stays under 255."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def is_topic_name(name: str) -> bool:
    """Returns true if Kafka accepts the name for a topic (`[a-zA-Z0-9._-]{1,249}`, not `.` or `..`)."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def encode_topic(name: str) -> str:
    """The topic's name, encoded for a file name. Raises ValueError when `name` is not a topic name.

    The result holds only a-z 0-9 . _ ~ and never starts with `.` or `_`, because tools treat such files as hidden.
    Lower-case letters, digits, `.` and `_` stay; `A` becomes `~a`, `-` becomes `~~`; a leading `.` or `_` gets a `~`.
    Different names get different encodings, also where case is ignored, and `decode_topic` reverses them. A result
    longer than MAX_ENCODED is cut and ends in `~1` and a SHA-256: still unique, but not reversible.
    """
    if not is_topic_name(name):
        raise ValueError("not a topic name")
    signs = [
        "~~" if c == "-" else f"~{c.lower()}" if c.isupper() or (i == 0 and c in "._") else c
        for i, c in enumerate(name)
    ]
    encoded = "".join(signs)
    return encoded if len(encoded) <= MAX_ENCODED else _cut_encoded(name, signs)


def _cut_encoded(name: str, signs: list[str]) -> str:
    tail = "~1" + hashlib.sha256(name.encode()).hexdigest()
    while sum(map(len, signs)) > MAX_ENCODED - len(tail):
        signs.pop()
    return "".join(signs) + tail


def decode_topic(encoded: str) -> str:
    """The topic whose encoding is `encoded`. Raises ValueError when there is none, or when it was cut."""
    name = re.sub(r"~(.)", lambda sign: "-" if sign[1] == "~" else sign[1].upper(), encoded)
    if not is_topic_name(name) or encode_topic(name) != encoded:
        raise ValueError("not an encoded topic name, or one that was cut")
    return name
