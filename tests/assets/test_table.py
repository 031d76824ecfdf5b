"""`<feed>/table`: a run syncs the table with the ledger after its commit, and never waits for a catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog

from sluice.assets.factory import build
from sluice.assets.instance.instance import is_held, prepare_home
from sluice.assets.runs.run_config import catch_up_config
from sluice.assets.specs.asset_specs import landed_key
from sluice.assets.steps import table_step
from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.operating import feed_tables
from sluice.pipelines.tables.check import TableComparison
from sluice.pipelines.tables.sync import Synced
from sluice.pipelines.util.units import show_window
from sluice.resources.lake.local_lake import LocalLake
from tests.assets.world import CATCH_UP, FEED, MadeUpEngine, World, at_hour, in_hour, read_checks, read_metadata

TABLE = dg.AssetKey(["orders", "table"])
TEXT = FEED + "table: {iceberg: {name: db.orders}}\n"


@pytest.fixture
def world(root: Path) -> World:
    """A world whose lake is a real folder, since PyIceberg reads the files."""
    memory_world = World(root, {"orders": TEXT})
    memory_world.lake = LocalLake(root / "lake")  # type: ignore[assignment]
    memory_world.engine = MadeUpEngine(memory_world.lake)
    return memory_world


def test_run_syncs_table_and_survives_unavailable_catalog(world: World, instance: dg.DagsterInstance) -> None:
    catalog = world.project.root / ".sluice" / "catalog.db"
    catalog.mkdir()
    away = world.run(in_hour(0))
    assert (away.error, away.landed is not None) == (None, True)
    assert read_metadata(instance, TABLE) == []
    (evaluation,) = read_checks(instance, away.run_id, "matches_ledger").values()
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "does not answer" in str(evaluation.description)
    catalog.rmdir()
    done = world.run(in_hour(1))
    (metadata,) = read_metadata(instance, TABLE)
    assert (metadata["dagster/row_count"], metadata["files"], metadata["snapshots"], metadata["added_files"]) == (
        100,
        4,
        2,
        4,
    )
    later, earlier = (r.data for r in metadata["windows"].records)
    assert [later["window"], earlier["window"]] == [show_window(at_hour(1)), show_window(at_hour(0))]
    assert later["snapshot"] == metadata["snapshot"] != earlier["snapshot"]
    (evaluation,) = read_checks(instance, done.run_id, "matches_ledger").values()
    assert evaluation.passed
    assert metadata["snapshot"] in str(evaluation.description)
    read = load_catalog("sluice", type="sql", uri=f"sqlite:///{catalog}").load_table("db.orders")
    assert read.scan().to_arrow().num_rows == 100
    specs = {s.key: s for s in build(world.project, world.make_session()).resolve_all_asset_specs()}
    assert [d.asset_key for d in specs[TABLE].deps] == [landed_key("orders")]


def test_files_removed_by_the_next_sync_are_reported() -> None:
    comparison = TableComparison(None, {}, (), stale=("a", "b"))
    assert (
        table_step._describe(comparison, "orders")
        == "the same 0 files and rows as in the ledger; 2 more files until the next sync"
    )


def test_uncommitted_files_are_added_to_table_by_next_run(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setattr(world.group, "join", _raise_unavailable)
        assert isinstance(world.run(in_hour(0)).error, KafkaUnavailable)
    assert read_metadata(instance, TABLE) == [], "uncommitted records wait for the next run"
    world.run(in_hour(1))
    (metadata,) = read_metadata(instance, TABLE)
    assert (metadata["dagster/row_count"], metadata["added_files"]) == (100, 4)


def test_run_holds_its_lock_during_table_sync(
    world: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed during the sync is then recognized as dead."""
    locks, sync = list[bool | None](), feed_tables.sync_tables

    def check(*args: Any, **options: Any) -> tuple[Synced, tuple[str, ...]]:
        locks.extend(is_held(prepare_home(world.project), run.run_id) for run in instance.get_runs(limit=1))
        return sync(*args, **options)

    monkeypatch.setattr(feed_tables, "sync_tables", check)
    definitions = build(world.project, world.make_session())
    config = catch_up_config("orders", CATCH_UP)
    assert definitions.resolve_job_def("catch_up").execute_in_process(config, instance=instance).success
    compact = definitions.resolve_job_def("compact_many_feeds")
    config = {"ops": {"compact_many_feeds__compact": {"config": {"feed": "orders"}}}}
    assert compact.execute_in_process(config, instance=instance).success
    assert locks == [True, True]


def _raise_unavailable(*_: Any) -> None:
    raise KafkaUnavailable("nobody answers", remedy="wait")
