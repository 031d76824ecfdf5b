"""Crashes, rivals and zombies on a real Kafka: the next run completes everything (invariants 1, 2, 7, 8, 10, 14)."""

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
    FeedProject,
    InlineEngine,
    build_commit_settings,
    commit_feed,
    consume_topic,
    fetch_committed,
    open_feed_ledger,
    open_inline_ports,
    produce_values,
    read_rows,
    run,
)
from tests.resources.kafka.tools import wait_until

COUNT = 300


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], lake: Lines) -> FeedProject:
    feed_project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2), lake())
    produce_values(feed_project, COUNT)
    return feed_project


def is_complete(project: FeedProject, feed: Feed) -> bool:
    """Returns true if every record landed once and the audit reconciles."""
    with open_inline_ports(feed) as ports:
        report = audit(open_feed_ledger(feed, ports), ports.lake, hashes=True)
    return report.reconciled and read_rows(feed) == consume_topic(project.kafka, project.topic)


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


def kill_at(project: FeedProject, feed: Feed, function: str) -> None:
    """Run the feed in a separate process that is killed (SIGKILL) at the given function."""
    path = project.root / "feeds" / f"{feed.name}.yaml"
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, str(path), function],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr[-2000:]


@pytest.mark.each_lake
@pytest.mark.parametrize("where", PUBLISHING.values(), ids=list(PUBLISHING))
def test_next_run_rolls_forward_after_a_kill_while_publishing(project: FeedProject, where: str) -> None:
    feed = project.write_feed()
    kill_at(project, feed, where)
    with open_inline_ports(feed) as ports:
        state = open_feed_ledger(feed, ports).read()
        frontiers = [state.frontier(k) for k in sorted(state.current.values())]
    committed = fetch_committed(project.kafka, feed.group, project.topic)
    assert all(o is None or o <= f for o, f in zip(committed, frontiers, strict=True)), (
        "committed offsets are never ahead of published ones"
    )
    produce_values(project, 20)
    run(feed)
    commit_feed(feed)
    assert is_complete(project, feed)
    assert fetch_committed(project.kafka, feed.group, project.topic) == [COUNT // 2 + 10] * 2
    assert list(open_lake(feed).list("_sluice/orders/staging")) == []


@pytest.mark.each_lake
def test_finished_ranges_are_adopted_after_a_crash(project: FeedProject) -> None:
    feed = project.write_feed()
    kill_at(project, feed, PUBLISHING["between stage and publish"])
    landed = run(feed)
    assert landed.batches[0].adopted_offset_ranges == 2
    assert is_complete(project, feed)


# -- rivals and zombies


class SleepingEngine(InlineEngine):
    """An engine that stages everything and then sleeps until resumed: the long pause makes its run a zombie."""

    def __init__(self) -> None:
        self.asleep, self.resume = Event(), Event()

    def run(self, job: Job, tasks: list[int]) -> list[Outcome]:  # type: ignore[override]
        outcomes = super().run(job, tasks)
        self.asleep.set()
        assert self.resume.wait(60)
        return outcomes


class SleepingRun:
    """A run in a thread that has staged its offset ranges and sleeps before publishing."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.engine, self.owner = feed, SleepingEngine(), new_owner("sleeper")
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run)
        self._thread.start()
        assert self.engine.asleep.wait(60)

    def _run(self) -> None:
        try:
            with open_inline_ports(self.feed) as ports:
                land(self.feed, replace(ports, engine=self.engine), CATCH_UP, self.owner, lambda p: None)
        except BaseException as e:  # noqa: BLE001 - the test checks it
            self.error = e

    def resume(self) -> None:
        self.engine.resume.set()
        self._thread.join(60)


@pytest.fixture
def sleeping(project: FeedProject) -> Iterator[SleepingRun]:
    sleeper = SleepingRun(project.write_feed())
    yield sleeper
    sleeper.resume()


def test_second_concurrent_run_is_refused_with_the_active_batch(project: FeedProject, sleeping: SleepingRun) -> None:
    with pytest.raises(PlanBusy, match=r"batch 2 \(catch-up\) is at work: run sleeper"):
        run(sleeping.feed)
    sleeping.resume()
    assert sleeping.error is None
    assert is_complete(project, sleeping.feed)


@pytest.mark.each_lake
def test_zombie_publishes_nothing_after_a_takeover(project: FeedProject, sleeping: SleepingRun) -> None:
    feed = sleeping.feed
    with open_inline_ports(feed) as ports:
        liveness = LivenessWithDeadOwner(sleeping.owner.token, ports.liveness)
        landed = land(feed, replace(ports, liveness=liveness), CATCH_UP, new_owner("second"), lambda p: None)
    assert landed.batches[0].adopted_offset_ranges == 2, "the zombie's staged ranges are adopted"
    sleeping.resume()
    assert isinstance(sleeping.error, OwnershipLost)
    with open_inline_ports(feed) as ports:
        entries = [e for _, e in open_feed_ledger(feed, ports).entries() if isinstance(e, PublishEntry)]
    assert len(entries) == 1
    assert is_complete(project, feed)


class LivenessWithDeadOwner:
    """The real liveness, except that one owner is dead and all others are alive."""

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
def test_committed_offsets_are_the_frontier_with_the_ledger_mark(project: FeedProject, mode: str) -> None:
    feed = project.write_feed(commit=mode)
    run(feed)
    result = commit_feed(feed)
    assert (result.status, fetch_committed(project.kafka, feed.group, project.topic)) == (
        CommitStatus.COMMITTED,
        [150, 150],
    )
    with open_inline_ports(feed) as ports:
        committed = ports.group.fetch_committed([TopicPartition(project.topic, 0)])[TopicPartition(project.topic, 0)]
        assert committed is not None
        mark = Mark.parse(committed.metadata)
        assert mark is not None
        assert (mark.ledger, mark.number) == (open_feed_ledger(feed, ports).read().ledger_id, result.mark)
    assert commit_feed(feed).status is CommitStatus.UNCHANGED


def test_disabled_commit_does_not_touch_the_group(project: FeedProject) -> None:
    feed = project.write_feed(commit="none")
    run(feed)
    assert commit_feed(feed).status is CommitStatus.DISABLED
    assert fetch_committed(project.kafka, feed.group, project.topic) == [None, None]


def test_live_consumer_blocks_the_commit_and_landing_continues(project: FeedProject) -> None:
    feed = project.write_feed()
    foreign = KafkaConsumer(project.topic, bootstrap_servers=project.kafka.bootstrap, group_id=feed.group)
    try:
        # kafka-python's group leader never assigns anything if it joined before it knew the topic.
        wait_until(lambda: foreign.partitions_for_topic(project.topic))
        while not foreign.assignment():
            foreign.poll(timeout_ms=200)
        run(feed)
        with pytest.raises(GroupHeld):
            commit_feed(feed)
        produce_values(project, 20)
        run(feed)
        assert is_complete(project, feed)
    finally:
        foreign.close(autocommit=False)
    commit_feed(feed)
    assert fetch_committed(project.kafka, feed.group, project.topic) == [160, 160]


def test_moved_offsets_are_refused_with_both_values(project: FeedProject) -> None:
    feed = project.write_feed()
    run(feed)
    commit_feed(feed)
    move(project, feed, 7)
    produce_values(project, 20)
    run(feed)
    with pytest.raises(GroupMoved, match="the group holds 7, the ledger expects 150"):
        commit_feed(feed)
    commit_feed(project.write_feed(policies="{on_group_moved: overwrite}"))
    assert fetch_committed(project.kafka, feed.group, project.topic) == [160, 160]


def move(project: FeedProject, feed: Feed, offset: int) -> None:
    """Set the group's offset of partition 0, as another client would."""
    consumer = KafkaConsumer(bootstrap_servers=project.kafka.bootstrap, group_id=feed.group, enable_auto_commit=False)
    consumer.assign([KafkaTopicPartition(project.topic, 0)])
    consumer.commit({KafkaTopicPartition(project.topic, 0): OffsetAndMetadata(offset, "", -1)})
    consumer.close(autocommit=False)


class MeddledGroup:
    """The real group, with `meddle` called between the join and the commit."""

    def __init__(self, real: object, meddle: Callable[[], None], *, lose_answer: bool = False) -> None:
        self._real, self._meddle, self._lose = real, meddle, lose_answer

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def join(self, topics, transactional_id):  # type: ignore[no-untyped-def]
        from contextlib import contextmanager

        @contextmanager
        def join_meddled():  # type: ignore[no-untyped-def]
            with self._real.join(topics, transactional_id) as member:  # type: ignore[attr-defined]
                yield MeddledMember(member, self._meddle, self._lose)

        return join_meddled()


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
    with open_inline_ports(feed) as ports:
        group = MeddledGroup(ports.group, meddle, lose_answer=lose_answer)
        return commit(open_feed_ledger(feed, ports), group, build_commit_settings(feed))  # type: ignore[arg-type]


def test_a_zombie_committer_is_fenced_by_the_coordinator(project: FeedProject) -> None:
    feed = project.write_feed()
    run(feed)

    def start_newer_committer() -> None:
        producer = KafkaProducer(bootstrap_servers=project.kafka.bootstrap, transactional_id=feed.transactional_id)
        producer.init_transactions()
        producer.close()

    with pytest.raises(CommitFenced):
        commit_with(feed, start_newer_committer)
    assert fetch_committed(project.kafka, feed.group, project.topic) == [None, None]
    commit_feed(feed)
    assert fetch_committed(project.kafka, feed.group, project.topic) == [150, 150]


def test_lost_commit_response_is_resolved_by_reading_back(project: FeedProject) -> None:
    feed = project.write_feed()
    run(feed)
    assert commit_with(feed, lambda: None, lose_answer=True).status is CommitStatus.COMMITTED
    assert commit_feed(feed).status is CommitStatus.UNCHANGED


# -- a damaged lake


@pytest.mark.each_lake
def test_truncated_or_newer_ledger_entry_stops_runs_without_changes(project: FeedProject) -> None:
    feed = project.write_feed()
    run(feed)
    lake = open_lake(feed)
    *_, last = lake.list("_sluice/orders/log")
    content = lake.get(last)
    assert content is not None
    lake.put(last, content[: len(content) // 2])
    with pytest.raises(LedgerCorrupt, match=last):
        run(feed)
    lake.put(last, json.dumps(json.loads(content) | {"format": 7}).encode())
    with pytest.raises(LedgerTooNew):
        run(feed)
    lake.put(last, content)
    produce_values(project, 20)
    run(feed)
    assert is_complete(project, feed)
