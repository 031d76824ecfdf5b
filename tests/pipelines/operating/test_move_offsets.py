"""Moves of committed offsets by hand: targets, refusals, and the ledger entry that precedes each change in Kafka."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.committing.commit import CommitSettings, CommitStatus, commit
from sluice.pipelines.errors import CommitFenced, GroupHeld, Refused, UsageError
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import KeyRange, LossEntry, MovedEntry, OriginEntry, OriginItem
from sluice.pipelines.ledger.marks import Mark, OffsetNote, by_hand
from sluice.pipelines.model.kafka import CommittedOffset, Key, OffsetAtTime, Range, TopicPartition
from sluice.pipelines.operating.move_offsets import (
    Aim,
    Done,
    OffsetTarget,
    OwnedGroup,
    Spot,
    Stands,
    dump_offsets,
    expected_offset,
    move,
    parse_offsets,
    resolve,
    spots_concerned,
    stands,
)
from sluice.testing.cluster import partition
from sluice.testing.group import MemoryGroup, MemoryGroups, member
from sluice.testing.lake import MemoryLake

GROUP = "sluice-orders"
STATE = partition(high_watermark=120, last_stable_offset=100, log_start=10)
TP = STATE.tp
KEY = Key(TP.topic, TP.partition, STATE.topic_id)
NEW = partition(number=1)
SETTINGS = CommitSettings(CommitMode.TRANSACTIONAL, "t", OnGroupMoved.REFUSE)
LATER = 1_800_000_000_000


def make_spot(committed: int | None = 50, frontier: int | None = 60, **kafka: object) -> Spot:
    at = None if committed is None else CommittedOffset(committed)
    return Spot(partition(**({"high_watermark": 120, "log_start": 10} | kafka)), KEY, at, frontier)  # type: ignore[arg-type]


def to(aim: Aim, number: int = 0, *spots: Spot, at_time: OffsetAtTime | None = None) -> list[tuple[int, str]]:
    moves = resolve(OffsetTarget(aim, number), spots or (make_spot(),), {TP: at_time}, LATER)
    return [(m.after, m.note) for m in moves]


# -- targets


def test_each_target_resolves_to_its_offset() -> None:
    assert to(Aim.EARLIEST) == [(10, "")]
    assert to(Aim.LATEST) == [(100, "")]
    assert to(Aim.OFFSET, 77) == [(77, "")]
    assert to(Aim.SHIFT, -5) == [(45, "")]
    assert to(Aim.SHIFT, 5) == [(55, "")]
    assert to(Aim.FRONTIER) == [(60, "")]
    assert to(Aim.TIME, 7, at_time=OffsetAtTime(33, 0)) == [(33, "stamped 1970-01-01T00:00:00Z")]
    assert to(Aim.TIME, 7) == [(100, "no record since: the end")]


def test_record_with_future_timestamp_is_noted() -> None:
    ((_, note),) = to(Aim.TIME, 7, at_time=OffsetAtTime(33, LATER + 1))
    assert note.endswith("that is in the future")


@given(st.integers(-(1 << 70), 1 << 70))
def test_any_offset_is_clamped_to_the_log_and_noted(number: int) -> None:
    for aim in (Aim.OFFSET, Aim.SHIFT):
        ((after, note),) = to(aim, number)
        wanted = number + (50 if aim is Aim.SHIFT else 0)
        assert after == min(max(wanted, 10), 120) or (after == wanted == 60)
        assert bool(note) == (after != wanted)


def test_frontier_below_the_log_start_is_kept() -> None:
    assert to(Aim.FRONTIER, 0, make_spot(frontier=4)) == [(4, "")]


def test_partitions_without_a_target_offset_are_skipped_or_refused() -> None:
    planned, bare = make_spot(), make_spot(committed=None, frontier=None)
    for aim in (Aim.SHIFT, Aim.FRONTIER, Aim.FILE):
        target = OffsetTarget(aim, offsets={})
        with pytest.raises(UsageError):
            spots_concerned(target, [bare], all_of_them=False)
        if aim is not Aim.FILE:
            assert spots_concerned(target, [planned, bare], all_of_them=False) == (planned,)
            with pytest.raises(UsageError):
                spots_concerned(target, [planned, bare], all_of_them=True)
    assert spots_concerned(OffsetTarget(Aim.EARLIEST), [planned, bare], all_of_them=True) == (planned, bare)


# -- files

KNOWN = [TopicPartition("orders", n) for n in range(3)] + [TopicPartition("a.b-c", 0)]


@given(st.dictionaries(st.sampled_from(KNOWN), st.integers(0, 2**63 - 1), min_size=1))
def test_offset_file_round_trips(offsets: dict[TopicPartition, int]) -> None:
    text = "\n".join(dump_offsets(offsets)).encode()
    assert parse_offsets(text, "f", GROUP, KNOWN) == offsets
    quoted = "\r\n".join(f'{GROUP},"{tp.topic}",{tp.partition},{o}' for tp, o in offsets.items()) + "\r\n\r\n"
    assert parse_offsets(b"\xef\xbb\xbf" + quoted.encode(), "f", GROUP, KNOWN) == offsets


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no offsets"),
        (b"\n\n", "holds no offsets"),
        (b"orders,0,5\norders,0,6\n", "line 2: names orders:0 a second time"),
        (b"orders,0,5\norders,9,6\n", "line 2: names orders:9, which is not there"),
        (b"orders,0\n", "line 1: has 2 columns"),
        (b"orders;0;5\n", "line 1: has 1 columns"),
        (b"other,orders,0,5\n", f"line 1: is about another group than {GROUP}"),
        (b"topic,partition,offset\n", "line 1: does not end with a partition and an offset"),
        (b"orders,0,-1\n", "line 1: does not end with"),
        (b"orders,0,1e3\n", "line 1: does not end with"),
        ("orders,0,\u0661\n".encode(), "line 1: does not end with"),
        (b"orders,0,9223372036854775808\n", "line 1: has a number that Kafka has no room for"),
        (b"orders,4294967296,1\n", "line 1: has a number that Kafka has no room for"),
        (b"../etc,0,1\n", "line 1: does not begin with a topic"),
        (b"\n\x1b[2J,0,1\n", "line 2: does not begin with a topic"),
        (b"orders,0,5\n\xff,0,1\n", "line 2: is not UTF-8"),
        (b'"orders,0,5\n', "is not CSV"),
        (b'orders,0,5\n"a"b,0,1\n', "line 2: is not CSV"),
        (b"o" * 200_000 + b",0,1", "line 1: is not CSV"),
    ],
)
def test_invalid_offset_file_is_reported_with_line(data: bytes, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_offsets(data, "f.csv", GROUP, KNOWN)
    assert message in error.value.message
    assert "TOPIC,PARTITION,OFFSET" in error.value.remedy


@given(st.binary(max_size=60) | st.text('orders,0123456789"\r\n\x00', max_size=60).map(str.encode))
def test_arbitrary_bytes_parse_to_known_partitions_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        assert set(parse_offsets(data, "f", GROUP, KNOWN)) <= set(KNOWN)


# -- metadata of offsets


def test_only_commit_marks_parse_as_marks_and_manual_moves_are_flagged() -> None:
    hand = by_hand("abc", 7)
    assert OffsetNote.parse(hand) == OffsetNote("abc", 7, by_hand=True)
    assert OffsetNote.parse(Mark("abc", 7, "t").dump()) == OffsetNote("abc", 7, by_hand=False)
    assert Mark.parse(hand) is None


@given(st.text(max_size=30) | st.sampled_from(["{}", "[1]", '{"sluice": "a", "n": 1e999, "i": ""}', '{"moved": {}}']))
def test_arbitrary_offset_metadata_is_parsed_or_ignored(text: str) -> None:
    parsed = OffsetNote.parse(text)
    assert parsed is None or text.startswith("{")


# -- moves


@dataclass
class World:
    """A feed with one partition accounted and committed up to 60, and a second one that is not planned yet."""

    lake: MemoryLake = field(default_factory=MemoryLake)
    group: MemoryGroup = field(default_factory=MemoryGroup)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.lake, "orders", lambda: 1000)
        self.groups = MemoryGroups(GROUP, self.group)
        origin = OriginItem(key=KEY, offset=0, committed=None, why="test")
        self.ledger.append(lambda s: OriginEntry(items=(origin,)))
        self.account(0, 60)
        commit(self.ledger, self.group, SETTINGS)

    def account(self, start: int, end: int) -> None:
        entry = LossEntry(ranges=(KeyRange(key=KEY, range=Range(start, end)),), reason="test")
        self.ledger.append(lambda s: entry)

    def make_spot(self) -> Spot:
        state = self.ledger.read()
        return Spot(STATE, KEY, self.group.offsets.get(TP), state.frontier(KEY))

    def move(self, offset: int, *more: Spot, ledger: bool = True) -> Done:
        target = OffsetTarget(Aim.OFFSET, offset)
        moves = resolve(target, [self.make_spot(), *more], {}, 0)
        return move(OwnedGroup(GROUP, self.groups, "orders", self.ledger if ledger else None), moves, target, "because")

    def get_standing(self) -> Stands:
        return stands(self.ledger.read(), self.make_spot())

    @property
    def committed(self) -> int:
        return self.group.offsets[TP].offset

    def commit(self) -> CommitStatus:
        return commit(self.ledger, self.group, SETTINGS).status


def test_move_is_recorded_first_and_next_commit_continues_to_frontier() -> None:
    world = World()
    number = world.ledger.read().number

    def check_note() -> None:
        entry = world.ledger.entry(number)
        assert isinstance(entry, MovedEntry)
        assert (entry.reason, [o.offset for o in entry.offsets]) == ("because", [20])
        assert world.committed == 60

    world.groups.before_put = check_note
    done = world.move(20)
    assert (done.entry, done.held[TP].offset, world.committed) == (number, 20, 20)
    assert OffsetNote.parse(world.group.offsets[TP].metadata) == OffsetNote(
        world.ledger.read().ledger_id, number, by_hand=True
    )
    assert world.get_standing() is Stands.BY_HAND
    assert (world.commit(), world.committed, world.get_standing()) == (CommitStatus.COMMITTED, 60, Stands.AT)


def test_move_beyond_the_frontier_is_refused_and_writes_nothing() -> None:
    world = World()
    before = dict(world.lake.files)
    with pytest.raises(Refused) as error:
        world.move(90)
    assert "orders:0 [60, 90)" in error.value.message
    assert error.value.remedy == "land them first: sluice run orders"
    assert (world.lake.files, world.committed) == (before, 60)


def test_move_is_checked_against_the_current_frontier_of_the_ledger() -> None:
    world = World()
    target = OffsetTarget(Aim.OFFSET, 80)
    stale = Spot(STATE, KEY, None, frontier=100)
    moves = resolve(target, [stale], {}, 0)
    with pytest.raises(Refused):
        move(OwnedGroup(GROUP, world.groups, "orders", world.ledger), moves, target, "")
    assert world.committed == 60


def test_offsets_of_group_with_members_are_not_moved() -> None:
    world = World()
    world.groups.members[GROUP] = (member("loader", TP),)
    before = dict(world.lake.files)
    with pytest.raises(GroupHeld, match=r"loader at 10\.0\.0\.7"):
        world.move(20)
    assert (world.lake.files, world.committed) == (before, 60)


def test_member_that_joins_at_the_last_moment_keeps_its_offsets() -> None:
    world = World()
    world.groups.before_put = lambda: world.groups.members.update({GROUP: (member(),)})
    with pytest.raises(GroupHeld):
        world.move(20)
    assert (world.committed, world.get_standing()) == (60, Stands.AT)


def test_offsets_are_read_back_after_a_lost_response() -> None:
    world = World()
    world.groups.lose_answer = True
    assert world.move(20).held[TP].offset == 20


def test_concurrent_commit_is_detected() -> None:
    world = World()
    world.groups.after_put = lambda: world.group.offsets.update({TP: CommittedOffset(33)})
    with pytest.raises(CommitFenced, match="tried to write 20, the group now holds 33"):
        world.move(20)


def test_move_is_still_recognized_after_commit_between_entry_and_move() -> None:
    world = World()

    def commit_more() -> None:
        world.account(60, 90)
        world.commit()

    world.groups.before_put = commit_more
    done = world.move(20)
    assert done.entry == world.ledger.read().number - 1
    assert (world.committed, world.get_standing()) == (20, Stands.BY_HAND)
    assert (world.commit(), world.committed) == (CommitStatus.COMMITTED, 90)


def test_unplanned_partition_is_moved_and_not_recorded() -> None:
    world = World()
    new = Spot(NEW, Key("orders", 1, NEW.topic_id), None)
    done = world.move(20, new)
    entry = world.ledger.entry(done.entry or 0)
    assert isinstance(entry, MovedEntry)
    assert [o.key.partition for o in entry.offsets] == [0]
    assert world.group.offsets[new.tp].offset == 20
    assert stands(world.ledger.read(), Spot(NEW, new.key, world.group.offsets[new.tp])) is Stands.UNPLANNED


def test_move_of_group_without_feed_is_not_recorded() -> None:
    world = World()
    number = world.ledger.read().number
    assert world.move(20, ledger=False) == Done(None, {TP: CommittedOffset(20)})
    assert world.ledger.read().number == number


def test_committed_offset_is_classified() -> None:
    world = World()
    state = world.ledger.read()
    assert (world.get_standing(), expected_offset(state, KEY)) == (Stands.AT, 60)
    world.group.offsets[TP] = CommittedOffset(33)
    assert world.get_standing() is Stands.MOVED
    del world.group.offsets[TP]
    assert world.get_standing() is Stands.GONE
    world.group.offsets[TP] = CommittedOffset(33, metadata=Mark(state.ledger_id, 99, KEY.incarnation).dump())
    assert world.get_standing() is Stands.STALE
    again = Spot(partition(topic_id="another"), Key("orders", 0, "another"), None)
    assert stands(state, again) is Stands.ANOTHER
    fresh = World()
    fresh.account(60, 70)
    assert fresh.get_standing() is Stands.BEHIND
