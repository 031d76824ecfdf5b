"""The steps of a commit over a fake coordinator; tests/integration repeats them on a real one."""

import pytest

from sluice.pipelines.committing.commit import (
    CommitResult,
    CommitSettings,
    CommitStatus,
    CommittedMove,
    commit,
    list_remedies,
)
from sluice.pipelines.errors import (
    CommitFenced,
    EntriesLost,
    GroupHeld,
    GroupMoved,
    KafkaUnavailable,
    Unknown,
    UnknownTopic,
)
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import (
    CommitEntry,
    KeyOffset,
    KeyRange,
    LossEntry,
    MovedEntry,
    OriginEntry,
    OriginItem,
    PlanEntry,
)
from sluice.pipelines.ledger.marks import Mark
from sluice.pipelines.model.kafka import CommittedOffset, Isolation, Key, Range, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Receipt
from sluice.pipelines.ports import Member
from sluice.pipelines.publishing.publish import publish
from sluice.testing.cluster import MemoryCluster, partition
from sluice.testing.engine import owner
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake

KEY = Key("orders", 0, "id-1")
TP = TopicPartition("orders", 0)


class World:
    """A ledger whose frontier can be moved, and a group."""

    def __init__(self, origin: int = 0, committed: int | None = None) -> None:
        self.ledger = Ledger(MemoryLake(), "orders", lambda: 1, "run", "cluster-1")
        self.group = MemoryGroup()
        self.cluster = MemoryCluster({TP: partition(*TP, high_watermark=70)})
        if committed is not None:
            self.group.offsets[TP] = CommittedOffset(committed)
        item = OriginItem(key=KEY, offset=origin, committed=committed, why="test")
        self.ledger.append(lambda s: OriginEntry(items=(item,)))

    def account(self, start: int, end: int) -> None:
        entry = LossEntry(ranges=(KeyRange(key=KEY, range=Range(start, end)),), reason="test")
        self.ledger.append(lambda s: entry)

    def commit(self, mode: str = "transactional", moved: str = "refuse") -> CommitResult:
        settings = CommitSettings(CommitMode(mode), "tid", OnGroupMoved(moved))
        return commit(self.ledger, self.group, settings, cluster=self.cluster)

    @property
    def held(self) -> int | None:
        offset = self.group.offsets.get(TP)
        return offset.offset if offset else None


@pytest.mark.parametrize("mode", ["transactional", "plain"])
def test_commits_the_frontier_with_a_mark_and_records_it(mode: str) -> None:
    world = World()
    world.account(0, 50)
    result = world.commit(mode)
    assert (result.status, world.held) == (CommitStatus.COMMITTED, 50)
    mark = Mark.parse(world.group.offsets[TP].metadata)
    assert mark is not None
    assert mark.ledger == world.ledger.read().ledger_id
    assert mark.number == result.mark
    assert world.ledger.read().commits == {KEY: 50}


def test_nothing_new_does_not_touch_the_group() -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    joins = world.group.joins
    assert world.commit().status is CommitStatus.UNCHANGED
    assert world.group.joins == joins


def test_run_overtaken_by_a_later_commit_reports_it() -> None:
    """Its own commit may have taken effect before; this can no longer be known, and nothing depends on it."""
    world = World()
    world.account(0, 50)

    def commit_more() -> None:
        world.group.on_end = lambda: None
        world.account(50, 60)
        world.commit()

    world.group.on_end = commit_more
    with pytest.raises(CommitFenced, match="another run has committed 60 since this one set out to commit 50"):
        world.commit()
    assert world.held == 60
    assert world.ledger.read().commits == {KEY: 60}
    assert world.commit().status is CommitStatus.UNCHANGED


def test_mode_none_does_not_contact_kafka() -> None:
    world = World()
    world.account(0, 50)
    assert world.commit("none").status is CommitStatus.DISABLED
    assert world.held is None


@pytest.mark.parametrize("to", [20, 70])
def test_accepted_move_is_continued_from_once(to: int) -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    world.ledger.append(lambda s: MovedEntry(offsets=(KeyOffset(key=KEY, offset=to),), reason="test"))
    world.group.offsets[TP] = CommittedOffset(to)
    assert (world.commit().status, world.held) == (CommitStatus.COMMITTED, 50)
    world.group.offsets[TP] = CommittedOffset(to)
    with pytest.raises(GroupMoved):
        world.commit()


def test_foreign_commit_is_reported_once_landing_has_reached_it() -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    world.group.offsets[TP] = CommittedOffset(60)
    world.account(50, 60)
    done = world.commit()
    assert done.status is CommitStatus.UNCHANGED
    assert done.put_by_others == (CommittedMove(KEY, 50, 60),)
    world.account(60, 70)
    assert (world.commit().put_by_others, world.held) == ((), 70)


def test_offsets_of_an_own_commit_are_not_foreign() -> None:
    """A commit with a lost answer, one from before the ledger, and an offset that a user moved with Sluice."""
    world = World(origin=20, committed=20)
    assert world.commit().put_by_others == ()
    world.account(20, 50)
    world.group.lose = "after"
    assert world.commit().put_by_others == ()
    world.account(50, 60)
    world.ledger.append(lambda s: MovedEntry(offsets=(KeyOffset(key=KEY, offset=60),), reason="test"))
    world.group.offsets[TP] = CommittedOffset(60)
    assert world.commit().put_by_others == ()


K1, K2 = Key("orders", 1, "id-1"), Key("orders", 2, "id-1")


@pytest.mark.parametrize(
    ("moved", "works", "not_offered"),
    [
        ({KEY: (50, 60)}, ["moved --adopt --reason"], ["--replace", "--only"]),
        ({KEY: (50, 40)}, ["--offsets orders:0:40-50 --replace"], ["--adopt"]),
        ({KEY: (50, 80)}, ["moved --reason"], ["--adopt", "--replace"]),
        (
            {KEY: (50, 40), K1: (50, 60), K2: (50, 80)},
            ["moved --adopt --only orders:1 --reason", "--offsets orders:0:40-50 --replace"],
            [],
        ),
    ],
)
def test_only_working_remedies_are_offered_for_moved_offsets(
    moved: dict[Key, tuple[int, int]], works: list[str], not_offered: list[str]
) -> None:
    """Offsets moved back, ahead, beyond the log's end at 70, and all of these at once."""
    remedies = "; ".join(list_remedies("orders", moved, dict.fromkeys([k.tp for k in moved], 70)))
    assert remedies.startswith("commit the frontier anyway: sluice accept orders moved --reason …")
    for command in works:
        assert command in remedies
    for option in not_offered:
        assert option not in remedies


def test_never_passes_a_hole() -> None:
    world = World()
    world.account(0, 10)
    world.account(20, 30)
    world.commit()
    assert world.held == 10


def test_a_foreign_member_is_refused_and_nothing_is_fenced() -> None:
    world = World()
    world.account(0, 50)
    world.group.others.append(Member("m", "app", "host"))
    with pytest.raises(GroupHeld):
        world.commit()
    assert world.group.epoch == 0


@pytest.mark.parametrize("moved_to", [3, 70])
def test_moved_offsets_are_refused_with_both_values(moved_to: int) -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    world.account(50, 60)
    world.group.offsets[TP] = CommittedOffset(moved_to)
    with pytest.raises(GroupMoved, match=rf"{moved_to}, the ledger expects 50"):
        world.commit()
    assert world.held == moved_to


def test_overwrite_commits_the_frontier() -> None:
    world = World()
    world.account(0, 50)
    world.group.offsets[TP] = CommittedOffset(70)
    world.commit(moved="overwrite")
    assert world.held == 50


def test_adopt_records_the_passed_ranges_as_skipped() -> None:
    world = World()
    world.account(0, 50)
    world.group.offsets[TP] = CommittedOffset(70)
    world.commit(moved="adopt")
    state = world.ledger.read()
    assert state.skipped == {KEY: (Range(50, 70),)}
    assert (state.frontier(KEY), world.held) == (70, 70)


def test_adopting_beyond_a_live_batch_moves_nothing_back() -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    task = Task(0, 1, (OffsetRange(*KEY, 50, 55),))
    plan = Plan("orders", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (task,))
    live = PlanEntry(plan=plan, hash=plan.hash, owner=owner("another"))
    batch = world.ledger.append(lambda s: live)
    assert batch is not None
    world.group.offsets[TP] = CommittedOffset(60)
    result = world.commit(moved="adopt")
    assert result.waiting == (CommittedMove(KEY, 60, 50),)
    assert (world.held, world.ledger.read().skipped) == (60, {KEY: (Range(55, 60),)})
    receipt = Receipt(task.offset_ranges[0], 55, Counts(landed=5), (), "a")
    publish(world.ledger, batch.number, live.owner, [receipt])
    world.commit(moved="adopt")
    assert (world.held, world.ledger.read().commits) == (60, {KEY: 60})


def test_offsets_beyond_the_log_end_skip_nothing() -> None:
    world = World()
    world.account(0, 50)
    world.group.offsets[TP] = CommittedOffset(71)
    with pytest.raises(GroupMoved, match="the group holds 71, the log ends at 70"):
        world.commit(moved="adopt")
    assert (world.ledger.read().skipped, world.held) == ({}, 71)


def test_expired_offsets_are_committed_again() -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    world.group.offsets.clear()
    world.commit()
    assert world.held == 50


@pytest.mark.parametrize("mode", ["transactional", "plain"])
def test_lost_response_that_took_effect_is_detected_by_reading_back(mode: str) -> None:
    world = World()
    world.account(0, 50)
    world.group.lose = "after"
    assert world.commit(mode).status is CommitStatus.COMMITTED
    assert world.ledger.read().commits == {KEY: 50}


def test_lost_response_without_effect_is_not_a_commit() -> None:
    world = World()
    world.account(0, 50)
    world.group.lose = "before"
    with pytest.raises(CommitFenced):
        world.commit()
    assert world.ledger.read().commits == {}
    world.commit()
    assert world.held == 50


@pytest.mark.parametrize(("lose", "error"), [("after", Unknown), ("before", Unknown), (None, KafkaUnavailable)])
def test_lost_response_without_a_reachable_broker_is_unknown(
    lose: str | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.account(0, 50)
    world.group.lose = lose
    answers = iter([world.group.fetch_committed([TP])] * 2)

    def fetch_committed(_: object) -> object:
        if (offsets := next(answers, None)) is None:
            raise KafkaUnavailable("broker 1 does not answer")
        return offsets

    with monkeypatch.context() as patch:
        patch.setattr(world.group, "fetch_committed", fetch_committed)
        with pytest.raises(error, match="broker 1 does not answer"):
            world.commit()
    world.commit()
    assert (world.held, world.ledger.read().commits) == (50, {KEY: 50})


def test_commit_without_its_entry_is_recognised_by_its_mark() -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    ours = world.group.offsets[TP]
    fresh = World()
    fresh.ledger = world.ledger
    # Kafka has our commit of 50; then the frontier moved on, and the ledger has no commit entry for 60
    world.account(50, 60)
    world.group.offsets[TP] = CommittedOffset(55, metadata=ours.metadata)
    world.commit()
    assert world.held == 60


def test_intruder_between_join_and_commit_fences_the_committer() -> None:
    world = World()
    world.account(0, 50)
    world.group.on_commit = world.group.intrude
    with pytest.raises(CommitFenced):
        world.commit()
    assert world.held is None


def test_newer_committer_fences_the_older() -> None:
    world = World()
    world.account(0, 50)

    def raise_epoch() -> None:
        world.group.epoch += 1

    world.group.on_commit = raise_epoch
    with pytest.raises(CommitFenced):
        world.commit()


def test_a_mark_above_the_ledger_proves_lost_entries() -> None:
    world = World()
    world.account(0, 50)
    ledger_id = world.ledger.read().ledger_id
    world.group.offsets[TP] = CommittedOffset(10, metadata=Mark(ledger_id, 999, KEY.incarnation).dump())
    with pytest.raises(EntriesLost, match="has the mark of entry 999"):
        world.commit()


def test_hostile_metadata_is_not_a_mark() -> None:
    for text in (
        "",
        "{}",
        "[]",
        "null",
        '{"sluice":1}',
        "[" * 100_000,
        '{"sluice":"a","n":1e999,"i":""}',
        '{"sluice":"a","n":"x","i":""}',
    ):
        assert Mark.parse(text) is None


def test_commit_entries_count_by_their_maximum() -> None:
    world = World()
    world.account(0, 50)
    world.commit()
    late = CommitEntry(mode="transactional", mark=1, offsets=({"key": KEY, "offset": 20},))  # type: ignore[arg-type]
    world.ledger.append(lambda s: late)
    assert world.ledger.read().commits == {KEY: 50}


@pytest.mark.parametrize("absent", [TopicPartition("orders", 1), TopicPartition("deleted", 0)])
def test_deleted_partition_delays_no_other(absent):
    """Kafka commits no offset of a deleted topic, which would end all commits of a feed with a pattern."""
    world = World()
    key = Key(*absent, "id-1")
    item = OriginItem(key=key, offset=3, committed=None, why="test")
    world.ledger.append(lambda s: OriginEntry(items=(item,)))
    world.account(0, 50)

    def refuse() -> None:
        world.group.on_commit = lambda: None
        raise UnknownTopic("this partition is unknown")

    world.group.on_commit = refuse
    done = world.commit()
    assert (done.status, done.left_out) == (CommitStatus.COMMITTED, (key,))
    assert world.group.offsets[TP].offset == 50
    assert absent not in world.group.offsets
    world.group.on_commit = refuse
    world.account(50, 60)
    world.cluster.states[absent] = partition(*absent)
    with pytest.raises(UnknownTopic):  # of something else: each partition is there
        world.commit()
