"""Routing of records to outputs: by headers and JSON values, with values of any kind."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import DriftKind
from sluice.pipelines.records.json.member_values import number_values
from sluice.pipelines.records.rows.row_format import HEADERS
from sluice.pipelines.records.rows.split_rule import Otherwise, SplitRule, Tombstones
from sluice.pipelines.records.shape import RAW, Shape, Split
from sluice.pipelines.schema.schema import parse_schema

CHUNK = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)
CONTRACT = json.dumps(
    {"expectations": [{"type": "expect_column_values_to_be_between", "kwargs": {"column": "n", "max_value": 3500}}]}
).encode()
Record = tuple[bytes | None, list[tuple[str, bytes | None]] | None]


def make_chunk(records: list[Record], first: int = 10) -> pa.RecordBatch:
    rows = [
        {
            "value": value,
            "offset": first + i,
            "timestamp": 0,
            "timestampType": 0,
            "headers": headers and [{"key": k, "value": v} for k, v in headers],
        }
        for i, (value, headers) in enumerate(records)
    ]
    return pa.RecordBatch.from_pylist(rows, CHUNK)


def land(rule: SplitRule, records: list[Record], shapes: dict[str, Shape] | None = None) -> dict[str, Any]:
    """Returns the offsets by output, those in quarantine by output and reason, dropped ones, and unrouted values."""
    shape = Shape(split=Split(rule, shapes or dict.fromkeys(rule.outputs.values(), RAW)))
    s = OffsetRange("t", 0, "life", 10, 10 + len(records))
    landed: dict[str, list[int]] = {}
    refused: dict[tuple[str, str], list[int]] = {}
    dropped, values = 0, {}
    for piece in shape.format().convert(s, make_chunk(records)):
        name = "offset" if "offset" in piece.landed.schema.names else "kafka_offset"
        if piece.landed.num_rows:
            landed.setdefault(piece.output, []).extend(piece.landed.column(name).to_pylist())
        if piece.quarantined is not None:
            for row in piece.quarantined.to_pylist():
                refused.setdefault((piece.output, row["reason"]), []).append(row["offset"])
        dropped += piece.dropped
        values |= {d.field: d.records for d in piece.drift if d.kind is DriftKind.UNROUTED}
    return {"landed": landed, "refused": refused, "dropped": dropped, "values": values}


def test_the_last_header_of_the_name_decides() -> None:
    rule = SplitRule({"a": "one", "b": "two"}, header="kind")
    records: list[Record] = [
        (b"x", [("kind", b"a")]),
        (b"x", [("kind", b"a"), ("other", b"b"), ("kind", b"b")]),
        (b"x", [("Kind", b"a")]),
        (b"x", [("kind", None)]),
        (b"x", [("kind", b"\xff")]),
        (b"x", []),
        (b"x", None),
        (None, [("kind", b"a")]),
        (b"x", [("kind", b"c")]),
    ]
    out = land(rule, records)
    assert out["landed"] == {"one": [10, 17], "two": [11]}
    assert out["refused"] == {("", "no output"): [12, 13, 14, 15, 16, 18]}
    assert out["values"] == {"/header kind is missing": 4, "/header kind = �\\xff": 1, "/header kind = c": 1}


def test_values_of_fields_are_compared_as_json_writes_them() -> None:
    rule = SplitRule({"1": "one", "true": "yes", "a b": "text", "é": "accent"}, path=("meta", "a.b"))
    records: list[Record] = [
        (b'{"meta": {"a.b": 1}}', None),
        (b'{"meta": {"a.b": "1"}}', None),
        (b'{"meta": {"a.b": true}}', None),
        (b'{"meta": {"a.b": "a b"}}', None),
        ('{"meta": {"a.b": "é"}}'.encode(), None),
        (b'{"meta": {"a.b": "\\u00e9"}}', None),
        (b'{"meta": {"a.b": null}}', None),
        (b'{"meta": null}', None),
        (b'{"meta": 3}', None),
        (b"{}", None),
        (b"{", None),
        (b"\xff", None),
        (None, None),
    ]
    out = land(rule, records)
    assert out["landed"] == {"one": [10, 11], "yes": [12], "text": [13], "accent": [14, 15]}
    assert sorted(offset for offsets in out["refused"].values() for offset in offsets) == [16, 17, 18, 19, 20, 21, 22]
    assert {output for output, _ in out["refused"]} == {""}


def test_values_are_read_from_records_of_any_layout() -> None:
    rule = SplitRule({"a": "one", "b": "two"}, path=("kind",))
    long = "x" * 40
    alike = [f'{{"n": {i}, "text": "{long[i:]}", "kind": "{"ab"[i % 2]}", "z": 1}}'.encode() for i in range(40)]
    records: list[Record] = [(value, None) for value in alike]
    strange = [
        b'{"n": 1, "text": "a \\"kind\\": \\"b\\"", "kind": "a", "z": 1}',
        b'{"n": {"kind": "b"}, "text": ["kind"], "kind": "a"}',
        b'{"n": 1, "text": "\xc3\xa9", "k\\u0069nd": "a"}',
        f'{{"{long}": 1, "kind": "a"}}'.encode(),
        b'{"kind": "a", "kind": "b"}',
        b'{"n": 1, "text": "x", "kind": "a", "z": ',
        b"\xef\xbb\xbf{" + b'"n": 1, ' * 100 + b'"kind": "a"}',
    ]
    records += [(value, None) for value in strange]
    records += [(b'{"n": 1, "text": "x", "z": "kind"}', None), (b'{"n": 1, "text": "x, "kind": "a"}', None)]
    out = land(rule, records)
    after = range(50, 50 + len(strange))
    assert out["landed"] == {"one": [*range(10, 50, 2), *after, 58], "two": [*range(11, 50, 2)]}
    assert out["refused"] == {("", "no output"): [57]}


def test_names_that_only_look_like_the_field_do_not_choose() -> None:
    """A name may be a value, nested, escaped, longer, or behind the record's end; the first counts."""
    rule = SplitRule({"a": "one", "b": "two"}, path=("kind",))
    padding = b'"' + b"p" * 70 + b'":"kind",'
    values = {
        b'{"x":"kind","kind":"a"}': "one",
        b'{"kind" : "a","kind":"b"}': "one",
        b'{"kind":"a","kind":"b"}': "one",
        b'{"kinds":"b","kine":"b","kiid":"b","kind":"a"}': "one",
        b'{"x":{"kind":"b"},"kind":"a"}': "one",
        b'{"x":["kind",{"kind":"b"}],"kind":"a"}': "one",
        b'{"x":"\\"kind\\":","kind":"a"}': "one",
        b'{"k\\u0069nd":"a","kind":"b"}': "one",
        b"{" + padding + b'"kind"\n:\t"a"}': "one",
        b"{" + padding * 4 + b'"kind":"a","x":{}}': "one",
        b'[{"kind":"a"}]': "",
        b'{"x":1}': "",
        b'{"x":1,"kind"': "",
        b'{"x":1,"kind":': "",
        b'{"x":1,"kind":"a': "",
        b'{"x":1,"kind":null}': "",
        b'{"x":broken,"kind":"a"': "one",
        b'{"x":{broken,"kind":"a"': "",
    }
    for order in (1, -1):  # records before and behind lie in the same buffer
        chosen = list(values)[::order]
        out = land(rule, [(value, None) for value in chosen])
        outputs = {offset: output for output, offsets in out["landed"].items() for offset in offsets}
        assert [outputs.get(10 + i, "") for i in range(len(chosen))] == [values[value] for value in chosen]


def test_chosen_values_make_the_rows_that_copies_make() -> None:
    """Values that are not copied, among them tombstones and records that do not fit, against each output alone."""
    rule = SplitRule({"a": "one", "b": "two"}, header="kind")
    schema = parse_schema({"n": "int64 not null", "t": "string", "o": "struct<x:int64>"})
    contract = parse_contract(CONTRACT, schema)
    records: list[Record] = []
    for i in range(3000):
        body: bytes | None = json.dumps({"n": i, "t": "é" * (i % 7), "o": {"x": i, "y": i}, "new": "z"}).encode()
        body = {3: None, 5: b"{", 7: b'{"n": "no"}', 11: b'{"n": 4000}', 13: b"\xff\xfe{"}.get(i % 17, body)
        records.append((body, [("kind", b"a" if i % 3 else b"b")]))
    s, chunk = OffsetRange("t", 0, "life", 10, 3010), make_chunk(records)
    for shape in (Shape(schema), Shape(schema, contract), Shape(schema, closed=True), Shape(schema, dropping=True)):
        assert shape.is_bare_json
        together = list(Shape(split=Split(rule, {"one": shape, "two": shape})).format().convert(s, chunk))
        for output, kind in (("one", b"a"), ("two", b"b")):
            mine = pa.array([i for i, (_, headers) in enumerate(records) if headers and headers[0][1] == kind])
            alone = list(shape.format().convert(s, chunk.take(mine)))
            for of in (lambda p: p.landed, lambda p: p.quarantined):
                split, own = (
                    [of(p) for p in pieces if of(p) is not None]
                    for pieces in ([p for p in together if p.output == output], alone)
                )
                assert [b.num_rows for b in split] == [b.num_rows for b in own]
                assert [b.to_pylist() for b in split] == [b.to_pylist() for b in own]


@pytest.mark.parametrize("otherwise", Otherwise)
def test_rule_decides_on_records_without_an_output(otherwise: Otherwise) -> None:
    rule = SplitRule({"a": "one"}, header="kind", otherwise=otherwise)
    out = land(rule, [(b"x", [("kind", b"a")]), (b"y", [("kind", b"z")]), (None, None)])
    assert out["landed"] == {"one": [10]} | ({"otherwise": [11, 12]} if otherwise is Otherwise.RAW else {})
    assert out["refused"] == ({("", "no output"): [11, 12]} if otherwise is Otherwise.QUARANTINE else {})
    assert out["dropped"] == (2 if otherwise is Otherwise.DROP else 0)
    assert out["values"] == {"/header kind = z": 1, "/header kind is missing": 1}


def test_hostile_values_become_printable_text_and_no_name() -> None:
    rule = SplitRule({"a": "one"}, header="kind")
    hostile = [b"../../etc", b"\x1b[2J", b"a\x00", "‮".encode(), b"x" * 10_000]
    out = land(rule, [(b"x", [("kind", value)]) for value in hostile])
    assert out["landed"] == {}
    assert all(text.isprintable() and len(text) < 200 for text in out["values"])


def test_many_distinct_values_are_named_up_to_a_bound() -> None:
    rule = SplitRule({"a": "one"}, header="kind")
    shape = Shape(split=Split(rule, {"one": RAW}))
    s = OffsetRange("t", 0, "life", 0, 5000)
    chunk = make_chunk([(b"x", [("kind", str(i).encode())]) for i in range(5000)], 0)
    (piece,) = shape.format().convert(s, chunk)
    assert piece.quarantined is not None
    assert len(piece.quarantined.column("detail").dictionary) <= 65
    assert np.array_equal(piece.quarantined.column("offset").to_numpy(), np.arange(5000))


def test_outputs_are_typed_by_their_own_schemas() -> None:
    rule = SplitRule({"a": "one", "b": "two"}, header="kind")
    shapes = {
        "one": Shape(parse_schema({"x": "int64 not null"})),
        "two": Shape(parse_schema({"x": "string not null"})),
    }
    records: list[Record] = [
        (b'{"x": 1}', [("kind", b"a")]),
        (b'{"x": 1}', [("kind", b"b")]),
        (b'{"x": "1"}', [("kind", b"a")]),
        (b'{"x": "1"}', [("kind", b"b")]),
    ]
    out = land(rule, records, shapes)
    assert out["landed"] == {"one": [10], "two": [13]}
    assert {output: offsets for (output, _), offsets in out["refused"].items()} == {"one": [12], "two": [11]}


def test_tombstones_of_all_outputs_are_copies_in_all_but_the_first() -> None:
    rule = SplitRule({"a": "one", "b": "two"}, path=("kind",), tombstones=Tombstones.ALL)
    shapes = {
        "one": Shape(parse_schema({"n": "int64"})),
        "two": Shape(parse_schema({"n": "int64", "trace": "string header trace"})),
    }
    records: list[Record] = [
        (None, None),
        (b'{"kind": "a", "n": 1}', None),
        (None, [("trace", b"\xff")]),
        (b"{}", None),
        (b'{"kind": "b", "n": 1}', None),
        (None, []),
    ]
    assert land(rule, records, shapes) == {
        "landed": {"one": [10, 11, 15], "two": [10, 14, 15]},
        "refused": {("", "no output"): [12, 13]},
        "dropped": 0,
        "values": {"/kind is missing": 1},
    }
    shape, s = Shape(split=Split(rule, shapes)), OffsetRange("t", 0, "life", 10, 16)
    pieces = list(shape.format().convert(s, make_chunk(records)))
    assert {p.output: p.copies for p in pieces if p.output} == {"one": 0, "two": 2}
    assert sum(p.total for p in pieces) == len(records)


def test_a_tombstone_with_a_value_to_choose_by_has_one_output() -> None:
    rule = SplitRule({"a": "one", "b": "two"}, header="kind", tombstones=Tombstones.ALL)
    records: list[Record] = [(None, [("kind", b"b")]), (None, [("kind", b"c")]), (None, [("kind", None)]), (None, None)]
    out = land(rule, records)
    assert out["landed"] == {"one": [12, 13], "two": [10, 12, 13]}
    assert out["refused"] == {("", "no output"): [11]}


@given(
    st.lists(
        st.text(st.sampled_from("ab\u00e9\0"), max_size=3).map(lambda t: "12345" + t) | st.integers(0, 3), min_size=1
    ),
)
def test_equal_values_have_one_number_and_different_ones_never_share_it(values: list[Any]) -> None:
    """Values around eight bytes, which are compared as one word, up to the last byte of the buffer."""
    records = [json.dumps({"kind": v}, ensure_ascii=False).encode() for v in values]
    codes, texts = number_values(pa.array(records, pa.binary()), ("kind",))
    assert [json.loads(texts[code]) for code in codes.tolist()] == values
    assert len(texts) == len(set(map(str, values)))
