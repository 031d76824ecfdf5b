"""Roll-forward makes `data/` equal to the live parts of the fold, after any number of runs by any process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from sluice.pipelines.errors import ProofFailed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import AbandonEntry, OriginEntry, OriginItem, PlanEntry
from sluice.pipelines.model.kafka import Isolation, Key
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.pipelines.publishing.publish import LATE, abandon, publish, roll_forward, roll_forward_own
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake
from tests.pipelines import landed_world

KEY = Key("orders", 0, "id-1")


class World:
    now = 1

    def __init__(self) -> None:
        self.lake = MemoryLake()
        self.ledger = self.reopen_ledger()
        item = OriginItem(key=KEY, offset=0, committed=None, why="test")
        self.ledger.append(lambda s: OriginEntry(items=(item,)))

    def reopen_ledger(self) -> Ledger:
        return Ledger(self.lake, "orders", lambda: self.now, "run", "c")

    def plan(self, start: int, end: int, replaces: tuple[str, ...] = ()) -> int:
        s = OffsetRange("orders", 0, "id-1", start, end)
        plan = Plan(
            "orders", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (Task(0, 1, (s,)),), replaces
        )
        appended = self.ledger.append(lambda st: PlanEntry(plan=plan, hash=plan.hash, owner=owner()))
        assert appended is not None
        return appended.number

    def stage(self, batch: int, attempt: str = "a") -> Receipt:
        s = _build_range(self.ledger, batch)
        name = paths.part_name(s, batch)
        staged = paths.staged_path("orders", batch, attempt, PartKind.LANDED, "", name)
        path = paths.part_path("orders", PartKind.LANDED, "", name)
        self.lake.files[staged] = f"{batch}:{s}".encode()
        self.lake.files[paths.receipt_path("orders", batch, attempt, s)] = b"{}"
        part = Part(name, PartKind.LANDED, staged, path, s.span, len(self.lake.files[staged]), "0" * 64)
        return Receipt(s, s.end, Counts(landed=s.span), (part,), attempt)

    def land(self, start: int, end: int, replaces: tuple[str, ...] = ()) -> Receipt:
        batch = self.plan(start, end, replaces)
        receipt = self.stage(batch)
        publish(self.ledger, batch, owner(), [receipt], [])
        return receipt

    def roll(self) -> None:
        roll_forward(self.reopen_ledger(), self.lake, "orders")

    @property
    def visible(self) -> set[str]:
        return set(self.lake.list("data/orders"))

    @property
    def staged(self) -> set[str]:
        return set(self.lake.list(paths.staging_root("orders")))


def test_nothing_is_visible_before_the_publish_entry_exists() -> None:
    world = World()
    world.stage(world.plan(0, 10))
    world.roll()
    assert world.visible == set()
    assert len(world.staged) == 2, "a live batch keeps its staging"


def test_published_parts_become_visible_and_staging_is_removed() -> None:
    world = World()
    receipt = world.land(0, 10)
    world.roll()
    world.roll()
    assert world.visible == {receipt.parts[0].path}
    assert world.staged == set()


def test_own_published_batch_becomes_visible_and_other_staging_stays() -> None:
    """Files of other attempts go with it."""
    world = World()
    batch, other = world.plan(0, 10), world.plan(10, 20)
    chosen, _ = world.stage(batch, "a"), world.stage(batch, "b")
    world.stage(other, "a")
    publish(world.ledger, batch, owner(), [chosen], [])
    others = {p for p in world.staged if f"/staging/{other}/" in p}
    roll_forward_own(world.reopen_ledger(), world.lake, "orders", batch)
    assert world.visible == {chosen.parts[0].path}
    assert world.staged == others != set()


def test_damaged_file_at_the_part_path_does_not_delete_the_staged_part(tmp_path: Path) -> None:
    """A tool that copies the lake was stopped in the middle."""
    world = landed_world.World(tmp_path, lake=LocalLake(tmp_path / "lake"))
    s = world.build_range(landed_world.A, 0, 100)
    batch = world.plan([s])
    receipt = world.land_range(s, batch, world.ledger.plan(batch).hash, 0, 1)
    publish(world.ledger, batch, owner("landing"), [receipt], [])
    world.lake.put(receipt.parts[0].path, b"PAR1")
    for _ in range(2):
        with pytest.raises(ProofFailed, match="another size"):
            roll_forward(world.reopen_ledger(), world.lake, "orders")
    world.lake.remove(receipt.parts[0].path)
    roll_forward(world.reopen_ledger(), world.lake, "orders")
    world.check()


def test_files_of_unchosen_attempts_never_become_visible() -> None:
    world = World()
    batch = world.plan(0, 10)
    chosen, _ = world.stage(batch, "a"), world.stage(batch, "b")
    publish(world.ledger, batch, owner(), [chosen], [])
    world.roll()
    assert world.visible == {chosen.parts[0].path}
    assert world.staged == set()


def test_replacement_hides_replaced_part_after_a_crash_at_any_step() -> None:
    for crash_at in range(5):
        world = World()
        old = world.land(0, 10)
        world.roll()
        new = world.land(0, 10, replaces=(old.parts[0].path,))
        _crash_after(world, crash_at)
        world.roll()
        assert world.visible == {new.parts[0].path}, crash_at
        assert world.staged == set()


def _build_range(ledger: Ledger, batch: int) -> OffsetRange:
    return ledger.plan(batch).offset_ranges[0]


class _Died(Exception):
    pass


def _crash_after(world: World, effects: int) -> None:
    """Roll forward, and die after the given number of changes to the lake."""
    remaining = [effects]
    remove, show = world.lake.remove, world.lake.show

    def count_calls(do):  # type: ignore[no-untyped-def]
        def call(*args: str) -> None:
            if remaining[0] == 0:
                raise _Died
            remaining[0] -= 1
            do(*args)

        return call

    world.lake.remove, world.lake.show = count_calls(remove), count_calls(show)  # type: ignore[method-assign]
    with contextlib.suppress(_Died):
        world.roll()
    world.lake.remove, world.lake.show = remove, show  # type: ignore[method-assign]


def test_delayed_run_with_old_state_cannot_restore_a_replaced_part() -> None:
    world = World()
    old = world.land(0, 10)
    show = world.lake.show
    woken: list[str] = []

    def sleep_then_show(source: str, target: str) -> None:
        world.lake.show = show  # type: ignore[method-assign]
        world.land(0, 10, replaces=(old.parts[0].path,))
        world.roll()
        woken.append(source)
        show(source, target)

    world.lake.show = sleep_then_show  # type: ignore[method-assign]
    world.roll()
    assert woken
    assert world.visible == {p for p in world.visible if p != old.parts[0].path}
    assert len(world.visible) == 1


def test_part_replaced_during_its_copy_does_not_stay_visible() -> None:
    """On S3 a copy reads its source before it appears: it may appear after other runs have continued."""

    class Slow(MemoryLake):
        def show(self, source: str, target: str) -> None:
            data = self.files[source]
            if target == first.parts[0].path:
                world.land(0, 10, (target,))
                current = self.show
                self.show = super().show  # type: ignore[method-assign]
                roll_forward(world.reopen_ledger(), self, "orders")
                self.show = current  # type: ignore[method-assign]
            self.files[target] = data

    world = World()
    first = world.land(0, 10)
    slow = Slow()
    slow.files = world.lake.files
    roll_forward(world.reopen_ledger(), slow, "orders")
    (stands,) = world.visible
    assert stands != first.parts[0].path
    assert world.staged == set()


def test_replaced_part_appearing_after_its_run_died_is_hidden_by_next_run() -> None:
    """A store finishes the copy of a killed run after other runs have continued."""
    world = World()
    world.lake.copies = True
    old = world.land(0, 10).parts[0]
    data = world.lake.files[old.staged]
    world.roll()
    (new,) = world.land(0, 10, (old.path,)).parts
    for _ in range(2):
        world.roll()
        assert world.visible == {new.path}
        world.lake.files[old.path] = data
    assert roll_forward(world.reopen_ledger(), world.lake, "orders").cleaned == (), "of nothing but the note"
    world.now += LATE
    world.roll()
    assert (world.visible, world.staged) == ({new.path}, set())


def test_staging_of_an_abandoned_batch_is_removed() -> None:
    world = World()
    batch = world.plan(0, 10)
    world.stage(batch)
    assert abandon(world.ledger, batch, "test") is not None
    assert abandon(world.ledger, batch, "test") is None
    world.roll()
    assert world.staged == set()
    assert isinstance(world.ledger.entry(2), AbandonEntry)


def test_staging_newer_than_the_ledger_state_is_kept() -> None:
    world = World()
    stray = paths.staged_path("orders", 99, "a", PartKind.LANDED, "", "x.parquet")
    world.lake.files[stray] = b"?"
    world.roll()
    assert stray in world.staged
