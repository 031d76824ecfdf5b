"""Consumer groups as their coordinator describes them: values, and the meaning of its terms.

These cover every group of a cluster, Sluice's or not, of the classic protocol or a newer one. Unknown values are
None, never a guess. In particular no coordinator reports when a group became empty, from which its offsets
expire. The port that asks is `ports.Groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import join_first, many

AssignedPartitions = tuple[Flat[TopicPartition], ...]


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

    group: str
    kind: str
    state: str
    protocol_type: str
    coordinator: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member. `partitions` is None if the coordinator does not report it in the consumers' format."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    partitions: AssignedPartitions | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group at one moment. `members` is None for a kind whose members Sluice cannot list; `assignor` is empty while
    the group settles."""

    group: str
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
        """True if the group has no members, so that its offsets may be moved."""
        return self.state in (GroupState.EMPTY, GroupState.DEAD)

    def holder(self, tp: TopicPartition) -> GroupMember | None:
        """The member that holds the partition."""
        return next((m for m in self.members or () if tp in (m.partitions or ())), None)

    def who(self) -> str:
        """Returns a short description of the members."""
        if self.members is None:
            return f"members of the '{self.kind}' protocol"
        return join_first((f"{m.client_id} at {m.host}" for m in self.members), 3) or "no member is listed yet"


class Counting(StrEnum):
    """The event from which the retention of a group's offsets counts (KIP-211). NOTHING: they never expire."""

    EMPTY = "empty"
    COMMIT = "commit"
    NEVER = "never"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class OffsetExpiry:
    """When a group's committed offsets expire.

    `retention_ms` is None when unknown. `not_before` (ms since the epoch) is known only if Sluice left the group
    last.
    """

    counted_from: Counting
    retention_ms: int | None
    not_before: int | None = None


def estimate_expiry(group: GroupView, retention: int | None, left_at: int | None = None) -> OffsetExpiry:
    """Known bounds on the expiry of the group's offsets.

    `retention` is in ms. `left_at` is when Sluice was last a member (ms since the epoch), as the ledger records it. No
    coordinator reports when a group became empty or when an offset was committed. For an empty classic group of
    consumers the time counts from when its last member left; a commit by hand does not restart it.
    """
    if group.kind == ZOOKEEPER:
        return OffsetExpiry(Counting.NOTHING, None)
    if not group.free:
        return OffsetExpiry(Counting.NEVER, retention)
    if group.kind == "classic" and group.protocol_type:
        is_known = left_at is not None and retention is not None
        return OffsetExpiry(
            Counting.EMPTY, retention, left_at + retention if is_known and left_at and retention else None
        )
    return OffsetExpiry(Counting.COMMIT, retention)


_S = GroupState
PREDECESSORS: Mapping[GroupState, frozenset[GroupState]] = {
    _S.EMPTY: frozenset({_S.PREPARING_REBALANCE}),
    _S.PREPARING_REBALANCE: frozenset({_S.EMPTY, _S.COMPLETING_REBALANCE, _S.STABLE}),
    _S.COMPLETING_REBALANCE: frozenset({_S.PREPARING_REBALANCE}),
    _S.STABLE: frozenset({_S.COMPLETING_REBALANCE}),
    _S.DEAD: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE, _S.STABLE}),
}
"""The states that a group of the classic protocol may come from, by the state that it goes to (Kafka's `GroupState`).

With KIP-848, the coordinator goes from any state to any other.
"""


@dataclass(frozen=True, slots=True)
class GroupChange:
    """One change. `what` is `state`, `joined`, `left`, `returned`, `holds`, `assignor` or `coordinator`.

    `text` describes it. Of a change of state, `before` and `after` are the states, `through` those in between, and
    `allowed` is whether the state machine has a way at all.
    """

    what: str
    text: str
    member: str = ""
    before: str = ""
    after: str = ""
    through: tuple[str, ...] = ()
    allowed: bool = True


def changes(before: GroupView, after: GroupView) -> tuple[GroupChange, ...]:
    """Everything that changed, the state first; empty when nothing did."""
    return (*_state(before, after), *_members(before, after), *_rest(before, after))


def way(before: str, after: str) -> tuple[str, ...] | None:
    """The states between two states of a classic group, by the shortest way; None when there is none."""
    ways: dict[str, tuple[str, ...]] = {before: ()}
    queue = [before]
    for state in queue:
        through = (*ways[state], state) if state != before else ()
        for following in (to for to, sources in PREDECESSORS.items() if state in sources):
            if following == after:
                return through
            if following not in ways:
                ways[following] = through
                queue.append(following)
    return None


def _state(before: GroupView, after: GroupView) -> Iterator[GroupChange]:
    if before.state == after.state:
        return
    text = f"{before.state} → {after.state}"
    if not before.exists:
        yield GroupChange("state", f"{text}: a new group of that name", "", before.state, after.state)
        return
    classic = {before.state, after.state} <= set(PREDECESSORS) and after.kind in ("", "classic")
    through = way(before.state, after.state) if classic else ()
    if through is None:
        message = f"{text}: not a change that the state machine allows"
        yield GroupChange("state", message, "", before.state, after.state, (), allowed=False)
        return
    message = f"{text}, by way of {', '.join(through)}" if through else text
    yield GroupChange("state", message, "", before.state, after.state, through)


def _members(before: GroupView, after: GroupView) -> Iterator[GroupChange]:
    was, now = ({m.member_id: m for m in view.members or ()} for view in (before, after))
    departed = [m for name, m in was.items() if name not in now]
    statics = {m.instance_id: m for m in departed if m.instance_id}
    for name, member in now.items():
        if name in was:
            yield from _holding(was[name], member)
        elif member.instance_id in statics:
            yield GroupChange("returned", f"static member {member.instance_id} is back, {_format_member(member)}", name)
        else:
            yield GroupChange("joined", f"{_format_member(member)} joined", name)
    back = {m.instance_id for name, m in now.items() if name not in was and m.instance_id}
    for member in departed:
        if member.instance_id is None or member.instance_id not in back:
            yield GroupChange("left", f"{_format_member(member)} left, or was dropped", member.member_id)


def _holding(was: GroupMember, now: GroupMember) -> Iterator[GroupChange]:
    if was.partitions == now.partitions or was.partitions is None or now.partitions is None:
        return
    lost, gained = sorted({*was.partitions} - {*now.partitions}), sorted({*now.partitions} - {*was.partitions})
    changes = [f"gets {_some(gained)}"] * bool(gained) + [f"gives up {_some(lost)}"] * bool(lost)
    yield GroupChange("holds", f"{_format_member(now)} {' and '.join(changes)}", now.member_id)


def _rest(before: GroupView, after: GroupView) -> Iterator[GroupChange]:
    if after.assignor and before.assignor != after.assignor:
        yield GroupChange("assignor", f"the members chose the assignor {after.assignor}")
    if before.coordinator != after.coordinator:
        yield GroupChange("coordinator", f"its coordinator is {after.coordinator} now")


def _format_member(m: GroupMember) -> str:
    static = f" (static {m.instance_id})" if m.instance_id else ""
    return f"{m.client_id}{static} at {m.host}"


def _some(tps: list[TopicPartition]) -> str:
    return ", ".join(map(str, tps)) if len(tps) <= 4 else f"{tps[0]} … {tps[-1]}, {many(len(tps), 'partition')}"
