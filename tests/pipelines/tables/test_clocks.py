"""A table whose writers' clocks differ: its times never go back, as Java's library demands of them."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from sluice.pipelines.audit.strict_audit import table_problems
from sluice.pipelines.errors import TableDiffers
from sluice.pipelines.tables.check import comparison
from sluice.pipelines.tables.sync import rebuild
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.open_ports import open_tables
from sluice.resources.tables import iceberg
from tests.pipelines.landed_world import A, B
from tests.pipelines.tables.clocks import MOVES, move_clock, sync_all
from tests.pipelines.tables.worlds import IcebergWorld


def _check_times(world: IcebergWorld) -> None:
    metadata = world.iceberg.metadata
    for log in (metadata.snapshot_log, metadata.metadata_log):
        times = [*(entry.timestamp_ms for entry in log), metadata.last_updated_ms]
        assert all(before <= after for before, after in pairwise(times))


@pytest.mark.parametrize("step", ["rows", "windows", "expiry"])
def test_times_of_table_never_go_back(tmp_path: Path, step: str) -> None:
    """Each writer adds rows, says up to when windows are complete, or lets snapshots expire."""
    world = IcebergWorld(tmp_path)
    world.land((A, 0, 50))
    for number, move in enumerate(MOVES):
        if step != "windows":
            world.land((A, 50 + number * 10, 60 + number * 10))
        else:
            with move_clock(move), open_tables(world.feed, world.lake) as tables:
                if tables.rows.look():
                    tables.rows.tell(f"2015-08-19T{number:02}:00:00Z")
        sync_all(world, move, expire_before=world.list_snapshots()[-1][1] if step == "expiry" and number else None)
        _check_times(world)
        world.check_same()


def test_table_with_times_that_go_back_gets_rows_and_is_reported_until_it_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = IcebergWorld(tmp_path)
    with monkeypatch.context() as earlier:  # releases that took each time from the clock
        earlier.setattr(iceberg, "_find_newest_time", lambda metadata: 0)
        for number, move in enumerate((0, 300, 0)):
            world.land((A, number * 50, number * 50 + 50))
            with move_clock(move), pytest.raises(TableDiffers) if number == 2 else nullcontext():
                world.sync()
    world.land((B, 0, 50))
    with pytest.raises(TableDiffers, match=r"go back by 29.* s, and Java's library refuses it") as refusal:
        world.sync()
    assert world.read_offsets() == world.read_landed(), "its rows are added"
    assert refusal.value.remedy == "sluice table rebuild orders"
    compared = comparison(world.reopen_ledger(), world.lake, world.open_table())
    assert (compared.same, compared.right, compared.find_remedy("orders")) == (True, False, refusal.value.remedy)
    problems = table_problems(world.reopen_ledger(), world.lake, FeedTables(world.open_table()))
    assert [p.remedy for p in problems] == [refusal.value.remedy]
    with open_tables(world.feed, world.lake) as tables:
        rebuild(world.ledger, world.lake, tables)
    _check_times(world)
    world.check_same()
    assert comparison(world.reopen_ledger(), world.lake, world.open_table()).right
