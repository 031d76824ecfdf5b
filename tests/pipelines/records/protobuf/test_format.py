"""Records of several writers; merging, order and presence; refused records with reason, field, byte and schema."""

from __future__ import annotations

import struct
import zlib
from typing import Any
from uuid import UUID

import pytest

from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.rows.wire_format import ID_HEADER, WireFormat
from tests.pipelines.records.protobuf.rows import (
    Schemas,
    add_syntax,
    convert,
    convert_rows,
    make_message_class,
    make_reader,
    normalize,
    read_by_google,
)
from tests.pipelines.records.protobuf.wild import add_length, encode_varint

ORDER = "message Order { string id = 1; optional int32 items = 2; }"
NEWER = "message Order { string id = 1; optional int32 items = 2; string country = 3; }"
OTHERS = "message Customer { string id = 1; message Address { message Line { string a = 1; } } }\n" + ORDER


def make_order(id: str, items: int = 1, country: str = "") -> bytes:
    more = b"\x1a" + add_length(country.encode()) if country else b""
    return b"\x0a" + add_length(id.encode()) + b"\x10" + encode_varint(items) + more


def add_schema_id(schema: int, data: bytes, indexes: bytes = b"\0") -> bytes:
    return b"\0" + struct.pack(">I", schema) + indexes + data


def list_refusals(quarantined: Any) -> list[tuple[Any, ...]]:
    return (
        [tuple(r.values()) for r in quarantined.select(["reason", "field", "byte"]).to_pylist()] if quarantined else []
    )


def make_confluent_reader(text: str, message: str = "") -> Any:
    return make_reader(text, message, WireFormat.CONFLUENT)


def test_records_of_several_writers_land_in_one_table() -> None:
    schemas = Schemas({1: add_syntax(ORDER), 2: add_syntax(NEWER)})
    values = [
        add_schema_id(1, make_order("a")),
        add_schema_id(2, make_order("b", 2, "FR")),
        None,
        add_schema_id(1, make_order("c")),
    ]
    landed, quarantined, drift = convert(make_confluent_reader(NEWER), values, schemas)
    assert (quarantined, drift, schemas.requests) == (None, [], [1, 2])
    assert landed.select(["id", "items", "country"]).to_pylist() == [
        {"id": "a", "items": 1, "country": ""},
        {"id": "b", "items": 2, "country": "FR"},
        {"id": None, "items": None, "country": None},
        {"id": "c", "items": 1, "country": ""},
    ]


def test_fields_not_in_the_message_are_drift_by_name_or_number() -> None:
    schemas = Schemas({1: add_syntax(ORDER), 2: add_syntax(NEWER)})
    values = [
        add_schema_id(1, make_order("a")),
        add_schema_id(2, make_order("b", 2, "FR") * 2),
        add_schema_id(2, make_order("c", 2, "FR")),
    ]
    landed, quarantined, drift = convert(make_confluent_reader(ORDER), values, schemas)
    assert (quarantined, landed.num_rows) == (None, 3)
    assert [(d.kind, d.field, d.records, d.first) for d in drift] == [(DriftKind.NEW, "country", 2, 1001)]
    _, quarantined, _ = convert(make_confluent_reader(ORDER), values, schemas, closed=True)
    assert list_refusals(quarantined) == [("unknown_field", "", 11), ("unknown_field", "", 11)]
    _, _, drift = convert(make_reader(ORDER), [make_order("b", 2, "FR")])
    assert [(d.field, d.records) for d in drift] == [("#3", 1)]


def test_message_indexes_select_the_message() -> None:
    schemas = Schemas({1: add_syntax(OTHERS)})
    nested = b"\x06\x00\x00\x00"
    values = [
        add_schema_id(1, make_order("a"), b"\x02\x02"),
        add_schema_id(1, make_order("b")),
        add_schema_id(1, make_order("c"), nested),
        add_schema_id(1, make_order("d"), b"\x02\x04"),
        add_schema_id(1, make_order("e"), b"\x02\x01"),
        add_schema_id(1, make_order("f"), b"\x0e"),
        add_schema_id(1, b"", b"\x02"),
        add_schema_id(2, make_order("g")),
    ]
    landed, quarantined, _ = convert(make_confluent_reader(OTHERS, "Order"), values, schemas)
    assert landed["id"].to_pylist() == ["a"]
    assert [r["reason"] for r in quarantined.to_pylist()] == [  # type: ignore[union-attr]
        "incompatible", "incompatible", "not_protobuf", "not_protobuf", "not_protobuf", "not_protobuf", "unknown_schema"
    ]  # fmt: skip
    deep = make_reader(OTHERS, "Customer.Address.Line", WireFormat.CONFLUENT)
    landed, quarantined, _ = convert(deep, [add_schema_id(1, b"\x0a\x01x", nested)], schemas)
    assert (quarantined, landed["a"].to_pylist()) == (None, ["x"])


def test_confluent_header_ids_select_schema_and_message() -> None:
    schemas = Schemas({1: add_syntax(OTHERS), "00000000-0000-0000-0000-000000000007": add_syntax(OTHERS)})
    guid = b"\1" + bytes(15) + b"\7"
    headers = [
        [("x", b"y"), (ID_HEADER, b"\0\0\0\0\1\2\2")],
        [(ID_HEADER, guid + b"\2\2")],
        [(ID_HEADER, guid + b"\0")],
        [(ID_HEADER, guid + b"\2")],
        [],
    ]
    reader = make_reader(OTHERS, "Order", WireFormat.CONFLUENT_HEADERS)
    landed, quarantined, _ = convert(reader, [make_order(x) for x in "abcde"], schemas, headers)
    assert landed["id"].to_pylist() == ["a", "b"]
    assert [r[0] for r in list_refusals(quarantined)] == ["incompatible", "not_protobuf", "not_protobuf"]


def test_apicurio_headers_select_schema_and_message() -> None:
    """A header also has the short name of the message. Other names are refused, and so is a name inside the value."""
    number, message_header = ("apicurio.value.globalId", struct.pack(">q", 1)), ("apicurio.protobuf.type", b"Order")
    headers = [
        [number, message_header],
        [number, (message_header[0], b"Other"), message_header],
        [number, (message_header[0], b"Customer")],
        [number],
    ]
    values = [
        make_order("a"),
        make_order("b"),
        make_order("c"),
        make_order("d"),
        b"\x07\x0a\x05Order" + make_order("e"),
        None,
    ]
    reader = make_reader(OTHERS, "Order", WireFormat.APICURIO_HEADERS)
    landed, quarantined, _ = convert(
        reader, values, Schemas({"globalId-1": add_syntax(OTHERS)}), [*headers, headers[0], []]
    )
    assert landed["id"].to_pylist()[:2] == ["a", "b"]
    assert landed["kafka_tombstone"].to_pylist() == [False, False, True]
    assert [r[0] for r in list_refusals(quarantined)] == ["incompatible", "not_protobuf", "not_protobuf"]


def test_apicurio_ids_and_message_names_are_read() -> None:
    reader = make_reader(OTHERS, "Order", WireFormat.APICURIO)
    before = b"\0" + struct.pack(">q", 1 << 40)
    values = [
        before + b"\x07\x0a\x05Order" + make_order("a"),
        before + b"\x07\x0a\x05Other" + make_order("b"),
        b"\0\0\0\0\1",
    ]
    landed, quarantined, _ = convert(reader, values, Schemas({1 << 40: add_syntax(OTHERS)}))
    assert landed["id"].to_pylist() == ["a"]
    assert [r[0] for r in list_refusals(quarantined)] == ["incompatible", "not_protobuf"]


def test_values_of_apicurio_serializers_are_read() -> None:
    """A Timestamp of five seconds, as ProtobufKafkaSerializer 2.6.5 and, with its defaults, version 3 write it."""
    text = "syntax = 'proto3'; package google.protobuf; message Timestamp { int64 seconds = 1; int32 nanos = 2; }"
    name = "0b0a0954696d657374616d70"
    for wire, number in ((WireFormat.APICURIO, "000000000000000007"), (WireFormat.APICURIO3, "0000000007")):
        value = bytes.fromhex(f"{number}{name}0805")
        landed, quarantined, _ = convert(
            make_reader(text, "google.protobuf.Timestamp", wire), [value], Schemas({7: add_syntax(text)})
        )
        assert (quarantined, landed["seconds"].to_pylist()) == (None, [5])


NESTED = """package shop;
message Order { string id = 1; optional int32 items = 2; message Z { int32 a = 1; } map<string, int32> m = 4; }
message B { message C { int32 x = 1; } message A { message D { int32 x = 1; } int32 x = 1; } int32 x = 1; }
"""


def test_glue_message_indexes_follow_the_order_of_message_names() -> None:
    """B, B.A, B.A.D, B.C, Order, Order.MEntry, Order.Z: nested messages count, and so do the entries of maps.

    Behind the UUID, the first value is the output of `ProtobufWireFormatEncoder` of schema-registry-serde 1.1.23.
    """
    guid = UUID(int=7)
    reader = make_reader(NESTED, "shop.Order", WireFormat.GLUE)
    before = b"\3\0" + guid.bytes
    values = [
        before + bytes.fromhex("040a01611001"),
        before + b"\0" + b"\x08\1",
        before + b"\6",
        before + b"\7",
        before,
    ]
    values += [b"\3\5" + guid.bytes + zlib.compress(b"\4" + make_order("b")), b"\3\0" + bytes(16) + b"\4"]
    landed, quarantined, _ = convert(reader, values, Schemas({str(guid): add_syntax(NESTED)}))
    assert landed["id"].to_pylist() == ["a", "b"]
    expected = ["incompatible", "incompatible", "not_protobuf", "not_protobuf", "unknown_schema"]
    assert [r[0] for r in list_refusals(quarantined)] == expected


@pytest.mark.parametrize(
    ("written", "read", "fits"),
    [
        ("int32 x = 1", "int64 x = 1", True),
        ("bool x = 1", "uint32 x = 1", True),
        ("uint32 x = 1", "int64 x = 1", True),
        ("sint32 x = 1", "sint64 x = 1", True),
        ("E x = 1", "int32 x = 1", True),
        ("int32 x = 1", "E x = 1", True),
        ("int64 x = 1", "int32 x = 1", False),
        ("int64 x = 1", "uint64 x = 1", False),
        ("uint64 x = 1", "int64 x = 1", False),
        ("uint32 x = 1", "int32 x = 1", False),
        ("int32 x = 1", "uint32 x = 1", False),
        ("int32 x = 1", "uint64 x = 1", False),
        ("int32 x = 1", "bool x = 1", False),
        ("int64 x = 1", "E x = 1", False),
        ("E x = 1", "uint32 x = 1", False),
        ("sint64 x = 1", "sint32 x = 1", False),
        ("fixed32 x = 1", "sfixed32 x = 1", False),
        ("sfixed64 x = 1", "fixed64 x = 1", False),
        ("sint32 x = 1", "int32 x = 1", False),
        ("string x = 1", "bytes x = 1", True),
        ("string x = 1", "int32 x = 1", False),
        ("fixed64 x = 1", "double x = 1", False),
        ("repeated int32 x = 1", "int32 x = 1", False),
        ("repeated string x = 1", "string x = 1", False),
        ("repeated bytes x = 1", "bytes x = 1", False),
        ("message M { int32 y = 1; } repeated M x = 1", "message M { int32 y = 1; } M x = 1", False),
        ("int32 x = 1", "repeated int32 x = 1", True),
        ("string x = 1", "repeated string x = 1", True),
        ("int32 x = 1; int32 y = 2", "oneof c { int32 x = 1; int32 y = 2; }", False),
        ("optional int32 x = 1; oneof c { int32 y = 2; }", "oneof c { int32 x = 1; int32 y = 2; }", False),
        ("int32 x = 1", "oneof c { int32 x = 1; int32 y = 2; }", True),
        ("oneof d { int32 x = 1; int32 y = 2; }", "oneof c { int32 x = 1; int32 y = 2; }", True),
        ("oneof c { int32 x = 1; int32 y = 2; }", "int32 x = 1; int32 y = 2", True),
        ("message M { sint32 y = 1; } M x = 1", "message M { int32 y = 1; } M x = 1", False),
        ("message N { int32 y = 1; } N x = 1", "message M { int32 y = 1; } M x = 1", True),
        ("message N { N y = 9; } N x = 1", "message M { int32 y = 1; } M x = 1", True),
    ],
)
def test_writers_with_incompatible_field_types_are_refused(written: str, read: str, fits: bool) -> None:
    enum = "enum E { NONE = 0; BELOW = -1; }"
    schemas = Schemas({1: add_syntax(f"message R {{ {written}; }} {enum}")})
    landed, quarantined, _ = convert(
        make_confluent_reader(f"message R {{ {read}; }} {enum}"), [add_schema_id(1, b"")], schemas
    )
    assert (landed.num_rows, list_refusals(quarantined)) == ((1, []) if fits else (0, [("incompatible", None, 1)]))


def convert_field(field: str, *values: bytes) -> list[Any]:
    return [row and row["x"] for row in convert_rows(make_reader(f"message R {{ {field} }}"), values)]


def test_last_value_of_a_field_wins_and_messages_merge() -> None:
    assert convert_field("int32 x = 1;", b"\x08\x01\x08\x02") == [2]
    inner = "message M { int32 a = 1; int32 b = 2; repeated int32 c = 3; } M x = 1;"
    first, second = b"\x0a\x06\x08\x01\x10\x05\x18\x07", b"\x0a\x06\x08\x02\x1a\x02\x08\x09"
    assert convert_field(inner, first + second) == [{"a": 2, "b": 5, "c": [7, 8, 9]}]


def test_oneof_member_replaces_other_members_with_their_contents() -> None:
    field = "message M { repeated M2 c = 1; } message M2 { repeated int32 d = 1; } oneof o { M x = 1; int32 y = 2; }"
    one = b"\x0a\x06\x0a\x04\x0a\x02\x01\x02"
    rows = convert_rows(
        make_reader(f"message R {{ {field} }}"), [one, one + b"\x10\x05", one + b"\x10\x05" + one, one + one]
    )
    m2 = {"d": [1, 2]}
    assert rows == [
        {"x": {"c": [m2]}, "y": None},
        {"x": None, "y": 5},
        {"x": {"c": [m2]}, "y": None},
        {"x": {"c": [m2, m2]}, "y": None},
    ]


def test_groups_are_read_and_unknown_groups_are_skipped() -> None:
    text = 'syntax = "proto2"; message R { optional group G = 1 { optional int32 a = 1; } optional int32 b = 2; }'
    reader = make_reader(text)
    unknown = b"\x4b\x53\x08\x01\x54\x4c"
    values = [b"\x0b\x08\x05\x0c\x10\x07", unknown + b"\x10\x07", b"\x0b\x08\x05", b"\x0c", b"\x4b\x53\x4c\x54"]
    landed, quarantined, _ = convert(reader, values)
    assert landed.select(["g", "b"]).to_pylist() == [{"g": {"a": 5}, "b": 7}, {"g": None, "b": 7}]
    assert [r[0] for r in list_refusals(quarantined)] == ["not_protobuf"] * 3


def test_editions_define_presence_and_groups() -> None:
    text = """edition = "2023";
    message R {
      int32 a = 1;
      int32 b = 2 [features.field_presence = IMPLICIT];
      int32 c = 3 [features.field_presence = LEGACY_REQUIRED];
      R2 d = 4 [features.message_encoding = DELIMITED];
    }
    message R2 { int32 e = 1; }"""
    reader = make_reader(text, "R")
    assert reader.columns.texts() == {
        "a": "int32", "b": "int32 not null", "c": "int32 not null", "d": "struct<e:int32>"
    }  # fmt: skip
    landed, quarantined, _ = convert(reader, [b"\x18\x01\x23\x08\x09\x24", b"\x08\x01"])
    assert landed.select(["a", "b", "c", "d"]).to_pylist() == [{"a": None, "b": 0, "c": 1, "d": {"e": 9}}]
    assert list_refusals(quarantined) == [("missing", "c", None)]


def test_enums_land_by_their_names() -> None:
    text = "enum E { option allow_alias = true; A = 0; B = -5; C = -5; } message R { repeated E x = 1; }"
    landed, quarantined, drift = convert(make_reader(text), [b"\x0a\x0b\x00" + encode_varint(-5), b"\x08\x07"])
    assert landed["x"].to_pylist() == [["A", "B"]]
    assert list_refusals(quarantined) == [("wrong_type", "x[]", None)]
    assert [(d.kind, d.field) for d in drift if d.kind is DriftKind.UNLISTED] == [(DriftKind.UNLISTED, "x[]")]


NAN = struct.pack("<d", float("nan"))


def make_entry(field: int, key: str, value: bytes) -> bytes:
    """Return an entry of a map from strings to messages, as the field with this number."""
    return bytes([field << 3 | 2]) + add_length(b"\x0a" + add_length(key.encode()) + b"\x12" + add_length(value))


def test_invalid_map_entry_replaced_by_a_later_entry_is_ignored() -> None:
    text = """syntax = "proto3"; import "google/protobuf/timestamp.proto"; import "google/protobuf/struct.proto";
    enum E { A = 0; B = 1; }
    message V { E e = 1; google.protobuf.Timestamp at = 2; google.protobuf.Value v = 3; map<string, V2> more = 4; }
    message V2 { repeated E e = 1; }
    message R { map<string, V> x = 1; map<string, E> y = 2; }"""
    reader = make_reader(text, "R")
    bad_e, bad_at, bad_v = (
        b"\x08\x07",
        b"\x12" + add_length(b"\x10" + encode_varint(-1)),
        b"\x1a" + add_length(b"\x11" + NAN),
    )
    deep_bad, deep_good = make_entry(4, "i", b"\x08\x01\x08\x07"), make_entry(4, "i", b"\x08\x01")
    bad = [bad_e, bad_at, bad_v, deep_bad]
    good = [make_entry(1, "k", b) + make_entry(1, "k", b"\x08\x01") for b in bad]
    good += [make_entry(1, "k", deep_bad + deep_good), b"\x12\x05\x0a\x01k\x10\x07\x12\x05\x0a\x01k\x10\x01"]
    still = [make_entry(1, "k", b"\x08\x01") + make_entry(1, "k", b) for b in bad]
    still += [make_entry(1, "j", b) + make_entry(1, "k", b"\x08\x01") for b in bad]
    still += [b"\x12\x05\x0a\x01k\x10\x01\x12\x05\x0a\x01k\x10\x07"]
    landed, quarantined, _ = convert(reader, [*good, *still, *good])
    kind = make_message_class(reader.texts[-1])
    expected = [read_by_google(kind, data) for data in good]
    rows = [{f.name: normalize(r[f.name], f.type) for f in reader.columns.fields} for r in landed.to_pylist()]
    assert rows == expected * 2
    assert [read_by_google(kind, data) for data in still] == [None] * len(still)
    assert quarantined is not None
    assert quarantined["value"].to_pylist() == still


def test_documents_are_merged_and_values_without_json_form_are_refused() -> None:
    text = 'import "google/protobuf/struct.proto"; message R { google.protobuf.Struct x = 1; }'
    a, b = (b"\x0a" + add_length(b"\x0a" + add_length(b"\x0a\x01" + k + b"\x12\x02\x20\x01")) for k in (b"a", b"b"))
    nan = b"\x0a" + add_length(b"\x0a" + add_length(b"\x0a\x01a\x12\x09\x11" + struct.pack("<d", float("nan"))))
    landed, quarantined, _ = convert(make_reader(text), [a + b, b"", b"\x0a\x00", nan, b"\x0a\x01\xff"])
    assert landed["x"].to_pylist() == ['{"a":true,"b":true}', None, "{}"]
    assert [r[0] for r in list_refusals(quarantined)] == ["malformed", "malformed"]


def test_document_parts_are_discarded_with_their_oneof_member() -> None:
    text = """import "google/protobuf/struct.proto";
    message R { oneof o { M x = 1; int32 y = 2; } google.protobuf.Struct z = 3; }
    message M { google.protobuf.Struct d = 1; repeated N more = 2; }
    message N { google.protobuf.Struct d = 1; }"""
    reader, y = make_reader(text, "R"), b"\x10\x05"
    a, b, c = (add_length(b"\x0a" + add_length(b"\x0a\x01" + k + b"\x12\x02\x20\x01")) for k in (b"a", b"b", b"c"))
    z = b"\x1a" + a + b"\x1a" + b
    both = b"\x0a" + add_length(b"\x0a" + a + b"\x0a" + b + b"\x12" + add_length(b"\x0a" + b + b"\x0a" + c))
    one = b"\x0a" + add_length(b"\x0a" + c + b"\x12" + add_length(b"\x0a" + a))
    values = [z + both, both + y, z + both + y + one + z, both + y + both, both + one, (both + y) * 2000 + one]
    ab, bc, abc = ('{"a":true,"b":true}', '{"b":true,"c":true}', '{"a":true,"b":true,"c":true}')
    assert convert_rows(reader, values) == [
        {"x": {"d": ab, "more": [{"d": bc}]}, "y": None, "z": ab},
        {"x": None, "y": 5, "z": None},
        {"x": {"d": '{"c":true}', "more": [{"d": '{"a":true}'}]}, "y": None, "z": ab},
        {"x": {"d": ab, "more": [{"d": bc}]}, "y": None, "z": None},
        {"x": {"d": abc, "more": [{"d": bc}, {"d": '{"a":true}'}]}, "y": None, "z": None},
        None,  # more parts than a block may have
    ]


REFUSED = [
    ("int32 x = 1;", b"\x08", "not_protobuf", "x", 0),
    ("int32 x = 1;", b"\x08" + b"\xff" * 10, "not_protobuf", "x", 0),
    ("string x = 1;", b"\x0a\x02a", "not_protobuf", "x", 0),
    ("string x = 1;", b"\x0a\x03a\xffb", "invalid_utf8", "x", 3),
    ("double x = 1;", b"\x091234567", "not_protobuf", "x", 0),
    ("repeated fixed32 x = 1;", b"\x0a\x05" + bytes(5), "not_protobuf", "x[]", 0),
    ("int32 x = 1;", b"\x00\x01", "not_protobuf", "", 0),
    ("int32 x = 1;", b"\x0e", "not_protobuf", "", 1),
    ("int32 x = 1;", b"\x53" * 101 + b"\x54" * 101, "too_deep", "", None),
    ("message M { int32 a = 1; } M x = 1;", b"\x0a\x02\x08\xff\x01", "not_protobuf", "x.a", 2),
    ("int32 x = 1;", b"\xff\xff\xff\xff\xff\x01", "not_protobuf", "", 0),
]


@pytest.mark.parametrize(("field", "data", "reason", "path", "byte"), REFUSED)
def test_invalid_bytes_are_refused_with_reason_and_path(
    field: str, data: bytes, reason: str, path: str, byte: int | None
) -> None:
    landed, quarantined, _ = convert(make_reader(f"message R {{ {field} }}"), [b"", data, b""])
    assert landed.num_rows == 2
    (refusal,) = list_refusals(quarantined)
    assert refusal[:2] == (reason, path)
    assert byte is None or refusal[2] == byte


def test_list_above_the_element_limit_is_refused() -> None:
    data = b"\x0a" + add_length(bytes((1 << 22) + 1))
    landed, quarantined, _ = convert(make_reader("message R { repeated int32 x = 1; }"), [b"\x08\x01", data])
    assert landed["x"].to_pylist() == [[1]]
    assert [r[0] for r in list_refusals(quarantined)] == ["too_large"]


def test_missing_required_fields_of_a_whole_block_are_refused() -> None:
    text = 'syntax = "proto2"; message R { repeated L ls = 1; } message L { optional int32 a=1; required int32 b=2; }'
    lacking, short, sound = b"\x0a\x00" * 100_000, b"\x0a\x02\x08\x01", b"\x0a\x02\x10\x05"
    landed, quarantined, _ = convert(make_reader(text, "R"), [lacking, short, sound, short])
    assert landed["ls"].to_pylist() == [[{"a": None, "b": 5}]]
    assert [r[:2] for r in list_refusals(quarantined)] == [("missing", "ls[].b")] * 3
