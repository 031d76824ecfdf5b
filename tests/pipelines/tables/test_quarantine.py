"""Quarantined records have a table of their own if the feed asks for it, read by the format's own library."""

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
from tests.pipelines.landed_world import HOUR, START, A, B, split_offsets
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld


class Quarantine:
    """The world of a feed whose quarantine has a table."""

    def __init__(self, world: TableWorld) -> None:
        self.world = world

    def sync(self, **options: Any) -> Synced:
        world = self.world
        with open_tables(world.feed, world.lake) as tables:
            done = sync(world.reopen_ledger(), world.lake, tables, **options)
        assert done.quarantine is not None
        return done.quarantine

    def read_table(self, snapshot: int | None = None) -> tuple[pa.Table, list[str]]:
        """Returns the table's rows and files, by the format's own library."""
        if isinstance(self.world, IcebergWorld):
            from pyiceberg.catalog import load_catalog

            uri = f"sqlite:///{self.world.root}/catalog.db"
            iceberg = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders_quarantine")
            scan = iceberg.scan(snapshot_id=snapshot)
            return scan.to_arrow(), [t.file.file_path for t in scan.plan_files()]
        from deltalake import DeltaTable

        table = DeltaTable(str(self.world.root / "lake" / "quarantine" / "orders"), snapshot)
        return table.to_pyarrow_table(), list(table.file_uris())

    def read_offsets(self, snapshot: int | None = None) -> list[tuple[int, int]]:
        rows = self.read_table(snapshot)[0].select(["partition", "offset"])
        return sorted(zip(*rows.to_pydict().values(), strict=True))

    def check_same(self) -> None:
        """Check that the table has the quarantined rows: by its library, by DuckDB, and by our comparison."""
        rows = self.world.read_landed(PartKind.QUARANTINED)
        assert self.read_offsets() == rows
        query = f'select partition, "offset" from read_parquet({self.read_table()[1]}) order by all'
        assert duckdb.connect().execute(query).fetchall() == rows
        ledger, lake = self.world.reopen_ledger(), self.world.lake
        with open_tables(self.world.feed, lake) as tables:
            for kind, table in tables.of_parts:
                assert compare(ledger, lake, table, table.look(), ledger.read(), kind).same

    def check_empty(self) -> None:
        """Check that the table exists with its columns, and has no rows."""
        rows = self.read_table()[0]
        assert (rows.num_rows, {"offset", "reason", "batch"} <= {*rows.column_names}) == (0, True)

    def list_parts(self) -> list[str]:
        return [p for p in self.world.list_parts() if p.startswith("quarantine")]


@pytest.fixture(params=["iceberg", "delta"])
def quarantine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quarantine:
    pytest.importorskip("pyiceberg" if request.param == "iceberg" else "deltalake")
    kind = IcebergWorld if request.param == "iceberg" else DeltaWorld
    monkeypatch.setattr(kind, "line", kind.line.replace("table: {", "table: {quarantine: true, "))
    return Quarantine(kind(tmp_path))


@pytest.mark.parametrize(("texts", "schema"), [(RAW_TYPES, RawFormat.schema), (QUARANTINED_TYPES, QUARANTINED)])
def test_column_type_texts_match_file_schemas(texts: dict[str, str], schema: pa.Schema) -> None:
    def get_value_type(kind: pa.DataType) -> pa.DataType:
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    assert {n: arrow_type(parse_type(t)) for n, t in texts.items()} == {f.name: get_value_type(f.type) for f in schema}


def test_refused_records_are_in_quarantine_table_once_with_reason(quarantine: Quarantine) -> None:
    world = quarantine.world
    assert quarantine.sync() == Synced(None), "nothing has landed: no table"
    world.land(*split_offsets(A, 50))
    done = quarantine.sync()
    assert done.head is not None
    assert (done.created, done.commits, done.head.rows) == (True, 0, 0)
    quarantine.check_empty()
    world.land(*split_offsets(B, 100), bad=3)
    assert quarantine.sync().added == 2
    quarantine.check_same()
    (row, *_) = quarantine.read_table()[0].to_pylist()
    assert (row["stage"], row["reason"], row["detail"], row["byte"]) == ("decode", "not_json", "no", 3)
    assert quarantine.sync().commits == 0
    world.check_same()


def test_merged_and_retired_quarantine_files_are_one_commit_each(quarantine: Quarantine) -> None:
    world = quarantine.world
    world.land(*split_offsets(A, 20), *split_offsets(B, 50), bad=2)
    first = quarantine.sync()
    assert first.head is not None
    before, rows = first.head.snapshot, quarantine.read_offsets()
    world.compact()
    done = quarantine.sync(expire_before=0)
    assert (done.commits, done.added, done.removed, done.cleaned) == (1, 4, 14, ())
    quarantine.check_same()
    assert quarantine.read_offsets() == quarantine.read_offsets(before) == rows
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    assert quarantine.sync().removed == 2
    assert quarantine.read_offsets() == [o for o in rows if o[1] >= 100]
    assert quarantine.read_offsets(before) == rows, "time travel finds every file"
    done = quarantine.sync(expire_before=world.now + (1 << 40))
    assert {p.partition("/")[0] for p in done.cleaned} == {"quarantine"}
    assert len(quarantine.list_parts()) == 2
    quarantine.check_same()
    world.check()


def test_mark_of_idle_table_advances_after_many_entries(
    quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = quarantine.world
    world.land(*split_offsets(A, 100), bad=1)
    first = quarantine.sync()
    world.land(*split_offsets(B, 50, 0, 100))
    assert quarantine.sync().commits == 0
    monkeypatch.setattr("sluice.pipelines.tables.sync.MANY_ENTRIES", 2)
    done = quarantine.sync()
    assert first.head is not None
    assert done.head is not None
    assert (done.commits, done.head.mark > first.head.mark) == (1, True)
    assert quarantine.sync().commits == 0
    world.land(*split_offsets(B, 50, 100), bad=1)
    assert quarantine.sync().added == 2
    quarantine.check_same()


def test_rows_of_other_writers_in_quarantine_table_are_reported(quarantine: Quarantine) -> None:
    world = quarantine.world
    world.land(*split_offsets(A, 100), bad=1)
    quarantine.sync()
    if isinstance(world, IcebergWorld):
        from pyiceberg.catalog import load_catalog

        uri = f"sqlite:///{world.root}/catalog.db"
        table = load_catalog("sluice", type="sql", uri=uri).load_table("db.orders_quarantine")
        table.append(table.scan().to_arrow())
    else:
        from deltalake import write_deltalake

        write_deltalake(world.root / "lake" / "quarantine" / "orders", quarantine.read_table()[0], mode="append")
    with pytest.raises(TableDiffers, match="not of the feed"):
        quarantine.sync()
    quarantine.sync(repair=True)
    quarantine.check_same()
