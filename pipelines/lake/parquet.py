"""Reads the lake's Parquet files, and bounds of their columns. Errors name the unreadable file and the remedy.

Guarantee: reading a damaged file (missing, empty, truncated, corrupted, not Parquet) raises only PartUnreadable, apart
from the lake's own errors (LakeUnavailable). The consumer's own errors pass through unchanged if the rows come from
`read_batches`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import PartUnreadable
from sluice.pipelines.lake import paths
from sluice.pipelines.model.receipts import Part
from sluice.pipelines.ports import Lake

DAMAGE = (OSError, pa.ArrowException, ValueError, LookupError, TypeError, MemoryError)
"""The errors that reading damaged bytes raises: pyarrow's own, and Python's, from changed names, types and sizes."""


@contextmanager
def open_parquet(lake: Lake, path: str) -> Iterator[pq.ParquetFile]:
    """Open the file and read its footer. Raises PartUnreadable, also for reads inside the block."""
    with wrap_read_errors(path), lake.open(path) as file:
        yield pq.ParquetFile(file, page_checksum_verification=True)


def read_batches(
    lake: Lake,
    path: str,
    rows: int,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    *,
    use_threads: bool = True,
) -> Iterator[pa.RecordBatch]:
    """A file's rows in batches of at most `rows`: these columns and row groups (None: all). Raises PartUnreadable."""
    with open_parquet(lake, path) as file:
        yield from read(file, path, rows, columns, groups, use_threads=use_threads)


def read_part(
    lake: Lake,
    part: Part,
    path: str,
    rows: int,
    columns: Sequence[str] | None = None,
    *,
    use_threads: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part as `read_batches` does, without those of other parts in a shared file."""
    with open_parquet(lake, path) as file:
        check_rows(file.metadata, path, part.shared.rows if part.shared else part.rows)
        groups, before = find_row_groups(file.metadata, part)
        yield from own_rows(read(file, path, rows, columns, groups, use_threads=use_threads), part, before)


def check_rows(footer: pq.FileMetaData, path: str, rows: int) -> None:
    """Raises PartUnreadable unless the file at `path` has this number of rows."""
    if footer.num_rows != rows:
        message = f"{path} has {footer.num_rows} rows, the ledger says {rows}"
        raise PartUnreadable(message, remedy=paths.find_remedy(path), path=path)


def find_row_groups(footer: pq.FileMetaData, part: Part) -> tuple[list[int] | None, int]:
    """Returns the row groups with rows of the part (None: all), and the number of rows before the first of them."""
    if part.shared is None:
        return None, 0
    groups, at, before = list[int](), 0, 0
    for number in range(footer.num_row_groups):
        after = at + footer.row_group(number).num_rows
        if at < part.shared.first + part.rows and part.shared.first < after:
            before = before if groups else at
            groups.append(number)
        at = after
    return groups, before


def own_rows(batches: Iterable[pa.RecordBatch], part: Part, before: int) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the part from the rows of a file that begin at its row `before`."""
    if part.shared is None:
        yield from batches
        return
    skipped, remaining = part.shared.first - before, part.rows
    for batch in batches:
        own = batch.slice(min(skipped, batch.num_rows), remaining)
        skipped, remaining = max(skipped - batch.num_rows, 0), remaining - own.num_rows
        if own.num_rows:
            yield own
        if not remaining:
            return


def read(
    file: pq.ParquetFile,
    path: str,
    rows: int,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    *,
    use_threads: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The same as `read_batches`, for a file that is open."""
    with wrap_read_errors(path):
        for name in columns or ():
            file.schema_arrow.field(name)  # pyarrow ignores missing columns
        yield from file.iter_batches(rows, groups, columns, use_threads=use_threads)


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Turn errors of reading the file at `path`, inside the block, into PartUnreadable."""
    try:
        yield
    except FileNotFoundError:
        raise PartUnreadable(f"{path} is missing", remedy=paths.find_remedy(path), path=path, gone=True) from None
    except DAMAGE as error:
        raise PartUnreadable(
            f"{path} cannot be read: {shorten_error(error)}", remedy=paths.find_remedy(path), path=path
        ) from None


def place(lake: Lake, part: Part) -> str:
    """Returns the current path of the part: staged while its batch is not visible yet."""
    staged = lake.size(part.path) is None and lake.size(part.staged) is not None
    return part.staged if staged else part.path


def shorten_error(error: BaseException) -> str:
    """Returns the error's text on one short line. It may have bytes of the file."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(message.split())[:200]
    return text if isinstance(error, OSError | pa.ArrowException) and text else f"{type(error).__name__}: {text}"


KEY = "sluice.times"
_STORED = {"INT32", "INT64"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and the largest value of a column as stored (None: all values are null), and its number of nulls.

    Times are in the unit of `kind`, dates in days, and decimals without their point. Parquet's statistics have the
    bounds of all columns except times in milliseconds: Iceberg's Java reads these statistics as microseconds, and would
    find no row by time. Their bounds are in the file's own metadata.
    """

    kind: pa.DataType
    low: int | None
    high: int | None
    nulls: int


def in_milliseconds(schema: pa.Schema) -> list[str]:
    """Returns the names of the columns that must have no statistics."""
    return [f.name for f in schema if pa.types.is_timestamp(f.type) and f.type.unit == "ms"]


class TimeBounds:
    """Collects the bounds of a file's times in milliseconds while the file is written."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sums: dict[str, tuple[int | None, int | None, int]] = dict.fromkeys(
            in_milliseconds(schema), (None, None, 0)
        )

    def add(self, rows: pa.Table) -> None:
        """Add the next rows of the file."""
        import pyarrow.compute as pc  # late: it takes 40 ms

        for name, (low, high, nulls) in self._sums.items():
            column = rows.column(name)
            ends = pc.min_max(column.cast(pa.int64()))
            first, last = ends["min"].as_py(), ends["max"].as_py()
            more = nulls + column.null_count
            low, high = min(_drop_nulls((low, first)), default=None), max(_drop_nulls((high, last)), default=None)
            self._sums[name] = low, high, more

    def metadata(self) -> dict[str, str]:
        """Returns the entry for the file's key-value metadata; empty if the file lacks the column."""
        return {KEY: json.dumps(self._sums, separators=(",", ":"))} if self._sums else {}


def read_bounds(footer: pq.FileMetaData) -> dict[str, Bounds]:
    """Returns the bounds in the file by column name. Nested values have none."""
    noted, out = _read_times(footer), dict[str, Bounds]()
    schema = footer.schema.to_arrow_schema()
    for at in range(footer.num_columns):
        name = footer.schema.column(at).path
        index = schema.get_field_index(name)
        if index < 0 or pa.types.is_nested(kind := schema.field(index).type):
            continue
        if bounds := Bounds(kind, *noted[name]) if name in noted else _of_statistics(footer, at, kind):
            out[name] = bounds
    return out


def is_misread_by_iceberg(footer: pq.FileMetaData) -> bool:
    """Returns whether Parquet's statistics have bounds of milliseconds, as in files that landed earlier."""
    times = set(in_milliseconds(footer.schema.to_arrow_schema()))
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    chunks = (group.column(i) for group in groups for i in range(group.num_columns))
    return any(c.path_in_schema in times and c.statistics is not None and c.statistics.has_min_max for c in chunks)


def _read_times(footer: pq.FileMetaData) -> Mapping[str, tuple[int | None, int | None, int]]:
    try:
        entry = json.loads((footer.metadata or {}).get(KEY.encode(), b"{}"))
        return {name: (low, high, int(nulls)) for name, (low, high, nulls) in entry.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):  # not written by us
        return {}


def _of_statistics(footer: pq.FileMetaData, at: int, kind: pa.DataType) -> Bounds | None:
    """Returns the bounds of one column from the statistics of all row groups; None if any of them has none."""
    chunks = [footer.row_group(g).column(at) for g in range(footer.num_row_groups)]
    statistics = [c.statistics for c in chunks]
    if any(s is None or s.physical_type not in _STORED or not s.has_null_count for s in statistics):
        return None
    full = [s for c, s in zip(chunks, statistics, strict=True) if s.null_count < c.num_values]
    if not all(s.has_min_max for s in full):
        return None
    lows, highs = (s.min for s in full), (s.max for s in full)
    if not pa.types.is_integer(kind):  # beyond Python's range of times
        lows, highs = (s.min_raw for s in full), (s.max_raw for s in full)
    return Bounds(kind, min(lows, default=None), max(highs, default=None), sum(s.null_count for s in statistics))


def _drop_nulls(values: Iterable[int | None]) -> Iterator[int]:
    return (v for v in values if v is not None)
