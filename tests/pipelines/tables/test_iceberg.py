"""A feed's Iceberg table is what its ledger says: each file once, whoever comes between and wherever it dies; read by
PyIceberg's own scans and by DuckDB over the files that a snapshot names.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import Catalog, load_catalog

from sluice.pipelines.publishing import files
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.rewriting.expiry import expire
from sluice.pipelines.tables.check import compare
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.vocabulary.errors import CatalogUnavailable, EntriesLost, TableDiffers
from sluice.pipelines.vocabulary.tables import TableChange
from sluice.resources.edges import open_table
from sluice.resources.lake_local import LocalLake
from sluice.resources.tables.iceberg import IcebergTable
from tests.pipelines.landed_world import HOUR, START, A, B, Died, World, pieces

TABLE = "table: {iceberg: {name: db.orders, catalog: {type: sql, uri: 'sqlite:///catalog.db'}}}\n"


class TableWorld(World):
    def __init__(self, root: Path) -> None:
        super().__init__(root, TABLE, lake=LocalLake(root / "lake"))
        self.root = root

    def table(self) -> IcebergTable:
        found = open_table(self.feed, self.lake)
        assert isinstance(found, IcebergTable)
        return found

    def sync(self, **how: Any) -> Synced:
        return sync(self.fresh_ledger(), self.lake, self.table(), **how)

    @property
    def catalog(self) -> Catalog:
        return load_catalog("sluice", type="sql", uri=f"sqlite:///{self.root}/catalog.db")

    @property
    def iceberg(self) -> Any:
        return self.catalog.load_table("db.orders")

    def offsets(self, snapshot: int | None = None) -> list[tuple[int, int]]:
        """(partition, offset) of the table's rows, read by PyIceberg."""
        rows = self.iceberg.scan(snapshot_id=snapshot, selected_fields=("partition", "offset")).to_arrow()
        return sorted(zip(*rows.to_pydict().values(), strict=True))

    def landed_rows(self) -> list[tuple[int, int]]:
        """The same of what landed, by the ledger."""
        hours = [START, START + HOUR, START + 2 * HOUR]
        found = files.files(self.fresh_ledger(), self.lake, "orders", hours, self.feed.window, partial=True)
        read = [pq.read_table(f.address, columns=["partition", "offset"], partitioning=None) for f in found]
        return sorted(zip(*pa.concat_tables(read).to_pydict().values(), strict=True))

    def operations(self) -> list[str]:
        return [str(s.summary.operation.value) for s in self.iceberg.metadata.snapshots]

    def check_same(self) -> None:
        """The table is what landed: by PyIceberg, by DuckDB over the snapshot's files, and by our own comparison."""
        assert self.offsets() == self.landed_rows()
        files = [t.file.file_path for t in self.iceberg.scan().plan_files()]
        found = duckdb.sql(f'select partition, "offset" from read_parquet({files}) order by all').fetchall()
        assert found == self.landed_rows()
        table, ledger = self.table(), self.fresh_ledger()
        assert compare(ledger, self.lake, table, table.look(), ledger.read()).same


@pytest.fixture
def world(tmp_path: Path) -> TableWorld:
    return TableWorld(tmp_path)


def test_what_lands_is_in_the_table_once_a_batch_a_commit(world: TableWorld) -> None:
    assert world.sync() == Synced(None), "nothing has landed: no table"
    world.land(*pieces(A, 50), bad=3)
    world.land(*pieces(B, 100))
    done = world.sync()
    assert (done.created, done.commits, done.added) == (True, 2, 6)
    world.check_same()
    first, second = world.iceberg.metadata.snapshots
    said = second.summary.additional_properties
    assert json.loads(said["sluice.offsets"]) == {"orders": {"1": ["0-200"]}}
    assert said["sluice.windows"] == "2015-08-19T16:00 2015-08-19T17:00"
    batch = world.state().batches[max(world.state().batches)]
    assert said["sluice.batches"] == f"{batch.id}/{batch.hash}"
    assert (said["sluice.feed"], said["sluice.ledger"]) == ("orders", world.state().ledger_id)
    assert first.summary.additional_properties["total-records"] == "188"
    assert world.iceberg.properties["sluice.complete-until"] == "2015-08-19T18:00:00Z"
    again = world.sync()
    assert (again.commits, again.head) == (0, done.head)


def test_merged_landed_anew_and_retired_files_are_each_one_change(world: TableWorld) -> None:
    world.land(*pieces(A, 20), *pieces(B, 50))
    world.sync()
    before, rows = world.iceberg.current_snapshot().snapshot_id, world.offsets()
    world.compact()
    assert world.sync().commits == 1
    world.check_same()
    assert world.offsets() == world.offsets(before) == rows, "the older snapshot is still there to read"
    expire(world.ledger, world.lake, START + HOUR, world.feed.window, "old", world.liveness)
    done = world.sync()
    assert (done.commits, done.added, done.removed) == (1, 0, 2)
    assert world.operations() == ["append", "replace", "delete"]
    assert world.offsets() == [o for o in rows if o[1] >= 100]
    assert world.offsets(before) == rows


def test_files_go_when_the_snapshots_that_name_them_have_expired(world: TableWorld) -> None:
    world.land(*pieces(A, 20), *pieces(B, 50))
    world.sync()
    many = len(world.visible())
    world.compact()
    done = world.sync(expire_before=0)
    assert (done.expired, len(world.visible())) == (0, many + 4)
    later = world.iceberg.current_snapshot().timestamp_ms + 1
    done = world.sync(expire_before=later)
    assert (done.expired, len(done.cleaned), len(world.visible())) == (1, many, 4)
    world.check_same()
    world.check()
    assert world.sync(expire_before=later).expired == 0


def test_a_file_that_was_merged_before_the_table_saw_it_never_comes_into_it(world: TableWorld) -> None:
    world.land(*pieces(A, 20), *pieces(B, 100))
    world.compact()
    world.land((A, 200, 300))
    done = world.sync()
    assert (done.added, done.removed, world.operations()) == (5, 0, ["append"] * 3)
    world.check_same()


def test_two_publishers_add_each_file_once(world: TableWorld) -> None:
    world.land(*pieces(A, 20))
    world.sync()
    world.land(*pieces(B, 20))
    slow, rival = world.table(), world.table()
    met: list[Synced] = []

    def between(change: TableChange) -> int:
        slow.__dict__.pop("commit")
        met.append(sync(world.fresh_ledger(), world.lake, rival))
        return slow.commit(change)

    slow.__dict__["commit"] = between
    done = sync(world.fresh_ledger(), world.lake, slow)
    assert (done.added, met[0].added) == (0, 10)
    world.check_same()


def test_publishers_side_by_side_add_each_file_once(world: TableWorld) -> None:
    for piece in pieces(A, 50):
        world.land(piece)
    done: list[int] = []
    threads = [threading.Thread(target=lambda: done.append(world.sync().added)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(done) == 3
    world.check_same()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_without_an_answer_is_looked_up(world: TableWorld, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.land(*pieces(A, 50))
    world.sync()
    world.land(*pieces(B, 50))
    from pyiceberg.catalog.sql import SqlCatalog

    commit, lost = SqlCatalog.commit_table, [1]

    def silent(catalog: SqlCatalog, *given: Any) -> Any:
        if not lost:
            return commit(catalog, *given)
        lost.pop()
        if when == "after":
            commit(catalog, *given)
        raise ConnectionResetError("no answer")

    monkeypatch.setattr(SqlCatalog, "commit_table", silent)
    done = world.sync()
    assert done.commits == (0 if when == "after" else 1)
    world.check_same()


@pytest.mark.parametrize("at", range(4))
def test_killed_anywhere_the_next_one_goes_on(world: TableWorld, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction and a landing wait for the table: the publisher dies before or after one of its two commits."""
    world.land(*pieces(A, 20), *pieces(B, 100))
    world.sync()
    world.compact()
    world.land((A, 200, 300))
    commit, steps = IcebergTable.commit, iter(range(9))

    def dying(table: IcebergTable, change: TableChange) -> int:
        if next(steps) == at:
            raise Died
        made = commit(table, change)
        if next(steps) == at:
            raise Died
        return made

    with monkeypatch.context() as patched:
        patched.setattr(IcebergTable, "commit", dying)
        with pytest.raises(Died):
            world.sync()
    world.sync()
    world.check_same()
    assert world.operations() == ["append", "replace", "append"]


def test_a_table_that_somebody_rolled_back_is_named_and_mended(world: TableWorld) -> None:
    world.land(*pieces(A, 100))
    world.land(*pieces(B, 100))
    world.sync()
    first = world.iceberg.metadata.snapshots[0].snapshot_id
    world.iceberg.manage_snapshots().rollback_to_snapshot(first).commit()
    with pytest.raises(TableDiffers, match="2 files of the feed are missing in it"):
        world.sync()
    assert len(world.offsets()) == 200
    world.sync(repair=True)
    world.check_same()


def test_rows_of_others_are_named_and_taken_out(world: TableWorld) -> None:
    world.land(*pieces(A, 100))
    world.sync()
    world.iceberg.append(world.iceberg.scan().to_arrow().slice(0, 7))
    world.land(*pieces(B, 100))
    with pytest.raises(TableDiffers, match="1 file in it is not of the feed"):
        world.sync()
    world.sync(repair=True)
    world.check_same()
    world.iceberg.delete("partition = 1 and offset < 10")
    with pytest.raises(TableDiffers, match=r"1 file of the feed is missing in it, 1 file in it is not of the feed"):
        world.sync()


def test_a_table_of_another_ledger_is_left_alone(world: TableWorld, tmp_path: Path) -> None:
    world.land(*pieces(A, 100))
    world.sync()
    with world.iceberg.transaction() as change:
        change.set_properties({"sluice.ledger": "another"})
    with pytest.raises(TableDiffers, match="belongs to another ledger"):
        world.sync()
    with world.iceberg.transaction() as change:
        change.set_properties({"sluice.ledger": world.state().ledger_id, "sluice.mark": "99999"})
    with pytest.raises(EntriesLost, match="tells of entry 99998"):
        world.sync()


def test_a_catalog_that_is_away_changes_nothing(world: TableWorld) -> None:
    world.land(*pieces(A, 100))
    (world.root / "catalog.db").mkdir()
    with pytest.raises(CatalogUnavailable, match="does not answer"):
        world.sync()
    (world.root / "catalog.db").rmdir()
    assert world.sync().added == 2


def test_a_part_is_added_once_it_is_visible(world: TableWorld) -> None:
    """Published and not yet shown: a sync shows it first."""
    world.land(*pieces(A, 100))
    shown = world.lake.show
    try:
        world.lake.show = lambda *given: (_ for _ in ()).throw(Died())  # type: ignore[method-assign]
        with pytest.raises(Died):
            world.land(*pieces(B, 100))
    finally:
        world.lake.show = shown  # type: ignore[method-assign]
    assert world.sync().added == 4
    world.check_same()


def test_a_lake_without_a_table_hides_what_was_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, lake=LocalLake(tmp_path / "lake"))
    world.land(*pieces(A, 20), *pieces(B, 100))
    world.compact()
    assert len(world.visible()) == 4
    assert roll_forward(world.ledger, world.lake, "orders").hidden == ()
