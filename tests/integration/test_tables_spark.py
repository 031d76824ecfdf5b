"""Spark reads tables of both formats: what landed, merged and retired, by time too, and values of all types."""

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
from tests.pipelines.landed_world import HOUR, START, A, B, pieces
from tests.pipelines.tables.values import COLUMNS, ROWS, SIGNED, told, write_as_landing
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(spark_reader.PYTHON not in os.environ, reason=f"{spark_reader.PYTHON} names no Python"),
]


@pytest.fixture(params=["iceberg", "delta"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    pytest.importorskip("pyiceberg" if request.param == "iceberg" else "deltalake")
    return IcebergWorld(tmp_path) if request.param == "iceberg" else DeltaWorld(tmp_path)


def test_spark_reads_what_landed(world: TableWorld) -> None:
    def bring_up() -> None:
        with open_tables(world.feed, world.lake) as tables:
            sync(world.fresh_ledger(), world.lake, tables)

    world.land(*pieces(A, 20), *pieces(B, 50), bad=3)
    bring_up()
    world.compact()
    bring_up()
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    bring_up()
    world.check_same()
    columns = SIGNED if isinstance(world, IcebergWorld) else COLUMNS
    values = _of_all_types(world, columns)
    snapshots = [found[0] for found in world.said()]
    asked = {f"at-{n}": f"SELECT * FROM {_name(world)} VERSION AS OF {s}" for n, s in enumerate(snapshots)}
    asked |= {
        "now": f"SELECT * FROM {_name(world)}",
        "late": f"SELECT count(*) AS n FROM {_name(world)} WHERE timestamp >= TIMESTAMP '2015-08-19 17:00:00'",
        "windows": f"SELECT * FROM {_name(world, 'windows')}",
        "hour": f"SELECT * FROM {_name(world, 'windows')} WHERE window_start = TIMESTAMP_MILLIS({START + HOUR})",
        "values": f"SELECT * FROM {values}",
    }
    asked |= {
        f"{c} {op}": f"SELECT * FROM {values} WHERE {c} {op} {_literal(c)}" for c in TIMES for op in ("=", ">=", "<=")
    }
    kind = "iceberg" if isinstance(world, IcebergWorld) else "delta"
    found = {name: pq.read_table(path) for name, path in spark_reader.read(kind, world.root, asked).items()}

    assert _offsets(found["now"]) == world.landed_rows()
    assert found["now"].sort_by(_ORDER).to_pylist() == _in_files(world).select(found["now"].column_names).to_pylist()
    for n, snapshot in enumerate(snapshots):
        assert _offsets(found[f"at-{n}"]) == world.offsets(snapshot)
    assert len(found["at-0"]) == 400 - 14 * 3
    assert [r["window_start"].timestamp() * 1000 for r in found["windows"].to_pylist()] == [START + HOUR]
    assert found["hour"].num_rows == 1
    late = dt.datetime(2015, 8, 19, 17, tzinfo=dt.UTC)
    stamps = _in_files(world).column("timestamp").to_pylist()
    assert found["late"].to_pylist() == [{"n": sum(stamp >= late for stamp in stamps)}]
    assert 0 < found["late"].column("n")[0].as_py() < len(stamps)
    for column in TIMES:
        first = ROWS[column][0]
        for op in ("=", ">=", "<="):
            assert first in found[f"{column} {op}"].column(column).to_pylist(), (column, op)
    for column, text in columns.items():
        assert told(found["values"].column(column).to_pylist()) == str(ROWS[column]), text


TIMES = [c for c, text in COLUMNS.items() if text.startswith(("timestamp", "epoch", "date"))]


def _literal(column: str) -> str:
    """A column's first value, as Spark's SQL spells it."""
    value = ROWS[column][0]
    return f"TIMESTAMP '{value:%Y-%m-%d %H:%M:%S.%f}'" if isinstance(value, dt.datetime) else f"DATE '{value}'"


_ORDER = [("partition", "ascending"), ("offset", "ascending")]


def _offsets(rows: pa.Table) -> list[tuple[int, int]]:
    return sorted(zip(*rows.select(["partition", "offset"]).to_pydict().values(), strict=True))


def _in_files(world: TableWorld) -> pa.Table:
    """What the table's files hold, by pyarrow alone: PyIceberg gives an empty list for one that is null."""
    return pa.concat_tables(pq.read_table(f, partitioning=None) for f in world.files()).sort_by(_ORDER)


def _name(world: TableWorld, suffix: str = "") -> str:
    if isinstance(world, IcebergWorld):
        return f"sluice.db.orders{'_' if suffix else ''}{suffix}"
    return f"delta.`{world.root}/lake/{f'tables/orders_{suffix}' if suffix else 'data/orders'}`"


def _of_all_types(world: TableWorld, columns: Mapping[str, str]) -> str:
    """A table beside the feed's, with a column of each type; its name in Spark."""
    from sluice.resources.tables.delta import DeltaLakeTable
    from sluice.resources.tables.iceberg import IcebergTable

    settings = world.feed.table
    assert settings is not None
    if settings.iceberg:
        made = IcebergTable("db.types", settings.iceberg.properties(), {"warehouse": str(world.root / "tables")})
        name = "sluice.db.types"
    else:
        made, name = DeltaLakeTable(world.lake, "types", {}), f"delta.`{world.root}/lake/types`"
    made.look()
    made.create(columns, {LEDGER: "x"})
    made.look()
    file = write_as_landing(world.lake, "types/one.parquet", columns, ROWS, 1)
    made.commit(TableChange(TableOperation.APPEND, 1, (file,), (), columns, {}))
    return name
