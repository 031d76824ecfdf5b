"""Reports about schemas: registries and their numbers, keys, JSON Schema, types inferred from a sample."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import FeedError
from sluice.pipelines.records.rows.wire_format import AVRO
from sluice.testing import LandedMessages, Message, land
from sluice.testing.lake import MemoryLake
from tests.pipelines.records.avro.rows import Schemas, convert, make_reader
from tests.pipelines.schema.samples import sample_values
from tests.reports.test_avro import FEED, encode, make_field, record
from tests.reports.world import RAW, keep_schema, land_json, land_values, list_reasons, write_feed

ORDER = record(make_field("id", "int"))


def land_avro(root: Path, wire: str, *values: bytes, number: int = 1) -> LandedMessages:
    lake = MemoryLake()
    keep_schema(lake, number, AVRO, json.dumps(ORDER))
    feed = FEED + f"wire_format: {wire}\n"
    return land_values(root, feed, values, lake, order__avsc=json.dumps(ORDER))


def test_only_records_of_lost_schema_are_quarantined(tmp_path: Path) -> None:
    """confluentinc/schema-registry#1975: the registry lost schema 20, and every consumer stood still."""
    values = [encode(ORDER, {"id": i}, 20 if i % 2 else 24) for i in range(6)]
    landed = land_avro(tmp_path, "confluent", *values, number=24)
    assert landed.rows["id"].to_pylist() == [0, 2, 4]
    assert (list_reasons(landed), landed.quarantined["value"].to_pylist()) == (["unknown_schema"] * 3, values[1::2])


def test_unknown_schema_id_is_requested_once() -> None:
    """kafkajs/confluent-schema-registry#301: each record of an unknown schema was a request to the registry."""
    schemas = Schemas({1: ORDER})
    values = [encode(ORDER, {"id": i}, 1 + i % 3) for i in range(300)]
    landed, refused, _ = convert(make_reader(ORDER), values, schemas)
    assert (landed.num_rows, refused and refused.num_rows) == (100, 200)
    assert sorted(schemas.requests) == [1, 2, 3]


def test_schema_ids_of_four_and_eight_bytes_are_not_confused(tmp_path: Path) -> None:
    """Apicurio/apicurio-registry#2547: four bytes of a number and four of the record were read as one number."""
    short, long = encode(ORDER, {"id": 7}), b"\0" + struct.pack(">q", 1) + b"\x0e"
    landed = land_avro(tmp_path / "four", "confluent", short, long)
    assert (landed.rows["id"].to_pylist(), list_reasons(landed)) == ([7], ["unknown_schema"])
    landed = land_avro(tmp_path / "eight", "apicurio", long, short)
    assert (landed.rows["id"].to_pylist(), len(list_reasons(landed))) == ([7], 1)


def test_record_of_another_registry_is_quarantined_alone(tmp_path: Path) -> None:
    """awslabs/aws-glue-schema-registry#136: a Glue header where Confluent's was expected stopped the task."""
    glue = b"\3\0" + bytes(16) + b"\x0e"
    landed = land_avro(tmp_path, "confluent", encode(ORDER, {"id": 1}), glue, encode(ORDER, {"id": 2}))
    assert (landed.rows["id"].to_pylist(), list_reasons(landed)) == ([1, 2], ["not_avro"])


# -- keys


def test_keys_keep_their_bytes(tmp_path: Path) -> None:
    """apache/pinot#17899: keys in Confluent's format went through a text and arrived empty."""
    keys = [encode(ORDER, {"id": 1}), b"\xff\xfe\x00", b"", None, b"null", b"<null>"]
    landed = land(write_feed(tmp_path, RAW), [Message(b"v", key=k) for k in keys], environ={})
    assert landed.rows["key"].to_pylist() == keys


def test_record_without_key_lands_with_key_schema(tmp_path: Path) -> None:
    """epiphanous/flinkrunner#84: with a schema for keys, a record without one stopped the reader."""
    lake = MemoryLake()
    keep_schema(lake, 1, AVRO, json.dumps(ORDER))
    feed = "topics: orders\nstart: earliest\nformat: json\nschema: {n: int32}\n"
    feed += "registry: {url: 'http://127.0.0.1:9'}\nkey: {format: avro, schema_file: key.avsc}\n"
    path = write_feed(tmp_path, feed, {"key.avsc": json.dumps(ORDER)})
    messages = [Message(b'{"n": 1}', encode(ORDER, {"id": 9})), Message(b'{"n": 2}'), Message(b'{"n": 3}', b"")]
    landed = land(path, messages, lake=lake, environ={})
    assert landed.rows.select(["n", "key_id"]).to_pylist() == [{"n": 1, "key_id": 9}, {"n": 2, "key_id": None}]
    assert landed.quarantined["offset"].to_pylist() == [2]


# -- JSON Schema


def land_by_schema(root: Path, properties: dict[str, Any], *values: Any, **more: Any) -> LandedMessages:
    feed = "topics: orders\nstart: earliest\nformat: json_schema\nschema_file: order.json\n"
    schema = {"type": "object", "properties": properties} | more
    return land_values(root, feed, [json.dumps(v).encode() for v in values], order__json=json.dumps(schema))


def test_oneof_null_and_type_accepts_null(tmp_path: Path) -> None:
    """confluentinc/schema-registry#1800: `oneOf` of null and a type, or of null and a definition, failed in a sink."""
    nothing = {"type": "null", "title": "Not included"}
    properties = {
        "id": {"type": "string"},
        "by": {"oneOf": [nothing, {"type": "string"}]},
        "node": {"oneOf": [nothing, {"$ref": "#/definitions/node"}]},
    }
    node = {"type": "object", "properties": {"a": {"type": "integer"}}}
    values = [{"id": "1", "by": None, "node": None}, {"id": "2", "by": "x", "node": {"a": 3}}, {"id": "3"}]
    landed = land_by_schema(tmp_path, properties, *values, required=["id"], definitions={"node": node})
    rows = landed.rows.select(["id", "by", "node"]).to_pylist()
    assert rows == [*values[:2], {"id": "3", "by": None, "node": None}]


def test_an_optional_field_with_a_default_may_be_missing(tmp_path: Path) -> None:
    """confluentinc/kafka-connect-storage-cloud#843: such a field was taken for required."""
    properties = {"customer_id": {"type": "string", "default": ""}, "billing": {"type": "boolean"}}
    landed = land_by_schema(tmp_path, properties, {"billing": True}, {"customer_id": "c"}, additionalProperties=True)
    assert landed.rows.select(["customer_id", "billing"]).to_pylist() == [
        {"customer_id": None, "billing": True},
        {"customer_id": "c", "billing": None},
    ]


def test_numbers_with_bounds_land(tmp_path: Path) -> None:
    """awslabs/aws-glue-schema-registry#369: a number or integer with bounds could not be converted."""
    bounds = {"minimum": 0, "maximum": 253402300799999}
    properties = {"n": {"type": "number"} | bounds, "i": {"type": "integer"} | bounds}
    landed = land_by_schema(tmp_path, properties, {"n": 1745495247914, "i": 1745495247914})
    assert landed.rows.select(["n", "i"]).to_pylist() == [{"n": 1745495247914.0, "i": 1745495247914}]


def test_field_of_two_types_is_refused_with_its_schema_path(tmp_path: Path) -> None:
    """jcustenborder/kafka-connect-json-schema#20: a field that may be a number or a text failed record by record."""
    with pytest.raises(FeedError, match=r"schema_file: #/properties/x/type: allows values of several kinds"):
        land_by_schema(tmp_path, {"x": {"type": ["integer", "string"]}}, {"x": 1}, {"x": "a"})


# -- types inferred from a sample

SAMPLES: dict[str, tuple[list[Any], str]] = {
    "pola-rs/polars#4015": ([-3, 2, 0, 4.6], "float64"),
    "pola-rs/polars#11496": ([[], ["a"], [], None], "list<string>"),
    "apache/arrow#40107": ([None] * 500 + ["for-example"], "string"),
    "ClickHouse/ClickHouse#85267": ([1.0, 1.1], "float64"),
    "pola-rs/polars#15683": ([None] * 200 + [{"a": 1}], "struct<a:int64>"),
}


@pytest.mark.parametrize("report", SAMPLES)
def test_inferred_type_fits_all_sampled_values(report: str, tmp_path: Path) -> None:
    values, expected = SAMPLES[report]
    lines = [json.dumps({"x": v}).encode() for v in values]
    type_ = sample_values(lines).columns["x"]
    assert type_.replace(" ", "") == expected
    landed = land_json(tmp_path, f"x: '{type_}'", *lines)
    assert landed.rows["x"].to_pylist() == values


LATE: list[tuple[str, str, str]] = [
    ("float64", "true", "wrong_type"),
    ("int64", "true", "wrong_type"),
    ("int64", "1.5", "inexact"),
    ("bool", "7", "wrong_type"),
    ("bool", "1.5", "wrong_type"),
]


@pytest.mark.parametrize(("type_", "value", "reason"), LATE)
def test_a_late_value_of_another_type_is_not_cast(type_: str, value: str, reason: str, tmp_path: Path) -> None:
    """duckdb/duckdb#25786: after the sample, `true` became 1.0, 7 became true and 1.5 became 2."""
    landed = land_json(tmp_path, f"x: {type_}", b'{"x": %s}' % value.encode())
    assert (landed.rows.num_rows, list_reasons(landed)) == (0, [reason])
