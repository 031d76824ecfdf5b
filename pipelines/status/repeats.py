"""Repeated keys and repeated records among millions of rows, with the likely cause of each, in bounded memory.

Rows with one key and different values are updates, not duplicates. Rows with one key and one value are copies. Up to
`LIMIT` rows the numbers are exact. Beyond it they are estimates from a sample of keys and rows that is chosen by hash,
so that all rows of a chosen key are in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import accumulate
from tempfile import SpooledTemporaryFile

import numpy as np

from sluice.pipelines.errors import Failed
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.util.documents import Derived, Flat, Instant

LIMIT = 1 << 22
"""Rows up to which the numbers are exact. A row takes 65 bytes of a temporary file."""
_IN_MEMORY = 1 << 20
"""Bytes of rows that need no file."""
_SHARE_BITS = 5
"""The share of a row is the first bits of its hash: of `LIMIT` rows, 131,072 are in memory at once."""
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
    """Rows by hash: all of them up to `limit`, then those whose hash ends in enough zero bits that no more remain.

    They lie in a temporary file, so that memory does not grow with them.
    """

    def __init__(self, limit: int, **columns: type) -> None:
        self.factor = 1
        """The number of rows that one row of the sample stands for."""
        self._limit, self._type = limit, np.dtype([("hash", np.uint64), *columns.items()])
        self._begin()

    def _begin(self) -> None:
        self._size, self._bounds = 0, list[list[int]]()
        self._file = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - open until `close`

    def add(self, *columns: np.ndarray) -> None:
        """Add rows: their hashes, and the other columns. Raises Failed if the temporary file cannot be written."""
        rows = np.empty(len(columns[0]), self._type)
        for name, column in zip(rows.dtype.names or (), columns, strict=True):
            rows[name] = column
        try:
            self._append(rows)
            self._file.flush()
            while self._size > self._limit:
                former, self.factor = copy(self), self.factor * 2
                self._begin()
                with closing(former):
                    for share in former.read_shares():
                        self._append(share)
        except OSError as error:
            raise Failed(
                f"repeated records cannot be counted: {error.strerror or error}",
                remedy="their hashes take 65 bytes a row in a temporary file: free space there, or set another folder"
                " in TMPDIR, and run again",
            ) from None

    def _append(self, rows: np.ndarray) -> None:
        if self.factor > 1:
            rows = rows[(rows["hash"] & np.uint64(self.factor - 1)) == 0]
        shares = (rows["hash"] >> np.uint64(64 - _SHARE_BITS)).astype(np.uint8)
        self._file.write(rows[np.argsort(shares, kind="stable")].tobytes())
        sizes = np.bincount(shares, minlength=1 << _SHARE_BITS).tolist()
        self._bounds.append([*accumulate(sizes, initial=self._size)])
        self._size += len(rows)

    def read_shares(self) -> Iterator[np.ndarray]:
        """Yields the rows in shares, in the order of adding. Rows with the same hash are in one of them."""
        size = self._type.itemsize
        for at in range(1 << _SHARE_BITS):
            parts = list[bytes]()
            for ends in self._bounds:
                self._file.seek(ends[at] * size)
                parts.append(self._file.read((ends[at + 1] - ends[at]) * size))
            yield np.frombuffer(b"".join(parts), self._type)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class RepeatCounter:
    """Counts the repeats of rows that are added in log order."""

    def __init__(self, by: Sequence[str] = (), limit: int = LIMIT) -> None:
        self._by = tuple(by)
        self._partitions: list[Key] = []
        self._rows = self._keyed = 0
        self._keys = Sample(limit, pair=np.uint64, number=np.int32, offset=np.int64, time=np.int64)
        self._values = Sample(limit, number=np.int32, offset=np.int64, time=np.int64, kind=np.int8)

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
        self._keys.add(*(column[there] for column in (hashes, pairs, number, offsets, times)))
        counted = there | (kinds != Kind.TOMBSTONE)  # a tombstone without the key may be one of any key
        self._values.add(*(column[counted] for column in (pairs, number, offsets, times, kinds)))

    def build(self) -> Repeats:
        """Returns the repeats of all added rows. None can be added afterwards."""
        with closing(self._keys), closing(self._values):
            keys, updates, example = self._count_updates()
            exact = self._keys.factor == self._values.factor == 1
            return Repeats(self._by, self._rows, self._keyed, keys, updates, self._group_copies(), example, exact)

    def _count_updates(self) -> tuple[int, int, tuple[Coordinate, Coordinate] | None]:
        """Returns the number of keys, the number of further values of a key, and an example of one."""
        keys, values, example = 0, 0, None
        for rows in self._keys.read_shares():
            own, pairs = np.sort(rows["hash"]), np.sort(rows["pair"])  # the hash of a pair decides its key
            new_keys, new_values = (len(x) - int((x[1:] == x[:-1]).sum()) for x in (own, pairs))
            keys, values = keys + new_keys, values + new_values
            if new_values > new_keys and example is None:
                rows = rows[np.argsort(rows["hash"], kind="stable")]
                before, after = rows[:-1], rows[1:]
                at = np.argmax((before["hash"] == after["hash"]) & (before["pair"] != after["pair"]))
                example = self._find(before[at]), self._find(after[at])
        return keys * self._keys.factor, (values - keys) * self._keys.factor, example

    def _group_copies(self) -> tuple[Copies, ...]:
        """Returns the copies by cause, the most frequent first. Each is compared with the equal row before it."""
        numbers, examples = Counter[Cause](), dict[Cause, list[tuple[Coordinate, Coordinate]]]()
        for rows in self._values.read_shares():
            in_order = np.sort(rows["hash"])
            if not len(repeated := in_order[1:][in_order[1:] == in_order[:-1]]):
                continue
            rows = rows[np.isin(rows["hash"], repeated)]
            rows = rows[np.argsort(rows["hash"], kind="stable")]
            copies = np.flatnonzero(rows["hash"][1:] == rows["hash"][:-1]) + 1
            before, after = rows[copies - 1], rows[copies]
            near = (after["number"] == before["number"]) & (after["offset"] - before["offset"] <= NEAR_OFFSETS)
            same_time, plain = after["time"] == before["time"], after["kind"] == Kind.RECORD
            of_cause = {
                Cause.RETRIED: plain & same_time & near,
                Cause.WRITTEN_AGAIN: plain & same_time & ~near,
                Cause.SENT_AGAIN: plain & ~same_time,
                Cause.DELETED_AGAIN: after["kind"] == Kind.TOMBSTONE,
                Cause.BROKER_TIME: after["kind"] == Kind.BROKER_TIMED,
            }
            for cause, chosen in of_cause.items():
                at = np.flatnonzero(chosen)
                numbers[cause] += len(at)
                at = at[np.lexsort((after["offset"][at], after["number"][at]))[:EXAMPLES]]
                pairs = examples.get(cause, []) + [(self._find(before[i]), self._find(after[i])) for i in at]
                examples[cause] = sorted(pairs, key=lambda pair: (pair[1].key, pair[1].offset))[:EXAMPLES]
        factor, by_cause = self._values.factor, numbers.most_common()
        return tuple(Copies(cause, number * factor, tuple(examples[cause])) for cause, number in by_cause if number)

    def _find(self, row: np.void) -> Coordinate:
        time = int(row["time"])
        return Coordinate(self._partitions[row["number"]], int(row["offset"]), None if time == NO_TIME else time)


NO_TIME = -(1 << 63)
"""Stands for the time of a record without a timestamp."""
