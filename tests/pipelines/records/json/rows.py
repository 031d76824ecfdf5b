"""Converts chunks like the decoder's with the format, and rows back to plain values without loss."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Drift
from sluice.pipelines.records.json.format import JsonFormat
from sluice.pipelines.records.kafka_batches.decode import SCHEMA
from sluice.pipelines.records.rows.row_format import Format
from sluice.pipelines.schema.schema import Schema
from tests.pipelines.records.json.oracle import Number, Pairs

FIRST = 1000
"""The offset of the first record."""


def make_chunk(values: Sequence[bytes | None]) -> pa.RecordBatch:
    """Return records with these values, at consecutive offsets."""
    n = len(values)
    offsets = np.arange(FIRST, FIRST + n)
    columns = [
        pa.array([b"k%d" % i for i in range(n)], pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(offsets, pa.int64()),
        pa.array(offsets * 10, pa.int64()).cast(SCHEMA.field("timestamp").type),
        pa.array(np.zeros(n), pa.int32()),
        pa.array([None if i % 3 else [{"key": "a", "value": b"1"}] for i in range(n)], SCHEMA.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def count_drift(schema: Schema, values: Sequence[bytes | None]) -> dict[tuple[str, str], int]:
    """Count the records of one chunk whose fields differ from the schema, by kind and path."""
    pieces = JsonFormat(schema).convert(OffsetRange("orders", 3, "id", FIRST, FIRST + len(values)), make_chunk(values))
    counts: Counter[tuple[str, str]] = Counter()
    for d in (d for p in pieces for d in p.drift):
        counts[d.kind, d.field] += d.records
    return dict(counts)


def with_headers(records: pa.RecordBatch, headers: Sequence[Sequence[tuple[str, bytes]]]) -> pa.RecordBatch:
    """Return the records with these headers."""
    index = records.schema.get_field_index("headers")
    rows = [[{"key": k, "value": v} for k, v in h] for h in headers]
    return records.set_column(index, SCHEMA.field("headers"), pa.array(rows, SCHEMA.field("headers").type))


def convert_chunk(form: Format, records: pa.RecordBatch) -> tuple[pa.Table, pa.Table | None, list[Drift]]:
    """Return the landed rows, the quarantined rows and the drift of one chunk. Each record is in one of the two."""
    pieces = list(form.convert(OffsetRange("orders", 3, "id", FIRST, FIRST + len(records)), records))
    refused = [p.quarantined for p in pieces if p.quarantined is not None]
    for batch in (*(p.landed for p in pieces), *refused):
        batch.validate(full=True)
    assert sum(p.total for p in pieces) == len(records)
    landed = pa.Table.from_batches([p.landed for p in pieces], form.schema)
    return landed, pa.Table.from_batches(refused) if refused else None, [d for p in pieces for d in p.drift]


def convert(
    schema: Schema, values: Sequence[bytes | None], closed: Collection[str] | None = ()
) -> tuple[pa.Table, pa.Table | None]:
    """Return the landed and the quarantined rows of one chunk. Each record is in one of the two."""
    landed, quarantined, _ = convert_chunk(JsonFormat(schema, closed=closed), make_chunk(values))
    offsets = landed["kafka_offset"].to_pylist() + (quarantined["offset"].to_pylist() if quarantined else [])
    assert sorted(offsets) == list(range(FIRST, FIRST + len(values)))
    return landed, quarantined


def by_offset(table: pa.Table | None, column: str) -> dict[int, dict[str, Any]]:
    """Return rows by their offset."""
    if table is None:
        return {}
    columns = {name: to_python(table[name].combine_chunks()) for name in table.column_names}
    return {o: {k: v[i] for k, v in columns.items()} for i, o in enumerate(columns[column])}


def to_python(array: pa.Array) -> list[Any]:
    """Return values as Python objects: times as integers in their unit, maps as lists of pairs."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return to_python(array.dictionary_decode())
    if pa.types.is_timestamp(kind):
        return array.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_date(kind):
        return array.cast(pa.int32()).to_pylist()  # type: ignore[no-any-return]
    valid = array.is_valid().to_pylist()
    if pa.types.is_struct(kind):
        children = [to_python(array.field(i)) for i in range(kind.num_fields)]
        names = [kind.field(i).name for i in range(kind.num_fields)]
        return [
            dict(zip(names, row, strict=True)) if ok else None
            for ok, row in zip(valid, zip(*children, strict=True), strict=True)
        ]
    if pa.types.is_map(kind):
        pairs = list(zip(to_python(array.keys), to_python(array.items), strict=True))
        return _cut(array, pairs, valid)
    if pa.types.is_list(kind):
        return _cut(array, to_python(array.values), valid)
    return array.to_pylist()  # type: ignore[no-any-return]


def _cut(array: pa.Array, elements: list[Any], valid: list[bool]) -> list[Any]:
    ends = array.offsets.to_pylist()
    return [elements[a:b] if ok else None for a, b, ok in zip(ends, ends[1:], valid, strict=False)]


def parse_json(text: str | None) -> Any:
    """Parse JSON that landed as text, like the oracle."""
    if text is None:
        return None
    return json.loads(text, parse_int=Number, parse_float=Number, object_pairs_hook=Pairs)
