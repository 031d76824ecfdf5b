"""A republish of windows covers every row that readers of these windows get."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from sluice.pipelines.errors import Refused
from sluice.pipelines.ledger.entries import AcceptEntry, Boundaries, BoundaryEntry, Entering, OriginItem
from sluice.pipelines.model.kafka import Key, Range, TopicPartition
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.shape import RAW
from sluice.pipelines.republishing import coordinates
from sluice.pipelines.republishing.republish_plan import Republish, Wishes, asked_windows, keep, plan_republish
from sluice.pipelines.republishing.send_lane import Run, claim, finish
from tests.pipelines.landed_world import HOUR, START, A, B, World, split_offsets
from tests.pipelines.republishing.test_replaced_parts import Topic

AFTER = START + 2 * HOUR
NEW = Key("orders", 0, "id-2")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A topic that was recreated after two hours, with a new hour landed since."""
    world = World(tmp_path)
    world.land(*split_offsets(A, 50), *split_offsets(B, 50))
    begins = OriginItem(key=NEW, offset=0, committed=None, why="recreated", opens=AFTER)
    entering = Entering(leaves=A, enters=begins)
    world.ledger.append(lambda s: AcceptEntry(event="recreated", items=(entering,), reason="test"))
    pins = tuple(Boundaries(key=k, times=(AFTER + HOUR,), offsets=(o,)) for k, o in ((NEW, 40), (B, 200)))
    world.ledger.append(lambda s: BoundaryEntry(items=pins))
    world.land((NEW, 0, 40))
    return world


def plan_windows(world: World, *starts: int) -> Republish:
    state = world.state()
    return plan_republish(world.feed, state, Wishes("to", 1), asked_windows(world.feed, state, starts), 0)


def test_windows_of_earlier_topic_incarnation_are_sent(world: World) -> None:
    plan = plan_windows(world, START)
    assert {(s.key, s.ranges) for s in plan.sources} == {(A, (Range(0, 100),)), (B, (Range(0, 100),))}
    assert {s.key for s in plan_windows(world, AFTER).sources} == {NEW}


def test_rows_of_two_incarnations_of_partition_are_refused(world: World) -> None:
    with pytest.raises(Refused, match="rows of orders:0 are of several lives"):
        plan_windows(world, START, START + HOUR, AFTER)


def test_coordinates_distinguish_records_of_two_incarnations(world: World) -> None:
    lake, ledger, plan = cast(Lake, world.lake), world.reopen_ledger(), plan_windows(world, START)
    keep(lake, plan)
    Run(plan, 0, claim(lake, plan), ledger, lake, Topic(), RAW, lambda: world.now).carry_out()
    finish(lake, plan, world.now)
    tp = TopicPartition("orders", 0)
    assert [r.republish for r in coordinates.whence_and_whither(lake, "orders", tp, 3, A)] == [plan.id]
    assert [*coordinates.whence_and_whither(lake, "orders", tp, 3, NEW)] == []
    (back,) = coordinates.whence_and_whither(lake, "orders", TopicPartition("to", 0), 3, None)
    assert back.tp.topic == "orders"
