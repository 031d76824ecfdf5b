"""The schedule: closed windows that are owed, by the ledger alone, and no window twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import dagster as dg

from sluice.assets.location import build
from sluice.assets.session import AGAIN_TAG, RunSession
from sluice.assets.shown import landed_key
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ports import Edges
from tests.assets.world import World, in_hour

DAY = "2024-05-01T"


class Deaf:
    """Kafka, when nobody may talk to it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the schedule asked Kafka for {name}")


def tick(world: World, instance: dg.DagsterInstance) -> list[str] | str:
    """The windows that a tick asks for, or why it asks for none."""

    @contextmanager
    def without_kafka(feed: Feed) -> Iterator[Edges]:
        with world.open_edges(feed) as edges:
            yield replace(edges, cluster=Deaf(), group=Deaf())

    session = RunSession(world.project, without_kafka)
    defs = build(world.project, session)
    with dg.build_schedule_context(instance, world.time(), repository_def=defs.get_repository_def()) as context:
        data = defs.resolve_schedule_def("land_orders_windows").evaluate_tick(context)
    return [(r.partition_key or "").removeprefix(DAY) for r in data.run_requests or ()] or data.skip_message or ""


def hours(*numbers: int) -> list[str]:
    return [f"{n:02}:00" for n in numbers]


def test_it_asks_for_owed_windows_oldest_first_a_few_at_a_time(world: World, instance: dg.DagsterInstance) -> None:
    assert tick(world, instance) == hours(4), "no ledger yet: the newest window that is closed"
    world.land_unrecorded(in_hour(3))
    assert tick(world, instance) == hours(0, 1, 2)
    world.at(12)
    assert tick(world, instance) == hours(0, 1, 2, 5, 6, 7), "six at a time; the quiet hour 4 is whole"
    world.land_unrecorded()
    assert tick(world, instance) == "no closed window of orders is owed"
    world.at(13, minutes=9)
    assert tick(world, instance) == "no closed window of orders is owed", "hour 12 is over and has not settled"
    world.at(13, minutes=11)
    assert tick(world, instance) == hours(12)


def test_a_window_under_way_is_left_alone(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(2))
    started = dg.DagsterRunStatus.STARTED
    left_behind(world, instance, started, "00:00")
    left_behind(world, instance, started, "01:00", backfill=True)
    assert tick(world, instance) == hours(3)
    left_behind(world, instance, started, "03:00")
    assert "3 windows are owed, all under way or failed 3 times" in tick(world, instance)


def test_a_window_that_failed_thrice_waits_for_somebody(world: World, instance: dg.DagsterInstance) -> None:
    world.land_unrecorded(in_hour(4))
    failed, succeeded = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS
    for _ in range(3):
        left_behind(world, instance, failed, "00:00", tags={AGAIN_TAG: ""})
        left_behind(world, instance, failed, "01:00")
        left_behind(world, instance, failed, "02:00", tags={AGAIN_TAG: "KafkaUnavailable"})
    left_behind(world, instance, succeeded, "01:00")
    left_behind(world, instance, failed, "03:00")
    assert tick(world, instance) == hours(1, 2, 3), "succeeded since; passes by itself; once"


def left_behind(
    world: World,
    instance: dg.DagsterInstance,
    status: dg.DagsterRunStatus,
    window: str,
    *,
    backfill: bool = False,
    tags: dict[str, str] | None = None,
) -> None:
    """A run of a window, of the feed's job or of a backfill, that has come so far."""
    defs, key = build(world.project), landed_key("orders")
    job = defs.resolve_implicit_job_def_def_for_assets([key]) if backfill else defs.resolve_job_def("land_orders")
    assert job is not None
    instance.create_run_for_job(
        job,
        status=status,
        tags={"dagster/partition": DAY + window} | job.tags | (tags or {}),
        asset_selection=frozenset({key}) if backfill else None,
    )
