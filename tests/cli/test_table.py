"""`sluice table`: its text, documents and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog

from sluice.cli.daily import audit, run
from sluice.cli.inspect import table
from sluice.cli.maintain import compact
from sluice.pipelines.errors import TableDiffers, UsageError
from sluice.pipelines.landing import writer
from sluice.resources.lake.local_lake import LocalLake
from tests.assets.world import FEED, MadeUpEngine, World
from tests.cli.conftest import Invoke


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    asks = f"table: {{{getattr(request, 'param', 'iceberg: {name: db.orders}')}}}\n"
    world = World(tmp_path, {"orders": FEED + asks, "other": FEED})
    world.lake = LocalLake(tmp_path / "lake")  # type: ignore[assignment]
    world.engine = MadeUpEngine(world.lake)
    return world


def test_table_is_synced_reported_and_compared(world: World, invoke: Invoke) -> None:
    result = invoke(table.status, "orders")
    assert (result.document["exists"], result.code) == (False, 0)
    world.land_unrecorded()
    result = invoke(table.status, "orders")
    assert result.document["pending"] == {"batches": 1, "files": 8, "gone": 0}
    assert "8 files of 1 batch not in it yet: sluice table sync orders" in result.text
    result = invoke(table.sync, "orders")
    assert {k: result.document[k] for k in ("created", "commits", "added", "rows")} == {
        "created": True,
        "commits": 1,
        "added": 8,
        "rows": 200,
    }
    assert "all landed rows were in it already" in result.text, "the second time"
    assert "all landed rows are in it" in invoke(table.status, "orders").text
    invoke(compact.compact, "orders", text=False)
    result = invoke(table.check, "orders")
    assert (result.code, result.document["same"]) == (0, True)
    assert invoke(audit.audit, "orders", of_table=True, text=False).code == 0
    assert invoke(audit.audit, "orders", text=False).code == 0, "files that the table's snapshots name may stay"
    with pytest.raises(UsageError, match="has no table"):
        invoke(table.sync, "other")


@pytest.mark.parametrize("world", ["quarantine: true, iceberg: {name: db.orders}"], indirect=True)
def test_quarantine_has_a_table_if_configured(world: World, invoke: Invoke) -> None:
    world.engine.bad = 1
    world.land_unrecorded()
    result = invoke(table.sync, "orders")
    assert (result.document["added"], result.document["quarantine"]["added"]) == (8, 8)
    result = invoke(table.status, "orders")
    assert result.document["quarantine"]["pending"] == {"batches": 0, "files": 0, "gone": 0}
    assert "Table db.orders_quarantine" in result.text
    result = invoke(table.check, "orders")
    assert (result.code, result.document["same"], result.document["quarantine"]["sound"]) == (0, True, True)
    assert invoke(audit.audit, "orders", of_table=True, text=False).code == 0


def test_run_reports_that_the_table_is_not_up_to_date(world: World, invoke: Invoke) -> None:
    (world.project.root / ".sluice").mkdir(exist_ok=True)
    (world.project.root / ".sluice" / "catalog.db").write_bytes(b"no database")
    for names in (["orders"], ["orders", "other"]):
        result = invoke(run.run, names)
        assert (result.code, "the table is not up to date: " in result.text) == (0, True)
        assert world.open_ledger().read().batches
    assert "orders: the table is not up to date" in result.text
    assert [bool(f["runs"][0]["table"]) for f in result.document["feeds"]] == [True, False]


def test_a_table_that_is_behind_fails_its_check(world: World, invoke: Invoke) -> None:
    world.land_unrecorded()
    result = invoke(table.check, "orders")
    assert (result.code, "not in it yet: sluice table sync orders" in result.text) == (1, True)
    invoke(table.sync, "orders", text=False)
    assert invoke(table.check, "orders").code == 0


def test_table_repair_rewrites_old_files_that_spark_misreads(
    world: World, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(writer, "in_milliseconds", lambda schema: [])
        earlier.setattr(writer, "_choose_by_schema", writer._choose_by_schema.__wrapped__)
        world.land_unrecorded()
    invoke(table.sync, "orders", text=False)
    result = invoke(table.check, "orders")
    assert (result.code, len(result.document["misread"]), result.document["same"]) == (1, 8, True)
    assert "filters miss rows of feed orders: sluice table sync orders --repair" in result.text
    rows = world.open_ledger().read().frontiers()
    result = invoke(table.sync, "orders", repair=True)
    assert (result.document["misread"], result.document["rows"], result.code) == ([], 200, 0)
    result = invoke(table.check, "orders")
    assert (result.code, result.document["same"], result.document["misread"]) == (0, True, [])
    assert world.open_ledger().read().frontiers() == rows
    assert invoke(audit.audit, "orders", of_table=True, text=False).code == 0


def test_foreign_rows_in_a_table_are_reported_and_repaired(world: World, invoke: Invoke) -> None:
    world.land_unrecorded()
    invoke(table.sync, "orders", text=False)
    uri = f"sqlite:///{world.project.root}/.sluice/catalog.db"
    theirs = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders")
    theirs.append(theirs.scan().to_arrow().slice(0, 3))
    result = invoke(table.status, "orders")
    assert (result.document["trusted"], result.document["sound"], len(result.document["foreign"])) == (False, False, 1)
    assert "1 file in it is not of the feed: sluice table sync orders --repair" in result.text
    assert "all landed rows are in it" not in result.text
    result = invoke(table.check, "orders")
    assert (result.code, len(result.document["foreign"])) == (1, 1)
    assert "1 file in it is not of the feed: sluice table sync orders --repair" in result.text
    audited = invoke(audit.audit, "orders", of_table=True, text=False)
    assert (audited.code, [p["invariant"] for p in audited.document["problems"]]) == (1, [17])
    with pytest.raises(TableDiffers):
        invoke(table.sync, "orders")
    assert invoke(table.sync, "orders", repair=True, text=False).document["removed"] == 1
    assert invoke(table.check, "orders", text=False).document["same"] is True
    result = invoke(table.status, "orders")
    assert (result.document["trusted"], "all landed rows are in it" in result.text) == (True, True)


def test_files_added_twice_by_another_writer_are_reported(world: World, invoke: Invoke) -> None:
    world.run()
    invoke(table.sync, "orders")
    uri = f"sqlite:///{world.project.root}/.sluice/catalog.db"
    iceberg = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders")
    (file, *_) = (t.file for t in iceberg.scan().plan_files())
    iceberg.add_files([file.file_path], check_duplicate_files=False)
    checked = invoke(table.check, "orders")
    assert checked.code == 1
    assert "1 file is listed twice: sluice table sync orders --repair" in checked.text
    assert [Path(address).name for address in checked.document["twice"]] == [Path(file.file_path).name]


def test_files_removed_by_another_writer_are_reported_as_missing(world: World, invoke: Invoke) -> None:
    """The rollback keeps the table's mark, so that only a comparison of its files finds it."""
    world.land_unrecorded()
    invoke(table.sync, "orders", text=False)
    uri = f"sqlite:///{world.project.root}/.sluice/catalog.db"
    load_catalog("sluice", type="sql", uri=uri).load_table("db.orders").delete("partition >= 0")
    result = invoke(table.status, "orders")
    assert (result.code, len(result.document["missing"]), result.document["pending"]["files"]) == (0, 8, 0)
    assert "8 files of the feed are missing in it: sluice table sync orders --repair" in result.text


@pytest.mark.parametrize("world", ["delta: {}"], indirect=True)
def test_files_of_another_writer_are_named_by_the_audit(world: World, invoke: Invoke, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    world.land_unrecorded()
    invoke(table.sync, "orders", text=False)
    theirs = deltalake.DeltaTable(str(tmp_path / "lake" / "data" / "orders"))
    theirs.delete('partition = 0 and "offset" < 5')
    result = invoke(audit.audit, "orders")
    assert result.code == 1
    assert "sluice table sync orders --repair" in result.text
    invoke(table.sync, "orders", repair=True, text=False)
    deltalake.write_deltalake(theirs.table_uri, theirs.to_pyarrow_table().slice(0, 3), mode="append")
    invoke(table.sync, "orders", repair=True, text=False)
    result = invoke(audit.audit, "orders")
    assert (result.code, len(result.document["foreign"])) == (0, 2)
    assert "2 files of another writer" in result.text
    assert result.document["foreign"][0] in result.text


@pytest.mark.parametrize("world", ["iceberg: {name: db.orders}", "delta: {}"], ids=["iceberg", "delta"], indirect=True)
def test_rebuild_asks_and_makes_the_tables_again(world: World, invoke: Invoke) -> None:
    world.land_unrecorded()
    invoke(table.sync, "orders", text=False)
    assert invoke(table.rebuild, "orders", dry_run=True).document["applied"] is False
    assert invoke(table.check, "orders", text=False).document["snapshot"] is not None
    with pytest.raises(UsageError, match="add --yes"):
        invoke(table.rebuild, "orders", text=False)
    result = invoke(table.rebuild, "orders", yes=True)
    assert {k: result.document[k] for k in ("applied", "created", "added", "rows")} == {
        "applied": True,
        "created": True,
        "added": 8,
        "rows": 200,
    }
    assert invoke(table.check, "orders", text=False).code == 0
