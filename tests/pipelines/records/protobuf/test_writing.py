"""Rows as Protobuf again: Google's library reads from it what it read from the record that landed."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.records.protobuf.encode import encode_rows
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader, from_file
from sluice.pipelines.records.rows.row_items import NotWritable
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import PROTOBUF, RegisteredSchema, WireFormat
from tests.examples import examples
from tests.pipelines.records.json.rows import FIRST
from tests.pipelines.records.protobuf import wild
from tests.pipelines.records.protobuf.rows import (
    NOWHERE,
    convert,
    message_class,
    read_by_google,
    reader_of,
    rows_of,
    whole,
    wild_message,
)


def again(reader: ProtobufReader, values: list[bytes]) -> dict[int, bytes]:
    """What is written of the records that landed, by their place."""
    landed, _, _ = convert(reader, values)
    batches = landed.unify_dictionaries().combine_chunks().to_batches()
    if not batches:
        return {}
    places = [n - FIRST for n in landed.column("kafka_offset").to_pylist()]
    return dict(zip(places, encode_rows(batches[0], reader.message), strict=True))


def has(d: Any, *what: str) -> bool:
    """Whether a described message holds one of these, or a map."""
    return any(
        f.message_type is not None
        and (f.message_type.GetOptions().map_entry or f.message_type.name in what or has(f.message_type, *what))
        for f in d.fields
    )


@settings(max_examples=examples(150))
@given(st.integers(0, 1 << 40))
def test_any_record_is_read_as_before(seed: int) -> None:
    rnd = Random(seed)
    reader, kind = wild_message(rnd)
    values = [wild.record(rnd, kind.DESCRIPTOR) for _ in range(30)]
    made = again(reader, values)
    landed, landed_again = rows_of(reader, values), rows_of(reader, list(made.values()))
    assert repr(landed_again) == repr([landed[n] for n in made])
    for n, data in made.items():
        assert read_by_google(kind, data) == read_by_google(kind, values[n]), (seed, values[n])
        if not has(kind.DESCRIPTOR, "Timestamp", "Struct", "Value", "ListValue"):
            google = kind.FromString(values[n])
            google.DiscardUnknownFields()
            assert data == google.SerializeToString(deterministic=True), (seed, values[n])


def test_presence_groups_packing_and_times_are_written_as_google_does() -> None:
    text = """syntax = "proto2"; import "google/protobuf/timestamp.proto"; import "google/protobuf/struct.proto";
    import "google/protobuf/wrappers.proto"; import "google/protobuf/empty.proto";
    message M {
      required int32 id = 7;
      optional group Inner = 3 { optional string a = 1; repeated group Deep = 2 { optional bool b = 1; } }
      repeated sint64 loose = 2;
      repeated sint64 tight = 1 [packed = true];
      optional google.protobuf.Timestamp at = 4;
      optional google.protobuf.Value any = 5;
      optional google.protobuf.Int32Value wrapped = 6;
      optional google.protobuf.Empty empty = 8;
      optional string text = 9 [default = "x"];
    }"""
    reader, kind = reader_of(text, "M"), message_class(from_file(whole(text), NOWHERE, "M")[0])
    one = kind(id=0, loose=[1, -1, -(1 << 63)], tight=[-64, 64], text="")
    one.inner.a = ""
    one.inner.deep.add(b=False)
    one.at.seconds, one.at.nanos = -1, 999_999_000
    one.any.null_value = 0
    one.wrapped.value = 0
    one.empty.SetInParent()
    two = kind(id=-1)
    two.at.seconds = 0
    two.at.SetInParent()
    two.any.list_value.values.add().number_value = 1.5
    values = [m.SerializeToString(deterministic=True) for m in (one, two)]
    assert list(again(reader, values).values()) == values


def rows(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_what_the_message_has_no_room_for_is_named() -> None:
    old = 'syntax = "proto2"; message M { required string id = 1; optional int32 n = 2; '
    reader = reader_of(old + "oneof c { int32 a = 3; string b = 4; } optional E e = 5; } enum E { NO = 0; }", "M")
    assert encode_rows(rows(id=["x", "y"]), reader.message) == [b"\x0a\x01x", b"\x0a\x01y"]
    refused = {
        "id: it is null": rows(id=["x", None]),
        "id: it is null, and the schema requires it": rows(id=[None, "y"]),
        "c: several of its members": rows(id=["x", "y"], a=[None, 1], b=["", ""]),
        "e: it is no name of the schema's enum": rows(id=["x", "y"], e=["NO", "OLD"]),
    }
    for told, given_ in refused.items():
        with pytest.raises(NotWritable, match=told) as raised:
            encode_rows(given_, reader.message)
        assert raised.value.item == (0 if given_.column("id")[0].as_py() is None else 1)
    with pytest.raises(NotWritable, match="id: it is null, and the schema requires it"):
        encode_rows(rows(n=[1]), reader.message)


def test_a_record_names_its_message() -> None:
    text = "package p; message A { int32 x = 1; } message C { int32 x = 1; message D { string y = 1; } }"
    told = {"p.A": (b"\0", b"\x03\x0a\x01A"), "p.C": (b"\x02\x02", b"\x03\x0a\x01C")}
    told["p.C.D"] = (b"\x04\x02\x00", b"\x03\x0a\x01D")
    for name, (indexes, reference) in told.items():
        assert reader_of(text, name, WireFormat.CONFLUENT).naming == indexes
        assert reader_of(text, name, WireFormat.APICURIO).naming == reference
        assert reader_of(text, name).naming == b""


def test_a_registered_schema_is_the_feeds_where_rows_and_naming_are_the_same() -> None:
    text = whole("package p; message A { int32 x = 1; } message B { int32 x = 1; }")
    reader = reader_of(text, "p.B", WireFormat.CONFLUENT)
    alike = {
        text: True,
        text.replace("message A {", "// which comes first\nmessage A { string y = 2; "): True,
        text.replace("message A {", "message Z { int32 x = 1; } message A {"): False,
        text.replace("message B { int32", "message B { sint32"): False,
    }
    for other, same in alike.items():
        assert reader.is_of(RegisteredSchema(1, PROTOBUF, (other,))) is same
    with pytest.raises(UnusableSchema):
        reader.is_of(RegisteredSchema(1, PROTOBUF, (whole("message A { int32 x = 1; }"),)))
