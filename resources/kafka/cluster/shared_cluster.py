"""One Kafka for many feeds: shared connections, and one snapshot that answers each feed's first requests.

Topics, positions, committed offsets and settings of all the feeds are requested together: a few requests to each broker
however many feeds there are (KIP-699, KIP-709), where each feed alone takes a dozen. Concurrent look-ups by time are
combined.

Promises: a snapshot is used for `AGE` after it was taken, and a feed that has called `forget` gets none. Each feed
requests for itself everything that a snapshot could not cover (a topic without a leader, a missing right, brokers
before 3.0), with its own patience and its own error. Commits and fetches never go by a snapshot. Safe for feeds side by
side in threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from kafka.errors import KafkaError

from sluice.pipelines.errors import SluiceError, UnknownTopic
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.rights import Right
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.model.kafka import (
    CommittedOffset,
    Configs,
    Isolation,
    OffsetAtTime,
    OpenTransaction,
    PartitionState,
    Tail,
    TopicPartition,
)
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAccess
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.group.group import KafkaGroup
from sluice.resources.kafka.group.membership import KafkaMembership
from sluice.resources.kafka.protocol import group_api
from sluice.resources.kafka.protocol.group_api import GROUP
from sluice.resources.kafka.protocol.messages import ClusterView

AGE = 5.0
"""Seconds after which a snapshot is out of date for every feed."""
CONFIGS_AGE = 60.0
"""The same for settings, which are only for explanations."""
PATIENCE = 1.0
"""Seconds that a feed waits for another's look-up before it sends its own."""
MOST = 20_000
"""The most partitions of a snapshot: feeds with the fewest come in first, and those with more ask by themselves."""

Offsets = Mapping[TopicPartition, CommittedOffset | None]


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _read_clock() -> float:
    """Return seconds of a clock that never steps back and counts the sleep of a suspended machine, too."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of one Kafka, taken from `began` to `ended` (see `_read_clock`).

    `partitions`: by topic, for topics of which no partition is missing. `committed`: by group.
    """

    began: float
    ended: float
    layout: ClusterView
    topics: Mapping[str, str]
    partitions: Mapping[str, tuple[PartitionState, ...]]
    committed: Mapping[str, Offsets]


@dataclass(frozen=True, slots=True)
class _Failed:
    """A failed snapshot: requests in the moments after it get the same error."""

    ended: float
    error: SluiceError


@dataclass(eq=False, slots=True)
class _Question:
    """A look-up by time, and Kafka's answer once there is one; `failed`: there is none for the combined request."""

    times: Mapping[TopicPartition, int]
    max_skew: int | None
    answer: Mapping[TopicPartition, OffsetAtTime | None] | None = None
    failed: bool = False


@dataclass
class SharedKafka:
    """The Kafka of `feeds`, all of which reach it by exactly the settings `access`.

    Opens no connection before the first request.
    """

    access: KafkaAccess
    feeds: Sequence[Feed]
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _last: Look | _Failed | None = None
    _settings: tuple[float, Configs] | None = None
    _coordinators: dict[str, int] = field(default_factory=dict)
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _questions: list[_Question] = field(default_factory=list)
    _apart: float = 0.0

    def __post_init__(self) -> None:
        self.wire = Wire(self.access)
        self._cluster = KafkaCluster(self.access, wire=self.wire)

    def close(self) -> None:
        self.wire.close()

    def cluster(self) -> SharedCluster:
        """Return the Cluster port of one of the feeds. Closing it leaves the connections to the others."""
        return SharedCluster(self)

    def group(self, name: str, rights: Sequence[Right] = (), **seconds: float) -> SharedGroup:
        """Return the Group port of one of the feeds, which needs these rights; `seconds` as of KafkaGroup."""
        return SharedGroup(self, name, rights, **seconds)

    def look(self) -> Look:
        """Return a snapshot that is not out of date. Raises as KafkaCluster; callers within `AGE` get the same
        error."""
        with self._lock:
            last = self._last
            if last is None or _read_clock() - last.ended > AGE:  # it may have taken longer
                last = self._last = self._take_look(_read_clock())
        if isinstance(last, _Failed):
            raise copy(last.error)
        return last

    def configs(self) -> Configs:
        """Return the settings of all topics in the last snapshot, and of a broker."""
        with self._lock:
            at, cached = self._settings or (0.0, Configs())
            if not at or time.monotonic() - at > CONFIGS_AGE:
                cached = self._cluster.configs(self.look().partitions)
                self._settings = time.monotonic(), cached
            return cached

    def offsets_at(
        self, times: Mapping[TopicPartition, int], max_skew: int | None = None
    ) -> Mapping[TopicPartition, OffsetAtTime | None] | None:
        """Look up as KafkaCluster does, if the last snapshot has the partitions; return None if Kafka is slow or fails.

        While Kafka answers one look-up, those of other feeds wait, and are then combined. After None each feed asks by
        itself for CONFIGS_AGE seconds, so that none waits for another's broker.
        """
        if time.monotonic() < self._apart:
            return None
        mine = _Question(times, max_skew)
        self._questions.append(mine)
        try:
            if self._asking.acquire(timeout=PATIENCE):
                try:
                    if mine.answer is None and not mine.failed:
                        self._ask_together()
                finally:
                    self._asking.release()
        finally:
            self._withdraw(mine)
        return mine.answer

    def _withdraw(self, question: _Question) -> None:
        with contextlib.suppress(ValueError):  # already withdrawn
            self._questions.remove(question)

    def _ask_together(self) -> None:
        began = time.monotonic()
        questions, merged, max_skew = list[_Question](), dict[TopicPartition, int](), None
        for question in [*self._questions]:
            if (not questions or question.max_skew == max_skew) and merged.keys().isdisjoint(question.times):
                merged |= question.times
                max_skew = question.max_skew
                questions.append(question)
                self._withdraw(question)
        try:
            self._cluster.begin(self.look().layout)
            offsets = self._cluster.offsets_at(merged, max_skew)
            for question in questions:
                question.answer = {tp: offsets[tp] for tp in question.times}
        except SluiceError:
            for question in questions:
                question.failed = True
        if (questions and questions[0].failed) or time.monotonic() - began > PATIENCE:
            self._apart = time.monotonic() + CONFIGS_AGE

    def drop(self, group: str) -> None:
        """Drop the group from the last snapshot: its offsets are about to move."""
        with self._lock:
            if isinstance(self._last, Look):
                remaining = {name: offsets for name, offsets in self._last.committed.items() if name != group}
                self._last = replace(self._last, committed=remaining)

    # -- snapshots

    def _take_look(self, began: float) -> Look | _Failed:
        try:
            layout = self._cluster.layout()
            topics = self._cluster.map_topic_ids(layout)
            wanted = _within_bounds({f.name: _topics_of(f, topics) for f in self.feeds}, layout)
            states = self._cluster.glance(layout, {t for names in wanted.values() for t in names})
        except SluiceError as error:
            return _Failed(_read_clock(), error)
        partitions = _whole_topics(layout, states)
        groups = {
            f.group: [p.tp for topic in wanted[f.name] for p in partitions.get(topic, ())]
            for f in self.feeds
            if f.name in wanted and (f.offsets.dual_commit or not f.offsets.in_zookeeper)
        }
        groups = {group: tps for group, tps in groups.items() if tps}
        committed: Mapping[str, Offsets] = {}
        with contextlib.suppress(SluiceError):  # without them, each feed asks for its own
            committed = self.wire.run("reading committed offsets", self._ask_coordinators, groups)
        return Look(began, _read_clock(), layout, topics, partitions, committed)

    async def _ask_coordinators(self, groups: Mapping[str, Sequence[TopicPartition]]) -> Mapping[str, Offsets]:
        if unknown := [g for g in groups if g not in self._coordinators]:
            self._coordinators |= await self.wire.find_coordinators(GROUP, unknown)
        by_broker: dict[int, dict[str, Sequence[TopicPartition]]] = {}
        for group in groups:
            if group in self._coordinators:
                by_broker.setdefault(self._coordinators[group], {})[group] = groups[group]
        committed: dict[str, Offsets] = {}

        async def one(broker: int, mine: Mapping[str, Sequence[TopicPartition]]) -> None:
            with contextlib.suppress(KafkaError):
                response = await self.wire.send(broker, group_api.ask_committed_of(mine))
                committed.update(group_api.read_committed_of(response))
            for group in mine.keys() - committed.keys():
                self._coordinators.pop(group, None)  # it may have moved

        await self.wire.gather(one(broker, mine) for broker, mine in by_broker.items())
        return committed


class SharedCluster:
    """`ports.Cluster` of one feed among others. Requests not covered by a snapshot go over the shared connections."""

    def __init__(self, shared: SharedKafka) -> None:
        self._shared = shared
        self._own = KafkaCluster(shared.access, wire=shared.wire)
        self._began, self._by_itself = 0.0, False

    def close(self) -> None:
        """Do nothing: the connections are shared."""

    def forget(self) -> None:
        """Use no snapshot from now on: this feed sends its own requests."""
        self._by_itself = True
        self._own.forget()

    def get_age(self) -> int:
        """Return the age (ms) of the snapshot; 0 if this feed uses none."""
        look = self._look()
        return 0 if look is None else int((_read_clock() - look.began) * 1000) + 1

    def get_clock_lead(self) -> int | None:
        return self._own.get_clock_lead()

    def _look(self) -> Look | None:
        if self._by_itself:
            return None
        look = self._shared.look()
        if look.began != self._began:
            self._own.begin(look.layout)
            self._began = look.began
        return look

    def cluster_id(self) -> str:
        look = self._look()
        return look.layout.cluster_id if look and look.layout.cluster_id else self._own.cluster_id()

    def topics(self) -> Mapping[str, str]:
        look = self._look()
        return look.topics if look else self._own.topics()

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        names = sorted(set(topics))
        look = self._look()
        if look is None or any(name not in look.partitions for name in names):
            return self._own.partitions(names, isolation)
        return tuple(
            p if isolation is Isolation.READ_COMMITTED else replace(p, last_stable_offset=p.high_watermark)
            for name in names
            for p in look.partitions[name]
        )

    def offsets_at(
        self, times: Mapping[TopicPartition, int], max_skew: int | None = None
    ) -> Mapping[TopicPartition, OffsetAtTime | None]:
        look = self._look()
        offsets = None
        if look is not None and all(tp.topic in look.partitions for tp in times):
            offsets = self._shared.offsets_at(times, max_skew)
        return self._own.offsets_at(times, max_skew) if offsets is None else offsets

    def open_transactions(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OpenTransaction]:
        return self._own.open_transactions(partitions)

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """Return epoch ends, without partitions whose epoch still lasts in the snapshot.

        Such an epoch ends at the high watermark or above, which the caller knows.
        """
        look = self._look()
        lasting = {tp: leadership.leader_epoch for tp, leadership in look.layout.leaders.items()} if look else {}
        return self._own.epoch_ends({tp: e for tp, e in epochs.items() if lasting.get(tp) != e})

    def read_checksums(self, tails: Mapping[TopicPartition, Tail]) -> Mapping[TopicPartition, int]:
        return self._own.read_checksums(tails)

    def configs(self, topics: Iterable[str]) -> Configs:
        wanted = set(topics)
        try:
            cached = self._shared.configs()
        except SluiceError:
            return self._own.configs(wanted)
        covered = wanted & (cached.topics.keys() | {*cached.denied})
        if covered != wanted:
            return self._own.configs(wanted)
        mine = {t: c for t, c in cached.topics.items() if t in wanted}
        return Configs(mine, cached.broker, tuple(t for t in cached.denied if t in wanted))


class SharedGroup(KafkaGroup):
    """`ports.Group` of one feed among others. It joins and commits as usual, over connections of its own."""

    def __init__(self, shared: SharedKafka, group: str, rights: Sequence[Right], **seconds: float) -> None:
        super().__init__(shared.access, group, wire=shared.wire.borrow(rights), **seconds)
        self._shared, self._name = shared, group

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Offsets:
        wanted = sorted(set(partitions))
        with contextlib.suppress(SluiceError):
            cached = self._shared.look().committed.get(self._name, {})
            if all(tp in cached for tp in wanted):
                return {tp: cached[tp] for tp in wanted}
        return self.committed_now(wanted)

    # `KafkaMembership` never uses these cached offsets: it asks Kafka.

    @contextlib.contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[KafkaMembership]:
        """Join as KafkaGroup does. Until the group is left, and right after it, no snapshot has its offsets."""
        self._shared.drop(self._name)
        try:
            with super().join(topics, transactional_id) as member:
                yield member
        finally:
            self._shared.drop(self._name)


def _topics_of(feed: Feed, topics: Mapping[str, str]) -> tuple[str, ...]:
    """Return the feed's topics that exist."""
    if feed.topics.names:
        return tuple(name for name in feed.topics.names if name in topics)
    with contextlib.suppress(UnknownTopic):
        return match(feed.topics, topics)
    return ()


def _within_bounds(wanted: Mapping[str, tuple[str, ...]], layout: ClusterView) -> dict[str, tuple[str, ...]]:
    """Return the feeds, the smallest first, whose topics together have no more than `MOST` partitions."""
    sizes: dict[str, int] = {}
    for tp in layout.leaders:
        sizes[tp.topic] = sizes.get(tp.topic, 0) + 1

    def size(feed: str) -> int:
        return sum(sizes.get(topic, 0) for topic in wanted[feed])

    taken, room = dict[str, tuple[str, ...]](), MOST
    for feed in sorted(wanted, key=size):
        room -= size(feed)
        if room >= 0:
            taken[feed] = wanted[feed]
    return taken


def _whole_topics(
    layout: ClusterView, known_states: Mapping[TopicPartition, PartitionState]
) -> dict[str, tuple[PartitionState, ...]]:
    """Return the partitions by topic, for topics of which none is missing."""
    topics: dict[str, list[PartitionState]] = {}
    for tp in sorted(known_states):
        topics.setdefault(tp.topic, []).append(known_states[tp])
    missing = {tp.topic for tp in layout.leaders if tp not in known_states}
    return {topic: tuple(states) for topic, states in topics.items() if topic not in missing}
