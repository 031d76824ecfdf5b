"""Runs killed before and after each of their effects, each while it recovers from the previous kill."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence

import pyarrow.parquet as pq
import pytest

from tests.checker.facts import Evidence
from tests.checker.invariants import check
from tests.faults import points
from tests.faults.account import SEED
from tests.faults.field import Field
from tests.faults.kinds import (
    SMALL_TASK,
    Kind,
    apply_kind,
    check_letters,
    check_tables,
    draw_kinds,
    list_quarantined,
    produce_history,
    produce_oversized,
    split_feed,
)

pytestmark = pytest.mark.faults
BROKERS = 1

TRIES = 4
"""Runs that may miss a point, without pending records or while the group is held."""
MORE = 8
PACKED_FROM = 4
"""Checkpoints before packing: entries below the oldest of three are packed."""
RUNS_PER_CHECKPOINT = 12
RATE = 40
KINDS = draw_kinds()


def list_landing_points() -> list[str]:
    """Returns the points of landing, equal for all kinds, in an order in which runs reach each."""
    several = {"stage", "receipt", "show", "clean", "manifest"}
    return [f"{p} 2" if p in {f"after {e}" for e in several} else p for p in points.list_points(*points.LANDING)]


def list_committing_points(kind: Kind) -> list[str]:
    """Returns the points of committing for a feed of the kind."""
    join, *rest = points.COMMITTING
    steps = ["join", "init", "intent", "post", "letters", "begin", "offsets", "end", "plain", "record", "leave"]
    present = {join, *rest, *(points.PLAIN if kind.commit == "plain" else points.TRANSACTIONAL)}
    present |= set(points.LETTERS) if kind.letters else set()
    return [*points.list_points(*(s for s in steps if s in present))]


@pytest.mark.parametrize("kind", KINDS, ids=["with-letters", "raw", "plain"])
def test_killed_at_every_point(field: Field, kind: Kind) -> None:
    """Points of committing depend on the kind. Points of landing run for the kind with the longest commit."""
    kill_at_points(field, kind, (list_landing_points() if kind.letters else []) + list_committing_points(kind))


def test_killed_at_every_point_with_shared_files(crowd: Field) -> None:
    """Offset ranges of many small partitions share files, also those that a killed run leaves.

    Commits do not depend on files, so only random points of committing run here."""
    kind = Kind("transactional", True, True, "by_partition", "window", shared=True)
    kill_at_points(crowd, kind, list_landing_points())
    shared = [path for path in crowd.folder.list_visible() if path.endswith("-shared.parquet")]
    crowd.account.log(f"{len(shared)} of {len(crowd.folder.list_visible())} files are shared")
    assert shared


def test_killed_while_oversized_batches_go_to_quarantine(field: Field) -> None:
    """Each is a row without bytes and a dead letter, once."""
    field.settings["tuning"] = SMALL_TASK
    apply_kind(field, KINDS[0])
    produce_history(field)
    chosen = ["after stage 2", "before receipt", "before publish", "after show 2", "after letters", "before end"]
    with field.run_producers(RATE):
        for n, point in enumerate(chosen):
            produce_oversized(field, n)
            kill_at_point(field, point)
        field.run_until_clean()
    field.verify()
    check_letters(field)
    rows = [*list_quarantined(field.folder.root / "quarantine", "oversized")]
    assert len(rows) == len(set(rows)) == len(chosen) * field.partitions


def test_killed_while_a_topic_is_split(field: Field) -> None:
    """Each record is in one output, or in quarantine with a dead letter, once. One output has the contract. One has an
    Iceberg table, one a Delta table."""
    kind = Kind("transactional", True, True, "by_partition", "window")
    apply_kind(field, kind)
    outputs = split_feed(field)
    produce_history(field)
    chosen = ["after stage 2", "before receipt", "after receipt 2", "before publish", "after show 2", "before end"]
    of_tables = ["before table", "after table", "before table 2", "after table 2"]
    with field.run_producers(RATE):
        for point in (*chosen, *random.Random(SEED).sample(of_tables, len(of_tables))):
            kill_at_point(field, point)
        field.run_until_clean()
        field.run_baseline(1)
    field.verify()
    check_letters(field)
    check_tables(field)
    landed = field.folder.root / "data" / field.name
    rows = {
        output: sum(pq.read_metadata(p).num_rows for p in (landed / output).rglob("*.parquet")) for output in outputs
    }
    field.account.log(f"rows by output: {rows}")
    assert all(rows[output] for output in ("odd", "even"))


def test_killed_while_old_entries_are_packed(field: Field) -> None:
    """Also while checkpoints are written and old entries forgotten: the log is complete, and segments match entries."""
    apply_kind(field, KINDS[0])
    produce_history(field)
    with field.run_producers(RATE):
        for _ in range(PACKED_FROM):
            kill_at_point(field, "after checkpoint", tries=RUNS_PER_CHECKPOINT)
        for point in [*points.list_points(*points.PACKING), "before pack 2", "after pack 2", "before declare"]:
            kill_at_point(field, point)
        field.run_until_clean()
        field.run_baseline(1)
    packed = field.verify().counts["entries in segments"]
    field.account.log(f"{packed} entries are packed")
    assert packed


def kill_at_points(field: Field, kind: Kind, sequence: Sequence[str]) -> None:
    """Kill runs at each of the points, then at random ones of all."""
    apply_kind(field, kind)
    produce_history(field)
    with field.run_producers(RATE):
        for point in sequence:
            kill_at_point(field, point)
        for point in random.Random(SEED).sample([*list_landing_points(), *list_committing_points(kind)], MORE):
            field.run(point)
            check_lake(field, point)
        field.run_until_clean()
        field.run_baseline(1)
    field.verify()
    if kind.letters:
        check_letters(field)


def kill_at_point(field: Field, point: str, tries: int = TRIES) -> None:
    """Run until a run is killed at the point. The lake must then be consistent."""
    for _ in range(tries):
        if field.run(point).code == -signal.SIGKILL:
            return check_lake(field, point)
    raise AssertionError(f"no run got to the point `{point}`")


def check_lake(field: Field, point: str) -> None:
    """Assert that the lake alone breaks no invariant."""
    verdict = check(field.folder, Evidence())
    assert verdict.holds, f"after a kill {point}: {verdict}"
