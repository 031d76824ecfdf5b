"""`sluice repair`, `sluice unstick` and `sluice prune`: what they print, what they exit with, what they refuse."""

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
from tests.assets.world import World, hour, in_hour
from tests.cli.conftest import Sluice, Tell


@dg.op
def nothing() -> None: ...


@dg.job(name="land_orders", tags={FEED_TAG: "orders"})
def land_orders() -> None:
    nothing()


def begun(world: World, *, killed: bool) -> str:
    """A run that Dagster shows as started; of a killed one nobody holds the lock."""
    home = prepare_home(world.project)
    with open_instance(world.project) as instance:
        run = instance.create_run_for_job(
            land_orders, status=dg.DagsterRunStatus.STARTED, tags={"dagster/partition": "2024-05-01T03:00"}
        )
    if killed:
        (home / "attended").mkdir(exist_ok=True)
        (home / "attended" / run.run_id).touch()
    return run.run_id


def left_behind(world: World, run: str) -> int:
    """The live batch of a run that was killed while it landed an hour."""
    feed, world.engine.raising = world.session().feed("orders"), SystemExit()
    with world.open_ports(feed) as edges, pytest.raises(SystemExit):
        land(feed, edges, in_hour(3), owner("gone", run), world.progress.append)
    world.engine.raising = None
    return world.state().live()[0].id


def test_unstick_ends_the_dead_names_what_they_left_and_leaves_the_living(world: World, tell: Tell) -> None:
    dead, alive = begun(world, killed=True), begun(world, killed=False)
    batch = left_behind(world, dead)
    with holding(prepare_home(world.project), alive):
        dry = tell(unstick, dry_run=True)
        assert "to be marked as failed" in dry.text
        said = tell(unstick, text=False)
        again = tell(unstick)
    (ended,), (other,) = said.document["ended"], said.document["under_way"]
    assert [dry.document[k] for k in ("ended", "under_way")] == [[ended], [other]]
    assert (ended["run"], ended["window"], ended["dead"]) == (dead, "2024-05-01T03:00", True)
    (left,) = ended["batches"]
    assert (left["feed"], left["batch"], left["kept"]) == ("orders", batch, "no offset range is finished")
    assert left["remedy"][0].startswith("sluice run orders --window 2024-05-01T03:00 ")
    assert (other["run"], other["evidence"]) == (alive, "its process holds its lock")
    assert again.document["ended"] == []
    assert "no dead runs" in again.text


def test_unstick_forces_one_run_only_by_name(world: World, tell: Tell) -> None:
    alive, unknown = begun(world, killed=False), begun(world, killed=False)
    with holding(prepare_home(world.project), alive):
        with pytest.raises(Refused, match="is alive: its process holds its lock"):
            tell(unstick, run=alive[:8])
        with pytest.raises(Refused, match="may be alive") as refused:
            tell(unstick, run=unknown)
        assert f"sluice unstick --run {unknown[:8]} --force" in refused.value.remedy
        said = tell(unstick, run=unknown, force=True, text=False)
    assert [e["run"] for e in said.document["ended"]] == [unknown]
    with pytest.raises(UsageError, match="is FAILURE"):
        tell(unstick, run=unknown)
    with pytest.raises(UsageError, match="no active run begins with nonsense"):
        tell(unstick, run="nonsense")
    with pytest.raises(UsageError, match="--force without --run"):
        tell(unstick, force=True)


def test_repair_says_each_thing_and_then_that_there_is_nothing(world: World, tell: Tell) -> None:
    world.land_unrecorded(in_hour(0))
    world.lake.remove(paths.window_path("orders", hour(0), 3_600_000))
    world.lake.files["data/orders/mine.parquet"] = b"?"
    dry = tell(repair, dry_run=True)
    assert "! to be written: the manifest of 1 complete window, 2024-05-01T00:00" in dry.text
    assert "3 things to fix: sluice repair orders" in dry.text
    said = tell(repair, "orders", text=False)
    assert said.code == 0
    whats = [f["what"] for f in said.document["feeds"][0]["found"]]
    assert whats == ["manifest", "stranger", "untold", "untold"]
    assert [f["what"] for f in dry.document["feeds"][0]["found"]] == whats
    again = tell(repair)
    assert "1 file unknown to the ledger: data/orders/mine.parquet" in again.text
    assert "nothing else to repair" in again.text
    del world.lake.files["data/orders/mine.parquet"]
    assert "✓ nothing to repair" in tell(repair).text


def test_repair_removes_what_killed_processes_left_in_the_temporary_folder(
    world: World, tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    left = tmp_path / "temporary" / "sluice-1"
    left.mkdir(parents=True)
    (left / "held").touch()
    told = tell(repair, "orders", dry_run=True)
    assert told.document["temporary"] == [str(left)]
    assert f"to be removed: the temporary folder {left}" in told.text
    assert tell(repair, "orders", text=False).document["temporary"] == [str(left)]
    assert not left.exists()


def test_repair_gives_up_what_is_dead_and_nothing_else(world: World, tell: Tell) -> None:
    batch = left_behind(world, "some-run")
    with pytest.raises(PlanBusy, match="is at work"):
        tell(repair, "orders", abandon=[batch])
    busy = tell(runs.run, ["orders"], text=False)
    assert (busy.code, busy.run["error"]) == (75, "PlanBusy"), "it goes on once the other run has ended"
    world.bury()
    waiting = tell(repair, "orders")
    assert f"sluice repair orders --abandon {batch}   gives it up" in waiting.text
    assert tell(repair, "orders", abandon=[batch], text=False).document["feeds"][0]["found"][0]["done"] == "abandoned"
    assert world.state().live() == ()
    with pytest.raises(UsageError, match="--abandon without a feed"):
        tell(repair, abandon=[batch])
    with pytest.raises(UsageError, match="has no batch 99"):
        tell(repair, "orders", abandon=[99])


def test_missing_files_are_beyond_repair(world: World, tell: Tell) -> None:
    world.run(in_hour(0))
    gone = next(p for p in world.lake.files if p.startswith("data/"))
    world.lake.remove(gone)
    said = tell(repair)
    assert said.code == 1
    assert "✗ 1 published file missing" in said.text
    assert "sluice run orders --window 2024-05-01T00:00 --replace" in said.text


def test_they_are_commands(project: object, sluice: Sluice) -> None:
    assert sluice("repair", "--json").document["feeds"] == [{"feed": "orders", "found": []}]
    assert sluice("unstick", "--json").document["ended"] == []


def test_prune_says_what_goes_and_removes_it(world: World, tell: Tell) -> None:
    world.run(in_hour(0))
    assert "no run that ended before" in tell(prune).text
    dry = tell(prune, older="0s", dry_run=True)
    assert "to be removed: the logs of 1 run" in dry.text
    gone = tell(prune, older="0s", text=False)
    assert [r["job"] for r in gone.document["runs"]] == ["land_orders"]
    assert tell(prune, older="0s").document["runs"] == []
    assert tell(prune, older="999999d").document["before"] == "1970-01-01T00:00:00Z"
    with pytest.raises(UsageError, match="--older 'soon'"):
        tell(prune, older="soon")
