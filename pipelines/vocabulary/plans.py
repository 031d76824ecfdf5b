"""What is asked for and how it is read: requests, slices, tasks, plans."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from sluice.pipelines.vocabulary.kafka import Isolation, Key, TopicPartition
from sluice.pipelines.vocabulary.ranges import Range
from sluice.pipelines.vocabulary.units import show_window


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


def to_json(value: Any) -> str:
    """Canonical JSON of a value (sorted keys, no spaces)."""
    return json.dumps(value, default=_fields, sort_keys=True, separators=(",", ":"))


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}
