"""A topic that was deleted and created again: commands that list both incarnations give their topic ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.cli.daily import audit, run, status
from sluice.cli.inspect import explain
from sluice.cli.maintain import accept
from sluice.cli.terminal.text_layout import label_partitions
from sluice.pipelines.model.kafka import Key
from tests.assets.world import P0, P1, World
from tests.cli.conftest import Invoke

OLD, NEW = "27YBcOddSAqT4E4khZ-qSQ", "9fK2mWx1Qb2ZzY5rTtUvWw"


@pytest.fixture
def twice(world: World, invoke: Invoke) -> World:
    for tp in (P0, P1):
        world.cluster.states[tp] = replace(world.cluster.states[tp], topic_id=OLD)
    world.run()
    for tp in (P0, P1):
        world.cluster.states[tp] = replace(
            world.cluster.states[tp], topic_id=NEW, last_stable_offset=30, high_watermark=30
        )
    invoke(accept.accept, "orders", event="recreated", reason="made again", text=False)
    assert invoke(run.run, ["orders"], text=False).code == 0
    return world


def test_audit_names_the_topic_id_of_each_line(twice: World, invoke: Invoke) -> None:
    result = invoke(audit.audit, "orders")
    for p in ("orders:0", "orders:1"):
        for life in (OLD, NEW):
            assert f"{p} (topic id {life[:8]})" in result.text


def test_explain_shows_the_offset_in_each_incarnation(twice: World, invoke: Invoke) -> None:
    result = invoke(explain.explain, "orders", "orders:0:7")
    assert result.document["topic_id"] == NEW
    assert [e["topic_id"] for e in result.document["earlier"]] == [OLD]
    text = " ".join(result.text.split())
    assert text.index(f"(of topic id {NEW[:8]})") < text.index(f"(of topic id {OLD[:8]})")


def test_status_omits_the_topic_id_of_a_single_incarnation(world: World, invoke: Invoke) -> None:
    world.run()
    assert "topic id" not in invoke(status.status, "orders").text


def test_incarnations_are_named_only_if_a_partition_has_several() -> None:
    first, again, other = Key("orders", 0, OLD), Key("orders", 0, f"{OLD}#1"), Key("orders", 1, OLD)
    assert label_partitions([first, again, other]) == {
        first: "orders:0 (topic id 27YBcOdd)",
        again: "orders:0 (topic id 27YBcOdd#1)",
        other: "orders:1",
    }
