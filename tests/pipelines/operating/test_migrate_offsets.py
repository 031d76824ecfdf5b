"""A migration of a group's offsets, killed at each of its steps, with a real ZooKeeper and Kafka groups in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from sluice.pipelines.errors import GroupHeld, Refused
from sluice.pipelines.feed.sections import OffsetStore
from sluice.pipelines.model.kafka import CommittedOffset, PartitionState, TopicPartition
from sluice.pipelines.operating.migrate_offsets import MigrationAction, Stores, migrate, plan, refusal
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperGroup
from sluice.testing.group import MemoryGroup, MemoryGroups, member
from tests.zookeepers import LocalZooKeeper

TPS = [TopicPartition("orders", p) for p in range(3)]
LOGS = tuple(PartitionState(*tp, "T", 1, 0, 0, 100, 100) for tp in TPS)
KAFKA, ZOOKEEPER = OffsetStore.KAFKA, OffsetStore.ZOOKEEPER
_numbers = count(1)


class Killed(BaseException):
    """Stands for a kill of the process at this point."""


class World:
    """A group in both stores. Each `open_stores` stands for a process, whose end closes its sessions."""

    def __init__(self, zookeeper: LocalZooKeeper) -> None:
        self.zookeeper, self.name = zookeeper, f"moved-{next(_numbers)}"
        self.kafka = MemoryGroup()
        self.groups = MemoryGroups(self.name, self.kafka)

    @contextmanager
    def open_stores(self, patience: float = 0.0) -> Iterator[Stores]:
        group = ZooKeeperGroup(self.zookeeper.connect, self.name, patience=patience)
        try:
            yield Stores(self.name, group, self.groups)
        finally:
            group.close()

    def put(self, *offsets: int) -> None:
        """Write offsets into ZooKeeper, each with a mark."""
        with self.open_stores() as stores:
            stores.zookeeper.own(lambda: TPS, lambda: None)
            with stores.zookeeper.join(["orders"], None) as owner:
                owner.fetch_committed(TPS)
                owner.commit_plain({tp: CommittedOffset(o, 1, f"mark {o}") for tp, o in zip(TPS, offsets, strict=True)})

    def in_kafka(self) -> list[int | None]:
        return [c.offset if (c := self.kafka.offsets.get(tp)) else None for tp in TPS]

    def migrate(self, source: OffsetStore = ZOOKEEPER) -> int:
        """Migrate the group. Returns the number of moved offsets."""
        with self.open_stores() as stores:
            return len(migrate("orders", stores, source, LOGS).of(MigrationAction.MOVE))


@pytest.fixture
def world(zookeeper: LocalZooKeeper) -> World:
    return World(zookeeper)


def test_offsets_and_metadata_migrate_in_both_directions(world: World) -> None:
    world.put(4, 5, 6)
    assert world.migrate() == 3
    assert world.kafka.offsets == {tp: CommittedOffset(n, 1, f"mark {n}") for tp, n in zip(TPS, (4, 5, 6), strict=True)}
    world.kafka.offsets[TPS[0]] = CommittedOffset(9, 2, "mark 9")
    assert world.migrate(KAFKA) == 1
    with world.open_stores() as stores:
        assert stores.zookeeper.fetch_committed(TPS) == world.kafka.offsets


POINTS = ["own", "look", "read", "half", "write", "read back"]


@pytest.mark.parametrize("source", [ZOOKEEPER, KAFKA])
@pytest.mark.parametrize("point", POINTS)
def test_migration_killed_at_any_step_is_completed_by_a_rerun(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str, source: OffsetStore
) -> None:
    world.put(4, 5, 6)
    if source is KAFKA:
        world.migrate()
        with world.zookeeper.open_client() as client:
            client.delete(f"/consumers/{world.name}/offsets", recursive=True)
    with monkeypatch.context() as patch:
        _plant(world, patch, point, source)
        with pytest.raises(Killed):
            world.migrate(source)
    moved = world.migrate(source)
    assert moved == {"half": 2, "write": 0, "read back": 0}.get(point, 3)
    assert world.in_kafka() == [4, 5, 6]
    assert world.zookeeper.read_offsets(world.name, "orders") == {0: "4", 1: "5", 2: "6"}
    assert world.zookeeper.list_children(f"/consumers/{world.name}/ids") == []


def _plant(world: World, patch: pytest.MonkeyPatch, point: str, source: OffsetStore) -> None:
    """Patch one step so that the migration is killed before or after its effect."""
    from sluice.pipelines.operating import migrate_offsets as module
    from sluice.resources.zookeeper.zookeeper_group import ZooKeeperMembership

    def raise_killed(*_: Any, **__: Any) -> Any:
        raise Killed

    to_kafka = source is ZOOKEEPER
    where, name = (MemoryGroups, "put") if to_kafka else (ZooKeeperMembership, "commit_plain")
    real = getattr(where, name)

    def write_part(self: Any, *arguments: Any) -> None:
        *others, offsets = arguments
        real(self, *others, dict(list(offsets.items())[: 1 if point == "half" else 3]))
        raise Killed

    match point:
        case "own":
            patch.setattr(ZooKeeperGroup, "_take", raise_killed)
        case "look":
            patch.setattr(MemoryGroups, "view", raise_killed)
        case "read":
            patch.setattr(module, "plan", raise_killed)
        case "half" | "write":
            patch.setattr(where, name, write_part)
        case _:
            patch.setattr(module, "_read_back", raise_killed)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((4, 101, 6), "beyond the end of the log: orders:1"),
        ((4, 5, 2), "further on in kafka than in zookeeper: orders:2"),
    ],
)
def test_migration_that_would_skip_or_repeat_records_is_refused_entirely(
    world: World, offsets: tuple[int, ...], message: str
) -> None:
    world.kafka.offsets[TPS[2]] = CommittedOffset(6)
    world.put(*offsets)
    with world.open_stores() as stores:
        assert message in str(refusal("orders", world.name, plan(stores, ZOOKEEPER, LOGS)))
    with pytest.raises(Refused, match=message):
        world.migrate()
    assert world.in_kafka() == [None, None, 6]


def test_incomplete_zookeeper_tree_is_refused_with_missing_or_invalid_offset(world: World) -> None:
    world.zookeeper.put(world.name, "orders", {0: "4", 2: "6"})
    with pytest.raises(Refused, match="without an offset in zookeeper, where their topic has others: orders:1"):
        world.migrate()
    world.zookeeper.put(world.name, "orders", {1: "five"})
    with pytest.raises(Refused, match="orders/1 holds 'five'"):
        world.migrate()
    assert world.in_kafka() == [None, None, None]


def test_migration_is_refused_while_group_or_other_migration_is_active(world: World) -> None:
    world.put(4, 5, 6)
    with world.open_stores() as first:
        first.zookeeper.own(lambda: TPS, lambda: None)
        with pytest.raises(GroupHeld, match="sluice"):
            world.migrate()
    world.groups.members[world.name] = (member("loader", TPS[0]),)
    with pytest.raises(GroupHeld, match="in Kafka loader"):
        world.migrate()
    assert world.in_kafka() == [None, None, None]
