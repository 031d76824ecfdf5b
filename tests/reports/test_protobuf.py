"""Reports about Protobuf: unusual but valid bytes, presence, well-known types, numbers of messages.

Bytes go through a feed. If Google's library can read them, it must read the same values.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sluice.pipelines.records.protobuf.reader_schema import from_file
from sluice.pipelines.records.rows.wire_format import PROTOBUF
from sluice.testing import LandedMessages
from sluice.testing.lake import MemoryLake
from tests.pipelines.records.protobuf.rows import (
    NOWHERE,
    add_syntax,
    make_message_class,
    make_reader,
    normalize,
    read_by_google,
)
from tests.pipelines.records.protobuf.wild import add_length, encode_varint
from tests.reports.world import keep_schema, land_values, list_reasons

FEED = "topics: orders\nstart: earliest\nformat: protobuf\nschema_file: order.proto\n"
REGISTRY = "registry: {url: 'http://127.0.0.1:9'}\n"


def land(root: Path, schema: str, *values: bytes | None, message: str = "") -> LandedMessages:
    """Land records without a registry."""
    return land_values(root, _make_feed("", message), values, order__proto=add_syntax(schema))


def land_registered(root: Path, schema: str, *values: bytes | None, message: str = "") -> LandedMessages:
    """Land records with the number of schema 1, which is the feed's."""
    lake = MemoryLake()
    keep_schema(lake, 1, PROTOBUF, *from_file(add_syntax(schema), NOWHERE, ""))
    return land_values(root, _make_feed(REGISTRY, message), values, lake, order__proto=add_syntax(schema))


def _make_feed(registry: str, message: str) -> str:
    return FEED + registry + (f"message: {message}\n" if message else "")


def encode_tag(number: int, wire: int) -> bytes:
    return encode_varint(number << 3 | wire)


def encode_text(number: int, value: bytes | str) -> bytes:
    return encode_tag(number, 2) + add_length(value.encode() if isinstance(value, str) else value)


def encode_integer(number: int, value: int) -> bytes:
    return encode_tag(number, 0) + encode_varint(value)


IMPORTS = "".join(f'import "google/protobuf/{n}.proto";\n' for n in ("timestamp", "duration", "wrappers", "struct"))
INNER = "message Inner { string key = 1; repeated string values = 2; }\n"


class Case(NamedTuple):
    schema: str
    data: bytes
    row: dict[str, Any]
    google: bool = True
    """True if Google's library reads the same; if not, the report has the reason."""


CASES: dict[str, Case] = {
    "bufbuild/protobuf-es#1542": Case(
        INNER + "message R { map<string, Inner> m = 1; }",
        encode_text(1, encode_text(1, "a") + encode_text(9, "unknown") + encode_text(2, encode_text(1, "k"))),
        {"m": [("a", {"key": "k", "values": []})]},
        google=False,  # Google's Python library drops the entry, its C++ and Java libraries do not
    ),
    "protobufjs/protobuf.js#2364": Case(
        INNER + "message R { map<string, Inner> m = 1; }",
        encode_text(
            1, encode_text(1, "a") + encode_text(2, encode_text(1, "merged")) + encode_text(2, encode_text(2, "x"))
        ),
        {"m": [("a", {"key": "merged", "values": ["x"]})]},
    ),
    "protobufjs/protobuf.js#960": Case(
        "message R { map<string, string> m = 6; }", encode_text(6, encode_text(1, "testKey")), {"m": [("testKey", "")]}
    ),
    "brown/protobuf#18": Case(
        "enum E { A = 0; B = 1; } message R { repeated E x = 1; }",
        encode_text(1, b"\0\1") + encode_integer(1, 1),
        {"x": ["A", "B", "B"]},
    ),
    "eriktim/elm-protocol-buffers#1": Case(
        "message R { repeated int32 x = 1; }",
        encode_integer(1, 5) + encode_integer(1, 6) + encode_text(1, b"\7"),
        {"x": [5, 6, 7]},
    ),
    "nanopb/nanopb#23": Case(
        "message R { repeated int32 x = 1; bytes y = 2; }",
        encode_text(1, b"\1\2") + encode_text(2, b"\xff"),
        {"x": [1, 2], "y": b"\xff"},
    ),
    "square/wire#541": Case(
        "message I { repeated int32 n = 1; int32 after = 2; } message R { I i = 1; int32 z = 2; }",
        encode_text(1, encode_text(1, b"") + encode_integer(2, 3)) + encode_integer(2, 4),
        {"i": {"n": [], "after": 3}, "z": 4},
    ),
    "elixir-protobuf/protobuf#111": Case(
        "enum E { option allow_alias = true; NONE = 0; A = 10; A_AGAIN = 10; } message R { E x = 1; }",
        encode_integer(1, 10),
        {"x": "A"},
    ),
    "blueapron/kafka-connect-protobuf-converter#31": Case(
        IMPORTS + "message R { google.protobuf.Timestamp x = 1; google.protobuf.Timestamp y = 2; }",
        encode_text(2, b""),
        {"x": None, "y": datetime(1970, 1, 1, tzinfo=UTC)},
    ),
    "confluentinc/schema-registry#1752": Case(
        IMPORTS
        + "message R { google.protobuf.Int32Value x = 1; google.protobuf.Int32Value y = 2; optional int32 z = 3; }",
        encode_text(1, b"") + encode_integer(3, 0),
        {"x": 0, "y": None, "z": 0},
    ),
    "trinodb/trino#16836": Case(
        "message L { string a = 1; } message R { oneof c { int32 x = 1; string y = 2; L z = 3; } }",
        encode_integer(1, 7) + encode_text(2, "last") + encode_text(3, b""),
        {"x": None, "y": None, "z": {"a": ""}},
    ),
    "confluentinc/schema-registry#1304": Case(
        "message R { string a = 1; int32 b = 2; }", b"", {"a": "", "b": 0, "kafka_tombstone": False}
    ),
    "gabledata/recap#269": Case(
        IMPORTS + "message R { google.protobuf.Duration x = 1; }",
        encode_text(1, encode_integer(1, (1 << 64) - 1) + encode_integer(2, (1 << 64) - 500_000_000)),
        {"x": {"seconds": -1, "nanos": -500_000_000}},
    ),
}


@pytest.mark.parametrize("report", CASES)
def test_bytes_decode_as_by_google_protobuf(report: str, tmp_path: Path) -> None:
    case = CASES[report]
    landed = land(tmp_path, case.schema, case.data, message="R" if "message R" in case.schema else "")
    assert landed.quarantined["detail"].to_pylist() == []
    (row,) = landed.rows.to_pylist()
    assert {name: row[name] for name in case.row} == case.row
    if case.google:
        reader = make_reader(case.schema, "R")
        expected = read_by_google(make_message_class(reader.texts[-1]), case.data)
        assert expected is not None
        assert {f.name: normalize(as_micros(row[f.name]), f.type) for f in reader.columns.fields} == expected


def as_micros(value: Any) -> Any:
    """Returns a time as microseconds since 1970, other values unchanged."""
    return round(value.timestamp() * 1_000_000) if isinstance(value, datetime) else value


NESTED = (
    "message A { string a = 1; }\nmessage B { string b = 1; message C { string c = 1; } message D { string d = 1; } }\n"
)
"""In this file A is message 0, B is 1, B.C is 1, 0 and B.D is 1, 1."""
NUMBERS: dict[str, tuple[str, bytes, str]] = {
    "kafkajs/confluent-schema-registry#152": ("A", b"\x02\x00" + encode_text(1, "v"), ""),
    "redpanda-data/console#2065": ("A", b"\x00" + encode_text(1, "v"), ""),
    "DataDog/integrations-core#22020": ("B.D", b"\x04\x02\x02" + encode_text(1, "v"), ""),
    "kafkajs/confluent-schema-registry#248": ("B", b"\x02\x02" + encode_text(1, "v"), ""),
    "confluentinc/confluent-kafka-dotnet#2505": ("B.C", b"\x04\x00\x02" + encode_text(1, "v"), "not_protobuf"),
    "confluentinc/confluent-kafka-python#2271": ("B", b"\x02\x01" + encode_text(1, "v"), "not_protobuf"),
    "confluentinc/confluent-kafka-javascript#481": ("A", encode_text(1, "v"), "not_protobuf"),
    "ClickHouse/ClickHouse#58928": ("A", b"\x00" + add_length(encode_text(1, "v")), "not_protobuf"),
}


@pytest.mark.parametrize("report", NUMBERS)
def test_message_indexes_are_read_or_refused(report: str, tmp_path: Path) -> None:
    message, data, reason = NUMBERS[report]
    good = {"A": b"\0", "B": b"\2\2", "B.C": b"\4\2\0", "B.D": b"\4\2\2"}[message] + encode_text(1, "good")
    values = [b"\0" + struct.pack(">I", 1) + d for d in (good, data, good)]
    landed = land_registered(tmp_path, NESTED, *values, message=message)
    column = message[-1].lower()
    if not reason:
        assert landed.rows[column].to_pylist() == ["good", "v", "good"]
        return
    assert landed.rows[column].to_pylist() == ["good", "good"]
    assert list_reasons(landed) == [reason]
