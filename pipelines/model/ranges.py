"""Arithmetic on half-open offset ranges `[start, end)`, the subtraction behind each plan.

Design: docs/developers/design/requests.md
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Range(NamedTuple):
    """Offsets from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def span(self) -> int:
        """How many offsets the range covers."""
        return self.end - self.start

    def meets(self, other: Range) -> bool:
        """Whether the two ranges share an offset."""
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
    edges = [r.start, *sorted({x for x in at if r.start < x < r.end}), r.end]
    return tuple(Range(a, b) for a, b in itertools.pairwise(edges) if a < b)


def is_covered(ranges: Iterable[Range], wanted: Range) -> bool:
    """Whether every offset of `wanted` is in one of `ranges`."""
    taken = tuple(ranges)
    for r in taken:
        if r.start <= wanted.start and wanted.end <= r.end:
            return True
    return not subtract(wanted, taken)
