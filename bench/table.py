"""What a batch costs a feed's table that is old: many files and snapshots stand in it.

An Iceberg table in a folder on this disk, its catalog in SQLite. Each commit adds ten files, as an hour of ten
partitions does. After so many commits, a batch of 200 files is added, as a run adds it: the table is looked at, each
footer is read, one commit is made. The files are links to one small file of a raw feed. Seconds are this process's CPU
and what a clock on the wall says.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import RenderableType

from sluice.cli.numbers import count, size
from sluice.cli.terminal import heading, table
from sluice.pipelines.records.format import RawFormat
from sluice.pipelines.schema.wider import RAW_TYPES
from sluice.pipelines.vocabulary.tables import TableChange, TableOperation
from sluice.resources.tables.iceberg import IcebergTable

COMMITS = (10, 100, 1000)
FILES, BATCH = 10, 200
"""Files of a commit, and of the batch that is measured."""


@dataclass(frozen=True)
class OldTable:
    """A table after so many commits. By what was asked: CPU seconds, and seconds by the clock."""

    snapshots: int
    files: int
    metadata_bytes: int
    seconds: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class TableReport:
    grown: tuple[OldTable, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(folder: Path, note: Callable[[str], None], commits: Sequence[int] = COMMITS) -> TableReport:
    """One table in `folder`, measured while it grows."""
    place = folder / f"table-{secrets.token_hex(4)}"
    try:
        world = _World(place)
        return TableReport(tuple(world.measure(n, note) for n in commits))
    finally:
        shutil.rmtree(place, ignore_errors=True)


class _World:
    def __init__(self, place: Path) -> None:
        (place / "data").mkdir(parents=True)
        self._place, self._made, self._commits = place, 0, 0
        rows = [{"topic": "orders", "partition": 0, "offset": o, "timestampType": 0} for o in range(100)]
        plain = [f.with_type(pa.string()) if pa.types.is_dictionary(f.type) else f for f in RawFormat.schema]
        pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(plain)), place / "one.parquet")
        catalog = {"type": "sql", "uri": f"sqlite:///{place}/catalog.db"}
        self._table = IcebergTable("db.orders", catalog, {"warehouse": str(place / "tables")})
        self._table.look()
        self._table.create(RAW_TYPES, {})
        self._table.look()

    def measure(self, commits: int, note: Callable[[str], None]) -> OldTable:
        note(f"table: {commits:,} commits of {FILES} files")
        while self._commits < commits:
            self._add(FILES)
        seconds = {"look": _timed(self._table.look)}
        seconds[f"add {BATCH} files"] = _timed(lambda: self._add(BATCH))
        seconds["list all files"] = _timed(self._table.files)
        head = self._table.look()
        newest = max((self._place / "tables").rglob("*.metadata.json"), key=lambda p: p.stat().st_mtime)
        return OldTable(head.snapshots if head else 0, head.files if head else 0, newest.stat().st_size, seconds)

    def _add(self, files: int) -> None:
        made = [self._place / "data" / f"{self._made + i}.parquet" for i in range(files)]
        for path in made:
            os.link(self._place / "one.parquet", path)
        self._made, self._commits = self._made + files, self._commits + 1
        offsets = '{"orders":{"0":["0-100"]}}'
        about = {"sluice.batches": f"{self._commits}/{secrets.token_hex(16)}", "sluice.offsets": offsets}
        self._table.look()
        added = tuple(map(str, made))
        self._table.commit(TableChange(TableOperation.APPEND, self._commits, added, (), RAW_TYPES, about))


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.monotonic(), time.process_time()
    work()
    return time.process_time() - cpu, time.monotonic() - began


def table_view(report: TableReport) -> Iterator[RenderableType]:
    """A column for each age, for the terminal."""
    columns = [f"{count(t.snapshots)} snapshots" for t in report.grown]
    yield heading("table", "an Iceberg table in a folder, its catalog in SQLite")
    rows = [["files", *(count(t.files) for t in report.grown)]]
    rows.append(["metadata", *(size(t.metadata_bytes) for t in report.grown)])
    for what in report.grown[0].seconds:
        of = [t.seconds[what] for t in report.grown]
        rows.append([f"{what}: seconds", *(f"{wall:,.2f}" for _, wall in of)])
        rows.append(["  CPU seconds", *(f"{cpu:,.2f}" for cpu, _ in of)])
    yield table(["", *columns], rows)
