"""Chooses how each column of a part is written: its Parquet encoding, from its type and first rows.

Promise: the choice follows from the schema, the settings and the rows alone, so that equal rows give equal bytes.
Spark, DuckDB and Arrow read every choice. The limits below were found by measuring.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake.bounds import in_milliseconds

PAGE_BYTES = 1 << 17
"""Bytes of values in a page, before compression. zstd is faster on pages this short."""
SAMPLE_ROWS = 4096
"""The number of rows that decide a column's encoding. With fewer than a quarter of them, a text column stays plain."""
REPEATS = 0.75
"""Up to this share of distinct values in the sample, a dictionary saves time and room. A sample of 5,000 customers,
drawn evenly, has a share of 0.68, and takes half the time."""
DICTIONARY_BYTES = 256 << 10
"""The most bytes of distinct values in a sample. With more, a row group's would exceed Parquet's 1 MiB dictionary."""
SAMPLE_BYTES = 1 << 20
"""The maximum bytes of a sample. Longer values are ignored."""
NEIGHBOURS = 64
SHARED = 0.25
"""The least share of bytes that texts have in common with the one before, for writing only what differs."""


def choose_options(rows: pa.Table, settings: LandingSettings) -> dict[str, Any]:
    """The options of `pyarrow.parquet.ParquetWriter` for a file that begins with these rows (at least one).

    Numbers and times get statistics, except times in milliseconds (`lake/bounds.py`). They are written as deltas, or
    plain if they stay the same, as a partition does. Texts and bytes are written by dictionary if they repeat, as
    differences from the value before if these are small, and plain otherwise.
    """
    schema, row_bytes = rows.schema, rows.nbytes // rows.num_rows
    unbounded = in_milliseconds(schema)
    numbers = [f.name for f in schema if _is_number(f.type)]
    repeating = [f.name for f in schema if _is_repetitive(rows.column(f.name))]
    deltas = {name: "DELTA_BINARY_PACKED" for name in numbers if _has_changes(rows.column(name))}
    texts = [f.name for f in schema if _is_text(f.type) and f.name not in repeating]
    fronts = {name: "DELTA_BYTE_ARRAY" for name in texts if _shares_beginnings(rows.column(name))}
    return {
        "compression": settings.compression.value,
        "compression_level": settings.compression_level,
        "use_dictionary": repeating,
        "column_encoding": deltas | fronts,
        "write_statistics": [name for name in numbers if name not in unbounded],
        # A page's size is checked once per batch of rows: with large rows it would take the complete row group.
        "write_batch_size": min(max(PAGE_BYTES // max(row_bytes, 1), 1), 4096),
        "data_page_size": PAGE_BYTES,
        # As Spark writes them: a third of the time of fixed-length bytes.
        "store_decimal_as_integer": True,
        # The Arrow schema would bring the dictionary type back for some readers and not for others.
        "store_schema": False,
    }


def _is_repetitive(column: pa.ChunkedArray) -> bool:
    """Returns whether a dictionary pays, by the column's type or its first rows."""
    if not _is_text(column.type):
        return bool(pa.types.is_dictionary(column.type))
    sample = column.slice(0, SAMPLE_ROWS)
    if len(sample) < SAMPLE_ROWS // 4 or sample.nbytes > SAMPLE_BYTES:
        return False
    different = len(sample.unique())
    return different <= REPEATS * len(sample) and different * sample.nbytes <= DICTIONARY_BYTES * len(sample)


def _shares_beginnings(column: pa.ChunkedArray) -> bool:
    """Returns whether texts share their beginnings with the ones before, as numbered names do."""
    sample = column.slice(0, NEIGHBOURS)
    if len(sample) < NEIGHBOURS or sample.nbytes > SAMPLE_BYTES:
        return False
    texts = [bytes(text) for text in sample.cast(pa.binary()).to_pylist() if text]
    shared = sum(_measure_common_prefix(a, b) for a, b in pairwise(texts))
    return shared > SHARED * sum(map(len, texts))


def _measure_common_prefix(a: bytes, b: bytes) -> int:
    """Returns the length in bytes of the common prefix."""
    n = min(len(a), len(b))
    differ = int.from_bytes(a[:n]) ^ int.from_bytes(b[:n])
    return n - (differ.bit_length() + 7) // 8


def _has_changes(column: pa.ChunkedArray) -> bool:
    ends = pc.min_max(column.slice(0, SAMPLE_ROWS))
    return bool(ends["min"] != ends["max"])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _is_number(kind: pa.DataType) -> bool:
    """Returns whether Parquet stores the type as an integer of 32 or 64 bits."""
    of_time = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    return bool(of_time or pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.precision <= 18))
