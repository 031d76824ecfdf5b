"""What is in quarantine has a table of its own if the feed asks for it; read by the format's own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from sluice.pipelines.errors import TableDiffers
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.records.rows.row_format import QUARANTINED, RawFormat
from sluice.pipelines.schema.schema import arrow_type
from sluice.pipelines.schema.wider import QUARANTINED_TYPES, RAW_TYPES, parse_type
from sluice.pipelines.tables.check import compare
from sluice.pipelines.tables.sync import Synced, sync
from sluice.resources.open_ports import open_tables
from tests.pipelines.landed_world import HOUR, START, A, B, pieces
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld


class Quarantine:
    """A feed's world whose quarantine has a table."""

    def __init__(self, world: TableWorld) -> None:
        self.world = world

    def sync(self, **how: Any) -> Synced:
        world = self.world
        with open_tables(world.feed, world.lake) as tables:
            done = sync(world.fresh_ledger(), world.lake, tables, **how)
        assert done.quarantine is not None
        return done.quarantine

    def theirs(self, snapshot: int | None = None) -> tuple[pa.Table, list[str]]:
        """The table's rows and files, by the format's own library."""
        if isinstance(self.world, IcebergWorld):
            from pyiceberg.catalog import load_catalog

            uri = f"sqlite:///{self.world.root}/catalog.db"
            found = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders_quarantine")
            scan = found.scan(snapshot_id=snapshot)
            return scan.to_arrow(), [t.file.file_path for t in scan.plan_files()]
        from deltalake import DeltaTable

        table = DeltaTable(str(self.world.root / "lake" / "quarantine" / "orders"), snapshot)
        return table.to_pyarrow_table(), list(table.file_uris())

    def offsets(self, snapshot: int | None = None) -> list[tuple[int, int]]:
        rows = self.theirs(snapshot)[0].select(["partition", "offset"])
        return sorted(zip(*rows.to_pydict().values(), strict=True))

    def check_same(self) -> None:
        """What is in quarantine, by the ledger; read by the library, by DuckDB, and compared by ourselves."""
        rows = self.world.landed_rows(PartKind.QUARANTINED)
        assert self.offsets() == rows
        query = f'select partition, "offset" from read_parquet({self.theirs()[1]}) order by all'
        assert duckdb.connect().execute(query).fetchall() == rows
        ledger, lake = self.world.fresh_ledger(), self.world.lake
        with open_tables(self.world.feed, lake) as tables:
            for kind, table in tables.of_parts:
                assert compare(ledger, lake, table, table.look(), ledger.read(), kind).same

    def check_empty(self) -> None:
        """It is there, with its columns."""
        rows = self.theirs()[0]
        assert (rows.num_rows, {"offset", "reason", "batch"} <= {*rows.column_names}) == (0, True)

    def parts(self) -> list[str]:
        return [p for p in self.world.parts() if p.startswith("quarantine")]


@pytest.fixture(params=["iceberg", "delta"])
def quarantine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quarantine:
    pytest.importorskip("pyiceberg" if request.param == "iceberg" else "deltalake")
    kind = IcebergWorld if request.param == "iceberg" else DeltaWorld
    monkeypatch.setattr(kind, "line", kind.line.replace("table: {", "table: {quarantine: true, "))
    return Quarantine(kind(tmp_path))


@pytest.mark.parametrize(("texts", "schema"), [(RAW_TYPES, RawFormat.schema), (QUARANTINED_TYPES, QUARANTINED)])
def test_columns_spelled_in_texts_are_those_of_the_files(texts: dict[str, str], schema: pa.Schema) -> None:
    def plain(kind: pa.DataType) -> pa.DataType:
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    assert {n: arrow_type(parse_type(t)) for n, t in texts.items()} == {f.name: plain(f.type) for f in schema}


def test_what_is_refused_is_in_it_once_with_the_reason(quarantine: Quarantine) -> None:
    world = quarantine.world
    assert quarantine.sync() == Synced(None), "nothing has landed: no table"
    world.land(*pieces(A, 50))
    done = quarantine.sync()
    assert done.head is not None
    assert (done.created, done.commits, done.head.rows) == (True, 0, 0)
    quarantine.check_empty()
    world.land(*pieces(B, 100), bad=3)
    assert quarantine.sync().added == 2
    quarantine.check_same()
    (row, *_) = quarantine.theirs()[0].to_pylist()
    assert (row["stage"], row["reason"], row["detail"], row["byte"]) == ("decode", "not_json", "no", 3)
    assert quarantine.sync().commits == 0
    world.check_same()


def test_merged_and_retired_files_of_the_quarantine_are_each_one_change(quarantine: Quarantine) -> None:
    world = quarantine.world
    world.land(*pieces(A, 20), *pieces(B, 50), bad=2)
    first = quarantine.sync()
    assert first.head is not None
    before, rows = first.head.snapshot, quarantine.offsets()
    world.compact()
    done = quarantine.sync(expire_before=0)
    assert (done.commits, done.added, done.removed, done.cleaned) == (1, 4, 14, ())
    quarantine.check_same()
    assert quarantine.offsets() == quarantine.offsets(before) == rows
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    assert quarantine.sync().removed == 2
    assert quarantine.offsets() == [o for o in rows if o[1] >= 100]
    assert quarantine.offsets(before) == rows, "time travel finds every file"
    done = quarantine.sync(expire_before=world.now + (1 << 40))
    assert {p.partition("/")[0] for p in done.cleaned} == {"quarantine"}
    assert len(quarantine.parts()) == 2
    quarantine.check_same()
    world.check()


def test_a_table_that_is_seldom_added_to_does_not_read_the_same_entries_for_ever(
    quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = quarantine.world
    world.land(*pieces(A, 100), bad=1)
    first = quarantine.sync()
    world.land(*pieces(B, 50, 0, 100))
    assert quarantine.sync().commits == 0
    monkeypatch.setattr("sluice.pipelines.tables.sync.MANY_ENTRIES", 2)
    done = quarantine.sync()
    assert first.head is not None
    assert done.head is not None
    assert (done.commits, done.head.mark > first.head.mark) == (1, True)
    assert quarantine.sync().commits == 0
    world.land(*pieces(B, 50, 100), bad=1)
    assert quarantine.sync().added == 2
    quarantine.check_same()


def test_rows_of_others_in_it_are_named(quarantine: Quarantine) -> None:
    world = quarantine.world
    world.land(*pieces(A, 100), bad=1)
    quarantine.sync()
    if isinstance(world, IcebergWorld):
        from pyiceberg.catalog import load_catalog

        uri = f"sqlite:///{world.root}/catalog.db"
        table = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders_quarantine")
        table.append(table.scan().to_arrow())
    else:
        from deltalake import write_deltalake

        write_deltalake(world.root / "lake" / "quarantine" / "orders", quarantine.theirs()[0], mode="append")
    with pytest.raises(TableDiffers, match="not of the feed"):
        quarantine.sync()
    quarantine.sync(repair=True)
    quarantine.check_same()
