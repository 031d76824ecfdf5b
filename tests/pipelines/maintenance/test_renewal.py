"""Files whose Parquet statistics Spark misreads in Iceberg are rewritten with the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from sluice.pipelines.landing import writer
from sluice.pipelines.maintenance.compaction import renew
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.tables.check import comparison
from sluice.resources.tables.iceberg import IcebergTable
from sluice.testing.engine import owner
from tests.pipelines.landed_world import A, B, split_offsets
from tests.pipelines.tables.worlds import IcebergWorld


def _list_misread(world: IcebergWorld) -> tuple[str, ...]:
    table = world.open_table()
    assert table.look()
    return table.misread()


def _renew(world: IcebergWorld) -> int:
    done = renew(world.feed, world.ports, frozenset(_list_misread(world)), owner("renewing", "compact"), lambda p: None)
    world.liveness.dead.add("renewing")
    return len(done.merged)


def test_misread_table_files_are_replaced_and_other_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = IcebergWorld(tmp_path)
    with monkeypatch.context() as earlier:
        earlier.setattr(writer, "in_milliseconds", lambda schema: [])
        earlier.setattr(writer, "_choose_by_schema", writer._choose_by_schema.__wrapped__)
        world.land(*split_offsets(A, 50), bad=3)
    world.sync()
    old = world.list_table_files()
    world.land(*split_offsets(B, 50), bad=3)
    world.sync()
    assert set(_list_misread(world)) == set(old)
    table = world.open_table()
    assert not comparison(world.reopen_ledger(), world.lake, table).right

    before = [world.read_rows(kind) for kind in PartKind]
    newer = set(world.list_table_files()).difference(old)
    assert _renew(world) == len(old)
    world.sync()
    assert [world.read_rows(kind) for kind in PartKind] == before
    assert world.list_operations()[-1] == "replace"
    assert set(world.list_table_files()).isdisjoint(old)
    assert set(world.list_table_files()).issuperset(newer)
    world.check()
    world.check_same()
    assert comparison(world.reopen_ledger(), world.lake, world.open_table()).right
    assert _renew(world) == 0


def test_files_added_without_partition_values_are_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older release added files without partition values to a table that somebody had partitioned."""
    from pyiceberg.transforms import DayTransform

    world = IcebergWorld(tmp_path)
    world.land(*split_offsets(A, 50))
    world.sync()
    with world.iceberg.update_spec() as change:
        change.add_field("timestamp", DayTransform(), "day")
    world.land(*split_offsets(B, 50))
    with monkeypatch.context() as earlier:
        earlier.setattr(IcebergTable, "find_faults", lambda table, columns: ())
        earlier.setattr(IcebergTable, "_check_unpartitioned", lambda table: None)
        world.sync()
    assert len(_list_misread(world)) == 4
    with world.iceberg.update_spec() as change:
        change.remove_field("day")
    assert _renew(world) == 4
    world.sync()
    assert _list_misread(world) == ()
    assert world.iceberg.scan("timestamp >= '2000-01-01T00:00:00+00:00'").to_arrow().num_rows == 400
    world.check_same()
    world.check()
