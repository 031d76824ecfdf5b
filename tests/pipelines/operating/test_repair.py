"""Repair removes leftovers of dead runs from ledger and lake, spares those of live runs, and reports all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.errors import EntriesLost, PlanBusy, UsageError
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import BatchStatus, Ledger
from sluice.pipelines.ledger.entries import KeyRange, OwnEntry, RetireEntry
from sluice.pipelines.model.kafka import Range, TopicPartition
from sluice.pipelines.model.plans import AskedRange, OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import Owner, Receipt
from sluice.pipelines.operating.repairs import STALE_MS, Pretended, RepairFinding, RepairKind, RepairTarget, repair
from sluice.pipelines.ports import Lake
from sluice.pipelines.publishing.publish import format_request, publish
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.engine import MemoryLiveness, owner
from sluice.testing.lake import MemoryLake
from tests.pipelines.publishing.test_publish import KEY
from tests.pipelines.publishing.test_publish import World as Published

HOUR = 3_600_000
RANGE = OffsetRange("orders", 0, "id-1", 50, 60)


class World(Published):
    def __init__(self) -> None:
        super().__init__()
        self.liveness = MemoryLiveness()

    def make_target(self, lake: Lake | None = None) -> RepairTarget:
        ledger = self.reopen_ledger()
        return RepairTarget("orders", ledger, lake or self.lake, self.liveness, WindowSettings())

    def repair(self, *giving_up: int) -> list[RepairFinding]:
        return list(repair(self.make_target(), giving_up))

    def bury(self) -> None:
        self.liveness.dead.add(owner().token)

    def write_heartbeat(self, who: Owner) -> str:
        path = paths.owner_path("orders", who.token)
        self.lake.files[path] = b"{}"
        self.liveness.lake_owners.append(who)
        return path

    def land_visibly(self, start: int, end: int) -> Receipt:
        receipt = self.land(start, end)
        self.roll()
        return receipt


@pytest.fixture
def world() -> World:
    return World()


def list_kinds(findings: list[RepairFinding]) -> list[RepairKind]:
    return [f.kind for f in findings]


def test_intact_lake_needs_no_repair(world: World) -> None:
    world.land_visibly(0, 10)
    assert world.repair() == []


def test_published_files_become_visible_and_staging_is_removed(world: World) -> None:
    receipt = world.land(0, 10)
    findings = world.repair()
    assert list_kinds(findings) == [RepairKind.SHOWN, RepairKind.STAGING]
    assert (findings[0].act, findings[0].text) == ("made visible", "1 published file")
    assert (world.visible, world.staged) == ({receipt.parts[0].path}, set())
    assert world.repair() == []


def test_remaining_retired_part_is_removed(world: World) -> None:
    receipt = world.land_visibly(0, 10)
    parts = (receipt.parts[0].path,)
    entry = RetireEntry(before=1, ranges=(KeyRange(key=KEY, range=Range(0, 10)),), parts=parts, reason="old")
    world.ledger.append(lambda s: entry)
    (hidden,) = world.repair()
    assert (hidden.kind, hidden.act, hidden.items) == (RepairKind.HIDDEN, "removed", parts)
    assert world.visible == set()
    assert world.repair() == []


# -- batches


def test_batch_of_dead_run_is_left_for_next_run_and_its_status_reported(world: World) -> None:
    batch = world.plan(0, 10)
    world.stage(batch)
    world.bury()
    staged = world.staged
    (waiting,) = world.repair()
    assert waiting.kind is RepairKind.WAITING
    assert waiting.text == (
        f"batch {batch} (catch-up) is unfinished, and run run-1 (pid 1 on host) is dead;"
        " 1 of 1 offset ranges are finished"
    )
    assert waiting.why == "set by the test"
    finish, give_up = waiting.remedy
    assert finish == "sluice run orders   finishes it, and reads only the missing records"
    assert give_up == f"sluice repair orders --abandon {batch}   gives it up"
    assert world.staged == staged


def test_empty_folders_of_dead_batch_are_removed_and_of_live_batch_kept(world: World, tmp_path: Path) -> None:
    lake = LocalLake(tmp_path)
    ledger = Ledger(lake, "orders", lambda: 1, "test", "c")
    world.plan(0, 10)
    for entry in world.reopen_ledger().entries():
        ledger.append(lambda state, entry=entry: entry[1])
    batch = ledger.read().live()[0].id
    live, unknown = (tmp_path / "_sluice" / "orders" / "staging" / str(b) / "a" for b in (batch, 99))
    for folder in (live, unknown):
        folder.mkdir(parents=True)
    target = RepairTarget("orders", ledger, lake, world.liveness, WindowSettings())
    assert list_kinds(list(repair(target))) == [RepairKind.AT_WORK], (
        "a live batch stages files, and batch 99 is not in the ledger yet"
    )
    world.bury()
    (emptied,) = (f for f in repair(target, [batch]) if f.kind is RepairKind.EMPTY)
    assert (emptied.text, emptied.act, emptied.items) == (
        "1 empty folder",
        "removed",
        (f"_sluice/orders/staging/{batch}/a/",),
    )
    assert (live.exists(), unknown.exists()) == (False, True)


def test_batch_of_live_run_cannot_be_abandoned(world: World) -> None:
    dead, alive = world.plan(0, 10), world.plan(10, 20)
    world.ledger.append(lambda s: OwnEntry(batch=alive, owner=owner("token-2", "run-2")))
    world.bury()
    before = dict(world.lake.files)
    with pytest.raises(PlanBusy, match=f"batch {alive} .* is at work: run run-2"):
        world.repair(dead, alive)
    assert world.lake.files == before, "nothing is given up when one of them cannot be"
    assert list_kinds(world.repair()) == [RepairKind.WAITING, RepairKind.AT_WORK]


def test_batch_of_dead_run_can_be_abandoned(world: World) -> None:
    batch = world.plan(0, 10)
    world.stage(batch)
    world.bury()
    findings = world.repair(batch)
    assert list_kinds(findings) == [RepairKind.ABANDONED, RepairKind.STAGING]
    assert findings[0].text == f"batch {batch} (catch-up); 1 finished offset range will be read again"
    state = world.reopen_ledger().read()
    assert state.batches[batch].status is BatchStatus.ABANDONED
    assert state.list_reserved(KEY) == ()
    assert world.staged == set()
    (already,) = world.repair(batch)
    assert already.text == f"batch {batch} is abandoned already"


def test_batch_taken_over_meanwhile_is_not_abandoned(world: World) -> None:
    batch = world.plan(0, 10)
    world.bury()

    class TakenOver(MemoryLiveness):
        def judge(self, owners, *, watch=True):  # type: ignore[no-untyped-def]
            verdicts = super().judge(owners)
            world.ledger.append(lambda s: OwnEntry(batch=batch, owner=owner("token-2", "run-2")))
            return verdicts

    world.liveness = TakenOver(world.liveness.dead)
    with pytest.raises(PlanBusy, match="it has just begun"):
        world.repair(batch)
    assert world.reopen_ledger().read().batches[batch].status is BatchStatus.PLANNED


def test_abandoning_an_unknown_batch_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="feed orders has no batch 99"):
        world.repair(99)


REQUESTS = {
    "sluice run orders": Request(RequestKind.CATCH_UP),
    "sluice run orders --only orders:3": Request(RequestKind.CATCH_UP, only=(TopicPartition("orders", 3),)),
    "sluice run orders --window 1970-01-01T05:00": Request(RequestKind.WINDOW, window=5 * HOUR),
    "sluice run orders --from 1970-01-01T05:00 --to 1970-01-01T09:00 --replace": Request(
        RequestKind.WINDOW, window=5 * HOUR, until=9 * HOUR, replace=True
    ),
    "sluice run orders --offsets orders:0:10-20 --offsets orders:1:0-5": Request(
        RequestKind.OFFSETS, (AskedRange("orders", 0, 10, 20), AskedRange("orders", 1, 0, 5))
    ),
}


@pytest.mark.parametrize(("command", "wanted"), REQUESTS.items(), ids=list(REQUESTS))
def test_command_that_finishes_a_batch_has_the_same_request(command: str, wanted: Request) -> None:
    assert format_request("orders", wanted) == command


# -- leftovers


def test_staging_without_a_batch_is_removed(world: World) -> None:
    world.land_visibly(0, 10)
    world.lake.files[paths.receipt_path("orders", 0, "a", RANGE)] = b"{}"
    findings = world.repair()
    assert [(f.kind, f.act) for f in findings] == [(RepairKind.STAGING, "removed")]
    assert world.staged == set()


def test_staging_newer_than_the_ledger_stops_repair_without_changes(world: World) -> None:
    world.land_visibly(0, 10)
    newer = paths.receipt_path("orders", 4711, "a", RANGE)
    world.lake.files |= {paths.receipt_path("orders", 0, "a", RANGE): b"{}", newer: b"{}"}
    before = dict(world.lake.files)
    with pytest.raises(EntriesLost, match=f"{newer} is of batch 4711"):
        world.repair()
    assert world.lake.files == before


def test_batch_begun_during_repair_is_not_an_orphan(world: World) -> None:
    """Names are listed first and the ledger is read after them, so every listed batch is in it."""

    world.land_visibly(0, 10)

    class Growing(MemoryLake):
        def list(self, prefix: str, after: str = "") -> Iterator[str]:
            if prefix == paths.staging_root("orders") and world.armed:
                world.stage(world.plan(20, 30))
            world.armed = prefix == paths.manifest_folder("orders")  # the last folder listed before staging
            return super().list(prefix, after)

    world.armed = False  # type: ignore[attr-defined]
    lake = Growing()
    lake.files = world.lake.files
    target = world.make_target(lake)
    target.ledger.read()
    assert list(repair(target)) == []
    assert len(world.staged) == 2


def test_unfinished_writes_are_removed_when_no_live_run_can_own_them(world: World) -> None:
    done, live = world.land_visibly(0, 10), world.plan(10, 20)
    old, young = STALE_MS + 1, STALE_MS - 1
    world.lake.begun = {
        "_sluice/orders/log/.tmp-old": old,
        "_sluice/orders/log/.tmp-young": young,
        f"{paths.attempt_folder('orders', live, 'a')}/.tmp-old": old,
        f"{paths.attempt_folder('orders', _parse_batch(done), 'a')}/.tmp-young": young,
        "data/orders/.tmp-old": old,
        "data/others/.tmp-old": old,
    }
    (finding,) = (f for f in world.repair() if f.kind is RepairKind.UNFINISHED)
    assert len(finding.items) == 3
    assert list(world.lake.begun) == [
        "_sluice/orders/log/.tmp-young",
        f"{paths.attempt_folder('orders', live, 'a')}/.tmp-old",
        "data/others/.tmp-old",
    ]


def _parse_batch(receipt: Receipt) -> int:
    name = paths.parse_part(receipt.parts[0].path)
    assert name is not None
    return name.batch


def test_heartbeats_of_dead_runs_are_removed_and_of_live_runs_kept(world: World) -> None:
    dead, alive = world.write_heartbeat(owner()), world.write_heartbeat(owner("token-2", "run-2"))
    world.bury()
    (finding,) = world.repair()
    assert finding.kind is RepairKind.HEARTBEAT
    assert finding.text == "the sign of life of run run-1 (pid 1 on host), which is dead"
    assert dead not in world.lake.files
    assert alive in world.lake.files
    world.liveness.lake_owners.pop(0)
    assert world.repair() == []


def test_unknown_files_and_missing_parts_are_reported_and_unchanged(world: World) -> None:
    receipt = world.land_visibly(0, 10)
    lost = receipt.parts[0].path
    del world.lake.files[lost]
    world.lake.files["data/orders/mine.parquet"] = b"?"
    before = dict(world.lake.files)
    stranger, missing = world.repair()
    assert (stranger.kind, stranger.items) == (RepairKind.STRANGER, ("data/orders/mine.parquet",))
    assert (missing.kind, missing.items) == (RepairKind.MISSING, (lost,))
    assert missing.remedy[1].startswith("sluice run orders --missing-files ")
    assert not stranger.act
    assert not missing.act
    assert world.lake.files == before


def test_files_published_during_repair_are_neither_missing_nor_unknown(world: World) -> None:
    class Busy(MemoryLake):
        def list(self, prefix: str, after: str = "") -> Iterator[str]:
            names = list(super().list(prefix, after))
            if prefix == "quarantine/orders":  # after `data/` was listed
                world.land(world.reached, world.reached + 10)
                world.roll()
                world.reached += 10
            return iter(names)

    world.reached = 100  # type: ignore[attr-defined]
    lake = Busy()
    lake.files = world.lake.files
    world.land_visibly(0, 10)
    assert list(repair(world.make_target(lake))) == []


# -- the dry run


def make_debris(world: World) -> int:
    """Leave one of each kind of leftover. Returns a batch that may be given up."""
    retired = world.land_visibly(0, 10).parts[0].path
    entry = RetireEntry(before=1, ranges=(KeyRange(key=KEY, range=Range(0, 10)),), parts=(retired,), reason="old")
    world.ledger.append(lambda s: entry)
    world.land(10, 20)
    batch = world.plan(20, 30)
    world.stage(batch)
    world.bury()
    world.write_heartbeat(owner())
    world.lake.files[paths.receipt_path("orders", 0, "a", RANGE)] = b"{}"
    world.lake.files["data/orders/mine.parquet"] = b"?"
    world.lake.begun = {"data/orders/.tmp-old": STALE_MS + 1}
    return batch


@pytest.mark.parametrize("giving_up", [False, True])
def test_dry_run_reports_the_same_findings_as_repair_and_changes_nothing(world: World, giving_up: bool) -> None:
    batch = make_debris(world)
    abandoned = (batch,) if giving_up else ()
    files, begun = dict(world.lake.files), dict(world.lake.begun)
    pretended = Pretended(world.lake)
    target = replace(world.make_target(pretended), ledger=Ledger(pretended, "orders", lambda: 1, "run", "c"))
    findings = list(repair(target, abandoned))
    assert (world.lake.files, world.lake.begun) == (files, begun)
    assert findings == world.repair(*abandoned)
    assert (world.lake.files, world.lake.begun) != (files, begun)


def test_second_repair_reports_only_findings_it_does_not_fix(world: World) -> None:
    make_debris(world)
    world.repair()
    assert list_kinds(world.repair()) == [RepairKind.WAITING, RepairKind.STRANGER]


@pytest.mark.parametrize("failing", range(12))
def test_repair_interrupted_at_any_removal_is_finished_by_next_repair(failing: int) -> None:
    world, count = World(), 0
    batch = make_debris(world)
    undisturbed = World()
    make_debris(undisturbed)
    undisturbed.repair(batch)

    def remove_or_die(path: str, real: Callable[[str], None]) -> None:
        nonlocal count
        count += 1
        if count > failing:
            raise KeyboardInterrupt
        real(path)

    real = world.lake.remove
    world.lake.remove = lambda path: remove_or_die(path, real)  # type: ignore[method-assign]
    try:
        world.repair(batch)
    except KeyboardInterrupt:
        pass
    finally:
        world.lake.remove = real  # type: ignore[method-assign]
    world.repair(batch)
    logs = paths.log_folder("orders")
    assert {p for p in world.lake.files if not p.startswith(logs)} == {
        p for p in undisturbed.lake.files if not p.startswith(logs)
    }


def test_publish_of_an_abandoned_batch_is_refused(world: World) -> None:
    batch = world.plan(0, 10)
    receipt = world.stage(batch)
    world.bury()
    world.repair(batch)
    with pytest.raises(Exception, match="was abandoned"):
        publish(world.ledger, batch, owner(), [receipt], [])
    assert world.visible == set()
