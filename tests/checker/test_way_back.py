"""The judge of a republish finds what is planted, and nothing in what is sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.checker.way_back import Place, Went, broken

Contents = dict[Place, tuple[Any, ...]]
OLD: Contents = {(p, n): (None, f"{p} {n}", 100 * p + n, "[]") for p in range(2) for n in range(5)}
ASKED = {place for place in OLD if place != (1, 4)}


def sound() -> tuple[Contents, list[Went]]:
    """All that was asked for, each in its own partition, with a marker between two transactions."""
    places = {(p, n): (p, n + (n > 2)) for p, n in ASKED}
    return {new: OLD[old] for old, new in places.items()}, [Went(o, n) for o, n in sorted(places.items())]


def twice(new: Contents, moved: list[Went]) -> None:
    new[0, 9] = OLD[0, 1]


def missing(new: Contents, moved: list[Went]) -> None:
    del new[0, 1]


def swapped(new: Contents, moved: list[Went]) -> None:
    new[0, 0], new[0, 1] = new[0, 1], new[0, 0]
    moved[:2] = [Went((0, 0), (0, 1)), Went((0, 1), (0, 0))]


def changed(new: Contents, moved: list[Went]) -> None:
    new[0, 1] = (*new[0, 1][:3], '[["trace", true]]')


def elsewhere(new: Contents, moved: list[Went]) -> None:
    new[1, 9] = new.pop((0, 5))
    moved[4] = Went((0, 4), (1, 9))


def not_asked(new: Contents, moved: list[Went]) -> None:
    new[1, 9] = OLD[1, 4]
    moved.append(Went((1, 4), (1, 9)))


def map_lies(new: Contents, moved: list[Went]) -> None:
    moved[1] = Went((0, 1), (0, 2))


def map_lacks(new: Contents, moved: list[Went]) -> None:
    del moved[1]


def map_says_twice(new: Contents, moved: list[Went]) -> None:
    moved.append(moved[0])


def test_what_is_sound_is_sound() -> None:
    new, moved = sound()
    assert broken(OLD, new, moved, ASKED, kept=True) == []


@pytest.mark.parametrize(
    ("plant", "told"),
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
def test_what_is_planted_is_found(plant: Callable[[Contents, list[Went]], None], told: str) -> None:
    new, moved = sound()
    plant(new, moved)
    assert any(told in text for text in broken(OLD, new, moved, ASKED, kept=True))
