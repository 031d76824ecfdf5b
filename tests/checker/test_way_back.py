"""The checker of a republish detects each planted fault, and accepts a correct republish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.checker.way_back import MapEntry, Position, find_problems

Contents = dict[Position, tuple[Any, ...]]
OLD: Contents = {(p, n): (None, f"{p} {n}", 100 * p + n, "[]") for p in range(2) for n in range(5)}
REQUESTED = {position for position in OLD if position != (1, 4)}


def make_republish() -> tuple[Contents, list[MapEntry]]:
    """Returns a republish of all requested records in their partitions, with a marker between two transactions."""
    positions = {(p, n): (p, n + (n > 2)) for p, n in REQUESTED}
    return {new: OLD[old] for old, new in positions.items()}, [MapEntry(o, n) for o, n in sorted(positions.items())]


def twice(new: Contents, entries: list[MapEntry]) -> None:
    new[0, 9] = OLD[0, 1]


def missing(new: Contents, entries: list[MapEntry]) -> None:
    del new[0, 1]


def swapped(new: Contents, entries: list[MapEntry]) -> None:
    new[0, 0], new[0, 1] = new[0, 1], new[0, 0]
    entries[:2] = [MapEntry((0, 0), (0, 1)), MapEntry((0, 1), (0, 0))]


def changed(new: Contents, entries: list[MapEntry]) -> None:
    new[0, 1] = (*new[0, 1][:3], '[["trace", true]]')


def elsewhere(new: Contents, entries: list[MapEntry]) -> None:
    new[1, 9] = new.pop((0, 5))
    entries[4] = MapEntry((0, 4), (1, 9))


def not_asked(new: Contents, entries: list[MapEntry]) -> None:
    new[1, 9] = OLD[1, 4]
    entries.append(MapEntry((1, 4), (1, 9)))


def map_lies(new: Contents, entries: list[MapEntry]) -> None:
    entries[1] = MapEntry((0, 1), (0, 2))


def map_lacks(new: Contents, entries: list[MapEntry]) -> None:
    del entries[1]


def map_says_twice(new: Contents, entries: list[MapEntry]) -> None:
    entries.append(entries[0])


def test_correct_republish_is_accepted() -> None:
    new, entries = make_republish()
    assert find_problems(OLD, new, entries, REQUESTED, same_partition=True) == []


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (twice, "twice, at"),
        (missing, "is not there"),
        (swapped, "behind a later record"),
        (changed, "no record of the old topic"),
        (elsewhere, "another partition"),
        (not_asked, "was not asked for"),
        (map_lies, "the map says of (0, 1)"),
        (map_lacks, "the map does not say"),
        (map_says_twice, "names an old record twice"),
    ],
)
def test_planted_fault_is_detected(plant: Callable[[Contents, list[MapEntry]], None], message: str) -> None:
    new, entries = make_republish()
    plant(new, entries)
    assert any(message in text for text in find_problems(OLD, new, entries, REQUESTED, same_partition=True))
