"""A consumer group in memory: its coordinator and our membership."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sluice.pipelines.errors import CommitFenced, GroupHeld, Unknown, UnknownTopic
from sluice.pipelines.model.consumer_groups import Broker, GroupMember, GroupState, GroupView, ListedGroup
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.ports import DeadLetter, Member


@dataclass
class MemoryGroup:
    """`ports.Group` in memory: one generation at a time, one transactional ID, responses that can get lost."""

    offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)
    others: list[Member] = field(default_factory=list)
    generation: int = 0
    epoch: int = 0
    joins: int = 0
    lose: str | None = None
    """`after`: the next commit takes effect and its response is lost; `before`: it does not take effect."""
    on_commit: Callable[[], None] = lambda: None
    topics: dict[str, int] = field(default_factory=dict)
    """Topics of dead letters, with their number of partitions."""
    letters: list[tuple[str, DeadLetter]] = field(default_factory=list)
    """Committed dead letters, with their topics."""
    on_letter: Callable[[DeadLetter], None] = lambda letter: None
    on_end: Callable[[], None] = lambda: None
    """Called when a transaction has taken effect, before `commit_transaction` returns."""

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        return {tp: self.offsets.get(tp) for tp in partitions}

    def members(self) -> tuple[Member, ...]:
        return tuple(self.others)

    def check_alone(self) -> None:
        if self.others:
            raise GroupHeld("held")

    def own(self, partitions: Callable[[], Iterable[TopicPartition]], lost: Callable[[], None]) -> None: ...

    @contextmanager
    def join(self, topics: Sequence[str], transactional_id: str | None) -> Iterator[MemoryMembership]:
        if self.others:
            raise GroupHeld("held")
        self.joins += 1
        self.generation += 1
        yield MemoryMembership(self, self.generation)

    def intrude(self) -> None:
        """Join as another member, which ends our generation."""
        self.generation += 1


class MemoryMembership:
    """`ports.Membership` of one join: fenced when another member joins, or another producer starts transactions."""

    def __init__(self, group: MemoryGroup, generation: int) -> None:
        self._group, self._generation, self._epoch = group, generation, -1

    def init_transactions(self) -> None:
        self._group.epoch += 1
        self._epoch = self._group.epoch

    def fetch_committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        return self._group.fetch_committed(partitions)

    def partitions_of(self, topic: str) -> int:
        if topic not in self._group.topics:
            raise UnknownTopic(f"no topic {topic}", topic=topic)
        return self._group.topics[topic]

    def commit_transaction(
        self, offsets: Mapping[TopicPartition, CommittedOffset], topic: str = "", letters: Iterable[DeadLetter] = ()
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

    def _commit(self, offsets: Mapping[TopicPartition, CommittedOffset], letters: list[tuple[str, DeadLetter]]) -> None:
        if self._generation != self._group.generation:
            raise CommitFenced("illegal generation")
        lose, self._group.lose = self._group.lose, None
        if lose != "before":
            self._group.offsets.update(offsets)
            self._group.letters += letters
            self._group.on_end()
        if lose:
            raise Unknown("no answer")


BROKER = Broker(1, "kafka-1:9092")


@dataclass
class MemoryGroups:
    """`ports.Groups` in memory.

    `ours` is the name of `group`; `kinds` and `members` are by name.
    """

    ours: str
    group: MemoryGroup
    others: dict[str, dict[TopicPartition, CommittedOffset]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    members: dict[str, tuple[GroupMember, ...]] = field(default_factory=dict)
    lose_answer: bool = False
    before_put: Callable[[], None] = lambda: None
    after_put: Callable[[], None] = lambda: None

    def close(self) -> None: ...

    def list_groups(self) -> tuple[ListedGroup, ...]:
        names = sorted({*self.others, *self.members, *([self.ours] if self.group.offsets else [])})
        return tuple(ListedGroup(v.group, v.kind, v.state, v.protocol_type, BROKER.id) for v in map(self.view, names))

    def view(self, group: str) -> GroupView:
        members, kind = self.members.get(group, ()), self.kinds.get(group, "classic")
        state = GroupState.STABLE if members else GroupState.EMPTY if self._offsets(group) else GroupState.DEAD
        return GroupView(group, kind, state, "consumer", "range" if members else "", BROKER, members)

    def fetch_committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        return dict(self._offsets(group))

    def put(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        self.before_put()
        if self.members.get(group):
            raise GroupHeld("held")
        (self.group.offsets if group == self.ours else self.others.setdefault(group, {})).update(offsets)
        self.after_put()
        if self.lose_answer:
            raise Unknown("lost")

    def _offsets(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        return self.group.offsets if group == self.ours else self.others.get(group, {})


def member(client: str = "loader", *partitions: TopicPartition, instance: str | None = None) -> GroupMember:
    """Returns a member with these partitions."""
    return GroupMember(f"{client}-1", client, "10.0.0.7", instance, partitions)
