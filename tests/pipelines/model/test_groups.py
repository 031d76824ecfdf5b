"""Facts about a consumer group: the expiry of its offsets and the holders of partitions."""

from __future__ import annotations

import pytest

from sluice.pipelines.model.consumer_groups import (
    Counting,
    GroupState,
    GroupView,
    OffsetExpiry,
    estimate_expiry,
    format_kind,
)
from sluice.pipelines.model.kafka import TopicPartition
from sluice.testing.group import BROKER, member

WEEK = 7 * 86_400_000
TP = TopicPartition("orders", 0)


def view(state: str, kind: str = "classic", protocol_type: str = "consumer", **fields: object) -> GroupView:
    return GroupView("g", kind, state, protocol_type, "", BROKER, **{"members": (), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "left_at", "expected"),
    [
        (view("Stable"), 5, OffsetExpiry(Counting.NEVER, WEEK)),
        (view("PreparingRebalance"), None, OffsetExpiry(Counting.NEVER, WEEK)),
        (view("Empty"), 5, OffsetExpiry(Counting.EMPTY, WEEK, WEEK + 5)),
        (view("Empty"), None, OffsetExpiry(Counting.EMPTY, WEEK)),
        (view("Empty", protocol_type=""), 5, OffsetExpiry(Counting.COMMIT, WEEK)),
        (view("Empty", kind="consumer"), 5, OffsetExpiry(Counting.COMMIT, WEEK)),
    ],
)
def test_offset_expiry_follows_kafka_rules_and_claims_only_known_facts(
    group: GroupView, left_at: int | None, expected: OffsetExpiry
) -> None:
    assert estimate_expiry(group, WEEK, left_at) == expected


def test_offset_expiry_has_no_time_without_known_retention() -> None:
    assert estimate_expiry(view("Empty"), None, 5) == OffsetExpiry(Counting.EMPTY, None)


def test_group_view_reports_partition_owner_and_members() -> None:
    holder = member("loader", TP)
    group = view("Stable", members=(member("idle"), holder))
    assert (group.holder(TP), group.holder(TopicPartition("orders", 1))) == (holder, None)
    assert group.who() == "idle at 10.0.0.7, loader at 10.0.0.7"
    assert view("Assigning").who() == "no member is listed yet"
    assert view("Stable", kind="share", members=None).who() == "members of the 'share' protocol"
    many = view("Stable", members=tuple(member(f"m{n}") for n in range(9)))
    assert many.who().endswith("m2 at 10.0.0.7 and 6 more")


@pytest.mark.parametrize("state", [s for s in GroupState if s not in ("Empty", "Dead")])
def test_only_an_empty_or_dead_group_is_free(state: GroupState) -> None:
    assert not view(state).free
    assert view("Empty").free
    assert view("Dead").free
    assert not view("SomethingNew").free


def test_consumer_group_type_is_formatted_with_its_kip() -> None:
    assert [format_kind(k) for k in ("classic", "consumer", "newest")] == [
        "classic",
        "consumer (KIP-848)",
        "newest",
    ]
