"""Dagster's runs and events in a real PostgreSQL, with a dagster.yaml as in Dagster's documentation."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.instance.instance import open_instance
from sluice.assets.specs.asset_specs import committed_key, landed_key
from sluice.pipelines.errors import DagsterUnavailable
from tests.assets.conftest import ON_POSTGRES, on_postgres
from tests.assets.test_ui import disconnect_kafka
from tests.assets.ui import open_pages
from tests.assets.world import World, in_hour
from tests.postgres import Postgres

LANDED, COMMITTED = landed_key("orders"), committed_key("orders")


@pytest.fixture
def world(root: Path, postgres: Postgres) -> World:
    if not ON_POSTGRES:
        on_postgres(root / ".sluice" / "dagster", postgres)
    return World(root)


def test_runs_checks_and_pages_work_on_postgresql(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window lands, a run over it fails, and the pages are the same as with SQLite."""
    good = world.run(in_hour(0))
    with monkeypatch.context() as patched:
        disconnect_kafka(world, patched)
        bad = world.run(in_hour(0))
    with open_instance(world.project) as instance, open_pages(instance, world.project, monkeypatch) as pages:
        runs = {r.run_id: r.status for r in instance.get_runs()}
        assert runs == {good.run_id: dg.DagsterRunStatus.SUCCESS, bad.run_id: dg.DagsterRunStatus.FAILURE}
        assert pages.fetch_node(LANDED)["partitionStats"]["numMaterialized"]
        assert (pages.count_failed_partitions(LANDED), pages.count_failed_partitions(COMMITTED)) == (0, 0)
        assert "EXECUTION_FAILED" not in pages.read_check_statuses(LANDED).values()


def test_production_dagster_yaml_is_accepted_by_dagster(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"postgresql:///{postgres.create_database()}?host={postgres.folder}&user={postgres.user}"
    monkeypatch.setenv("SLUICE_DAGSTER_DATABASE", address)
    shutil.copy(Path(__file__).parents[2] / "infra" / "dagster.yaml", tmp_path)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.get_runs() == []
        assert instance.run_retries_enabled
        assert instance.run_monitoring_enabled


def test_unavailable_database_is_reported_as_one_error(world: World, postgres: Postgres) -> None:
    assert world.run(in_hour(0)).error is None
    config = world.project.dagster_home / "dagster.yaml"
    config.write_text(config.read_text().replace(str(postgres.folder), str(postgres.folder / "elsewhere")))
    with pytest.raises(DagsterUnavailable, match="database does not answer") as raised:
        world.run(in_hour(1))
    assert "dagster.yaml" in raised.value.remedy
