"""Spark reads tables of both formats: landed, merged and retired rows, also by time, and values of all types."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.model.tables import LEDGER, TableChange, TableOperation
from sluice.pipelines.tables.sync import sync
from sluice.resources.open_ports import open_tables
from tests import spark_reader
from tests.pipelines.landed_world import HOUR, START, A, B, split_offsets
from tests.pipelines.tables.values import COLUMNS, ROWS, SIGNED, format_values, write_as_landing
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(spark_reader.PYTHON not in os.environ, reason=f"{spark_reader.PYTHON} names no Python"),
]


@pytest.fixture(params=["iceberg", "delta"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    pytest.importorskip("pyiceberg" if request.param == "iceberg" else "deltalake")
    return IcebergWorld(tmp_path) if request.param == "iceberg" else DeltaWorld(tmp_path)


def test_spark_reads_the_landed_rows(world: TableWorld) -> None:
    def bring_up() -> None:
        with open_tables(world.feed, world.lake) as tables:
            sync(world.reopen_ledger(), world.lake, tables)

    world.land(*split_offsets(A, 20), *split_offsets(B, 50), bad=3)
    bring_up()
    world.compact()
    bring_up()
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    bring_up()
    world.check_same()
    columns = SIGNED if isinstance(world, IcebergWorld) else COLUMNS
    values = _create_table_of_all_types(world, columns)
    snapshots = [snapshot[0] for snapshot in world.list_snapshots()]
    queries = {f"at-{n}": f"SELECT * FROM {_name(world)} VERSION AS OF {s}" for n, s in enumerate(snapshots)}
    queries |= {
        "now": f"SELECT * FROM {_name(world)}",
        "late": f"SELECT count(*) AS n FROM {_name(world)} WHERE timestamp >= TIMESTAMP '2015-08-19 17:00:00'",
        "windows": f"SELECT * FROM {_name(world, 'windows')}",
        "hour": f"SELECT * FROM {_name(world, 'windows')} WHERE window_start = TIMESTAMP_MILLIS({START + HOUR})",
        "values": f"SELECT * FROM {values}",
    }
    queries |= {
        f"{c} {op}": f"SELECT * FROM {values} WHERE {c} {op} {_format_literal(c)}"
        for c in TIMES
        for op in ("=", ">=", "<=")
    }
    kind = "iceberg" if isinstance(world, IcebergWorld) else "delta"
    results = {name: pq.read_table(path) for name, path in spark_reader.read(kind, world.root, queries).items()}

    assert _list_offsets(results["now"]) == world.read_landed()
    assert (
        results["now"].sort_by(_ORDER).to_pylist() == _read_files(world).select(results["now"].column_names).to_pylist()
    )
    for n, snapshot in enumerate(snapshots):
        assert _list_offsets(results[f"at-{n}"]) == world.read_offsets(snapshot)
    assert len(results["at-0"]) == 400 - 14 * 3
    assert [r["window_start"].timestamp() * 1000 for r in results["windows"].to_pylist()] == [START + HOUR]
    assert results["hour"].num_rows == 1
    after = dt.datetime(2015, 8, 19, 17, tzinfo=dt.UTC)
    stamps = _read_files(world).column("timestamp").to_pylist()
    assert results["late"].to_pylist() == [{"n": sum(stamp >= after for stamp in stamps)}]
    assert 0 < results["late"].column("n")[0].as_py() < len(stamps)
    for column in TIMES:
        first = ROWS[column][0]
        for op in ("=", ">=", "<="):
            assert first in results[f"{column} {op}"].column(column).to_pylist(), (column, op)
    for column, text in columns.items():
        assert format_values(results["values"].column(column).to_pylist()) == str(ROWS[column]), text


TIMES = [c for c, text in COLUMNS.items() if text.startswith(("timestamp", "epoch", "date"))]


def _format_literal(column: str) -> str:
    """Format a column's first value as a literal of Spark's SQL."""
    value = ROWS[column][0]
    return f"TIMESTAMP '{value:%Y-%m-%d %H:%M:%S.%f}'" if isinstance(value, dt.datetime) else f"DATE '{value}'"


_ORDER = [("partition", "ascending"), ("offset", "ascending")]


def _list_offsets(rows: pa.Table) -> list[tuple[int, int]]:
    return sorted(zip(*rows.select(["partition", "offset"]).to_pydict().values(), strict=True))


def _read_files(world: TableWorld) -> pa.Table:
    """Read the table's files with pyarrow: PyIceberg returns an empty list for a null one."""
    return pa.concat_tables(pq.read_table(f, partitioning=None) for f in world.list_table_files()).sort_by(_ORDER)


def _name(world: TableWorld, suffix: str = "") -> str:
    if isinstance(world, IcebergWorld):
        return f"sluice.db.orders{'_' if suffix else ''}{suffix}"
    return f"delta.`{world.root}/lake/{f'tables/orders_{suffix}' if suffix else 'data/orders'}`"


def _create_table_of_all_types(world: TableWorld, columns: Mapping[str, str]) -> str:
    """Create a table next to the feed's, with a column of each type. Returns its name in Spark."""
    from sluice.resources.tables.delta import DeltaLakeTable
    from sluice.resources.tables.iceberg import IcebergTable

    settings = world.feed.table
    assert settings is not None
    if settings.iceberg:
        table = IcebergTable("db.types", settings.iceberg.properties(), {"warehouse": str(world.root / "tables")})
        name = "sluice.db.types"
    else:
        table, name = DeltaLakeTable(world.lake, "types", {}), f"delta.`{world.root}/lake/types`"
    table.look()
    table.create(columns, {LEDGER: "x"})
    table.look()
    file = write_as_landing(world.lake, "types/one.parquet", columns, ROWS, 1)
    table.commit(TableChange(TableOperation.APPEND, 1, (file,), (), columns, {}))
    return name
