"""Dead letters over ports in memory: each quarantined record is sent in at most one transaction, pending ones go with
the next commit, and the contents of letters. tests/integration repeats this on a real Kafka."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.committing.commit import CommitResult, CommitSettings, CommitStatus, commit
from sluice.pipelines.errors import (
    CommitFenced,
    EntriesLost,
    FeedError,
    GroupHeld,
    GroupMoved,
    LakeUnavailable,
    ProofFailed,
    UnknownTopic,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import (
    AbandonEntry,
    KeyRange,
    OriginEntry,
    OriginItem,
    PlanEntry,
    PublishEntry,
    RetireEntry,
)
from sluice.pipelines.ledger.marks import Mark
from sluice.pipelines.model.kafka import CommittedOffset, Isolation, Key, Range
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.pipelines.ports import DeadLetter, Member
from sluice.pipelines.quarantine.dead_letters import Outlet, list_pending_letters
from sluice.pipelines.records.rows.row_format import QUARANTINED
from sluice.testing.engine import owner
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake
from tests.examples import scale_examples

KEYS = Key("orders", 0, "id-1"), Key("orders", 5, "id-1")
KEY = KEYS[0]
DLQ = "orders.dlq"
STAMP = 1_700_000_000_000


class Crash(BaseException):
    """The process dies here."""


def make_row(source: Key, offset: int, **changes: Any) -> dict[str, Any]:
    plain = {
        "key": b"k%d" % offset,
        "value": b"v%d" % offset,
        "topic": source.topic,
        "partition": source.partition,
        "offset": offset,
        "timestamp": STAMP + offset,
        "timestampType": 0,
        "headers": [{"key": "trace", "value": b"t%d" % offset}],
        "stage": "contract",
        "reason": "not_in_set",
        "expectation": "expect_column_values_to_be_in_set",
        "field": "currency",
        "detail": "not one of 3 values",
        "byte": None,
        "batch": 7,
        "contract": "abc123",
    }
    return plain | changes


@dataclass
class World:
    """A ledger of batches with the given quarantined offsets, without Kafka and without files of landed rows."""

    ledger: Ledger = field(init=False)
    lake: MemoryLake = field(default_factory=MemoryLake)
    group: MemoryGroup = field(default_factory=MemoryGroup)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.lake, "orders", lambda: 1, "run", "cluster-1")
        self.group.topics[DLQ] = 4
        items = tuple(OriginItem(key=k, offset=100, committed=None, why="test") for k in KEYS)
        self.ledger.append(lambda s: OriginEntry(items=items))

    # -- batches

    def land(self, start: int, end: int, bad: Iterable[int] = (), key: Key = KEY, **how: Any) -> int:
        """Plan and publish one offset range, quarantining the offsets of `bad`; return the number of its publish
        entry.
        """
        return self.publish(self.plan(start, end, key, **how), bad, **how)

    def plan(
        self, start: int, end: int, key: Key = KEY, kind: str = "catch-up", instead: Iterable[Part] = (), **_: Any
    ) -> tuple[int, OffsetRange]:
        s = OffsetRange(key.topic, key.partition, key.incarnation, start, end)
        paths = tuple(p.path for p in instead)
        request = Request(RequestKind(kind), replace=kind == "offsets")
        plan = Plan("orders", "cluster-1", request, Isolation.READ_COMMITTED, (Task(0, 1, (s,)),), paths)
        done = self.ledger.append(lambda state: PlanEntry(plan=plan, hash=plan.hash, owner=owner()))
        assert done
        return done.number, s

    def publish(self, planned: tuple[int, OffsetRange], bad: Iterable[int] = (), rows: Any = None, **_: Any) -> int:
        batch, s = planned
        rows = [make_row(s.key, o) for o in sorted(bad)] if rows is None else rows
        parts = (self.write_part(batch, s, rows),) if rows else ()
        counts = Counts(landed=s.span - len(rows), quarantined=len(rows))
        receipt = Receipt(s, s.end, counts, parts, "a")
        done = self.ledger.append(lambda state: PublishEntry(batch=batch, token="token-1", receipts=(receipt,)))
        assert done
        return done.number

    def write_part(self, batch: int, s: OffsetRange, rows: list[dict[str, Any]]) -> Part:
        name = f"{s.topic}-{s.partition}-{s.start}-{s.end}-b{batch}.parquet"
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, QUARANTINED), file, row_group_size=2)
        path = f"quarantine/orders/{name}"
        self.lake.files[path] = file.getvalue()
        digest = sha256(file.getvalue()).hexdigest()
        return Part(name, PartKind.QUARANTINED, f"staging/{name}", path, len(rows), len(file.getvalue()), digest)

    def list_parts(self) -> list[Part]:
        """Returns the live quarantined parts."""
        state = self.ledger.read()
        entries = [(n, e) for n, e in self.ledger.entries() if isinstance(e, PublishEntry)]
        return [p for n, e in entries for r in state.receipts(n, e) for p in r.parts]

    def list_quarantined_offsets(self) -> set[int]:
        """Returns the offsets of KEY that are in quarantine now."""
        tables = (pq.read_table(io.BytesIO(self.lake.files[p.path])).to_pylist() for p in self.list_parts())
        return {r["offset"] for t in tables for r in t if r["partition"] == KEY.partition}

    def rewrite(self, kind: str, keep: Callable[[int], bool] = lambda offset: True) -> None:
        """Rewrite all parts of KEY as compaction does (into one part) or replay does (some records land)."""
        state = self.ledger.read()
        landed = state.landed.get(KEY, ())
        if not landed:
            return
        old = [p for p in self.list_parts() if f"-{KEY.partition}-" in p.name]
        bad = {o for o in self.list_quarantined_offsets() if keep(o)}
        self.land(landed[0].start, landed[-1].end, bad, kind=kind, instead=old)
        for part in old:
            del self.lake.files[part.path]

    # -- commits

    def commit(self, moved: str = "refuse") -> CommitResult:
        how = CommitSettings(CommitMode.TRANSACTIONAL, "tid", OnGroupMoved(moved))
        # As another process, which knows only the files it has read.
        ledger = Ledger(self.lake, "orders", lambda: 1, "run", "cluster-1")
        return commit(ledger, self.group, how, Outlet("orders", DLQ, self.lake))

    @property
    def sent(self) -> list[str]:
        return [letter.source for _, letter in self.group.letters]

    def list_sent_offsets(self) -> list[int]:
        return [int(source.rpartition(":")[2]) for source in self.sent]


# -- letters of a commit


def test_letters_are_sent_once_with_the_commit() -> None:
    world = World()
    world.land(100, 120, [103, 117])
    world.land(120, 140, [130])
    result = world.commit()
    assert (result.status, result.dead_letters, result.dead_letters_to) == (CommitStatus.COMMITTED, 3, DLQ)
    assert world.sent == ["orders:0:103", "orders:0:117", "orders:0:130"]
    assert {topic for topic, _ in world.group.letters} == {DLQ}
    assert world.commit().status is CommitStatus.UNCHANGED
    world.land(140, 150, [149])
    assert world.commit().dead_letters == 1
    assert world.list_sent_offsets() == [103, 117, 130, 149]


def test_no_letters_are_sent_without_quarantined_records() -> None:
    world = World()
    world.land(100, 120)
    result = world.commit()
    assert (result.status, result.dead_letters, result.dead_letters_to, world.sent) == (
        CommitStatus.COMMITTED,
        0,
        "",
        [],
    )


def test_letters_are_sent_regardless_of_the_frontier() -> None:
    """Published records have letters beyond a hole and below the origin too."""
    world = World()
    world.land(100, 110, [105])
    world.commit()
    world.land(120, 130, [125])
    joins = world.group.joins
    beyond = world.commit()
    assert (beyond.status, beyond.dead_letters, world.group.joins) == (CommitStatus.COMMITTED, 1, joins + 1)
    world.land(0, 50, [7], kind="window")
    below = world.commit()
    assert below.dead_letters == 1
    assert [(m.before, m.after) for m in below.offsets if m.key == KEY] == [(110, 110)]
    assert world.list_sent_offsets() == [105, 125, 7]
    world.land(110, 120, [111])
    world.commit()
    assert world.list_sent_offsets() == [105, 125, 7, 111]
    assert world.group.offsets[KEY.tp].offset == 130
    joins = world.group.joins
    assert (world.commit().status, world.group.joins) == (CommitStatus.UNCHANGED, joins)


def test_every_partition_has_the_mark_of_the_sent_letters() -> None:
    """A partition whose offset another client moves loses no mark."""
    world = World()
    world.land(100, 110, [105])
    world.land(100, 110, key=KEYS[1])
    world.commit()
    world.land(110, 120, [115])
    result = world.commit()
    marks = [Mark.parse(world.group.offsets[k.tp].metadata) for k in KEYS]
    assert [m.number for m in marks if m] == [result.mark] * 2


def test_void_and_abandoned_batches_send_no_letters() -> None:
    world = World()
    planned = world.plan(100, 110)
    world.ledger.append(lambda s: AbandonEntry(batch=planned[0], reason="test"))
    world.publish(planned, [105])
    world.plan(100, 110)
    assert (world.commit().dead_letters, world.sent) == (0, [])


def test_records_committed_before_letters_were_enabled_are_not_sent() -> None:
    world = World()
    world.land(100, 110, [105])
    commit(world.ledger, world.group, CommitSettings(CommitMode.TRANSACTIONAL, "tid", OnGroupMoved.REFUSE))
    assert world.commit().status is CommitStatus.UNCHANGED
    world.land(110, 120, [115])
    world.commit()
    assert world.list_sent_offsets() == [115]


def test_each_publish_entry_is_read_once_and_plans_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed publications are read only if their offsets landed again, and then once for all of them."""
    world = World()
    committed = world.land(100, 110, [105])
    mark = world.commit().mark or 0
    newer = [world.land(110, 120, [115]), world.land(120, 130)]
    newer += [world.land(100 + at, 105 + at, [105], kind="offsets") for at in (0, 5)]
    state, read = world.ledger.read(), list[int]()
    entry = world.ledger.entry
    monkeypatch.setattr(world.ledger, "entry", lambda number: read.append(number) or entry(number))  # type: ignore[func-returns-value]
    pending = list_pending_letters(world.ledger, state, mark)
    assert sorted(read) == [committed, *newer]
    assert [(s.offset_range.start, s.ranges) for s in pending] == [(110, (Range(110, 120),))]


# -- parts that are written again


def test_compaction_keeps_pending_letters_and_adds_no_letters() -> None:
    world = World()
    world.land(100, 110, [105])
    world.commit()
    world.land(110, 120, [115])
    world.rewrite("compact")
    world.commit()
    assert world.list_sent_offsets() == [105, 115]
    world.rewrite("compact")
    assert world.commit().status is CommitStatus.UNCHANGED


def test_records_replayed_before_the_commit_need_no_letter() -> None:
    world = World()
    world.land(100, 110, [103, 105])
    world.rewrite("replay", keep=lambda offset: offset == 105)
    world.commit()
    assert world.list_sent_offsets() == [105]
    world.rewrite("replay", keep=lambda offset: True)
    world.commit()
    assert world.list_sent_offsets() == [105]


def test_ranges_relanded_before_the_commit_send_letters_of_newest_parts() -> None:
    world = World()
    world.land(100, 110, [103, 105])
    world.land(100, 110, [105, 106], kind="offsets", instead=world.list_parts())
    world.commit()
    assert world.list_sent_offsets() == [105, 106]


def test_ranges_relanded_after_the_commit_send_no_letter_twice() -> None:
    world = World()
    world.land(100, 110, [103])
    world.land(110, 120)
    world.commit()
    # No letter of 115's offset range was sent; one of 104's range was, and its offset is unknown.
    world.land(100, 120, [103, 104, 115], kind="offsets", instead=world.list_parts())
    world.commit()
    assert world.list_sent_offsets() == [103, 115]
    world.land(100, 120, [103, 104, 115], kind="offsets", instead=world.list_parts())
    world.commit()
    assert world.list_sent_offsets() == [103, 115]


def test_retired_records_are_not_sent() -> None:
    world = World()
    world.land(100, 110, [103])
    (part,) = world.list_parts()
    expired = KeyRange(key=KEY, range=Range(100, 110))
    world.ledger.append(lambda s: RetireEntry(before=1, ranges=(expired,), parts=(part.path,), reason="test"))
    del world.lake.files[part.path]
    assert world.commit().dead_letters == 0


# -- refusals and crashes


def make_world_with_pending_letters() -> World:
    """Returns a world that has committed and has two letters pending."""
    world = World()
    world.land(100, 110, [105])
    world.commit()
    world.land(110, 120, [112, 118])
    return world


def test_missing_letter_topic_refuses_the_commit_before_any_write() -> None:
    world = make_world_with_pending_letters()
    del world.group.topics[DLQ]
    before = world.ledger.read().number, dict(world.group.offsets)
    with pytest.raises(UnknownTopic):
        world.commit()
    assert (world.ledger.read().number, world.group.offsets, world.list_sent_offsets()) == (*before, [105])
    world.group.topics[DLQ] = 1
    world.commit()
    assert world.list_sent_offsets() == [105, 112, 118]


def test_refused_commit_sends_no_letters_and_next_commit_sends_all() -> None:
    world = make_world_with_pending_letters()
    world.group.others.append(Member("m", "app", "host"))
    with pytest.raises(GroupHeld):
        world.commit()
    world.group.others.clear()
    mine = world.group.offsets[KEY.tp]
    world.group.offsets[KEY.tp] = CommittedOffset(3)
    with pytest.raises(GroupMoved):
        world.commit()
    assert world.list_sent_offsets() == [105]
    world.group.offsets[KEY.tp] = mine
    world.commit()
    assert world.list_sent_offsets() == [105, 112, 118]


def test_overwriting_moved_offsets_sends_no_letter_twice() -> None:
    world = make_world_with_pending_letters()
    world.group.offsets = {k.tp: CommittedOffset(3) for k in KEYS}
    world.commit(moved="overwrite")
    assert world.list_sent_offsets() == [105, 112, 118]


@pytest.mark.parametrize("lose", ["before", "after"])
def test_lost_commit_response_is_resolved_by_reading_back(lose: str) -> None:
    world = make_world_with_pending_letters()
    world.group.lose = lose
    if lose == "before":
        with pytest.raises(CommitFenced):
            world.commit()
    else:
        assert world.commit().dead_letters == 2
    world.commit()
    assert world.list_sent_offsets() == [105, 112, 118]


def crash_at(world: World, step: str) -> None:
    """Crash at the step, once."""

    def crash(*_: Any) -> None:
        heal(world)
        raise Crash

    number = world.ledger.read().number
    at = {"intent": f"{number:020d}.json", "record": f"{number + 1:020d}.json"}.get(step, "none")
    match step:
        case "begin":
            world.group.on_commit = crash
        case "letter":
            world.group.on_letter = crash
        case "end":
            world.group.on_end = crash
        case _:
            world.lake.before["put_if_absent"] = lambda path: crash() if path.endswith(at) else None


def heal(world: World) -> None:
    world.group.on_commit = world.group.on_end = lambda: None
    world.group.on_letter = lambda letter: None
    world.lake.before.clear()


STEPS = ["intent", "begin", "letter", "end", "record"]


@pytest.mark.parametrize("again", [None, *STEPS])
@pytest.mark.parametrize("step", STEPS)
def test_letters_are_sent_once_after_one_or_two_crashes_at_any_step(step: str, again: str | None) -> None:
    world = make_world_with_pending_letters()
    crash_at(world, step)
    with pytest.raises(Crash):
        world.commit()
    took = step in ("end", "record")
    assert world.list_sent_offsets() == ([105, 112, 118] if took else [105])
    assert (world.group.offsets[KEY.tp].offset == 120) is took
    world.land(120, 130, [125])
    if again:
        crash_at(world, again)
        with pytest.raises(Crash):
            world.commit()
    world.commit()
    assert world.list_sent_offsets() == [105, 112, 118, 125]
    assert world.commit().status is CommitStatus.UNCHANGED


def test_letters_sent_without_moved_offsets_are_not_resent_after_crash() -> None:
    """No offset moves and no commit entry records the letters: only the mark does."""
    world = World()
    world.land(100, 110)
    world.commit()
    world.land(0, 50, [7], kind="window")
    crash_at(world, "end")
    with pytest.raises(Crash):
        world.commit()
    assert world.commit().status is CommitStatus.UNCHANGED
    assert world.list_sent_offsets() == [7]
    joins = world.group.joins
    assert (world.commit().status, world.group.joins) == (CommitStatus.UNCHANGED, joins)
    world.group.offsets.clear()
    world.commit()
    assert world.list_sent_offsets() == [7], "the ledger has recorded the letter"


def test_records_published_during_a_commit_are_sent_by_the_next_commit() -> None:
    world = make_world_with_pending_letters()
    world.group.on_commit = lambda: (heal(world), world.land(120, 130, [125]))[0]
    assert world.commit().dead_letters == 2
    assert world.commit().dead_letters == 1
    assert world.list_sent_offsets() == [105, 112, 118, 125]


def test_commit_is_fenced_when_another_takes_over_in_mid_transaction() -> None:
    world = make_world_with_pending_letters()

    def commit_first(letter: DeadLetter) -> None:
        heal(world)
        world.commit()

    world.group.on_letter = commit_first
    with pytest.raises(CommitFenced):
        world.commit()
    assert world.list_sent_offsets() == [105, 112, 118]


def test_mark_above_the_ledger_is_refused_even_at_the_frontier() -> None:
    world = make_world_with_pending_letters()
    mark = Mark(world.ledger.read().ledger_id, 999, KEY.incarnation).dump()
    world.group.offsets[KEY.tp] = CommittedOffset(120, metadata=mark)
    with pytest.raises(EntriesLost, match="lost entries"):
        world.commit()


# -- the lake


def test_part_that_is_not_yet_visible_is_read_from_staging() -> None:
    world = make_world_with_pending_letters()
    (part,) = (p for p in world.list_parts() if "110-120" in p.name)
    world.lake.files[part.staged] = world.lake.files.pop(part.path)
    world.commit()
    assert world.list_sent_offsets() == [105, 112, 118]


def test_missing_or_different_part_stops_the_commit() -> None:
    world = make_world_with_pending_letters()
    (part,) = (p for p in world.list_parts() if "110-120" in p.name)
    data = world.lake.files.pop(part.path)
    with pytest.raises(LakeUnavailable, match="was removed"):
        world.commit()
    for wrong in (world.lake.files[world.list_parts()[0].path], data[:-7], b"", b"no parquet at all"):
        world.lake.files[part.path] = wrong
        with pytest.raises(ProofFailed, match="not the file"):
            world.commit()
    assert world.list_sent_offsets() == [105]
    world.lake.files[part.path] = data
    world.commit()
    assert world.list_sent_offsets() == [105, 112, 118]


@pytest.mark.slow
def test_large_quarantine_is_sent_in_bounded_memory() -> None:
    world = World()
    rows = [make_row(KEY, 100 + n, value=b"v" * 10_000) for n in range(3000)]
    world.land(100, 3100, rows=rows)
    pa_before, peak = pa.total_allocated_bytes(), 0

    def measure_memory(letter: DeadLetter) -> None:
        nonlocal peak
        peak = max(peak, pa.total_allocated_bytes() - pa_before)

    world.group.on_letter = measure_memory
    assert world.commit().dead_letters == 3000
    assert peak < 8 << 20


# -- contents of letters


def read_headers(letter: DeadLetter) -> dict[str, str]:
    return {name: (value or b"").decode() for name, value in letter.headers if name.startswith("sluice.")}


def test_letter_has_the_original_record_and_the_quarantine_reason() -> None:
    world = World()
    world.land(100, 110, [105])
    world.commit()
    ((topic, letter),) = world.group.letters
    assert (topic, letter.partition, letter.timestamp) == (DLQ, 0, STAMP + 105)
    assert (letter.key, letter.value, letter.headers[0]) == (b"k105", b"v105", ("trace", b"t105"))
    assert read_headers(letter) == {
        "sluice.topic": "orders",
        "sluice.partition": "0",
        "sluice.offset": "105",
        "sluice.timestamp": str(STAMP + 105),
        "sluice.stage": "contract",
        "sluice.reason": "not_in_set",
        "sluice.field": "currency",
        "sluice.expectation": "expect_column_values_to_be_in_set",
        "sluice.detail": "not one of 3 values",
        "sluice.batch": "7",
        "sluice.feed": "orders",
        "sluice.contract": "abc123",
    }


def test_empty_record_and_forged_sluice_headers_are_sent_unchanged() -> None:
    world = World()
    nothing = {"key": None, "value": None, "timestamp": None, "headers": None, "field": None, "contract": None}
    forged = [
        {"key": "sluice.offset", "value": b"1"},
        {"key": "sluice.offset", "value": None},
        {"key": "é", "value": b"\xff"},
    ]
    far = 1 << 62  # no calendar reaches there
    rows = [
        make_row(KEY, 100, **nothing),
        make_row(KEY, 101, headers=forged, timestamp=far),
        make_row(KEY, 102, headers=[]),
    ]
    world.land(100, 110, rows=rows)
    world.commit()
    first, second, third = (letter for _, letter in world.group.letters)
    assert (first.key, first.value, first.timestamp) == (None, None, -1)
    assert (
        read_headers(first)["sluice.field"],
        read_headers(first)["sluice.timestamp"],
        read_headers(first)["sluice.contract"],
    ) == (
        "",
        "",
        "",
    )
    assert second.headers[:3] == (("sluice.offset", b"1"), ("sluice.offset", None), ("é", b"\xff"))
    assert (read_headers(second)["sluice.offset"], read_headers(second)["sluice.timestamp"]) == ("101", str(far))
    assert [name for name, _ in third.headers] == list(read_headers(third))


def test_letter_partition_is_record_partition_modulo_partition_count() -> None:
    world = World()
    for partitions, expected in ((4, [0, 1]), (1, [0, 0]), (6, [0, 5])):
        world.group.topics[DLQ], world.group.letters = partitions, []
        end = world.ledger.read().frontier(KEY) + 10
        for key in KEYS:
            world.land(end - 10, end, [end - 1], key=key)
        world.commit()
        assert [letter.partition for _, letter in world.group.letters] == expected


def test_letters_of_files_by_record_time_are_sent_in_log_order() -> None:
    world = World()
    batch, s = world.plan(100, 110)
    s = replace(s, by_time=3_600_000)
    apart = [[make_row(KEY, o) for o in offsets] for offsets in ((101, 105, 109), (100, 104), (102,))]
    parts = tuple(world.write_part(batch + n, s, rows) for n, rows in enumerate(apart))
    receipt = Receipt(s, s.end, Counts(landed=4, quarantined=6), parts, "a")
    world.ledger.append(lambda state: PublishEntry(batch=batch, token="token-1", receipts=(receipt,)))
    world.commit()
    assert world.list_sent_offsets() == [100, 101, 102, 104, 105, 109]


# -- random steps

STEP = st.one_of(
    st.tuples(st.just("land"), st.integers(1, 5), st.frozensets(st.integers(0, 4))),
    st.tuples(st.just("ahead"), st.integers(1, 5), st.frozensets(st.integers(0, 4))),
    st.tuples(st.just("again"), st.frozensets(st.integers(0, 60))),
    st.tuples(st.just("compact")),
    st.tuples(st.just("replay"), st.integers(1, 3)),
    st.tuples(st.just("commit"), st.sampled_from([None, *STEPS, "before", "after"])),
)


class Books:
    """An independent account of the world: quarantined ranges, and offsets whose letters may have been sent."""

    def __init__(self) -> None:
        self.world, self.doubtful, self.quarantined = World(), set[int](), set[Range]()

    def do(self, step: tuple[Any, ...]) -> None:
        landed = self.world.ledger.read().landed.get(KEY, ())
        match step:
            case ("land" | "ahead") as how, span, bad:
                start = max([100, *(r.end for r in landed)]) + 3 * (how == "ahead")
                self.land(start, start + span, {start + b for b in bad if b < span})
            case "again", bad if landed:
                self.land_again(landed[-1], bad)
            case ("compact",) if len(landed) == 1:
                self.world.rewrite("compact")
            case "replay", nth if len(landed) == 1:
                self.world.rewrite("replay", keep=lambda offset: offset % nth == 0)
            case "commit", fault:
                self.commit(fault)

    def land_again(self, landed: Range, bad: frozenset[int]) -> None:
        """Each offset of a range with quarantined records becomes doubtful: its letter may have been sent."""
        self.doubtful |= {o for r in self.quarantined if r.meets(landed) for o in range(r.start, r.end)}
        old = [p for p in self.world.list_parts() if landed.start <= int(p.name.split("-")[2]) < landed.end]
        bad_now = {landed.start + b for b in bad if landed.start + b < landed.end}
        self.land(landed.start, landed.end, bad_now, kind="offsets", instead=old)

    def land(self, start: int, end: int, bad: set[int], **how: Any) -> None:
        if bad:
            self.quarantined.add(Range(start, end))
        self.world.land(start, end, bad, **how)

    def commit(self, fault: str | None) -> None:
        world = self.world
        if fault in ("before", "after"):
            world.group.lose = fault
        elif fault:
            crash_at(world, fault)
        with suppress(Crash, CommitFenced):
            world.commit()
        heal(world)
        world.group.lose = None


@settings(max_examples=scale_examples(60))
@given(st.lists(STEP, max_size=14))
def test_letters_are_sent_at_most_once_and_once_where_certain(steps: list[tuple[Any, ...]]) -> None:
    books = Books()
    for step in steps:
        books.do(step)
        assert max(Counter(books.world.sent).values(), default=0) <= 1
    books.commit(None)
    books.commit(None)
    sent = books.world.sent
    assert max(Counter(sent).values(), default=0) <= 1
    assert books.world.list_quarantined_offsets() - set(books.world.list_sent_offsets()) <= books.doubtful
    assert books.world.commit().status in (CommitStatus.UNCHANGED, CommitStatus.DISABLED)


# -- the feed


def make_feed(folder: Path, **options: Any) -> Feed:
    path = folder / "feeds" / "orders.yaml"
    path.parent.mkdir(exist_ok=True)
    document = {"kafka": {"bootstrap": "h:1"}, "topics": "orders", "start": "earliest", "dead_letters": {"topic": DLQ}}
    path.write_text(yaml.safe_dump(document | options))
    return load_feed(path, {})


def test_feed_sets_the_letter_topic(tmp_path: Path) -> None:
    lake = MemoryLake()
    assert Outlet.of(make_feed(tmp_path), lake) == Outlet("orders", DLQ, lake)
    assert Outlet.of(make_feed(tmp_path, dead_letters=None), lake) is None
    assert make_feed(tmp_path, topics={"include": ["orders.*"], "exclude": [r".*\.dlq"]}).dead_letters


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"commit": "plain"}, "need the transaction"),
        ({"commit": "none"}, "need the transaction"),
        ({"topics": ["orders", DLQ]}, "a topic that this feed reads"),
        ({"topics": {"include": ["nothing", "orders.*"]}}, "a topic that this feed reads"),
        ({"topics": {"exclude": ["orders"]}}, "a topic that this feed reads"),
        ({"dead_letters": {"topic": "a b"}}, "is not a topic name"),
        ({"dead_letters": {"topik": DLQ}}, "did you mean `topic`"),
        ({"dead_letters": {}}, "dead_letters.topic: is missing"),
    ],
)
def test_feed_that_cannot_send_letters_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(FeedError, match=why):
        make_feed(tmp_path, **options)
