"""Reports about Avro: another writer's schema, defaults, unions, names, logical types.

Each record is written by fastavro with the writer's schema, or byte by byte; the lake has that schema, as an earlier
run stored it. The expected rows are literals: no library computes them.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
import pytest

from sluice.pipelines.records.rows.wire_format import AVRO
from sluice.testing import LandedMessages
from sluice.testing.lake import MemoryLake
from tests.reports.world import keep_schema, land_values, list_reasons

FEED = "topics: orders\nstart: earliest\nformat: avro\nschema_file: order.avsc\nregistry: {url: 'http://127.0.0.1:9'}\n"
BARE = FEED.replace("registry: {url: 'http://127.0.0.1:9'}\n", "")
Schema = Any


def record(*fields: Any, name: str = "Order", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)} | more


def make_field(name: str, type: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type} | more


def encode(schema: Schema, value: Any, number: int = 1) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return b"\0" + struct.pack(">I", number) + out.getvalue()


def land(root: Path, reader: Schema, writers: Sequence[str], values: Sequence[bytes | None]) -> LandedMessages:
    lake = MemoryLake()
    for number, text in enumerate(writers, 1):
        keep_schema(lake, number, AVRO, text)
    return land_values(root, FEED, values, lake, order__avsc=json.dumps(reader))


def make_decimal(precision: int, scale: int, type: str = "bytes", **more: Any) -> dict[str, Any]:
    return {"type": type, "logicalType": "decimal", "precision": precision, "scale": scale} | more


def make_logical(type: str, name: str) -> dict[str, Any]:
    return {"type": type, "logicalType": name}


ID = make_field("id", "int")
LINES = {"type": "array", "items": "int"}
POINT = record(make_field("lat", "float"), make_field("long", ["null", "float"], default=None), name="Point")
RENAMED = record(make_field("lat", "float"), make_field("lon", ["null", "float"], default=None), name="Point")
STATE = {"type": "enum", "name": "State", "symbols": ["open", "paid"]}
OLDER = {"type": "enum", "name": "State", "symbols": ["unknown", "open"], "default": "unknown"}
TIME = datetime(2024, 2, 29, 12, 0, 0, 123456, UTC)


class Case(NamedTuple):
    writer: Schema
    reader: Schema
    value: Any
    row: Any


CASES: dict[str, Case] = {
    "apache/arrow-rs#9237": Case(
        record(make_field("x", LINES)),
        record(make_field("x", {"type": "array", "items": ["null", "int"]})),
        {"x": [1, 64, -65]},
        {"x": [1, 64, -65]},
    ),
    "apache/arrow-rs#9328": Case(
        record(make_field("x", ["null", record(make_field("a", "int"), name="X")])),
        record(
            make_field(
                "x", ["null", record(make_field("a", "int"), make_field("b", "string", default="new"), name="X")]
            )
        ),
        {"x": {"a": 7}},
        {"x": {"a": 7, "b": "new"}},
    ),
    "apache/arrow-rs#9304": Case(
        record(ID), record(ID, make_field("x", ["int", "null"], default=None)), {"id": 1}, {"id": 1, "x": None}
    ),
    "apache/avro#752": Case(
        record(make_field("x", ["null", {"type": "map", "values": ["null", POINT]}])),
        record(make_field("x", ["null", {"type": "map", "values": ["null", RENAMED]}])),
        {"x": {"a": {"lat": 1.5, "long": -1.5}, "b": None}},
        {"x": [("a", {"lat": 1.5, "lon": None}), ("b", None)]},
    ),
    "apache/avro#537": Case(
        record(make_field("x", LINES)), record(make_field("x", ["null", LINES])), {"x": [1, 2]}, {"x": [1, 2]}
    ),
    "fastavro/fastavro#407": Case(
        record(make_field("x", POINT)),
        record(make_field("x", ["null", POINT])),
        {"x": {"lat": 2.5, "long": None}},
        {"x": {"lat": 2.5, "long": None}},
    ),
    "fastavro/fastavro#225": Case(
        record(make_field("h", record(make_field("messageId", "string"), make_field("eventType", "string"), name="H"))),
        record(
            make_field(
                "h",
                record(
                    make_field("type", "string", aliases=["eventType"]),
                    make_field("id", "string", aliases=["messageId"]),
                    make_field("at", "string", default=""),
                    name="H",
                ),
            )
        ),
        {"h": {"messageId": "m", "eventType": "e"}},
        {"h": {"type": "e", "id": "m", "at": ""}},
    ),
    "fastavro/fastavro#176": Case(
        record(make_field("a", "int", default=1), namespace="n", doc="x"),
        record(make_field("a", "int", default=1), make_field("b", "int", default=1), namespace="n"),
        {"a": 5},
        {"a": 5, "b": 1},
    ),
    "apache/avro#1970": Case(
        record(make_field("x", STATE)), record(make_field("x", OLDER)), {"x": "paid"}, {"x": "unknown"}
    ),
    "fastavro/fastavro#323": Case(
        record(make_field("badness", STATE)),
        record(make_field("fairness", STATE | {"name": "Fairness", "aliases": ["State"]}, aliases=["badness"])),
        {"badness": "paid"},
        {"fairness": "paid"},
    ),
    "mtth/avsc#330": Case(
        record(
            make_field("before", ["null", record(ID, name="row")], default=None),
            make_field("after", ["null", "row"], default=None),
            namespace="ORCL.MOVIEDEMO",
        ),
        record(make_field("after", ["null", record(ID, name="row")], default=None), namespace="ORCL.MOVIEDEMO"),
        {"before": {"id": 1}, "after": {"id": 2}},
        {"after": {"id": 2}},
    ),
    "linkedin/goavro#177": Case(record(ID, namespace=""), record(ID, namespace=""), {"id": 9}, {"id": 9}),
    "databricks/spark-avro#255": Case(
        record(make_field("u", {"type": "array", "items": [record(ID, name="u", namespace=".u"), "null"]})),
        record(make_field("u", {"type": "array", "items": [record(ID, name="u", namespace=".u"), "null"]})),
        {"u": [{"id": 1}, None]},
        {"u": [{"id": 1}, None]},
    ),
    "apache/paimon#9418": Case(
        record(make_field("x", ["string", "null"]), make_field("y", ["long", "null"])),
        record(make_field("y", ["null", "long"]), make_field("x", ["null", "string"])),
        {"x": None, "y": 3},
        {"y": 3, "x": None},
    ),
    "ClickHouse/ClickHouse#49130": Case(
        record(make_field("x", make_decimal(22, 3))),
        record(make_field("x", make_decimal(22, 3))),
        {"x": Decimal("2.100")},
        {"x": Decimal("2.100")},
    ),
    "ClickHouse/ClickHouse#50668": Case(
        record(make_field("x", make_decimal(38, 2))),
        record(make_field("x", make_decimal(38, 2))),
        {"x": Decimal("-1.28")},
        {"x": Decimal("-1.28")},
    ),
    "ClickHouse/clickhouse-kafka-connect#143": Case(
        record(make_field("x", make_decimal(38, 0))),
        record(make_field("x", make_decimal(38, 0))),
        {"x": Decimal(183467440737095516150)},
        {"x": Decimal(183467440737095516150)},
    ),
    "ClickHouse/clickhouse-kafka-connect#798": Case(
        record(make_field("x", make_decimal(9, 2, "fixed", name="D", size=4))),
        record(make_field("x", make_decimal(9, 2, "fixed", name="D", size=4))),
        {"x": Decimal("-21474.83")},
        {"x": Decimal("-21474.83")},
    ),
    "confluentinc/schema-registry#1720": Case(
        record(make_field("x", make_logical("long", "timestamp-micros"))),
        record(make_field("x", make_logical("long", "timestamp-micros"))),
        {"x": TIME},
        {"x": TIME},
    ),
    "tchiotludo/akhq#1015": Case(
        record(make_field("x", make_logical("long", "local-timestamp-micros"))),
        record(make_field("x", make_logical("long", "local-timestamp-micros"))),
        {"x": TIME.replace(tzinfo=None)},
        {"x": TIME},
    ),
    "duckdb/duckdb-avro#6": Case(
        record(make_field("x", make_logical("int", "date")), make_field("y", make_decimal(19, 2))),
        record(make_field("x", make_logical("int", "date")), make_field("y", make_decimal(19, 2))),
        {"x": date(1969, 12, 31), "y": Decimal("30.49")},
        {"x": date(1969, 12, 31), "y": Decimal("30.49")},
    ),
    "fastavro/fastavro#888": Case(
        record(ID),
        record(
            ID,
            make_field("b", "bytes", default="default"),
            make_field("f", {"type": "fixed", "name": "F", "size": 5}, default="fixed"),
        ),
        {"id": 1},
        {"id": 1, "b": b"default", "f": b"fixed"},
    ),
    "flavray/avro-rs#96": Case(
        record(ID), record(ID, make_field("b", "bytes", default="\u00ff\u00ff")), {"id": 1}, {"id": 1, "b": b"\xff\xff"}
    ),
    "fastavro/fastavro#814": Case(
        record(ID),
        record(ID, make_field("paid", make_decimal(15, 2), default="\u0000")),
        {"id": 1},
        {"id": 1, "paid": Decimal("0.00")},
    ),
}


@pytest.mark.parametrize("report", CASES)
def test_record_lands_by_avro_rules(report: str, tmp_path: Path) -> None:
    case = CASES[report]
    landed = land(tmp_path, case.reader, [json.dumps(case.writer)], [encode(case.writer, case.value)])
    assert list_reasons(landed) == [], landed.quarantined["detail"].to_pylist()
    (row,) = landed.rows.to_pylist()
    assert {name: row[name] for name in case.row} == case.row


HEADER = b"\0\0\0\0\1"
INNER = record(make_field("x", record(make_field("y", "int"), name="Deeper")), name="Inner", namespace="")
ROW = record(make_field("s", "string"), name="row")
INVALID = record(make_field("id", "int", default="abc"), make_field("r", "string", default=None))
UNCERTAIN = '{"type": "record", "name": "Order", "fields": [%s, {"name": "d", "type": "double", "default": NaN}]}'
BYTES: dict[str, tuple[str, Schema, bytes, Any]] = {
    "apache/avro#724": (
        json.dumps(record(make_field("f", INNER), namespace="space")),
        record(make_field("f", INNER), namespace="space"),
        b"\x06",
        {"f": {"x": {"y": 3}}},
    ),
    "fastavro/fastavro#537": (
        json.dumps(record(make_field("a", ROW | {"namespace": None}), make_field("b", "row"), namespace="my_ns")),
        record(make_field("a", ROW | {"namespace": ""}), make_field("b", "row"), namespace="my_ns"),
        b"\x02a\x02b",
        {"a": {"s": "a"}, "b": {"s": "b"}},
    ),
    "TouK/nussknacker#1173": (json.dumps(INVALID), record(ID), b"\x02\x02a", {"id": 1}),
    "apache/hudi#690": (json.dumps(INVALID), INVALID, b"\x02\x02a", {"id": 1, "r": "a"}),
    "fastavro/fastavro#675": (UNCERTAIN % json.dumps(ID), record(ID), b"\x02" + bytes(8), {"id": 1}),
    "Altinity/clickhouse-sink-connector#898": (
        json.dumps(record(make_field("x", make_decimal(9, 2)))),
        record(make_field("x", make_decimal(9, 2))),
        b"\0",
        {"x": Decimal("0.00")},
    ),
}


@pytest.mark.parametrize("report", BYTES)
def test_bytes_land_by_avro_rules(report: str, tmp_path: Path) -> None:
    """Schemas that fastavro refuses, or values that it cannot write."""
    writer, reader, data, expected = BYTES[report]
    landed = land(tmp_path, reader, [writer], [HEADER + data])
    (row,) = landed.rows.to_pylist()
    assert {name: row[name] for name in expected} == expected


def test_record_with_invalid_header_or_length_is_refused_alone(tmp_path: Path) -> None:
    """atleon/atleon#4: a value with the first byte and less than four more stopped the consumer."""
    good = encode(record(ID), {"id": 1})
    bad = [b"\0", b"\0\0\0", HEADER, b"", b"\1" + good[1:], good + b"\0"]
    landed = land(tmp_path, record(ID), [json.dumps(record(ID))], [good, *bad, good])
    assert (landed.counts.landed, list_reasons(landed)) == (2, ["not_avro"] * 6)


def test_tombstones_land_among_avro_records(tmp_path: Path) -> None:
    """lensesio/stream-reactor#938: the converter threw at a record without a value."""
    good = encode(record(ID), {"id": 1})
    landed = land(tmp_path, record(ID), [json.dumps(record(ID))], [good, None, good])
    assert landed.rows["kafka_tombstone"].to_pylist() == [False, True, False]


def test_bare_record_of_older_schema_is_refused(tmp_path: Path) -> None:
    """fastavro/fastavro#826: bytes of an older schema were read as a newer one, which has more fields."""
    newer = record(ID, make_field("note", ["null", "string"], default=None))
    values = [encode(record(ID), {"id": 1})[5:], encode(newer, {"id": 2, "note": "n"})[5:]]
    landed = land_values(tmp_path, BARE, values, order__avsc=json.dumps(newer))
    assert (landed.rows["id"].to_pylist(), list_reasons(landed)) == ([2], ["not_avro"])


def test_times_of_other_unit_are_not_misread(tmp_path: Path) -> None:
    """apache/iceberg#16681: logical types that a sink did not know landed as plain numbers."""
    millis = record(make_field("x", make_logical("long", "timestamp-millis")))
    micros = record(make_field("x", make_logical("long", "timestamp-micros")))
    nanos = record(make_field("x", make_logical("long", "local-timestamp-nanos")))
    value = encode(millis, {"x": TIME.replace(microsecond=0)})
    landed = land(tmp_path / "same", millis, [json.dumps(millis)], [value])
    assert landed.rows["x"].to_pylist() == [TIME.replace(microsecond=0)]
    landed = land(tmp_path / "other", micros, [json.dumps(millis)], [value])
    assert list_reasons(landed) == ["incompatible"]
    landed = land(tmp_path / "nanos", nanos, [json.dumps(nanos)], [HEADER + b"\x02"])
    assert str(landed.rows.schema.field("x").type) == "timestamp[ns, tz=UTC]"


def test_top_level_union_of_writer_is_read_by_its_branch(tmp_path: Path) -> None:
    """goldsky-io/streamling#60: with a union or a record as the top-level schema, some writers' values were misread."""
    values = [encode(record(ID), {"id": 1}), b"\0\0\0\0\2\2\4", b"\0\0\0\0\2\0"]
    writers = [json.dumps(record(ID)), json.dumps(["null", record(ID)])]
    landed = land(tmp_path, record(ID), writers, values)
    assert (landed.rows["id"].to_pylist(), list_reasons(landed)) == ([1, 2], ["incompatible"])
    assert landed.quarantined["value"].to_pylist() == values[2:]


def test_top_level_union_of_reader_accepts_record(tmp_path: Path) -> None:
    """The reverse of goldsky-io/streamling#60."""
    writers = [json.dumps(record(ID)), json.dumps(["null", record(ID)]), json.dumps("int")]
    values = [encode(record(ID), {"id": 1}), b"\0\0\0\0\2\2\4", b"\0\0\0\0\2\0", b"\0\0\0\0\3\2"]
    landed = land(tmp_path, ["null", record(ID)], writers, values)
    assert (landed.rows["value"].to_pylist(), list_reasons(landed)) == ([{"id": 1}, {"id": 2}, None], ["incompatible"])
