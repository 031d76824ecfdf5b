"""Changes of a consumer group between two observations, and whether its state machine allows them.

Looks are a moment apart, so a short state may pass unseen: a change lists the states in between, if the state machine
has no shorter way. Sources: Kafka's `GroupState` with its valid previous states for the classic protocol, and
KIP-848 for the newer one, where the coordinator goes from any state to any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.pipelines.model.consumer_groups import GroupMember, GroupState, GroupView
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.util.units import many

_S = GroupState
PREDECESSORS: Mapping[GroupState, frozenset[GroupState]] = {
    _S.EMPTY: frozenset({_S.PREPARING_REBALANCE}),
    _S.PREPARING_REBALANCE: frozenset({_S.EMPTY, _S.COMPLETING_REBALANCE, _S.STABLE}),
    _S.COMPLETING_REBALANCE: frozenset({_S.PREPARING_REBALANCE}),
    _S.STABLE: frozenset({_S.COMPLETING_REBALANCE}),
    _S.DEAD: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE, _S.STABLE}),
}
"""The states that a group of the classic protocol may come from, by the state that it goes to."""


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
    if was.assignment == now.assignment or was.assignment is None or now.assignment is None:
        return
    lost, gained = sorted({*was.assignment} - {*now.assignment}), sorted({*now.assignment} - {*was.assignment})
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
