"""Converts JSON records with the format of a JSON Schema and its contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import Shape
from tests.pipelines.records.json.rows import convert_chunk, make_chunk, with_headers

Headers = Sequence[list[tuple[str, bytes]]]


def make_reader(schema: Any, wire: WireFormat = WireFormat.BARE) -> JsonSchemaReader:
    return JsonSchemaReader((json.dumps(schema),), wire)


def convert(
    reader: JsonSchemaReader, values: Sequence[bytes | None], headers: Headers | None = None
) -> tuple[pa.Table, pa.Table | None]:
    """Return the landed and the quarantined rows of one chunk, under the contract made from the schema.

    Each record is in one of the two.
    """
    contract = Contract(reader.expectations) if reader.expectations else None
    form = Shape(reader.columns, contract, reader=reader).format()
    records = make_chunk(values) if headers is None else with_headers(make_chunk(values), headers)
    landed, quarantined, _ = convert_chunk(form, records)
    return landed, quarantined
