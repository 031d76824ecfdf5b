"""Cost of a batch for an old table with many files and snapshots.

Tables in folders on this disk: an Iceberg one with its catalog in SQLite, and a Delta one. Each snapshot added ten
files, as an hour of ten partitions does. After this number of snapshots, a batch of 200 files is added, as a run adds
it: the table is read, each footer is read, one commit is made. The files are links to one small file of a raw feed.
Seconds are this process's CPU and wall-clock time.

Iceberg's snapshots are staged many to a commit, since PyIceberg's catalog writes all snapshots again at each commit:
later measurements see the same table.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import RenderableType

from sluice.cli.terminal.output import heading, table
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.model.tables import DELTA, ICEBERG, LEDGER, TableChange, TableOperation
from sluice.pipelines.ports import Table
from sluice.pipelines.records.rows.row_format import RawFormat
from sluice.pipelines.schema.wider import RAW_TYPES
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.tables.delta import DeltaLakeTable
from sluice.resources.tables.iceberg import IcebergTable, describe_files, without_history

SNAPSHOTS = (10, 100, 1000)
FILES, BATCH = 10, 200
"""Files of a snapshot, and of the batch that is measured."""
STAGED = 25
"""Snapshots of Iceberg in a commit while the table grows."""
ORDERS = "data/orders"


@dataclass(frozen=True)
class OldTable:
    """A table after `snapshots` snapshots, with CPU and wall-clock seconds by question. `metadata_bytes` is
    the size of Iceberg's newest metadata file, and of Delta's log."""

    snapshots: int
    files: int
    metadata_bytes: int
    seconds: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class TableReport:
    """By format."""

    grown: Mapping[str, tuple[OldTable, ...]]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(folder: Path, note: Callable[[str], None], snapshots: Sequence[int] = SNAPSHOTS) -> TableReport:
    """A table of each format in `folder`, measured while it grows."""
    scratch = folder / f"table-{secrets.token_hex(4)}"
    try:
        worlds: dict[str, _World] = {ICEBERG: _IcebergWorld(scratch / "iceberg"), DELTA: _DeltaWorld(scratch / "delta")}
        return TableReport({f: tuple(_measured(f, w, n, note) for n in snapshots) for f, w in worlds.items()})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _World(Protocol):
    table: Table
    made: _Made

    def grow(self, snapshots: int) -> None:
        """Add snapshots."""

    def metadata_bytes(self) -> int: ...


def _measured(format: str, world: _World, snapshots: int, note: Callable[[str], None]) -> OldTable:
    note(f"table: {format}, {snapshots:,} snapshots of {FILES} files")
    world.grow(snapshots - world.made.commits)
    at = (snapshots, world.made.files, world.metadata_bytes())
    seconds = {"look": _timed(world.table.look)}
    seconds[f"add {BATCH} files"] = _timed(lambda: _add(world, BATCH))
    seconds["list all files"] = _timed(world.table.files)
    return OldTable(*at, seconds)


def _add(world: _World, files: int) -> None:
    world.table.look()
    world.table.commit(world.made.change(files))


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.monotonic(), time.process_time()
    work()
    return time.process_time() - cpu, time.monotonic() - began


class _Made:
    """The files of a table: links to one, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._one = folder / ORDERS, folder / "one.parquet"
        self._folder.mkdir(parents=True)
        self.files = self.commits = 0
        rows = [{"topic": "orders", "partition": 0, "offset": o, "timestampType": 0} for o in range(100)]
        plain = [f.with_type(pa.string()) if pa.types.is_dictionary(f.type) else f for f in RawFormat.schema]
        pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(plain)), self._one)

    def change(self, files: int) -> TableChange:
        """Returns a batch of new files, and its snapshot properties."""
        paths = [self._folder / f"{self.files + i}.parquet" for i in range(files)]
        for path in paths:
            os.link(self._one, path)
        self.files, self.commits = self.files + files, self.commits + 1
        offsets = '{"orders":{"0":["0-100"]}}'
        about = {"sluice.batches": f"{self.commits}/{secrets.token_hex(16)}", "sluice.offsets": offsets}
        return TableChange(TableOperation.APPEND, self.commits, tuple(map(str, paths)), (), RAW_TYPES, about)


class _IcebergWorld:
    def __init__(self, folder: Path) -> None:
        self.made, self._place = _Made(folder), folder
        self._catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        self._warehouse = {"warehouse": str(folder / "tables")}
        self.table: Table = IcebergTable("db.orders", self._catalog, self._warehouse)
        self.table.look()
        self.table.create(RAW_TYPES, {})
        _add(self, FILES)

    def grow(self, snapshots: int) -> None:
        from pyiceberg.catalog import load_catalog

        read = load_catalog("sluice", **self._catalog, **self._warehouse).load_table("db.orders")
        while snapshots > 0:
            with without_history(read) as transaction:
                for _ in range(min(snapshots, STAGED)):
                    change = self.made.change(FILES)
                    with transaction.update_snapshot(snapshot_properties=dict(change.about)).merge_append() as staged:
                        for file in describe_files(read.io, transaction.table_metadata, change.add):
                            staged.append_data_file(file)
            snapshots -= STAGED

    def metadata_bytes(self) -> int:
        files = (self._place / "tables").rglob("*.metadata.json")
        return max(files, key=lambda p: p.stat().st_mtime).stat().st_size


class _DeltaWorld:
    def __init__(self, folder: Path) -> None:
        self.made, self._place = _Made(folder), folder
        self.table: Table = DeltaLakeTable(LocalLake(folder), ORDERS, {})
        self.table.look()
        self.table.create(RAW_TYPES, {LEDGER: "bench"})
        _add(self, FILES)

    def grow(self, snapshots: int) -> None:
        self.table.look()
        for _ in range(snapshots):
            self.table.commit(self.made.change(FILES))

    def metadata_bytes(self) -> int:
        return sum(p.stat().st_size for p in (self._place / ORDERS / "_delta_log").iterdir())


def table_view(report: TableReport) -> Iterator[RenderableType]:
    """A table for each format, with a column for each age, for the terminal."""
    descriptions = {ICEBERG: "in a folder, its catalog in SQLite", DELTA: "in a folder"}
    for format, grown in report.grown.items():
        yield heading(format, descriptions[format])
        rows = [["files", *(count(t.files) for t in grown)]]
        rows.append(["metadata", *(size(t.metadata_bytes) for t in grown)])
        for what in grown[0].seconds:
            of = [t.seconds[what] for t in grown]
            rows.append([f"{what}: seconds", *(f"{wall:,.2f}" for _, wall in of)])
            rows.append(["  CPU seconds", *(f"{cpu:,.2f}" for cpu, _ in of)])
        yield table(["", *(f"{count(t.snapshots)} snapshots" for t in grown)], rows)
