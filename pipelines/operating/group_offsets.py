"""A group's committed offsets, compared with the ledger, the log, a time, and the offsets of others.

How they are moved is in `move_offsets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.errors import SluiceError, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.consumer_groups import GroupView
from sluice.pipelines.model.kafka import OffsetAtTime, TopicPartition
from sluice.pipelines.operating import move_offsets
from sluice.pipelines.operating.describe_group import list_strangers, map_owners
from sluice.pipelines.operating.move_offsets import FILE_BYTES, Aim, Move, OffsetTarget, Spot, Stands, parse_offsets
from sluice.pipelines.planning.origins import check_incarnation, find_key
from sluice.pipelines.ports import Groups, Ports
from sluice.pipelines.util.documents import Derived, Flat, Internal


@dataclass(frozen=True, slots=True)
class GroupOwner:
    """A group, its state, and the feed that commits for it, if one does."""

    feed: str | None
    group: str
    state: str


@dataclass(frozen=True)
class OffsetsContext:
    """A group and its offsets. `ledger` is None for a group that no feed owns."""

    feed: Feed
    name: str
    ports: Ports
    groups: Groups
    ledger: Ledger | None
    state: State
    view: GroupView
    spots: tuple[Spot, ...]

    @property
    def committed(self) -> dict[TopicPartition, int]:
        return {s.tp: s.committed for s in self.spots if s.committed is not None}

    @property
    def is_blocked(self) -> bool:
        """Returns True if the feed commits and its group has other members."""
        ours = self.ledger is not None and self.feed.commit is not CommitMode.NONE
        return ours and not (self.view.free or (self.view.members and not list_strangers(self.feed, self.view)))

    def choose(self, only: Sequence[TopicPartition]) -> tuple[Spot, ...]:
        """All, or those named. Raises UsageError for one that is not there."""
        here = {s.tp: s for s in self.spots}
        if unknown := next((tp for tp in only if tp not in here), None):
            raise UsageError(
                f"feed {self.feed.name} does not read partition {unknown}",
                remedy=f"choose from {', '.join(map(str, list(here)[:5])) or 'nothing'}{' …' if len(here) > 5 else ''}",
            )
        return tuple(here[tp] for tp in dict.fromkeys(only)) if only else self.spots

    @property
    def owner(self) -> GroupOwner:
        return GroupOwner(self.feed.name if self.ledger else None, self.name, self.view.state)


def read_context(
    feed: Feed, feeds: Iterable[Feed], ports: Ports, groups: Groups, other: str | None = None
) -> OffsetsContext:
    """Read the offsets of the feed's group in the partitions that the feed reads.

    Of an `other` group: those that it has offsets in, if it has any. Raises UsageError if that group belongs to one of
    these feeds.
    """
    name = other or feed.group
    if name != feed.group and (owner := map_owners(feed, feeds).get(name)):
        raise UsageError(
            f"--group {name} belongs to feed {owner.name}", remedy=f"use feed {owner.name} instead of {feed.name}"
        )
    ledger = open_ledger(feed, ports) if name == feed.group else None
    state, view = ledger.read() if ledger else State(), groups.view(name)
    visible, committed = ports.cluster.topics(), groups.fetch_committed(name)
    topics = {tp.topic for tp in committed} & set(visible) if name != feed.group else set()
    partitions = ports.cluster.partitions(sorted(topics or match(feed.topics, visible)), feed.isolation)
    keys = [find_key(state, p) for p in partitions]
    spots = tuple(
        Spot(p, key, committed.get(p.tp), state.frontier(key) if key in state.origins else None)
        for p, key in zip(partitions, keys, strict=True)
    )
    return OffsetsContext(feed, name, ports, groups, ledger, state, view, spots)


# -- the next commit


@dataclass(frozen=True, slots=True)
class OffsetStanding:
    """How one partition stands, and the committed offset that the ledger expects.

    `lands_next`: another client moved the offset to the end of the next catch-up, whose commit accepts it. `refused`:
    the next commit would be refused.
    """

    spot: Flat[Spot]
    stands: Stands
    expected: int | None
    lands_next: bool
    refused: bool


def list_standings(context: OffsetsContext) -> tuple[OffsetStanding, ...]:
    """Returns how each partition stands for the next commit."""
    feed, blocked, state = context.feed, context.is_blocked, context.state
    fatal = {Stands.STALE, Stands.FOREIGN}
    fatal |= {Stands.MOVED} if feed.policies.on_group_moved is OnGroupMoved.REFUSE else set()
    fatal |= set(Stands) - {Stands.AT, Stands.UNPLANNED} if blocked else set()
    standings = []
    for spot in context.spots:
        stands = move_offsets.stands(state, spot)
        ahead = spot.committed is not None and spot.frontier is not None and spot.committed > spot.frontier
        lands_next = stands is Stands.MOVED and ahead and spot.committed == spot.kafka.last_stable_offset
        refused = feed.commit is not CommitMode.NONE and stands in fatal and (blocked or not lands_next)
        expected = move_offsets.expected_offset(state, spot.key)
        standings.append(OffsetStanding(spot, stands, expected, lands_next, refused))
    return tuple(standings)


# -- moves


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The moves to a target. `refused` is the error that they would raise now, if any."""

    target: OffsetTarget
    moves: tuple[Move, ...]
    refused: SluiceError | None


def plan_moves(context: OffsetsContext, target: OffsetTarget, only: Sequence[TopicPartition] = ()) -> MovePlan:
    """Plan moves of all partitions, or of `only` some.

    Raises UsageError, ForeignMarks, and IncarnationChanged and the like for a log that is not the one in the ledger.
    """
    spots = move_offsets.spots_concerned(target, context.choose(only), all_of_them=bool(only))
    for another in (check_incarnation(context.state, s.kafka, {}, context.feed.name) for s in spots):
        if another is not None:
            raise another.error
    times = {s.tp: target.number for s in spots} if target.aim is Aim.TIME else {}
    hits = context.ports.cluster.offsets_at(times) if times else {}
    moves = move_offsets.resolve(target, spots, hits, context.ports.clock())
    if context.ledger:
        move_offsets.check_ours(context.ledger, moves)
    return MovePlan(target, moves, move_offsets.refusal(context.feed.name, context.view, moves, target))


def read_offsets(path: Path, context: OffsetsContext) -> dict[TopicPartition, int]:
    """Returns the offsets in a file. Raises UsageError with file and line."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", remedy="choose a readable file of lines TOPIC,PARTITION,OFFSET"
        ) from None
    if len(data) > FILE_BYTES:
        raise UsageError(
            f"{path} is larger than {FILE_BYTES >> 20} MiB", remedy="choose a file of lines TOPIC,PARTITION,OFFSET"
        )
    return parse_offsets(data, str(path), context.name, {s.tp for s in context.spots})


# -- comparisons


@dataclass(frozen=True, slots=True)
class OffsetBefore:
    """One partition: `hit` is its first record of the time or later, None where there is none."""

    spot: Flat[Spot]
    hit: Internal[OffsetAtTime | None]

    @property
    def offset(self) -> Derived[int]:
        return self.spot.kafka.high_watermark if self.hit is None else self.hit.offset

    @property
    def timestamp(self) -> Derived[int | None]:
        return self.hit.timestamp if self.hit else None

    @property
    def note(self) -> Derived[str]:
        if self.hit is None:
            return "no record since: the end"
        if self.hit.by_marker:
            return "approximate: near transaction markers"
        return "the log begins later" if self.offset == self.spot.kafka.log_start else ""


def list_offsets_before(
    context: OffsetsContext, at: int, only: Sequence[TopicPartition] = ()
) -> tuple[OffsetBefore, ...]:
    """Returns the offset of the first record at or after a time (ms), for each partition. Raises UsageError."""
    spots = context.choose(only)
    hits = context.ports.cluster.offsets_at({s.tp: at for s in spots})
    return tuple(OffsetBefore(s, hits[s.tp]) for s in spots)


@dataclass(frozen=True, slots=True)
class OffsetPair:
    """One partition's committed offset, and the other one. None: there is none."""

    tp: Flat[TopicPartition]
    offset: int | None
    other: int | None


def compare_offsets(context: OffsetsContext, source: str) -> tuple[OffsetPair, ...]:
    """Compare with the offsets of a file, or if there is none of that name, of a group.

    Raises UsageError if it is neither a file nor a group with offsets.
    """
    theirs: Mapping[TopicPartition, int]
    if Path(source).exists():
        theirs = read_offsets(Path(source), context)
    elif committed := context.groups.fetch_committed(source):
        mine = {s.tp for s in context.spots}
        theirs = {tp: at.offset for tp, at in committed.items() if tp in mine}
    else:
        raise UsageError(
            f"{source!r} is neither a file nor a group with committed offsets",
            remedy="choose a file of sluice offsets export, or a group of sluice groups list",
        )
    ours = context.committed
    return tuple(OffsetPair(tp, ours.get(tp), theirs.get(tp)) for tp in sorted({*ours, *theirs}))
