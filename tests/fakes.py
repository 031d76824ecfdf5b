"""Tiny stand-ins for the ports, for unit tests only: a lake, a cluster and a group in memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from sluice.pipelines.ports import Letter, Member
from sluice.pipelines.vocabulary.errors import CommitFenced, GroupHeld, Unknown, UnknownTopic
from sluice.pipelines.vocabulary.kafka import (
    CommittedOffset,
    Configs,
    Isolation,
    OffsetAtTime,
    OpenTransaction,
    PartitionState,
    TopicPartition,
)
from sluice.pipelines.vocabulary.receipts import Life, Owner, Verdict


class MemoryLake:
    """A lake in a dict. `before_put(path)` may raise or write, to play rivals and lost answers."""

    uri = "memory://"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.before_put: Callable[[str], None] = lambda path: None
        self.lose_answer_of: set[str] = set()
        self.begun: dict[str, int] = {}

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.before_put(path)
        if path in self.files:
            return False
        self.files[path] = bytes(data)
        if path in self.lose_answer_of:
            self.lose_answer_of.remove(path)
            raise Unknown(f"no answer for {path}")
        return True

    def put(self, path: str, data: bytes) -> None:
        self.files[path] = bytes(data)

    def get(self, path: str) -> bytes | None:
        return self.files.get(path)

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        folder = prefix.rstrip("/") + "/"
        return iter(sorted(p for p in self.files if p.startswith(folder) and p > after))

    def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        sink = io.BytesIO()
        yield sink
        self.files[path] = sink.getvalue()

    def open(self, path: str) -> BinaryIO:
        if path not in self.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self.files[path])

    def show(self, source: str, target: str) -> None:
        if source not in self.files:
            raise FileNotFoundError(source)
        self.files[target] = self.files[source]

    def remove(self, path: str) -> None:
        self.files.pop(path, None)

    def unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        folder = prefix.rstrip("/") + "/"
        return iter(sorted((p, age) for p, age in self.begun.items() if p.startswith(folder)))

    def discard(self, name: str) -> None:
        self.begun.pop(name, None)

    def locate(self, path: str) -> str:
        return self.uri + path


@dataclass
class FakeCluster:
    """A cluster with one state for each partition."""

    states: dict[TopicPartition, PartitionState] = field(default_factory=dict)
    id: str = "cluster-1"
    at: dict[TopicPartition, OffsetAtTime] = field(default_factory=dict)
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    open: dict[TopicPartition, OpenTransaction] = field(default_factory=dict)
    settings: Configs = field(default_factory=Configs)

    def cluster_id(self) -> str:
        return self.id

    def topics(self) -> Mapping[str, str]:
        return {s.topic: s.topic_id for s in self.states.values()}

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        wanted = set(topics)
        return tuple(s for tp, s in sorted(self.states.items()) if tp.topic in wanted)

    def offsets_at(self, times: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, OffsetAtTime | None]:
        return {tp: self.at.get(tp) for tp in times}

    def open_transactions(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OpenTransaction]:
        return {tp: self.open[tp] for tp in partitions if tp in self.open}

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        return {tp: self.ends[tp] for tp in epochs if tp in self.ends}

    def configs(self, topics: Iterable[str]) -> Configs:
        wanted = set(topics)
        told = {t: c for t, c in self.settings.topics.items() if t in wanted}
        return Configs(told, self.settings.broker, self.settings.denied)


@dataclass
class FakeGroup:
    """A group coordinator: one generation at a time, one transactional id, answers that can get lost."""

    offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)
    others: list[Member] = field(default_factory=list)
    generation: int = 0
    epoch: int = 0
    joins: int = 0
    lose: str | None = None
    """`after`: the next commit takes effect and its answer is lost; `before`: it does not."""
    on_commit: Callable[[], None] = lambda: None
    topics: dict[str, int] = field(default_factory=dict)
    """The topics that letters may go to, with how many partitions they have."""
    letters: list[tuple[str, Letter]] = field(default_factory=list)
    """What readers see in them."""
    on_letter: Callable[[Letter], None] = lambda letter: None
    on_end: Callable[[], None] = lambda: None
    """Called when a transaction has taken effect, before its caller hears of it."""

    def committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        return {tp: self.offsets.get(tp) for tp in partitions}

    def members(self) -> tuple[Member, ...]:
        return tuple(self.others)

    @contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[FakeMembership]:
        if self.others:
            raise GroupHeld("held")
        self.joins += 1
        self.generation += 1
        yield FakeMembership(self, self.generation)

    def intrude(self) -> None:
        """Somebody else joins: our generation is over."""
        self.generation += 1


class FakeMembership:
    def __init__(self, group: FakeGroup, generation: int) -> None:
        self._group, self._generation, self._epoch = group, generation, -1

    def init_transactions(self) -> None:
        self._group.epoch += 1
        self._epoch = self._group.epoch

    def committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        return self._group.committed(partitions)

    def partitions_of(self, topic: str) -> int:
        if topic not in self._group.topics:
            raise UnknownTopic(f"no topic {topic}", topic=topic)
        return self._group.topics[topic]

    def commit_transaction(
        self, offsets: Mapping[TopicPartition, CommittedOffset], topic: str = "", letters: Iterable[Letter] = ()
    ) -> None:
        self._group.on_commit()
        if self._epoch != self._group.epoch:
            raise CommitFenced("fenced by a newer producer")
        pending = []
        for letter in letters:
            self._group.on_letter(letter)
            pending.append((topic, letter))
        self._commit(offsets, pending)

    def commit_plain(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        self._commit(offsets, [])

    def _commit(self, offsets: Mapping[TopicPartition, CommittedOffset], letters: list[tuple[str, Letter]]) -> None:
        if self._generation != self._group.generation:
            raise CommitFenced("illegal generation")
        lose, self._group.lose = self._group.lose, None
        if lose != "before":
            self._group.offsets.update(offsets)
            self._group.letters += letters
            self._group.on_end()
        if lose:
            raise Unknown("no answer")


@dataclass
class FakeLiveness:
    """Owners are alive until their token is in `dead`; of `suspects` only watching tells."""

    dead: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)
    beaten: list[str] = field(default_factory=list)
    beats: dict[str, int] = field(default_factory=dict)
    """By token, when it was heard of last (ms)."""
    known: list[Owner] = field(default_factory=list)
    """Whose beats stand in the lake."""

    @contextmanager
    def beat(self, owner: Owner) -> Iterator[None]:
        self.beaten.append(owner.token)
        yield

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        return {o.token: Verdict(self._life(o.token, watch), "so it was said") for o in owners}

    def _life(self, token: str, watch: bool) -> Life:
        if token in self.suspects:
            return (Life.DEAD if token in self.dead else Life.ALIVE) if watch else Life.UNKNOWN
        return Life.DEAD if token in self.dead else Life.ALIVE

    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.known)

    def last_beat(self, owner: Owner) -> int | None:
        return self.beats.get(owner.token)


def partition(topic: str = "orders", number: int = 0, **changes: object) -> PartitionState:
    """A partition with 100 stable offsets on leader 1, unless told otherwise."""
    fields = {
        "topic_id": "id-1",
        "leader": 1,
        "leader_epoch": 0,
        "log_start": 0,
        "stable_end": 100,
        "high_watermark": 100,
        "log_bytes": None,
    } | changes
    return PartitionState(topic, number, **fields)  # type: ignore[arg-type]


def owner(token: str = "token-1", run: str = "run-1") -> Owner:
    return Owner(token, run, "host", 1, 0)
