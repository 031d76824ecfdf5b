"""Records prefixed with the id of a schema, in every wire format, and records without an id."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any
from uuid import UUID

import jsonschema
import pytest

from sluice.pipelines.records.rows import writer_schema_lookup
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import ID_HEADER, WireFormat
from tests.pipelines.records.json.rows import FIRST
from tests.pipelines.records.json_schema.rows import convert, make_reader

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
GUID = UUID("c0ffee00-0000-4000-8000-000000000001")
OTHER = UUID("c0ffee00-0000-4000-8000-000000000002")


def make_glue_value(value: bytes, guid: UUID = GUID, *, packed: bool = False) -> bytes:
    return b"\x03" + (b"\x05" if packed else b"\0") + guid.bytes + (zlib.compress(value) if packed else value)


def convert_ids(
    reader_wire: WireFormat, values: list[bytes | None], headers: Any = None
) -> tuple[list[Any], list[Any]]:
    landed, quarantined = convert(make_reader(SCHEMA, reader_wire), values, headers)
    refused = quarantined.select(["offset", "reason", "detail", "byte", "value"]).to_pylist() if quarantined else []
    refusals = [(r["offset"] - FIRST, r["reason"], r["detail"].partition(" (schema ")[2].strip(")"), r["byte"])
            for r in refused]  # fmt: skip
    assert [r["value"] for r in refused] == [values[r["offset"] - FIRST] for r in refused]
    return landed["id"].to_pylist(), refusals


TEXT, NULL, EITHER = {"type": "string"}, {"type": "null"}, {"type": ["string", "null"]}


@pytest.mark.parametrize(
    "field",
    [
        EITHER | {"enum": ["a"]},
        EITHER | {"enum": ["a", None]},
        EITHER | {"const": "a"},
        {"enum": ["a", "b", None]},
        {"const": None},
        {"anyOf": [TEXT, NULL], "enum": ["a"]},
        {"anyOf": [{"enum": ["a"]}, NULL]},
        {"anyOf": [{"enum": ["a", None]}, {"const": "b"}]},
        {"anyOf": [TEXT, NULL], "type": "string"},
        {"anyOf": [EITHER]},
        {"anyOf": [{"maxLength": 3}], "type": ["string", "null"]},
        {"anyOf": [NULL]},
        {"oneOf": [EITHER, NULL]},
        {"oneOf": [EITHER, {"type": ["null"]}]},
        {"oneOf": [TEXT, NULL]},
        {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
        {"allOf": [{"anyOf": [TEXT, NULL]}, TEXT]},
        {"allOf": [{"enum": ["a", None]}, EITHER]},
        {"$ref": "#/$defs/either", "enum": ["a"]},
    ],
    ids=json.dumps,
)
def test_null_and_enum_values_match_a_validator(field: dict[str, Any]) -> None:
    """Checks a required field, and the same field inside a list. Limits inside lists are refused with the schema."""
    schema = {"type": "object", "properties": {"x": field}, "required": ["x"], "$defs": {"either": EITHER}}
    records = [{"x": value} for value in (None, "a", "b", "c", 7)]
    judge = jsonschema.Draft202012Validator(schema)
    landed, _ = convert(make_reader(schema), [json.dumps(record).encode() for record in records])
    assert [v and v.strip('"') for v in landed["x"].to_pylist()] == [r["x"] for r in records if judge.is_valid(r)]
    schema["properties"] = {"x": {"type": "array", "items": field}}
    records = [{"x": [record["x"]]} for record in records]
    try:
        reader = make_reader(schema)
    except UnusableSchema:
        return
    judge = jsonschema.Draft202012Validator(schema)
    landed, _ = convert(reader, [json.dumps(record).encode() for record in records])
    assert landed["x"].to_pylist() == [r["x"] for r in records if judge.is_valid(r)]


def test_confluent_schema_ids_are_read() -> None:
    head = b"\0" + struct.pack(">I", 7)
    values = [head + b'{"id":1}', None, b'{"id":2}', head + b'{"id":"x"}', b"\0\0", b"", b"\1" + head[1:] + b'{"id":3}']
    rows, refused = convert_ids(WireFormat.CONFLUENT, [*values, head + b' {"id":4} '])
    assert rows == [1, None, 4]
    assert refused == [
        (2, "not_json", "", 0),
        (3, "wrong_type", "7", 11),
        (4, "not_json", "", 0),
        (5, "not_json", "", 0),
        (6, "not_json", "", 0),
    ]


def test_apicurio_schema_ids_are_read() -> None:
    head = b"\0" + struct.pack(">q", 1 << 40)
    values = [head + b'{"id":1}', b"\1" + head[1:] + b'{"id":2}', head + b"{}", b"\0" + b"\xff" * 8 + b'{"id":2}']
    rows, refused = convert_ids(WireFormat.APICURIO, values)
    assert rows == [1]
    assert refused == [(1, "not_json", "", 0), (2, "missing", str(1 << 40), 10), (3, "not_json", "", 0)]


def test_confluent_header_ids_are_read() -> None:
    number, guid = (ID_HEADER, b"\0" + struct.pack(">I", 7)), (ID_HEADER, b"\1" + GUID.bytes)
    headers = [
        [number],
        [("trace", b"x"), guid, number],
        [],
        [number],
        [guid],
        [(ID_HEADER, b"\0\0")],
        [("__key_schema_id", b"\0\0\0\0\1")],
    ]
    bad = [b"{}", b"{}", b'{"id":3}', b'{"id":4}']
    rows, refused = convert_ids(
        WireFormat.CONFLUENT_HEADERS, [b'{"id":1}', b'{"id":2}', bad[2], *bad[:2], *bad[2:]], headers
    )
    assert rows == [1, 2]
    assert refused == [
        (2, "not_json", "", 0),
        (3, "missing", "7", 1),
        (4, "missing", str(GUID), 1),
        (5, "not_json", "", 0),
        (6, "not_json", "", 0),
    ]


def test_apicurio_header_ids_are_read() -> None:
    number = ("apicurio.value.contentId", struct.pack(">q", 7))
    headers = [[number], [("trace", b"x"), number], [], [("apicurio.key.contentId", number[1])]]
    rows, refused = convert_ids(WireFormat.APICURIO_HEADERS, [b'{"id":1}', b"{}", b'{"id":3}', b'{"id":4}'], headers)
    assert rows == [1]
    assert refused == [(1, "missing", "contentId-7", 1), (2, "not_json", "", 0), (3, "not_json", "", 0)]


def test_glue_values_are_read_compressed_and_uncompressed() -> None:
    cut = make_glue_value(b'{"id":9}', packed=True)[:-3]
    values = [
        *(
            make_glue_value(b'{"id":1}'),
            make_glue_value(b'{"id":2}', packed=True),
            make_glue_value(b'{"id":3}', OTHER),
            None,
        ),
        *(cut, make_glue_value(b"{}", OTHER, packed=True), b"\3\1" + GUID.bytes + b'{"id":4}', b'{"id":5}'),
        *(make_glue_value(b'{"id":6}', packed=True) + b"more", make_glue_value(b'{"id":7}')),
    ]
    rows, refused = convert_ids(WireFormat.GLUE, values)
    assert rows == [1, 2, 3, None, 7]
    assert refused == [
        (4, "not_json", str(GUID), 0),
        (5, "missing", str(OTHER), 19),
        (6, "not_json", "", 0),
        (7, "not_json", "", 0),
        (8, "not_json", str(GUID), 0),
    ]


def test_values_that_inflate_to_much_data_are_inflated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_schema_lookup, "MOST_INFLATED", 1000)
    large = [b'{"id":%d,"note":"%s"}' % (i, b"a" * 600) for i in range(5)]
    bomb = make_glue_value(b'{"id":9,"note":"%s"}' % (b"a" * 2000), packed=True)
    values = [*(make_glue_value(v, packed=True) for v in large), bomb, make_glue_value(b'{"id":10}')]
    rows, refused = convert_ids(WireFormat.GLUE, [*values])
    assert rows == [0, 1, 2, 3, 4, 10]
    assert refused == [(5, "not_json", str(GUID), 0)]


def test_bare_values_are_read_without_schema_id() -> None:
    rows, refused = convert_ids(WireFormat.BARE, [b'{"id":1}', b'\0\0\0\0\7{"id":2}'])
    assert (rows, refused) == ([1], [(1, "not_json", "", 0)])


def test_fields_not_in_schema_land_in_extra_or_are_refused_if_closed() -> None:
    values = [b'{"id":1,"b":2}']
    landed, quarantined = convert(make_reader(SCHEMA), values)
    assert (landed["_extra"].to_pylist(), quarantined) == (['{"b":2}'], None)
    _, quarantined = convert(make_reader(SCHEMA | {"additionalProperties": False}), values)
    assert quarantined is not None
    assert quarantined.select(["reason", "field"]).to_pylist() == [{"reason": "unknown_field", "field": "b"}]


def test_each_object_allows_or_refuses_other_fields() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = inner | {"additionalProperties": False}
    schema = {
        "type": "object",
        "properties": {
            "open": inner,
            "closed": closed,
            "list": {"type": "array", "items": closed},
            "map": {"type": "object", "additionalProperties": closed},
        },
    }
    values = [
        b'{"open":{"a":1,"b":2},"closed":{"a":1},"c":3}',
        b'{"closed":{"a":1,"b":2}}',
        b'{"open":{"x":1},"list":[{"a":1},{"b":2}]}',
        b'{"map":{"k":{"b":2}}}',
    ]
    landed, quarantined = convert(make_reader(schema), [*values])
    assert landed["_extra"].to_pylist() == ['{"open":{"b":2},"c":3}']
    assert quarantined is not None
    assert quarantined.select(["reason", "field"]).to_pylist() == [
        {"reason": "unknown_field", "field": path} for path in ("closed.b", "list[].b", "map{}.b")
    ]
    _, quarantined = convert(make_reader(schema | {"additionalProperties": False}), values[:1])
    assert quarantined is not None
    assert quarantined["field"].to_pylist() == ["c"], "the fields inside an open object are not checked"
    assert make_reader(schema).fingerprint != make_reader(schema | {"additionalProperties": False}).fingerprint


@pytest.mark.parametrize("wire", [WireFormat.CONFLUENT, WireFormat.APICURIO, WireFormat.GLUE, WireFormat.BARE])
def test_byte_order_mark_before_a_record_is_skipped(wire: WireFormat) -> None:
    heads = {
        WireFormat.CONFLUENT: b"\0" + struct.pack(">I", 7),
        WireFormat.APICURIO: b"\0" + struct.pack(">q", 7),
        WireFormat.GLUE: make_glue_value(b""),
    }
    head, bom = heads.get(wire, b""), b"\xef\xbb\xbf"
    own = [
        bom + b'{"id":1}',
        bom + b' {"id":2}',
        b'{"id":3}',
        bom + bom + b'{"id":4}',
        b" " + bom + b"{}",
        bom,
        bom[:2],
    ]
    rows, refused = convert_ids(wire, [head + value for value in own])
    assert rows == [1, 2, 3]
    assert [(index, reason) for index, reason, *_ in refused] == [(n, "not_json") for n in (3, 4, 5, 6)]


def test_refused_records_of_40000_schemas_keep_their_schema_ids() -> None:
    last = 40_000
    _, quarantined = convert(
        make_reader(SCHEMA, WireFormat.CONFLUENT), [b"\0" + struct.pack(">I", i) for i in range(last + 1)]
    )
    details = quarantined["detail"].to_pylist() if quarantined else []
    assert [d.partition(" (schema ")[2] for d in details] == [f"{i})" for i in range(last + 1)]


def test_all_guids_of_a_chunk_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_schema_lookup, "MOST_GUIDS", 1)
    guids = [UUID(int=i) for i in range(5)]
    _, refused = convert_ids(WireFormat.GLUE, [make_glue_value(b"x", guid) for guid in guids])
    assert [r[2] for r in refused] == [str(guid) for guid in guids]
