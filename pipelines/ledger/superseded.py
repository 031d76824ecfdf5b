"""Superseded ranges of one partition, stored compactly: one range per merged window, permanently."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from sluice.pipelines.model.ranges import Range


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
        starts, reach, positions = self._indexed()
        near, (begins, ends) = positions[bisect_right(reach, r.start) : bisect_left(starts, r.end)], self._read()
        return any(self.numbers[i] > number and ends[i] > r.start and begins[i] < r.end for i in near)

    def _indexed(self) -> tuple[list[int], list[int], list[int]]:
        """Returns sorted starts, the maximum end of the ranges up to each, and the indexes of the ranges."""
        if self._index is None:
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

    def covered(self, number: int, ranges: Iterable[Range]) -> Superseded:
        """Returns a copy with the ranges that the newest entry superseded, without older ranges inside them."""
        over = list(ranges)
        rest = ((n, r) for n, r in self if not any(o.start <= r.start and r.end <= o.end for o in over))
        out = Superseded.of(rest)
        out.add(number, over)
        return out


NOTHING_SUPERSEDED = Superseded()
