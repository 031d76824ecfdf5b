"""What the stages hand to one another: frozen values, JSON-ready, without behaviour beyond naming themselves.

Offsets are Kafka log offsets; a *position* is the next offset to read. Times are milliseconds since the epoch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from sluice.pipelines.ranges import Range
from sluice.pipelines.typed.wider import joined
from sluice.pipelines.units import show_instant, show_window


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


class RequestKind(StrEnum):
    CATCH_UP = "catch-up"
    OFFSETS = "offsets"
    WINDOW = "window"
    COMPACT = "compact"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class AskedRange:
    """Offsets of one partition that somebody asked for by number."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a run was asked to land, or to merge. `only` restricts to partitions.

    `window` is the start of a window in ms, `until` the end of the last one where several are asked for. With
    `replace`, what has landed is landed anew.
    """

    kind: RequestKind
    ranges: tuple[AskedRange, ...] = ()
    window: int | None = None
    only: tuple[TopicPartition, ...] = ()
    until: int | None = None
    replace: bool = False

    def __str__(self) -> str:
        named = self._what() + (f" of {', '.join(map(str, self.only))}" if self.only else "")
        return f"{named}, replacing" if self.replace else named

    def _what(self) -> str:
        match self.kind:
            case RequestKind.OFFSETS:
                return "offsets " + ", ".join(f"{r.topic}:{r.partition}:{r.start}-{r.end}" for r in self.ranges)
            case RequestKind.WINDOW if self.until is not None:
                return f"windows {show_window(self.window or 0)} to {show_window(self.until)}"
            case RequestKind.WINDOW:
                return f"window {show_window(self.window or 0)}"
            case RequestKind.COMPACT:
                return "compaction"
            case RequestKind.REPLAY:
                return "replay of what was quarantined"
            case _:
                return "catch-up"


@dataclass(frozen=True, slots=True)
class Slice:
    """One contiguous range that one task reads. `window` is the start of its window in ms, None outside windows.

    Its parts go to `folder` below the feed's data, or, where `by_time` is the length of a window (ms), to the folders
    of their records' own time.
    """

    topic: str
    partition: int
    incarnation: str
    start: int
    end: int
    leader_epoch: int = -1
    estimated_bytes: int = 0
    window: int | None = None
    folder: str = ""
    by_time: int = 0

    @property
    def key(self) -> Key:
        return Key(self.topic, self.partition, self.incarnation)

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def range(self) -> Range:
        return Range(self.start, self.end)

    @property
    def span(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.start}-{self.end}"


@dataclass(frozen=True, slots=True)
class Task:
    """The slices that one Spark task reads from one leader (a broker id)."""

    index: int
    leader: int
    slices: tuple[Slice, ...]

    @property
    def estimated_bytes(self) -> int:
        return sum(s.estimated_bytes for s in self.slices)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch will read, decided before anything is read. Its batch id is the number of its ledger entry."""

    feed: str
    cluster: str
    request: Request
    isolation: Isolation
    tasks: tuple[Task, ...]
    replaces: tuple[str, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        return tuple(s for t in self.tasks for s in t.slices)

    @property
    def span(self) -> int:
        """Offsets covered; the most records that can land."""
        return sum(s.span for s in self.slices)

    @property
    def estimated_bytes(self) -> int:
        return sum(t.estimated_bytes for t in self.tasks)

    @property
    def hash(self) -> str:
        """SHA-256 (hex) over the canonical JSON of the plan: equal plans, equal hash."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()


class PartKind(StrEnum):
    LANDED = "landed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file. `staged` is its lake path until it is published, `path` its lake path afterwards."""

    name: str
    kind: PartKind
    staged: str
    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Where the offsets of a range went; they add up to its span.

    `compacted` counts offsets that no batch holds (log compaction, or gaps that transactions leave).
    """

    landed: int = 0
    quarantined: int = 0
    dropped: int = 0
    control: int = 0
    aborted: int = 0
    compacted: int = 0

    @property
    def invisible(self) -> int:
        return self.control + self.aborted + self.compacted

    @property
    def total(self) -> int:
        return self.landed + self.quarantined + self.dropped + self.invisible

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Tally:
    """What rows say to one row expectation: its place in the contract, how many rows it looked at (nulls are none of
    its business, unless it is about them), how many of these broke it, and the offsets of the first of those.
    """

    expectation: int
    checked: int
    unexpected: int = 0
    first: tuple[int, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        first = tuple(sorted(self.first + other.first)[:EXAMPLES])
        checked, unexpected = self.checked + other.checked, self.unexpected + other.unexpected
        return Tally(self.expectation, checked, unexpected, first)


EXAMPLES = 3
"""Offsets that a tally keeps: what was in the records stays out of receipts and the ledger."""


class DriftKind(StrEnum):
    """How records differ from the schema: a field that it does not name, one that no record has, one of a larger type
    of the same kind, one of another kind."""

    NEW = "new"
    MISSING = "missing"
    WIDENED = "widened"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Drift:
    """One field that drifts: in how many records, the offset of the first, and the type (as a schema says it; empty:
    unknown) that would hold what was seen."""

    kind: DriftKind
    field: str
    records: int
    first: int
    type: str = ""

    def __add__(self, other: Drift) -> Drift:
        """Of other records of the same kind and field; the type is the least that would hold all of them."""
        records, first = self.records + other.records, min(self.first, other.first)
        return Drift(self.kind, self.field, records, first, joined(self.type, other.type))


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a task says of a finished slice.

    `position` is where reading stopped (≥ `slice.end`), `input_bytes` what came over the wire, `timings` the
    nanoseconds spent by activity (`wait`, `crc`, `decompress`, `decode`, `type`, `validate`, `encode`, `write`),
    `format` the name of what made rows of the records (`Shape.name`), `tallies` and `drift` what it saw of them.
    `relanded` are offsets that were quarantined and landed later, by a replay; `mended` are those of them whose bytes
    are not the log's any more.
    """

    slice: Slice
    position: int
    counts: Counts
    parts: tuple[Part, ...]
    attempt: str
    input_bytes: int = 0
    timings: dict[str, int] = field(default_factory=dict, compare=False)
    format: str = "raw"
    tallies: tuple[Tally, ...] = ()
    drift: tuple[Drift, ...] = ()
    relanded: tuple[Range, ...] = ()
    mended: tuple[Range, ...] = ()
    adopted: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class SliceFailure:
    """Why a slice was not finished. `error` is the error's class name; `fatal` says that a retry will not help."""

    slice: Slice
    error: str
    message: str
    remedy: str = ""
    fatal: bool = False


Outcome = Receipt | SliceFailure


@dataclass(frozen=True, slots=True)
class Owner:
    """Who works on a batch. `token` is unique to a run's process; `run` is the Dagster run id."""

    token: str
    run: str
    host: str
    pid: int
    started: int

    def describe(self) -> str:
        return f"run {self.run[:8]} (pid {self.pid} on {self.host})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an owner, or a run, is dead, and by what evidence: "its process (pid 7) is gone from this machine"."""

    dead: bool
    why: str


def to_json(value: Any) -> str:
    """Canonical JSON of a value (sorted keys, no spaces)."""
    return json.dumps(value, default=_fields, sort_keys=True, separators=(",", ":"))


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}
