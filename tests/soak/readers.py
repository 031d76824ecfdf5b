"""Queries with filters by DuckDB, PyIceberg and deltalake, compared with the notes of producers.

A query over complete windows returns each certain row that its filter selects, once, and no row that is aborted or in
quarantine. A table's filtered scan returns the rows that the same filter selects of a scan of all.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from sluice.pipelines import errors
from sluice.pipelines.util.units import MINUTE, show_window
from tests.checker.facts import EvidenceError
from tests.soak.commands import Commands
from tests.soak.feeds import FEEDS, SoakFeed
from tests.soak.notes import Expected, read_notes
from tests.soak.upkeep import pick_window
from tests.soak.writers import Writers
from tests.stores import Store
from tests.table_readers import fetch_file, get_delta_access, get_iceberg_access

Row = tuple[Any, ...]


@dataclass
class Readers:
    """The readers of the scene."""

    commands: Commands
    writers: Writers
    draw: random.Random
    rows: int = 0
    """Rows that were compared."""

    def query_one(self) -> None:
        """Run a query over some feed, by its files or its table. A finding where it returns anything else."""
        feed = self.draw.choice([f for f in FEEDS if not f.source and not f.erases])
        try:
            if feed.table and self.draw.random() < 0.6:
                problems = list(self.query_table(feed))
            else:
                problems = list(self._query_files(feed))
        except (EvidenceError, OSError, duckdb.Error, ValueError, KeyError) as error:
            problems = [f"{type(error).__name__}: {error}"]
        for problem in problems[:3]:
            self.commands.site.journal.fail(f"reader of {feed.name}: {problem}")

    # -- files

    def _query_files(self, feed: SoakFeed) -> Iterator[str]:
        """Compare the rows that DuckDB finds in the files of complete windows with the notes."""
        begin = pick_window(feed, self.draw)
        end = begin + self.draw.randint(1, 2) * feed.window * MINUTE
        words = ("files", feed.name, "--from", show_window(begin), "--to", show_window(end))
        done = self.commands.run(*words, expected=(errors.UsageError,))  # from before the feed's first window
        if done.code:
            return
        ranges = [(f["partition"], f["start"], f["end"]) for f in done.document["files"]]
        column, minimum = self._draw_filter(feed, begin, end)
        expected = read_notes(
            self.writers.list_notes(feed.name),
            lambda position: any(p == position[0] and start <= position[1] < stop for p, start, stop in ranges),
            lambda line: bool(line[column] >= minimum),
            committed=feed.name != "raw_uncommitted",
        )
        names = feed.partition_column, feed.offset_column
        where = (
            f"amount >= {minimum}" if column == "amount" else f"{feed.time_column} >= to_timestamp({minimum / 1000!r})"
        )
        files = sorted({f["address"] for f in done.document["files"]})
        rows = _query_by_duckdb(files, names, where, self.commands.site.backend)
        rows = [r for r in rows if any(p == r[0] and start <= r[1] < stop for p, start, stop in ranges)]
        yield from self._compare(rows, expected)

    def _draw_filter(self, feed: SoakFeed, begin: int, end: int) -> tuple[str, int]:
        if feed.is_typed and self.draw.random() < 0.5:
            return "amount", self.draw.randrange(1000)
        return "stamp", self.draw.randrange(begin, end)

    def _compare(self, rows: list[Row], expected: Expected) -> Iterator[str]:
        positions = {(r[0], r[1]) for r in rows}
        self.rows += len(rows)
        if len(positions) < len(rows):
            yield f"{len(rows) - len(positions)} rows are there twice"
        if missing := expected.certain - positions:
            yield f"{len(missing)} of {len(expected.certain)} rows are missing, such as {min(missing)}"
        if wrong := positions & expected.refused:
            yield f"{len(wrong)} rows may not be there, such as {min(wrong)}"

    # -- tables

    def query_table(self, feed: SoakFeed) -> Iterator[str]:
        """Compare a filtered scan of the newest snapshot with a scan of all of it, and both with the notes."""
        names = (feed.partition_column, feed.offset_column, "amount")
        minimum = self.draw.randrange(1000)
        pair = self.scan(feed, names, minimum)
        if pair is None:
            return
        everything, selected = pair
        positions = {(r[0], r[1]) for r in everything}
        if len(positions) < len(everything):
            yield f"{len(everything) - len(positions)} rows of the table are there twice"
        wanted = sorted(r for r in everything if r[2] is not None and r[2] >= minimum)
        if sorted(selected) != wanted:
            yield f"amount >= {minimum} returns {len(selected)} rows of the table, and {len(wanted)} are there"
        notes = read_notes(
            self.writers.list_notes(feed.name),
            lambda position: position in positions,
            lambda line: True,
            committed=True,
        )
        yield from self._compare(everything, notes)

    def scan(self, feed: SoakFeed, names: tuple[str, ...], minimum: int) -> tuple[list[Row], list[Row]] | None:
        """Returns all rows of the newest snapshot and those with such an amount; None without a table yet."""
        site = self.commands.site
        store = None if feed.local else site.backend
        if feed.table == "iceberg":
            from pyiceberg.catalog import load_catalog
            from pyiceberg.exceptions import NoSuchTableError

            properties = {"type": "sql", "uri": site.addresses.catalog, **get_iceberg_access(store)}
            with closing(load_catalog("sluice", **properties)) as catalog:
                try:
                    table = catalog.load_table(f"db.{feed.name}")
                except NoSuchTableError:
                    return None
                scans = (table.scan(selected_fields=names), table.scan(f"amount >= {minimum}", selected_fields=names))
                everything, selected = (list_rows(s.to_arrow(), names) for s in scans)
                return everything, selected
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        lake = f"{site.project}/.sluice/lake" if feed.local else site.lake
        try:
            delta = DeltaTable(f"{lake}/data/{feed.name}", storage_options=get_delta_access(store))
        except TableNotFoundError:
            return None
        filtered = delta.to_pyarrow_table(columns=list(names), filters=[("amount", ">=", minimum)])
        return list_rows(delta.to_pyarrow_table(columns=list(names)), names), list_rows(filtered, names)

    def scan_current(self, feed: SoakFeed, names: tuple[str, ...]) -> list[Row]:
        """Returns all rows of the Delta table of current rows."""
        from deltalake import DeltaTable

        site = self.commands.site
        lake = f"{site.project}/.sluice/lake" if feed.local else site.lake
        options = get_delta_access(None if feed.local else site.backend)
        table = DeltaTable(f"{lake}/tables/{feed.name}_current", storage_options=options)
        return list_rows(table.to_pyarrow_table(columns=list(names)), names)


def list_rows(table: pa.Table, names: Sequence[str]) -> list[Row]:
    """Returns the rows of these columns."""
    return list(zip(*(table.column(n).to_pylist() for n in names), strict=True))


def _query_by_duckdb(files: list[str], names: tuple[str, ...], where: str, store: Store) -> list[Row]:
    """Returns the columns of the rows that a condition selects."""
    if not files:
        return []
    with tempfile.TemporaryDirectory() as folder, closing(duckdb.connect()) as connection:
        here = [fetch_file(f, Path(folder, f"{n}.parquet"), store) for n, f in enumerate(files)]
        columns = ", ".join(f'"{c}"' for c in names)
        how = "union_by_name = true, hive_partitioning = false"
        return connection.execute(
            f"select {columns} from read_parquet($files, {how}) where {where}", {"files": here}
        ).fetchall()
