"""Rows encoded as Protobuf again: Google's library reads from them the values of the original records."""

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
from tests.examples import scale_examples
from tests.pipelines.records.json.rows import FIRST
from tests.pipelines.records.protobuf import wild
from tests.pipelines.records.protobuf.rows import (
    NOWHERE,
    add_syntax,
    convert,
    convert_rows,
    make_message_class,
    make_reader,
    make_wild_message,
    read_by_google,
)


def write_again(reader: ProtobufReader, values: list[bytes]) -> dict[int, bytes]:
    """Encode the landed records again, by their position in `values`."""
    landed, _, _ = convert(reader, values)
    batches = landed.unify_dictionaries().combine_chunks().to_batches()
    if not batches:
        return {}
    positions = [n - FIRST for n in landed.column("kafka_offset").to_pylist()]
    return dict(zip(positions, encode_rows(batches[0], reader.message), strict=True))


def has_type(d: Any, *names: str) -> bool:
    """Return true if a message descriptor contains one of these types, or a map."""
    return any(
        f.message_type is not None
        and (f.message_type.GetOptions().map_entry or f.message_type.name in names or has_type(f.message_type, *names))
        for f in d.fields
    )


@settings(max_examples=scale_examples(150))
@given(st.integers(0, 1 << 40))
def test_rewritten_record_is_read_as_the_original(seed: int) -> None:
    rnd = Random(seed)
    reader, kind = make_wild_message(rnd)
    values = [wild.make_record(rnd, kind.DESCRIPTOR) for _ in range(30)]
    rewritten = write_again(reader, values)
    landed, landed_again = convert_rows(reader, values), convert_rows(reader, list(rewritten.values()))
    assert repr(landed_again) == repr([landed[n] for n in rewritten])
    for n, data in rewritten.items():
        assert read_by_google(kind, data) == read_by_google(kind, values[n]), (seed, values[n])
        if not has_type(kind.DESCRIPTOR, "Timestamp", "Struct", "Value", "ListValue"):
            google = kind.FromString(values[n])
            google.DiscardUnknownFields()
            assert data == google.SerializeToString(deterministic=True), (seed, values[n])


def test_presence_groups_packing_and_times_match_google_encoding() -> None:
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
    reader, kind = make_reader(text, "M"), make_message_class(from_file(add_syntax(text), NOWHERE, "M")[0])
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
    assert list(write_again(reader, values).values()) == values


def make_rows(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_error_names_field_that_does_not_fit_the_message() -> None:
    old = 'syntax = "proto2"; message M { required string id = 1; optional int32 n = 2; '
    reader = make_reader(old + "oneof c { int32 a = 3; string b = 4; } optional E e = 5; } enum E { NO = 0; }", "M")
    assert encode_rows(make_rows(id=["x", "y"]), reader.message) == [b"\x0a\x01x", b"\x0a\x01y"]
    refused = {
        "id: it is null": make_rows(id=["x", None]),
        "id: it is null, and the schema requires it": make_rows(id=[None, "y"]),
        "c: several of its members": make_rows(id=["x", "y"], a=[None, 1], b=["", ""]),
        "e: it is no name of the schema's enum": make_rows(id=["x", "y"], e=["NO", "OLD"]),
    }
    for message, batch in refused.items():
        with pytest.raises(NotWritable, match=message) as raised:
            encode_rows(batch, reader.message)
        assert raised.value.item == (0 if batch.column("id")[0].as_py() is None else 1)
    with pytest.raises(NotWritable, match="id: it is null, and the schema requires it"):
        encode_rows(make_rows(n=[1]), reader.message)


def test_record_prefix_names_the_message_type() -> None:
    text = "package p; message A { int32 x = 1; } message C { int32 x = 1; message D { string y = 1; } }"
    references = {"p.A": (b"\0", b"\x03\x0a\x01A"), "p.C": (b"\x02\x02", b"\x03\x0a\x01C")}
    references["p.C.D"] = (b"\x04\x02\x00", b"\x03\x0a\x01D")
    for name, (indexes, reference) in references.items():
        assert make_reader(text, name, WireFormat.CONFLUENT).naming == indexes
        assert make_reader(text, name, WireFormat.APICURIO).naming == reference
        assert make_reader(text, name).naming == b""


def test_registered_schema_matches_feed_if_rows_and_prefix_are_equal() -> None:
    text = add_syntax("package p; message A { int32 x = 1; } message B { int32 x = 1; }")
    reader = make_reader(text, "p.B", WireFormat.CONFLUENT)
    alike = {
        text: True,
        text.replace("message A {", "// which comes first\nmessage A { string y = 2; "): True,
        text.replace("message A {", "message Z { int32 x = 1; } message A {"): False,
        text.replace("message B { int32", "message B { sint32"): False,
    }
    for other, same in alike.items():
        assert reader.is_of(RegisteredSchema(1, PROTOBUF, (other,))) is same
    with pytest.raises(UnusableSchema):
        reader.is_of(RegisteredSchema(1, PROTOBUF, (add_syntax("message A { int32 x = 1; }"),)))
