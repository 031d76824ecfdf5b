"""Java's library reads tables whose writers' clocks differ, and a broken one after the remedy that the check prints."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from sluice.pipelines.errors import TableDiffers
from sluice.pipelines.tables.check import comparison
from sluice.pipelines.tables.sync import rebuild
from sluice.resources.open_ports import open_tables
from tests import spark_reader
from tests.pipelines.landed_world import A, B
from tests.pipelines.tables.clocks import MOVES, move_clock, sync_all
from tests.pipelines.tables.worlds import IcebergWorld

pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.skipif(spark_reader.PYTHON not in os.environ, reason="only `make readers` starts it"),
]

QUERY = "SELECT partition, offset FROM sluice.db.orders"


def test_java_reads_tables_of_writers_whose_clocks_differ(tmp_path: Path) -> None:
    world = IcebergWorld(tmp_path)
    world.land((A, 0, 100), (B, 0, 100))
    with spark_reader.Session("iceberg", tmp_path) as spark:
        for number, move in enumerate(MOVES):
            world.land((A, 100 + number * 10, 110 + number * 10))
            sync_all(world, move)
            assert sorted(spark.read_rows(QUERY)) == world.read_landed(), move
            assert spark.read_rows("SELECT count(*) FROM sluice.db.orders_windows") == [(1,)]


def test_broken_table_is_reported_and_its_remedy_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.resources.tables import iceberg

    world = IcebergWorld(tmp_path)
    with spark_reader.Session("iceberg", tmp_path) as spark:
        with monkeypatch.context() as earlier:  # releases that took each time from the clock
            earlier.setattr(iceberg, "_find_newest_time", lambda metadata: 0)
            for number, move in enumerate((0, 300, 0)):
                world.land((A, number * 50, number * 50 + 50))
                with move_clock(move), pytest.raises(TableDiffers) if number == 2 else nullcontext():
                    world.sync()
        with pytest.raises(AssertionError, match="sorted"):
            spark.read_rows(QUERY)
        compared = comparison(world.reopen_ledger(), world.lake, world.open_table())
        assert not compared.right
        assert compared.find_remedy("orders") == "sluice table rebuild orders"
        with open_tables(world.feed, world.lake) as tables:
            rebuild(world.ledger, world.lake, tables)
        assert sorted(spark.read_rows(QUERY)) == world.read_landed()
        world.land((B, 0, 50))
        world.sync()
        assert sorted(spark.read_rows(QUERY)) == world.read_landed()
        world.check_same()
