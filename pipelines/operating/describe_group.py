"""Consumer groups of a feed's Kafka, of any program: their members, committed offsets and changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache

from sluice.pipelines.errors import NotAuthorized, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import CLIENT_ID
from sluice.pipelines.feed.sections import OffsetStore
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.marks import OffsetNote
from sluice.pipelines.model.consumer_groups import (
    STATES,
    ZOOKEEPER,
    GroupChange,
    GroupMember,
    GroupView,
    ListedGroup,
    OffsetExpiry,
    changes,
    estimate_expiry,
)
from sluice.pipelines.model.kafka import CommittedOffset, Isolation, TopicPartition
from sluice.pipelines.operating.feed_status import OpenPorts
from sluice.pipelines.ports import Clock, Groups
from sluice.pipelines.util.documents import Derived, Flat, Instant, Internal
from sluice.pipelines.util.units import many, show_instant


def describe_store(feed: Feed) -> str:
    """Returns the address where the feed's group is kept: that of Kafka, or of ZooKeeper."""
    in_kafka = feed.offsets.store is OffsetStore.KAFKA or feed.offsets.connect is None
    return feed.kafka.bootstrap if in_kafka else f"ZooKeeper {feed.offsets.connect}"


def map_owners(feed: Feed, feeds: Iterable[Feed]) -> dict[str, Feed]:
    """Returns each feed whose group is kept in the same place, by its group."""
    return {f.group: f for f in feeds if describe_store(f) == describe_store(feed)}


def list_strangers(feed: Feed, view: GroupView) -> tuple[GroupMember, ...]:
    """Returns members that are not a run of the feed: a commit refuses because of these, and waits for its own."""
    ours = CLIENT_ID if view.kind == ZOOKEEPER else feed.kafka.client_id or CLIENT_ID
    return tuple(m for m in view.members or () if m.client_id != ours)


@dataclass(frozen=True, slots=True)
class GroupListing:
    """The groups of a Kafka, as its coordinators list them.

    `owners` are feeds by their group, `missing` the groups of feeds that are not listed. Of these, `hidden` are not
    visible to this client: they may or may not exist.
    """

    groups: tuple[ListedGroup, ...]
    owners: Mapping[str, str]
    missing: tuple[str, ...]
    hidden: Mapping[str, NotAuthorized]


def list_groups(feed: Feed, feeds: Iterable[Feed], groups: Groups) -> GroupListing:
    """List the groups of the feed's Kafka, with the owners among these feeds."""
    listed = groups.list_groups()
    owners = {group: f.name for group, f in map_owners(feed, feeds).items()}
    missing, hidden = tuple(sorted({*owners} - {g.group for g in listed})), dict[str, NotAuthorized]()
    for name in missing:
        try:
            groups.view(name)
        except NotAuthorized as error:
            hidden[name] = error
    return GroupListing(listed, owners, missing, hidden)


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """One partition in which the group has an offset or a member. `log_end` is None if not known.

    `wanted`: the group's feed reads it. `put_there_by` describes the metadata of the committed offset.
    """

    tp: Flat[TopicPartition]
    commit: CommittedOffset | None
    log_end: int | None
    holder: Internal[GroupMember | None]
    wanted: bool
    put_there_by: str

    @property
    def held_by(self) -> Derived[str | None]:
        return self.holder.member_id if self.holder else None

    @property
    def committed(self) -> Derived[int | None]:
        return self.commit.offset if self.commit else None

    @property
    def lag(self) -> Derived[int | None]:
        """As Kafka's own tool counts: offsets from the committed one to the end of the log."""
        return None if self.committed is None or self.log_end is None else max(0, self.log_end - self.committed)


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group, its offsets, and the feed that owns it; `strangers` are members that do not belong to that feed."""

    view: Flat[GroupView]
    feed: str | None
    offsets: tuple[GroupOffset, ...]
    expiry: OffsetExpiry
    strangers: tuple[GroupMember, ...]


def describe_group(feed: Feed, name: str, feeds: Iterable[Feed], open_ports: OpenPorts, groups: Groups) -> GroupReport:
    """Describe a group of the feed's Kafka, by its coordinator and by the ledger of its owner among these feeds.

    Raises UsageError if there is none.
    """
    owners = map_owners(feed, feeds)
    with open_ports(feed) as ports:
        view = groups.view(name)
        if not view.exists and name not in owners:
            raise _build_unknown_group(name, (g.group for g in groups.list_groups()), owners)
        committed = {} if view.kind == "share" else groups.fetch_committed(name)
        tps = sorted({*committed, *(tp for m in view.members or () for tp in m.partitions or ())})
        topics = {tp.topic for tp in tps}
        # Offsets of deleted topics may stay in the group: their partitions have no end.
        there = sorted(topics & set(ports.cluster.topics())) if topics else ()
        ends = {p.tp: p.high_watermark for p in ports.cluster.partitions(there, Isolation.READ_UNCOMMITTED)}
        retention = ports.cluster.configs(()).broker.offsets_retention
    ledger, state, owner = None, State(), owners.get(name)
    if owner:
        with open_ports(owner) as ports:
            ledger = Ledger(ports.lake, owner.stored, ports.clock)
            state = ledger.read()
    # Many offsets name the same entry.
    get_time = cache(lambda number: ledger.entry(number).at if ledger else 0)
    rows = tuple(
        GroupOffset(
            tp,
            committed.get(tp),
            ends.get(tp),
            view.holder(tp),
            owner is not None and owner.topics.takes(tp.topic),
            _describe_note(committed.get(tp), state, get_time),
        )
        for tp in tps
    )
    # Sluice was a member at its newest commit, and left soon after.
    expiry = estimate_expiry(view, retention, get_time(state.last_mark) if state.last_mark >= 0 else None)
    return GroupReport(view, owner.name if owner else None, rows, expiry, list_strangers(feed, view))


def _build_unknown_group(name: str, names: Iterable[str], owners: Mapping[str, Feed]) -> UsageError:
    own = next((g for g, f in owners.items() if f.name == name), None)
    if own:
        return UsageError(f"no group {name}; the group of feed {name} is {own}", remedy=f"sluice groups describe {own}")
    close = get_close_matches(name, list(names), n=3)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return UsageError(f"there is no group {name}", remedy=f"{meant}see sluice groups list")


def _describe_note(committed: CommittedOffset | None, state: State, get_time: Callable[[int], int]) -> str:
    """Describe the metadata of a committed offset. `get_time`: of an entry of the ledger (ms)."""
    if committed is None or not committed.metadata:
        return ""
    mark = OffsetNote.parse(committed.metadata)
    if mark is None:
        return repr(committed.metadata[:60])
    how = "by hand" if mark.by_hand else "commit"
    if mark.ledger != state.ledger_id:
        return f"{how} of another ledger ({mark.ledger[:20]}, entry {mark.entry})"
    if not 0 <= mark.entry < state.number or state.lost_entry(mark.entry):
        return f"{how}, entry {mark.entry}, which is not in the ledger"
    return f"{how}, entry {mark.entry}, {show_instant(get_time(mark.entry) // 1000 * 1000)}"


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """A change of a group, at a time (ms). `seconds`, of a change of state: how long the state before lasted."""

    at: Instant
    change: Flat[GroupChange]
    seconds: float | None = None


def follow_group(groups: Groups, name: str, clock: Clock) -> Iterator[tuple[GroupView, list[GroupEvent]]]:
    """Yields the group after each query, with its changes. Those of the first query are its state."""
    previous, since = groups.view(name), time.monotonic()
    who = f", {many(len(previous.members), 'member')}" if previous.members else ""
    text = f"{previous.state}{who}: {STATES.get(previous.state, 'a state that Sluice does not know')}"
    yield previous, [GroupEvent(clock(), GroupChange("state", text, after=previous.state))]
    while True:
        view, events = groups.view(name), []
        for change in changes(previous, view):
            lasted = None
            if change.what == "state":
                lasted, since = time.monotonic() - since, time.monotonic()
            events.append(GroupEvent(clock(), change, lasted))
        # While a group settles its coordinator tells no assignor: the one before is not a new one afterwards.
        previous = replace(view, assignor=view.assignor or previous.assignor) if view.members else view
        yield view, events
