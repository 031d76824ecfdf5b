"""Committed offsets of another ledger: every command that writes refuses, and the group is taken over by name only."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.batch.result import Skip
from sluice.pipelines.committing.commit import CommitResult, CommitSettings, CommitStatus, commit
from sluice.pipelines.errors import ForeignMarks, NothingToAccept, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.ledger import Ledger, checkpoint
from sluice.pipelines.ledger.marks import Mark, OffsetNote, by_hand
from sluice.pipelines.ledger.tip import BEYOND
from sluice.pipelines.model.kafka import CommittedOffset
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.operating.acceptance import Begin, accept_corrupt, accept_group, accept_lost, accept_moved
from sluice.pipelines.operating.move_offsets import Stands, stands
from sluice.testing.lake import MemoryLake
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, START, World
from tests.pipelines.operating import test_move_offsets as moving

P0, P1 = PARTITIONS
CATCH_UP = Request(RequestKind.CATCH_UP)


def make_feed(folder: Path, name: str = "orders", more: str = "") -> Feed:
    path = folder / f"{name}.yaml"
    path.write_text(f"kafka: {{bootstrap: 'a:1'}}\ntopics: orders\nstart: earliest\n{more}")
    return load_feed(path, {})


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return make_feed(tmp_path)


@pytest.fixture
def world(feed: Feed) -> World:
    """Eight records in each partition, landed and committed; then the lake is removed and more records come."""
    world = World(feed)
    write(world, 8)
    world.now = START + 2 * HOUR
    world.land(CATCH_UP).check()
    assert commit_landed(world).status is CommitStatus.COMMITTED
    world.lake = MemoryLake()
    write(world, 4)
    return world


def write(world: World, count: int) -> None:
    for tp in PARTITIONS:
        world.topic.write(tp, [START + i for i in range(count)], False)


def commit_landed(world: World, moved: str = "refuse", mode: str = "transactional") -> CommitResult:
    settings = CommitSettings(CommitMode(mode), "tid", OnGroupMoved(moved))
    return commit(world.ledger, world.group, settings, cluster=world.topic)


def list_committed(world: World) -> list[int]:
    return [world.group.offsets[tp].offset for tp in PARTITIONS]


def list_rows(world: World) -> list[tuple[int, int]]:
    return sorted(world.read_rows(world.lake.list("data/orders")))


def make_rows(first: int, end: int) -> list[tuple[int, int]]:
    return [(p, o) for p in (0, 1) for o in range(first, end)]


def is_reconciled(world: World) -> bool:
    return audit(world.ledger, world.lake, hashes=True).reconciled


WRITERS: dict[str, Callable[[World], object]] = {
    "run": lambda w: w.land(CATCH_UP),
    "run of offsets": lambda w: w.land(Request(RequestKind.OFFSETS, ranges=(AskedRange("orders", 0, 0, 2),))),
    "run that skips": lambda w: w.land(CATCH_UP, skip=Skip(None, "test")),
    "plan": lambda w: preview(w.feed, w.make_ports(), CATCH_UP),
    "accept lost": lambda w: accept_lost(w.feed, w.make_ports(), "test"),
    "accept corrupt": lambda w: accept_corrupt(
        w.feed, w.make_ports(), w.topic.make_fetcher(), AskedRange("orders", 0, 0, 2), "test"
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_new_lake_refuses_to_start_at_committed_offsets_of_lost_lake(world: World, name: str) -> None:
    before = dict(world.group.offsets)
    with pytest.raises(ForeignMarks, match="orders:0: the committed offset 8 has the mark of entry") as caught:
        WRITERS[name](world)
    mark = Mark.parse(before[P0].metadata)
    assert mark is not None
    assert mark.ledger in caught.value.message
    assert "restore it" in caught.value.remedy
    assert "sluice accept orders group --begin committed" in caught.value.remedy
    assert "sluice accept orders group --begin start" in caught.value.remedy
    assert "`group:`" in caught.value.remedy
    assert caught.value.exit_code == 3
    assert (world.lake.files, world.group.offsets) == ({}, before)


def test_takeover_from_committed_offsets_lands_later_records(world: World) -> None:
    done = accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "restored rows are elsewhere")
    assert [(o.key.tp, o.offset) for o in done.begun] == [(P0, 8), (P1, 8)]
    world.land(CATCH_UP).check()
    assert list_rows(world) == make_rows(8, 12)
    assert commit_landed(world).status is CommitStatus.COMMITTED
    assert list_committed(world) == [12, 12]
    assert is_reconciled(world)
    with pytest.raises(NothingToAccept):
        accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "again")


def test_takeover_from_the_start_lands_all_records_in_kafka(world: World) -> None:
    accept_group(world.feed, world.make_ports(), Begin.START, "the lake is lost")
    world.land(CATCH_UP).check()
    assert list_rows(world) == make_rows(0, 12)
    assert commit_landed(world).status is CommitStatus.COMMITTED
    assert list_committed(world) == [12, 12]
    assert is_reconciled(world)


def test_offsets_of_a_taken_over_group_never_move_back(world: World) -> None:
    """Its offsets stay until landing reaches them again."""
    accept_group(world.feed, world.make_ports(), Begin.START, "the lake is lost")
    ranges = tuple(AskedRange("orders", p, 0, 3) for p in (0, 1))
    world.land(Request(RequestKind.OFFSETS, ranges=ranges)).check()
    done = commit_landed(world)
    assert (done.status, [(m.before, m.after) for m in done.waiting]) == (CommitStatus.UNCHANGED, [(8, 3), (8, 3)])
    assert list_committed(world) == [8, 8]
    world.land(CATCH_UP).check()
    assert commit_landed(world).status is CommitStatus.COMMITTED
    assert list_committed(world) == [12, 12]


def test_commit_after_takeover_writes_own_mark_without_landed_records(world: World) -> None:
    accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "test")
    assert commit_landed(world).status is CommitStatus.COMMITTED
    assert list_committed(world) == [8, 8]
    mark = OffsetNote.parse(world.group.offsets[P0].metadata)
    assert mark is not None
    assert mark.ledger == world.ledger.read().ledger_id


@pytest.fixture
def two(feed: Feed) -> tuple[World, World]:
    """Two lakes that share one group, which the second took over by name."""
    first, second = World(feed), World(feed)
    second.topic, second.group = first.topic, first.group
    write(first, 4)
    first.now = second.now = START + 2 * HOUR
    first.land(CATCH_UP).check()
    commit_landed(first)
    accept_group(feed, second.make_ports(), Begin.COMMITTED, "moved")
    write(first, 2)
    second.land(CATCH_UP).check()
    commit_landed(second)
    return first, second


@pytest.mark.parametrize("moved", list(OnGroupMoved), ids=str)
def test_former_lake_neither_lands_nor_commits_after_takeover(two: tuple[World, World], moved: str) -> None:
    first, _ = two
    before, offsets = dict(first.lake.files), dict(first.group.offsets)
    with pytest.raises(ForeignMarks):
        first.land(CATCH_UP)
    with pytest.raises(ForeignMarks):
        commit_landed(first, moved)
    with pytest.raises(ForeignMarks):
        accept_moved(first.feed, first.make_ports(), "test", adopting=True)
    assert (first.lake.files, first.group.offsets) == (before, offsets)


def test_new_commit_of_the_former_lake_is_detected(two: tuple[World, World]) -> None:
    """Acceptance covers marks up to one entry; later ones show that the other lake is still in use."""
    first, second = two
    write(first, 2)
    accept_group(first.feed, first.make_ports(), Begin.START, "back")
    first.land(CATCH_UP).check()
    commit_landed(first)
    with pytest.raises(ForeignMarks):
        second.land(CATCH_UP)
    with pytest.raises(ForeignMarks):
        commit_landed(second)
    assert list_rows(first) == make_rows(0, 8)


def test_planned_feed_skips_offsets_landed_by_the_other_ledger(two: tuple[World, World]) -> None:
    first, _ = two
    done = accept_group(first.feed, first.make_ports(), Begin.COMMITTED, "the other lake has it")
    assert [(r.key.tp, r.range.start, r.range.end) for r in done.skipped] == [(P0, 4, 6), (P1, 4, 6)]
    assert commit_landed(first).status is CommitStatus.COMMITTED
    assert list_committed(first) == [6, 6]
    assert list_rows(first) == make_rows(0, 4)
    assert is_reconciled(first)


def test_commit_of_another_ledger_at_the_same_offset_is_detected(two: tuple[World, World]) -> None:
    """The offset alone would mean that nothing is to be done."""
    first, second = two
    assert list_committed(first) == [6, 6]
    mark = second.group.offsets[P0].metadata
    for tp in PARTITIONS:
        first.group.offsets[tp] = CommittedOffset(4, metadata=mark)
    with pytest.raises(ForeignMarks):
        commit_landed(first)


def test_manually_moved_offset_identifies_its_ledger(world: World) -> None:
    for tp in PARTITIONS:
        world.group.offsets[tp] = CommittedOffset(5, metadata=by_hand("another", 7))
    with pytest.raises(ForeignMarks, match="entry 7 of ledger another"):
        world.land(CATCH_UP)


@pytest.mark.parametrize("number", ["-5", "1" + "0" * 400, str(BEYOND)])
def test_marks_with_any_entry_number_are_detected_and_accepted(world: World, number: str) -> None:
    for tp in PARTITIONS:
        world.group.offsets[tp] = CommittedOffset(5, metadata=f'{{"sluice":"x","n":{number},"i":"id-1"}}')
    with pytest.raises(ForeignMarks):
        world.land(CATCH_UP)
    accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "test")
    world.land(CATCH_UP).check()
    assert list_rows(world) == make_rows(5, 12)


def test_feed_without_commits_reads_group_offsets_only_at_start(tmp_path: Path, world: World) -> None:
    """Another lake's feed may keep committing for the group: this feed never reads its offsets again."""
    world.feed = make_feed(tmp_path, more="commit: none\n")
    with pytest.raises(ForeignMarks):
        world.land(CATCH_UP)
    accept_group(world.feed, world.make_ports(), Begin.START, "a trial next to production")
    world.land(CATCH_UP).check()
    for tp in PARTITIONS:
        world.group.offsets[tp] = CommittedOffset(9, metadata=Mark("another", 99, "id-1").dump())
    write(world, 1)
    world.land(CATCH_UP).check()
    assert list_rows(world) == make_rows(0, 13)


def test_offset_of_an_earlier_topic_is_refused_as_start(world: World) -> None:
    world.topic.topic_id = "id-2"
    with pytest.raises(ForeignMarks):
        world.land(CATCH_UP)
    with pytest.raises(UsageError, match="it is of topic id id-1, now id-2") as caught:
        accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "test")
    assert "--begin start" in caught.value.remedy
    accept_group(world.feed, world.make_ports(), Begin.START, "a new topic")
    world.land(CATCH_UP).check()
    assert list_rows(world) == make_rows(0, 12)


def test_offset_beyond_the_log_end_is_refused_as_start(world: World) -> None:
    world.group.offsets[P0] = CommittedOffset(50, metadata=world.group.offsets[P0].metadata)
    with pytest.raises(UsageError, match="50: its log ends at 12"):
        accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "test")


def test_offsets_without_a_mark_are_used_as_start(world: World) -> None:
    for tp in PARTITIONS:
        world.group.offsets[tp] = CommittedOffset(5, metadata="written by a consumer")
    world.land(CATCH_UP).check()
    assert list_rows(world) == make_rows(5, 12)


def test_error_reports_the_former_name_of_a_renamed_feed(tmp_path: Path) -> None:
    world = World(make_feed(tmp_path))
    write(world, 4)
    world.now = START + 2 * HOUR
    world.land(CATCH_UP).check()
    commit_landed(world)
    world.feed = make_feed(tmp_path, "sales")
    with pytest.raises(ForeignMarks) as caught:
        world.land(CATCH_UP)
    assert "the marks are those of feed orders in this lake" in caught.value.remedy
    assert re.search(r"add to feeds/sales.yaml:\s+stored_as: orders\n", caught.value.remedy)
    begun, world.feed = world.feed, world.feed.model_copy(update={"stored": "orders"})
    world.land(CATCH_UP).check()
    world.feed = begun
    accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "renamed")
    write(world, 2)
    world.land(CATCH_UP).check()
    both = sorted(world.read_rows([*world.lake.list("data/orders"), *world.lake.list("data/sales")]))
    assert both == make_rows(0, 6), "each row once, in the two folders together"


def test_two_feeds_of_one_lake_share_a_group_for_different_topics(world: World) -> None:
    """Marks of partitions that the feed does not read are ignored."""
    world.group.offsets.clear()
    mine = CommittedOffset(3, metadata=Mark("other feed", 5, "id-9").dump())
    world.group.offsets[P0._replace(topic="payments")] = mine
    world.land(CATCH_UP).check()
    assert commit_landed(world).status is CommitStatus.COMMITTED
    assert world.group.offsets[P0._replace(topic="payments")] == mine


def test_checkpoint_keeps_the_accepted_takeover(world: World) -> None:
    accept_group(world.feed, world.make_ports(), Begin.COMMITTED, "test")
    state = world.ledger.read()
    assert state.taken
    assert checkpoint.load(checkpoint.dump(state)) == state


def test_offset_of_another_ledger_is_classified_as_foreign(world: World) -> None:
    spot = replace(moving.make_spot(), commit=world.group.offsets[P0])
    assert stands(Ledger(world.lake, "orders", lambda: 0).read(), spot) is Stands.FOREIGN


def test_manual_move_of_offsets_of_another_ledger_is_refused() -> None:
    here = moving.World()
    here.group.offsets[moving.TP] = CommittedOffset(50, metadata=Mark("another", 3, "t").dump())
    with pytest.raises(ForeignMarks):
        here.move(20)
    assert here.committed == 50
