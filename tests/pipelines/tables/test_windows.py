"""A small table next to that of the rows lists complete windows; it is read by the format's own library."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import TableDiffers, Unknown
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.model.tables import TableChange
from sluice.pipelines.tables.sync import sync
from sluice.pipelines.tables.table_windows import CompleteWindows, FeedTables
from sluice.resources.open_ports import open_tables
from tests.pipelines.landed_world import HOUR, START, A, B, Died, split_offsets
from tests.pipelines.tables.worlds import DeltaWorld, IcebergWorld, TableWorld


class Windows:
    """A feed's world, and its table of complete windows."""

    def __init__(self, world: TableWorld) -> None:
        self.world = world

    def sync(self, expire_before: int | None = None) -> None:
        with open_tables(self.world.feed, self.world.lake) as tables:
            sync(self.world.reopen_ledger(), self.world.lake, tables, expire_before=expire_before)

    def read_starts(self) -> list[int]:
        """Returns the starts (ms) of the windows in the table."""
        with open_tables(self.world.feed, self.world.lake) as (_, _, windows, _):
            if windows.table.look() is None:
                return []
            rows = windows.table.rows(("window_start", "window_end")).to_pylist()
        assert all((r["window_end"] - r["window_start"]).total_seconds() == 3600 for r in rows)
        return sorted(int(r["window_start"].astimezone(UTC).timestamp() * 1000) for r in rows)

    def list_files(self) -> list[str]:
        paths = self.world.lake.list("tables/orders_windows")
        return [p for p in paths if p.endswith(".parquet") and "_delta_log" not in p]

    def count_snapshots(self) -> int:
        with open_tables(self.world.feed, self.world.lake) as (_, _, windows, _):
            head = windows.table.look()
        return head.snapshots if head else 0


@pytest.fixture(params=["iceberg", "delta"])
def windows(request: pytest.FixtureRequest, tmp_path: Path) -> Windows:
    pytest.importorskip("pyiceberg" if request.param == "iceberg" else "deltalake")
    return Windows((IcebergWorld if request.param == "iceberg" else DeltaWorld)(tmp_path))


def test_window_is_listed_once_complete_in_all_partitions(windows: Windows) -> None:
    world = windows.world
    world.land(*split_offsets(A, 100))
    windows.sync()
    assert windows.read_starts() == []
    world.land(*split_offsets(B, 50, 0, 100))
    windows.sync()
    assert windows.read_starts() == [START]
    world.land(*split_offsets(B, 50, 100, 200))
    windows.sync()
    assert windows.read_starts() == [START, START + HOUR]
    count = windows.count_snapshots()
    windows.sync()
    assert (windows.read_starts(), windows.count_snapshots()) == ([START, START + HOUR], count)
    world.check()
    world.check_same()


def test_retired_window_is_delisted_and_old_files_are_removed(windows: Windows) -> None:
    world = windows.world
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    windows.sync()
    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    windows.sync()
    assert (windows.read_starts(), len(windows.list_files())) == ([START + HOUR], 2)
    later = int(datetime.now(UTC).timestamp() * 1000) + 60_000
    windows.sync(expire_before=later)
    assert windows.read_starts() == [START + HOUR]
    assert len(windows.list_files()) == 1


def test_windows_table_survives_killed_and_overtaken_publishers(windows: Windows, monkeypatch: Any) -> None:
    world = windows.world
    world.land(*split_offsets(A, 100), *split_offsets(B, 100, 0, 100))
    windows.sync()
    world.land(*split_offsets(B, 100, 100, 200))
    with open_tables(world.feed, world.lake) as (rows, _, complete, _):
        commit, calls = complete.table.commit, []

        def sync_and_commit(change: TableChange) -> int:
            calls.append(change)
            if len(calls) == 1:
                windows.sync()
            return commit(change)

        monkeypatch.setattr(complete.table, "commit", sync_and_commit)
        sync(world.reopen_ledger(), world.lake, FeedTables(rows, windows=complete))
    assert (len(calls), windows.read_starts()) == (1, [START, START + HOUR])

    def raise_died(self: CompleteWindows, *arguments: Any) -> None:
        raise Died

    expire(world.ledger, world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    with monkeypatch.context() as patched:
        patched.setattr(CompleteWindows, "bring_up", raise_died)
        with pytest.raises(Died):
            windows.sync()
    windows.sync()
    assert windows.read_starts() == [START + HOUR]


def test_commit_without_response_is_tried_three_times(windows: Windows, monkeypatch: Any) -> None:
    world, calls = windows.world, []
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))

    def fail_to_answer(change: TableChange) -> int:
        calls.append(change)
        raise Unknown("nobody saw it", remedy="wait")

    with open_tables(world.feed, world.lake) as (rows, _, complete, _):
        monkeypatch.setattr(complete.table, "commit", fail_to_answer)
        with pytest.raises(Unknown):
            sync(world.reopen_ledger(), world.lake, FeedTables(rows, windows=complete))
    assert len(calls) == 3
    windows.sync()
    assert windows.read_starts() == [START, START + HOUR]


def test_windows_table_of_other_ledger_is_refused(windows: Windows) -> None:
    world = windows.world
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    with open_tables(world.feed, world.lake) as (_, _, complete, _):
        complete.table.create(
            {"window_start": "timestamp(ms)", "window_end": "timestamp(ms)"}, {"sluice.ledger": "other"}
        )
    with pytest.raises(TableDiffers, match="orders_windows is there and belongs to another ledger"):
        windows.sync()
