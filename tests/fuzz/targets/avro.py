"""Avro records, several in one input (`fuzz.binary`): the loops over guarded memory, compared with fastavro."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro

from sluice.pipelines.records.avro.format import REASONS, AvroTyper
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.rows.wire_format import WireFormat
from tests.fuzz import binary
from tests.fuzz.binary import check_records, make_seeds, mutate_records
from tests.fuzz.target import Target
from tests.pipelines.records.avro.rows import Schemas, encode, strip_logical_types


def _make_record(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": f"f{i}", "type": t} for i, t in enumerate(fields)]}


_INNER = {
    "type": "record",
    "name": "I",
    "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": ["null", "string"]}],
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    _make_record("string", ["null", "int"], "long", "float", "double", "boolean", "bytes"),
    _make_record(
        {"type": "array", "items": {"type": "array", "items": _INNER}}, {"type": "map", "values": ["null", "long"]}
    ),
    _make_record(
        {"type": "enum", "name": "E", "symbols": ["A", "B"]},
        {"type": "fixed", "name": "F", "size": 3},
        {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 3},
        {"type": "long", "logicalType": "timestamp-millis"},
        {"type": "fixed", "name": "U", "size": 12, "logicalType": "duration"},
        ["null", "string", "int", {"type": "array", "items": "string"}],
    ),
)
NEWER = {**SCHEMAS[0], "fields": [*SCHEMAS[0]["fields"][2:], {"name": "z", "type": "string", "default": "é"}]}
_VALUES: tuple[list[dict[str, Any]], ...] = (
    [{f"f{i}": v for i, v in enumerate(("é", n, -n, 1.5, 0.1, True, b"\xff"))} for n in (0, 5, 1 << 30)],
    [{"f0": [[{"x": 1, "y": None}], [], [{"x": n, "y": "s"}] * 3], "f1": {"k": n, "l": None}} for n in (0, 77)],
    [{"f0": "B", "f1": b"abc", "f2": b"\x01\x00", "f3": 5, "f4": b"a" * 12, "f5": v} for v in (None, "x", 5, ["a"])],
)


def _make_seeds() -> list[bytes]:
    seeds = []
    for kind, values in enumerate(_VALUES):
        seeds += make_seeds(kind, [encode(strip_logical_types(SCHEMAS[kind]), v, 1) for v in values])
    return [*seeds, bytes([64]) + seeds[0][1:]]


def _run(data: bytes) -> str:
    kind = data[0] if data else 0
    writer = SCHEMAS[0 if kind & 64 else kind % 64 % 3]
    reader = AvroReader((json.dumps(NEWER if kind & 64 else writer),), WireFormat.CONFLUENT)
    typer = AvroTyper(reader, Schemas({1: writer}))
    return check_records(
        typer, REASONS, data, lambda record: _read_with_fastavro(writer, record, passed_over=bool(kind & 64))
    )


def _read_with_fastavro(writer: Any, record: bytes, *, passed_over: bool) -> None:
    """Check that fastavro reads a landed record to its last byte. A text that is passed over may hold any bytes."""
    stream = io.BytesIO(record[5:])
    try:
        fastavro.schemaless_reader(stream, fastavro.parse_schema(strip_logical_types(writer)))
    except UnicodeDecodeError:
        assert passed_over
        return
    assert not stream.read()


guard = binary.guard
AVRO = Target("avro", _make_seeds, _run, mutate_records)
