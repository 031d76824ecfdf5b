"""Maintenance by other engines: the landed files stay, and Sluice's own maintenance works."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("deltalake")

from sluice.pipelines.errors import TableDiffers
from tests.pipelines.landed_world import A, B, split_offsets
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld

GUARD = {IcebergWorld: "gc.enabled", DeltaWorld: "delta.deletedFileRetentionDuration"}


@pytest.mark.parametrize("kind", [IcebergWorld, DeltaWorld])
def test_earlier_tables_are_guarded_by_the_next_sync(kind: type[TableWorld], tmp_path: Path) -> None:
    world, name = kind(tmp_path), GUARD[kind]
    world.land((A, 0, 50))
    world.sync()
    value = world.get_properties()[name]
    world.drop_property(name)
    assert name not in world.get_properties()
    world.sync()
    assert world.get_properties()[name] == value
    world.put_property(name, "true" if kind is IcebergWorld else "interval 8 days")
    own = world.get_properties()
    world.sync()
    assert world.get_properties() == own, "a value of the user's stays"


def test_landed_files_survive_optimize_and_vacuum(tmp_path: Path) -> None:
    world = DeltaWorld(tmp_path)
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    world.sync()
    landed = world.list_parts()
    world.delta.optimize.compact()
    assert world.delta.vacuum(dry_run=False) == []
    with pytest.raises(Exception, match="retention"):
        world.delta.vacuum(retention_hours=0, dry_run=False)
    assert {*landed} <= {*world.list_parts()}
    with pytest.raises(TableDiffers, match="missing in it"):
        world.sync()
    world.sync(repair=True)
    world.check_same()
    world.compact()
    world.sync()
    world.sync(expire_before=world.list_snapshots()[-1][1] + 1)
    world.check_same()
    assert not {*landed} & {*world.list_parts()}, "our own expiry removes merged files"


def test_landed_files_survive_expiry_by_pyiceberg(tmp_path: Path) -> None:
    world = IcebergWorld(tmp_path)
    world.land(*split_offsets(A, 10))
    world.sync()
    landed = world.list_parts()
    world.iceberg.overwrite(world.read())  # its rows in one other file
    world.iceberg.maintenance.expire_snapshots().by_ids([world.list_snapshots()[0][0]]).commit()
    assert {*landed} <= {*world.list_parts()}
    world.sync(repair=True)
    world.check_same()
