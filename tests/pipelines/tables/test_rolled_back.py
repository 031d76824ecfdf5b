"""Tables in an older state: rolled back, restored, fast-forwarded, or of a catalog that was restored from a backup.

Each is either reported and repaired on request, or brought up to the ledger by the next sync, without doubled rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.pipelines.errors import TableDiffers
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.tables.check import comparison
from tests.pipelines.landed_world import HOUR, START, A, B, split_offsets
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld

pytest.importorskip("pyiceberg")
# Each takes a second; together they would be a seventh of `make quick`.
pytestmark = pytest.mark.slow


@pytest.fixture(params=[IcebergWorld, DeltaWorld], ids=["iceberg", "delta"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    """A table of two partitions, in small files."""
    table_world: TableWorld = request.param(tmp_path)
    table_world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    table_world.sync()
    return table_world


def _retire(world: TableWorld) -> None:
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)


def _land(world: TableWorld) -> None:
    """Land the next records of the partition that is behind."""
    next_offset = {key: max(o for partition, o in world.read_landed() if partition == key.partition) for key in (A, B)}
    key = min(next_offset, key=lambda k: next_offset[k])
    world.land(*split_offsets(key, 50, 200, 300))


def _append_strange(world: TableWorld) -> None:
    world.append(world.read().slice(0, 7))
    with pytest.raises(TableDiffers):
        world.sync()


CHANGES: dict[str, Callable[[TableWorld], object]] = {
    "merged": lambda world: world.compact(),
    "landed": _land,
    "retired": _retire,
}


@pytest.mark.parametrize("later", [(), ("landed",), ("merged", "retired")], ids="-".join)
@pytest.mark.parametrize("lost", CHANGES)
def test_table_without_its_newest_commits_is_reported_and_repaired(
    world: TableWorld, lost: str, later: tuple[str, ...]
) -> None:
    before, rows = world.snapshot, world.read_offsets()
    CHANGES[lost](world)
    world.sync()
    world.roll_back(before)
    assert world.read_offsets() == rows
    for change in later:
        if change != lost:
            CHANGES[change](world)
    compared = comparison(world.reopen_ledger(), world.lake, world.open_table())
    assert not compared.same
    if not compared.sound:
        with pytest.raises(TableDiffers, match="missing in it"):
            world.sync()
        assert world.read_offsets() == rows, "nothing is added to a table that somebody changed"
    world.sync(repair=True)
    world.check_same()
    _land(world)
    world.sync()
    world.check_same()
    world.sync(expire_before=world.list_snapshots()[-1][1] + 1)
    world.check_same()
    world.check()


@pytest.mark.parametrize("when", ["before", "after"])
def test_repair_works_after_manual_rollback_of_foreign_rows(world: TableWorld, when: str) -> None:
    """The rollback goes to our last snapshot: the remedy for files that delete rows."""
    if when == "after":
        world.compact()
        world.sync()
    ours = world.snapshot
    _append_strange(world)
    world.roll_back(ours)
    _land(world)
    world.sync(repair=True)
    world.check_same()
    world.check()


@pytest.mark.parametrize("strange", [False, True], ids=["ours", "with rows of others"])
def test_branch_made_main_is_reported_and_repaired(tmp_path: Path, strange: bool) -> None:
    """A fast-forward, or a replaced main branch: Iceberg's way to publish rows after checks."""
    world = IcebergWorld(tmp_path)
    world.land(*split_offsets(A, 20))
    world.sync()
    table = world.iceberg
    table.manage_snapshots().create_branch(world.snapshot, "audited").commit()
    if strange:
        table.append(world.read().slice(0, 7), branch="audited")
    world.land(*split_offsets(B, 50))
    world.sync()
    head = world.iceberg.refs()["audited"].snapshot_id
    world.iceberg.manage_snapshots().set_current_snapshot(head).commit()
    with pytest.raises(TableDiffers, match="4 files of the feed are missing in it"):
        world.sync()
    world.sync(repair=True)
    world.check_same()
    _land(world)
    world.sync()
    world.check_same()


@pytest.mark.parametrize("repair", [False, True], ids=["synced", "repaired"])
@pytest.mark.parametrize("expired", [False, True], ids=["all files there", "files of it expired"])
@pytest.mark.parametrize("lost", CHANGES)
def test_catalog_restored_to_older_metadata_is_brought_up_to_date(
    tmp_path: Path, lost: str, expired: bool, repair: bool
) -> None:
    """This happens when its database is restored from a backup.

    The table is in one of our older states, with its mark: the missing files are pending, and the next sync adds them.
    """
    world = IcebergWorld(tmp_path)
    world.land(*split_offsets(A, 20), *split_offsets(B, 50))
    world.sync()
    older = world.iceberg.metadata_location
    CHANGES[lost](world)
    world.sync()
    _land(world)
    world.sync(expire_before=world.list_snapshots()[-1][1] + 1 if expired else None)
    with sqlite3.connect(tmp_path / "catalog.db") as db:
        db.execute("update iceberg_tables set metadata_location = ?", (older,))
    compared = comparison(world.reopen_ledger(), world.lake, world.open_table())
    assert compared.sound
    assert not compared.same
    world.sync(repair=repair)
    world.check_same()
    world.sync(expire_before=world.list_snapshots()[-1][1] + 1)
    world.check_same()
    world.check()
