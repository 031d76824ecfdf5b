"""Avro schemas from registries and files: parsed and compiled into columns and a program, or refused with a message."""

from __future__ import annotations

import json

from sluice.pipelines.records.avro.programs import IncompatibleSchema, Pool, compile_program
from sluice.pipelines.records.avro.reader_schema import AvroReader, as_record
from sluice.pipelines.records.avro.schema import AvroSchemaError, canonicalize, parse
from sluice.pipelines.records.columns.nodes import make_nodes
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import SchemaError
from tests.fuzz.target import Target
from tests.fuzz.targets.avro import NEWER, SCHEMAS


def _read_schema(data: bytes) -> str:
    try:
        text = data.decode()
        reader = AvroReader((text,), WireFormat.BARE)
        compile_program(as_record(parse((text,))), reader.type, make_nodes(reader.columns), 0, Pool())
        assert parse((canonicalize(text),)) is not None
    except (UnicodeDecodeError, AvroSchemaError, SchemaError, IncompatibleSchema) as error:
        return type(error).__name__
    return "read"


AVRO_SCHEMAS = Target("avro-schemas", lambda: [json.dumps(s).encode() for s in (*SCHEMAS, NEWER)], _read_schema)
