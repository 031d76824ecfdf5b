"""`.proto` files: imports, refusals, and the text of a compiled schema."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest

from sluice.pipelines.records.protobuf.compiling import compile_schema
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader, as_file, compile_registered, from_file
from sluice.pipelines.records.protobuf.schema import read_files, read_message, write_text
from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.records.rows.wire_format import PROTOBUF, RegisteredSchema, WireFormat
from sluice.pipelines.schema.schema import SchemaError
from tests.pipelines.records.protobuf.rows import (
    NOWHERE,
    add_syntax,
    convert_rows,
    make_message_class,
    make_reader,
    read_by_google,
)

MONEY = 'syntax = "proto3"; package acme.common; message Money { int64 units = 1; }'
ORDER = """syntax = "proto3"; package acme;
import "acme/common/money.proto";
message Order { acme.common.Money total = 1; }"""
COLUMNS = {"total": "struct<units:int64 not null>"}


def test_file_is_read_with_imports_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "acme/common").mkdir(parents=True)
    (tmp_path / "acme/common/money.proto").write_text(MONEY)
    reader = ProtobufReader(from_file(ORDER, tmp_path, ""), WireFormat.BARE)
    assert reader.columns.texts() == COLUMNS
    assert pickle.loads(pickle.dumps(reader)) == reader
    assert ProtobufReader(from_file(reader.texts[-1], NOWHERE, ""), WireFormat.BARE).fingerprint == reader.fingerprint


def test_comments_do_not_change_the_fingerprint() -> None:
    a, b = make_reader("message R { int32 x = 1; }"), make_reader("// more\nmessage R { int32 x = 1; }  // words")
    assert a.fingerprint == b.fingerprint != make_reader("message R { int32 x = 2; }").fingerprint


@pytest.mark.parametrize("packed", [(), (0,), (1,), (0, 1)])
def test_registry_schema_is_read_as_text_or_compiled_with_references(packed: tuple[int, ...]) -> None:
    files = compile_schema((MONEY, ORDER), ("acme/common/money.proto",)).file
    texts = [MONEY, ORDER]
    for i in packed:
        texts[i] = base64.b64encode(files[i].SerializeToString()).decode()
    registered = RegisteredSchema(7, PROTOBUF, tuple(texts), "s", 1, ("acme/common/money.proto",))
    assert [m.name for m in read_files(compile_registered(registered).texts[-1])[0].file[-1].message_type] == ["Order"]
    reader = ProtobufReader(from_file(as_file(registered), NOWHERE, "acme.Order"), WireFormat.BARE)
    assert reader.columns.texts() == COLUMNS


def test_registry_schema_without_references_stays_text() -> None:
    assert as_file(RegisteredSchema(7, PROTOBUF, (MONEY,))) == MONEY


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("message", "compile: line 2, column 8: Expected message name"),
        ('import "nope.proto"; message R { int32 x = 1; }', "nope.proto: File not found"),
        ('import "/etc/passwd"; message R { int32 x = 1; }', "/etc/passwd: File not found"),
        ('import "../../etc/passwd"; message R { int32 x = 1; }', "not allowed"),
        ("message R { R x = 1; }", "R holds itself"),
        ("message R { S x = 1; } message S { repeated R y = 1; }", "R holds itself"),
        ("message R {}", "without fields"),
        ("enum E { A = 0; }", "has no message"),
        ("message R { int32 x = 1; } message S { int32 x = 1; }", "several messages: name one"),
        ("message R { int32 x = 0; }", "does not compile"),
    ],
)
def test_invalid_proto_files_are_refused(text: str, message: str) -> None:
    name = "R" if text.startswith("message R { S") else ""
    with pytest.raises(UnusableSchema) as caught:
        make_reader(text, name)
    assert message in str(caught.value)


def test_message_that_doubles_with_each_level_is_refused() -> None:
    levels = [f"message M{i} {{ M{i + 1} a = 1; M{i + 1} b = 2; }}" for i in range(30)]
    with pytest.raises(UnusableSchema, match="more than"):
        make_reader("\n".join([*levels, "message M30 { int32 x = 1; }"]), "M0")


def test_invalid_column_names_are_refused() -> None:
    with pytest.raises(SchemaError, match="case"):
        make_reader("message R { int32 x = 1; int32 X = 2; }")
    with pytest.raises(SchemaError, match="kafka_"):
        make_reader("message R { int32 kafka_key = 1; }")


@pytest.mark.parametrize("text", ["{", '{"files": 3}', '{"files": ""}', '{"files": "AAAA"}', '{"message": "R"}'])
def test_invalid_compiled_texts_are_refused(text: str) -> None:
    with pytest.raises(UnusableSchema):
        read_message(text)


def test_nested_message_is_selected_with_and_without_package_name() -> None:
    text = 'syntax = "proto3"; package p.q; message A { message B { int32 x = 1; } }'
    for name in ("p.q.A.B", "A.B"):
        assert make_reader(text, name).message.name == "p.q.A.B"
    with pytest.raises(UnusableSchema, match="has no message B, which"):
        make_reader(text, "B")


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.proto").write_text(add_syntax("message S { int32 x = 1; }"))
    (tmp_path / "in/s.proto").symlink_to(tmp_path / "secret.proto")
    with pytest.raises(UnusableSchema, match="File not found"):
        from_file(add_syntax('import "s.proto"; message R { S x = 1; }'), tmp_path / "in", "")


def test_text_and_message_name_round_trip() -> None:
    files = compile_schema((MONEY,), ())
    assert read_files(write_text(files, "M"))[1] == "M"


MAPS = """{begin}
package shop;
import "google/protobuf/struct.proto";
message Line {{ {opt}string sku = 1; }}
message Order {{
  {opt}string id = 1;
  map<string, int32> counts = 2;
  map<int64, Line> lines = 3;
  map<string, google.protobuf.Value> more = 4;
  {opt}In in = 5;
  message In {{ map<string, Line> deep_ones = 1; }}
}}
"""
ENTRIES = """{begin}
package shop;
import "google/protobuf/struct.proto";
message Line {{ {opt}string sku = 1; }}
message Order {{
  {opt}string id = 1;
  repeated .shop.Order.CountsEntry counts = 2;
  repeated .shop.Order.LinesEntry lines = 3;
  repeated .shop.Order.MoreEntry more = 4;
  {opt}.shop.Order.In in = 5;
  message CountsEntry {{
    option map_entry = true;

    {opt}string key = 1;
    {opt}int32 value = 2;
  }}
  message LinesEntry {{ option  map_entry=true ; {opt}int64 key = 1; {opt}.shop.Line value = 2; }}
  message MoreEntry {{ option map_entry = true; {opt}string key = 1; {opt}.google.protobuf.Value value = 2; }}
  message In {{
    repeated .shop.Order.In.DeepOnesEntry deep_ones = 1;
    message DeepOnesEntry {{ option map_entry = true; {opt}string key = 1; {opt}.shop.Line value = 2; }}
  }}
}}
"""


@pytest.mark.parametrize(
    ("begin", "opt"),
    [('syntax = "proto3";', ""), ('syntax = "proto2";', "optional "), ('edition = "2023";', "")],
)
def test_explicit_map_entry_messages_are_read_as_maps(begin: str, opt: str) -> None:
    """Schemas as Apicurio's Java serializer registers them. Google's files, registered with them, are ignored."""
    name = "google/protobuf/struct.proto"
    texts = ("message Struct { option map_entry = true; }", ENTRIES.format(begin=begin, opt=opt))
    registered = RegisteredSchema(1, PROTOBUF, texts, names=(name,))
    reader = ProtobufReader(
        (write_text(read_files(compile_registered(registered).texts[-1])[0], "shop.Order"),), WireFormat.APICURIO3
    )
    expected = make_reader(MAPS.format(begin=begin, opt=opt), "shop.Order", WireFormat.APICURIO3)
    assert reader.message == expected.message
    assert reader.fingerprint == expected.fingerprint
    kind, other = make_message_class(reader.texts[-1]), make_message_class(expected.texts[-1])
    record = kind(id="a", counts={"x": 1}, lines={5: {"sku": "q"}}).SerializeToString()
    assert convert_rows(ProtobufReader(reader.texts, WireFormat.BARE), [record]) == [read_by_google(other, record)]
    assert as_file(registered) == texts[-1].rstrip()
    assert compile_registered(compile_registered(registered)) == compile_registered(registered)
