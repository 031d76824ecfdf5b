"""Spark's own maintenance of an Iceberg table leaves the landed files in place; deleted rows end in a rebuild."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from sluice.pipelines.errors import TableDiffers
from sluice.pipelines.tables.sync import rebuild
from sluice.resources.open_ports import open_tables
from tests import spark_reader
from tests.pipelines.landed_world import A, split_offsets
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld

pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.skipif(spark_reader.PYTHON not in os.environ, reason="only `make readers` starts it"),
]

REWRITE = (
    "CALL sluice.system.rewrite_data_files(table => 'db.orders', options => map('rewrite-all', 'true', "
    "'min-input-files', '1'))"
)
EXPIRE = "CALL sluice.system.expire_snapshots(table => 'db.orders', older_than => TIMESTAMP '2100-01-01 00:00:00')"
ORPHANS = "CALL sluice.system.remove_orphan_files(table => 'db.orders', older_than => TIMESTAMP '2000-01-01 00:00:00')"


def test_landed_files_survive_maintenance_by_spark(tmp_path: Path) -> None:
    world = IcebergWorld(tmp_path)
    world.land(*split_offsets(A, 10))
    world.sync()
    landed = world.list_parts()
    with spark_reader.Session("iceberg", tmp_path) as spark:
        spark.read_rows(REWRITE)
        for call in (EXPIRE, ORPHANS):
            with pytest.raises(AssertionError, match="GC is disabled"):
                spark.read_rows(call)
        assert {*landed} <= {*world.list_parts()}
        world.sync(repair=True)
        assert sorted(spark.read_rows("SELECT partition, offset FROM sluice.db.orders")) == world.read_landed()
    world.check_same()


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_table_with_rows_deleted_by_spark_is_made_again(kind: str, tmp_path: Path) -> None:
    """Iceberg merges on read; Delta writes deletion vectors."""
    world = IcebergWorld(tmp_path) if kind == "iceberg" else DeltaWorld(tmp_path)
    name = "sluice.db.orders" if kind == "iceberg" else f"delta.`{tmp_path}/lake/data/orders`"
    setting = "'write.delete.mode' = 'merge-on-read'" if kind == "iceberg" else "'delta.enableDeletionVectors' = 'true'"
    world.land(*split_offsets(A, 10))
    world.sync()
    with spark_reader.Session(kind, tmp_path) as spark:
        spark.read_rows(f"ALTER TABLE {name} SET TBLPROPERTIES ({setting})")
        spark.read_rows(f"DELETE FROM {name} WHERE offset = 3")
        for repair in (False, True):
            with pytest.raises(TableDiffers, match="deletes rows") as refusal:
                world.sync(repair=repair)
            assert "sluice table rebuild orders; rows deleted on purpose come back" in refusal.value.remedy
        with open_tables(world.feed, world.lake) as tables:
            rebuild(world.ledger, world.lake, tables)
        assert sorted(spark.read_rows(f"SELECT partition, offset FROM {name}")) == world.read_landed()
    world.check_same()
    assert world.run_audit().problems == ()
