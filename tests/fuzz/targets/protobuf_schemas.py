"""Compiled Protobuf schemas from lake and ledger: read and made into columns, or refused with a message."""

from __future__ import annotations

import base64
import json
from random import Random

from sluice.pipelines.records.columns.nodes import make_nodes
from sluice.pipelines.records.protobuf.programs import compile_program
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader
from sluice.pipelines.records.protobuf.schema import read_files
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import SchemaError
from tests.fuzz.target import Target
from tests.pipelines.records.protobuf import wild


def _make_seeds() -> list[bytes]:
    return [read_files(wild.make_schema(Random(i)))[0].SerializeToString() for i in range(12)]


def _read_schema(data: bytes) -> str:
    try:
        text = json.dumps({"files": base64.b64encode(data).decode(), "message": "M0"})
        reader = ProtobufReader((text,), WireFormat.BARE)
        compile_program(reader.message, make_nodes(reader.columns))
    except (UnusableSchema, SchemaError) as error:
        return type(error).__name__
    return "read"


PROTOBUF_SCHEMAS = Target("protobuf-schemas", _make_seeds, _read_schema)
