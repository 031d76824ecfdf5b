"""A lake that was restored from an older copy, while the table's catalog, which is outside of it, is newer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Call
from tests.integration.support import FeedProject, list_files, produce_values

pytestmark = pytest.mark.kafka


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    return FeedProject(tmp_path, kafka, fresh_topic(partitions=2), {})


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the lake", "elsewhere"])
@pytest.mark.parametrize("commit", ["transactional", "none"])
def test_table_of_a_newer_catalog_is_made_again_by_one_command(
    project: FeedProject, tmp_path: Path, call: Call, where: str, commit: str
) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    catalog |= {"warehouse": f"file://{tmp_path}/warehouse"} if where == "elsewhere" else {}
    table = f"{{iceberg: {{name: db.orders, catalog: {catalog}}}}}".replace("'", '"')
    feed = project.write_feed("orders", table=table, commit=commit)
    lake, copy = tmp_path / ".sluice" / "lake", tmp_path / "copy"
    produce_values(project, 20)
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert call("table", "sync", "orders")[0] == 0
    shutil.copytree(lake, copy)
    produce_values(project, 20)
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert call("table", "sync", "orders")[0] == 0
    shutil.rmtree(lake)
    shutil.copytree(copy, lake)

    code, text = call("table", "sync", "orders")
    assert (code, "sluice table rebuild orders" in text) == (3, True), text
    assert call("table", "rebuild", "orders", "--yes")[0] == 0
    if commit == "transactional":
        assert call("run", "orders", "--no-dagster")[0] == 3
        assert call("accept", "orders", "ledger", "--reason", "restored")[0] == 0
    assert call("run", "orders", "--no-dagster")[0] == 0
    assert call("table", "sync", "orders")[0] == 0
    code, text = call("table", "check", "orders")
    assert code == 0, text
    rows = load_catalog("sluice", **catalog).load_table("db.orders").scan().to_arrow().num_rows
    assert (rows, len(list_files(feed)) > 0) == (40, True)
    code, text = call("doctor", "orders")
    assert "the catalog of table db.orders is outside of the lake" in text
