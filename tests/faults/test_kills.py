"""Runs are killed before and after each of their effects, each while it recovers from the kill before."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence

import pytest

from tests.checker.facts import Evidence
from tests.checker.invariants import check
from tests.faults import points
from tests.faults.account import SEED
from tests.faults.field import Field
from tests.faults.kinds import Kind, become, each_letter_once, history, kinds

pytestmark = pytest.mark.faults
BROKERS = 1

TRIES = 4
"""Runs that may miss a point: nothing was pending, or the group was held for a while."""
MORE = 8
PACKED_FROM = 4
"""Checkpoints after which old entries are packed: below the oldest of three."""
RUNS_PER_CHECKPOINT = 12
RATE = 40
KINDS = kinds()


def landing() -> list[str]:
    """The points of landing, the same for feeds of every kind, in an order in which each is met."""
    several = {"stage", "receipt", "show", "clean", "manifest"}
    return [f"{p} 2" if p in {f"after {e}" for e in several} else p for p in points.both(*points.LANDING)]


def committing(kind: Kind) -> list[str]:
    """The points of committing that there are for a feed of the kind."""
    join, *rest = points.COMMITTING
    steps = ["join", "init", "intent", "post", "letters", "begin", "offsets", "end", "plain", "record", "leave"]
    there = {join, *rest, *(points.PLAIN if kind.commit == "plain" else points.TRANSACTIONAL)}
    there |= set(points.LETTERS) if kind.letters else set()
    return [*points.both(*(s for s in steps if s in there))]


@pytest.mark.parametrize("kind", KINDS, ids=["with-letters", "raw", "plain"])
def test_killed_at_every_point(field: Field, kind: Kind) -> None:
    """Of committing, which kinds of feeds do each their own way, and of landing where the way is the longest."""
    killed_everywhere(field, kind, (landing() if kind.letters else []) + committing(kind))


def test_killed_at_every_point_side_by_side(crowd: Field) -> None:
    """The offset ranges of many small partitions share files, and so do those that a kill leaves behind.

    Committing knows nothing of files: chance alone picks points of it here."""
    kind = Kind("transactional", True, True, "by_partition", "window", shared=True)
    killed_everywhere(crowd, kind, landing())
    shared = [path for path in crowd.folder.list_visible() if path.endswith("-shared.parquet")]
    crowd.account.did(f"{len(shared)} of {len(crowd.folder.list_visible())} files are shared")
    assert shared


def test_killed_while_old_entries_are_packed(field: Field) -> None:
    """And while folds leave checkpoints behind and forget: the log is whole, and what lies packed is what it says."""
    become(field, KINDS[0])
    history(field)
    with field.producing(RATE):
        for _ in range(PACKED_FROM):
            killed(field, "after checkpoint", tries=RUNS_PER_CHECKPOINT)
        for point in [*points.both(*points.PACKING), "before pack 2", "after pack 2", "before declare"]:
            killed(field, point)
        field.recovered()
        field.normal(1)
    packed = field.proven().counts["entries in segments"]
    field.account.did(f"{packed} entries are packed")
    assert packed


def killed_everywhere(field: Field, kind: Kind, way: Sequence[str]) -> None:
    """At each point of the way, then at some that chance picks among all."""
    become(field, kind)
    history(field)
    with field.producing(RATE):
        for point in way:
            killed(field, point)
        for point in random.Random(SEED).sample([*landing(), *committing(kind)], MORE):
            field.run(point)
            sound(field, point)
        field.recovered()
        field.normal(1)
    field.proven()
    if kind.letters:
        each_letter_once(field)


def killed(field: Field, point: str, tries: int = TRIES) -> None:
    """One run is killed there; others may pass it by. What it leaves is sound."""
    for _ in range(tries):
        if field.run(point).code == -signal.SIGKILL:
            return sound(field, point)
    raise AssertionError(f"no run got to the point `{point}`")


def sound(field: Field, point: str) -> None:
    """The lake by itself breaks no invariant."""
    verdict = check(field.folder, Evidence())
    assert verdict.holds, f"after a kill {point}: {verdict}"
