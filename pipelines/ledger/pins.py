"""The boundaries pinned in one partition, stored compactly: a thousand partitions pin millions of them in a year."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import overload


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
