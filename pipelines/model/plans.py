"""Requests and plans: what to land, its offset ranges and tasks, and the parsers of partitions and offset ranges."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import Isolation, Key, Range, TopicPartition
from sluice.pipelines.util.documents import AsText, Derived, Internal
from sluice.pipelines.util.units import many, show_window


class RequestKind(StrEnum):
    """The kind of work that a run was requested for."""

    CATCH_UP = "catch-up"
    OFFSETS = "offsets"
    WINDOW = "window"
    COMPACT = "compact"
    REPLAY = "replay"
    ERASE = "erase"


@dataclass(frozen=True, slots=True)
class AskedRange:
    """Offsets [start, end) of one partition, asked for by number."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Request:
    """The request to land or to merge.

    `ranges` are offsets by number. `window` is the start of a window (ms), and `until` the end of the last one when
    several are asked for. `only` restricts the request to these partitions; empty means all. With `replace`, rows that
    have landed are landed again.
    """

    kind: RequestKind
    ranges: tuple[AskedRange, ...] = ()
    window: int | None = None
    only: tuple[TopicPartition, ...] = ()
    until: int | None = None
    replace: bool = False

    def __str__(self) -> str:
        text = self._what() + (f" of {', '.join(map(str, self.only))}" if self.only else "")
        return f"{text}, replacing" if self.replace else text

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
                return "replay of quarantined records"
            case RequestKind.ERASE:
                return "erasure"
            case _:
                return "catch-up"


MANY_RANGES = 32
"""The number of a task's offset ranges from which small ones cost less together: in files, fetches and receipts."""
SMALL_BYTES = 1 << 20
"""The most bytes in the log of an offset range that shares a file."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """One contiguous range of offsets [start, end) that one task reads.

    `window` is the start of its window (ms), None outside windows. Its parts go to `folder` below the feed's data.
    Where `by_time` is set (the length of a window, ms), they go to the folders of their records' own times instead;
    `folder` then is that of records without a time.
    """

    topic: str
    partition: int
    incarnation: Internal[str]
    start: int
    end: int
    leader_epoch: Internal[int] = -1
    estimated_bytes: int = 0
    window: Internal[int | None] = None
    folder: Internal[str] = ""
    by_time: Internal[int] = 0

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

    @property
    def is_small(self) -> bool:
        """Returns whether it may share a file with others of its window."""
        return self.estimated_bytes <= SMALL_BYTES and self.window is not None and not self.by_time

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.start}-{self.end}"


class Assignor(StrEnum):
    """How offset ranges are given to tasks. All but the first are those of Kafka's consumers, and give whole
    partitions.
    """

    LEADER_BYTES = "leader_bytes"
    RANGE = "range"
    ROUND_ROBIN = "round_robin"
    STICKY = "sticky"


SEVERAL = -1
"""In the place of a leader: the task reads from more than one."""


_JSON_NAMES = {"offset_range": "slice", "offset_ranges": "slices"}


def name_in_json(field: str) -> str:
    """Returns a field's key in ledgers, receipts and plan hashes, which keep the names of their first version."""
    return _JSON_NAMES.get(field, field)


JSON_CONFIG = {"alias_generator": name_in_json}
"""Pydantic's configuration of a dataclass with such a field."""


@dataclass(frozen=True, slots=True)
class Task:
    """The offset ranges that one Spark task reads. `leader` is the id of the broker that leads them all, or
    `SEVERAL`.
    """

    index: int
    leader: int
    offset_ranges: tuple[OffsetRange, ...]
    __pydantic_config__ = JSON_CONFIG

    @property
    def estimated_bytes(self) -> Derived[int]:
        return sum(s.estimated_bytes for s in self.offset_ranges)


@dataclass(frozen=True, slots=True)
class Plan:
    """The offset ranges of a batch, decided before anything is read.

    The batch id is the number of the plan's ledger entry. `replaces` holds the paths of the parts that it replaces.
    """

    feed: str
    cluster: str
    request: AsText[Request]
    isolation: Isolation
    tasks: tuple[Task, ...]
    replaces: tuple[str, ...] = ()

    @property
    def offset_ranges(self) -> tuple[OffsetRange, ...]:
        return tuple(s for t in self.tasks for s in t.offset_ranges)

    @property
    def offsets(self) -> Derived[int]:
        """How many offsets the plan covers: no more records can land."""
        return sum(s.span for s in self.offset_ranges)

    @property
    def estimated_bytes(self) -> Derived[int]:
        return sum(t.estimated_bytes for t in self.tasks)

    @property
    def hash(self) -> Derived[str]:
        """SHA-256 (hex) of the plan's canonical JSON. Equal plans have equal hashes."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()


def to_json(value: Any) -> str:
    """A dataclass as canonical JSON: keys by `name_in_json`, sorted, no spaces."""
    return json.dumps(value, default=_to_fields, sort_keys=True, separators=(",", ":"))


def _to_fields(value: Any) -> dict[str, Any]:
    of: Any = type(value)
    return {key: getattr(value, name) for key, name in _list_fields(of)}


@cache
def _list_fields(of: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name_in_json(f.name), f.name) for f in fields(of))


_PARTITION = re.compile(r"([A-Za-z0-9._-]{1,249}):([0-9]{1,9})")
_RANGE = re.compile(rf"{_PARTITION.pattern}:([0-9]{{1,18}})-([0-9]{{1,18}})")
_RECORD = re.compile(rf"{_PARTITION.pattern}:([0-9]{{1,18}})")


def parse_partition(text: str) -> TopicPartition:
    """The partition that `orders:3` names. Raises UsageError."""
    match = _match(_PARTITION, text, "a partition", "TOPIC:PARTITION, such as orders:3")
    return TopicPartition(match[1], int(match[2]))


def parse_offset_range(text: str) -> AskedRange:
    """The range that `orders:0:100-200` names: offsets 100 up to, not including, 200. Raises UsageError."""
    match = _match(_RANGE, text, "a range of offsets", "TOPIC:PARTITION:START-END, such as orders:0:100-200")
    return AskedRange(match[1], int(match[2]), int(match[3]), int(match[4]))


def parse_record(text: str) -> tuple[TopicPartition, int]:
    """The partition and offset of the record that `orders:0:150` names. Raises UsageError."""
    match = _match(_RECORD, text, "a record's place", "TOPIC:PARTITION:OFFSET, such as orders:0:150")
    return TopicPartition(match[1], int(match[2])), int(match[3])


def _match(pattern: re.Pattern[str], text: str, what: str, form: str) -> re.Match[str]:
    if (match := pattern.fullmatch(text)) is None:
        raise UsageError(f"{text!r} is not {what}", remedy=f"write {form}")
    return match


class Losses(NamedTuple):
    """The losses of a window, and its offsets outside the current lives of its partitions.

    `former`: known offsets in lives that ended; `lost`: lost ones in any life; `unseen`: lives that ended in it or
    before it, and may have had records in it that no run has seen.
    """

    former: Internal[int] = 0
    lost: int = 0
    unseen: AsText[tuple[Key, ...]] = ()

    def __str__(self) -> str:
        """`25 offsets are lost; what 3 partitions had in it when their logs were replaced is unknown`"""
        lost = f"{many(self.lost, 'offset')} {'is' if self.lost == 1 else 'are'} lost" if self.lost else ""
        others = f" and {many(len(self.unseen) - 1, 'more partition')}" if self.unseen[1:] else ""
        unseen = f"{self.unseen[0]}{others} may have had more records, which no run has seen" if self.unseen else ""
        return "; ".join(filter(None, (lost, unseen)))


NO_LOSSES = Losses()
