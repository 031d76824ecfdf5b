"""Typed rows as JSON: written values land as the same rows again."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.errors import Refused, UsageError
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.records.json.schema_reader import JsonSchemaReader
from sluice.pipelines.records.rows.row_items import NotWritable
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.republishing.republish_plan import Wishes
from sluice.pipelines.republishing.values import check_schema, check_sendable, json_values, typed_values
from sluice.pipelines.schema.schema import EXTRA, Schema, parse_schema
from tests.examples import scale_examples
from tests.pipelines.records.avro import rows as avro
from tests.pipelines.records.avro.test_properties import RECORDS, generate_values
from tests.pipelines.records.avro.test_properties import _has_no_columns as no_columns
from tests.pipelines.records.json.oracle import Pairs
from tests.pipelines.records.json.rows import by_offset, convert, parse_json
from tests.pipelines.records.json.test_properties import generate_case
from tests.pipelines.records.protobuf import rows as protobuf


def convert_again(schema: Schema, landed: pa.Table) -> tuple[list[bytes | None], pa.Table]:
    """Returns the values written from landed rows, and the rows that these land as."""
    (rows,) = landed.unify_dictionaries().combine_chunks().to_batches() or [None]
    values = json_values(rows, schema).to_pylist()
    relanded, refused = convert(schema, values)
    assert refused is None, refused.to_pylist()
    return values, relanded


def in_order(value: Any) -> Any:
    """JSON with the members of each object sorted by name, since members outside the schema come last."""
    if isinstance(value, Pairs):
        return Pairs((k, in_order(v)) for k, v in sorted(value, key=lambda pair: pair[0]))
    return [in_order(v) for v in value] if isinstance(value, list) else value


@settings(max_examples=scale_examples(100))
@given(generate_case())
def test_written_values_land_as_the_same_rows(case: tuple[Schema, list[bytes | None]]) -> None:
    schema, values = case
    landed, _ = convert(schema, values)
    if not landed.num_rows:
        return
    _, relanded = convert_again(schema, landed)
    before, after = (list(by_offset(t, "kafka_offset").values()) for t in (landed, relanded))
    names = [*(f.name for f in schema.fields), "kafka_tombstone"]
    assert repr([{n: r[n] for n in names} for r in after]) == repr([{n: r[n] for n in names} for r in before])
    assert [in_order(parse_json(r[EXTRA])) for r in after] == [in_order(parse_json(r[EXTRA])) for r in before]


def test_typed_values_are_written_as_json() -> None:
    schema = parse_schema(
        {
            "id": "int64",
            "a": "decimal(12,2)",
            "f": "float32",
            "t": "timestamp",
            "e": "epoch(s)",
            "b": "binary",
            "j": "json",
        }
    )
    value = b""" {"j": [1, 1.50], "new": {"x" : 1}, "t": "2024-02-29T12:00:00.25+01:00", "a": 1.5, "id": 1e3, "f": 0.1,
        "e": 1709208000, "b": "aGk=", "gone": null} """
    landed, _ = convert(schema, [value, None, b"{}"])
    values, _ = convert_again(schema, landed)
    assert values == [
        b'{"id":1000,"a":1.50,"f":0.1,"t":"2024-02-29T11:00:00.250000Z","e":1709208000,"b":"aGk=","j":[1, 1.50],%s}'
        % b'"new":{"x" : 1},"gone":null',
        None,
        b"{}",
    ]


def test_unknown_nested_fields_are_written_at_their_original_paths() -> None:
    schema = parse_schema(
        {
            "id": "int64",
            "in/to": "struct<a:int64, s:struct<b:bool>>",
            "l": "list<list<struct<x:int8>>>",
            "m": "map<string, struct<v:int8>>",
        }
    )
    value = b"""{"id": 1, "in\\/to": {"a": 2, "new": [1.50, "}"], "s": {"c": null}},
        "l": [null, [{}, {"x": 1, "y": {"x": 2}}], []], "m": {"k": {"v": 1}, "\\u00e4": {"w": "W"}}, "own": 1}"""
    landed, _ = convert(schema, [value, b'{"id": 2}', b'{"new": {"in/to": {}}}'])
    values, relanded = convert_again(schema, landed)
    expected = b'{"id":1,"in/to":{"a":2,"s":{"c":null},"new":[1.50, "}"]},"l":[null,[{},{"x":1,"y":{"x": 2}}],[]],'
    assert values == [
        expected + '"m":{"k":{"v":1},"ä":{"w":"W"}},"own":1}'.encode(),
        b'{"id":2}',
        b'{"new":{"in/to": {}}}',
    ]
    assert json.loads(values[0] or b"") == json.loads(value)
    made_extra, extra = (t[EXTRA].to_pylist() for t in (relanded, landed))
    assert [in_order(parse_json(text)) for text in made_extra] == [in_order(parse_json(text)) for text in extra]


def write_avro_again(
    schema: Any, given_: list[bytes | None], id: int = 1, wire: WireFormat = WireFormat.CONFLUENT
) -> Any:
    """Land Avro values, and return them as written from the rows by the same schema."""
    reader = avro.make_reader(schema, wire)
    landed, refused, _ = avro.convert(reader, given_, avro.Schemas({id: schema}))
    assert refused is None
    (rows,) = landed.combine_chunks().to_batches()
    return typed_values(rows, Shape(reader.columns, reader=reader), id).to_pylist()


@settings(max_examples=scale_examples(60))
@given(st.data())
def test_landed_avro_is_rewritten_to_the_bytes_of_fastavro(data: st.DataObject) -> None:
    schema = data.draw(RECORDS.filter(lambda s: not no_columns(s)))
    given_: list[bytes | None] = [
        avro.encode(schema, v) for v in data.draw(st.lists(generate_values(schema), min_size=1, max_size=6))
    ]
    given_.insert(data.draw(st.integers(0, len(given_))), None)
    assert write_avro_again(schema, given_) == given_


def test_avro_logical_types_and_wire_formats_are_rewritten_unchanged() -> None:
    decimal = {"logicalType": "decimal", "precision": 12, "scale": 2}
    types: dict[str, Any] = {
        "day": {"type": "int", "logicalType": "date"},
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "fine": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
        "local": {"type": "long", "logicalType": "local-timestamp-micros"},
        "amount": {"type": "bytes", **decimal},
        "fixed": {"type": "fixed", "name": "F", "size": 6, **decimal},
        "choice": ["string", {"type": "array", "items": ["null", "long"]}, "null"],
    }
    schema = {"type": "record", "name": "R", "fields": [{"name": n, "type": t} for n, t in types.items()]}
    moment = dt.datetime(2024, 2, 29, 12, 0, 0, 250_000, dt.UTC)
    one = {
        "day": dt.date(2024, 2, 29),
        "at": moment,
        "fine": None,
        "local": moment.replace(tzinfo=None),
        "amount": Decimal("-1234567.25"),
        "fixed": Decimal("1.28"),
        "choice": [1, None, -(1 << 62)],
    }
    rows = [one, one | {"fine": moment, "choice": None, "amount": Decimal("1.28")}, one | {"choice": "x"}]
    given_ = [avro.encode(schema, r) for r in rows]
    assert write_avro_again(schema, [*given_, None]) == [*given_, None]
    bare = [avro.encode(schema, r, id=None) for r in rows]
    assert write_avro_again(schema, [*bare], wire=WireFormat.BARE) == bare
    eight = [b"\0" + (7).to_bytes(8, "big") + r for r in bare]
    assert write_avro_again(schema, [*eight], id=7, wire=WireFormat.APICURIO) == eight


def test_top_level_avro_bytes_have_a_length_except_in_confluent_format() -> None:
    own = [b"", b"\x04ab", b"\xff" * 70]
    confluent: list[bytes | None] = [*(b"\0\0\0\0\1" + v for v in own), None]
    assert write_avro_again("bytes", confluent) == confluent
    assert write_avro_again({"type": {"type": "bytes"}}, confluent) == confluent
    decimals: list[bytes | None] = [b"\0\0\0\0\1\x01\x00", b"\0\0\0\0\1\xff"]
    assert write_avro_again({"type": "bytes", "logicalType": "decimal", "precision": 9}, decimals) == decimals
    for schema, wire in ((["null", "bytes"], WireFormat.CONFLUENT), ("bytes", WireFormat.APICURIO3)):
        sized: list[bytes | None] = [avro.encode(schema, v) for v in own]
        assert write_avro_again(schema, sized, wire=wire) == sized


def test_error_names_field_that_does_not_fit_the_schema() -> None:
    old = {"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", "string"]}]}
    new = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "b", "aliases": ["a"], "type": "string", "default": ""},
            {"name": "c", "type": ["null", "long"], "default": None},
        ],
    }
    landed, _, _ = avro.convert(
        avro.make_reader(old), [avro.encode(old, {"a": v}) for v in ("x", None)], avro.Schemas({1: old})
    )
    (rows,) = landed.combine_chunks().to_batches()
    reader = avro.make_reader(new)
    shape = Shape(reader.columns, reader=reader)
    assert typed_values(rows.slice(0, 1), shape, 3).to_pylist() == [avro.encode(new, {"b": "x", "c": None}, 3)]
    with pytest.raises(NotWritable, match="b: it is null, and the schema has no null there") as raised:
        typed_values(rows, shape, 3)
    assert raised.value.item == 1


def test_avro_times_are_written_in_unit_of_current_schema() -> None:
    old, new = (
        {"type": "record", "name": "R", "fields": [{"name": "at", "type": ["null", {"type": "long", **unit}]}]}
        for unit in ({"logicalType": "timestamp-millis"}, {"logicalType": "timestamp-micros"})
    )
    moments = [dt.datetime(2024, 2, 29, 12, 0, 0, 250_000, dt.UTC), None, dt.datetime(1, 1, 1, tzinfo=dt.UTC)]
    records: list[bytes | None] = [avro.encode(old, {"at": moment}) for moment in moments]
    landed, _, _ = avro.convert(avro.make_reader(old), records, avro.Schemas({1: old}))
    (rows,) = landed.combine_chunks().to_batches()
    reader = avro.make_reader(new)
    written = typed_values(rows, Shape(reader.columns, reader=reader), 1).to_pylist()
    assert written == [avro.encode(new, {"at": moment}) for moment in moments]


def test_protobuf_header_has_schema_id_and_message_indexes() -> None:
    text = "package p; message A { int32 x = 1; } message B { int32 x = 1; string y = 2; }"
    message = protobuf.make_message_class(protobuf.make_reader(text, "p.B").texts[0])
    bare = [message(x=1, y="é").SerializeToString(), b"", message(x=-1).SerializeToString()]
    for wire, head in ((WireFormat.CONFLUENT, b"\0\0\0\1\2\2\2"), (WireFormat.BARE, b"")):
        reader = protobuf.make_reader(text, "p.B", wire)
        given_ = [head + v for v in bare]
        landed, refused, _ = protobuf.convert(
            reader, [*given_, None], protobuf.Schemas({258: protobuf.add_syntax(text)})
        )
        assert refused is None
        (rows,) = landed.combine_chunks().to_batches()
        shape = Shape(reader.columns, reader=reader)
        check_sendable(shape, "orders")
        assert typed_values(rows, shape, 258).to_pylist() == [*given_, None]


def test_json_schema_values_start_with_schema_id() -> None:
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}}
    reader = JsonSchemaReader((json.dumps(schema),), WireFormat.CONFLUENT)
    landed, _ = convert(reader.columns, [b'{"id":1}', None, b'{"id":2, "new":true}'])
    (rows,) = landed.combine_chunks().to_batches()
    written = typed_values(rows, Shape(reader.columns, reader=reader), 258).to_pylist()
    assert written == [b'\0\0\0\1\2{"id":1}', None, b'\0\0\0\1\2{"id":2,"new":true}']


def test_changed_schema_and_glue_wire_format_are_refused() -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "string"}]}
    reader = avro.make_reader(schema)
    shape = Shape(reader.columns, reader=reader)
    wishes = Wishes("again", 1, schema=reader.fingerprint, schema_id=1)
    check_schema(wishes, shape, "orders")
    check_schema(replace(wishes, schema="", kind=PartKind.QUARANTINED), shape, "orders")
    with pytest.raises(Refused, match="another schema"):
        check_schema(replace(wishes, schema=""), shape, "orders")
    with pytest.raises(UsageError, match="glue"):
        check_sendable(replace(shape, reader=avro.make_reader(schema, WireFormat.GLUE)), "orders")
