"""`sluice table`: what it prints, its documents and exit codes."""

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
from tests.cli.conftest import Tell


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    asks = f"table: {{{getattr(request, 'param', 'iceberg: {name: db.orders}')}}}\n"
    made = World(tmp_path, {"orders": FEED + asks, "other": FEED})
    made.lake = LocalLake(tmp_path / "lake")  # type: ignore[assignment]
    made.engine = MadeUpEngine(made.lake)
    return made


def test_a_table_is_brought_up_looked_at_and_compared(world: World, tell: Tell) -> None:
    told = tell(table.status, "orders")
    assert (told.document["exists"], told.code) == (False, 0)
    world.land_unrecorded()
    told = tell(table.status, "orders")
    assert told.document["pending"] == {"batches": 1, "files": 8, "gone": 0}
    assert "8 files of 1 batch not in it yet: sluice table sync orders" in told.text
    told = tell(table.sync, "orders")
    assert {k: told.document[k] for k in ("created", "commits", "added", "rows")} == {
        "created": True,
        "commits": 1,
        "added": 8,
        "rows": 200,
    }
    assert "all landed rows were in it already" in told.text, "the second time"
    assert "all landed rows are in it" in tell(table.status, "orders").text
    tell(compact.compact, "orders", text=False)
    told = tell(table.check, "orders")
    assert (told.code, told.document["same"]) == (0, True)
    assert tell(audit.audit, "orders", of_table=True, text=False).code == 0
    assert tell(audit.audit, "orders", text=False).code == 0, "what the table's snapshots name may stay"
    with pytest.raises(UsageError, match="has no table"):
        tell(table.sync, "other")


@pytest.mark.parametrize("world", ["quarantine: true, iceberg: {name: db.orders}"], indirect=True)
def test_the_quarantine_has_a_table_where_the_feed_asks_for_it(world: World, tell: Tell) -> None:
    world.engine.bad = 1
    world.land_unrecorded()
    told = tell(table.sync, "orders")
    assert (told.document["added"], told.document["quarantine"]["added"]) == (8, 8)
    told = tell(table.status, "orders")
    assert told.document["quarantine"]["pending"] == {"batches": 0, "files": 0, "gone": 0}
    assert "Table db.orders_quarantine" in told.text
    told = tell(table.check, "orders")
    assert (told.code, told.document["same"], told.document["quarantine"]["sound"]) == (0, True, True)
    assert tell(audit.audit, "orders", of_table=True, text=False).code == 0


def test_a_run_says_that_the_table_is_not_up_to_date(world: World, tell: Tell) -> None:
    (world.project.root / ".sluice").mkdir(exist_ok=True)
    (world.project.root / ".sluice" / "catalog.db").write_bytes(b"no database")
    for names in (["orders"], ["orders", "other"]):
        told = tell(run.run, names)
        assert (told.code, "the table is not up to date: " in told.text) == (0, True)
        assert world.ledger().read().batches
    assert "orders: the table is not up to date" in told.text
    assert [bool(f["runs"][0]["table"]) for f in told.document["feeds"]] == [True, False]


def test_a_table_that_is_behind_fails_its_check(world: World, tell: Tell) -> None:
    world.land_unrecorded()
    told = tell(table.check, "orders")
    assert (told.code, "not in it yet: sluice table sync orders" in told.text) == (1, True)
    tell(table.sync, "orders", text=False)
    assert tell(table.check, "orders").code == 0


def test_old_files_that_spark_misreads_are_written_again_by_a_repair(
    world: World, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(writer, "in_milliseconds", lambda schema: [])
        world.land_unrecorded()
    tell(table.sync, "orders", text=False)
    told = tell(table.check, "orders")
    assert (told.code, len(told.document["misread"]), told.document["same"]) == (1, 8, True)
    assert "filters miss rows of feed orders: sluice table sync orders --repair" in told.text
    rows = world.ledger().read().frontiers()
    told = tell(table.sync, "orders", repair=True)
    assert (told.document["misread"], told.document["rows"], told.code) == ([], 200, 0)
    told = tell(table.check, "orders")
    assert (told.code, told.document["same"], told.document["misread"]) == (0, True, [])
    assert world.ledger().read().frontiers() == rows
    assert tell(audit.audit, "orders", of_table=True, text=False).code == 0


def test_a_table_that_others_wrote_to(world: World, tell: Tell) -> None:
    world.land_unrecorded()
    tell(table.sync, "orders", text=False)
    uri = f"sqlite:///{world.project.root}/.sluice/catalog.db"
    theirs = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders")
    theirs.append(theirs.scan().to_arrow().slice(0, 3))
    told = tell(table.status, "orders")
    assert (told.document["trusted"], told.document["sound"], len(told.document["foreign"])) == (False, False, 1)
    assert "1 file in it is not of the feed: sluice table sync orders --repair" in told.text
    assert "all landed rows are in it" not in told.text
    told = tell(table.check, "orders")
    assert (told.code, len(told.document["foreign"])) == (1, 1)
    assert "1 file in it is not of the feed: sluice table sync orders --repair" in told.text
    audited = tell(audit.audit, "orders", of_table=True, text=False)
    assert (audited.code, [p["invariant"] for p in audited.document["problems"]]) == (1, [17])
    with pytest.raises(TableDiffers):
        tell(table.sync, "orders")
    assert tell(table.sync, "orders", repair=True, text=False).document["removed"] == 1
    assert tell(table.check, "orders", text=False).document["same"] is True
    told = tell(table.status, "orders")
    assert (told.document["trusted"], "all landed rows are in it" in told.text) == (True, True)


def test_files_that_others_listed_again_are_named(world: World, tell: Tell) -> None:
    world.run()
    tell(table.sync, "orders")
    uri = f"sqlite:///{world.project.root}/.sluice/catalog.db"
    iceberg = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders")
    (file, *_) = (t.file for t in iceberg.scan().plan_files())
    iceberg.add_files([file.file_path], check_duplicate_files=False)
    checked = tell(table.check, "orders")
    assert checked.code == 1
    assert f"{2 * file.record_count} rows, not {file.record_count}" in " ".join(checked.text.split())


def test_a_table_that_others_rolled_back_lacks_what_its_files_say(world: World, tell: Tell) -> None:
    """Its mark stays where it was, so that only its files tell."""
    world.land_unrecorded()
    tell(table.sync, "orders", text=False)
    uri = f"sqlite:///{world.project.root}/.sluice/catalog.db"
    load_catalog("sluice", type="sql", uri=uri).load_table("db.orders").delete("partition >= 0")
    told = tell(table.status, "orders")
    assert (told.code, len(told.document["missing"]), told.document["pending"]["files"]) == (0, 8, 0)
    assert "8 files of the feed are missing in it: sluice table sync orders --repair" in told.text


@pytest.mark.parametrize("world", ["delta: {}"], indirect=True)
def test_files_of_another_writer_are_named_by_the_audit(world: World, tell: Tell, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    world.land_unrecorded()
    tell(table.sync, "orders", text=False)
    theirs = deltalake.DeltaTable(str(tmp_path / "lake" / "data" / "orders"))
    theirs.delete('partition = 0 and "offset" < 5')
    told = tell(audit.audit, "orders")
    assert told.code == 1
    assert "sluice table sync orders --repair" in told.text
    tell(table.sync, "orders", repair=True, text=False)
    deltalake.write_deltalake(theirs.table_uri, theirs.to_pyarrow_table().slice(0, 3), mode="append")
    tell(table.sync, "orders", repair=True, text=False)
    told = tell(audit.audit, "orders")
    assert (told.code, len(told.document["foreign"])) == (0, 2)
    assert "2 files of another writer" in told.text
    assert told.document["foreign"][0] in told.text
