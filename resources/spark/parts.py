"""Reads parts in Spark's tasks, by Arrow, with bounded memory for parts of any size.

For files that Spark's own Parquet reader cannot read, and for `spark.read.format("sluice")`. All columns are nullable,
unsigned integers widen, and times are in microseconds; a time outside Spark's range (years −290308 to 294247) is null.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.pipelines.lake import parquet
from sluice.pipelines.lake.parquet import Bounds, in_milliseconds, read_bounds
from sluice.pipelines.ports import Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from sluice.pipelines.publishing.published_files import File

TASK_BYTES = 64 << 20
"""Bytes of Parquet in one Spark task: small files are read together, large ones by row group."""
BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one task: paths in the lake, each with the row groups to read of it (all, when None)."""

    parts: tuple[tuple[str, tuple[int, ...] | None], ...]


def shares(lake: Lake, files: Sequence[File]) -> list[Share]:
    """Return the files in order, each once, in shares of about `TASK_BYTES`."""
    from sluice.pipelines.publishing.published_files import order_files  # late: workers have no need of it

    out: list[Share] = []
    group: list[tuple[str, tuple[int, ...] | None]] = []
    total = 0
    sizes: dict[str, int] = {}
    for f in order_files(files):
        sizes[f.path] = 0
    for f in files:
        sizes[f.path] += f.bytes
    for path, size in sizes.items():
        large = size > TASK_BYTES
        if group and (large or total + size > TASK_BYTES):
            out.append(Share(tuple(group)))
            group, total = [], 0
        if large:
            out += [Share(((path, groups),)) for groups in _row_groups(lake, path)]
        else:
            group, total = [*group, (path, None)], total + size
    return [*out, Share(tuple(group))] if group else out


def _row_groups(lake: Lake, path: str) -> Iterator[tuple[int, ...]]:
    """Yield the row groups of a large file, in runs of about a task's size."""
    with parquet.open_parquet(lake, path) as file:
        metadata = file.metadata
    run: tuple[int, ...] = ()
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        if run and total + size > TASK_BYTES:
            yield run
            run, total = (), 0
        run, total = (*run, number), total + size
    yield run


def rows(lake: Lake, share: Share, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the share's rows, in Spark's types."""
    target = arrow_schema(schema)
    for path, groups in share.parts:
        for batch in parquet.read_batches(lake, path, BATCH_ROWS, groups=groups):
            yield conform(batch, target)


@dataclass(frozen=True, slots=True)
class ReadShares:
    """Yields the rows for positions in `shares`. Spark calls it in a Python worker (`mapInArrow`)."""

    lake: Lake
    shares: tuple[Share, ...]
    schema: StructType

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from rows(self.lake, self.shares[number], self.schema)


_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_US_IN = {"s": 1_000_000, "ms": 1000}
_MOST = (1 << 63) - 1


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the schema of a DataFrame over files of that schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(pa.schema([pa.field(f.name, _type(f.type)) for f in schema]))


def spark_reads(footer: pq.FileMetaData) -> bool:
    """Return whether Spark's own Parquet reader reads the file.

    It fails on times out of its range, and on nanoseconds.
    """
    schema = footer.schema.to_arrow_schema()
    if any("timestamp[ns" in str(f.type) for f in schema):
        return False
    bounds = read_bounds(footer)
    return all(name in bounds and _in_range(bounds[name]) for name in in_milliseconds(schema))


def _in_range(times: Bounds) -> bool:
    limit = _MOST // _US_IN["ms"]
    return times.low is None or times.high is None or (-limit <= times.low and times.high <= limit)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark takes rows of `schema` from Python."""
    from pyspark.sql.pandas.types import to_arrow_schema

    convert: Any = to_arrow_schema
    # PySpark 3.5 to 4.1 have no `timezone`; their times are in UTC.
    has_timezone = "timezone" in inspect.signature(convert).parameters
    arrow: pa.Schema = convert(schema, timezone="UTC") if has_timezone else convert(schema)
    return arrow


def collect(frame: DataFrame) -> pa.Table:
    """Return all rows of the frame, in the memory of Spark's driver."""
    if is_spark_4():
        return frame.toArrow()
    # PySpark 3.5: without a schema, a result without rows would have no columns.
    rows: Any = frame
    return pa.Table.from_batches(rows._collect_as_arrow(), arrow_schema(frame.schema))


def is_spark_4() -> bool:
    """Return whether this is PySpark 4.0 or newer. 3.5 has no Arrow tables, and its Connect client no sessions."""
    from pyspark import __version__

    return int(__version__.partition(".")[0]) >= 4


def _type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_map(kind):
        return pa.map_(_type(kind.key_type), _type(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _type(f.type)) for f in kind])
    return _WIDER.get(kind, kind)


def conform(rows: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Return the rows in exactly the target's columns and types; missing columns are null."""
    columns = [_column(rows, field) for field in target]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _column(rows: pa.RecordBatch, field: pa.Field) -> pa.Array:
    at = rows.schema.get_field_index(field.name)
    if at < 0:
        return pa.nulls(rows.num_rows, field.type)
    column = _within_spark(rows.column(at))
    return column if column.type.equals(field.type) else column.cast(field.type, safe=False)


def _within_spark(column: pa.Array) -> pa.Array:
    """Return the column with null, at any depth, for times that overflow in microseconds."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        limit = _MOST // _US_IN.get(kind.unit, 1)
        numbers = column.cast(pa.int64())
        sound = pc.and_(pc.less_equal(numbers, limit), pc.greater_equal(numbers, -limit))
        return pc.if_else(sound, column, pa.scalar(None, kind))
    if not pa.types.is_nested(kind) or not any(f"timestamp[{unit}" in str(kind) for unit in _US_IN):
        return column
    if pa.types.is_struct(kind):
        fields = [f.with_nullable(True) for f in kind]
        members = [_within_spark(column.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(members, fields=fields, mask=column.is_null())
    if pa.types.is_map(kind):
        fields = [kind.key_field, kind.item_field.with_nullable(True)]
        values: pa.Array = pa.StructArray.from_arrays([column.keys, _within_spark(column.items)], fields=fields)
        kind = pa.map_(*fields)
    elif not pa.types.is_list(kind):
        return column
    else:
        values = _within_spark(column.values)
        kind = pa.list_(kind.value_field.with_type(values.type).with_nullable(True))
    return pa.Array.from_buffers(kind, len(column), column.buffers()[:2], offset=column.offset, children=[values])
