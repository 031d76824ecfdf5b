"""Spark's own maintenance of an Iceberg table leaves the landed files where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from tests import spark_reader
from tests.pipelines.landed_world import A, split_offsets
from tests.pipelines.tables.worlds import IcebergWorld

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
