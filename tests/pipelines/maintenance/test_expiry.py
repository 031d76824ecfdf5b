"""Expiry retires whole windows of all partitions, by a ledger entry that is written before a file is removed.

The account still closes, and readers of a retired window get an error.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.errors import PlanBusy, Refused, UsageError, WindowIncomplete, WindowRetired
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import BatchStatus, Ledger
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.ledger.checkpoint import dump, load
from sluice.pipelines.ledger.entries import (
    AcceptEntry,
    Boundaries,
    BoundaryEntry,
    Entering,
    OriginItem,
    RetireEntry,
)
from sluice.pipelines.maintenance import expiry
from sluice.pipelines.maintenance.erasure import decide
from sluice.pipelines.maintenance.expiry import (
    Retired,
    RetireRequest,
    expire,
    hold_windows,
    list_holds,
    look,
    release_hold,
    remove_retired,
)
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.plans import RequestKind
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.planning import windows
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing.publish import abandon, publish, roll_forward
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake
from tests.pipelines.landed_world import HOUR, START, A, B, Died, World, crash_after, split_offsets


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Both hours of both partitions have landed."""
    world = World(tmp_path)
    world.land(*split_offsets(A, 25), *split_offsets(B, 50), bad=1, gaps=2)
    return world


def expire_by_hand(world: World, before: int = START + HOUR) -> Retired:
    ledger = Ledger(world.lake, "orders", lambda: world.now, "ada on hal", "c")  # type: ignore[arg-type]
    return expire(ledger, world.lake, RetireRequest(before, "kept for a day"), world.feed.window, world.liveness)  # type: ignore[arg-type]


def is_first_hour(path: str) -> bool:
    return f"/{paths.window_folder(START, HOUR, paths.FORMER_PREFIX)}/" in path


# -- rows, files and accounts


def test_rows_before_the_boundary_are_retired_and_the_audit_passes(world: World) -> None:
    later_rows = world.read_rows(windows=[START + HOUR])
    files = [p for p in world.list_files() if is_first_hour(p)]
    done = expire_by_hand(world)
    assert sorted(done.removed.parts) == files
    assert world.list_files() == [p for p in world.list_files() if not is_first_hour(p)]
    assert world.read_rows(windows=[START + HOUR]).equals(later_rows)
    world.check()
    state = world.state()
    assert {k: [tuple(r) for r in ranges] for k, ranges in state.retired.items()} == {A: [(0, 100)], B: [(0, 100)]}
    assert state.frontiers() == {A: 200, B: 200}
    entry = world.ledger.entry(done.number or -1)
    assert isinstance(entry, RetireEntry)
    assert (entry.before, sorted(entry.parts), entry.run, entry.reason) == (
        START + HOUR,
        files,
        "ada on hal",
        "kept for a day",
    )


def test_windows_on_hold_stay_until_the_hold_is_released(world: World) -> None:
    rows = world.read_rows(windows=[START])
    hold_windows(world.reopen_ledger(), START + HOUR - 1, START + HOUR, "case 12")  # type: ignore[arg-type]
    (hold,) = list_holds(world.ledger, world.state(), world.feed.window)  # type: ignore[arg-type]
    done = expire_by_hand(world)
    assert (done.number, done.expiry.receipts) == (None, ())
    assert {r.offset_range.window for r in done.expiry.on_hold} == {START}
    assert world.read_rows(windows=[START]).equals(rows)
    with pytest.raises(Refused, match=r"is on hold, by .*: case 12") as refused:
        decide(world.reopen_ledger(), world.liveness, {A: (Range(3, 4),)}, "asked", lambda p: None)  # type: ignore[arg-type]
    assert f"sluice hold orders --release {hold.number} --reason" in refused.value.remedy
    assert load(dump(world.state())) == world.state()
    release_hold(world.reopen_ledger(), hold.number, "case 12 is closed")  # type: ignore[arg-type]
    assert list_holds(world.ledger, world.state(), world.feed.window) == ()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is no hold in force"):
        release_hold(world.reopen_ledger(), hold.number, "again")  # type: ignore[arg-type]
    assert len(expire_by_hand(world).removed.parts) > 0
    world.check()


def test_records_outside_of_a_hold_are_erased(world: World) -> None:
    hold_windows(world.reopen_ledger(), START, START + HOUR, "case 12")  # type: ignore[arg-type]
    decide(world.reopen_ledger(), world.liveness, {A: (Range(103, 104),)}, "asked", lambda p: None)  # type: ignore[arg-type]
    assert world.state().erased == {A: (Range(103, 104),)}


@pytest.mark.parametrize(
    ("start", "end", "number"),
    [(None, None, 0), (START, None, 0), (None, START, 2), (START + HOUR, None, 2), (None, START + 1, 0)],
)
def test_hold_without_limits_covers_all_windows_on_that_side(
    world: World, start: int | None, end: int | None, number: int
) -> None:
    """`number` is that of the partitions with retired ranges."""
    hold_windows(world.reopen_ledger(), start, end, "case 12")  # type: ignore[arg-type]
    expire_by_hand(world)
    assert len(world.state().retired) == number


def test_preview_changes_nothing(world: World) -> None:
    before = dict(world.lake.files)
    preview = look(world.feed, world.ports, START + HOUR)
    assert world.lake.files == before
    assert [
        (w, sum(len(r.parts) for r in receipts)) for w, receipts in expiry.windows_of(preview, world.feed.window)
    ] == [(START, 12)]


def test_reading_a_retired_window_reports_operator_and_reason(world: World) -> None:
    expire_by_hand(world)
    with pytest.raises(WindowRetired, match=r"was retired on 2015-08-20T01:00:00Z by ada on hal: kept for a day"):
        world.read_rows(windows=[START])
    with pytest.raises(WindowRetired):
        world.read_rows(PartKind.QUARANTINED, windows=[START + HOUR, START])
    explanation = explain(world.ledger, world.lake, A.tp, 50)  # type: ignore[arg-type]
    assert explanation.class_ is OffsetClass.RETIRED
    assert explain(world.ledger, world.lake, A.tp, 100).class_ is OffsetClass.LANDED  # type: ignore[arg-type]


def test_retired_window_stays_complete_and_loses_its_manifest_permanently(world: World) -> None:
    assert manifest.is_declared(world.lake, "orders", START, world.feed.window)  # type: ignore[arg-type]
    done = expire_by_hand(world)
    assert done.removed.manifests == (paths.window_path("orders", START, HOUR),)
    manifest.write_manifests(world.reopen_ledger(), world.lake, "orders", world.feed.window)  # type: ignore[arg-type]
    assert not manifest.is_declared(world.lake, "orders", START, world.feed.window)  # type: ignore[arg-type]
    assert manifest.is_declared(world.lake, "orders", START + HOUR, world.feed.window)  # type: ignore[arg-type]
    assert windows.complete(world.state(), START, world.feed.window)
    assert windows.list_pending_windows(world.state(), world.feed.window, world.now)[:1] != [START]


def test_reports_of_fully_retired_batches_are_removed(tmp_path: Path) -> None:
    """A batch that landed in both hours keeps its report."""
    world = World(tmp_path)
    world.land((A, 0, 50), (B, 0, 50))
    world.land((A, 50, 100))
    world.land((B, 50, 100), (B, 100, 150))
    world.land((A, 100, 200), (B, 150, 200))
    published = {b.id: world.ledger.publication(b) for b in world.state().batches.values() if b.published is not None}
    for id in published:
        world.lake.put(paths.batch_page_path("orders", id), b"<html>")
    world.lake.put(paths.batch_page_path("orders", 99), b"<html>")
    old = [i for i, e in published.items() if all(r.offset_range.window == START for r in e.receipts)]
    done = expire_by_hand(world)
    assert done.removed.pages == tuple(paths.batch_page_path("orders", i) for i in sorted(old, key=str))
    assert len(old) == 2
    remaining = set(world.lake.list(paths.batch_page_folder("orders")))
    assert remaining == {paths.batch_page_path("orders", i) for i in (*set(published).difference(old), 99)}
    assert expire_by_hand(world).removed.pages == ()


def test_retired_window_is_readable_after_landing_again(world: World) -> None:
    before = world.read_rows(windows=[START])
    expire_by_hand(world)
    world.land(*split_offsets(A, 25, end=100), *split_offsets(B, 50, end=100), bad=1, gaps=2)
    assert world.read_rows(windows=[START]).equals(before)
    assert manifest.is_declared(world.lake, "orders", START, world.feed.window)  # type: ignore[arg-type]
    world.check()


def test_expiry_is_idempotent_and_a_later_boundary_retires_the_rest(world: World) -> None:
    assert expire_by_hand(world).number is not None
    again = expire_by_hand(world)
    assert (again.number, again.removed.parts) == (None, ())
    assert expire_by_hand(world, START + 2 * HOUR).number is not None
    assert world.list_files() == []
    world.check()


def test_compacted_windows_are_retired(world: World) -> None:
    world.compact()
    expire_by_hand(world)
    assert len(world.list_files()) == 4
    world.check()
    assert world.compact(by="again").merged == ()


def test_former_incarnation_is_retired_by_its_own_windows(world: World) -> None:
    fresh = Key("orders", 0, "id-2")
    begins = OriginItem(key=fresh, offset=0, committed=None, why="recreated", opens=START + 2 * HOUR)
    entering = Entering(leaves=A, enters=begins)
    world.ledger.append(lambda s: AcceptEntry(event="recreated", items=(entering,), reason="test"))
    pins = tuple(Boundaries(key=k, times=(START + 3 * HOUR,), offsets=(o,)) for k, o in ((fresh, 40), (B, 200)))
    world.ledger.append(lambda s: BoundaryEntry(items=pins))
    world.land((fresh, 0, 40))
    done = expire_by_hand(world, START + 2 * HOUR)
    assert {(i.key, tuple(i.range)) for i in done.expiry.ranges} == {(A, (0, 200)), (B, (0, 200))}
    with pytest.raises(WindowRetired):
        world.read_rows(windows=[START + HOUR])
    world.check()
    assert expire_by_hand(world, START + 3 * HOUR).number is not None
    assert world.list_files() == []


def test_range_across_the_boundary_outside_windows_is_listed(world: World) -> None:
    s = world.build_range(A, 190, 210, window=0)
    batch = world.plan([s])
    plan = world.ledger.plan(batch)

    publish(world.ledger, batch, owner("landing"), [world.land_range(s, batch, plan.hash, 0, 1)], [])
    preview = look(world.feed, world.ports, START + 2 * HOUR)
    assert [str(r.offset_range) for r in preview.across] == ["orders:0:190-210"]


# -- refused


def test_expiry_is_refused_unless_every_partition_has_the_boundary(world: World) -> None:
    for before, says in (
        (START + HOUR // 2, "is not the start of a window"),
        (START + 3 * HOUR, "the nearest end of a window before it is 2015-08-19T18:00"),
    ):
        with pytest.raises(UsageError) as caught:
            expire_by_hand(world, before)
        assert says in str(caught.value)
    pin = Boundaries(key=A, times=(START + 3 * HOUR,), offsets=(200,))
    world.ledger.append(lambda s: BoundaryEntry(items=(pin,)))
    with pytest.raises(UsageError, match="in orders:1"):
        expire_by_hand(world, START + 3 * HOUR)
    with pytest.raises(UsageError, match="nothing of feed orders has landed"):
        look(world.feed, replace(world.ports, lake=MemoryLake()), START)


def test_pending_offsets_before_the_boundary_are_reported_with_the_command(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land(*split_offsets(A, 100), *split_offsets(B, 50, end=50))
    with pytest.raises(WindowIncomplete) as caught:
        expire_by_hand(world)
    assert "orders:1 [50, 100)" in caught.value.message
    assert "sluice run orders --window 2015-08-19T16:00" in caught.value.remedy
    with pytest.raises(WindowIncomplete) as caught:
        expire_by_hand(world, START + 2 * HOUR)
    assert "--from 2015-08-19T16:00 --to 2015-08-19T18:00" in caught.value.remedy
    assert world.state().retired == {}


def test_nothing_is_retired_while_another_batch_is_active_in_the_window(world: World) -> None:
    batch = world.plan([world.build_range(B, 50, 100)], RequestKind.COMPACT, by="rival")
    with pytest.raises(PlanBusy, match=f"batch {batch}"):
        expire_by_hand(world)
    assert len(world.list_files()) == 24


def test_dead_landing_batch_blocks_expiry_and_dead_compaction_is_abandoned(world: World) -> None:
    batch = world.plan([world.build_range(B, 50, 100)], by="rival")
    world.liveness.dead.add("rival")
    with pytest.raises(
        PlanBusy, match=rf"batch {batch} .* is unfinished, and run run-1 .* is dead: set by the test"
    ) as caught:
        expire_by_hand(world)
    assert f"`sluice repair orders --abandon {batch}` gives it up" in caught.value.remedy
    abandon(world.ledger, batch, "by hand")
    merging = world.plan([world.build_range(B, 50, 100)], RequestKind.COMPACT, by="rival")
    assert look(world.feed, world.ports, START + HOUR).receipts
    assert expire_by_hand(world).number is not None
    assert world.state().batches[merging].status is BatchStatus.ABANDONED


def test_batch_planned_just_before_the_retire_entry_is_detected(world: World) -> None:
    def plan_first(path: str) -> None:
        world.lake.before.clear()
        world.plan([world.build_range(B, 50, 100)], by="rival")

    world.lake.before["put_if_absent"] = plan_first
    with pytest.raises(PlanBusy):
        expire_by_hand(world)
    assert world.state().retired == {}


# -- failures


def test_expiry_that_crashes_at_any_write_is_completed_later(tmp_path: Path) -> None:
    landed = World(tmp_path)
    landed.land(*split_offsets(A, 50), *split_offsets(B, 50), bad=1)
    files = landed.list_files()
    at, ended = 0, False
    while not ended:
        world = landed.fork()
        with contextlib.suppress(Died), crash_after(world.lake, at):
            expire_by_hand(world)
            ended = True
        if world.state().retired:
            with pytest.raises(WindowRetired):
                world.read_rows(windows=[START])
            remove_retired(world.reopen_ledger(), world.lake)  # type: ignore[arg-type]
            world.check()
            assert world.list_files() == [p for p in files if not is_first_hour(p)]
            assert not manifest.is_declared(world.lake, "orders", START, world.feed.window)  # type: ignore[arg-type]
        else:
            assert world.list_files() == files
        at += 1
    assert at > 10, "every write was tried"


def test_delayed_removal_restores_manifest_of_window_landed_again(world: World) -> None:
    woken: list[str] = []

    def land_first(path: str) -> None:
        if path.startswith(paths.manifest_folder("orders")) and not woken:
            woken.append(path)
            world.land((A, 0, 100), (B, 0, 100))

    world.lake.before["remove"] = land_first
    assert expire_by_hand(world).removed.manifests == ()
    assert woken
    assert manifest.is_declared(world.lake, "orders", START, world.feed.window)  # type: ignore[arg-type]
    world.check()


def test_manifest_is_withdrawn_when_window_is_retired_during_declaration(tmp_path: Path) -> None:
    world = World(tmp_path)
    woken: list[str] = []

    def retire_first(path: str) -> None:
        if path.startswith(paths.manifest_folder("orders")) and not woken:
            woken.append(path)
            expire_by_hand(world)

    world.lake.before["put_if_absent"] = retire_first
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    assert woken
    declared = [manifest.is_declared(world.lake, "orders", w, world.feed.window) for w in (START, START + HOUR)]  # type: ignore[arg-type]
    assert declared == [False, True]
    world.check()


def test_delayed_roll_forward_does_not_restore_a_retired_part(world: World) -> None:
    """The part is published, and retired while the process that would make it visible sleeps."""
    ranges = [world.build_range(A, 200, 250)]
    pins = tuple(Boundaries(key=k, times=(START + 3 * HOUR,), offsets=(o,)) for k, o in ((A, 250), (B, 200)))
    world.ledger.append(lambda s: BoundaryEntry(items=pins))
    batch = world.plan(ranges)
    plan = world.ledger.plan(batch)
    receipt = world.land_range(ranges[0], batch, plan.hash, 0, 1)
    show, woken = world.lake.show, []

    def sleep_then_show(source: str, target: str) -> None:
        world.lake.show = show  # type: ignore[method-assign]
        expire_by_hand(world, START + 3 * HOUR)
        woken.append(target)
        show(source, target)

    publish(world.ledger, batch, owner("landing"), [receipt], [])
    world.lake.show = sleep_then_show  # type: ignore[method-assign]
    roll_forward(world.ledger, world.lake, "orders")  # type: ignore[arg-type]
    assert woken
    assert world.list_files() == []
    world.check()
