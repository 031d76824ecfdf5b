"""JSON Schemas work as docs/formats.md documents them, and agree with `jsonschema` on the same values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sluice.pipelines.records.json.schema_document import REFUSED
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from tests.pipelines.records.json.rows import FIRST, by_offset
from tests.pipelines.records.json_schema.rows import convert, make_reader

DOCS = (Path(__file__).parents[4] / "docs" / "formats.md").read_text().split("## JSON Schema")[1].split("\n## ")[0]
LANDS = re.findall(r"^\| `(.+?)` \| `(.+)` \| `(.+)` \|$", DOCS, re.MULTILINE)
BREAKS = re.findall(r"^\| `(.+?)` \| `(.+)` \| (\w+) \|$", DOCS, re.MULTILINE)


def make_schema(field: str) -> dict[str, Any]:
    old = '"exclusiveMaximum": true' in field
    draft = "http://json-schema.org/draft-04/schema#" if old else "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "type": "object", "properties": {"x": json.loads(field)}}


@pytest.mark.parametrize(("field", "value", "lands"), LANDS)
def test_documented_type_lands_as_documented(field: str, value: str, lands: str) -> None:
    schema, record = make_schema(field), f'{{"x": {value}}}'
    jsonschema.validate(json.loads(record), schema)
    reader = make_reader(schema)
    assert str(reader.columns.fields[0].type) == lands
    landed, quarantined = convert(reader, [record.encode()])
    assert quarantined is None
    assert (by_offset(landed, "kafka_offset")[FIRST]["x"] is None) == (value == "null")


@pytest.mark.parametrize(("field", "value", "reason"), BREAKS)
def test_record_that_breaks_a_documented_limit_is_refused(field: str, value: str, reason: str) -> None:
    schema, record = make_schema(field), f'{{"x": {value}}}'
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(record), schema)
    _, quarantined = convert(make_reader(schema), [record.encode()])
    assert quarantined is not None
    assert quarantined["reason"].to_pylist() == [reason]


def test_docs_have_the_tables_of_types_and_limits() -> None:
    assert (len(LANDS), len(BREAKS)) == (21, 10)


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_refused_keyword_is_reported_with_its_location(keyword: str) -> None:
    with pytest.raises(UnusableSchema) as error:
        make_reader({"type": "object", "properties": {"a": {"type": "object", keyword: {"b": 1}}}})
    assert error.value.place == f"#/properties/a/{keyword}"
