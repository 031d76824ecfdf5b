"""Arrow types as Spark has them: the types of our Parquet files in a DataFrame.

Everything may be null, as in all that Spark reads; unsigned integers widen; times are in microseconds. A time outside
Spark's own range (the years −290308 to 294247) becomes null: Arrow and DuckDB show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.pipelines.lake.bounds import Bounds, bounds_of, in_milliseconds

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
    bounds = bounds_of(footer)
    return all(name in bounds and _in_range(bounds[name]) for name in in_milliseconds(schema))


def _in_range(times: Bounds) -> bool:
    limit = _MOST // _US_IN["ms"]
    return times.low is None or times.high is None or (-limit <= times.low and times.high <= limit)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark takes rows of `schema` from Python."""
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return arrow


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
    column = rows.column(at)
    if pa.types.is_timestamp(column.type):
        column = _within_spark(column)
    return column if column.type.equals(field.type) else column.cast(field.type, safe=False)


def _within_spark(times: pa.Array) -> pa.Array:
    """Return the times, with null for those that overflow in microseconds."""
    limit = _MOST // _US_IN.get(times.type.unit, 1)
    numbers = times.cast(pa.int64())
    sound = pc.and_(pc.less_equal(numbers, limit), pc.greater_equal(numbers, -limit))
    return pc.if_else(sound, times, pa.scalar(None, times.type))
