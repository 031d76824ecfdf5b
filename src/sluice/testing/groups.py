"""All consumer groups of a cluster in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice.pipelines.errors import GroupHeld, Unknown
from sluice.pipelines.model.consumer_groups import Broker, GroupMember, GroupState, GroupView, ListedGroup
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.testing.group import MemoryGroup

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

    def listed(self) -> tuple[ListedGroup, ...]:
        names = sorted({*self.others, *self.members, *([self.ours] if self.group.offsets else [])})
        return tuple(ListedGroup(v.name, v.kind, v.state, v.protocol_type, BROKER.id) for v in map(self.view, names))

    def view(self, group: str) -> GroupView:
        members, kind = self.members.get(group, ()), self.kinds.get(group, "classic")
        state = GroupState.STABLE if members else GroupState.EMPTY if self._offsets(group) else GroupState.DEAD
        return GroupView(group, kind, state, "consumer", "range" if members else "", BROKER, members)

    def committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
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
