"""Repeated keys and repeated records among millions of rows, with the likely cause of each, in bounded memory.

Rows with one key and different values are updates, not duplicates. Rows with one key and one value are copies. Up to
`LIMIT` rows the numbers are exact. Beyond it they are estimates from a sample of keys and rows that is chosen by hash,
so that all rows of a chosen key are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np

from sluice.pipelines.model.kafka import Key
from sluice.pipelines.util.documents import Derived, Flat, Instant

LIMIT = 1 << 22
"""Rows up to which the numbers are exact. A row takes 65 bytes."""
EXAMPLES = 3
NEAR_OFFSETS = 10_000
"""A retry is at most this many offsets behind the first attempt."""


class Cause(StrEnum):
    """The likely cause of a copy."""

    RETRIED = "retried"
    WRITTEN_AGAIN = "written again"
    SENT_AGAIN = "sent again"
    DELETED_AGAIN = "deleted again"
    BROKER_TIME = "broker time"

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Cause.RETRIED: "a producer without idempotence retried: one timestamp, offsets close together",
    Cause.WRITTEN_AGAIN: "the same record is twice in the topic: one timestamp, offsets far apart or two partitions"
    " (a job ran again, or a mirror copied it again)",
    Cause.SENT_AGAIN: "the application sent it again: equal values, different timestamps",
    Cause.DELETED_AGAIN: "its key was deleted again: two tombstones, usual in change data capture",
    Cause.BROKER_TIME: "retried or sent again: the broker's timestamps (LogAppendTime) do not distinguish these",
}


class Kind(IntEnum):
    """The kind of a row. The coordinates of a record suggest the cause of its copy; other kinds are a cause."""

    RECORD = 0
    TOMBSTONE = 1
    BROKER_TIMED = 2


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A record: its partition, its offset, and its timestamp (ms; None: it has none)."""

    key: Flat[Key]
    offset: int
    timestamp: Instant | None

    def __str__(self) -> str:
        return f"{self.key}:{self.offset}"


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies with one likely cause. `examples` are pairs of a record and its copy."""

    cause: Cause
    records: int
    examples: tuple[tuple[Coordinate, Coordinate], ...]

    @property
    def likely(self) -> Derived[str]:
        return self.cause.text


@dataclass(frozen=True, slots=True)
class Repeats:
    """Repeats by the columns `key`; those of Kafka's key if it is empty.

    Of all `records`, `keyed` have a key, with `keys` different ones. With `exact` False, `keys` and all that depends on
    it are estimates. `update` is an example of the `updates`.
    """

    by: tuple[str, ...]
    records: int
    keyed: int
    keys: int
    updates: int
    copies: tuple[Copies, ...]
    update: tuple[Coordinate, Coordinate] | None
    exact: bool

    @property
    def copied(self) -> int:
        """Rows that equal an earlier one in key and value."""
        return sum(c.records for c in self.copies)


class Sample:
    """Rows by hash: all of them up to `limit`, then those whose hash ends in enough zero bits that no more remain."""

    def __init__(self, limit: int) -> None:
        self.bits = 0
        self._limit, self._size = limit, 0
        self._chunks: list[tuple[np.ndarray, ...]] = []

    @property
    def factor(self) -> int:
        """The number of rows that one row of the sample stands for."""
        return 1 << self.bits

    def add(self, hashes: np.ndarray, *columns: np.ndarray) -> None:
        """Add rows: their hashes, and columns of the same length."""
        self._append((hashes, *columns))
        while self._size > self._limit:
            self.bits += 1
            chunks, self._chunks, self._size = self._chunks, [], 0
            for chunk in chunks:
                self._append(chunk)

    def _append(self, chunk: tuple[np.ndarray, ...]) -> None:
        if self.bits:
            chosen = (chunk[0] & np.uint64(self.factor - 1)) == 0
            chunk = tuple(column[chosen] for column in chunk)
        self._chunks.append(chunk)
        self._size += len(chunk[0])

    def take(self) -> list[np.ndarray]:
        """Remove and return all columns, in the order in which their rows were added."""
        chunks, self._chunks = self._chunks, []
        return [np.concatenate(parts) for parts in zip(*chunks, strict=True)]

    def take_repeated(self) -> list[np.ndarray]:
        """Remove all columns; return those of rows whose hash others have, together, in the order of adding."""
        hashes, *columns = self.take()
        in_order = np.sort(hashes)
        repeated = in_order[1:][in_order[1:] == in_order[:-1]]
        rows = np.flatnonzero(np.isin(hashes, repeated)) if len(repeated) else np.empty(0, np.int64)
        rows = rows[np.argsort(hashes[rows], kind="stable")]
        return [column[rows] for column in (hashes, *columns)]


class RepeatCounter:
    """Counts the repeats of rows that are added in log order."""

    def __init__(self, by: Sequence[str] = (), limit: int = LIMIT) -> None:
        self._by = tuple(by)
        self._partitions: list[Key] = []
        self._rows = self._keyed = 0
        self._keys, self._values = Sample(limit), Sample(limit)

    def add(
        self,
        key: Key,
        offsets: np.ndarray,
        times: np.ndarray,
        keys: tuple[np.ndarray, np.ndarray],
        values: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Add rows of one partition. `times` are in ms, `keys` the hashes of keys and whether there is one, and
        `values` the hashes of keys with values and the `Kind` of each row."""
        if not self._partitions or self._partitions[-1] != key:
            self._partitions.append(key)
        number = np.full(len(offsets), len(self._partitions) - 1, np.int32)
        (hashes, there), (pairs, kinds) = keys, values
        self._rows, self._keyed = self._rows + len(offsets), self._keyed + int(there.sum())
        self._keys.add(hashes[there], pairs[there], number[there], offsets[there], times[there])
        counted = there | (kinds != Kind.TOMBSTONE)  # a tombstone without the key may be one of any key
        self._values.add(*(column[counted] for column in (pairs, number, offsets, times, kinds)))

    def build(self) -> Repeats:
        """Returns the repeats of all added rows."""
        if not self._rows:
            return Repeats(self._by, 0, 0, 0, 0, (), None, exact=True)
        keys, updates, example = self._count_updates()
        exact = not self._keys.bits and not self._values.bits
        return Repeats(self._by, self._rows, self._keyed, keys, updates, self._group_copies(), example, exact)

    def _count_updates(self) -> tuple[int, int, tuple[Coordinate, Coordinate] | None]:
        """Returns the number of keys, the number of further values of a key, and an example of one."""
        hashes, values, *coordinates = self._keys.take()
        keys, factor = np.sort(hashes), self._keys.factor
        same_key, pairs = keys[1:] == keys[:-1], np.sort(values)  # the hash of a pair decides its key
        count = len(hashes) - int(same_key.sum())
        updates = len(values) - int((pairs[1:] == pairs[:-1]).sum()) - count
        example = None
        for last in (keys[: 1 << 14][-1], keys[-1]) if updates else ():  # a few keys nearly always have an example
            rows = np.flatnonzero(hashes <= last)
            rows = rows[np.argsort(hashes[rows], kind="stable")]
            before, after = rows[:-1], rows[1:]
            new = np.flatnonzero((hashes[after] == hashes[before]) & (values[after] != values[before]))
            if len(new):
                first, second = (self._find_coordinate(coordinates, at[new[0]]) for at in (before, after))
                example = first, second
                break
        return count * factor, updates * factor, example

    def _group_copies(self) -> tuple[Copies, ...]:
        """Returns the copies by cause, the most frequent first. Each is compared with the equal row before it."""
        hashes, *coordinates, kinds = self._values.take_repeated()
        copies = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
        numbers, offsets, times = coordinates
        near = (numbers[copies] == numbers[copies - 1]) & (offsets[copies] - offsets[copies - 1] <= NEAR_OFFSETS)
        same_time = times[copies] == times[copies - 1]
        kind = kinds[copies]
        plain = kind == Kind.RECORD
        of_cause = {
            Cause.RETRIED: plain & same_time & near,
            Cause.WRITTEN_AGAIN: plain & same_time & ~near,
            Cause.SENT_AGAIN: plain & ~same_time,
            Cause.DELETED_AGAIN: kind == Kind.TOMBSTONE,
            Cause.BROKER_TIME: kind == Kind.BROKER_TIMED,
        }
        grouped = [self._build_copies(cause, copies[chosen], coordinates) for cause, chosen in of_cause.items()]
        return tuple(sorted((c for c in grouped if c.records), key=lambda c: -c.records))

    def _build_copies(self, cause: Cause, rows: np.ndarray, coordinates: Sequence[np.ndarray]) -> Copies:
        first = rows[np.lexsort((coordinates[1][rows], coordinates[0][rows]))[:EXAMPLES]]
        examples = tuple(
            (self._find_coordinate(coordinates, row - 1), self._find_coordinate(coordinates, row))
            for row in first.tolist()
        )
        return Copies(cause, len(rows) * self._values.factor, examples)

    def _find_coordinate(self, coordinates: Sequence[np.ndarray], row: int) -> Coordinate:
        number, offset, time = (int(column[row]) for column in coordinates)
        return Coordinate(self._partitions[number], offset, None if time == NO_TIME else time)


NO_TIME = -(1 << 63)
"""Stands for the time of a record without a timestamp."""
