"""`sluice repair`, `sluice unstick` and `sluice prune`: their texts, documents, exit codes and refusals."""

from __future__ import annotations

import tempfile
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.instance.instance import holding, open_instance, prepare_home
from sluice.assets.runs.run_session import FEED_TAG
from sluice.cli.daily import run as runs
from sluice.cli.maintain.prune import prune
from sluice.cli.maintain.repair import repair
from sluice.cli.maintain.unstick import unstick
from sluice.pipelines.batch.land import land
from sluice.pipelines.errors import PlanBusy, Refused, UsageError
from sluice.pipelines.lake import paths
from sluice.testing.engine import owner
from tests.assets.world import World, at_hour, in_hour
from tests.cli.conftest import Invoke, Sluice


@dg.op
def nothing() -> None: ...


@dg.job(name="land_orders", tags={FEED_TAG: "orders"})
def land_orders() -> None:
    nothing()


def begin_run(world: World, *, killed: bool) -> str:
    """Create a run that Dagster shows as started. Of a killed run, no process holds the lock."""
    home = prepare_home(world.project)
    with open_instance(world.project) as instance:
        run = instance.create_run_for_job(
            land_orders, status=dg.DagsterRunStatus.STARTED, tags={"dagster/partition": "2024-05-01T03:00"}
        )
    if killed:
        (home / "attended").mkdir(exist_ok=True)
        (home / "attended" / run.run_id).touch()
    return run.run_id


def leave_batch(world: World, run: str) -> int:
    """Kill a run while it lands an hour. Return the id of its live batch."""
    feed, world.engine.raising = world.make_session().feed("orders"), SystemExit()
    with world.open_ports(feed) as ports, pytest.raises(SystemExit):
        land(feed, ports, in_hour(3), owner("gone", run), world.progress.append)
    world.engine.raising = None
    return world.state().live()[0].id


def test_unstick_ends_dead_runs_names_their_batches_and_keeps_live_runs(world: World, invoke: Invoke) -> None:
    dead, alive = begin_run(world, killed=True), begin_run(world, killed=False)
    batch = leave_batch(world, dead)
    with holding(prepare_home(world.project), alive):
        dry = invoke(unstick, dry_run=True)
        assert "to be marked as failed" in dry.text
        result = invoke(unstick, text=False)
        again = invoke(unstick)
    (ended,), (other,) = result.document["ended"], result.document["under_way"]
    assert [dry.document[k] for k in ("ended", "under_way")] == [[ended], [other]]
    assert (ended["id"], ended["window"], ended["verdict"]["life"]) == (dead, "2024-05-01T03:00", "dead")
    (unfinished,) = ended["batches"]
    assert (unfinished["feed"], unfinished["batch"], unfinished["progress"]) == (
        "orders",
        batch,
        "no offset range is finished",
    )
    assert unfinished["remedy"][0].startswith("sluice run orders --window 2024-05-01T03:00 ")
    assert (other["id"], other["verdict"]["why"]) == (alive, "its process holds its lock")
    assert again.document["ended"] == []
    assert "no dead runs" in again.text


def test_unstick_forces_only_a_named_run(world: World, invoke: Invoke) -> None:
    alive, unknown = begin_run(world, killed=False), begin_run(world, killed=False)
    with holding(prepare_home(world.project), alive):
        with pytest.raises(Refused, match="is alive: its process holds its lock"):
            invoke(unstick, run=alive[:8])
        with pytest.raises(Refused, match="may be alive") as refused:
            invoke(unstick, run=unknown)
        assert f"sluice unstick --run {unknown[:8]} --force" in refused.value.remedy
        result = invoke(unstick, run=unknown, force=True, text=False)
    assert [e["id"] for e in result.document["ended"]] == [unknown]
    with pytest.raises(UsageError, match="is FAILURE"):
        invoke(unstick, run=unknown)
    with pytest.raises(UsageError, match="no active run begins with nonsense"):
        invoke(unstick, run="nonsense")
    with pytest.raises(UsageError, match="--force without --run"):
        invoke(unstick, force=True)


def test_repair_reports_each_fix_and_then_nothing_to_repair(world: World, invoke: Invoke) -> None:
    world.land_unrecorded(in_hour(0))
    world.lake.remove(paths.window_path("orders", at_hour(0), 3_600_000))
    world.lake.files["data/orders/mine.parquet"] = b"?"
    dry = invoke(repair, dry_run=True)
    assert "! to be written: the manifest of 1 complete window, 2024-05-01T00:00" in dry.text
    assert "3 things to fix: sluice repair orders" in dry.text
    result = invoke(repair, "orders", text=False)
    assert result.code == 0
    whats = [f["what"] for f in result.document["feeds"][0]["findings"]]
    assert whats == ["manifest", "stranger", "untold", "untold"]
    assert [f["what"] for f in dry.document["feeds"][0]["findings"]] == whats
    again = invoke(repair)
    assert "1 file unknown to the ledger: data/orders/mine.parquet" in again.text
    assert "nothing else to repair" in again.text
    del world.lake.files["data/orders/mine.parquet"]
    assert "✓ nothing to repair" in invoke(repair).text


def test_repair_removes_temporary_files_of_killed_processes(
    world: World, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "temporary" / "sluice-1"
    folder.mkdir(parents=True)
    (folder / "held").touch()
    result = invoke(repair, "orders", dry_run=True)
    assert result.document["temporary"] == [str(folder)]
    assert f"to be removed: the temporary folder {folder}" in result.text
    assert invoke(repair, "orders", text=False).document["temporary"] == [str(folder)]
    assert not folder.exists()


def test_repair_abandons_only_dead_batches(world: World, invoke: Invoke) -> None:
    batch = leave_batch(world, "some-run")
    with pytest.raises(PlanBusy, match="is at work"):
        invoke(repair, "orders", abandon=[batch])
    busy = invoke(runs.run, ["orders"], text=False)
    assert (busy.code, busy.run["error"]) == (75, "PlanBusy"), "it goes on once the other run has ended"
    world.bury()
    waiting = invoke(repair, "orders")
    assert f"sluice repair orders --abandon {batch}   gives it up" in waiting.text
    assert (
        invoke(repair, "orders", abandon=[batch], text=False).document["feeds"][0]["findings"][0]["act"] == "abandoned"
    )
    assert world.state().live() == ()
    with pytest.raises(UsageError, match="--abandon without a feed"):
        invoke(repair, abandon=[batch])
    with pytest.raises(UsageError, match="has no batch 99"):
        invoke(repair, "orders", abandon=[99])


def test_repair_reports_missing_files_with_a_remedy(world: World, invoke: Invoke) -> None:
    world.run(in_hour(0))
    file = next(p for p in world.lake.files if p.startswith("data/"))
    world.lake.remove(file)
    result = invoke(repair)
    assert result.code == 1
    assert "✗ 1 published file missing" in result.text
    assert "sluice run orders --missing-files" in result.text


def test_repair_and_unstick_run_from_the_command_line(project: object, sluice: Sluice) -> None:
    assert sluice("repair", "--json").document["feeds"] == [{"feed": "orders", "findings": []}]
    assert sluice("unstick", "--json").document["ended"] == []


def test_prune_previews_and_removes_logs_of_ended_runs(world: World, invoke: Invoke) -> None:
    world.run(in_hour(0))
    assert "no run that ended before" in invoke(prune).text
    dry = invoke(prune, older="0s", dry_run=True)
    assert "to be removed: the logs of 1 run" in dry.text
    result = invoke(prune, older="0s", text=False)
    assert [r["job"] for r in result.document["runs"]] == ["orders/committed orders/landed"]
    assert invoke(prune, older="0s").document["runs"] == []
    assert invoke(prune, older="999999d").document["before"] == "1970-01-01T00:00:00Z"
    with pytest.raises(UsageError, match="--older 'soon'"):
        invoke(prune, older="soon")
