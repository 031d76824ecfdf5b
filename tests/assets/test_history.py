"""Logs of old runs are removed; their materializations stay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg

from sluice.assets.factory import build
from sluice.assets.instance import internals, storage
from sluice.assets.specs.asset_specs import committed_key, landed_key
from tests.assets.conftest import ON_FILES
from tests.assets.world import World, in_hour, read_windows, resolve_landing

SOON = timedelta(hours=1)


@ON_FILES
def test_old_run_logs_are_removed_and_windows_stay_green(world: World, instance: dg.DagsterInstance) -> None:
    ran = [world.run(in_hour(n)).run_id for n in (0, 1)]
    now = datetime.now(UTC)
    assert not list(storage.old_logs(instance, world.project, now - SOON))
    green = read_windows(instance, landed_key("orders")), read_windows(instance, committed_key("orders"))
    old_logs = list(storage.old_logs(instance, world.project, now + SOON))
    assert {log.run for log in old_logs} == {*ran}
    assert all(log.bytes > 10_000 and log.job == "orders/committed orders/landed" for log in old_logs)
    for log in old_logs:
        storage.remove(instance, log)
    assert not any(path.exists() for log in old_logs for path in log.files)
    assert not list(storage.old_logs(instance, world.project, now + SOON))
    assert green == (read_windows(instance, landed_key("orders")), read_windows(instance, committed_key("orders")))
    assert {r.run_id for r in instance.get_runs()} == {*ran}
    outcome = world.run(in_hour(2))
    assert outcome.error is None
    assert len(read_windows(instance, landed_key("orders"))) == len(green[0]) + 1


@ON_FILES
def test_unfinished_run_keeps_its_log(world: World, instance: dg.DagsterInstance) -> None:
    job = resolve_landing(build(world.project))
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    instance.report_engine_event("begins", run)
    assert list(internals.files_of_run(instance, run.run_id))
    assert not list(storage.old_logs(instance, world.project, datetime.now(UTC) + SOON))
