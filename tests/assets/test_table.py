"""`<feed>/table`: a run brings the table up to what landed, after it has committed, and never waits for a catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog

from sluice.assets.factory import build
from sluice.assets.instance.instance import is_held, prepare_home
from sluice.assets.specs.asset_specs import landed_key
from sluice.assets.steps import table_step
from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.tables.check import TableComparison
from sluice.pipelines.tables.sync import Synced
from sluice.pipelines.util.units import show_window
from sluice.resources.lake.local_lake import LocalLake
from tests.assets.world import FEED, MadeUpEngine, World, checks, hour, in_hour, stored

TABLE = dg.AssetKey(["orders", "table"])
TEXT = FEED + "table: {iceberg: {name: db.orders}}\n"


@pytest.fixture
def world(root: Path) -> World:
    """Its lake is a real folder: PyIceberg reads the files."""
    made = World(root, {"orders": TEXT})
    made.lake = LocalLake(root / "lake")  # type: ignore[assignment]
    made.engine = MadeUpEngine(made.lake)
    return made


def test_a_run_brings_the_table_up_and_a_catalog_that_is_away_stops_nothing(
    world: World, instance: dg.DagsterInstance
) -> None:
    catalog = world.project.root / ".sluice" / "catalog.db"
    catalog.mkdir()
    away = world.run(in_hour(0))
    assert (away.error, away.landed is not None) == (None, True)
    assert stored(instance, TABLE) == []
    (said,) = checks(instance, away.run_id, "matches_ledger").values()
    assert (said.passed, said.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "does not answer" in str(said.description)
    catalog.rmdir()
    done = world.run(in_hour(1))
    (told,) = stored(instance, TABLE)
    assert (told["dagster/row_count"], told["files"], told["snapshots"], told["added_files"]) == (100, 4, 2, 4)
    later, earlier = (r.data for r in told["windows"].records)
    assert [later["window"], earlier["window"]] == [show_window(hour(1)), show_window(hour(0))]
    assert later["snapshot"] == told["snapshot"] != earlier["snapshot"]
    (said,) = checks(instance, done.run_id, "matches_ledger").values()
    assert said.passed
    assert told["snapshot"] in str(said.description)
    read = load_catalog("sluice", type="sql", uri=f"sqlite:///{catalog}").load_table("db.orders")
    assert read.scan().to_arrow().num_rows == 100
    specs = {s.key: s for s in build(world.project, world.session()).resolve_all_asset_specs()}
    assert [d.asset_key for d in specs[TABLE].deps] == [landed_key("orders")]


def test_files_that_the_next_sync_takes_out_are_told() -> None:
    comparison = TableComparison(None, {}, (), stale=("a", "b"))
    assert (
        table_step._describe(comparison)
        == "the same 0 files and rows as in the ledger; 2 more files until the next sync"
    )


def test_after_a_run_that_could_not_commit_the_next_one_adds_what_it_landed(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setattr(world.group, "join", _nobody)
        assert isinstance(world.run(in_hour(0)).error, KafkaUnavailable)
    assert stored(instance, TABLE) == [], "what no offset says is landed waits for the next run"
    world.run(in_hour(1))
    (told,) = stored(instance, TABLE)
    assert (told["dagster/row_count"], told["added_files"]) == (100, 4)


def test_a_run_holds_its_lock_until_its_table_is_up(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed then is known to be dead."""
    locks, sync = list[bool | None](), table_step.sync

    def check(*args: Any, **options: Any) -> Synced:
        locks.extend(is_held(prepare_home(world.project), run.run_id) for run in instance.get_runs(limit=1))
        return sync(*args, **options)

    monkeypatch.setattr(table_step, "sync", check)
    definitions = build(world.project, world.session())
    assert definitions.resolve_job_def("catch_up_orders").execute_in_process(instance=instance).success
    compact = definitions.resolve_job_def("compact_many_feeds")
    config = {"ops": {"compact_many_feeds__compact": {"config": {"feed": "orders"}}}}
    assert compact.execute_in_process(config, instance=instance).success
    assert locks == [True, True]


def _nobody(*_: Any) -> None:
    raise KafkaUnavailable("nobody answers", remedy="wait")
