"""Feeds with offsets in ZooKeeper, in the old consumers' layout, on a real Kafka and a real ZooKeeper."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice.pipelines.committing.commit import CommitStatus, commit
from sluice.pipelines.errors import CommitFenced, GroupHeld, GroupMoved, Refused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.group.membership import KafkaMembership
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperMembership
from tests.integration.support import (
    CATCH_UP,
    FeedProject,
    build_commit_settings,
    commit_feed,
    fetch_committed,
    open_feed_ledger,
    open_inline_ports,
    read_rows,
    run,
)
from tests.zookeepers import LocalZooKeeper


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=3, name="old"))


def produce(project: FeedProject, count: int = 10) -> None:
    producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap)
    for partition in range(3):
        for n in range(count):
            producer.send(project.topic, str(n).encode(), partition=partition)
    producer.flush()
    producer.close()


def write_feed(project: FeedProject, zookeeper: LocalZooKeeper, **more: Any) -> Feed:
    settings = {"store": "zookeeper", "connect": zookeeper.connect, "patience": "0s"} | more
    return project.write_feed(offsets=json.dumps(settings))


def test_feed_continues_from_zookeeper_and_commits_there(project: FeedProject, zookeeper: LocalZooKeeper) -> None:
    feed = write_feed(project, zookeeper)
    assert feed.commit == "plain"
    produce(project)
    zookeeper.put(feed.group, project.topic, {0: "4", 1: " 7\n"})
    run(feed)
    assert sorted((r["partition"], r["offset"]) for r in read_rows(feed)) == [
        *((0, n) for n in range(4, 10)),
        *((1, n) for n in range(7, 10)),
        *((2, n) for n in range(10)),  # no offset there: the feed's start
    ]
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.read_offsets(feed.group, project.topic) == {0: "10", 1: "10", 2: "10"}
    assert zookeeper.list_children(f"/consumers/{feed.group}/ids") == []
    assert zookeeper.list_children(f"/consumers/{feed.group}/owners/{project.topic}") == []

    assert commit_feed(feed).status is CommitStatus.UNCHANGED
    produce(project, 5)
    run(feed)
    assert {(m.before, m.after) for m in commit_feed(feed).offsets} == {(10, 15)}
    with open_inline_ports(feed) as ports:
        committed = ports.group.fetch_committed([_make_partition(p, project.topic) for p in range(3)])
    assert all(c is not None and read_ledger_id(feed) in c.metadata for c in committed.values())


def _make_partition(partition: int, topic: str) -> TopicPartition:
    return TopicPartition(topic, partition)


def read_ledger_id(feed: Feed) -> str:
    with open_inline_ports(feed) as ports:
        return open_feed_ledger(feed, ports).read().ledger_id


def test_moved_offset_is_detected(project: FeedProject, zookeeper: LocalZooKeeper) -> None:
    feed = write_feed(project, zookeeper)
    produce(project)
    run(feed)
    commit_feed(feed)
    produce(project)
    zookeeper.put(feed.group, project.topic, {1: "13"})  # the mark no longer matches
    run(feed)
    with pytest.raises(GroupMoved, match=r":1.*the group holds 13, the ledger expects 10"):
        commit_feed(feed)
    assert zookeeper.read_offsets(feed.group, project.topic) == {0: "10", 1: "13", 2: "10"}


def test_rival_write_during_a_commit_fails_it_completely(project: FeedProject, zookeeper: LocalZooKeeper) -> None:
    feed = write_feed(project, zookeeper)
    produce(project)
    run(feed)
    with open_inline_ports(feed) as ports:
        ledger, zookeeper_group = open_feed_ledger(feed, ports), ports.group
        append_entry = ledger.append

        def append_late(decision: Any) -> Any:
            zookeeper.put(feed.group, project.topic, {2: "3"})  # after the commit has read, before it writes
            return append_entry(decision)

        ledger.append = append_late  # type: ignore[method-assign]
        with pytest.raises(CommitFenced, match="somebody"):
            commit(ledger, zookeeper_group, build_commit_settings(feed), None, ports.cluster)
    assert zookeeper.read_offsets(feed.group, project.topic) == {2: "3"}


def test_nothing_is_committed_once_the_session_has_ended(project: FeedProject, zookeeper: LocalZooKeeper) -> None:
    feed = write_feed(project, zookeeper)
    produce(project)
    run(feed)
    losses: list[str] = []
    with open_inline_ports(feed) as ports:
        ports.group.own(lambda: [_make_partition(p, project.topic) for p in range(3)], lambda: losses.append("lost"))
        with ports.group.join([project.topic], None) as member:
            member.fetch_committed([_make_partition(0, project.topic)])
            _end_session(zookeeper, ports.group)
            with pytest.raises(CommitFenced, match="session with ZooKeeper ended"):
                member.commit_plain({_make_partition(0, project.topic): CommittedOffset(5)})
    assert losses == ["lost"]
    assert zookeeper.read_offsets(feed.group, project.topic) == {}
    assert commit_feed(feed).status is CommitStatus.COMMITTED


def _end_session(zookeeper: LocalZooKeeper, port: Any) -> None:
    """End the session as the server does after a session timeout without a heartbeat."""
    from kazoo.client import KazooClient

    client = port._tree._client
    thief = KazooClient(hosts=zookeeper.connect, client_id=client.client_id, timeout=5)
    thief.start(timeout=10)
    thief.stop()
    thief.close()


def test_other_members_are_waited_for_and_named(project: FeedProject, zookeeper: LocalZooKeeper) -> None:
    feed = write_feed(project, zookeeper)
    produce(project)
    registration = {"version": 1, "subscription": {project.topic: 1}, "pattern": "static", "timestamp": "1"}
    name = f"{feed.group}_box-1416873429000-1a2b3c4d"
    with zookeeper.open_client() as client:
        client.create(
            f"/consumers/{feed.group}/ids/{name}", json.dumps(registration).encode(), ephemeral=True, makepath=True
        )
        client.create(
            f"/consumers/{feed.group}/owners/{project.topic}/1", f"{name}-0".encode(), ephemeral=True, makepath=True
        )
        with pytest.raises(GroupHeld, match=rf"{name} owns {project.topic}:1"):
            run(feed)
    run(feed)
    assert commit_feed(feed).status is CommitStatus.COMMITTED


def test_while_a_run_reads_it_owns_every_partition(project: FeedProject, zookeeper: LocalZooKeeper) -> None:
    feed = write_feed(project, zookeeper)
    produce(project)
    with open_inline_ports(feed) as ports:
        ports.group.own(lambda: [_make_partition(p, project.topic) for p in range(3)], lambda: None)
        (name,) = zookeeper.list_children(f"/consumers/{feed.group}/ids")
        with zookeeper.open_client() as client:
            registration = json.loads(client.get(f"/consumers/{feed.group}/ids/{name}")[0])
            owners = [client.get(f"/consumers/{feed.group}/owners/{project.topic}/{p}")[0].decode() for p in range(3)]
        assert (registration["version"], registration["subscription"], registration["pattern"]) == (
            1,
            {project.topic: 3},
            "static",
        )
        assert owners == [f"{name}-{p}" for p in range(3)]
        with pytest.raises(GroupHeld, match="sluice"):
            run(feed)
    assert zookeeper.list_children(f"/consumers/{feed.group}/ids") == []


@pytest.mark.parametrize("text", ["", "abc", "-1", "12x", "99999999999999999999"])
def test_node_without_an_offset_is_refused_by_its_path(
    project: FeedProject, zookeeper: LocalZooKeeper, text: str
) -> None:
    feed = write_feed(project, zookeeper)
    zookeeper.put(feed.group, project.topic, {0: "0", 2: text})
    with pytest.raises(Refused, match=f"/consumers/{feed.group}/offsets/{project.topic}/2 holds"):
        run(feed, CATCH_UP)


# -- both stores


def write_dual_feed(project: FeedProject, zookeeper: LocalZooKeeper, **more: Any) -> Feed:
    settings = {"connect": zookeeper.connect, "dual_commit": True, "patience": "0s"}
    return project.write_feed(offsets=json.dumps(settings), **more)


def fetch_kafka_offsets(project: FeedProject, feed: Feed) -> dict[int, int]:
    committed = fetch_committed(project.kafka, feed.group, project.topic, 3)
    return {p: offset for p, offset in enumerate(committed) if offset is not None}


@pytest.mark.parametrize("mode", ["transactional", "plain"])
def test_both_stores_are_written_and_the_larger_offset_is_used(
    project: FeedProject, zookeeper: LocalZooKeeper, mode: str
) -> None:
    feed = write_dual_feed(project, zookeeper, commit=mode)
    produce(project)
    zookeeper.put(feed.group, project.topic, {0: "4"})
    run(feed)
    assert min(r["offset"] for r in read_rows(feed) if r["partition"] == 0) == 4
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.read_offsets(feed.group, project.topic) == {0: "10", 1: "10", 2: "10"}
    assert fetch_kafka_offsets(project, feed) == {0: 10, 1: 10, 2: 10}
    assert commit_feed(feed).status is CommitStatus.UNCHANGED


class _Killed(BaseException):
    """As if the process had been killed here."""


@pytest.mark.parametrize("step", ["before", "between", "after"])
def test_a_kill_at_any_step_of_a_dual_commit_is_harmless(
    project: FeedProject, zookeeper: LocalZooKeeper, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    feed = write_dual_feed(project, zookeeper)
    produce(project)
    run(feed)
    commit_plain = ZooKeeperMembership.commit_plain

    def raise_killed(*_: Any) -> None:
        raise _Killed

    def commit_and_raise(self: Any, offsets: Any) -> None:
        commit_plain(self, offsets)
        raise _Killed

    with monkeypatch.context() as patch:
        if step == "before":
            patch.setattr(KafkaMembership, "commit_transaction", raise_killed)
        else:
            patch.setattr(ZooKeeperMembership, "commit_plain", raise_killed if step == "between" else commit_and_raise)
        with pytest.raises(_Killed):
            commit_feed(feed)
    everywhere = {0: 10, 1: 10, 2: 10}
    assert fetch_kafka_offsets(project, feed) == ({} if step == "before" else everywhere)
    assert zookeeper.read_offsets(feed.group, project.topic) == ({0: "10", 1: "10", 2: "10"} if step == "after" else {})
    produce(project, 3)
    run(feed)
    assert [r["offset"] for r in read_rows(feed) if r["partition"] == 1] == list(range(13))
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.read_offsets(feed.group, project.topic) == {0: "13", 1: "13", 2: "13"}
    assert fetch_kafka_offsets(project, feed) == {0: 13, 1: 13, 2: 13}


def test_lagging_store_is_updated_without_new_offsets(project: FeedProject, zookeeper: LocalZooKeeper) -> None:
    feed = write_dual_feed(project, zookeeper)
    produce(project)
    run(feed)
    commit_feed(feed)
    zookeeper.put(feed.group, project.topic, {1: "6"})
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.read_offsets(feed.group, project.topic) == {0: "10", 1: "10", 2: "10"}
    zookeeper.put(feed.group, project.topic, {1: "12"})  # an offset that is ahead was moved by another client
    produce(project)
    run(feed)
    with pytest.raises(GroupMoved, match="holds 12"):
        commit_feed(feed)
