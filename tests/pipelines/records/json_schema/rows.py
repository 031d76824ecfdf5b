"""Converts JSON records with the format of a JSON Schema and its contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.kafka_batches.decode import SCHEMA
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import Shape
from tests.pipelines.records.json.rows import FIRST, make_chunk

Headers = Sequence[list[tuple[str, bytes]]]


def make_reader(schema: Any, wire: WireFormat = WireFormat.BARE) -> JsonSchemaReader:
    return JsonSchemaReader((json.dumps(schema),), wire)


def with_headers(records: pa.RecordBatch, headers: Headers) -> pa.RecordBatch:
    """Return the records with these headers."""
    index = records.schema.get_field_index("headers")
    rows = [[{"key": k, "value": v} for k, v in h] for h in headers]
    return records.set_column(index, SCHEMA.field("headers"), pa.array(rows, SCHEMA.field("headers").type))


def convert(
    reader: JsonSchemaReader, values: Sequence[bytes | None], headers: Headers | None = None
) -> tuple[pa.Table, pa.Table | None]:
    """Return the landed and the quarantined rows of one chunk, under the contract made from the schema.

    Each record is in one of the two.
    """
    contract = Contract(reader.expectations) if reader.expectations else None
    form = Shape(reader.columns, contract, reader=reader).format()
    records = make_chunk(values)
    if headers is not None:
        records = with_headers(records, headers)
    pieces = list(form.convert(OffsetRange("orders", 3, "id", FIRST, FIRST + len(values)), records))
    for piece in pieces:
        piece.landed.validate(full=True)
    assert sum(p.total for p in pieces) == len(values)
    refused = [p.quarantined for p in pieces if p.quarantined is not None]
    landed = pa.Table.from_batches([p.landed for p in pieces], form.schema)
    return landed, pa.Table.from_batches(refused) if refused else None
