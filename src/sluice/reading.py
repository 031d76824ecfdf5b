"""Landed windows for other tools: as paths, Arrow, pandas, Polars, a DuckDB relation, a Spark DataFrame.

    sluice.read("orders", "2026-11-20T14").arrow()

Guarantee: all rows of the requested windows, each once. The ledger names the files; folders are never searched. A
window that is not complete raises WindowIncomplete. A file that is gone or damaged raises PartUnreadable, which names
it. Kafka is not asked.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import Failed, PartUnreadable, SluiceError, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.lake.parquet import check_rows, read_batches, wrap_read_errors
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.planning import windows
from sluice.pipelines.planning.schema_changes import describe_overridden, find_columns, find_protection
from sluice.pipelines.ports import Lake
from sluice.pipelines.publishing import manifest
from sluice.pipelines.publishing import published_files as reading
from sluice.pipelines.publishing.published_files import File
from sluice.pipelines.records.rows.row_format import QUARANTINED, landed_schema
from sluice.pipelines.schema.arrays import plain
from sluice.pipelines.util import extras, units
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import CALENDAR_ENDS
from sluice.resources.lake import arrow_files, open_lake, strip_scheme
from sluice.resources.project import Project

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    import pyarrow.dataset
    from pyarrow.fs import FileSystem
    from pyspark.sql import DataFrame, SparkSession

    from sluice.pipelines.feed.sql_report import Report
    from sluice.pipelines.operating.check_window import WindowCheck
    from sluice.pipelines.operating.event_hours import LateHours
    from sluice.pipelines.operating.feed_status import FeedStatus

SMALL_BYTES = 1 << 20
"""Files of a folder up to this mean size are read and hashed whole: opening one costs more than its bytes."""
T = TypeVar("T")
When = str | int | datetime
"""A window's start: `2026-11-20T14` in UTC, ms since the epoch, or a datetime with its zone. `2026-11-20` is all
windows of that day."""


def read(
    feed: str,
    window: When,
    *,
    to: When | None = None,
    project: str | os.PathLike[str] | None = None,
    kind: str = "landed",
) -> Windows:
    """A window of a feed; with `to`, all windows from `window` up to `to`, which is not included.

    `project` is the folder that holds `feeds/`, or one below it (the current one, or `$SLUICE_PROJECT`). `kind` is
    `landed` or `quarantined`. Raises FeedError, UsageError if the feed lacks the window, WindowIncomplete.
    """
    return of_feed(Project.find(Path(project) if project else None).readable_feed(feed), window, to=to, kind=kind)


def check(feed: str, window: When | None, *, key: Sequence[str], project: str | os.PathLike[str] | None) -> WindowCheck:
    """Check a window of a feed, as `sluice.check` describes."""
    from sluice.pipelines.operating.check_window import check_window
    from sluice.resources.open_ports import open_ports

    definition = Project.find(Path(project) if project else None).find_dataset(feed)
    with open_ports(definition) as ports:
        start = None if window is None else find_one(definition, window)
        return check_window(definition, ports, start, key, lambda progress: None)


def find_late_hours(feed: str, after: int | None, column: str, *, project: str | os.PathLike[str] | None) -> LateHours:
    """Returns hours with new late rows, as `sluice.find_late_hours` describes."""
    from sluice.pipelines.operating import event_hours
    from sluice.resources.open_ports import open_ports

    dataset = Project.find(Path(project) if project else None).find_dataset(feed)
    with open_ports(dataset) as ports:
        return event_hours.find_late_hours(dataset, ports, after, column)


def read_status(feed: str, windows: int, *, project: str | os.PathLike[str] | None) -> FeedStatus:
    """Returns the status of a feed, as `sluice.status` describes."""
    from sluice.pipelines.operating import feed_status
    from sluice.resources.open_ports import open_ports

    return feed_status.read_status(open_ports, Project.find(Path(project) if project else None).feed(feed), windows)


def of_feed(feed: Feed, window: When, *, to: When | None = None, kind: str = "landed") -> Windows:
    """Returns windows of a loaded feed, as `read` does for its name. Raises UsageError and WindowIncomplete."""
    starts = list_windows(feed.window, window, to)
    lake = open_lake(feed)
    return Windows.of(feed, Ledger(lake, feed.stored, lambda: 0), lake, starts, parse_kind(kind))


def list_windows(settings: WindowSettings, window: When, to: When | None = None) -> Sequence[int]:
    """Returns the windows (their starts, ms) from `window` up to `to`, without it those that `window` names.

    Raises UsageError.
    """
    start = instant(window, settings.parse_name)
    if to is None:
        in_time = settings.list_starts(start, settings.end_of(start))
        return settings.list_named(window) if isinstance(window, str) else in_time
    end = instant(to, settings.parse_name)
    if start >= end or (settings.is_start(start) and not settings.is_start(end)):
        raise UsageError(
            f"no whole windows lie between {settings.name(start)} and {settings.name(end)}",
            remedy=f"windows of this feed last {settings.words}; `to` is the first one left out",
        )
    return settings.list_starts(start, end)


def find_one(feed: Feed, window: When) -> int:
    """Returns the start (ms) of the only window that `window` names. Raises UsageError."""
    starts = list_windows(feed.window, window)
    if len(starts) > 1:
        first = feed.window.name(starts[0])
        raise UsageError(
            f"{window} is {len(starts)} windows of feed {feed.name}, and this is about one",
            remedy=f"name one, such as {first}; for all: sluice wait {feed.name} --window {window}",
        )
    return starts[0]


def parse_kind(text: str) -> PartKind:
    """The kind of parts by its name. Raises UsageError."""
    try:
        return PartKind(text)
    except ValueError:
        raise UsageError(f"{text!r} is no kind of rows", remedy=f"one of {', '.join(PartKind)}") from None


def instant(when: When, parse_text: Callable[[object], int] = units.parse_window) -> int:
    """ms since the epoch. Raises UsageError."""
    try:
        if isinstance(when, datetime):
            return units.parse_instant(when)
        if not isinstance(when, int):
            return parse_text(when)
        if not 0 <= when < CALENDAR_ENDS:
            raise ValueError("is no time in ms since the epoch that the calendar has")
        return when
    except ValueError as error:
        raise UsageError(f"{when!r} {error}", remedy="a datetime needs its zone") from None


@dataclass(frozen=True, repr=False)
class Windows:
    """Complete windows of a feed, by their starts (ms), and where their rows are, range by range in log order.
    Ranges may share a file.
    """

    feed: Feed = field(repr=False)
    starts: tuple[int, ...]
    kind: PartKind
    files: tuple[File, ...] = field(repr=False)
    standing: pa.Schema = field(repr=False)
    """The schema of rows as they would land now."""
    notes: tuple[str, ...] = field(default=(), repr=False)
    """Notes on the windows: clocks that were ahead, other rules of `protect` than now."""

    @classmethod
    def of(cls, feed: Feed, ledger: Ledger, lake: Lake, starts: Sequence[int], kind: PartKind) -> Windows:
        """Windows by their starts. Raises WindowIncomplete, WindowRetired, and UsageError for a window that the feed
        lacks, and for a split feed, whose outputs are datasets of their own."""
        if feed.split and kind is PartKind.LANDED:
            names = ", ".join(d.dataset for d in feed.datasets)
            raise UsageError(f"feed {feed.name} is split into several datasets", remedy=f"name one of them: {names}")
        files = reading.list_files(feed, lake, starts, kind, ledger=ledger)
        state = ledger.read()
        notes = [
            f"{feed.window.name(w)}: {note}"
            for w in starts
            if (note := windows.describe_against(state, w, feed.window))
        ]
        former = (find_protection(ledger, state, name) for name in state.shapes)
        protected = starts if feed.shape.protection or any(former) else ()
        notes += [
            f"{feed.window.name(w)}: {note}"
            for w, receipts in manifest.group_receipts(ledger, state, protected, feed.window).items()
            if (note := reading.describe_protection_then(feed, ledger, state, receipts))
        ]
        return cls(feed, tuple(starts), kind, files, _find_standing_schema(feed, state, kind), tuple(notes))

    def __repr__(self) -> str:
        """In UTC: `Windows(orders, 2026-11-20T14:00, 5 files, 12,000 rows)`."""
        settings = self.feed.window
        first, last = settings.name(self.starts[0]), settings.name(settings.end_of(self.starts[-1]))
        span = first if len(self.starts) == 1 else f"{first} to {last}"
        kind = "" if self.kind is PartKind.LANDED else f", {self.kind}"
        return f"Windows({self.feed.dataset}{kind}, {span}, {units.many(len(self._each), 'file')}, {self.rows:,} rows)"

    @property
    def paths(self) -> list[str]:
        """Where the files are: absolute paths or URLs."""
        return [f.address for f in self._each]

    @cached_property
    def _each(self) -> list[File]:
        """Each file once."""
        return reading.order_files(self.files)

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files)

    @cached_property
    def schema(self) -> pa.Schema:
        """The rows' schema: today's columns, then those that only older files have; null if a file lacks the column.

        A column has the widest type that it ever had, so that all windows of a feed are one table.
        """
        return self._unify_schemas(self._schemas)

    def _unify_schemas(self, schemas: Sequence[pa.Schema]) -> pa.Schema:
        distinct = _list_distinct(schemas)
        unified = pa.unify_schemas([self.standing, *distinct], promote_options="permissive")
        return pa.schema([f if all(f.name in s.names for s in distinct) else f.with_nullable(True) for f in unified])

    @cached_property
    def _schemas(self) -> list[pa.Schema]:
        return [f.schema.to_arrow_schema().remove_metadata() for f in self._footers]

    @cached_property
    def _alike(self) -> bool:
        """Returns whether each file has all columns, in their order; otherwise Arrow makes one table of the files."""
        return _have_columns(self.schema, self._schemas)

    @cached_property
    def _footers(self) -> list[pq.FileMetaData]:
        return self._map_files(lambda file: file.metadata)

    @cached_property
    def _are_small(self) -> bool:
        return not self._filesystem and 0 < sum(f.bytes for f in self.files) <= SMALL_BYTES * len(self._each)

    def _map_files(self, work: Callable[[pq.ParquetFile], T]) -> list[T]:
        """Returns what `work` does with each file. Raises PartUnreadable if one has other rows than the ledger says;
        of small files, if any byte differs."""
        rows = Counter[str]()
        for f in self.files:
            rows[f.path] += f.rows

        def read(where: tuple[File, str]) -> T:
            part, path = where
            with wrap_read_errors(part.path):
                source: Any = path
                if self._are_small:
                    source = Path(path).read_bytes()
                    if hashlib.sha256(source).hexdigest() != part.sha256:
                        message = f"{part.path} has other bytes than the ledger says"
                        raise PartUnreadable(message, remedy=paths.find_remedy(part.path), path=part.path)
                    source = pa.BufferReader(source)
                with pq.ParquetFile(source, filesystem=self._filesystem) as file:
                    check_rows(file.metadata, part.path, rows[part.path])
                    return work(file)

        return map_parallel(read, list(zip(self._each, self._arrow_paths, strict=True)))

    @cached_property
    def _filesystem(self) -> FileSystem | None:
        return arrow_files(self.feed)

    @property
    def _arrow_paths(self) -> list[str]:
        return [strip_scheme(path) for path in self.paths]

    def dataset(self) -> pyarrow.dataset.Dataset:
        """A dataset, scanned on demand: for rows that do not fit into memory, or if you need only a few columns."""
        return self._look_again_on_error(lambda w: w._dataset(w.schema))

    def _look_again_on_error(self, read: Callable[[Windows], T]) -> T:
        """Returns what `read` does; of the newer files if ours were replaced since they were listed."""
        try:
            return read(self)
        except (PartUnreadable, OSError, pa.ArrowException):
            lake = open_lake(self.feed)
            ledger = Ledger(lake, self.feed.stored, lambda: 0)
            if not ledger.list_replaced(f.path for f in self.files):
                raise
            newer = Windows.of(self.feed, ledger, lake, self.starts, self.kind)
            return newer._look_again_on_error(read)

    def _dataset(self, schema: pa.Schema) -> pyarrow.dataset.Dataset:
        import pyarrow.dataset

        scanning = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = pyarrow.dataset.ParquetFileFormat(default_fragment_scan_options=scanning)
        return pyarrow.dataset.dataset(self._arrow_paths, schema, parquet, filesystem=self._filesystem)

    def arrow(self, columns: list[str] | None = None) -> pa.Table:
        """All rows in memory, by window and in log order in each partition; with `columns`, only these columns.

        Offset ranges that share files and were landed in another order than the log's keep that one, and rows of a feed
        with `layout: record_time` that of their folders.
        Raises PartUnreadable if a file is gone or damaged.
        """
        return self._look_again_on_error(lambda w: w._to_table(columns))

    def _to_table(self, columns: list[str] | None) -> pa.Table:
        if columns is None and self._are_small:
            tables = self._map_files(lambda file: file.read(use_threads=False).replace_schema_metadata())
            schema = self._unify_schemas([t.schema for t in tables])
            if _have_columns(schema, [t.schema for t in tables]):
                return pa.concat_tables(pa.Table.from_arrays(t.columns, schema=schema) for t in tables)
        try:
            return self._dataset(self.schema).to_table(columns=columns)
        except (OSError, pa.ArrowException):
            lake = open_lake(self.feed)
            for file in self._each:  # raises PartUnreadable for the first damaged file
                for _ in read_batches(lake, file.path, 1 << 16):
                    pass
            raise

    def pandas(self, columns: list[str] | None = None) -> pandas.DataFrame:
        """As `arrow`, in columns that keep Arrow's types: whole numbers with nulls stay whole, times stay exact."""
        with extras.name_missing():
            import pandas

        frame: pandas.DataFrame = self.arrow(columns).to_pandas(types_mapper=pandas.ArrowDtype)
        return frame

    def polars(self) -> polars.LazyFrame:
        """A lazily read frame. Arrow reads the columns and rows that a query asks for, on S3 as in a folder; Polars
        itself reads small files, whose bytes are compared with the ledger's hashes before."""
        with extras.name_missing():
            import polars
        frame: polars.LazyFrame = self._look_again_on_error(lambda w: w._to_polars(polars))
        return frame

    def _to_polars(self, polars: Any) -> Any:
        frame: Any
        if self._are_small and self._alike:
            frame = polars.scan_parquet(self._arrow_paths, glob=False, hive_partitioning=False)
            # `polars.from_arrow` imports pandas, if it is there.
            if frame.collect_schema() == polars.DataFrame(pa.RecordBatchReader.from_batches(self.schema, [])).schema:
                return frame
        return polars.scan_pyarrow_dataset(self._dataset(self.schema))

    def _to_duckdb(self, where: Any) -> duckdb.DuckDBPyRelation:
        relation: duckdb.DuckDBPyRelation
        if not self.paths:
            relation = where.from_arrow(self.schema.empty_table())
        elif self._filesystem or not self._alike:
            # DuckDB would fetch an extension to reach S3 itself; and it can widen fewer types.
            counted = pa.schema([f.with_type(pa.int64()) if _get_unit(f) == "ms" else f for f in self.schema])
            relation = where.from_arrow(self._dataset(counted)).project(", ".join(map(_time_column_sql, self.schema)))
        else:
            # DuckDB would take some characters for a pattern.
            paths = ["".join(f"[{c}]" if c in "*?[" else c for c in p) for p in self.paths]
            relation = where.read_parquet(paths, hive_partitioning=False)
            if any(_get_unit(f) == "ns" for f in self.schema):
                relation = relation.project(", ".join(_cut_to_microseconds(f) for f in self.schema))
        return relation

    def duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """A lazily read relation, on DuckDB's default connection, so that `duckdb.sql` finds it.

        Columns in nanoseconds are cut to microseconds: DuckDB compares no time in nanoseconds with one that has a zone.
        """
        with extras.name_missing():
            import duckdb
        return self._look_again_on_error(lambda w: w._to_duckdb(connection or duckdb))

    def spark(self, session: SparkSession | None = None) -> DataFrame:
        """A DataFrame, in the active session or in one with the feed's settings.

        Spark's own Parquet reader reads the files. Arrow reads them in Spark's tasks where that reader fails: times
        beyond its range or in nanoseconds, files with different columns, and files on S3. There, a time that Spark
        cannot hold is null.
        """
        with extras.name_missing():
            from sluice.resources.spark import engine

            session = session or engine.session(self.feed.spark)
        return self._look_again_on_error(lambda w: w._to_spark(session))

    def _to_spark(self, session: SparkSession) -> DataFrame:
        from sluice.resources.spark import parts

        schema = parts.spark_schema(self.schema)
        own = not self._filesystem and self._alike and all(parts.spark_reads(f) for f in self._footers)
        if own and self.paths:
            reader = session.read.schema(schema).option("parquet.page.verify-checksum.enabled", "true")
            return reader.parquet(*map(_escape_glob, self.paths))
        lake = open_lake(self.feed)
        shares = tuple(parts.shares(lake, self.files))
        if not shares:
            return session.createDataFrame([], schema)
        extras.require("pandas")  # PySpark needs it for `mapInArrow`, and fails with an error of its own.
        numbers = session.range(0, len(shares), 1, len(shares))
        with extras.name_missing():
            return numbers.mapInArrow(parts.ReadShares(lake, shares, schema), schema)


def schema_of(feed: Feed, kind: PartKind) -> pa.Schema:
    """The schema of rows as they would land now: by the newest shape in the ledger, else by the feed's file."""
    return _find_standing_schema(feed, Ledger(open_lake(feed), feed.stored, lambda: 0).read(), kind)


def list_overridden(feed: Feed) -> str:
    """Returns the columns that tools reading the feed's folder override, or why they are unknown; empty if none.
    Uses the ledger in the feed's lake."""
    try:
        return describe_overridden(feed, Ledger(open_lake(feed), feed.stored, lambda: 0).read())
    except SluiceError as error:
        return f"the keys of its folders are not known: {error.message}"


def _find_standing_schema(feed: Feed, state: State, kind: PartKind) -> pa.Schema:
    return plain(QUARANTINED if kind is PartKind.QUARANTINED else landed_schema(find_columns(feed, state)))


def _have_columns(schema: pa.Schema, others: Sequence[pa.Schema]) -> bool:
    """Returns whether each has all columns, in their order."""
    fields = [(f.name, f.type) for f in schema]
    return all([(f.name, f.type) for f in other] == fields for other in _list_distinct(others))


def _list_distinct(schemas: Sequence[pa.Schema]) -> list[pa.Schema]:
    """Returns each schema once. Thousands of files have one or two; to hash a schema takes as long as to read it."""
    distinct: list[pa.Schema] = []
    for schema in schemas:
        if not any(map(schema.equals, distinct)):
            distinct.append(schema)
    return distinct


def _get_unit(field: pa.Field) -> str:
    """The unit of a column of times; empty for any other."""
    return str(field.type.unit) if pa.types.is_timestamp(field.type) else ""


def _quote(field: pa.Field) -> str:
    return '"{}"'.format(field.name.replace('"', '""'))


def _cut_to_microseconds(field: pa.Field) -> str:
    """The column in SQL, without digits below a microsecond, as Spark gets it. What DuckDB takes for infinity stays."""
    name = _quote(field)
    if _get_unit(field) != "ns":
        return name
    kind = "timestamptz" if field.type.tz else "timestamp"
    return f"coalesce(make_{kind}(epoch_ns({name}) // 1000), {name}::{kind}) as {name}"


def _time_column_sql(field: pa.Field) -> str:
    """The column in SQL; a time that DuckDB cannot hold is infinity, as in its own Parquet reader."""
    name = _quote(field)
    if _get_unit(field) == "ns":
        return _cut_to_microseconds(field)
    if _get_unit(field) != "ms":
        return name
    last, kind = (2**63 - 2) // 1000, "timestamptz" if field.type.tz else "timestamp"
    beyond = f"when {name} > {last} then 'infinity'::{kind} when {name} < -{last} then '-infinity'::{kind}"
    return f"case {beyond} else make_{kind}({name} * 1000) end as {name}"


def _escape_glob(path: str) -> str:
    """The path, escaped: Hadoop would take some of its characters for a pattern."""
    return "".join(f"\\{c}" if c in "*?[]{}\\" else c for c in path)


def run_report(report: Report, windows: Windows) -> pa.Table:
    """Return the result of a report's SQL over one complete window, in the memory of Spark's driver.

    The table of the feed's name has exactly the window's rows; times are in UTC. Raises Failed with Spark's reason, and
    SetupError without Spark.
    """
    from sluice.resources.spark import engine, parts, spark_errors

    session = engine.open_another(engine.session(windows.feed.spark), windows.feed.spark)
    session.conf.set("spark.sql.session.timeZone", "UTC")
    begin, end = windows.starts[0], windows.feed.window.end_of(windows.starts[-1])
    try:
        windows.spark(session).createOrReplaceTempView(report.feed)
        bounds = {"window_start": _utc(begin), "window_end": _utc(end)}
        return parts.collect(session.sql(report.sql, args=bounds))
    except Exception as error:  # noqa: BLE001 - Spark has no common error over classic, Py4J and Connect
        raise Failed(
            f"report {report.name} failed: {spark_errors.cause(error)}",
            remedy=f"fix reports/{report.name}.sql, then run it again for this window",
        ) from None


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
