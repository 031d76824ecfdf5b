"""Moving a group's committed offsets by hand: where to, what that means, and doing it.

    1 check that the group has no member refuse: GroupHeld; ForeignMarks, another ledger's offsets
    2 `moved` into the feed's ledger     refuse: beyond the frontier as it is then
    3 OffsetCommit without a member      refuse: GroupHeld, somebody came in
    4 read back                          until then a lost answer leaves the outcome unknown
    5 if a commit came in between, record the move again

Guarantees: the offsets that a feed reads never change (its ledger decides), and no offset of a feed's group moves
beyond the accounted ones. A partition that the feed has not planned yet begins at the group's offset.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.pipelines.committing.commit import CommitVerdict, judge
from sluice.pipelines.errors import CommitFenced, GroupHeld, Refused, SluiceError, Unknown, UsageError
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import KeyOffset, MovedEntry
from sluice.pipelines.ledger.marks import by_hand, check_owner, find_foreign_mark
from sluice.pipelines.model.consumer_groups import GroupView
from sluice.pipelines.model.kafka import (
    CommittedOffset,
    Key,
    OffsetAtTime,
    PartitionState,
    TopicPartition,
    is_topic_name,
)
from sluice.pipelines.planning.origins import check_incarnation
from sluice.pipelines.ports import Groups
from sluice.pipelines.util.documents import Derived, Flat, Internal
from sluice.pipelines.util.units import join_first, show_instant


class Aim(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    OFFSET = "offset"
    SHIFT = "shift"
    FRONTIER = "frontier"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class OffsetTarget:
    """Where to move committed offsets. `number`: a time in ms, an offset or a shift; `offsets`: those of a file."""

    aim: Aim
    number: int = 0
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)

    def __str__(self) -> str:
        match self.aim:
            case Aim.TIME:
                return f"to the first record stamped {show_instant(self.number)} or later"
            case Aim.OFFSET:
                return f"to offset {self.number}"
            case Aim.SHIFT:
                return f"by {self.number:+}"
            case Aim.FILE:
                return "to the offsets in a file"
            case aim:
                return f"to {aim}"


@dataclass(frozen=True, slots=True)
class Spot:
    """One partition in Kafka. `frontier` is the ledger's; None if no feed has planned the partition."""

    kafka: Flat[PartitionState]
    key: Internal[Key]
    commit: CommittedOffset | None
    frontier: int | None = None

    @property
    def tp(self) -> TopicPartition:
        return self.kafka.tp

    @property
    def committed(self) -> Derived[int | None]:
        return None if self.commit is None else self.commit.offset

    @property
    def log_end(self) -> Derived[int]:
        return self.kafka.high_watermark

    @property
    def lag(self) -> Derived[int | None]:
        """Offsets from the committed one to the end of the log."""
        return None if self.committed is None else max(0, self.log_end - self.committed)


@dataclass(frozen=True, slots=True)
class Move:
    """One partition's committed offset before (None: none) and after. `note` says why it differs from the target."""

    spot: Flat[Spot]
    after: int
    note: str = ""

    @property
    def tp(self) -> TopicPartition:
        return self.spot.tp

    @property
    def passes(self) -> int:
        """How many offsets beyond the frontier it goes."""
        return 0 if self.spot.frontier is None else max(0, self.after - self.spot.frontier)


_SILENT = {
    Aim.SHIFT: "has no committed offset to count from",
    Aim.FRONTIER: "has no frontier: the feed has not planned it yet",
    Aim.FILE: "is not in the file",
}


def spots_concerned(target: OffsetTarget, spots: Sequence[Spot], *, all_of_them: bool) -> tuple[Spot, ...]:
    """The spots that the target applies to. Raises UsageError if it applies to none, or, `all_of_them`, not to all."""
    silent = [s for s in spots if not _says(target, s)]
    if silent and (all_of_them or len(silent) == len(spots)):
        first = silent[0].tp
        raise UsageError(
            f"{first} {_SILENT[target.aim]}",
            remedy="leave it out, or give it an offset: --to-offset N",
            topic=first.topic,
            partition=first.partition,
        )
    return tuple(s for s in spots if s not in silent)


def _says(target: OffsetTarget, spot: Spot) -> bool:
    match target.aim:
        case Aim.SHIFT:
            return spot.committed is not None
        case Aim.FRONTIER:
            return spot.frontier is not None
        case Aim.FILE:
            return spot.tp in target.offsets
    return True


TimeHits = Mapping[TopicPartition, OffsetAtTime | None]


def resolve(target: OffsetTarget, spots: Sequence[Spot], hits: TimeHits, now: int) -> tuple[Move, ...]:
    """The move of each spot, clamped into the log, with a note. `hits` has the look-ups for a TIME."""
    return tuple(_clamp_move(spot, *_wanted_offset(target, spot, hits, now)) for spot in spots)


def _wanted_offset(target: OffsetTarget, spot: Spot, hits: TimeHits, now: int) -> tuple[int, str]:
    match target.aim:
        case Aim.EARLIEST:
            return spot.kafka.log_start, ""
        case Aim.LATEST:
            return spot.kafka.last_stable_offset, ""
        case Aim.TIME:
            hit = hits.get(spot.tp)
            if hit is None:
                return spot.kafka.last_stable_offset, "no record since: the end"
            ahead = "; that is in the future" if hit.timestamp > now else ""
            if hit.by_marker:
                return hit.offset, "searched for behind transactions' markers: right if stamps are in order there"
            return hit.offset, f"stamped {show_instant(hit.timestamp)}{ahead}"
        case Aim.SHIFT:
            return (spot.committed or 0) + target.number, ""
        case Aim.FRONTIER:
            return spot.frontier or 0, ""
        case Aim.FILE:
            return target.offsets[spot.tp], ""
    return target.number, ""


def _clamp_move(spot: Spot, wanted: int, note: str) -> Move:
    """The move, clamped into the log as Kafka's own tool does. A frontier below the log's start is kept: it is
    pending."""
    start, end = spot.kafka.log_start, spot.kafka.high_watermark
    if wanted > end:
        return Move(spot, end, f"the end of the log, as {wanted:,} is outside")
    if wanted < start and wanted != spot.frontier:
        return Move(spot, start, f"the start of the log, as {wanted:,} is outside")
    return Move(spot, wanted, note)


class Stands(StrEnum):
    UNPLANNED = "not planned yet"
    ANOTHER = "another log"
    NEVER = "nothing committed yet"
    GONE = "gone"
    AT = "at the frontier"
    BEHIND = "behind the frontier"
    BY_HAND = "moved by hand"
    WAITS = "ahead of the frontier"
    MOVED = "moved by somebody"
    STALE = "ahead of the ledger"
    FOREIGN = "of another ledger"


_STANDS = {
    CommitVerdict.DONE: Stands.AT,
    CommitVerdict.GO: Stands.BEHIND,
    CommitVerdict.WAITS: Stands.WAITS,
    CommitVerdict.MOVED: Stands.MOVED,
    CommitVerdict.STALE: Stands.STALE,
    CommitVerdict.FOREIGN: Stands.FOREIGN,
}


def stands(state: State, spot: Spot) -> Stands:
    """How the next commit will see the committed offset. If the log is another one, how the next plan will."""
    if check_incarnation(state, spot.kafka, {}, "") is not None:
        return Stands.ANOTHER
    if find_foreign_mark(state, spot.tp, spot.commit) is not None:
        return Stands.FOREIGN
    if spot.frontier is None:
        return Stands.UNPLANNED
    if spot.commit is None:
        return Stands.GONE if spot.key in state.commits else Stands.NEVER
    relation = judge(state, spot.key, spot.frontier, spot.commit)
    if relation is CommitVerdict.GO and state.moved.get(spot.key) == spot.committed:
        return Stands.BY_HAND
    return _STANDS[relation]


def expected_offset(state: State, key: Key) -> int | None:
    """The committed offset that the ledger expects, if it knows one."""
    origin = state.origins.get(key)
    return state.commits.get(key, origin.committed if origin else None)


def refusal(feed: str, group: GroupView, moves: Iterable[Move], target: OffsetTarget) -> SluiceError | None:
    """The error that these moves would raise now, if any."""
    if not group.free:
        return GroupHeld(
            f"group {group.group} has members, it is {group.state}: {group.who()}",
            remedy="stop its consumers and wait until it is Empty; a run of Sluice leaves it when it has committed. "
            f"See: sluice groups describe {group.group}",
        )
    return _beyond(feed, moves, target)


def check_ours(ledger: Ledger, moves: Iterable[Move]) -> None:
    """Raises ForeignMarks if another ledger committed one of the offsets that would be overwritten."""
    check_owner(ledger, ledger.read(), {m.tp: m.spot.commit for m in moves})


def _beyond(feed: str, moves: Iterable[Move], target: OffsetTarget) -> Refused | None:
    passing = [m for m in moves if m.passes]
    if not passing:
        return None
    ranges = join_first((f"{m.tp} [{m.spot.frontier}, {m.after})" for m in passing), 5)
    first = passing[0]
    end = {Aim.TIME: show_instant(target.number), Aim.LATEST: "latest"}.get(target.aim)
    skip = f"; or have the feed skip them, which its ledger records: sluice run {feed} --skip-to {end} --reason …"
    return Refused(
        f"beyond what feed {feed} has accounted for; the group would pass over {ranges}",
        remedy=f"land them first: sluice run {feed}{skip if end else ''}",
        topic=first.tp.topic,
        partition=first.tp.partition,
        start=first.spot.frontier,
        end=first.after,
    )


@dataclass(frozen=True, slots=True)
class Done:
    """The committed offsets after a move. `entry` is the number of the ledger's entry, or None."""

    entry: int | None
    held: Mapping[TopicPartition, CommittedOffset]


@dataclass(frozen=True, slots=True)
class OwnedGroup:
    """A consumer group, and the feed that owns it, with its ledger if it has one."""

    name: str
    groups: Groups
    feed: str
    ledger: Ledger | None


def move(owned: OwnedGroup, moves: Sequence[Move], target: OffsetTarget, reason: str) -> Done:
    """Move the group's committed offsets, by the numbered steps above.

    Raises GroupHeld, Refused (beyond the frontier), ForeignMarks, CommitFenced (Kafka holds something else afterwards).
    """
    feed, ledger, groups, group = owned.feed, owned.ledger, owned.groups, owned.name
    if refused := refusal(feed, groups.view(group), moves, target):
        raise refused
    if ledger:
        check_ours(ledger, moves)
    entry, metadata = _note_move(ledger, moves, target, reason, feed) if ledger else (None, "")
    offsets = {m.tp: CommittedOffset(m.after, metadata=metadata) for m in moves}
    with contextlib.suppress(Unknown):  # reading back decides
        groups.put(group, offsets)
    stored = _read_back(groups, group, offsets)
    if ledger and entry is not None:
        entry = _note_move_again(ledger, moves, reason) or entry
    return Done(entry, stored)


def _note_move(
    ledger: Ledger, moves: Sequence[Move], target: OffsetTarget, reason: str, feed: str
) -> tuple[int | None, str]:
    """The number of the entry and the metadata that names it. Partitions that the ledger does not know are left out."""

    def decide(state: State) -> MovedEntry | None:
        current = [_with_frontier_now(state, m) for m in moves]
        if refused := _beyond(feed, current, target):
            raise refused
        return _entry(state, moves, reason)

    appended = ledger.append(decide)
    return (appended.number, by_hand(appended.state.ledger_id, appended.number)) if appended else (None, "")


def _with_frontier_now(state: State, move: Move) -> Move:
    spot = move.spot
    frontier = state.frontier(spot.key) if spot.key in state.origins else None
    return Move(Spot(spot.kafka, spot.key, spot.commit, frontier), move.after, move.note)


def _entry(state: State, moves: Iterable[Move], reason: str) -> MovedEntry | None:
    offsets = tuple(KeyOffset(key=m.spot.key, offset=m.after) for m in moves if m.spot.key in state.origins)
    return MovedEntry(offsets=offsets, reason=reason) if offsets else None


def _note_move_again(ledger: Ledger, moves: Sequence[Move], reason: str) -> int | None:
    """Record the move again where a commit came between record and move, and voided the record."""

    def decide(state: State) -> MovedEntry | None:
        return _entry(state, [m for m in moves if state.moved.get(m.spot.key) != m.after], reason)

    appended = ledger.append(decide)
    return appended.number if appended else None


def _read_back(
    groups: Groups, group: str, offsets: Mapping[TopicPartition, CommittedOffset]
) -> dict[TopicPartition, CommittedOffset]:
    committed = groups.fetch_committed(group)
    for tp, meant in offsets.items():
        stored = committed.get(tp)
        if stored is None or (stored.offset, stored.metadata) != (meant.offset, meant.metadata):
            raise CommitFenced(
                f"{tp}: tried to write {meant.offset}, the group now holds {stored.offset if stored else 'nothing'}",
                remedy="another program commits for this group at the same time: find it, and run the command again",
                topic=tp.topic,
                partition=tp.partition,
            )
    return {tp: committed[tp] for tp in offsets}


FILE_BYTES = 16 << 20
"""The largest file of offsets that is read; it holds some 300,000 partitions."""

_NUMBER = re.compile(r"[0-9]{1,19}")


def dump_offsets(offsets: Mapping[TopicPartition, int]) -> Iterator[str]:
    """One line `topic,partition,offset` for each partition, in order, without a header."""
    return (f"{tp.topic},{tp.partition},{offset}" for tp, offset in sorted(offsets.items()))


def parse_offsets(
    data: bytes, name: str, group: str, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """The offsets in a file, of these partitions. Raises UsageError, which names file and line."""
    out: dict[TopicPartition, int] = {}
    for line, row in _rows(data, name):
        tp, offset = _line(row, name, line, group)
        if tp in out:
            raise _bad(name, line, f"names {tp} a second time")
        if tp not in partitions:
            raise _bad(name, line, f"names {tp}, which is not there, or is not read here")
        out[tp] = offset
    if not out:
        raise UsageError(f"{name} holds no offsets", remedy=_OFFSETS_FORM)
    return out


_OFFSETS_FORM = "write a line TOPIC,PARTITION,OFFSET for each partition, as `sluice offsets export` does"


def _rows(data: bytes, name: str) -> Iterator[tuple[int, list[str]]]:
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        yield from ((reader.line_num, row) for row in reader if row)
    except UnicodeDecodeError as error:
        raise _bad(name, data[: error.start].count(b"\n") + 1, "is not UTF-8") from None
    except csv.Error:
        raise _bad(name, reader.line_num, "is not CSV") from None


def _line(row: Sequence[str], name: str, line: int, group: str) -> tuple[TopicPartition, int]:
    cells = [cell.strip() for cell in row]
    if len(cells) == 4 and cells.pop(0) != group:  # an export of several groups names each first
        raise _bad(name, line, f"is about another group than {group}")
    if len(cells) != 3:
        raise _bad(name, line, f"has {len(row)} columns")
    topic, partition, offset = cells
    if not is_topic_name(topic):
        raise _bad(name, line, "does not begin with a topic's name")
    if not (_NUMBER.fullmatch(partition) and _NUMBER.fullmatch(offset)):
        raise _bad(name, line, "does not end with a partition and an offset, as numbers from 0 on")
    if int(partition) >= 1 << 31 or int(offset) >= 1 << 63:
        raise _bad(name, line, "has a number that Kafka has no room for")
    return TopicPartition(topic, int(partition)), int(offset)


def _bad(name: str, line: int, why: str) -> UsageError:
    return UsageError(f"{name}, line {line}: {why}", remedy=_OFFSETS_FORM)
