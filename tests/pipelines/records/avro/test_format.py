"""Records of several writers, and refused records: the reason, the field, the byte and the id of the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.avro import programs
from sluice.pipelines.records.avro.reader_schema import AvroReader, merge_texts
from sluice.pipelines.records.avro.schema import AvroSchemaError, parse
from sluice.pipelines.records.columns import nodes
from sluice.pipelines.records.rows.wire_format import WireFormat
from sluice.pipelines.schema.schema import SchemaError, parse_schema
from tests.pipelines.records.avro.rows import Schemas, convert, encode, make_reader
from tests.pipelines.records.json.rows import FIRST

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "string"}, {"name": "items", "type": ["null", "int"], "default": None}],
}
NEWER = ORDER | {"fields": [*ORDER["fields"], {"name": "country", "type": "string", "default": "DE"}]}
OTHER = {"type": "record", "name": "Customer", "fields": [{"name": "id", "type": "string"}]}


def make_schema(kind: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]}


def test_records_of_several_writers_land_in_one_table() -> None:
    records = [
        encode(ORDER, {"id": "a", "items": 1}, 1),
        encode(NEWER, {"id": "b", "items": None, "country": "FR"}, 2),
        None,
        encode(ORDER, {"id": "c", "items": 3}, 1),
    ]
    schemas = Schemas({1: ORDER, 2: NEWER})
    landed, quarantined, drift = convert(make_reader(NEWER), records, schemas)
    assert quarantined is None
    assert landed.select(["id", "items", "country"]).to_pylist() == [
        {"id": "a", "items": 1, "country": "DE"},
        {"id": "b", "items": None, "country": "FR"},
        {"id": None, "items": None, "country": None},
        {"id": "c", "items": 3, "country": "DE"},
    ]
    assert landed["kafka_tombstone"].to_pylist() == [False, False, True, False]
    assert schemas.requests == [1, 2]
    assert drift == []


def test_fields_only_in_the_writer_schema_are_counted_as_drift() -> None:
    records = [encode(ORDER, {"id": "a", "items": 1}, 1), encode(NEWER, {"id": "b", "items": 2, "country": "FR"}, 2)]
    schemas = Schemas({1: ORDER, 2: NEWER})
    landed, quarantined, drift = convert(make_reader(ORDER), records, schemas)
    assert (quarantined, landed.num_rows) == (None, 2)
    assert [(d.kind, d.field, d.records, d.first, d.type) for d in drift] == [
        (DriftKind.NEW, "country", 1, 1001, "string")
    ]
    _, quarantined, _ = convert(make_reader(ORDER), records, schemas, closed=True)
    assert quarantined is not None
    assert quarantined.select(["offset", "reason"]).to_pylist() == [{"offset": 1001, "reason": "unknown_field"}]


def _make_record(kind: Any, data: bytes) -> tuple[dict[str, Any], bytes]:
    return make_schema(kind), b"\0\0\0\0\x01" + data


REFUSED = [
    (*_make_record("int", b""), "not_avro", "x", 5),
    (*_make_record("int", b"\x02\x00"), "not_avro", None, 6),
    (*_make_record("int", b"\xff\xff\xff\xff\x1f"), "not_avro", "x", 5),
    (*_make_record("long", b"\xff" * 9 + b"\x02"), "not_avro", "x", 5),
    (*_make_record("long", b"\xff" * 12), "not_avro", "x", 5),
    (*_make_record("boolean", b"\x02"), "not_avro", "x", 5),
    (*_make_record("string", b"\x04a"), "not_avro", "x", 5),
    (*_make_record("string", b"\x01"), "not_avro", "x", 5),
    (*_make_record("string", b"\x06a\xffb"), "invalid_utf8", "x", 7),
    (*_make_record("bytes", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "not_avro", "x", 5),
    (*_make_record("double", b"1234567"), "not_avro", "x", 5),
    (*_make_record(["null", "int"], b"\x04"), "not_avro", "x", 5),
    (*_make_record({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02"), "not_avro", "x", 5),
    (*_make_record({"type": "array", "items": "int"}, b"\x80\x80\x80\x80\x10"), "not_avro", "x", 5),
    (*_make_record({"type": "array", "items": "int"}, b"\x01\x02\x02"), "not_avro", "x", 8),
    (*_make_record({"type": "array", "items": "null"}, b"\x80\x80\x80\x80\x10"), "too_large", "x", 5),
    (*_make_record({"type": "map", "values": "int"}, b"\x04\x02a\x02\x02a\x04\x00"), "duplicate", "x", None),
    (
        *_make_record({"type": "bytes", "logicalType": "decimal", "precision": 2}, b"\x02\x64"),
        "out_of_range",
        "x",
        None,
    ),
    (*_make_record({"type": "int", "logicalType": "date"}, b"\xfe\xff\xff\xff\x0f"), "out_of_range", "x", None),
]


@pytest.mark.parametrize(("schema", "record", "reason", "field", "position"), REFUSED)
def test_invalid_bytes_are_refused_with_reason_and_position(
    schema: Any, record: bytes, reason: str, field: str | None, position: int | None
) -> None:
    _, quarantined, _ = convert(make_reader(schema), [record], Schemas({1: schema}))
    assert quarantined is not None
    (row,) = quarantined.to_pylist()
    column = row["field"].rstrip("[]{}") if row["field"] else None
    assert (row["reason"], column, row["byte"], row["value"]) == (reason, field, position, record)
    assert "schema 1" in row["detail"]


def test_invalid_headers_and_unusable_schemas_are_refused() -> None:
    good = encode(ORDER, {"id": "a", "items": 1}, 1)
    records = [b"", b"\0\0\0", b"\x01" + good[1:], encode(ORDER, {"id": "a", "items": 1}, 9), good]
    records += [encode(OTHER, {"id": "x"}, 3), encode("string", "x", 4)]
    _, quarantined, _ = convert(
        make_reader(ORDER), records, Schemas({1: ORDER, 3: OTHER, 4: "string", 5: {"type": "bad"}})
    )
    assert quarantined is not None
    refusals = [(r["offset"] - 1000, r["reason"], r["byte"]) for r in quarantined.to_pylist()]
    assert refusals == [
        (0, "not_avro", 0),
        (1, "not_avro", 0),
        (2, "not_avro", 0),
        (3, "unknown_schema", 1),
        (5, "incompatible", 1),
        (6, "incompatible", 1),
    ]
    details = quarantined["detail"].to_pylist()
    assert details[3].endswith("(schema 9)")
    assert details[4].endswith("feed's: the record: record Customer was written, and record Order is read (schema 3)")


def test_bare_records_are_read_by_the_schema_file_without_registry() -> None:
    reader = make_reader(ORDER, WireFormat.BARE)
    landed, quarantined, _ = convert(reader, [encode(ORDER, {"id": "a", "items": 1}, None), b"\x02"])
    assert landed["id"].to_pylist() == ["a"]
    assert quarantined is not None
    assert quarantined["reason"].to_pylist() == ["not_avro"]


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}


@pytest.mark.parametrize(("written", "read"), [("string", DECIMAL), (DECIMAL, "string"), ("string", ["null", DECIMAL])])
def test_strings_and_decimals_are_not_converted_to_each_other(written: Any, read: Any) -> None:
    """Avro promotes string to bytes and back, even to the bytes of a decimal."""
    value: Any = "12.50" if written == "string" else b"A"  # 0.65, by its bytes
    record = encode(make_schema("string" if written == "string" else "bytes"), {"x": value})
    landed, quarantined, _ = convert(make_reader(make_schema(read)), [record], Schemas({1: make_schema(written)}))
    assert quarantined is not None
    assert (landed.num_rows, quarantined["reason"].to_pylist()) == (0, ["incompatible"])


def test_only_the_record_with_an_incompatible_branch_is_refused() -> None:
    writer = make_schema(["int", "string"])
    records = [encode(writer, {"x": 1}), encode(writer, {"x": "a"})]
    landed, quarantined, drift = convert(make_reader(make_schema("int")), records, Schemas({1: writer}))
    assert landed["x"].to_pylist() == [1]
    assert quarantined is not None
    assert quarantined.select(["reason", "field"]).to_pylist() == [{"reason": "incompatible", "field": "x"}]
    assert [(d.kind, d.field) for d in drift] == [(DriftKind.WRONG, "x")]


def test_oversized_schema_in_a_branch_is_refused_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not refused as a value of another branch, even after all other branches were compiled to the limit."""
    monkeypatch.setattr(programs, "MOST_OPS", 200)
    long = make_schema(["int", *({"type": "fixed", "name": f"F{size}", "size": size} for size in range(1, 200))])
    writer = {"type": "record", "name": "W", "fields": [{"name": "r", "type": ["null", long]}]}
    reader = make_reader(
        {"type": "record", "name": "W", "fields": [{"name": "r", "type": ["null", make_schema("int")]}]}
    )
    values = [encode(writer, {"r": {"x": 1}}), encode(writer, {"r": None})]
    _, quarantined, _ = convert(reader, values, Schemas({1: writer}))
    assert quarantined is not None
    assert quarantined["reason"].to_pylist() == ["incompatible"] * 2
    assert all("too many operations" in detail for detail in quarantined["detail"].to_pylist())


TREE = {"type": "record", "name": "Tree", "fields": [{"name": "left", "type": ["null", "Tree"]}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": "Y"}]}', "nothing defines: Y"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": ["null", "R"]}]}', "R is recursive"),
        ('{"type": "record", "name": "R", "fields": []}', ""),
        ('{"type": "enum", "name": "E", "symbols": ["a b"]}', "symbols"),
        ('{"type": "record", "name": "1", "fields": []}', "name"),
    ],
)
def test_invalid_schemas_are_refused(text: str, message: str) -> None:
    with pytest.raises((AvroSchemaError, SchemaError)) as error:
        AvroReader((text,), WireFormat.BARE)
    assert message in str(error.value)


def test_a_schema_bomb_is_refused() -> None:
    """Forty types, each with two fields of the type before: 2^40 columns."""
    texts = ['{"type": "record", "name": "A0", "fields": [{"name": "x", "type": "int"}]}']
    for i in range(1, 40):
        fields = f'[{{"name": "a", "type": "A{i - 1}"}}, {{"name": "b", "type": "A{i - 1}"}}]'
        texts.append(f'{{"type": "record", "name": "A{i}", "fields": {fields}}}')
    with pytest.raises(AvroSchemaError, match="more than"):
        AvroReader(tuple(texts), WireFormat.BARE)


def test_record_with_too_many_elements_is_refused_and_neighbours_land(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MOST_SLOTS", 30_000)
    schema = make_schema({"type": "array", "items": "int"})
    short, long = (encode(schema, {"x": [1] * n}, None) for n in (30_000, 30_001))
    landed, quarantined, _ = convert(make_reader(schema, WireFormat.BARE), [short, short, long, short])
    assert landed["kafka_offset"].to_pylist() == [FIRST, FIRST + 1, FIRST + 3]
    assert quarantined is not None
    assert quarantined.select(["offset", "reason", "field"]).to_pylist() == [
        {"offset": FIRST + 2, "reason": "too_large", "field": "x"}
    ]


def test_columns_are_added_to_a_record_wrapped_in_a_type_object() -> None:
    record = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
    columns = {"a": "int32 not null", "b": "string"}
    assert make_reader({"type": record}).grown(parse_schema(columns)).columns.texts() == columns


def test_merged_schema_text_equals_schema_with_references() -> None:
    """Java writes an empty namespace for a type without one inside a type with one."""
    plain = {"name": "T", "namespace": "", "type": "enum", "symbols": ["A"]}
    inside = {"type": "record", "name": "T", "namespace": "a", "fields": [{"name": "x", "type": plain}]}
    refers = {"type": "record", "name": "a.S", "fields": [{"name": n, "type": "T"} for n in "xy"]}
    texts = [json.dumps(inside), json.dumps(refers)]
    assert parse([merge_texts(texts)]) == parse(texts)
    assert parse(texts).fields[0].type.name == "a.T"
