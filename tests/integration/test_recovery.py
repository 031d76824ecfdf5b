"""Crashes, rivals and zombies on a real Kafka: the next run brings everything home (invariants 1, 2, 7, 8, 10, 14)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaTopicPartition

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.batch.land import land
from sluice.pipelines.committing.commit import CommitStatus, commit
from sluice.pipelines.errors import (
    CommitFenced,
    GroupHeld,
    GroupMoved,
    LedgerCorrupt,
    LedgerTooNew,
    OwnershipLost,
    PlanBusy,
    Unknown,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ledger.marks import Mark
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.receipts import Life, Outcome, Verdict
from sluice.pipelines.ports import Job, Membership
from sluice.resources.lake import open_lake
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Lines
from tests.integration.support import (
    CATCH_UP,
    Inline,
    Place,
    commit_feed,
    consumed,
    edges,
    ledger,
    rows,
    run,
    settings,
)
from tests.resources.kafka.tools import until

COUNT = 300


@pytest.fixture
def place(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> Place:
    there = Place(tmp_path, kafka, fresh_topic(partitions=2), lake())
    produce(there, COUNT)
    return there


def produce(place: Place, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap, linger_ms=5)
    for i in range(count):
        producer.send(place.topic, f"value {i}".encode(), partition=i % 2)
    producer.close()


def committed(place: Place, feed: Feed) -> list[int | None]:
    """The group's offsets as Kafka tells them, waiting for open transactions."""
    consumer = KafkaConsumer(
        bootstrap_servers=place.kafka.bootstrap,
        group_id=feed.group,
        isolation_level="read_committed",
        enable_auto_commit=False,
    )
    try:
        return [consumer.committed(KafkaTopicPartition(place.topic, p)) for p in range(2)]
    finally:
        consumer.close()


def is_whole(place: Place, feed: Feed) -> bool:
    """Everything landed once, and the audit reconciles."""
    with edges(feed) as opened:
        report = audit(ledger(feed, opened), opened.lake, hashes=True)
    return report.is_reconciled and rows(feed) == consumed(place.kafka, place.topic)


# -- crashes


PUBLISHING = {
    "between stage and publish": "sluice.pipelines.batch.carry_out.publish",
    "between publish and visible": "sluice.pipelines.publishing.publish._show",
}

VICTIM = """
import os, signal, sys
from pathlib import Path
from unittest.mock import patch
from tests.integration.support import commit_feed, load_feed, run

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

feed = load_feed(Path(sys.argv[1]), {})
with patch(sys.argv[2], die):
    run(feed)
    commit_feed(feed)
"""


def kill_at(place: Place, feed: Feed, where: str) -> None:
    """Run the feed in a process of its own that is killed (SIGKILL) at the point."""
    path = place.root / "feeds" / f"{feed.name}.yaml"
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, str(path), where],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr[-2000:]


@pytest.mark.each_lake
@pytest.mark.parametrize("where", PUBLISHING.values(), ids=list(PUBLISHING))
def test_killed_while_publishing_the_next_run_rolls_forward(place: Place, where: str) -> None:
    feed = place.feed()
    kill_at(place, feed, where)
    with edges(feed) as opened:
        state = ledger(feed, opened).read()
        frontiers = [state.frontier(k) for k in sorted(state.current.values())]
    held = committed(place, feed)
    assert all(o is None or o <= f for o, f in zip(held, frontiers, strict=True)), "never ahead of what is published"
    produce(place, 20)
    run(feed)
    commit_feed(feed)
    assert is_whole(place, feed)
    assert committed(place, feed) == [COUNT // 2 + 10] * 2
    assert list(open_lake(feed).list("_sluice/orders/staging")) == []


@pytest.mark.each_lake
def test_finished_ranges_are_adopted_after_a_crash(place: Place) -> None:
    feed = place.feed()
    kill_at(place, feed, PUBLISHING["between stage and publish"])
    landed = run(feed)
    assert landed.batches[0].adopted == 2
    assert is_whole(place, feed)


# -- rivals and zombies


class Sleeper(Inline):
    """Stages everything, then sleeps until it is woken: a run that a long pause turns into a zombie."""

    def __init__(self) -> None:
        self.asleep, self.wake = Event(), Event()

    def run(self, job: Job, tasks: list[int]) -> list[Outcome]:  # type: ignore[override]
        outcomes = super().run(job, tasks)
        self.asleep.set()
        assert self.wake.wait(60)
        return outcomes


class Sleeping:
    """A run in a thread that has staged its offset ranges and sleeps before publishing."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.engine, self.owner = feed, Sleeper(), new_owner("sleeper")
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run)
        self._thread.start()
        assert self.engine.asleep.wait(60)

    def _run(self) -> None:
        try:
            with edges(self.feed) as opened:
                land(self.feed, replace(opened, engine=self.engine), CATCH_UP, self.owner, lambda p: None)
        except BaseException as e:  # noqa: BLE001 - the test looks at it
            self.error = e

    def wake(self) -> None:
        self.engine.wake.set()
        self._thread.join(60)


@pytest.fixture
def sleeping(place: Place) -> Iterator[Sleeping]:
    sleeper = Sleeping(place.feed())
    yield sleeper
    sleeper.wake()


def test_two_runs_at_once_one_is_refused_with_the_batchs_name(place: Place, sleeping: Sleeping) -> None:
    with pytest.raises(PlanBusy, match=r"batch 2 \(catch-up\) is at work: run sleeper"):
        run(sleeping.feed)
    sleeping.wake()
    assert sleeping.error is None
    assert is_whole(place, sleeping.feed)


@pytest.mark.each_lake
def test_a_zombie_that_wakes_after_a_take_over_publishes_nothing(place: Place, sleeping: Sleeping) -> None:
    feed = sleeping.feed
    with edges(feed) as opened:
        liveness = DeadTo(sleeping.owner.token, opened.liveness)
        landed = land(feed, replace(opened, liveness=liveness), CATCH_UP, new_owner("second"), lambda p: None)
    assert landed.batches[0].adopted == 2, "what the zombie staged is adopted"
    sleeping.wake()
    assert isinstance(sleeping.error, OwnershipLost)
    with edges(feed) as opened:
        entries = [e for _, e in ledger(feed, opened).entries() if isinstance(e, PublishEntry)]
    assert len(entries) == 1
    assert is_whole(place, feed)


class DeadTo:
    """Liveness as it is, but for one owner who is known dead."""

    def __init__(self, token: str, real: object) -> None:
        self._token, self._real = token, real

    def send_heartbeats(self, owner):  # type: ignore[no-untyped-def]
        return self._real.send_heartbeats(owner)  # type: ignore[attr-defined]

    def judge(self, owners, *, watch=True):  # type: ignore[no-untyped-def]
        lives = {True: Life.DEAD, False: Life.ALIVE}
        return {o.token: Verdict(lives[o.token == self._token], "set by the test") for o in owners}

    def last_heartbeat(self, owner):  # type: ignore[no-untyped-def]
        return self._real.last_heartbeat(owner)  # type: ignore[attr-defined]


# -- the commit


@pytest.mark.parametrize("mode", ["transactional", "plain"])
def test_committed_offsets_are_the_frontier_with_our_mark(place: Place, mode: str) -> None:
    feed = place.feed(commit=mode)
    run(feed)
    result = commit_feed(feed)
    assert (result.status, committed(place, feed)) == (CommitStatus.COMMITTED, [150, 150])
    with edges(feed) as opened:
        held = opened.group.fetch_committed([TopicPartition(place.topic, 0)])[TopicPartition(place.topic, 0)]
        assert held is not None
        mark = Mark.parse(held.metadata)
        assert mark is not None
        assert (mark.ledger, mark.number) == (ledger(feed, opened).read().ledger_id, result.mark)
    assert commit_feed(feed).status is CommitStatus.UNCHANGED


def test_commit_none_leaves_the_group_alone(place: Place) -> None:
    feed = place.feed(commit="none")
    run(feed)
    assert commit_feed(feed).status is CommitStatus.DISABLED
    assert committed(place, feed) == [None, None]


def test_a_group_held_by_a_live_consumer_is_refused_and_landing_goes_on(place: Place) -> None:
    feed = place.feed()
    foreign = KafkaConsumer(place.topic, bootstrap_servers=place.kafka.bootstrap, group_id=feed.group)
    try:
        # kafka-python's group leader assigns nothing, for good, when it joined before it knew the topic.
        until(lambda: foreign.partitions_for_topic(place.topic))
        while not foreign.assignment():
            foreign.poll(timeout_ms=200)
        run(feed)
        with pytest.raises(GroupHeld):
            commit_feed(feed)
        produce(place, 20)
        run(feed)
        assert is_whole(place, feed)
    finally:
        foreign.close(autocommit=False)
    commit_feed(feed)
    assert committed(place, feed) == [160, 160]


def test_moved_offsets_are_refused_with_both_values(place: Place) -> None:
    feed = place.feed()
    run(feed)
    commit_feed(feed)
    move(place, feed, 7)
    produce(place, 20)
    run(feed)
    with pytest.raises(GroupMoved, match="the group holds 7, the ledger expects 150"):
        commit_feed(feed)
    commit_feed(place.feed(policies="{on_group_moved: overwrite}"))
    assert committed(place, feed) == [160, 160]


def move(place: Place, feed: Feed, offset: int) -> None:
    """Somebody sets the group's first offset by hand."""
    consumer = KafkaConsumer(bootstrap_servers=place.kafka.bootstrap, group_id=feed.group, enable_auto_commit=False)
    consumer.assign([KafkaTopicPartition(place.topic, 0)])
    consumer.commit({KafkaTopicPartition(place.topic, 0): OffsetAndMetadata(offset, "", -1)})
    consumer.close(autocommit=False)


class Meddling:
    """The real group, with something happening between our join and our commit."""

    def __init__(self, real: object, meddle: Callable[[], None], *, lose_answer: bool = False) -> None:
        self._real, self._meddle, self._lose = real, meddle, lose_answer

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def join(self, topics, transactional_id):  # type: ignore[no-untyped-def]
        from contextlib import contextmanager

        @contextmanager
        def joined():  # type: ignore[no-untyped-def]
            with self._real.join(topics, transactional_id) as member:  # type: ignore[attr-defined]
                yield MeddledMember(member, self._meddle, self._lose)

        return joined()


class MeddledMember:
    def __init__(self, real: Membership, meddle: Callable[[], None], lose: bool) -> None:
        self._real, self._meddle, self._lose = real, meddle, lose

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def commit_transaction(self, offsets) -> None:  # type: ignore[no-untyped-def]
        self._meddle()
        self._real.commit_transaction(offsets)
        if self._lose:
            raise Unknown("the answer was lost")


def commit_with(feed: Feed, meddle: Callable[[], None], *, lose_answer: bool = False):  # type: ignore[no-untyped-def]
    with edges(feed) as opened:
        group = Meddling(opened.group, meddle, lose_answer=lose_answer)
        return commit(ledger(feed, opened), group, settings(feed))  # type: ignore[arg-type]


def test_a_zombie_committer_is_fenced_by_the_coordinator(place: Place) -> None:
    feed = place.feed()
    run(feed)

    def newer_committer() -> None:
        producer = KafkaProducer(bootstrap_servers=place.kafka.bootstrap, transactional_id=feed.transactional_id)
        producer.init_transactions()
        producer.close()

    with pytest.raises(CommitFenced):
        commit_with(feed, newer_committer)
    assert committed(place, feed) == [None, None]
    commit_feed(feed)
    assert committed(place, feed) == [150, 150]


def test_a_lost_answer_is_resolved_by_reading_back(place: Place) -> None:
    feed = place.feed()
    run(feed)
    assert commit_with(feed, lambda: None, lose_answer=True).status is CommitStatus.COMMITTED
    assert commit_feed(feed).status is CommitStatus.UNCHANGED


# -- a lake that is not as it should be


@pytest.mark.each_lake
def test_a_truncated_or_newer_entry_stops_everything_and_changes_nothing(place: Place) -> None:
    feed = place.feed()
    run(feed)
    lake = open_lake(feed)
    *_, last = lake.list("_sluice/orders/log")
    whole = lake.get(last)
    assert whole is not None
    lake.put(last, whole[: len(whole) // 2])
    with pytest.raises(LedgerCorrupt, match=last):
        run(feed)
    lake.put(last, json.dumps(json.loads(whole) | {"format": 7}).encode())
    with pytest.raises(LedgerTooNew):
        run(feed)
    lake.put(last, whole)
    produce(place, 20)
    run(feed)
    assert is_whole(place, feed)
