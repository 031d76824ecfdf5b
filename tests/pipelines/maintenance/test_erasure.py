"""Erasure removes rows: by one entry with their offsets, then from each file, by whole windows.

The account still closes, and no later batch can publish rows of the erased offsets.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.errors import OwnershipLost, PlanBusy, WindowIncomplete
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.ledger.checkpoint import dump, load
from sluice.pipelines.ledger.entries import EraseEntry
from sluice.pipelines.maintenance.erasure import Finished, decide, finish
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.plans import RequestKind
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.operating.repairs import RepairKind, RepairTarget, repair
from sluice.pipelines.publishing.publish import publish
from sluice.testing.engine import owner
from tests.pipelines.landed_world import HOUR, START, A, B, Died, World, crash_after, split_offsets

GONE = {A: (Range(3, 4), Range(96, 104)), B: (Range(120, 121),)}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Both hours of both partitions have landed; the last record of each range is in quarantine."""
    world = World(tmp_path)
    world.land(*split_offsets(A, 25), *split_offsets(B, 50), bad=1)
    return world


def erase(world: World, offsets: dict[Key, tuple[Range, ...]] = GONE, by: str = "erasing") -> Finished:
    ledger = world.reopen_ledger()
    try:
        decide(ledger, world.liveness, offsets, "asked on 3 May", lambda p: None)  # type: ignore[arg-type]
        done = finish(world.feed, world.ports, owner(by, "erase"), lambda p: None)
        for note in done.notes:  # the command removes them once tables forget their snapshots: there is none
            world.lake.remove(note)
        return done
    finally:
        world.liveness.dead.add(by)


def list_places(world: World, kind: PartKind = PartKind.LANDED) -> set[tuple[int, int]]:
    rows = world.read_rows(kind)
    return set(zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True))


GONE_PLACES = {(k.partition, o) for k, ranges in GONE.items() for r in ranges for o in range(r.start, r.end)}


def list_all(world: World) -> set[tuple[int, int]]:
    return list_places(world) | list_places(world, PartKind.QUARANTINED)


def test_rows_and_quarantined_records_are_removed_and_the_audit_passes(world: World) -> None:
    before = list_all(world)
    done = erase(world)
    assert list_all(world) == before - GONE_PLACES
    assert len(done.batches) == 1
    world.check()
    state = world.state()
    assert (state.erased, state.erasing) == (GONE, {})
    assert state.frontiers() == {A: 200, B: 200}
    entry = next(e for _, e in world.ledger.entries() if isinstance(e, EraseEntry))
    assert (entry.records, entry.reason) == (10, "asked on 3 May")
    counts = [a.account.counts for a in audit(world.reopen_ledger(), world.lake).partitions]  # type: ignore[arg-type]
    assert [c.erased for c in counts] == [9, 1]


def test_files_without_erased_rows_stay(world: World) -> None:
    before = set(world.list_files())
    erase(world, {A: (Range(3, 4),)})
    assert len(before - set(world.list_files())) == 2  # the landed and the quarantined file of one range


def test_explain_names_time_author_and_reason(world: World) -> None:
    erase(world)
    explanation = explain(world.reopen_ledger(), world.lake, A.tp, 100)  # type: ignore[arg-type]
    assert explanation.class_ is OffsetClass.ERASED
    assert "asked on 3 May" in explanation.text
    assert explain(world.reopen_ledger(), world.lake, A.tp, 104).class_ is OffsetClass.LANDED  # type: ignore[arg-type]


def test_between_entry_and_rewriting_the_audit_asks_to_finish(world: World) -> None:
    decide(world.reopen_ledger(), world.liveness, GONE, "asked", lambda p: None)  # type: ignore[arg-type]
    problems = audit(world.reopen_ledger(), world.lake).problems  # type: ignore[arg-type]
    assert {p.invariant for p in problems} == {19}
    assert all(p.remedy.startswith("sluice erase orders") for p in problems)
    erase(world, {})
    world.check()


def test_compaction_leaves_rows_to_be_erased_alone_and_keeps_erased_offsets(world: World) -> None:
    decide(world.reopen_ledger(), world.liveness, {A: (Range(3, 4),)}, "asked", lambda p: None)  # type: ignore[arg-type]
    world.compact()
    assert (0, 3) in list_places(world)
    erase(world, {})
    world.compact()
    assert (0, 3) not in list_all(world)
    world.check()
    assert audit(world.reopen_ledger(), world.lake).partitions[0].account.counts.erased == 1  # type: ignore[arg-type]


def test_no_batch_publishes_erased_rows(world: World) -> None:
    """Its entry is refused, and void for each reader if it stands."""
    erase(world)
    s = world.build_range(A, 0, 25)
    batch = world.plan([s], RequestKind.OFFSETS)
    receipt = world.land_range(s, batch, world.ledger.plan(batch).hash, 0, 1)
    with pytest.raises(OwnershipLost):
        publish(world.reopen_ledger(), batch, owner("landing"), [receipt])


def test_live_batch_of_the_same_offsets_is_waited_for(world: World) -> None:
    world.plan([world.build_range(A, 0, 25)], RequestKind.OFFSETS)
    with pytest.raises(PlanBusy, match="it reserves orders:0:0-25"):
        erase(world)
    assert not world.state().erased


def test_erasing_again_adds_no_entry(world: World) -> None:
    erase(world)
    number = world.state().number
    erase(world)
    assert world.state().number == number


def test_checkpoint_of_a_fold_with_erased_offsets_has_another_format(world: World) -> None:
    """An older Sluice that began at such a checkpoint would not stop at the erasure."""
    plain = dump(world.state())
    erase(world)
    state = world.state()
    assert load(dump(state)) == state
    assert b'"format":7' in _inflate(plain)
    assert b'"format":8' in _inflate(dump(state))


def _inflate(data: bytes) -> bytes:
    import zlib

    return zlib.decompress(data)


@pytest.mark.parametrize("effects", range(40))
def test_killed_anywhere_it_continues(tmp_path: Path, effects: int) -> None:
    world = World(tmp_path)
    world.land(*split_offsets(A, 25), *split_offsets(B, 50), bad=1)
    before = list_all(world)
    with contextlib.suppress(Died), crash_after(world.lake, effects):
        erase(world, by="first")
    for window in (START, START + HOUR):
        try:
            rows = _list_window(world, window)
        except WindowIncomplete:  # between entry and files
            continue
        old = {(p, o) for p, o in before if (o >= 100) == (window > START)}
        assert rows in (old, old - GONE_PLACES), "a window is old or new"
    erase(world, by="second")
    assert list_all(world) == before - GONE_PLACES
    world.check()
    for path in world.lake.list(""):
        if path.endswith(".parquet"):
            rows = pq.read_table(world.lake.open(path))
            coordinates = set(zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True))
            assert not coordinates & GONE_PLACES, path


def _list_window(world: World, window: int) -> set[Any]:
    rows = [world.read_rows(kind, [window]) for kind in PartKind]
    return {x for r in rows for x in zip(r["partition"].to_pylist(), r["offset"].to_pylist(), strict=True)}


def list_repairs(world: World) -> dict[RepairKind, str]:
    return {f.kind: f.text for f in repair(RepairTarget.of(world.feed, world.ports))}


def test_repair_leaves_the_erasure_of_a_live_process_to_it(world: World) -> None:
    eraser = owner("eraser", "erase")
    world.liveness.lake_owners.append(eraser)
    decide(world.reopen_ledger(), world.liveness, GONE, "asked", lambda p: None)  # type: ignore[arg-type]
    world.lake.put(paths.build_erasing_path(world.feed.stored, 99, eraser.token), b"an eraser")
    assert list_repairs(world)[RepairKind.AT_WORK] == "an erasure by a live process"
    assert RepairKind.ERASING not in list_repairs(world)
    world.liveness.dead.add(eraser.token)
    assert "may still be in files" in list_repairs(world)[RepairKind.ERASING]


def test_an_erasure_ends_its_own_notes_and_earlier_ones(world: World) -> None:
    """A later erasure's note and a foreign file stay; the file is no unfinished erasure."""
    folder = paths.get_erasing_folder(world.feed.stored)
    later, foreign = paths.build_erasing_path(world.feed.stored, 10**6, "later"), f"{folder}/notes.txt"
    for path in (later, foreign):
        world.lake.put(path, b"a process")
    assert len(erase(world).notes) == 1
    assert {*world.lake.list(folder)} == {later, foreign}
    report = audit(world.reopen_ledger(), world.lake)  # type: ignore[arg-type]
    assert [p.invariant for p in report.problems] == [19]
    world.lake.remove(later)
    world.check()
