"""What plain Python loops have in common: lots of consumed records, as lists by column, into one Parquet file.

With a schema, values are read by orjson (Avro by fastavro) and typed by Arrow: texts to timestamps, numbers to exact
decimals, objects and arrays in their own types. A value that does not fit ends the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.formats import FORMATS
from bench.stand import PeerTask
from bench.types import fields
from sluice.pipelines.records.rows.row_format import HEADERS
from sluice.pipelines.schema.schema import arrow_type

ROWS = 100_000
"""Rows of a row group, gathered before a write."""
_KEY_AND_VALUE = pa.schema([("key", pa.binary()), ("value", pa.binary())])
_COORDINATES = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)
Lot = Mapping[str, list[Any]]
"""Records by column, as `_KEY_AND_VALUE` and `_COORDINATES` name them."""


def write(lots: Iterable[Lot], task: PeerTask, out: Path) -> None:
    """Write the lots, a row group each, below the new folder `out`."""
    out.mkdir(parents=True)
    table, schema = _maker(task.schema, task.format)
    with pq.ParquetWriter(out / "all.parquet", schema, compression="zstd", compression_level=1) as writer:
        for lot in lots:
            writer.write_table(table(lot))


def _maker(schema: Mapping[str, str], format_: str = "") -> tuple[Callable[[Lot], pa.Table], pa.Schema]:
    """Returns a function from a lot to a table, and the table's schema."""
    if not schema:
        raw = pa.schema([*_KEY_AND_VALUE, *_COORDINATES])
        return lambda lot: pa.table(dict(lot), schema=raw), raw
    row = pa.struct([(f.name, arrow_type(f.type)) for f in fields(schema)])
    read, loads = _as_read(row), _loads(format_)
    if format_ and FORMATS[format_].typed:
        read = row
    kafka = [_KEY_AND_VALUE.field("key"), *_COORDINATES]
    typed = pa.schema([*row, *(f.with_name(f"kafka_{f.name}") for f in kafka)])

    def table(lot: Lot) -> pa.Table:
        rows = pa.array([loads(value) for value in lot["value"]], read).cast(row)
        return pa.table([*rows.flatten(), *(pa.array(lot[f.name], f.type) for f in kafka)], schema=typed)

    return table, typed


def _loads(format_: str) -> Callable[[bytes], Any]:
    """Returns the function that reads a value."""
    if format_:
        return FORMATS[format_].reading()
    from orjson import loads

    read: Callable[[bytes], Any] = loads
    return read


def _as_read(kind: pa.DataType) -> pa.DataType:
    """Returns the type as orjson reads it: texts for times, and floats for decimals, which Arrow then rounds."""
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _as_read(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _as_read(kind.value_type)))
    if pa.types.is_timestamp(kind):
        return pa.string()
    return pa.float64() if pa.types.is_decimal(kind) else kind
