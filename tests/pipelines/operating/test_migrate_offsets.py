"""Migrating a group's offsets, killed at each of its steps: a real ZooKeeper, Kafka's groups in memory."""

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
    """As if the process had been killed here."""


class Place:
    """A group in both stores. Each `stores` is another process: what one leaves open, its end gives up."""

    def __init__(self, zookeeper: LocalZooKeeper) -> None:
        self.zookeeper, self.name = zookeeper, f"moved-{next(_numbers)}"
        self.kafka = MemoryGroup()
        self.groups = MemoryGroups(self.name, self.kafka)

    @contextmanager
    def stores(self, patience: float = 0.0) -> Iterator[Stores]:
        group = ZooKeeperGroup(self.zookeeper.connect, self.name, patience=patience)
        try:
            yield Stores(self.name, group, self.groups)
        finally:
            group.close()

    def put(self, *offsets: int) -> None:
        """Into ZooKeeper, with a mark each."""
        with self.stores() as stores:
            stores.zookeeper.own(lambda: TPS, lambda: None)
            with stores.zookeeper.join(["orders"], None) as owner:
                owner.fetch_committed(TPS)
                owner.commit_plain({tp: CommittedOffset(o, 1, f"mark {o}") for tp, o in zip(TPS, offsets, strict=True)})

    def in_kafka(self) -> list[int | None]:
        return [c.offset if (c := self.kafka.offsets.get(tp)) else None for tp in TPS]

    def migrate(self, source: OffsetStore = ZOOKEEPER) -> int:
        """How many offsets it moved."""
        with self.stores() as stores:
            return len(migrate("orders", stores, source, LOGS).of(MigrationAction.MOVE))


@pytest.fixture
def place(zookeeper: LocalZooKeeper) -> Place:
    return Place(zookeeper)


def test_offsets_and_marks_go_there_and_back(place: Place) -> None:
    place.put(4, 5, 6)
    assert place.migrate() == 3
    assert place.kafka.offsets == {tp: CommittedOffset(n, 1, f"mark {n}") for tp, n in zip(TPS, (4, 5, 6), strict=True)}
    place.kafka.offsets[TPS[0]] = CommittedOffset(9, 2, "mark 9")
    assert place.migrate(KAFKA) == 1
    with place.stores() as stores:
        assert stores.zookeeper.fetch_committed(TPS) == place.kafka.offsets


POINTS = ["own", "look", "read", "half", "write", "read back"]


@pytest.mark.parametrize("source", [ZOOKEEPER, KAFKA])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_step_is_mended_by_the_same_command(
    place: Place, monkeypatch: pytest.MonkeyPatch, point: str, source: OffsetStore
) -> None:
    place.put(4, 5, 6)
    if source is KAFKA:
        place.migrate()
        with place.zookeeper.client() as client:
            client.delete(f"/consumers/{place.name}/offsets", recursive=True)
    with monkeypatch.context() as patch:
        _plant(place, patch, point, source)
        with pytest.raises(Killed):
            place.migrate(source)
    left = place.migrate(source)
    assert left == {"half": 2, "write": 0, "read back": 0}.get(point, 3)
    assert place.in_kafka() == [4, 5, 6]
    assert place.zookeeper.held(place.name, "orders") == {0: "4", 1: "5", 2: "6"}
    assert place.zookeeper.names(f"/consumers/{place.name}/ids") == []


def _plant(place: Place, patch: pytest.MonkeyPatch, point: str, source: OffsetStore) -> None:
    """Let it be killed before or after an effect."""
    from sluice.pipelines.operating import migrate_offsets as module
    from sluice.resources.zookeeper.zookeeper_group import ZooKeeperMembership

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    to_kafka = source is ZOOKEEPER
    where, name = (MemoryGroups, "put") if to_kafka else (ZooKeeperMembership, "commit_plain")
    real = getattr(where, name)

    def partly(self: Any, *given: Any) -> None:
        *others, offsets = given
        real(self, *others, dict(list(offsets.items())[: 1 if point == "half" else 3]))
        raise Killed

    match point:
        case "own":
            patch.setattr(ZooKeeperGroup, "_take", killed)
        case "look":
            patch.setattr(MemoryGroups, "view", killed)
        case "read":
            patch.setattr(module, "plan", killed)
        case "half" | "write":
            patch.setattr(where, name, partly)
        case _:
            patch.setattr(module, "_read_back", killed)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ((4, 101, 6), "beyond the end of the log: orders:1"),
        ((4, 5, 2), "further on in kafka than in zookeeper: orders:2"),
    ],
)
def test_what_would_pass_over_or_repeat_records_is_refused_whole(
    place: Place, offsets: tuple[int, ...], said: str
) -> None:
    place.kafka.offsets[TPS[2]] = CommittedOffset(6)
    place.put(*offsets)
    with place.stores() as stores:
        assert said in str(refusal("orders", place.name, plan(stores, ZOOKEEPER, LOGS)))
    with pytest.raises(Refused, match=said):
        place.migrate()
    assert place.in_kafka() == [None, None, 6]


def test_a_half_written_tree_is_refused_by_what_is_missing_or_wrong(place: Place) -> None:
    place.zookeeper.put(place.name, "orders", {0: "4", 2: "6"})
    with pytest.raises(Refused, match="without an offset in zookeeper, where their topic has others: orders:1"):
        place.migrate()
    place.zookeeper.put(place.name, "orders", {1: "five"})
    with pytest.raises(Refused, match="orders/1 holds 'five'"):
        place.migrate()
    assert place.in_kafka() == [None, None, None]


def test_a_group_in_use_and_a_second_migration_are_refused(place: Place) -> None:
    place.put(4, 5, 6)
    with place.stores() as first:
        first.zookeeper.own(lambda: TPS, lambda: None)
        with pytest.raises(GroupHeld, match="sluice"):
            place.migrate()
    place.groups.members[place.name] = (member("loader", TPS[0]),)
    with pytest.raises(GroupHeld, match="in Kafka loader"):
        place.migrate()
    assert place.in_kafka() == [None, None, None]
