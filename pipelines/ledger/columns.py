"""Columns of numbers that grow with a feed's age, stored compactly. `checkpoint` has them as text.

`Pins` are the boundaries of a partition (a thousand partitions pin millions of them in a year), `Published` the windows
of each publish entry, and `Superseded` the ranges of merged windows.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

from sluice.pipelines.model.kafka import Range

NONE = -(1 << 63)
"""Stands for None in a column."""
MOST = 1 << 28
"""The maximum size of a column in bytes, unless its number of values was announced."""


def inflate(data: bytes, limit: int) -> bytes:
    """Decompress the data. Raises ValueError if it is incomplete, or longer than `limit` bytes."""
    unpacking = zlib.decompressobj()
    content = unpacking.decompress(data, limit + 1)
    if len(content) > limit or not unpacking.eof:
        raise ValueError("cut off, or larger than announced")
    return content


class Pins(Sequence[tuple[int, int]]):
    """(time in ms, offset) pairs in order of time. Immutable, except for a fold's own copy.

    `times` and `offsets` are its columns (64-bit integers), for many look-ups at once; do not write to them.
    """

    __slots__ = ("offsets", "times")

    def __init__(self, times: Iterable[int] = (), offsets: Iterable[int] = ()) -> None:
        self.times = times if isinstance(times, array) else array("q", times)
        self.offsets = offsets if isinstance(offsets, array) else array("q", offsets)

    def __len__(self) -> int:
        return len(self.times)

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, at: slice) -> Pins: ...

    def __getitem__(self, at: int | slice) -> tuple[int, int] | Pins:
        if isinstance(at, slice):
            return Pins(self.times[at], self.offsets[at])
        return self.times[at], self.offsets[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pins):
            return self.times == other.times and self.offsets == other.offsets
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Pins({list(self)})"

    def position(self, time: int) -> int:
        """Returns the number of boundaries before `time`."""
        return bisect_left(self.times, time)

    def copy(self) -> Pins:
        return Pins(self.times[:], self.offsets[:])

    def add(self, times: Iterable[int], offsets: Iterable[int]) -> None:
        """Add boundaries in strict order of time. Pinned times keep their offsets."""
        times, offsets = array("q", times), array("q", offsets)
        if times and (not self.times or times[0] > self.times[-1]):
            self.times += times
            self.offsets += offsets
            return
        for time, offset in zip(times, offsets, strict=True):
            at = self.position(time)
            if at == len(self) or self.times[at] != time:
                self.times.insert(at, time)
                self.offsets.insert(at, offset)


class Published(Mapping[int | None, tuple[int, ...]]):
    """By window (its start, ms; None: outside windows) the publish entries that hold offset ranges of it, oldest first.

    Immutable, except for a fold's own copy. `windows` and `numbers` are its columns, in order of the entries; do not
    write to them.
    """

    __slots__ = ("_index", "numbers", "windows")

    def __init__(self, windows: Iterable[int] = (), numbers: Iterable[int] = ()) -> None:
        """Build it from columns, with NONE for None. Raises ValueError if their lengths differ."""
        self.windows = windows if isinstance(windows, array) else array("q", windows)
        self.numbers = numbers if isinstance(numbers, array) else array("q", numbers)
        self._index: dict[int, list[int]] | None = None
        if len(self.windows) != len(self.numbers):
            raise ValueError("not one entry for each window")

    def _by_window(self) -> Mapping[int, list[int]]:
        """Returns the entries of each window, oldest first."""
        if self._index is None:
            index = dict[int, list[int]]()
            for window, number in zip(self.windows, self.numbers, strict=True):
                index.setdefault(window, []).append(number)
            self._index = index
        return self._index

    def __getitem__(self, window: int | None) -> tuple[int, ...]:
        return tuple(self._by_window()[NONE if window is None else window])

    def __iter__(self) -> Iterator[int | None]:
        return (None if w == NONE else w for w in sorted(self._by_window()))

    def __len__(self) -> int:
        return len(self._by_window())

    def __eq__(self, other: object) -> bool:
        return self._by_window() == other._by_window() if isinstance(other, Published) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Published({dict(self)})"

    def since(self, number: int) -> set[int | None]:
        """Returns the windows of the publish entries from that number on."""
        return {None if w == NONE else w for w in self.windows[bisect_left(self.numbers, number) :]}

    def every(self) -> list[int]:
        """Returns all publish entries with offset ranges, oldest first."""
        return list(dict.fromkeys(self.numbers))

    def copy(self) -> Published:
        return Published(self.windows[:], self.numbers[:])

    def add(self, number: int, windows: Iterable[int | None]) -> None:
        """Add the windows of the newest entry."""
        for window in windows:
            self.windows.append(NONE if window is None else window)
            self.numbers.append(number)
        self._index = None


class Superseded:
    """(number, range) in order of numbers: in the range, receipts of entries below that number are superseded.

    Immutable, except for a fold's own copy.
    """

    __slots__ = ("_bounds", "_index", "_unread", "numbers")

    def __init__(self, numbers: Iterable[int] = (), starts: Iterable[int] = (), ends: Iterable[int] = ()) -> None:
        self.numbers, *bounds = (c if isinstance(c, array) else array("q", c) for c in (numbers, starts, ends))
        self._bounds = (bounds[0], bounds[1])
        self._unread: Callable[[], tuple[array[int], array[int]]] | None = None
        self._index: tuple[list[int], list[int], list[int]] | None = None

    @classmethod
    def unread(cls, numbers: array[int], bounds: Callable[[], tuple[array[int], array[int]]]) -> Superseded:
        """Build it with `starts` and `ends` computed on first use: an hourly run needs only the numbers."""
        out = cls(numbers)
        out._unread = bounds
        return out

    def _read(self) -> tuple[array[int], array[int]]:
        if (unread := self._unread) is not None:  # another thread may be here, too
            self._bounds = unread()
            self._unread = None
        return self._bounds

    @property
    def starts(self) -> array[int]:
        return self._read()[0]

    @property
    def ends(self) -> array[int]:
        return self._read()[1]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, Range]]) -> Superseded:
        numbers, ranges = zip(*pairs, strict=True) if (pairs := list(pairs)) else ((), ())
        return cls(numbers, (r.start for r in ranges), (r.end for r in ranges))

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[tuple[int, Range]]:
        return ((n, Range(a, b)) for n, a, b in zip(self.numbers, self.starts, self.ends, strict=True))

    def __reversed__(self) -> Iterator[tuple[int, Range]]:
        return reversed(list(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Superseded) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Superseded({list(self)})"

    def after(self, number: int, r: Range) -> bool:
        """Returns whether an entry above `number` superseded any of the range."""
        if not self.numbers or self.numbers[-1] <= number:
            return False
        starts, reach, positions = self._read_index()
        near, (begins, ends) = positions[bisect_right(reach, r.start) : bisect_left(starts, r.end)], self._read()
        return any(self.numbers[i] > number and ends[i] > r.start and begins[i] < r.end for i in near)

    def _read_index(self) -> tuple[list[int], list[int], list[int]]:
        """Returns sorted starts, the maximum end of the ranges up to each, and the indexes of the ranges."""
        if self._index is None:
            import numpy as np  # late: most ledgers have nothing superseded

            starts, ends = np.array(self.starts, np.int64), np.array(self.ends, np.int64)
            order = np.argsort(starts, kind="stable")
            reach = np.maximum.accumulate(ends[order])
            self._index = starts[order].tolist(), reach.tolist(), order.tolist()
        return self._index

    def copy(self) -> Superseded:
        return Superseded(self.numbers[:], self.starts[:], self.ends[:])

    def add(self, number: int, ranges: Iterable[Range]) -> None:
        """Add the ranges that the newest entry superseded."""
        starts, ends = self._read()
        for r in ranges:
            self.numbers.append(number)
            starts.append(r.start)
            ends.append(r.end)
        self._index = None

    def cover(self, number: int, ranges: Iterable[Range]) -> Superseded:
        """Returns a copy with the ranges that the newest entry superseded, without older ranges inside them."""
        over = list(ranges)
        rest = ((n, r) for n, r in self if not any(o.start <= r.start and r.end <= o.end for o in over))
        out = Superseded.of(rest)
        out.add(number, over)
        return out


NOTHING_SUPERSEDED = Superseded()
