"""`sluice offsets migrate` between two groups in memory: its text, documents and exit codes."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest

from sluice.cli.kafka import offsets_migrate
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.errors import Failed, UsageError
from sluice.pipelines.model.kafka import CommittedOffset
from sluice.testing.group import MemoryGroup, MemoryGroups, member
from tests.assets.world import P0, P1, World
from tests.cli.conftest import Invoke, WorldSession

THERE = {"into": "kafka"}


@pytest.fixture
def old(world: World) -> MemoryGroup:
    """The group's offsets in ZooKeeper."""
    world.other_store = group = MemoryGroup({P0: CommittedOffset(40), P1: CommittedOffset(100)})
    return group


def test_dry_run_shows_each_partition_and_migration_moves_missing_offsets(
    world: World, old: MemoryGroup, invoke: Invoke
) -> None:
    world.group.offsets[P1] = CommittedOffset(100)
    result = invoke(offsets_migrate.migrate, "orders", **THERE, dry_run=True)
    first, second = result.document["offsets"]
    assert (first["source"]["offset"], first["target"], first["step"]) == (40, None, "to move")
    assert (second["source"]["offset"], second["target"]["offset"], second["step"]) == (100, 100, "there already")
    assert (result.code, result.document["applied"], P0 in world.group.offsets) == (0, False, False)
    assert "A dry run: 1 offset would move; nothing was changed." in result.text
    done = invoke(offsets_migrate.migrate, "orders", **THERE, yes=True, text=False)
    assert (done.code, done.document["moved"], world.group.offsets) == (0, 1, old.offsets)
    again = invoke(offsets_migrate.migrate, "orders", **THERE, yes=True)
    assert "0 offsets moved from zookeeper to kafka, 2 there already, and read back" in again.text


def test_refusal_exits_with_3_and_moves_nothing(
    world: World, old: MemoryGroup, groups: MemoryGroups, invoke: Invoke
) -> None:
    groups.members["sluice-orders"] = (member("loader", P0),)
    result = invoke(offsets_migrate.migrate, "orders", **THERE, dry_run=True, text=False)
    assert (result.code, result.document["problem"]["error"]) == (3, "GroupHeld")
    groups.members.clear()
    old.offsets[P0] = CommittedOffset(101)
    result = invoke(offsets_migrate.migrate, "orders", **THERE, yes=True)
    assert (result.code, result.document["applied"], world.group.offsets) == (3, False, {})
    assert result.document["problem"]["message"].endswith(
        "beyond the end of the log: orders:0 (101, the log ends at 100)"
    )
    one = invoke(offsets_migrate.migrate, "orders", **THERE, yes=True, only=["orders:1"], text=False)
    assert (one.code, world.group.offsets) == (0, {P1: CommittedOffset(100)})


def test_unknown_target_store_is_rejected(world: World, old: MemoryGroup, invoke: Invoke) -> None:
    with pytest.raises(UsageError, match="no store 'redis'"):
        invoke(offsets_migrate.migrate, "orders", into="redis")


def test_migration_without_a_terminal_needs_yes(world: World, old: MemoryGroup, invoke: Invoke) -> None:
    with pytest.raises(UsageError, match="not confirmed: Copy 2 offsets of group sluice-orders to kafka"):
        invoke(offsets_migrate.migrate, "orders", **THERE)
    assert world.group.offsets == {}


@pytest.mark.parametrize(("answer", "moved"), [("y\n", 2), ("n\n", 0)])
def test_migration_on_a_terminal_prompts_once_and_prints_one_table(
    world: World,
    old: MemoryGroup,
    groups: MemoryGroups,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    answer: str,
    moved: int,
) -> None:
    monkeypatch.setattr(CommandOutput, "interactive", True)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    session = WorldSession(CommandOutput(), world.project.root, False, world, groups)
    with nullcontext() if moved else pytest.raises(Failed, match="nothing was changed"):
        offsets_migrate.migrate(session, "orders", "kafka")
    output = capfd.readouterr()
    assert "Copy 2 offsets of group sluice-orders to kafka? [y/N]" in output.err
    assert output.out.count("orders:0") == 1
    assert ("2 offsets moved" in output.out) == bool(moved)
    assert len(world.group.offsets) == moved


def test_feed_without_a_zookeeper_address_is_rejected(world: World) -> None:
    from sluice.resources.open_ports import open_stores
    from tests.assets.world import FEED

    assert "connect" not in FEED
    from sluice.assets.specs.feed_files import read_feeds

    feed = read_feeds(world.project, {}).feed("orders")
    with pytest.raises(UsageError, match="does not say where ZooKeeper is"), open_stores(feed):
        pass
