"""Feeds whose offsets are in ZooKeeper, in the old consumers' layout: real Kafka, real ZooKeeper."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPartition

from sluice.pipelines.committing.commit import CommitStatus, commit
from sluice.pipelines.errors import CommitFenced, GroupHeld, GroupMoved, Refused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.group.membership import KafkaMembership
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperGroup, ZooKeeperMembership
from tests.integration.support import CATCH_UP, Place, commit_feed, edges, ledger, rows, run, settings
from tests.zookeepers import LocalZooKeeper


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> Place:
    return Place(tmp_path, kafka, fresh_topic(partitions=3, name="old"))


def produce(place: Place, count: int = 10) -> None:
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap)
    for partition in range(3):
        for n in range(count):
            producer.send(place.topic, str(n).encode(), partition=partition)
    producer.flush()
    producer.close()


def feed_of(place: Place, zookeeper: LocalZooKeeper, **more: Any) -> Feed:
    told = {"store": "zookeeper", "connect": zookeeper.connect, "patience": "0s"} | more
    return place.feed(offsets=json.dumps(told))


def group(feed: Feed, zookeeper: LocalZooKeeper, patience: float = 0.0) -> ZooKeeperGroup:
    return ZooKeeperGroup(zookeeper.connect, feed.group, patience=patience)


def test_a_feed_goes_on_from_zookeeper_and_commits_there(place: Place, zookeeper: LocalZooKeeper) -> None:
    feed = feed_of(place, zookeeper)
    assert feed.commit == "plain"
    produce(place)
    zookeeper.put(feed.group, place.topic, {0: "4", 1: " 7\n"})
    run(feed)
    assert sorted((r["partition"], r["offset"]) for r in rows(feed)) == [
        *((0, n) for n in range(4, 10)),
        *((1, n) for n in range(7, 10)),
        *((2, n) for n in range(10)),  # no offset there: the feed's start
    ]
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.held(feed.group, place.topic) == {0: "10", 1: "10", 2: "10"}
    assert zookeeper.names(f"/consumers/{feed.group}/ids") == []
    assert zookeeper.names(f"/consumers/{feed.group}/owners/{place.topic}") == []

    assert commit_feed(feed).status is CommitStatus.UNCHANGED
    produce(place, 5)
    run(feed)
    assert {(m.before, m.after) for m in commit_feed(feed).offsets} == {(10, 15)}
    with edges(feed) as opened:
        committed = opened.group.fetch_committed([_tp(p, place.topic) for p in range(3)])
    assert all(c is not None and ledger_id(feed) in c.metadata for c in committed.values())


def _tp(partition: int, topic: str) -> TopicPartition:
    return TopicPartition(topic, partition)


def ledger_id(feed: Feed) -> str:
    with edges(feed) as opened:
        return ledger(feed, opened).read().ledger_id


def test_an_offset_that_somebody_moved_is_noticed(place: Place, zookeeper: LocalZooKeeper) -> None:
    feed = feed_of(place, zookeeper)
    produce(place)
    run(feed)
    commit_feed(feed)
    produce(place)
    zookeeper.put(feed.group, place.topic, {1: "13"})  # no mark is taken for it any more
    run(feed)
    with pytest.raises(GroupMoved, match=r":1.*the group holds 13, the ledger expects 10"):
        commit_feed(feed)
    assert zookeeper.held(feed.group, place.topic) == {0: "10", 1: "13", 2: "10"}


def test_a_rival_that_writes_in_mid_commit_refuses_it_whole(place: Place, zookeeper: LocalZooKeeper) -> None:
    feed = feed_of(place, zookeeper)
    produce(place)
    run(feed)
    with edges(feed) as opened:
        books, real = ledger(feed, opened), opened.group
        decide = books.append

        def late(decision: Any) -> Any:
            zookeeper.put(feed.group, place.topic, {2: "3"})  # after the commit has read, before it writes
            return decide(decision)

        books.append = late  # type: ignore[method-assign]
        with pytest.raises(CommitFenced, match="somebody"):
            commit(books, real, settings(feed), None, opened.cluster)
    assert zookeeper.held(feed.group, place.topic) == {2: "3"}


def test_nothing_is_committed_once_the_session_has_ended(place: Place, zookeeper: LocalZooKeeper) -> None:
    feed = feed_of(place, zookeeper)
    produce(place)
    run(feed)
    told: list[str] = []
    with edges(feed) as opened:
        opened.group.own(lambda: [_tp(p, place.topic) for p in range(3)], lambda: told.append("lost"))
        with opened.group.join([place.topic], None) as member:
            member.fetch_committed([_tp(0, place.topic)])
            _end_session(zookeeper, opened.group)
            with pytest.raises(CommitFenced, match="session with ZooKeeper ended"):
                member.commit_plain({_tp(0, place.topic): CommittedOffset(5)})
    assert told == ["lost"]
    assert zookeeper.held(feed.group, place.topic) == {}
    assert commit_feed(feed).status is CommitStatus.COMMITTED


def _end_session(zookeeper: LocalZooKeeper, port: Any) -> None:
    """As the server does when nobody was heard of for a session."""
    from kazoo.client import KazooClient

    mine = port._tree._client
    thief = KazooClient(hosts=zookeeper.connect, client_id=mine.client_id, timeout=5)
    thief.start(timeout=10)
    thief.stop()
    thief.close()


def test_others_are_waited_for_and_named(place: Place, zookeeper: LocalZooKeeper) -> None:
    feed = feed_of(place, zookeeper)
    produce(place)
    about = {"version": 1, "subscription": {place.topic: 1}, "pattern": "static", "timestamp": "1"}
    name = f"{feed.group}_box-1416873429000-1a2b3c4d"
    with zookeeper.client() as old:
        old.create(f"/consumers/{feed.group}/ids/{name}", json.dumps(about).encode(), ephemeral=True, makepath=True)
        old.create(
            f"/consumers/{feed.group}/owners/{place.topic}/1", f"{name}-0".encode(), ephemeral=True, makepath=True
        )
        with pytest.raises(GroupHeld, match=rf"{name} owns {place.topic}:1"):
            run(feed)
    run(feed)
    assert commit_feed(feed).status is CommitStatus.COMMITTED


def test_while_a_run_reads_it_owns_every_partition(place: Place, zookeeper: LocalZooKeeper) -> None:
    feed = feed_of(place, zookeeper)
    produce(place)
    with edges(feed) as opened:
        opened.group.own(lambda: [_tp(p, place.topic) for p in range(3)], lambda: None)
        (name,) = zookeeper.names(f"/consumers/{feed.group}/ids")
        with zookeeper.client() as old:
            about = json.loads(old.get(f"/consumers/{feed.group}/ids/{name}")[0])
            owners = [old.get(f"/consumers/{feed.group}/owners/{place.topic}/{p}")[0].decode() for p in range(3)]
        assert (about["version"], about["subscription"], about["pattern"]) == (1, {place.topic: 3}, "static")
        assert owners == [f"{name}-{p}" for p in range(3)]
        with pytest.raises(GroupHeld, match="sluice"):
            run(feed)
    assert zookeeper.names(f"/consumers/{feed.group}/ids") == []


@pytest.mark.parametrize("text", ["", "abc", "-1", "12x", "99999999999999999999"])
def test_a_node_that_holds_no_offset_is_refused_by_its_path(place: Place, zookeeper: LocalZooKeeper, text: str) -> None:
    feed = feed_of(place, zookeeper)
    zookeeper.put(feed.group, place.topic, {0: "0", 2: text})
    with pytest.raises(Refused, match=f"/consumers/{feed.group}/offsets/{place.topic}/2 holds"):
        run(feed, CATCH_UP)


# -- both stores


def dual(place: Place, zookeeper: LocalZooKeeper, **more: Any) -> Feed:
    told = {"connect": zookeeper.connect, "dual_commit": True, "patience": "0s"}
    return place.feed(offsets=json.dumps(told), **more)


def in_kafka(feed: Feed, topic: str) -> dict[int, int]:
    """What a plain consumer of the group is told."""
    consumer = KafkaConsumer(bootstrap_servers=feed.kafka.bootstrap, group_id=feed.group, enable_auto_commit=False)
    try:
        found = {p: consumer.committed(KafkaPartition(topic, p)) for p in range(3)}
    finally:
        consumer.close()
    return {p: at for p, at in found.items() if at is not None}


@pytest.mark.parametrize("mode", ["transactional", "plain"])
def test_both_stores_are_written_and_the_larger_is_gone_on_from(
    place: Place, zookeeper: LocalZooKeeper, mode: str
) -> None:
    feed = dual(place, zookeeper, commit=mode)
    produce(place)
    zookeeper.put(feed.group, place.topic, {0: "4"})
    run(feed)
    assert min(r["offset"] for r in rows(feed) if r["partition"] == 0) == 4
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.held(feed.group, place.topic) == {0: "10", 1: "10", 2: "10"}
    assert in_kafka(feed, place.topic) == {0: 10, 1: 10, 2: 10}
    assert commit_feed(feed).status is CommitStatus.UNCHANGED


class _Killed(BaseException):
    """As if the process had been killed here."""


@pytest.mark.parametrize("step", ["before", "between", "after"])
def test_a_kill_at_any_step_of_a_dual_commit_is_harmless(
    place: Place, zookeeper: LocalZooKeeper, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    feed = dual(place, zookeeper)
    produce(place)
    run(feed)
    real = ZooKeeperMembership.commit_plain

    def killed(*_: Any) -> None:
        raise _Killed

    def killed_after(self: Any, offsets: Any) -> None:
        real(self, offsets)
        raise _Killed

    with monkeypatch.context() as patch:
        if step == "before":
            patch.setattr(KafkaMembership, "commit_transaction", killed)
        else:
            patch.setattr(ZooKeeperMembership, "commit_plain", killed if step == "between" else killed_after)
        with pytest.raises(_Killed):
            commit_feed(feed)
    everywhere = {0: 10, 1: 10, 2: 10}
    assert in_kafka(feed, place.topic) == ({} if step == "before" else everywhere)
    assert zookeeper.held(feed.group, place.topic) == ({0: "10", 1: "10", 2: "10"} if step == "after" else {})
    produce(place, 3)
    run(feed)
    assert [r["offset"] for r in rows(feed) if r["partition"] == 1] == list(range(13))
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.held(feed.group, place.topic) == {0: "13", 1: "13", 2: "13"}
    assert in_kafka(feed, place.topic) == {0: 13, 1: 13, 2: 13}


def test_a_store_that_lags_behind_is_made_good_although_nothing_moves(place: Place, zookeeper: LocalZooKeeper) -> None:
    feed = dual(place, zookeeper)
    produce(place)
    run(feed)
    commit_feed(feed)
    zookeeper.put(feed.group, place.topic, {1: "6"})
    assert commit_feed(feed).status is CommitStatus.COMMITTED
    assert zookeeper.held(feed.group, place.topic) == {0: "10", 1: "10", 2: "10"}
    zookeeper.put(feed.group, place.topic, {1: "12"})  # and one that is ahead was put there by somebody
    produce(place)
    run(feed)
    with pytest.raises(GroupMoved, match="holds 12"):
        commit_feed(feed)
