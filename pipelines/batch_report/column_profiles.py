"""How the values of a batch's columns are spread: the columns in its contract, and the records' times.

DuckDB reads the batch's own files. Of a large batch it reads a sample, whole row groups at even distances, and the page
shows the size of the sample. Memory is bounded by the sample's rows and bytes and by DuckDB's limit; texts are cut
before they are counted.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.pipelines.errors import PartUnreadable
from sluice.pipelines.lake import parquet
from sluice.pipelines.model.receipts import Part, Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.arrays import fixed_width, get_value_type
from sluice.pipelines.util import scratch
from sluice.pipelines.util.units import show_float, show_instant

if TYPE_CHECKING:
    import duckdb

MOST_ROWS = 1_000_000
MOST_BYTES = 128 << 20
MOST_FILES = 64
"""The most rows, bytes and files of a batch that are read whole; of a larger batch, a sample is read."""
MOST_COLUMNS = 16
BINS = 24
TOP = 10
TEXT = 120
"""Characters of a text that are counted as its value."""
MEMORY = 256 << 20
ROWS_AT_ONCE = 1 << 14
_PER_MS = {"s": 0.001, "ms": 1.0, "us": 1e3, "ns": 1e6}
Placed = tuple[Receipt, Part]


class Bin(NamedTuple):
    """The count of values between `low` and `high`, which are texts. `edge`: those beyond the drawn range."""

    label: str
    rows: int
    edge: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """One column: `stats` are names and figures, `bins` its histogram, `top` its most frequent values."""

    name: str
    type: str
    rows: int
    nulls: int
    stats: tuple[tuple[str, str], ...] = ()
    bins: tuple[Bin, ...] = ()
    ends: tuple[str, str] = ("", "")
    top: tuple[tuple[str, int], ...] = ()
    of: str = "values"


@dataclass(frozen=True, slots=True)
class Profiles:
    """`rows` of `all_` landed rows were read. `examples`: rows by their place, the values of some columns."""

    columns: tuple[Profile, ...] = ()
    rows: int = 0
    all_: int = 0
    missing: int = 0
    left_out: tuple[str, ...] = ()
    examples: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def is_sampled(self) -> bool:
        return self.rows < self.all_


def profiles(
    parts: Sequence[Placed],
    lake: Lake,
    wanted: Sequence[str],
    examples_at: Sequence[str] = (),
    *,
    published: bool,
    max_rows: int = MOST_ROWS,
) -> Profiles:
    """Profiles of landed parts: the columns `wanted` that they have, and the rows at `places` (`T:P:OFFSET`)."""
    all_ = sum(p.rows for _, p in parts)
    with _open_duckdb() as db:
        table = _SampleTable(db, wanted[:MOST_COLUMNS])
        for (receipt, part), path, source, groups in _choose_row_groups(parts, lake, published, max_rows):
            try:
                table.add(str(receipt.offset_range.tp), part, path, source, groups, max_rows)
            except PartUnreadable:
                table.missing += 1
        table.ready()
        column_profiles = tuple(p for c in table.columns.values() if (p := table.profile(c)))
        examples = table.at(examples_at) if table.rows else {}
        return Profiles(column_profiles, table.rows, all_, table.missing, tuple(wanted[MOST_COLUMNS:]), examples)


_lock = threading.Lock()


@contextmanager
def _open_duckdb() -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with tables of its own, to the one database of this process: a database costs 17 ms of CPU."""
    with _lock:
        database = _create_database(os.getpid())
    with database.cursor() as db:
        db.execute("set enable_progress_bar = false")
        yield db


@cache
def _create_database(pid: int) -> duckdb.DuckDBPyConnection:
    """Create this process's database, in memory. What exceeds `MEMORY` goes to files that end with the process."""
    import duckdb

    folder = tempfile.mkdtemp(dir=scratch.get_root())
    return duckdb.connect(config={"memory_limit": f"{MEMORY >> 10}KiB", "temp_directory": folder, "threads": 2})


def _evenly(items: Sequence[Any], limit: int) -> list[Any]:
    """Returns at most `limit` items, evenly spaced."""
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def _choose_row_groups(
    parts: Sequence[Placed], lake: Lake, published: bool, max_rows: int
) -> Iterator[tuple[Placed, str, pq.ParquetFile | None, list[int]]]:
    """Yields parts with their open files and the row groups to read; None for a missing or damaged file."""
    files = _evenly([x for x in parts if x[1].rows], MOST_FILES)
    rows = sum(p.rows for _, p in files)
    for receipt, part in files:
        path = part.path if published else part.staged
        try:
            with parquet.open_parquet(lake, path) as file:
                own, _ = parquet.find_row_groups(file.metadata, part)
                if own is not None:
                    yield (receipt, part), path, file, own
                    continue
                groups = list(range(file.num_row_groups))
                fair = max(1, len(groups) * max_rows // rows) if rows > max_rows else len(groups)
                yield (receipt, part), path, file, _evenly(groups, fair)
        except PartUnreadable:
            yield (receipt, part), path, None, []


class _SampleColumn(NamedTuple):
    """A column of the files, and its name in the table."""

    name: str
    sql_name: str
    type: pa.DataType


class _SampleTable:
    """The sample: numbers as doubles, times and days as whole numbers, texts cut, with their lengths."""

    def __init__(self, db: duckdb.DuckDBPyConnection, wanted: Sequence[str]) -> None:
        self._db, self._wanted = db, wanted
        self.columns: dict[str, _SampleColumn] = {}
        self._partitions: list[str] = []
        self._read: list[pa.RecordBatch] = []
        self._bytes = self.rows = self.missing = 0

    def add(
        self, partition: str, part: Part, path: str, file: pq.ParquetFile | None, groups: Sequence[int], max_rows: int
    ) -> None:
        if file is None:
            self.missing += 1
            return
        schema = file.schema_arrow
        if not self.columns:
            names = [n for n in self._wanted if n in schema.names]
            self.columns = {
                n: _SampleColumn(n, f"c{i}", get_value_type(schema.field(n).type)) for i, n in enumerate(names)
            }
        offset = "kafka_offset" if "kafka_offset" in schema.names else "offset"
        if partition not in self._partitions:
            self._partitions.append(partition)
        if groups and set(self.columns) <= set(schema.names):
            _, before = parquet.find_row_groups(file.metadata, part)
            read = parquet.read(file, path, ROWS_AT_ONCE, [*{*self.columns, offset}], groups)
            for batch in parquet.own_rows(read, part, before):
                if self.rows >= max_rows or self._bytes >= MOST_BYTES:
                    return
                self._keep(self._partitions.index(partition), offset, batch.slice(0, max_rows - self.rows))

    def ready(self) -> None:
        """Everything to be read has been read."""
        if self._read:
            self._db.register("t", pa.Table.from_batches(self._read))

    def _keep(self, partition: int, offset: str, batch: pa.RecordBatch) -> None:
        partitions = fixed_width(pa.int32(), np.full(batch.num_rows, partition, np.int32))
        stored: dict[str, pa.Array] = {"p": partitions, "o": batch.column(offset)}
        for c in self.columns.values():
            stored |= _stored_columns(c, batch.column(c.name))
        stored_rows = pa.RecordBatch.from_arrays([*stored.values()], names=[*stored])
        self._read.append(stored_rows)
        self._bytes += stored_rows.nbytes
        self.rows += stored_rows.num_rows

    # -- asking it

    def profile(self, c: _SampleColumn) -> Profile | None:
        if not self.rows:
            return None
        (nulls,) = self._one(f"select count(*) from t where {c.sql_name} is null")
        blank = Profile(c.name, str(c.type), self.rows, nulls)
        if _is_text(c.type):
            return self._of_texts(blank, c)
        if pa.types.is_boolean(c.type):
            return replace(blank, top=self._top(c.sql_name))
        if _is_bytes(c.type):
            return self._of_numbers(blank, f"l{c.sql_name}", _count_said, "lengths in bytes", integral=True)
        if (format_number := _number_format(c.type)) is not None:
            return self._of_numbers(blank, c.sql_name, format_number, "values", integral=pa.types.is_integer(c.type))
        return blank

    def _of_texts(self, blank: Profile, c: _SampleColumn) -> Profile:
        n, shortest, mean, longest = (
            self._one(f"""select count(distinct {c.sql_name}), min(l{c.sql_name}), avg(l{c.sql_name}),
            max(l{c.sql_name}) from t""")
        )
        stats = [("different", f"{n:,}")]
        if shortest is not None:
            varied = f" to {longest:,}, {_count_said(mean)} on average" if shortest < longest else ""
            stats.append(("length", f"{shortest:,}{varied}"))
        return replace(blank, stats=tuple(stats), top=self._top(c.sql_name))

    def _top(self, sql_name: str) -> tuple[tuple[str, int], ...]:
        rows = self._db.execute(f"""select {sql_name}::varchar, count(*) as n from t where {sql_name} is not null
            group by 1 order by n desc, 1 limit {TOP}""").fetchall()
        return tuple((str(v), int(n)) for v, n in rows)

    def _of_numbers(self, blank: Profile, sql_name: str, format_number: Any, of: str, *, integral: bool) -> Profile:
        finite = f"from t where {sql_name} is not null and isfinite({sql_name}::double)"
        n, low, high, mean, p1, middle, p99 = (
            self._one(f"""select count(*), min({sql_name})::double, max({sql_name})::double,
            avg({sql_name}::double), quantile_cont({sql_name}::double, 0.01), quantile_cont({sql_name}::double, 0.5),
            quantile_cont({sql_name}::double, 0.99) {finite}""")
        )
        odd = self.rows - blank.nulls - n
        stats = [("NaN or infinite", f"{odd:,}")] if odd else []
        if not n:
            return replace(blank, stats=tuple(stats))
        figures = (("least", low), ("median", middle), ("mean", mean), ("most", high))
        stats = [
            (name, format_number(v))
            for name, v in figures
            if name != "mean" or (format_number in (_number_said, _count_said) and isfinite(v))
        ] + stats
        if not isfinite(high - low):  # no bin is as wide
            return replace(blank, stats=tuple(stats))
        scale = _Scale.of(low, high, p1, p99, integral)
        query = f"select least(greatest(floor(({sql_name}::double - ?) / ?), -1), ?)::int, count(*) {finite} group by 1"
        counts = dict(self._db.execute(query, [scale.low, scale.step, scale.bins]).fetchall())
        return replace(
            blank, stats=tuple(stats), bins=scale.drawn(counts, format_number), ends=scale.ends(format_number), of=of
        )

    def at(self, positions: Sequence[str]) -> dict[str, dict[str, str]]:
        """The values of the rows at these places that are in the sample."""
        wanted = [
            (self._partitions.index(p), int(o), f"{p}:{o}") for p, o in map(_split, positions) if p in self._partitions
        ]
        if not wanted or not self.columns:
            return {}
        self._db.execute("create temp table a (p int32, o int64, place varchar)")
        self._db.executemany("insert into a values (?, ?, ?)", wanted)
        columns = list(self.columns.values())
        chosen = ", ".join(f"t.{c.sql_name}" for c in columns)
        rows = self._db.execute(f"select a.place, {chosen} from a join t using (p, o)").fetchall()
        return {
            position: {c.name: _value_text(c, v) for c, v in zip(columns, row, strict=True)} for position, *row in rows
        }

    def _one(self, query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._db.execute(query).fetchone()
        return row or ()


def _split(position: str) -> tuple[str, str]:
    partition, _, offset = position.rpartition(":")
    return partition, offset if offset.isdecimal() else "0"


# -- columns


def _is_text(t: pa.DataType) -> bool:
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t))


def _is_bytes(t: pa.DataType) -> bool:
    return bool(pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t))


def _stored_columns(c: _SampleColumn, column: pa.Array) -> dict[str, pa.Array]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_text(c.type):
        return {c.sql_name: pc.utf8_slice_codeunits(column, 0, TEXT), f"l{c.sql_name}": pc.utf8_length(column)}
    if _is_bytes(c.type):
        return {c.sql_name: pc.if_else(pc.is_valid(column), True, None), f"l{c.sql_name}": pc.binary_length(column)}
    if pa.types.is_temporal(c.type):
        return {c.sql_name: pc.cast(column, pa.int32() if pa.types.is_date32(c.type) else pa.int64())}
    if pa.types.is_decimal(c.type):
        return {c.sql_name: pc.cast(column, pa.float64())}
    if pa.types.is_nested(c.type):
        return {c.sql_name: pc.if_else(pc.is_valid(column), True, None)}
    return {c.sql_name: column}


def _number_format(t: pa.DataType) -> Any:
    """How to write the column's numbers; None when it holds none."""
    if pa.types.is_timestamp(t):
        per_ms = _PER_MS[t.unit]
        return lambda v: show_instant(int(v / per_ms) // 1000 * 1000)
    if pa.types.is_date(t):
        days = pa.types.is_date32(t)
        return lambda v: show_instant(int(v) * (86_400_000 if days else 1))[:10]
    if pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t):
        return _number_said
    return None


def _number_said(v: float) -> str:
    if 1e5 <= abs(v) < 1e15:
        return f"{v:,.0f}" if v == int(v) else f"{v:,.1f}"
    return f"{v:,.0f}" if abs(v) < 1e5 and v == int(v) else show_float(v, 4)


def _count_said(v: float) -> str:
    return f"{v:,.0f}" if v == int(v) else f"{v:,.1f}"


def _value_text(c: _SampleColumn, v: Any) -> str:
    if v is None:
        return "null"
    if (
        (format_number := _number_format(c.type)) is not None
        and isinstance(v, int | float)
        and v == v
        and abs(v) != float("inf")
    ):
        exact = show_float(v) if isinstance(v, float) else f"{v:,}"
        return exact if format_number is _number_said else str(format_number(v))
    return "…" if isinstance(v, bool) and not pa.types.is_boolean(c.type) else str(v)


# -- histograms


@dataclass(frozen=True, slots=True)
class _Scale:
    """Bins of one width from `low` on; what lies beyond is counted at the edges."""

    low: float
    step: float
    bins: int
    maximum: float

    @classmethod
    def of(cls, low: float, high: float, p1: float, p99: float, integral: bool) -> _Scale:
        """Returns a scale from minimum to maximum, or from the 1st to the 99th percentile if there are outliers."""
        start, end = (p1, p99) if p99 > p1 and high - low > 3 * (p99 - p1) else (low, high)
        if integral and end - start < BINS:
            start = float(int(start))
            return cls(start, 1, int(end - start) + 1, high)
        step = (end - start) / BINS or 1.0
        if integral:
            step = float(-(-(end - start + 1) // BINS))
        bins = (int((end - start) // step) + 1 if integral else BINS) if end > start else 1
        return cls(start, step * (1 + 1e-12), bins, high)

    @property
    def end(self) -> float:
        return self.low + self.step * self.bins

    def drawn(self, counts: Mapping[int, int], format_number: Any) -> tuple[Bin, ...]:
        inner = tuple(Bin(self._label(i, format_number), counts.get(i, 0)) for i in range(self.bins))
        below = (Bin(f"below {format_number(self.low)}", counts[-1], edge=True),) if counts.get(-1) else ()
        above = (
            (Bin(f"above {format_number(self.end)}", counts[self.bins], edge=True),) if counts.get(self.bins) else ()
        )
        return below + inner + above

    def _label(self, i: int, format_number: Any) -> str:
        start = self.low + i * self.step
        end = min(start + self.step, self.maximum)
        return (
            str(format_number(start))
            if self.step == 1 and format_number in (_number_said, _count_said)
            else f"{format_number(start)} to {format_number(end)}"
        )

    def ends(self, format_number: Any) -> tuple[str, str]:
        last = self.low + self.step * (self.bins - 1) if self.step == 1 else min(self.end, self.maximum)
        return format_number(self.low), format_number(last)
