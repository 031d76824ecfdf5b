"""Avro types land as docs/formats.md documents them, in records that fastavro writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.records.avro.programs import Pool, compile_program
from sluice.pipelines.records.avro.reader_schema import as_record
from sluice.pipelines.records.avro.schema import AvroKind, parse
from sluice.pipelines.records.columns.nodes import make_nodes
from tests.pipelines.records.avro.rows import Schemas, convert, encode, make_reader, strip_logical_types
from tests.pipelines.records.json.rows import FIRST, by_offset

DOCS = (Path(__file__).parents[4] / "docs" / "formats.md").read_text().split("## Avro")[1].split("\n## ")[0]
CASES = re.findall(r"^\| `(.+?)` \| `(.+)` \| `(.+)` \|$", DOCS, re.MULTILINE)


def from_json(schema: Any, value: Any) -> Any:
    """Convert a value from JSON for fastavro: bytes are text in JSON."""
    type_name = schema.get("type") if isinstance(schema, dict) else schema
    return value.encode("latin-1") if type_name in ("bytes", "fixed") else value


@pytest.mark.parametrize(("type_", "value", "lands"), CASES)
def test_documented_type_lands_as_documented(type_: str, value: str, lands: str) -> None:
    kind = json.loads(type_)
    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]}
    default = {"type": "record", "name": "R", "fields": [{"name": "x", "type": kind, "default": json.loads(value)}]}
    empty = {"type": "record", "name": "R", "fields": []}
    reader = make_reader(schema)
    assert reader.columns.fields[0].type == make_reader(default).columns.fields[0].type
    assert str(reader.columns.fields[0].type) == lands
    plain = encode(strip_logical_types(schema), {"x": from_json(kind, json.loads(value))})
    landed, quarantined, _ = convert(reader, [plain], Schemas({1: schema}))
    assert quarantined is None
    row = by_offset(landed, "kafka_offset")[FIRST]["x"]
    assert row is not None or kind == "null"
    # The same value as a default of a field that was not written.
    landed, quarantined, _ = convert(make_reader(default), [encode(empty, {}, 2)], Schemas({2: empty}))
    assert quarantined is None
    assert by_offset(landed, "kafka_offset")[FIRST]["x"] == row


def test_documented_table_has_every_type() -> None:
    kinds = {parse((type_,)).kind for type_, _, _ in CASES}
    assert kinds == set(AvroKind) - {AvroKind.AGAIN}  # no column has this kind


def test_program_of_every_type_compiles() -> None:
    for type_, _, _ in CASES:
        reader = make_reader({"type": "record", "name": "R", "fields": [{"name": "x", "type": json.loads(type_)}]})
        ops, unknown = compile_program(as_record(reader.type), reader.type, make_nodes(reader.columns), 0, Pool())
        assert (len(ops) > 0, unknown) == (True, {})
