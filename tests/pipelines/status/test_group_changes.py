"""Changes of a group between two snapshots: their descriptions, and the transitions of the state machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from sluice.pipelines.model.consumer_groups import (
    PREDECESSORS,
    Broker,
    GroupMember,
    GroupState,
    GroupView,
    changes,
    way,
)
from sluice.pipelines.model.kafka import TopicPartition

HERE = Broker(1, "127.0.0.1:9092")
EMPTY = GroupView("g", "classic", GroupState.EMPTY, "consumer", "", HERE, ())


def make_member(name: str, *partitions: int, static: str | None = None) -> GroupMember:
    return GroupMember(name, "loader", "10.0.0.1", static, tuple(TopicPartition("t", p) for p in partitions))


def make_stable_view(*members: GroupMember) -> GroupView:
    return replace(EMPTY, state=GroupState.STABLE, assignor="range", members=members)


@pytest.mark.parametrize(("before", "after"), [*product(PREDECESSORS, PREDECESSORS)])
def test_state_path_consists_of_allowed_transitions(before: GroupState, after: GroupState) -> None:
    through = way(before, after)
    if before is GroupState.DEAD:
        assert through is None
    elif before is not after:
        assert through is not None
        path = [before, *(GroupState(s) for s in through), after]
        assert all(a in PREDECESSORS[b] for a, b in pairwise(path))


@pytest.mark.parametrize(
    ("before", "after", "through"),
    [
        ("Empty", "PreparingRebalance", ()),
        ("Empty", "Stable", ("PreparingRebalance", "CompletingRebalance")),
        ("Stable", "Empty", ("PreparingRebalance",)),
        ("Stable", "Dead", ()),
    ],
)
def test_unobserved_states_between_snapshots_are_named(before: str, after: str, through: tuple[str, ...]) -> None:
    (change,) = changes(replace(EMPTY, state=before), replace(EMPTY, state=after))
    assert (change.what, change.through, change.allowed) == ("state", through, True)
    assert change.text.startswith(f"{before} → {after}")
    assert all(state in change.text for state in through)


def test_group_that_returns_from_dead_is_reported_as_new() -> None:
    (change,) = changes(replace(EMPTY, state="Dead"), EMPTY)
    assert change.text == "Dead → Empty: a new group of that name"


def test_state_machine_does_not_apply_to_new_protocol_groups() -> None:
    newer = replace(EMPTY, kind="consumer")
    (change,) = changes(newer, replace(newer, state="Reconciling"))
    assert (change.text, change.allowed) == ("Empty → Reconciling", True)


def test_joins_leaves_and_reassigned_partitions_are_reported() -> None:
    before = make_stable_view(make_member("a", 0, 1, 2, 3), make_member("b"))
    after = make_stable_view(make_member("a", 0, 1), make_member("c", 2, 3))
    assert [c.text for c in changes(before, after)] == [
        "loader at 10.0.0.1 gives up t:2, t:3",
        "loader at 10.0.0.1 joined",
        "loader at 10.0.0.1 left, or was dropped",
    ]
    assert changes(after, after) == ()


def test_static_member_with_new_id_is_reported_as_returned() -> None:
    before, after = (make_stable_view(make_member(name, 0, static="one")) for name in ("a", "b"))
    assert [c.what for c in changes(before, after)] == ["returned"]


def test_changes_of_assignor_and_coordinator_are_reported() -> None:
    moved = replace(make_stable_view(), coordinator=Broker(2, "127.0.0.1:9093"))
    texts = [c.text for c in changes(EMPTY, moved)]
    assert "the members chose the assignor range" in texts
    assert texts[-1] == "its coordinator is broker 2 at 127.0.0.1:9093 now"
