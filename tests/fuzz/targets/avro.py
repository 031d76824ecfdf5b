"""Avro records, several in one input: the loops over guarded memory, and what fastavro says.

The first byte of an input chooses the schema and the side of the guarded page; then each record has its length in one
byte before it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from sluice.pipelines.records.avro.reader import AvroReader
from sluice.pipelines.records.avro.reasons import detail_of, reason_of
from sluice.pipelines.records.avro.typer import AvroTyper
from sluice.pipelines.records.typed import columns as typed_columns
from sluice.pipelines.records.typed import slots
from sluice.pipelines.records.wire import WireFormat
from tests.fuzz.mutation import mutated
from tests.fuzz.target import Target
from tests.guarded import Guarded
from tests.pipelines.records.avro.rows import Schemas, encoded

_GUARDED = Guarded()


def _of(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": f"f{i}", "type": t} for i, t in enumerate(fields)]}


_INNER = {
    "type": "record",
    "name": "I",
    "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": ["null", "string"]}],
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    _of("string", ["null", "int"], "long", "float", "double", "boolean", "bytes"),
    _of({"type": "array", "items": {"type": "array", "items": _INNER}}, {"type": "map", "values": ["null", "long"]}),
    _of(
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


def guard() -> None:
    """From here on columns and slots grow in memory that ends where nobody may write."""
    typed_columns.buffer = _GUARDED.buffer
    vars(slots)["buffer"] = _GUARDED.buffer


def _plain(node: Any) -> Any:
    """The schema without logical types, for fastavro."""
    if isinstance(node, dict):
        return {k: _plain(v) for k, v in node.items() if k != "logicalType"}
    return [_plain(n) for n in node] if isinstance(node, list) else node


def _seeds() -> list[bytes]:
    found = []
    for kind, values in enumerate(_VALUES):
        records = [encoded(_plain(SCHEMAS[kind]), v, 1) for v in values]
        joined = b"".join(bytes([len(r)]) + r for r in records)
        found += [bytes([kind]) + joined, bytes([kind | 128]) + joined]
    return [*found, bytes([64]) + found[0][1:]]


def _records(data: bytes) -> list[bytes]:
    found, at = list[bytes](), 1
    while at < len(data) and len(found) < 32:
        found.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return found


def _mutated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    records = _records(data) or [b""]
    if random.randrange(4) == 0:
        return mutated(random, data, others)
    place = random.randrange(len(records))
    records[place] = mutated(random, records[place], records)[:255]
    return data[:1] + b"".join(bytes([len(r)]) + r for r in records)


def _run(data: bytes) -> str:
    kind = data[0] if data else 0
    writer, records = SCHEMAS[kind % 64 % 3], _records(data)
    reader = NEWER if kind & 64 else writer
    if kind & 64:
        writer = SCHEMAS[0]
    room = _GUARDED.filled(b"".join(records), at_end=not kind & 128)
    ends = np.cumsum([0, *map(len, records)], dtype=np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(records), [None, pa.py_buffer(ends), pa.py_buffer(room)])
    made = AvroTyper(AvroReader((json.dumps(reader),), WireFormat.CONFLUENT), Schemas({1: writer}))
    said: set[str] = set()
    try:
        for piece in made.pieces(array):
            both = np.sort(np.concatenate([piece.rows, piece.refused.rows]))
            assert both.tolist() == list(range(piece.start, piece.stop))
            for column in piece.arrays:
                column.validate(full=True)
                assert len(column) == len(piece.rows)
            for row in piece.rows.tolist():
                _read_too(writer, records[row], passed_over=bool(kind & 64))
            for code, node in zip(piece.refused.codes.tolist(), piece.refused.nodes.tolist(), strict=True):
                assert detail_of(code, made.nodes[node] if node >= 0 else None, 1)
                said.add(str(reason_of(code)))
    finally:
        _GUARDED.free()
    return " ".join(sorted(said))


def _read_too(writer: Any, record: bytes, *, passed_over: bool) -> None:
    """What lands, fastavro reads, to the last byte. A text that nobody reads may be anything."""
    stream = io.BytesIO(record[5:])
    try:
        fastavro.schemaless_reader(stream, fastavro.parse_schema(_plain(writer)))
    except UnicodeDecodeError:
        assert passed_over
        return
    assert not stream.read()


AVRO = Target("avro", _seeds, _run, _mutated)
