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
def test_every_way_is_one_of_allowed_steps(before: GroupState, after: GroupState) -> None:
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
def test_states_that_passed_unseen_are_named(before: str, after: str, through: tuple[str, ...]) -> None:
    (change,) = changes(replace(EMPTY, state=before), replace(EMPTY, state=after))
    assert (change.what, change.through, change.allowed) == ("state", through, True)
    assert change.text.startswith(f"{before} → {after}")
    assert all(state in change.text for state in through)


def test_a_group_that_was_gone_is_a_new_one() -> None:
    (change,) = changes(replace(EMPTY, state="Dead"), EMPTY)
    assert change.text == "Dead → Empty: a new group of that name"


def test_states_of_newer_groups_follow_no_such_machine() -> None:
    newer = replace(EMPTY, kind="consumer")
    (change,) = changes(newer, replace(newer, state="Reconciling"))
    assert (change.text, change.allowed) == ("Empty → Reconciling", True)


def test_members_come_go_and_pass_partitions_on() -> None:
    before = make_stable_view(make_member("a", 0, 1, 2, 3), make_member("b"))
    after = make_stable_view(make_member("a", 0, 1), make_member("c", 2, 3))
    assert [c.text for c in changes(before, after)] == [
        "loader at 10.0.0.1 gives up t:2, t:3",
        "loader at 10.0.0.1 joined",
        "loader at 10.0.0.1 left, or was dropped",
    ]
    assert changes(after, after) == ()


def test_a_static_member_comes_back_under_another_id() -> None:
    before, after = (make_stable_view(make_member(name, 0, static="one")) for name in ("a", "b"))
    assert [c.what for c in changes(before, after)] == ["returned"]


def test_the_assignor_and_the_coordinator() -> None:
    moved = replace(make_stable_view(), coordinator=Broker(2, "127.0.0.1:9093"))
    texts = [c.text for c in changes(EMPTY, moved)]
    assert "the members chose the assignor range" in texts
    assert texts[-1] == "its coordinator is broker 2 at 127.0.0.1:9093 now"
