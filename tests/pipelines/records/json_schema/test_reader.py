"""Schemas that make columns and expectations, and refused schemas, each with the place of the keyword."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.pipelines.contract.catalogue import text
from sluice.pipelines.records.json.schema_document import bundle_texts
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import SchemaError
from sluice.resources.local.registered_events import SAMPLES
from tests.pipelines.records.json_schema.rows import make_reader

TREE = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}


def make_object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields}


def test_sample_schema_gives_columns_and_expectations() -> None:
    reader = JsonSchemaReader((SAMPLES["json_schema"].schema,), WireFormat.CONFLUENT)
    assert reader.columns.texts() == {
        "order_id": "string not null",
        "customer": "string not null",
        "ts": "timestamp(us) not null",
        "amount": "decimal(38,2) not null",
        "currency": "string not null",
        "items": "int64 not null",
        "country": "string not null",
        "channel": "string",
        "status": "string not null",
    }
    assert [text(e) for e in reader.expectations][:4] == [
        "order_id matches ^o-[0-9]{10}-[0-9a-f]{6}$",
        "the length of customer is at most 20",
        "amount is at least 0",
        'currency is one of "CHF", "EUR", "GBP", "SEK", "USD"',
    ]


def test_fingerprint_ignores_keywords_without_effect_on_rows() -> None:
    plain = make_object(a={"type": "string"})
    noted = make_object(a={"type": "string", "title": "A", "default": "x", "maxLength": 9}) | {
        "$id": "https://example.com/a"
    }
    assert make_reader(plain).fingerprint == make_reader(noted).fingerprint
    assert make_reader(plain).fingerprint != make_reader(plain, WireFormat.CONFLUENT).fingerprint


def test_schemas_of_other_generators_are_read() -> None:
    """Schemas in the style of pydantic and Java's generators: references, unions with null, compositions."""
    line = {"title": "Line", "type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}
    schema = {
        "$defs": {"Line": line, "Base": make_object(id={"type": "string"}) | {"required": ["id"]}},
        "allOf": [{"$ref": "#/$defs/Base"}],
        "type": "object",
        "properties": {
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Note"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
            "first": {"oneOf": [{"type": "null", "title": "Not included"}, {"$ref": "#/$defs/Line"}]},
            "state": {"oneOf": [{"const": "open", "title": "Open"}, {"const": "paid"}]},
        },
        "required": ["note", "lines"],
    }
    reader = make_reader(schema)
    assert reader.columns.texts() == {
        "note": "string",
        "lines": "list<struct<sku:string not null> not null> not null",
        "first": "struct<sku:string not null>",
        "state": "string",
        "id": "string not null",
    }
    assert [(e.type, e.kwargs["value_set"]) for e in reader.expectations] == [
        ("expect_column_values_to_be_in_set", ["open", "paid"])
    ]


def test_composed_definition_may_also_be_a_field() -> None:
    schema = {"$defs": {"person": make_object(name={"type": "string"})}, "allOf": [{"$ref": "#/$defs/person"}]}
    reader = make_reader(schema | make_object(boss={"$ref": "#/$defs/person"}))
    assert reader.columns.texts() == {"boss": "struct<name:string>", "name": "string"}


def test_schema_and_its_references_are_bundled_into_one_text() -> None:
    line = {"$id": "https://example.com/line.json", "definitions": {"sku": {"type": "string"}}} | make_object(
        sku={"$ref": "#/definitions/sku"}
    )
    order = make_object(line={"$ref": "https://example.com/line.json"}, other={"$ref": "line.json"})
    bundle = bundle_texts([json.dumps(line), json.dumps(order)], ["https://example.com/line.json"])
    reader = JsonSchemaReader((bundle,), WireFormat.CONFLUENT)
    assert reader.columns.texts() == {"line": "struct<sku:string>", "other": "struct<sku:string>"}


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        (make_object(a={"type": ["string", "integer"]}), "#/properties/a/type", "several kinds"),
        (make_object(a={"oneOf": [{"type": "string"}, {"type": "integer"}]}), "#/properties/a/oneOf", "several kinds"),
        (make_object(a={"type": "array", "items": {"type": "integer", "minimum": 1}}),
         "#/properties/a/items/minimum", "inside"),
        (make_object(a={"type": "array", "minItems": 1}), "#/properties/a/minItems", "no counterpart"),
        (make_object(a={"type": "number", "multipleOf": 5}), "#/properties/a/multipleOf", "power of ten"),
        (make_object(a={"minLength": 5}), "#/properties/a/minLength", "needs a type"),
        (make_object(a={"type": "string", "pattern": "(?=a)"}), "#/properties/a/pattern", "contract"),
        (make_object(a={"type": "string", "enum": ["a", 1]}), "#/properties/a/enum", "contract"),
        (make_object(a={"enum": [{"b": 1}]}), "#/properties/a/enum", "object or a list"),
        (make_object(a={"enum": ["a", 1]}), "#/properties/a/enum", "several kinds"),
        (make_object(a={"const": "a", "enum": ["a", "b"]}), "#/properties/a/const", "leave one"),
        (make_object(a={"type": "array", "enum": [[1], [2]]}), "#/properties/a/enum", "whole values of an array"),
        (make_object(a={"type": "object", "const": {"b": 1}}), "#/properties/a/const", "whole values of an object"),
        (make_object(a={"oneOf": [{"const": 1}, {"const": 1}]}), "#/properties/a/oneOf", "allows no value"),
        (make_object(a={"oneOf": [{"type": "null"}, {"type": "null"}]}), "#/properties/a", "allows no value"),
        (make_object(a={"type": "string", "format": "date", "minLength": 3}), "#/properties/a/minLength", "contract"),
        (make_object(a={"$ref": "#/$defs/b"}), "#/properties/a/$ref", "not there"),
        (make_object(a={"$ref": "https://example.com/other.json"}), "#/properties/a/$ref", "not in this file"),
        (make_object(a=False), "#/properties/a", "allows no value"),
        (make_object(a={"type": "strin"}), "#/properties/a/type", "no type"),
        (TREE | {"$defs": {"tree": TREE}}, "#/$defs/tree/properties/left/$ref", "recursive"),
        (make_object(a={"type": "object", "properties": {"b": {"type": "string", "maxLength": 2}}}),
         "#/properties/a/properties/b/maxLength", "inside"),
        (make_object(a={"type": "string"}) | {"required": ["b"]}, "#/required", "none of the properties"),
        (make_object(a={"type": "string"}) | {"additionalProperties": {"type": "string"}},
         "#/additionalProperties", "_extra"),
        ({"type": "array"}, "#", "no object"),
        (make_object(**{"a/b": {"not": {}}}), "#/properties/a~1b/not", "no counterpart"),
    ],
)  # fmt: skip
def test_unsupported_schema_is_refused_with_location(schema: Any, pointer: str, message: str) -> None:
    with pytest.raises(UnusableSchema) as error:
        make_reader(schema)
    assert (error.value.place, message in error.value.what) == (pointer, True)


def test_all_problems_of_a_schema_are_reported_at_once() -> None:
    item = {"type": "object", "properties": {"qty": {"type": "integer", "minimum": 1, "maximum": 9}, "n": {"not": {}}}}
    schema = make_object(
        id={"type": "integer", "minimum": 1},
        items={"type": "array", "items": item, "minItems": 1, "uniqueItems": True},
        more={"type": "array", "items": {"$ref": "#/properties/items/items"}},
        **{"a rather long name of a property that has another one inside": {"type": "object", "properties": {
            "and one more that is long": {"type": "string", "maxLength": 3}}}},
        odd={"type": ["string", "integer"]},
        text={"type": "string", "pattern": "(?=a)"},
    )  # fmt: skip
    with pytest.raises(UnusableSchema) as caught:
        make_reader(schema | {"minProperties": 1})
    inside = "limits a field inside another, and a contract is about columns"
    long = (
        "#/properties/a rather long name of a property that has another one inside/properties/and one more that is long"
    )
    assert [line.strip() for line in caught.value.text.splitlines()[1:]] == [
        "#/minProperties: has no counterpart in columns or a contract",
        "#/properties/items/minItems: has no counterpart in columns or a contract",
        "#/properties/items/uniqueItems: has no counterpart in columns or a contract",
        f"#/properties/items/items/properties/qty/minimum: {inside}",
        f"#/properties/items/items/properties/qty/maximum: {inside}",
        "#/properties/items/items/properties/n/not: has no counterpart in columns or a contract",
        f"{long}/maxLength: {inside}",
        "#/properties/odd/type: allows values of several kinds; a column has one type",
        caught.value.text.splitlines()[-1].strip(),
    ]
    assert caught.value.problems[-1][0] == "#/properties/text/pattern"


@pytest.mark.parametrize("text_", ["{", "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "7"])
def test_invalid_schema_text_is_refused(text_: str) -> None:
    with pytest.raises(UnusableSchema):
        JsonSchemaReader((text_,), WireFormat.BARE)


def test_invalid_column_name_is_refused() -> None:
    with pytest.raises(SchemaError):
        make_reader(make_object(**{"a.b": {"type": "string"}}))


def test_a_schema_bomb_is_refused() -> None:
    """Forty definitions, each with two fields of the one before: 2^40 columns."""
    defs: dict[str, Any] = {"a0": {"type": "string"}}
    for i in range(1, 40):
        below = {"$ref": f"#/$defs/a{i - 1}"}
        defs[f"a{i}"] = {"type": "object", "properties": {"l": below, "r": below}}
    with pytest.raises(UnusableSchema, match="holds too much"):
        make_reader(make_object(a={"$ref": "#/$defs/a39"}) | {"$defs": defs})
