"""Chunks of all sizes through the format: rows do not depend on blocks, memory is bounded, and order is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

import pyarrow as pa
import pytest

from sluice.pipelines.feed.changes_section import build_envelope
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.records.columns import nodes
from sluice.pipelines.records.json import typer
from sluice.pipelines.records.json.format import JsonFormat
from sluice.pipelines.records.rows.row_format import REFUSED, landed_schema
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import Schema, parse_schema
from sluice.resources.local.events import Mix, orders
from tests.pipelines.records.json.oracle import judge
from tests.pipelines.records.json.rows import FIRST, by_offset, convert, make_chunk

ORDERS = parse_schema(
    {
        "order_id": "string not null",
        "customer": "string",
        "ts": "timestamp",
        "amount": "decimal(12,2)",
        "currency": "string",
        "items": "int32",
        "country": "string",
        "channel": "string",
        "status": "string",
    }
)
NESTED = parse_schema({"id": "int64", "lines": "list<struct<sku:string, tags:map<string, list<int16>>>>", "b": "bool"})


def make_nested(i: int) -> bytes:
    tags = {f"t{k}": [k, None] for k in range(i % 12)}
    lines = [None if k == 4 else {"sku": f"s{k}" * (k % 3), "tags": tags} for k in range(i % 7)]
    return json.dumps(
        {"id": i, "lines": lines if i % 5 else None, "b": i % 2 == 0, "n": i} if i % 11 else "no"
    ).encode()


@pytest.mark.parametrize("name", ['qu"ote', "back\\slash", 'a much longer qu"ote'])
def test_field_name_with_escapes_matches_only_its_escaped_form(name: str) -> None:
    schema = parse_schema({name: "int8"})
    sound, broken = json.dumps({name: 1}).encode(), f'{{"{name}":1}}'.encode()
    values = [broken, sound, broken, sound, sound, broken]
    landed, quarantined = convert(schema, values)
    assert [r["kafka_offset"] - FIRST for r in landed.to_pylist()] == [1, 3, 4]
    assert [r["offset"] - FIRST for r in quarantined.to_pylist()] == [0, 2, 5]


@pytest.mark.parametrize("schema", [ORDERS, NESTED], ids=["flat", "nested"])
def test_many_blocks_give_the_same_rows_as_single_records(schema: Schema) -> None:
    mixed = [e.value for e in orders(Mix(3, bad=0.05, tombstones=0.02), 14_000, 0, 10**12)]
    values = mixed if schema is ORDERS else [make_nested(i) for i in range(14_000)]
    landed, quarantined = convert(schema, values)
    rows, refused = by_offset(landed, "kafka_offset"), by_offset(quarantined, "offset")
    assert list(rows) == sorted(rows)
    assert list(refused) == sorted(refused)
    for offset, value in islice(enumerate(values, FIRST), None, None, 31):
        verdict = judge(schema, value)
        assert (offset in rows) is (verdict.row is not None)
        if verdict.row:
            assert {f.name: rows[offset][f.name] for f in schema.fields} == {
                f.name: verdict.row[f.name] for f in schema.fields
            }
        else:
            assert refused[offset]["reason"] in verdict.reasons
            assert refused[offset]["value"] == value


def test_columns_match_the_schema() -> None:
    landed, quarantined = convert(ORDERS, [b"{", b'{"order_id":"o"}'])
    assert landed.schema.equals(landed_schema(ORDERS))
    assert quarantined is not None
    assert quarantined.schema.equals(REFUSED)


def test_format_continues_after_huge_and_invalid_records() -> None:
    form = JsonFormat(NESTED)
    first = [make_nested(i) for i in range(50)]
    huge = b'{"lines":[' + b",".join([b'{"tags":{"a":[1,2,3]}}'] * 50_000) + b'],"x":"' + b"y" * 3_000_000 + b'"}'
    tables = []
    for values in (first, [huge, b"[" * 10_000, huge[:-1]], first):
        pieces = list(form.convert(OffsetRange("t", 0, "i", FIRST, FIRST + len(values)), make_chunk(values)))
        tables.append(pa.Table.from_batches([p.landed for p in pieces]))
    assert tables[0].equals(tables[2])
    assert tables[1].num_rows == 1
    assert len(tables[1]["lines"][0]) == 50_000


def test_a_large_value_lands() -> None:
    landed, _ = convert(parse_schema({"x": "string"}), [b'{"x":"' + b"\\u00e9" * (50 << 20 >> 3) + b'"}'])
    assert landed["x"][0].as_py() == "é" * (50 << 20 >> 3)


def test_record_with_too_many_elements_is_refused_and_neighbours_land(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MOST_SLOTS", 30_000)
    short, long = (b'{"x":[' + b",".join([b"1"] * n) + b"]}" for n in (30_000, 30_001))
    landed, quarantined = convert(parse_schema({"x": "list<int8>"}), [b"{}", short, long, short, b"{}"])
    assert landed["kafka_offset"].to_pylist() == [FIRST, FIRST + 1, FIRST + 3, FIRST + 4]
    assert [len(x) for x in landed["x"].to_pylist() if x] == [30_000, 30_000]
    assert quarantined is not None
    assert quarantined.select(["reason", "field"]).to_pylist() == [{"reason": "too_large", "field": "x"}]


def test_piece_memory_is_freed_with_its_last_reference() -> None:
    records = make_chunk([e.value for e in orders(Mix(3), 14_000, 0, 10**12)])
    pieces = JsonFormat(ORDERS).convert(OffsetRange("t", 0, "i", FIRST, FIRST + 14_000), records)
    piece = next(pieces)
    landed, before = piece.landed.nbytes, pa.total_allocated_bytes()
    del piece
    assert before - pa.total_allocated_bytes() > landed / 2


def test_records_that_grow_in_memory_are_converted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = parse_schema({"x": "list<struct<a:decimal(38,2), b:string, c:timestamp>>"})
    values = [b'{"x":[' + b",".join([b"{}"] * 3000) + b"]}" if i % 5 else b"{" for i in range(60)]
    expected = convert(schema, values)
    monkeypatch.setattr(typer, "PIECE_BYTES", 0)
    pieces = list(JsonFormat(schema).convert(OffsetRange("orders", 3, "id", FIRST, FIRST + 60), make_chunk(values)))
    assert len(pieces) > 3
    cut = convert(schema, values)
    assert [t and t.equals(w) for t, w in zip(cut, expected, strict=True)] == [True, True]


def test_empty_chunk_yields_no_pieces() -> None:
    assert list(JsonFormat(ORDERS).convert(OffsetRange("t", 0, "i", 0, 5), make_chunk([]))) == []


def test_dropped_records_are_counted() -> None:
    (piece,) = JsonFormat(ORDERS, dropping=True).convert(
        OffsetRange("t", 0, "i", FIRST, FIRST + 3), make_chunk([b"", b"{", None])
    )
    assert (piece.landed.num_rows, piece.quarantined, piece.dropped) == (1, None, 2)


def test_format_names_differ_by_schema_and_dropping() -> None:
    other = parse_schema(ORDERS.texts() | {"items": "int64"})
    names = {Shape(s, dropping=d).name for s in (ORDERS, other) for d in (True, False)}
    assert len(names) == 4
    assert Shape(parse_schema(ORDERS.texts())).name in names


CHANGES = parse_schema(build_envelope({"id": "int64", "name": "string"}, ["id"]))
WRAPPERS = ("null", '{"type":"struct","fields":[{"field":"a}\\",\\"payload\\":{","type":"int32"}]}', '"é{"', "[1]")


def make_change(i: int) -> str:
    change = {"op": "c", "before": None, "after": {"id": i, "name": "}" * (i % 3), "x": i}, "schema": {}, "n": [{}]}
    return json.dumps(change)


def test_changes_in_the_wrapper_of_kafka_connect_give_the_rows_of_their_payloads() -> None:
    values = [make_change(i) for i in range(200)]
    wrapped = [f'{{"schema":{WRAPPERS[i % 4]},"payload":{v}}}' if i % 5 else v for i, v in enumerate(values)]
    plain, _ = convert(CHANGES, [v.encode() for v in values])
    rows, quarantined = convert(CHANGES, [v.encode() for v in wrapped])
    assert quarantined is None
    assert rows.equals(plain)
    assert rows.column("_extra")[0].as_py() == '{"after":{"x":0},"schema":{},"n":[{}]}'


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-1],
        lambda text: text + "}",
        lambda text: text[:-1] + ',"x":{}}',
        lambda text: text[:-1] + ',"x":{},"y":"}"}',
        lambda text: text.replace('"payload":', '"payload" '),
        lambda text: text.replace('"schema":', '"schema" '),
        lambda text: text.replace('"payload":', '"payload":{},"payload":'),
        lambda text: text.replace("[1]", "[" * 100_000),
        lambda text: text[: text.index('"op"')],
        lambda text: '{"schema":1,"payload":null}',
        lambda text: '{"schema":1,"payload":',
        lambda text: '{"schema":1,"payload":"}',
        lambda text: '{"schema":',
        lambda text: '{"schema"',
    ],
)
def test_damaged_wrapper_is_quarantined_next_to_sound_ones(damage: Callable[[str], str]) -> None:
    sound = f'{{"schema":[1],"payload":{make_change(7)}}}'
    values = [text.encode() for text in (sound, damage(sound), sound)]
    rows, quarantined = convert(CHANGES, values)
    assert [r["offset"] - FIRST for r in quarantined.to_pylist()] == [1]
    assert [r["value"] for r in quarantined.to_pylist()] == values[1:2]
    assert rows.num_rows == 2


def test_position_of_a_fault_counts_from_the_start_of_the_record() -> None:
    value = b'{"schema":[1],"payload":{"op":"c","after":{"id":1, ?}}}'
    _, quarantined = convert(CHANGES, [value])
    (row,) = quarantined.to_pylist()
    assert (row["reason"], row["byte"]) == ("not_json", value.index(b"?"))
