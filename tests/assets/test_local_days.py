"""Days of a time zone in Dagster: partitions, schedule, runs and checks over both changes of clocks."""

from __future__ import annotations

import dagster as dg
import pytest

from sluice.assets.checks.feed_checks import OFFSETS_COMMITTED, WINDOW_COMPLETE
from sluice.assets.operations.event_log_repair import reconcile
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import HOUR, parse_instant
from tests.assets.test_schedule import evaluate_tick
from tests.assets.world import FEED, P0, P1, World, read_checks, read_windows

LANDED = landed_key("orders")
BERLIN = "window: {length: 1d, timezone: Europe/Berlin}\n"
DAYS = {
    "2024-03-31": ("2024-03-30T23:00:00Z", "2024-03-31T22:00:00Z", "2024-04-01", "2024-04-02"),
    "2024-10-27": ("2024-10-26T22:00:00Z", "2024-10-27T23:00:00Z", "2024-10-28", "2024-10-29"),
}


def run_tick(world: World, instance: dg.DagsterInstance, now: int) -> list[str | None] | str:
    world.clock.now = now
    data = evaluate_tick(world, instance)
    return [r.partition_key for r in data.run_requests or ()] or data.skip_message or ""


@pytest.mark.parametrize("day", DAYS)
def test_each_local_day_is_a_partition_that_the_schedule_requests(
    day: str, world: World, instance: dg.DagsterInstance
) -> None:
    begin, end = map(parse_instant, DAYS[day][:2])
    following, third = DAYS[day][2:]
    text = FEED.replace("2024-05-01", f"{day[:8]}01") + BERLIN
    (world.project.feeds_folder / "orders.yaml").write_text(text)
    world.cluster.stamps.clear()
    for tp in (P0, P1):
        world.cluster.write(tp, range(begin, end + 48 * HOUR, HOUR))
    hours = (end - begin) // HOUR
    assert hours == {"2024-03-31": 23, "2024-10-27": 25}[day]
    assert day not in run_tick(world, instance, end + 9 * 60_000), "in its grace period"
    assert run_tick(world, instance, end + 11 * 60_000) == [day]
    outcome = world.run(Request(RequestKind.WINDOW, window=begin))
    run = instance.get_run_by_id(outcome.run_id)
    assert run is not None
    assert (run.job_name, run.tags["dagster/partition"]) == ("__ASSET_JOB", day)
    landed = read_windows(instance, LANDED)
    assert {key: window["rows"] for key, window in landed.items()} == {day: 2 * hours}
    assert landed[day]["dagster/uri"] == f"memory://data/orders/kafka_window_date={day}"
    for check in (WINDOW_COMPLETE, OFFSETS_COMMITTED):
        assert read_checks(instance, outcome.run_id, check)[day].passed
    assert run_tick(world, instance, end + 24 * HOUR + 9 * 60_000) == "no closed window of orders is pending"
    assert run_tick(world, instance, end + 24 * HOUR + 11 * 60_000) == [following]
    world.clock.now = end + 48 * HOUR + 11 * 60_000
    world.land_unrecorded(Request(RequestKind.WINDOW, window=end, until=end + 48 * HOUR))
    assert [*reconcile(instance, world.open_ledger_view())]
    assert {key: window["rows"] for key, window in read_windows(instance, LANDED).items()} == {
        day: 2 * hours,
        following: 48,
        third: 48,
    }
    assert [*reconcile(instance, world.open_ledger_view())] == []
