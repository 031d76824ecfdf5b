"""JSON Schemas from registries and files: made into columns and expectations, or refused with a place."""

from __future__ import annotations

import json

from sluice.pipelines.contract.catalogue import text
from sluice.pipelines.records.json.schema_document import bundle_texts
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import SchemaError
from sluice.resources.local.registered_events import JSON_SCHEMA
from tests.fuzz.target import Target

_NESTED = {
    "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}},
    "allOf": [{"properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/line"}]}}}],
    "properties": {
        "b": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "c": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
        "d": {"oneOf": [{"const": 1}, {"const": 2.5}], "multipleOf": 0.5},
        "e": {"type": "number", "multipleOf": 0.01, "minimum": 0, "exclusiveMaximum": True, "maximum": 9},
    },
    "required": ["b"],
}


def _read_schema(data: bytes) -> str:
    try:
        document = data.decode()
        reader = JsonSchemaReader((bundle_texts([document], ()),), WireFormat.BARE)
        assert all(text(e) for e in reader.expectations)
        assert reader.fingerprint
    except (UnicodeDecodeError, UnusableSchema, SchemaError) as error:
        return type(error).__name__
    return "read"


JSON_SCHEMAS = Target("json-schemas", lambda: [json.dumps(s).encode() for s in (JSON_SCHEMA, _NESTED)], _read_schema)
