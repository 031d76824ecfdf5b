"""Columns at paths, in headers and in other forms than their types' usual ones, of records in every format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastavro
import pyarrow as pa
import pytest

import sluice.testing as sluice_testing
from sluice.pipelines.errors import FeedError
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.json.counting import values_of_rows, values_of_texts
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.republishing.values import json_values
from sluice.pipelines.schema.schema import Schema, SchemaError, parse_schema
from sluice.testing import LandedMessages, Message
from tests.pipelines.records.json.rows import FIRST, make_chunk

RANGE = OffsetRange("events", 0, "id", FIRST, FIRST + 2)

SCHEMA = {
    "id": "int64 not null",
    "repo": "string not null at repo.full_name",
    "owner": "int64 at repo.owner.id",
    "items": "list<struct<sku:string, n:int32>>",
    "first": "string at items[0].sku",
    "second": "int64 at items[1].n",
    "tags": "map<string, int32>",
    "red": "int32 at tags.red",
    "dotted": 'string at "a.b"."c d"',
    "event": "string header X-Event",
    "trace": "binary header traceparent",
}


def land(tmp_path: Path, schema: Mapping[str, str], messages: Iterable[Message], **settings: Any) -> LandedMessages:
    """Land messages through a feed file with this schema."""
    path = tmp_path / "feeds" / "events.yaml"
    path.parent.mkdir(exist_ok=True)
    document = {"topics": "events", "start": "earliest", "format": "json", "schema": schema} | settings
    document.setdefault("policies", {"quarantine_limit": {"share": 1.0}})
    path.write_text(json.dumps(document))
    return sluice_testing.land(path, messages, environ={})


def send(value: Any, *headers: tuple[str, bytes | None]) -> Message:
    return Message(None if value is None else json.dumps(value).encode(), headers=headers)


def list_rows(landed: LandedMessages, *names: str) -> list[dict[str, Any]]:
    return landed.rows.select(list(names)).to_pylist()


def list_reasons(landed: LandedMessages) -> list[tuple[int, str, str]]:
    return [(r["offset"], r["reason"], r["field"]) for r in landed.quarantined.to_pylist()]


def test_paths_and_headers_land_as_columns_and_the_rest_in_extra(tmp_path: Path) -> None:
    repo = {"full_name": "a/b", "owner": {"id": 7, "login": "x"}, "stars": 1}
    value = {"id": 1, "repo": repo, "items": [{"sku": "s"}, {"n": 2, "z": 0}], "tags": {"red": 5, "blue": 6}}
    landed = land(
        tmp_path,
        SCHEMA,
        [
            send(value | {"a.b": {"c d": "x"}, "other": 1}, ("X-Event", b"push"), ("X-Event", b"last"), ("n", None)),
            send({"id": 2, "repo": {"full_name": "c/d", "owner": None}, "items": []}, ("x", b"n"), ("X-Event", None)),
            send({"id": 3, "repo": {"full_name": ""}, "items": None, "tags": {}}, ("traceparent", b"\xff\x00")),
            send(None, ("X-Event", b"gone")),
        ],
    )  # fmt: skip
    names = [n for n in SCHEMA if n not in ("items", "tags")]
    assert list_rows(landed, *names) == [
        dict(zip(names, row, strict=True))
        for row in (
            (1, "a/b", 7, "s", 2, 5, "x", "last", None),
            (2, "c/d", None, None, None, None, None, None, None),
            (3, "", None, None, None, None, None, None, b"\xff\x00"),
            (None, None, None, None, None, None, None, "gone", None),
        )
    ]
    assert [json.loads(r["_extra"] or "{}") for r in list_rows(landed, "_extra")] == [
        {"repo": {"owner": {"login": "x"}, "stars": 1}, "items": [{}, {"z": 0}], "other": 1}, {}, {}, {},
    ]  # fmt: skip
    drift = {(d.kind, d.field): d.records for d in landed.drift if d.kind is not DriftKind.MISSING}
    assert drift == {
        (DriftKind.NEW, "$.repo.owner.login"): 1,
        (DriftKind.NEW, "$.repo.stars"): 1,
        (DriftKind.NEW, "items[].z"): 1,
        (DriftKind.NEW, "other"): 1,
    }


def test_misfits_on_a_path_name_the_path_and_those_of_headers_the_column(tmp_path: Path) -> None:
    good = {"id": 1, "repo": {"full_name": "a"}}
    landed = land(
        tmp_path,
        SCHEMA | {"must": "string not null header must", "first": "string not null at items[0].sku"},
        [
            send({"id": 1}, ("must", b"")),
            send({"id": 1, "repo": None}, ("must", b"")),
            send({"id": 1, "repo": "text"}, ("must", b"")),
            send({"id": 1, "repo": []}, ("must", b"")),
            send({"id": 1, "repo": {}}, ("must", b"")),
            send({"id": 1, "repo": {"full_name": 5}}, ("must", b"")),
            send({"id": 1, "repo": {"full_name": "a", "owner": 5}}, ("must", b"")),
            send({"id": 1, "repo": {"full_name": "a", "owner": {"id": "x"}}}, ("must", b"")),
            send(good | {"items": [{"sku": "s"}]}, ("must", b""), ("X-Event", b"\xc3")),
            send(good | {"items": [{"sku": "s"}]}),
            send(good | {"items": [{"sku": "s"}]}, ("must", b""), ("must", None)),
            send(good | {"items": [{}, {"sku": "s"}]}, ("must", b"")),
            send(good | {"items": [{"sku": "s"}]}, ("must", b"")),
            send(None),
        ],
    )
    assert list_reasons(landed) == [
        (0, "missing", "$.repo"), (1, "missing", "$.repo"), (2, "wrong_type", "$.repo"), (3, "wrong_type", "$.repo"),
        (4, "missing", "repo"), (5, "wrong_type", "repo"), (6, "wrong_type", "$.repo.owner"),
        (7, "wrong_type", "owner"), (8, "invalid_utf8", "event"), (9, "missing", "must"), (10, "missing", "must"),
        (11, "missing", "first"),
    ]  # fmt: skip
    details = {r["offset"]: r["detail"] for r in landed.quarantined.to_pylist()}
    assert details[2] == "should be an object"
    assert details[8] == "bytes that are not UTF-8 (header X-Event)"
    assert details[11] == "is missing, and should be string (at items[0].sku)"
    assert [r["kafka_offset"] for r in list_rows(landed, "kafka_offset")] == [12, 13]
    dropped = land(tmp_path, {"h": "string not null header h"} | {"id": "int64"}, [send({"id": 1})] * 3,
                   policies={"on_undecodable": "drop"})  # fmt: skip
    assert (dropped.counts.dropped, dropped.counts.landed, dropped.counts.quarantined) == (3, 0, 0)


def test_a_place_that_no_record_has_is_reported(tmp_path: Path) -> None:
    schema = {
        "id": "int64",
        "plain": "string",
        "a": 'string from "re.po"',
        "b": "string at repo.name",
        "c": "string header x",
    }
    landed = land(tmp_path, schema, [send({"id": n, "repo": {"full_name": "x"}}, ("X", b"1")) for n in range(5)])
    missing = {d.field: (d.records, d.type) for d in landed.drift if d.kind is DriftKind.MISSING}
    assert missing == {
        "plain": (5, ""),
        "a": (5, 'string from "re.po"'),
        "b": (5, "string at repo.name"),
        "c": (5, "string header x"),
    }
    partly = land(tmp_path, schema, [send({"id": 1}), send({"id": 2, "re.po": "", "repo": {"name": ""}}, ("x", b""))])
    assert [d.field for d in partly.drift if d.kind is DriftKind.MISSING] == ["plain"]


def test_a_column_and_another_one_inside_of_it_both_land(tmp_path: Path) -> None:
    schema = {
        "a": "struct<b:struct<c:int32>, d:string>",
        "c": "int64 at a.b.c",
        "whole": "struct<x:int32> at q.r",
        "x": "int32 at q.r.x",
    }
    value = {"a": {"b": {"c": 1, "y": 2}, "d": "d"}, "q": {"r": {"x": 3, "z": 4}, "s": 5}}
    landed = land(tmp_path, schema, [send(value), send({"a": {"b": None}}), send({"q": {"r": None}}), send({})])
    assert list_rows(landed, *schema) == [
        {"a": {"b": {"c": 1}, "d": "d"}, "c": 1, "whole": {"x": 3}, "x": 3},
        {"a": {"b": None, "d": None}, "c": None, "whole": None, "x": None},
        {"a": None, "c": None, "whole": None, "x": None},
        {"a": None, "c": None, "whole": None, "x": None},
    ]
    (extra, *rest) = [r["_extra"] for r in list_rows(landed, "_extra")]
    assert json.loads(extra) == {"a": {"b": {"y": 2}}, "q": {"r": {"z": 4}, "s": 5}}
    assert rest == [None] * 3


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"a": "string at b[0]"}, "a: is an element of b, which is no column"),
        ({"a": "json", "b": "string at a.c"}, "b: is at a.c, and a is json"),
        ({"a": "list<struct<c:int64>>", "b": "string at a.c"}, "b: is at a.c, and a is list<"),
        ({"a": "struct<x:int64>", "b": "int32 at a.x"}, "b: is int32, and another column has a.x as int64"),
        ({"a": "struct<x:int64>", "b": "int64 at a.y"}, "b: is at a.y, and a is struct<x:int64>"),
        ({"a": "int64 at b.c", "d": "int64 at b.c"}, "d: is read from a field that another column is read from"),
        ({"a": "int64 at b.c", "d": "int64 at b"}, "a: is at b.c, and b is int64"),
        ({"a": "int64 at b.c.d", "d": "int64 at b.c"}, "a: is at b.c.d, and b.c is int64"),
        ({"a": "string from days"}, "dates alone can be `from days`"),
        ({"a": "float64 from text"}, "integers, decimals and epochs alone can be `from text`"),
        ({"a": "int64 from base64"}, "decimals alone can be `from base64`"),
        ({"a": "struct<x:int64 at y.z>"}, "only a column can have `at`"),
        ({"a": {"x": "string header h"}}, "only a column can have `header`"),
        ({"a": "list<string at x.y>"}, "elements and values have no names"),
        ({"a": "int64 header x"}, "a header lands as string or binary"),
        ({"a": "string at b.c at d.e"}, "a second place, form or `not null`"),
        ({"a": "string at b."}, "expected a name behind the point"),
        ({"a": "string at"}, "expected a path such as"),
        ({"a": "string header"}, "expected a header's name"),
        ({"a": "string at x.'y'"}, "expected a name behind the point"),
    ],
)  # fmt: skip
def test_a_place_without_an_object_or_column_on_its_path_is_refused(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_schema(schema)
    assert problem in str(caught.value)
    assert caught.value.problems[0].remedy


def test_places_are_spelled_as_they_are_parsed() -> None:
    texts = {
        "a": 'decimal(9,2) from text not null from "b c"',
        "c": "list<date from days not null>",
        "d": 'binary not null header "a\\u0000 \\"b\\""',
    }
    schema = parse_schema(texts | {"e": 'int64 not null at x."y.z".ü."[0]"'})
    assert parse_schema(schema.texts()) == schema
    assert parse_schema({"e": 'int64 at  x . "y.z" . ü ."[0]"  not  null'}).fields == schema.fields[-1:]
    assert parse_schema({"e": "int64 at e"}) == parse_schema({"e": "int64"})
    assert parse_schema({"e": "int64 at f"}) == parse_schema({"e": 'int64 from "f"'})
    assert parse_schema({"e": "int64 not null from text"}) == parse_schema({"e": "int64 from text not null"})


# -- formats with schemas of their own

PLACED = {
    "sku": "string at items[0].sku",
    "city": "string not null at customer.address.city",
    "amount": "int64 at customer.amount",
    "red": "int32 at tags.red",
    "event": "string not null header X-Event",
}
ORDERS = [
    {"customer": {"address": {"city": "Ulm"}, "amount": 3}, "items": [{"sku": "a"}, {"sku": "b"}], "tags": {"red": 1}},
    {"customer": {"address": None, "amount": 4}, "items": [], "tags": {}},
    {"customer": {"address": {"city": "Bonn"}, "amount": 5}, "items": [], "tags": {"blue": 2}},
]
AVRO: Any = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "customer", "type": {"type": "record", "name": "Customer", "fields": [
            {"name": "address", "type": ["null", {
                "type": "record", "name": "Address", "fields": [{"name": "city", "type": "string"}]}]},
            {"name": "amount", "type": "int"}]}},
        {"name": "items", "type": {"type": "array", "items": {
            "type": "record", "name": "Item", "fields": [{"name": "sku", "type": "string"}]}}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
    ],
}  # fmt: skip
PROTOBUF = """syntax = "proto3";
message Order {
  message Address { optional string city = 1; }
  message Customer { Address address = 1; int32 amount = 2; }
  message Item { string sku = 1; }
  Customer customer = 1;
  repeated Item items = 2;
  map<string, int32> tags = 3;
}
"""
_OBJECT = {"type": "object"}
JSON_SCHEMA = _OBJECT | {
    "properties": {
        "customer": _OBJECT | {"properties": {
            "address": {"oneOf": [{"type": "null"}, _OBJECT | {"properties": {"city": {"type": "string"}}}]},
            "amount": {"type": "integer"}}},
        "items": {"type": "array", "items": _OBJECT | {"properties": {"sku": {"type": "string"}}}},
        "tags": _OBJECT | {"additionalProperties": {"type": "integer", "minimum": 0}},
    }
}  # fmt: skip


def write_avro(value: Any) -> bytes:
    out = BytesIO()
    fastavro.schemaless_writer(out, AVRO, value)
    return out.getvalue()


def write_protobuf(value: Any) -> bytes:
    from google.protobuf import json_format
    from google.protobuf.message_factory import GetMessageClass

    from sluice.pipelines.records.protobuf.compiling import compile_schema
    from sluice.pipelines.records.protobuf.schema import parse_descriptor, write_text

    file, _ = parse_descriptor(write_text(compile_schema((PROTOBUF,), ())))
    message = GetMessageClass(file.message_types_by_name["Order"])()
    json_format.ParseDict(value, message)
    return bytes(message.SerializeToString())


FORMATS = {
    "avro": (json.dumps(AVRO), write_avro),
    "protobuf": (PROTOBUF, write_protobuf),
    "json_schema": (json.dumps(JSON_SCHEMA).replace(', "minimum": 0', ""), lambda value: json.dumps(value).encode()),
}


def land_of(tmp_path: Path, name: str, schema: Mapping[str, str], messages: Sequence[Message]) -> LandedMessages:
    text, _ = FORMATS[name]
    (tmp_path / "order.schema").write_text(text)
    settings = {"format": name, "schema_file": "order.schema", "wire_format": "bare"}
    if name == "protobuf":
        settings["message"] = "Order"
    return land(tmp_path, schema, messages, **settings)


@pytest.mark.parametrize("name", FORMATS)
def test_columns_next_to_a_schema_file_are_copies_and_headers(tmp_path: Path, name: str) -> None:
    placed = PLACED | ({"red": "int64 at tags.red"} if name == "json_schema" else {})
    event = [("X-Event", b"e")]
    messages = [Message(FORMATS[name][1](value), headers=event) for value in ORDERS]
    messages += [Message(messages[0].value), Message(None)]
    landed = land_of(tmp_path, name, placed, messages)
    assert list_reasons(landed) == [(1, "missing", "city"), (3, "missing", "event")]
    assert list_rows(landed, *PLACED) == [
        {"sku": "a", "city": "Ulm", "amount": 3, "red": 1, "event": "e"},
        {"sku": None, "city": "Bonn", "amount": 5, "red": None, "event": "e"},
        dict.fromkeys(PLACED),
    ]
    assert list_rows(landed, "items")[0] == {"items": [{"sku": "a"}, {"sku": "b"}]}, "the file's columns land, too"
    late = land_of(tmp_path, name, {"x": "string header other"}, messages)
    assert [(d.field, d.type) for d in late.drift if d.field == "x"] == [("x", "string header other")]


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"x": "string"}, "schema.x: is no column `at` a path of the schema_file, nor of a `header`"),
        ({"items": "string header h"}, "schema.items: is no column"),
        ({"x": "string at other.y"}, "schema.x: is no column"),
        ({"x": "string at customer.amount"}, "another column has customer.amount as int32"),
        ({"x": "string at customer.name"}, "schema.x: is at customer.name, and customer is struct<"),
        ({"x": "string at customer.address.city.x"}, "and customer.address.city is string"),
        ({"x": "nothing"}, "schema.x: cannot be read at position 1"),
        ("text", "schema: is not a mapping"),
    ],
)
def test_schema_next_to_a_schema_file_has_nothing_but_places(tmp_path: Path, own: Any, problem: str) -> None:
    with pytest.raises(FeedError) as caught:
        land_of(tmp_path, "avro", own, [])
    assert problem in caught.value.message


# -- republish and rescan


def test_rows_are_values_again_that_land_as_the_same_rows(tmp_path: Path) -> None:
    schema = SCHEMA | {
        "cost": "decimal(9,2) from text at bill.cost",
        "raw": "decimal(9,2) from base64",
        "day": "date from days",
    }
    repo = {"full_name": "a", "owner": {"id": 1, "x": [1]}, "z": None}
    values = [
        {"id": 1, "repo": repo, "bill": {"cost": "1.5", "u": {}}},
        {"id": 2, "repo": {"full_name": "b", "y": 1}, "items": [{"sku": "s", "q": 1}], "raw": "/w==", "day": -3},
        {"id": 3, "repo": {"full_name": "c"}, "bill": {"tax": 1}, "tags": {"red": 1}, "a.b": {"c d": "x", "e": 2}},
        {"id": 4, "repo": {"full_name": "d"}, "bill": None, "a.b": {}, "xrepo": {"full_name": 1}},
    ]
    landed = land(tmp_path, schema, [*map(send, values), send(None)])
    columns = parse_schema(schema)
    batch = landed.rows.combine_chunks().to_batches()[0]
    written = json_values(batch, columns).to_pylist()
    assert [json.loads(v) if v else v for v in written] == [
        {"id": 1, "repo": repo, "bill": {"cost": "1.50", "u": {}}},
        {"id": 2, "items": [{"sku": "s", "q": 1}], "raw": "/w==", "day": -3, "repo": {"full_name": "b", "y": 1}},
        {"id": 3, "bill": {"tax": 1}, "tags": {"red": 1}, "repo": {"full_name": "c"}, "a.b": {"c d": "x", "e": 2}},
        {"id": 4, "repo": {"full_name": "d"}, "xrepo": {"full_name": 1}},
        None,
    ]  # fmt: skip
    again = land(tmp_path, schema, [Message(v) for v in written])
    names = [*schema, "_extra"]
    extras = [[json.loads(r.pop("_extra") or "{}") for r in list_rows(x, *names)] for x in (landed, again)]
    assert extras[0] == extras[1]
    assert list_rows(landed, *schema) == list_rows(again, *schema)
    counts = values_of_texts(pa.array([send(v).value for v in (*values, None)], pa.binary()))
    assert values_of_rows(landed.rows, columns).tolist() == counts.tolist()


def test_paths_lead_into_records_of_any_writers_schema(tmp_path: Path) -> None:
    later = json.loads(json.dumps(AVRO))
    later["fields"] = [{"name": "note", "type": "string"}, *reversed(later["fields"])]
    reader = AvroReader((json.dumps(AVRO),), WireFormat.CONFLUENT)
    own = Schema((*reader.columns.fields, *parse_schema({"x": "int64 at y.z"} | {"e": "string header e"}).fields[1:]))
    own = parse_schema(own.texts() | {"sku": "string at items[1].sku", "city": "string at customer.address.city"})
    out = BytesIO()
    fastavro.schemaless_writer(out, later, ORDERS[0] | {"note": "n"})
    values = [b"\0\0\0\0\1" + write_avro(ORDERS[1]), b"\0\0\0\0\2" + out.getvalue()]
    rows = make_chunk(values)
    written: Any = SimpleNamespace(texts=lambda number: (json.dumps((AVRO, later)[number - 1]),))
    formed = list(Shape(own, reader=reader).format(written).convert(RANGE, rows))
    landed = pa.Table.from_batches([p.landed for p in formed])
    assert landed.select(["sku", "city", "e"]).to_pylist() == [
        {"sku": None, "city": None, "e": None},
        {"sku": "b", "city": "Ulm", "e": None},
    ]
    assert {(d.kind, d.field) for p in formed for d in p.drift} >= {(DriftKind.NEW, "note"), (DriftKind.MISSING, "e")}
