"""The Group, Membership and Groups ports over the old consumers' layout in ZooKeeper.

Promises: an old consumer and Sluice never read one partition at once. Before we read, we check for others and wait for
them with a bound; then we register and own every partition in one transaction, or none. A commit is one transaction as
well: it depends on the versions that were read, so a rival's write refuses it, and on our registration, so nothing is
committed once our session has ended, whenever we learn of it. Three outcomes, as in Kafka: done, not done with an
error, and `Unknown`. Reading registers nothing; `ZooKeeperGroups.put` writes only while nobody is registered or owns a
partition. With `dual_commit`, offsets are in Kafka and in ZooKeeper: Kafka first.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from sluice.pipelines.errors import CommitFenced, GroupHeld, SluiceError, Unknown, UsageError
from sluice.pipelines.feed.kafka_section import CLIENT_ID
from sluice.pipelines.model.consumer_groups import ZOOKEEPER, Broker, GroupMember, GroupState, GroupView, ListedGroup
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import DeadLetter, Group, Groups, Member, Membership
from sluice.pipelines.util.units import join_first
from sluice.resources.zookeeper import layout
from sluice.resources.zookeeper.layout import Consumer
from sluice.resources.zookeeper.tree import SESSION_SECONDS, Changed, Operation, StoredOffset, Tree, chunks, writes

PATIENCE_SECONDS = 30.0
"""How long we wait for others; a killed consumer is gone from ZooKeeper after its session."""
_LOOK_SECONDS = 0.5

Offsets = Mapping[TopicPartition, CommittedOffset]


class ZooKeeperGroup:
    """One group. Opens no connection before the first request.

    Times in seconds: `session`, after which ZooKeeper releases our nodes if we crash; `patience` with others who own
    our partitions.
    """

    def __init__(
        self,
        connect: str,
        group: str,
        *,
        session: float = SESSION_SECONDS,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._tree = Tree(connect, session)
        self._tree.on_lost = self._lose
        self._group = group
        self._patience = patience
        self._seat: str | None = None
        self._owned: frozenset[TopicPartition] = frozenset()
        self._lost = False
        self._tell_lost: Callable[[], None] = lambda: None

    def close(self) -> None:
        """End the session, and registration and ownership with it."""
        self._tree.close()

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Return committed offsets, with our mark if ours is the last write; None for partitions without one.

        Raises Refused for a node that holds no offset, ZooKeeperUnavailable, NotAuthorized.
        """
        wanted = sorted(set(partitions))
        return {tp: stored.committed for tp, stored in self._tree.offsets(self._group, wanted).items()}

    def members(self) -> tuple[Member, ...]:
        """Return the currently registered consumers."""
        return tuple(Member(c.id, c.id, c.host) for c in self._tree.consumers(self._group))

    def check_alone(self) -> None:
        if others := [c for c in self._tree.consumers(self._group) if not c.ours]:
            raise self._make_conflict({c.id: () for c in others})

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None:
        """Register, and own those partitions until `close`. Waits for others while patience lasts."""
        wanted = frozenset(partitions())
        self._tell_lost = lost
        self._still_ours()
        until = time.monotonic() + self._patience
        while not wanted <= self._owned:
            if others := self._in_the_way(wanted):
                if time.monotonic() > until:
                    raise self._make_conflict(others)
                time.sleep(_LOOK_SECONDS)
            else:
                self._take(wanted | self._owned)

    @contextlib.contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[ZooKeeperMembership]:
        """Commit as the owner: call `own` first. Raises UsageError for a transactional id."""
        if transactional_id is not None:
            raise _no_transactions()
        self._still_ours()
        if self._seat is None:
            raise UsageError(f"group {self._group}: nothing is owned to commit for", remedy="this is a bug")
        yield ZooKeeperMembership(self._tree, self._group, self._seat)

    # -- ownership

    def _lose(self) -> None:
        if self._seat is not None and not self._lost:
            self._lost = True
            self._tell_lost()

    def _still_ours(self) -> None:
        if self._lost:
            raise lost_error(self._group)

    def _in_the_way(self, wanted: Iterable[TopicPartition]) -> dict[str, list[TopicPartition]]:
        """Return other possible readers of our partitions by id, with the partitions that they own.

        The list of one that only waits is empty.
        """
        tps = sorted(wanted)
        topics = {tp.topic for tp in tps}
        consumers: dict[str, list[TopicPartition]] = {
            c.id: [] for c in self._tree.consumers(self._group) if c.id != self._seat and c.reads(topics)
        }
        for tp, stream in self._tree.owners(self._group, tps).items():
            consumer = stream.rpartition("-")[0] or stream
            if consumer != self._seat:
                consumers.setdefault(consumer, []).append(tp)
        return consumers

    def _take(self, wanted: frozenset[TopicPartition]) -> None:
        """Register and own in one transaction. If another was faster, nothing is done: the caller checks again."""
        group, new = self._group, sorted(wanted - self._owned)
        now = time.time_ns() // 1_000_000
        seat = self._seat or layout.consumer_id(group, socket.gethostname(), now, secrets.token_hex(4))
        self._tree.ensure({layout.ids_path(group), *(_above(layout.owner_path(group, tp)) for tp in new)})
        about = layout.registration(wanted, now)
        at = f"{layout.ids_path(group)}/{seat}"
        registering: Operation = ("set", at, about, -1) if self._seat else ("ephemeral", at, about, -1)
        streams = layout.owners(seat, wanted)
        owning: list[Operation] = [("ephemeral", layout.owner_path(group, tp), streams[tp], -1) for tp in new]
        self._seat = seat
        try:
            self._tree.transact([registering, *owning], f"registering in group {group}")
        except Changed as changed:
            if self._owned and changed.path == at:  # somebody removed our registration: it never comes back
                self._lose()
                raise lost_error(group) from None
            self._seat = seat if self._owned else None
            return
        self._still_ours()
        self._owned = wanted

    def _make_conflict(self, others: Mapping[str, Sequence[TopicPartition]]) -> GroupHeld:
        names = [
            f"{name}{f' owns {join_first(tps, 3)}' if tps else ' is registered'}"
            for name, tps in sorted(others.items())
        ]
        return GroupHeld(
            f"group {self._group} in ZooKeeper has other consumers: {join_first(names, 3, between='; ')}",
            remedy="stop them: Sluice and an old consumer never read one partition at once. One that was killed is "
            "gone when its session ends; a run waits for `offsets.patience`",
        )


class ZooKeeperMembership:
    """Our membership as the owner. Commits depend on the last result of `fetch_committed`, and on our registration."""

    def __init__(self, tree: Tree, group: str, seat: str) -> None:
        self._tree = tree
        self._group = group
        self._registered = f"{layout.ids_path(group)}/{seat}"
        self._held: dict[TopicPartition, StoredOffset] = {}

    def init_transactions(self) -> None:
        raise _no_transactions()

    def partitions_of(self, topic: str) -> int:
        raise _no_transactions()

    def commit_transaction(self, offsets: Offsets, topic: str = "", letters: Iterable[DeadLetter] = ()) -> None:
        raise _no_transactions()

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Return committed offsets. A later commit is refused if anybody writes one of them after this."""
        stored = self._tree.offsets(self._group, sorted(set(partitions)))
        self._held |= stored
        return {tp: offset.committed for tp, offset in stored.items()}

    def commit_plain(self, offsets: Offsets) -> None:
        """Commit all offsets and marks in one transaction.

        Thousands of partitions need several; each is all or nothing. Raises CommitFenced if another client wrote an
        offset since `fetch_committed`, or our session has ended: that transaction and later ones committed nothing.
        Raises Unknown if unanswered.
        """
        for tp in offsets:
            if tp not in self._held:
                raise UsageError(f"{tp}: its committed offset was not read first", remedy="this is a bug")
        self._tree.ensure(_above(layout.offset_path(self._group, tp)) for tp in offsets)
        self._tree.ensure(_above(layout.mark_path(self._group, tp)) for tp in offsets)
        doing = f"committing the offsets of group {self._group} in ZooKeeper"
        done = 0
        for chunk in chunks(writes(self._group, offsets, self._held)):
            try:
                self._tree.transact([("check", self._registered, b"", -1), *chunk], doing)
            except Changed as changed:
                if changed.path == self._registered:
                    raise lost_error(self._group) from None
                committed = f"only {done:,} of {len(offsets):,} offsets were" if done else "nothing was"
                raise CommitFenced(
                    f"{doing}: {changed.path}: {changed.what} since it was read; {committed} committed",
                    remedy="nothing is lost; the next run compares again. See which program commits for this group",
                ) from None
            done += len(chunk) // 2  # an offset and its mark


def lost_error(group: str) -> CommitFenced:
    return CommitFenced(
        f"the session with ZooKeeper ended, and its ownership in group {group}: it commits nothing",
        remedy="nothing is lost: landed rows stay, and the next run commits them",
    )


def _no_transactions() -> UsageError:
    return UsageError("ZooKeeper takes part in no transaction of Kafka", remedy="set `commit: plain` in the feed")


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def describe(consumer: Consumer) -> str:
    """Describe a consumer in a few words."""
    return f"{consumer.id}{' (Sluice)' if consumer.ours else ''}"


NO_BROKER = -1


class ZooKeeperGroups:
    """All groups of one tree. Opens no connection before the first request."""

    def __init__(self, connect: str) -> None:
        self._tree = Tree(connect)

    def close(self) -> None:
        self._tree.close()

    def list_groups(self) -> tuple[ListedGroup, ...]:
        """Return every group that has a node, sorted by name."""
        views = (self.view(name) for name in self._tree.children(layout.CONSUMERS))
        return tuple(ListedGroup(v.group, v.kind, v.state, v.protocol_type, NO_BROKER) for v in views)

    def view(self, group: str) -> GroupView:
        """Return one group as it is now: Stable with registered consumers, Empty without, Dead if it has no node."""
        broker = Broker(NO_BROKER, self._tree.address)
        consumers = self._tree.consumers(group)
        if not consumers and not self._tree.exists(layout.group_path(group)):
            return GroupView(group, ZOOKEEPER, GroupState.DEAD, "consumer", "", broker, ())
        owned: dict[str, list[TopicPartition]] = {c.id: [] for c in consumers}
        root = f"{layout.group_path(group)}/owners"
        names = ((t, p) for t in self._tree.children(root) for p in self._tree.children(f"{root}/{t}"))
        ownable = [TopicPartition(t, int(p)) for t, p in names if p.isascii() and p.isdigit()]
        for tp, stream in self._tree.owners(group, ownable).items():
            owned.setdefault(stream.rpartition("-")[0] or stream, []).append(tp)
        by_id = {c.id: c for c in consumers}
        members = list[GroupMember]()
        for name, tps in sorted(owned.items()):
            c = by_id.get(name) or Consumer(name, {})
            client = CLIENT_ID if c.ours else c.id
            members.append(GroupMember(c.id, client, c.host or "an unknown host", None, tuple(sorted(tps))))
        state = GroupState.STABLE if members else GroupState.EMPTY
        return GroupView(group, ZOOKEEPER, state, "consumer", "", broker, tuple(members))

    def fetch_committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """Return all offsets of the group, with our mark if ours is the last write.

        Raises Refused for a node that holds no offset.
        """
        stored = self._tree.offsets(group, self._tree.with_offsets(group))
        return {tp: offset.committed for tp, offset in stored.items() if offset.committed is not None}

    def put(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Write offsets with their metadata.

        Raises GroupHeld if anybody is in the group, or writes its offsets at the same moment; Unknown if no answer
        came.
        """
        stored = self._tree.offsets(group, offsets)
        if not (view := self.view(group)).free:
            raise _conflict(group, view.who())
        for path in (layout.offset_path, layout.mark_path):
            self._tree.ensure(path(group, tp).rpartition("/")[0] for tp in offsets)
        for chunk in chunks(writes(group, offsets, stored)):
            try:
                self._tree.transact(chunk, f"putting the offsets of group {group} into ZooKeeper")
            except Changed as changed:
                raise _conflict(group, f"{changed.path}: {changed.what} at the same moment") from None


def _conflict(group: str, by: str) -> GroupHeld:
    return GroupHeld(
        f"group {group} in ZooKeeper is in use: {by}",
        remedy=f"stop its consumers and repeat; see who: sluice groups describe {group}",
    )


Committed = Mapping[TopicPartition, CommittedOffset | None]
Close = Callable[[], None]


def larger(kafka: CommittedOffset | None, zookeeper: CommittedOffset | None) -> CommittedOffset | None:
    """Return the offset from which the group goes on: Kafka's if both hold the same, unsettled if they differ."""
    if kafka is None or zookeeper is None:
        only = kafka or zookeeper
        return None if only is None else replace(only, settled=False)
    chosen = kafka if kafka.offset >= zookeeper.offset else zookeeper
    return chosen if kafka.offset == zookeeper.offset else replace(chosen, settled=False)


def merge_offsets(kafka: Committed, zookeeper: Committed) -> dict[TopicPartition, CommittedOffset | None]:
    return {tp: larger(kafka.get(tp), zookeeper.get(tp)) for tp in {**kafka, **zookeeper}}


class BothGroup:
    """`ports.Group` over both stores.

    Others are checked in both: in ZooKeeper before we read, in Kafka before we commit.
    """

    def __init__(self, kafka: Group, zookeeper: Group, close: Close) -> None:
        self._kafka = kafka
        self._zookeeper = zookeeper
        self.close = close

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Committed:
        wanted = list(partitions)
        return merge_offsets(self._kafka.fetch_committed(wanted), self._zookeeper.fetch_committed(wanted))

    def members(self) -> tuple[Member, ...]:
        return (*self._kafka.members(), *self._zookeeper.members())

    def check_alone(self) -> None:
        self._zookeeper.check_alone()
        self._kafka.check_alone()

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None:
        self._zookeeper.own(partitions, lost)

    @contextlib.contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[BothMembership]:
        with (
            self._zookeeper.join(topics, None) as zookeeper,
            self._kafka.join(topics, transactional_id) as kafka,
        ):
            yield BothMembership(kafka, zookeeper)


class BothMembership:
    """Our membership in both. Offsets that Kafka refuses are not written to ZooKeeper."""

    def __init__(self, kafka: Membership, zookeeper: Membership) -> None:
        self._kafka = kafka
        self._zookeeper = zookeeper

    def init_transactions(self) -> None:
        self._kafka.init_transactions()

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Committed:
        wanted = list(partitions)
        return merge_offsets(self._kafka.fetch_committed(wanted), self._zookeeper.fetch_committed(wanted))

    def partitions_of(self, topic: str) -> int:
        return self._kafka.partitions_of(topic)

    def commit_transaction(self, offsets: Offsets, topic: str = "", letters: Iterable[DeadLetter] = ()) -> None:
        self._then_zookeeper(lambda: self._kafka.commit_transaction(offsets, topic, letters), offsets)

    def commit_plain(self, offsets: Offsets) -> None:
        self._then_zookeeper(lambda: self._kafka.commit_plain(offsets), offsets)

    def _then_zookeeper(self, in_kafka: Close, offsets: Offsets) -> None:
        """Write to ZooKeeper even if Kafka's answer was lost: the offsets are accounted for in either store."""
        unknown: SluiceError | None = None
        try:
            in_kafka()
        except Unknown as error:
            unknown = error
        self._zookeeper.commit_plain(offsets)
        if unknown:
            raise unknown


class BothGroups:
    """`ports.Groups` over both stores. A group is shown from the store that has members, Kafka's first."""

    def __init__(self, kafka: Groups, zookeeper: Groups, close: Close) -> None:
        self._kafka = kafka
        self._zookeeper = zookeeper
        self.close = close

    def list_groups(self) -> tuple[ListedGroup, ...]:
        """Return all groups of Kafka, and ZooKeeper's groups that Kafka does not know."""
        groups = {g.group: g for g in (*self._zookeeper.list_groups(), *self._kafka.list_groups())}
        return tuple(groups[name] for name in sorted(groups))

    def view(self, group: str) -> GroupView:
        kafka, zookeeper = self._kafka.view(group), self._zookeeper.view(group)
        return zookeeper if (kafka.free and not zookeeper.free) or not kafka.exists else kafka

    def fetch_committed(self, group: str) -> Offsets:
        offsets = merge_offsets(self._kafka.fetch_committed(group), self._zookeeper.fetch_committed(group))
        return {tp: offset for tp, offset in offsets.items() if offset is not None}

    def put(self, group: str, offsets: Offsets) -> None:
        self._kafka.put(group, offsets)
        self._zookeeper.put(group, offsets)
