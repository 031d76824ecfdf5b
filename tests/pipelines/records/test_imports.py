"""Workers decode, type and refuse records without pandas, whose import costs each of them a second and 60 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
import numpy as np, pyarrow as pa
from pathlib import Path
from sluice.pipelines.model.receipts import OffsetRange
from sluice.pipelines.quarantine.limit import kinds_of
from sluice.pipelines.records.kafka_batches.decode import SCHEMA
from sluice.pipelines.schema.arrays import fixed_width, text_array
def convert(form, texts):
    values, n = text_array(texts).cast(pa.binary()), len(texts)
    numbers = fixed_width(pa.int64(), np.arange(n))
    times, kinds = numbers.cast(SCHEMA.field("timestamp").type), fixed_width(pa.int32(), np.zeros(n, np.int32))
    columns = [values, values, numbers, times, kinds, pa.nulls(n, SCHEMA.field("headers").type)]
    (piece,) = form.convert(OffsetRange("t", 0, "i", 0, n), pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    refused = kinds_of(piece.quarantined) if piece.quarantined is not None else []
    return piece.landed.to_pylist(), [(kind.reason, rows, first) for kind, rows, first in refused]
"""
JSON = """
from sluice.pipelines.records.json.format import JsonFormat
from sluice.pipelines.schema.schema import parse_schema
form = JsonFormat(parse_schema({"a": "float64", "b": "int8", "c": "string"}))
landed, refused = convert(form, ['{"a": 0.12345678901234567890, "b": 7, "c": "x"}', '{"a": "b"}', '{"b": 300}'])
assert len(landed) == 1 and refused == [("wrong_type", 1, 1), ("out_of_range", 1, 2)], refused
"""
AVRO = """
from sluice.pipelines.records.avro.format import AvroFormat
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.rows.wire_format import WireFormat
schema = '''{"type": "record", "name": "r", "fields": [
    {"name": "size", "type": {"type": "enum", "name": "e", "symbols": ["S", "M"]}}]}'''
landed, refused = convert(AvroFormat(AvroReader((schema,), WireFormat.BARE), None), ["\\0", "\\2", "\\4"])
assert [row["size"] for row in landed] == ["S", "M"] and len(refused) == 1, (landed, refused)
"""
PROTOBUF = """
from sluice.pipelines.records.protobuf.format import ProtobufFormat
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader, from_file
from sluice.pipelines.records.rows.wire_format import WireFormat
schema = '''syntax = "proto3"; enum E { S = 0; M = 1; }
message R { E size = 1; map<string, int32> counts = 2; bool fits = 3; }'''
entries = "\\x12\\x05\\x0a\\x01a\\x10\\x01" + "\\x12\\x05\\x0a\\x01a\\x10\\x02"
form = ProtobufFormat(ProtobufReader(from_file(schema, Path("/nowhere"), "R"), WireFormat.BARE), None)
landed, refused = convert(form, ["\\x08\\x01" + entries + "\\x18\\x01", "\\x08\\x05"])
assert [(row["size"], row["counts"]) for row in landed] == [("M", [("a", 2)])] and len(refused) == 1, (landed, refused)
"""


@pytest.mark.parametrize("code", [JSON, AVRO, PROTOBUF], ids=["json", "avro", "protobuf"])
def test_records_are_typed_and_refused_without_pandas(code: str) -> None:
    # Python's values of the landed rows import it themselves, so the check comes before them.
    checked = CODE.replace("    refused =", '    assert "pandas" not in sys.modules\n    refused =')
    subprocess.run([sys.executable, "-c", checked + code], check=True)
