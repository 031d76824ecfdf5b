"""The way out of each refusal, over logs in memory: an event is accepted once, and only if it happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.committing.commit import CommitSettings, CommitStatus, commit
from sluice.pipelines.errors import (
    BatchIncomplete,
    ClusterChanged,
    GroupMoved,
    LogTruncated,
    NothingToAccept,
    OffsetsLost,
    PlanBusy,
    TopicRecreated,
    UsageError,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved, Start, StartKind
from sluice.pipelines.ledger import BatchStatus, checkpoint
from sluice.pipelines.ledger.entries import KeyRange
from sluice.pipelines.model.kafka import CommittedOffset, Configs, Key, Range, TopicConfig, TopicPartition
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.operating.acceptance import (
    Accepted,
    AcceptEvent,
    accept_corrupt,
    accept_log,
    accept_lost,
    accept_moved,
)
from sluice.pipelines.planning import windows
from sluice.pipelines.status import strip
from sluice.testing.logs import ZSTD, LogBatch, LogRecord
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, START, World

P0, P1 = PARTITIONS
EARLIEST = Start(StartKind.EARLIEST)
KEY = Key("orders", 0, "id-1")
CATCH_UP = Request(RequestKind.CATCH_UP)
ALL = AskedRange("orders", 0, 0, 8)


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    path: Path = tmp_path_factory.mktemp("feeds") / "orders.yaml"
    path.write_text("kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\n")
    return load_feed(path, {})


@pytest.fixture
def world(feed: Feed) -> World:
    """Two batches of four records in the first partition, which landed two hours after they were written."""
    world = World(feed)
    for _ in range(2):
        world.topic.write(P0, [START + i for i in range(4)], False)
    world.now = START + 2 * HOUR
    world.land(CATCH_UP).check()
    return world


def commit_landed(world: World, moved: str = "refuse") -> CommitStatus:
    settings = CommitSettings(CommitMode.TRANSACTIONAL, "tid", OnGroupMoved(moved))
    return commit(world.ledger, world.group, settings).status


def list_rows(world: World) -> list[tuple[int, int]]:
    return sorted(world.read_rows(world.lake.list("data/orders")))


def is_reconciled(world: World) -> bool:
    return audit(world.ledger, world.lake, hashes=True).reconciled  # type: ignore[arg-type]


def copy_files(world: World) -> dict[str, bytes]:
    return dict(world.lake.files)


# -- lost


def test_offsets_deleted_by_retention_are_accepted_as_lost(world: World) -> None:
    world.topic.write(P0, [world.now] * 4, False)
    world.topic.log_start = 10
    with pytest.raises(OffsetsLost, match=r"\[8, 10\) are gone") as caught:
        world.land(CATCH_UP).check()
    assert "sluice accept orders lost --reason" in caught.value.remedy
    done = accept_lost(world.feed, world.make_ports(), "an hour's retention")
    assert done.lost == (KeyRange(key=KEY, range=Range(8, 10)),)
    world.land(CATCH_UP).check()
    assert list_rows(world) == [(0, o) for o in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11)]
    assert is_reconciled(world)


def test_loss_is_refused_while_a_live_batch_may_have_read_the_offsets(world: World) -> None:
    world.topic.write(P0, [world.now] * 4, False)
    with pytest.raises(BatchIncomplete):
        world.land(CATCH_UP, drops=frozenset({0})).check()
    (batch,) = world.ledger.read().live()
    world.topic.log_start = 10
    world.liveness.dead.clear()
    before = copy_files(world)
    with pytest.raises(PlanBusy):
        accept_lost(world.feed, world.make_ports(), "gone")
    assert copy_files(world) == before
    world.liveness.dead.add(batch.owner.token)
    done = accept_lost(world.feed, world.make_ports(), "gone")
    assert done.abandoned == (batch.id,)
    world.land(CATCH_UP).check()
    assert is_reconciled(world)


def test_loss_is_refused_before_the_first_plan(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(P0, [START] * 4, False)
    with pytest.raises(NothingToAccept):
        accept_lost(world.feed, world.make_ports(), "gone")


# -- another log


def test_recreated_topic_starts_over_and_landed_rows_stay(world: World) -> None:
    commit_landed(world)
    world.topic.topic_id, world.topic.batches[P0] = "id-2", []
    world.topic.write(P0, [world.now] * 3, False)
    with pytest.raises(TopicRecreated) as caught:
        world.land(Request(RequestKind.CATCH_UP, only=(P0,)))
    assert "sluice accept orders recreated" in caught.value.remedy
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.RECREATED, "INC-1")
    assert [(i.leaves.incarnation, i.enters.key.incarnation, i.enters.offset) for i in done.entered] == [
        ("id-1", "id-2", 0)
    ] * 2
    world.land(CATCH_UP).check()
    assert list_rows(world) == sorted([(0, o) for o in range(8)] + [(0, o) for o in range(3)])
    assert is_reconciled(world)
    assert commit_landed(world) is CommitStatus.COMMITTED
    assert world.group.offsets[P0].offset == 3
    with pytest.raises(NothingToAccept):
        accept_log(world.feed, world.make_ports(), AcceptEvent.RECREATED, "again")


def test_windows_do_not_wait_for_a_permanently_deleted_partition(world: World) -> None:
    """A topic of a pattern was deleted, or one came back with fewer partitions."""
    with pytest.raises(NothingToAccept):
        accept_log(world.feed, world.make_ports(), AcceptEvent.GONE, "?")
    world.topic.write(P1, [world.now] * 5, False)
    world.land(Request(RequestKind.OFFSETS, (AskedRange("orders", 1, 3, 5),))).check()
    commit_landed(world)
    list_all = world.topic.known
    world.topic.known = lambda: [P0]  # type: ignore[method-assign]
    world.topic.write(P0, [world.now + HOUR], False)
    window, world.now = START + 2 * HOUR, START + 4 * HOUR
    world.land(CATCH_UP).check()
    settings = world.feed.window
    assert not windows.complete(world.ledger.read(), window, settings)
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.GONE, "INC-9")
    assert [(i.leaves.tp, i.enters.offset) for i in done.entered] == [(P1, 5)]
    assert [tuple(r.range) for r in done.skipped] == [(0, 3)]
    assert window in world.land(CATCH_UP).windows
    assert windows.list_pending_windows(world.ledger.read(), settings, world.now) == []
    assert commit_landed(world) is CommitStatus.COMMITTED
    assert is_reconciled(world)
    with pytest.raises(NothingToAccept):
        accept_log(world.feed, world.make_ports(), AcceptEvent.GONE, "again")

    world.topic.known = list_all  # type: ignore[method-assign]
    world.topic.write(P1, [world.now] * 2, False)
    with pytest.raises(TopicRecreated, match="orders:1 is in Kafka again") as caught:
        world.land(CATCH_UP).check()
    assert "sluice accept orders recreated" in caught.value.remedy
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.RECREATED, "INC-9")
    assert [(i.enters.key.incarnation, i.enters.offset) for i in done.entered] == [("id-1#1", 5)]
    world.land(CATCH_UP).check()
    assert list_rows(world) == [*((0, o) for o in range(9)), *((1, o) for o in range(3, 7))]
    assert is_reconciled(world)
    assert commit_landed(world) is CommitStatus.COMMITTED
    assert world.group.offsets[P1].offset == 7
    world.topic.known = lambda: [P0]  # type: ignore[method-assign]
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.GONE, "INC-10")
    assert [(i.leaves.incarnation, i.enters.offset) for i in done.entered] == [("id-1#1", 7)]
    assert world.ledger.read().frontiers().keys() == {KEY}


@pytest.mark.parametrize("event", [AcceptEvent.RECREATED, AcceptEvent.TRUNCATED])
def test_event_accepted_concurrently_is_not_accepted_again(event: AcceptEvent, world: World) -> None:
    """A second acceptance would begin the new life again, and all its records would land twice."""
    if event is AcceptEvent.RECREATED:
        world.topic.topic_id, world.topic.batches[P0] = "id-2", []
        world.topic.write(P0, [world.now] * 3, False)
    else:
        world.topic.batches[P0].pop()
        world.topic.ends[P0] = 4

    def accept_first(path: str) -> None:
        world.lake.before.clear()
        accept_log(world.feed, world.make_ports(), event, "INC-1")
        world.land(CATCH_UP).check()

    world.lake.before["put_if_absent"] = accept_first
    with pytest.raises(NothingToAccept):
        accept_log(world.feed, world.make_ports(), event, "INC-1")
    before = list_rows(world)
    world.land(CATCH_UP).check()
    assert list_rows(world) == before
    assert is_reconciled(world)


def test_topic_recreated_during_the_check_is_not_treated_as_truncated(world: World) -> None:
    """Epochs are requested by topic name, so the answer may come from another log."""
    epoch_ends = world.topic.epoch_ends

    def recreate_topic(epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        world.topic.topic_id = "id-2"
        return epoch_ends(epochs) | {P0: 1}

    world.topic.epoch_ends = recreate_topic  # type: ignore[method-assign]
    before = copy_files(world)
    with pytest.raises(NothingToAccept):
        accept_log(world.feed, world.make_ports(), AcceptEvent.TRUNCATED, "it looked like it")
    assert copy_files(world) == before


def test_windows_keep_tiling_after_topic_recreation(world: World) -> None:
    world.topic.topic_id, world.topic.batches[P0] = "id-2", []
    accept_log(world.feed, world.make_ports(), AcceptEvent.RECREATED, "INC-1")
    world.topic.write(P0, [world.now, world.now + HOUR], False)
    world.now += 3 * HOUR
    world.land(Request(RequestKind.OFFSETS))
    pending = world.list_windows(pending=True)
    for window in pending:
        world.land(Request(RequestKind.WINDOW, window=window)).check()
    assert world.list_windows(pending=True) == []
    assert world.ledger.read().frontier(Key("orders", 0, "id-2")) == 2


@pytest.mark.parametrize("event", [AcceptEvent.RECREATED, AcceptEvent.CLUSTER])
def test_hours_between_the_last_look_and_the_acceptance_are_never_empty(event: AcceptEvent, world: World) -> None:
    """Boundaries were known up to the second hour; the log was replaced some time before the end of the fifth."""
    boundary = world.feed.window.last_boundary(world.now)
    world.now += 2 * HOUR
    if event is AcceptEvent.CLUSTER:
        world.topic.id = "cluster-2"
    world.topic.topic_id, world.topic.batches = "id-2", {P0: [], P1: []}
    accept_log(world.feed, world.make_ports(), event, "INC-1", begin=EARLIEST)
    world.now += 4 * HOUR
    world.topic.write(P0, [world.now], False)
    world.land(CATCH_UP).check()
    settings, now = world.feed.window, world.now
    for state in (world.ledger.read(), checkpoint.load(checkpoint.dump(world.ledger.read()))):
        assert state is not None
        windows_of = {n: strip.standing(state, settings, START + n * HOUR, now) for n in range(6)}
        assert {n for n, s in windows_of.items() if s.state == "landed"} == {*range(6)}
        unseen = {n for n, s in windows_of.items() if s.losses.unseen}
        assert unseen == {*range((boundary - START) // HOUR, 5)}, "later hours are the new log's"
        assert {n for n, s in windows_of.items() if s.empty} == {*range(6)} - unseen - {0}


def test_truncated_log_resumes_at_its_end(world: World) -> None:
    world.topic.batches[P0].pop()
    world.topic.write(P0, [world.now], False)
    with pytest.raises(LogTruncated) as caught:
        world.land(CATCH_UP).check()
    assert (caught.value.start, caught.value.end) == (5, 8)
    assert "sluice accept orders truncated" in caught.value.remedy
    world.topic.ends[P0] = 4
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.TRUNCATED, "unclean election", (P0,))
    ((leaves, enters),) = [(i.leaves, i.enters) for i in done.entered]
    assert (leaves.incarnation, enters.key.incarnation, enters.offset) == ("id-1", "id-1#1", 4)
    world.topic.ends.clear()
    world.land(CATCH_UP).check()
    assert list_rows(world) == sorted([(0, o) for o in range(8)] + [(0, 4)])
    assert is_reconciled(world)


def test_pending_offsets_of_former_incarnation_are_reported_as_lost(world: World) -> None:
    world.topic.write(P0, [world.now] * 4, False)
    world.land(Request(RequestKind.OFFSETS, (AskedRange("orders", 0, 10, 12),))).check()
    world.topic.topic_id = "id-2"
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.RECREATED, "INC-1")
    assert (done.skipped, done.lost) == ((), (KeyRange(key=KEY, range=Range(8, 10)),))


def test_live_batch_of_former_incarnation_is_abandoned(world: World) -> None:
    world.topic.write(P0, [world.now] * 4, False)
    world.land(CATCH_UP, drops=frozenset({0}))
    (batch,) = world.ledger.read().live()
    world.topic.topic_id = "id-2"
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.RECREATED, "INC-1")
    assert done.abandoned == (batch.id,)
    assert world.ledger.read().batches[batch.id].status is BatchStatus.ABANDONED


def test_other_cluster_starts_at_its_log_starts_and_failback_works(world: World) -> None:
    commit_landed(world)
    world.topic.id, world.topic.topic_id, world.topic.log_start = "cluster-2", "id-9", 2
    with pytest.raises(ClusterChanged) as caught:
        world.land(CATCH_UP)
    assert "sluice accept orders cluster" in caught.value.remedy
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.CLUSTER, "failover", begin=EARLIEST)
    assert {(i.enters.key.partition, i.enters.offset) for i in done.entered} == {(0, 2), (1, 0)}
    world.land(CATCH_UP).check()
    assert world.ledger.read().cluster == "cluster-2"
    world.topic.id, world.topic.topic_id = "cluster-1", "id-1"
    back = accept_log(world.feed, world.make_ports(), AcceptEvent.CLUSTER, "failback", begin=EARLIEST)
    assert {i.enters.key.incarnation for i in back.entered} == {"id-1#1"}
    world.land(CATCH_UP).check()
    assert is_reconciled(world)


@pytest.mark.parametrize(
    ("restored", "message"),
    [
        (2, "read in leader epoch 4, and its leader is in epoch 2: epochs never fall"),
        (4, "read up to 7, and the batch there is now another one"),
    ],
)
@pytest.mark.parametrize(("begin", "first"), [(EARLIEST, 0), (Start(StartKind.TIME, START + HOUR), 6)], ids=str)
def test_log_restored_from_a_copy_is_refused(begin: Start, first: int, restored: int, message: str, feed: Feed) -> None:
    """The copy lacks the last two records, and others stand in their place: its end is no lower than the frontier."""
    world, epoch = World(feed), 4
    world.topic.settings = Configs({"orders": TopicConfig()})
    describe = world.topic.partitions
    world.topic.partitions = lambda *about: tuple(replace(p, leader_epoch=epoch) for p in describe(*about))  # type: ignore[method-assign]
    world.topic.write(P0, [START] * 6, False)
    world.topic.write(P0, [START] * 2, False)
    world.now = START + 2 * HOUR
    world.land(CATCH_UP).check()
    epoch = restored
    world.topic.batches[P0].pop()
    world.topic.write(P0, [world.now] * 5, False)
    with pytest.raises(LogTruncated, match=message) as caught:
        world.land(CATCH_UP).check()
    assert "sluice accept orders truncated --begin TIME" in caught.value.remedy
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.TRUNCATED, "INC-1", begin=begin)
    assert [i.enters.offset for i in done.entered] == [first]
    world.land(CATCH_UP).check()
    assert list_rows(world) == sorted([*((0, o) for o in range(8)), *((0, o) for o in range(first, 11))])
    assert is_reconciled(world)


def move_to_mirror(world: World) -> None:
    """Continue on a mirror of the landed log, from its third record on, with a new record."""
    commit_landed(world)
    world.topic.id, world.topic.topic_id, world.topic.log_start = "cluster-2", "id-9", 2
    world.topic.write(P0, [world.now], False)
    world.group.offsets.clear()
    with pytest.raises(ClusterChanged) as caught:
        world.land(CATCH_UP)
    for begin in ("--begin committed", "--begin TIME", "--begin earliest", "land twice"):
        assert begin in caught.value.remedy


@pytest.mark.parametrize(
    ("begin", "first"), [(None, 8), (Start(StartKind.TIME, START + HOUR), 8), (EARLIEST, 2)], ids=str
)
def test_feed_continues_on_a_mirror_at_the_chosen_offset(begin: Start | None, first: int, world: World) -> None:
    move_to_mirror(world)
    world.group.offsets |= {P0: CommittedOffset(8, ""), P1: CommittedOffset(0, "")}
    done = accept_log(world.feed, world.make_ports(), AcceptEvent.CLUSTER, "failover", begin=begin)
    assert {(i.enters.key.partition, i.enters.offset) for i in done.entered} == {(0, first), (1, 0)}
    world.land(CATCH_UP).check()
    assert list_rows(world) == sorted([*((0, o) for o in range(8)), *((0, o) for o in range(first, 9))])
    assert commit_landed(world) is CommitStatus.COMMITTED
    assert world.group.offsets[P0].offset == 9
    assert is_reconciled(world)


@pytest.mark.parametrize("offset", [None, 10])
def test_mirror_without_a_translated_offset_is_refused(offset: int | None, world: World) -> None:
    move_to_mirror(world)
    world.group.offsets[P1] = CommittedOffset(0, "")
    if offset is not None:
        world.group.offsets[P0] = CommittedOffset(offset, "")
    before = copy_files(world)
    with pytest.raises(UsageError, match="no committed offset within the log of orders:0") as caught:
        accept_log(world.feed, world.make_ports(), AcceptEvent.CLUSTER, "failover", begin=None)
    assert "--begin TIME" in caught.value.remedy
    assert copy_files(world) == before


@pytest.mark.parametrize("event", [AcceptEvent.RECREATED, AcceptEvent.TRUNCATED, AcceptEvent.CLUSTER])
def test_event_that_did_not_happen_is_not_accepted(world: World, event: AcceptEvent) -> None:
    before = copy_files(world)
    with pytest.raises(NothingToAccept):
        accept_log(world.feed, world.make_ports(), event, "?")
    with pytest.raises(NothingToAccept):
        accept_lost(world.feed, world.make_ports(), "?")
    with pytest.raises(NothingToAccept):
        accept_moved(world.feed, world.make_ports(), "?")
    with pytest.raises(UsageError):
        accept_lost(world.feed, world.make_ports(), "?", (TopicPartition("orders", 7),))
    assert copy_files(world) == before


# -- moved offsets


@pytest.mark.parametrize("to", [3, 90])
def test_next_commit_continues_after_moved_offsets_are_accepted(world: World, to: int) -> None:
    commit_landed(world)
    world.group.offsets[P0] = CommittedOffset(to)
    with pytest.raises(GroupMoved) as caught:
        commit_landed(world)
    assert "sluice accept orders moved" in caught.value.remedy
    done = accept_moved(world.feed, world.make_ports(), "somebody's script")
    assert [(m.key, m.offset) for m in done.moved] == [(KEY, to)]
    commit_landed(world)
    assert world.group.offsets[P0].offset == 8


def test_offset_moved_to_the_frontier_is_accepted_with_other_moved_offsets(world: World) -> None:
    p1 = TopicPartition(P0.topic, 1)
    world.topic.write(p1, [world.now] * 4, False)
    world.land(CATCH_UP).check()
    commit_landed(world)
    for tp, count in ((P0, 3), (p1, 2)):
        world.topic.write(tp, [world.now] * count, False)
    world.land(CATCH_UP).check()
    world.group.offsets |= {P0: CommittedOffset(2), p1: CommittedOffset(6)}
    with pytest.raises(GroupMoved):
        commit_landed(world)
    accept_moved(world.feed, world.make_ports(), "a stranger")
    world.topic.write(p1, [world.now] * 5, False)
    world.land(CATCH_UP).check()
    commit_landed(world)
    assert [world.group.offsets[tp].offset for tp in (P0, p1)] == [11, 11]


def test_adopting_moved_offsets_skips_the_offsets_in_between(world: World) -> None:
    commit_landed(world)
    world.topic.write(P0, [world.now] * 4, False)
    world.group.offsets[P0] = CommittedOffset(10)
    done = accept_moved(world.feed, world.make_ports(), "not wanted", adopting=True)
    assert done.skipped == (KeyRange(key=KEY, range=Range(8, 10)),)
    world.land(CATCH_UP).check()
    commit_landed(world)
    assert (list_rows(world)[-2:], world.group.offsets[P0].offset) == ([(0, 10), (0, 11)], 12)
    world.group.offsets[P0] = CommittedOffset(2)
    with pytest.raises(UsageError, match="below the frontier") as back:
        accept_moved(world.feed, world.make_ports(), "back", adopting=True)
    assert "--adopt" not in back.value.remedy
    assert "sluice run orders --offsets orders:0:2-12 --replace" in back.value.remedy


def test_remedies_work_for_offsets_moved_back_and_ahead(world: World) -> None:
    p1 = TopicPartition(P0.topic, 1)
    world.topic.write(p1, [world.now] * 4, False)
    world.land(CATCH_UP).check()
    commit_landed(world)
    world.topic.write(p1, [world.now] * 4, False)
    world.group.offsets |= {P0: CommittedOffset(2), p1: CommittedOffset(6)}
    with pytest.raises(GroupMoved) as caught:
        commit_landed(world)
    with pytest.raises(UsageError) as both:
        accept_moved(world.feed, world.make_ports(), "both", adopting=True)
    for error in (caught.value, both.value):
        assert "accept orders moved --adopt --only orders:1 --reason" in error.remedy
        assert "--offsets orders:0:2-8 --replace" in error.remedy
    adopted = accept_moved(world.feed, world.make_ports(), "as printed", (p1,), adopting=True)
    assert [(s.key.tp, s.range) for s in adopted.skipped] == [(p1, Range(4, 6))]
    accept_moved(world.feed, world.make_ports(), "as printed")
    world.land(CATCH_UP).check()
    commit_landed(world)
    assert [world.group.offsets[tp].offset for tp in (P0, p1)] == [8, 8]


# -- corrupt


def accept_damage(world: World, damaged: AskedRange) -> Accepted:
    return accept_corrupt(world.feed, world.make_ports(), world.topic.make_fetcher(), damaged, "disk")  # type: ignore[arg-type]


def test_only_the_unreadable_record_batch_is_accepted_as_lost(feed: Feed) -> None:
    world = World(feed)
    for _ in range(3):
        world.topic.write(P0, [START] * 4, False)
    world.topic.broken = {(P0, 4)}
    with pytest.raises(BatchIncomplete) as caught:
        world.land(CATCH_UP).check()
    assert "sluice accept orders corrupt --offsets orders:0:0-12" in caught.value.remedy
    done = accept_damage(world, AskedRange("orders", 0, 0, 12))
    assert (done.lost, len(done.abandoned)) == ((KeyRange(key=KEY, range=Range(4, 8)),), 1)
    world.land(CATCH_UP).check()
    assert list_rows(world) == [(0, o) for o in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert is_reconciled(world)
    with pytest.raises(NothingToAccept):
        accept_damage(world, AskedRange("orders", 0, 0, 12))


def test_oversized_batch_with_unknown_offsets_is_accepted_as_lost(feed: Feed) -> None:
    """Without gaps its offsets are known, and it is quarantined: then there is nothing to accept."""
    world, large = World(feed), LogBatch((LogRecord(b"k", bytes(36 << 20), START),), ZSTD)
    world.topic.batches[P0] += [large, replace(large, tail=1)]
    with pytest.raises(BatchIncomplete) as caught:
        world.land(CATCH_UP).check()
    assert "raise `tuning.task_memory`, and run again: sluice accept orders corrupt" in caught.value.remedy
    done = accept_damage(world, AskedRange("orders", 0, 0, 3))
    assert done.lost == (KeyRange(key=KEY, range=Range(1, 3)),)
    world.land(CATCH_UP).check()
    assert is_reconciled(world)


def test_readable_record_batch_is_not_accepted_as_lost(feed: Feed) -> None:
    world = World(feed)
    world.topic.write(P0, [START] * 4, False)
    with pytest.raises(NothingToAccept, match="can be read"):
        accept_damage(world, AskedRange("orders", 0, 0, 4))


def test_record_batch_intact_on_the_leader_is_not_accepted_as_lost(feed: Feed) -> None:
    """A replica in the rack sends the batch damaged the first time."""
    world = World(feed)
    world.topic.write(P0, [START] * 4, False)
    fetcher = world.topic.make_fetcher()
    fetcher.damaged = {P0: 1}
    with pytest.raises(NothingToAccept, match="can be read"):
        accept_corrupt(world.feed, world.make_ports(), fetcher, AskedRange("orders", 0, 0, 4), "disk")  # type: ignore[arg-type]
