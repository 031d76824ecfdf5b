"""The Group port over a real ZooKeeper: ownership, sessions that end, transactions that are all or nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from sluice.pipelines.errors import CommitFenced, GroupHeld, SetupError, ZooKeeperUnavailable
from sluice.pipelines.model.consumer_groups import GroupState
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.zookeeper import layout, tree
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperGroup, ZooKeeperGroups
from tests.zookeepers import LocalZooKeeper

TPS = [TopicPartition("orders", p) for p in range(3)]


def make_offset(offset: int) -> CommittedOffset:
    return CommittedOffset(offset, 2, f"mark {offset}")


def commit(group: ZooKeeperGroup, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
    group.own(lambda: TPS, lambda: None)
    with group.join(["orders"], None) as member:
        member.fetch_committed(TPS)
        member.commit_plain(offsets)


def test_mark_is_valid_until_another_client_writes_the_offset(zookeeper: LocalZooKeeper) -> None:
    with closing(ZooKeeperGroup(zookeeper.connect, "marks")) as group:
        commit(group, {tp: make_offset(5) for tp in TPS})
        zookeeper.put("marks", "orders", {1: "5"})  # the same number, by another
        assert group.fetch_committed(TPS) == {
            TPS[0]: make_offset(5),
            TPS[1]: CommittedOffset(5),
            TPS[2]: make_offset(5),
        }
        commit(group, {tp: make_offset(6) for tp in TPS})
        assert group.fetch_committed(TPS) == {tp: make_offset(6) for tp in TPS}


def test_deleted_offset_is_missing_and_can_be_committed_again(zookeeper: LocalZooKeeper) -> None:
    with closing(ZooKeeperGroup(zookeeper.connect, "deleted")) as group:
        commit(group, {tp: make_offset(5) for tp in TPS})
        with zookeeper.open_client() as old:
            old.delete("/consumers/deleted/offsets", recursive=True)
        assert group.fetch_committed(TPS) == dict.fromkeys(TPS)
        commit(group, {tp: make_offset(7) for tp in TPS})
        assert zookeeper.read_offsets("deleted", "orders") == {0: "7", 1: "7", 2: "7"}


def test_many_partitions_are_split_into_transactions_within_server_limits(
    zookeeper: LocalZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "_TRANSACTION_BYTES", 2000)
    tps = [TopicPartition("many", p) for p in range(60)]
    with closing(ZooKeeperGroup(zookeeper.connect, "many")) as group:
        group.own(lambda: tps, lambda: None)
        with group.join(["many"], None) as member:
            member.fetch_committed(tps)
            member.commit_plain({tp: make_offset(tp.partition) for tp in tps})
        assert group.fetch_committed(tps) == {tp: make_offset(tp.partition) for tp in tps}
        with group.join(["many"], None) as member:
            member.fetch_committed(tps)
            zookeeper.put("many", "many", {59: "7"})
            with pytest.raises(CommitFenced, match=r"only \d+ of 60 offsets were committed"):
                member.commit_plain({tp: make_offset(1) for tp in tps})
        assert group.fetch_committed(tps[:1]) == {tps[0]: make_offset(1)}


def test_infinite_numbers_in_nodes_are_ignored() -> None:
    assert layout.parse_consumer("c", b'{"subscription": {"orders": Infinity}}').topics == {}
    assert layout.parse_mark(5, b'{"offset": 5, "epoch": Infinity, "metadata": ""}') == CommittedOffset(5)


def test_partitions_added_later_are_owned(zookeeper: LocalZooKeeper) -> None:
    with closing(ZooKeeperGroup(zookeeper.connect, "later")) as group:
        group.own(lambda: TPS[:1], lambda: None)
        group.own(lambda: TPS, lambda: None)
        assert zookeeper.list_children("/consumers/later/owners/orders") == ["0", "1", "2"]
        (name,) = zookeeper.list_children("/consumers/later/ids")
        with zookeeper.open_client() as old:
            consumer = layout.parse_consumer(name, old.get(f"/consumers/later/ids/{name}")[0])
        assert (consumer.ours, consumer.topics, bool(consumer.host)) == (True, {"orders": 3}, True)


def test_owner_is_fenced_after_its_registration_was_removed(zookeeper: LocalZooKeeper) -> None:
    with closing(ZooKeeperGroup(zookeeper.connect, "removed")) as group:
        group.own(lambda: TPS[:1], lambda: None)
        (name,) = zookeeper.list_children("/consumers/removed/ids")
        with zookeeper.open_client() as old:
            old.delete(f"/consumers/removed/ids/{name}")
        with pytest.raises(CommitFenced):
            group.own(lambda: TPS, lambda: None)


def test_group_description_lists_owners_of_partitions(zookeeper: LocalZooKeeper) -> None:
    with closing(ZooKeeperGroups(zookeeper.connect)) as groups:
        assert groups.view("shown").state == GroupState.DEAD
        with closing(ZooKeeperGroup(zookeeper.connect, "shown")) as group:
            commit(group, {TPS[0]: make_offset(5)})
            view = groups.view("shown")
            assert (view.state, [m.partitions for m in view.members or ()]) == (GroupState.STABLE, [tuple(TPS)])
            with pytest.raises(GroupHeld, match="in use"):
                groups.put("shown", {TPS[0]: make_offset(1)})
        assert groups.view("shown").free
        groups.put("shown", {TPS[0]: make_offset(1), TPS[1]: make_offset(2)})
        assert groups.fetch_committed("shown") == {TPS[0]: make_offset(1), TPS[1]: make_offset(2)}
        assert "shown" in [g.group for g in groups.list_groups()]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LocalZooKeeper]:
    server = LocalZooKeeper(tmp_path / "zookeeper").start()
    yield server
    server.throw_away()


def test_ownership_ends_before_a_silent_server_can_reassign_partitions(own_server: LocalZooKeeper) -> None:
    lost = threading.Event()
    with closing(ZooKeeperGroup(own_server.connect, "silent", session=3)) as group:
        group.own(lambda: TPS, lost.set)
        with group.join(["orders"], None) as member:
            member.fetch_committed(TPS)
            assert own_server.process is not None
            own_server.process.send(signal.SIGSTOP)
            assert lost.wait(10)
            own_server.process.send(signal.SIGCONT)
            with pytest.raises(CommitFenced, match="session with ZooKeeper ended"):
                group.own(lambda: TPS, lambda: None)
    with closing(ZooKeeperGroup(own_server.connect, "silent", patience=20)) as another:
        commit(another, {TPS[0]: make_offset(1)})  # once the session is over
    assert own_server.read_offsets("silent", "orders") == {0: "1"}


def test_ownership_survives_a_server_restart_within_the_session(own_server: LocalZooKeeper) -> None:
    lost = threading.Event()
    with closing(ZooKeeperGroup(own_server.connect, "back", session=30)) as group:
        group.own(lambda: TPS, lost.set)
        own_server.stop()
        own_server.start()
        commit(group, {tp: make_offset(4) for tp in TPS})
        assert not lost.is_set()
    assert own_server.read_offsets("back", "orders") == {0: "4", 1: "4", 2: "4"}


def test_missing_server_and_missing_chroot_are_different_errors(
    zookeeper: LocalZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree.Tree.__init__, "__defaults__", (12.0, 1.0))
    with (
        closing(ZooKeeperGroup("127.0.0.1:1", "nobody")) as group,
        pytest.raises(ZooKeeperUnavailable, match="answers"),
    ):
        group.fetch_committed(TPS)
    with (
        closing(ZooKeeperGroup(f"{zookeeper.connect}/nowhere", "nobody")) as group,
        pytest.raises(SetupError, match="has no /nowhere"),
    ):
        group.fetch_committed(TPS)
