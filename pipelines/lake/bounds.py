"""The bounds of integers and times in a Parquet file.

Parquet's statistics have the bounds of all columns except times in milliseconds: Iceberg's Java reads these statistics
as microseconds, and would find no row by time. Their bounds are in the file's own metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

KEY = "sluice.times"
_STORED = {"INT32", "INT64"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and the largest value of a column as stored (None: all values are null), and its number of nulls.

    Times are in the unit of `kind`, dates in days, and decimals without their point.
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
        for name, (low, high, nulls) in self._sums.items():
            column = rows.column(name)
            ends = pc.min_max(column.cast(pa.int64()))
            first, last = ends["min"].as_py(), ends["max"].as_py()
            more = nulls + column.null_count
            self._sums[name] = _find_minimum(low, first), _find_maximum(high, last), more

    def metadata(self) -> dict[str, str]:
        """Returns the entry of the file's own metadata; empty if the file has no such column."""
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
    return any(
        c.path_in_schema in times and c.statistics is not None and c.statistics.has_min_max
        for c in _iterate_chunks(footer)
    )


def _iterate_chunks(footer: pq.FileMetaData) -> Iterator[pq.ColumnChunkMetaData]:
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    return (group.column(i) for group in groups for i in range(group.num_columns))


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


def _find_minimum(*values: int | None) -> int | None:
    return min(_drop_nulls(values), default=None)


def _find_maximum(*values: int | None) -> int | None:
    return max(_drop_nulls(values), default=None)


def _drop_nulls(values: Iterable[int | None]) -> Iterator[int]:
    return (v for v in values if v is not None)
