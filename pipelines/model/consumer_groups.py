"""Consumer groups as their coordinator describes them: values, and the meaning of its terms.

These cover every group of a cluster, Sluice's or not, of the classic protocol or a newer one. What a coordinator does
not tell is None, never a guess. In particular no coordinator tells when a group became empty, from which its offsets
expire. The port that asks is `ports.Groups`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.model.kafka import TopicPartition

AssignedPartitions = tuple[TopicPartition, ...]


class GroupState(StrEnum):
    """A group's state, in the coordinator's spelling. Newer brokers may know others."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"


STATES: Mapping[str, str] = {
    GroupState.EMPTY: "it has no members: its offsets can be moved",
    GroupState.PREPARING_REBALANCE: "members join or leave; partitions are about to be reassigned",
    GroupState.COMPLETING_REBALANCE: "its members wait for their partitions",
    GroupState.STABLE: "its members hold their partitions",
    GroupState.DEAD: "the coordinator does not have this group",
    GroupState.ASSIGNING: "the coordinator is assigning partitions to members",
    GroupState.RECONCILING: "partitions move from one member to another",
}

ZOOKEEPER = "zookeeper"
"""What we call the kind of a group that no broker knows: that of Kafka's old consumers."""

KINDS: Mapping[str, str] = {
    "classic": "its members assign the partitions among themselves",
    "consumer": "the newer protocol, whose coordinator assigns; members of the classic protocol may be in it, too, and "
    "Sluice commits as the only member",
    "share": "hands records out one by one and has no committed offsets; its members: kafka-share-groups.sh --describe",
    "streams": "Kafka Streams' own protocol; its members: kafka-streams-groups.sh --describe",
    ZOOKEEPER: "old consumers that keep their offsets in ZooKeeper, register there and own partitions by nodes",
}
"""What each kind of group is, by the coordinator's name for it."""

_PROPOSALS = {"consumer": "KIP-848", "share": "KIP-932", "streams": "KIP-1071"}


def format_kind(kind: str) -> str:
    """The kind, followed by the proposal that introduced it if it is a newer one: `consumer (KIP-848)`."""
    return f"{kind} ({_PROPOSALS[kind]})" if kind in _PROPOSALS else kind


@dataclass(frozen=True, slots=True)
class Broker:
    """The keeper of a group: a broker, or ZooKeeper, which has no id (−1)."""

    id: int
    address: str

    def __str__(self) -> str:
        if self.id < 0:
            return f"ZooKeeper at {self.address}"
        return f"broker {self.id} at {self.address}"


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """One group in its coordinator's list. `kind` is empty before Kafka 3.8, where brokers do not tell."""

    name: str
    kind: str
    state: str
    protocol_type: str
    coordinator: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member. `assignment` is None if the coordinator does not report it in the consumers' format."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    assignment: AssignedPartitions | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group at one moment. `members` is None for a kind whose members Sluice cannot list; `assignor` is empty while
    the group settles."""

    name: str
    kind: str
    state: str
    protocol_type: str
    assignor: str
    coordinator: Broker
    members: tuple[GroupMember, ...] | None

    @property
    def exists(self) -> bool:
        return self.state != GroupState.DEAD

    @property
    def free(self) -> bool:
        """Whether the group has no members, so that its offsets may be moved."""
        return self.state in (GroupState.EMPTY, GroupState.DEAD)

    def holder(self, tp: TopicPartition) -> GroupMember | None:
        """The member that holds the partition."""
        return next((m for m in self.members or () if tp in (m.assignment or ())), None)

    def who(self) -> str:
        """The members in a few words, for people."""
        if self.members is None:
            return f"members of the '{self.kind}' protocol"
        members = [f"{m.client_id} at {m.host}" for m in self.members] or ["nobody is listed yet"]
        return ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")


class Counting(StrEnum):
    """The event from which the retention of a group's offsets counts (KIP-211). NOTHING: they never expire."""

    EMPTY = "empty"
    COMMIT = "commit"
    NEVER = "never"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class OffsetExpiry:
    """When a group's committed offsets expire.

    `retention` is in ms, None when unknown. `not_before` (ms since the epoch) is known only if Sluice left the group
    last.
    """

    counting: Counting
    retention: int | None
    not_before: int | None = None


def estimate_expiry(group: GroupView, retention: int | None, left: int | None = None) -> OffsetExpiry:
    """Known bounds on the expiry of the group's offsets.

    `retention` is in ms. `left` is when Sluice was last a member (ms since the epoch), as the ledger tells it. No
    coordinator tells when a group became empty or when an offset was committed. For an empty classic group of
    consumers the time counts from when its last member left; a commit by hand does not restart it.
    """
    if group.kind == ZOOKEEPER:
        return OffsetExpiry(Counting.NOTHING, None)
    if not group.free:
        return OffsetExpiry(Counting.NEVER, retention)
    if group.kind == "classic" and group.protocol_type:
        is_known = left is not None and retention is not None
        return OffsetExpiry(Counting.EMPTY, retention, left + retention if is_known and left and retention else None)
    return OffsetExpiry(Counting.COMMIT, retention)
