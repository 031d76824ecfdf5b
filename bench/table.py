"""Cost of a batch for an old table with many files and snapshots.

Tables in folders on this disk: an Iceberg one with its catalog in SQLite, and a Delta one. Each snapshot added ten
files, as an hour of ten partitions does. After this number of snapshots, a batch of 200 files is added, as a run adds
it: the table is read, each footer is read, one commit is made. The files are links to one small file of a raw feed.
Seconds are this process's CPU and wall-clock time.

Then current rows: all rows of a source are folded, and an hour of changes that are spread evenly over them. The files
of changes are read, buckets read and written, and the Iceberg table gets them in one commit, as a sync does it.

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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import RenderableType

from sluice.cli.terminal.output import heading, table
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.feed.changes_section import ChangeFormat, ChangesSettings
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.landing.writer import choose_options
from sluice.pipelines.model.tables import DELTA, ICEBERG, LEDGER, TableChange, TableOperation
from sluice.pipelines.ports import Table
from sluice.pipelines.records.rows.row_format import RawFormat
from sluice.pipelines.schema.schema import arrow_type
from sluice.pipelines.schema.wider import RAW_TYPES, parse_type
from sluice.pipelines.tables.key_fold import Columns, Fold
from sluice.pipelines.util.units import many
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.tables.delta import DeltaLakeTable
from sluice.resources.tables.iceberg import IcebergTable, describe_files, without_history
from sluice.resources.tables.outcomes import Outcomes

SNAPSHOTS = (10, 100, 1000)
FILES, BATCH = 10, 200
"""Files of a snapshot, and of the batch that is measured."""
STAGED = 25
"""Snapshots of Iceberg in a commit while the table grows."""
ORDERS = "data/orders"
ROWS, CHANGES = 1_000_000, 100_000
"""Rows of a source, and changes of an hour."""


@dataclass(frozen=True)
class OldTable:
    """A table after `snapshots` snapshots, with CPU and wall-clock seconds by question. `metadata_bytes` is
    the size of Iceberg's newest metadata file, and of Delta's log."""

    snapshots: int
    files: int
    metadata_bytes: int
    seconds: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class FoldTimes:
    """CPU and wall-clock seconds of folding all `rows`, and then `changes` of them. `buckets` are the files of rows."""

    rows: int
    changes: int
    buckets: int
    all: tuple[float, float]
    hour: tuple[float, float]


@dataclass(frozen=True)
class TableReport:
    """By format, and of current rows."""

    grown: Mapping[str, tuple[OldTable, ...]]
    folded: FoldTimes

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(
    folder: Path, note: Callable[[str], None], snapshots: Sequence[int] = SNAPSHOTS, rows: int | None = None
) -> TableReport:
    """A table of each format in `folder`, measured while it grows, and one of this number of current rows."""
    rows = rows or ROWS
    scratch = folder / f"table-{secrets.token_hex(4)}"
    try:
        worlds: dict[str, _World] = {ICEBERG: _IcebergWorld(scratch / "iceberg"), DELTA: _DeltaWorld(scratch / "delta")}
        grown = {f: tuple(_measured(f, w, n, note) for n in snapshots) for f, w in worlds.items()}
        note(f"current rows: {rows:,}, and {CHANGES:,} changes")
        return TableReport(grown, measure_fold(scratch / "fold", rows))
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
        outcomes = Outcomes("table db.orders", "catalog")
        while snapshots > 0:
            with without_history(read) as transaction:
                for _ in range(min(snapshots, STAGED)):
                    change = self.made.change(FILES)
                    with transaction.update_snapshot(snapshot_properties=dict(change.about)).merge_append() as staged:
                        for file in describe_files(read.io, transaction.table_metadata, change.add, outcomes):
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


class _CurrentRows:
    """A table of current rows in a folder, with the columns of a feed that has a schema."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._lake, self.buckets, self._syncs, self._files = LocalLake(folder), 0, 0, dict[int, str]()
        kafka = {f"kafka_{name}": text for name, text in RAW_TYPES.items() if name != "value"}
        landed = {"id": "int64", "name": "string", "balance": "decimal(18,2)"} | kafka | {"kafka_tombstone": "bool"}
        self._columns = Columns.of(ChangesSettings(format=ChangeFormat.UPSERT, key=("id",)), landed)
        self._kinds = pa.schema([(name, arrow_type(parse_type(text))) for name, text in landed.items()])
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        self._table: Table = IcebergTable("db.customers_now", catalog, {"warehouse": str(folder / "tables")})
        self._table.look()
        self._table.create(self._columns.texts, {LEDGER: "bench"})

    def land(self, name: str, ids: np.ndarray[Any, Any], first: int) -> str:
        """Write a file of changes, with offsets from `first` on. Returns its path in the lake."""
        n = len(ids)
        values = {
            "id": ids,
            "name": [f"customer {i}" for i in ids.tolist()],
            "balance": pa.array(ids.astype(np.int32)).cast(_MONEY),
        }
        values |= {"kafka_topic": ["customers"] * n, "kafka_partition": np.zeros(n, np.int32)}
        values |= {"kafka_offset": np.arange(first, first + n), "kafka_tombstone": np.zeros(n, np.bool_)}
        columns = [pa.array(values[f.name], f.type) if f.name in values else pa.nulls(n, f.type) for f in self._kinds]
        self._write(name, pa.table(columns, schema=self._kinds))
        return name

    def fold_files(self, changes: Sequence[str]) -> None:
        """Fold the changes of files into the table, in one commit."""
        head, files = self._table.look(), self._files
        self._syncs += 1
        with Fold.create(self._columns) as fold:
            fold.add(self._lake, changes)
            fold.decide(self.buckets, head.rows if head else 0, sum(f.bytes for f in self._table.files().values()))
            fold.take(self._lake)
            self._files = dict(files) if fold.buckets == self.buckets else {}
            for number in fold.changed_buckets:
                before = self._columns.schema.empty_table()
                if self.buckets:
                    with self._lake.open(files[number % self.buckets]) as file:
                        before = pq.read_table(file)
                after = fold.merge(number, before, self._columns.deletion_schema.empty_table())
                self._files[number] = f"now/{fold.buckets}-{number}-{self._syncs}.parquet"
                self._write(self._files[number], after[0] if after else before)
            self.buckets = fold.buckets
        new, old = ({*map(self._lake.locate, of.values())} for of in (self._files, files))
        operation = TableOperation.OVERWRITE if old else TableOperation.APPEND
        columns = self._columns.texts
        self._table.commit(TableChange(operation, self._syncs, tuple(new - old), tuple(old - new), columns, {}))

    def _write(self, path: str, rows: pa.Table) -> None:
        with self._lake.create(path) as file:
            pq.write_table(rows, file, **choose_options(rows, LandingSettings()))


_MONEY = pa.decimal128(18, 2)


def measure_fold(folder: Path, rows: int) -> FoldTimes:
    """Fold this number of rows, and then an hour of changes. They land a million to a file."""
    now, chance = _CurrentRows(folder), np.random.default_rng(1)
    starts = range(0, rows, 1_000_000)
    everything = [now.land(f"{n}.parquet", np.arange(n, min(n + starts.step, rows)), n) for n in starts]
    all_rows = _timed(lambda: now.fold_files(everything))
    hour = now.land("hour.parquet", chance.choice(rows, CHANGES, replace=False), rows)
    of_hour = _timed(lambda: now.fold_files([hour]))
    return FoldTimes(rows, CHANGES, now.buckets, all_rows, of_hour)


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
    folded = report.folded
    yield heading("Current rows", f"{count(folded.rows)} in {many(folded.buckets, 'file')}")
    times = {"all rows": folded.all, f"{count(folded.changes)} changes": folded.hour}
    yield table(["", "CPU seconds", "seconds"], [[what, f"{c:,.2f}", f"{w:,.2f}"] for what, (c, w) in times.items()])
