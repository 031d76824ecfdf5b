"""Fields and values land as docs/formats.md documents them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.pipelines.records.columns.reasons import Reason
from sluice.pipelines.schema.schema import parse_schema
from tests.pipelines.records.json.rows import FIRST, by_offset, convert

DOCS = (Path(__file__).parents[4] / "docs" / "formats.md").read_text()
FIELDS = DOCS.split("## How a field lands")[1].split("## How a value lands")[0]
CASES = re.findall(r"^\| `(.+?)` \| `(.+)` \| (.+) \|$", FIELDS, re.MULTILINE)


def convert_one(schema: dict[str, str], value: bytes | None) -> dict[str, object]:
    """Convert one value, and return its row, landed or quarantined."""
    landed, quarantined = convert(parse_schema(schema), [value])
    return (by_offset(landed, "kafka_offset") | by_offset(quarantined, "offset"))[FIRST]


@pytest.mark.parametrize(("kind", "says", "becomes"), CASES)
def test_documented_field_lands_or_is_refused_as_documented(kind: str, says: str, becomes: str) -> None:
    row = convert_one({"x": kind}, f'{{"x": {says}}}'.encode())
    if becomes in list(Reason):
        assert row["reason"] == becomes
        assert row["field"] in ((None,) if becomes == "not_json" else ("x", "x[]", "x.a"))
        assert row["detail"]
    else:
        assert repr(row["x"]) == becomes.strip("`")
        assert row["_extra"] is None


def test_docs_have_the_table_of_fields() -> None:
    assert len(CASES) > 70
    assert {c[2] for c in CASES} >= {*list(Reason)[:11]} - {"too_deep", "too_large", "invalid_utf8"}


def test_docs_list_every_reason() -> None:
    assert [r for r in Reason if f"`{r}`" not in DOCS] == []


X = {"x": "int32"}
LANDS: list[tuple[bytes | None, dict[str, object]]] = [
    (None, {"x": None, "kafka_tombstone": True}),
    (b'{"x":1}', {"x": 1, "kafka_tombstone": False}),
    (b' \t\r\n{ "x" : 1 } \n', {"x": 1}),
    (b'\xef\xbb\xbf{"x":1}', {"x": 1}),
    (b"{}", {"x": None, "_extra": None, "kafka_tombstone": False}),
    (b'{"\\u0078":1}', {"x": 1, "_extra": None}),
    (b'{"a":1,"x":2,"b" : [1, {"c":"\\ud800"}],"a":3}', {"x": 2, "_extra": '{"a":1,"b":[1, {"c":"\\ud800"}],"a":3}'}),
    (b'{"\\ud800":1}', {"_extra": '{"\\ud800":1}'}),
    (b'{"xx":1,"":2,"X":3}', {"x": None, "_extra": '{"xx":1,"":2,"X":3}'}),
    (b'{"d":' + b"[" * 99 + b"]" * 99 + b"}", {"x": None}),
    (b'{"x":1,"big":"' + b"a" * 1_000_000 + b'"}', {"x": 1}),
]
REFUSED: list[tuple[bytes, str, int | None]] = [
    ('{"x":1}'.encode("utf-16"), "invalid_utf8", 0),
    ('{"x":1}'.encode("utf-16-be"), "invalid_utf8", 0),
    ('{"x":1}'.encode("utf-16-le"), "invalid_utf8", 1),
    ('{"x":1}'.encode("utf-32"), "invalid_utf8", 0),
    (b"", "not_json", 0),
    (b"  \n", "not_json", 3),
    (b"\xef\xbb\xbf", "not_json", 3),
    (b"\xef\xbb{}", "not_json", 0),
    (b"7", "wrong_type", 0),
    (b'"x"', "wrong_type", 0),
    (b" [1]", "wrong_type", 1),
    (b"null", "wrong_type", 0),
    (b'{"x":1}{"x":2}', "not_json", 7),
    (b'{"x":1} x', "not_json", 8),
    (b'{"x":1}\x00', "not_json", 7),
    (b'{"x":1', "not_json", 6),
    (b'{"x":1,}', "not_json", 7),
    (b'{"a":[1,]}', "not_json", 8),
    (b"{'x':1}", "not_json", 1),
    (b'{"x":1/**/}', "not_json", 6),
    (b'{"a":NaN}', "not_json", 5),
    (b'{"a":"\x01"}', "not_json", 6),
    (b'{"a":"\x00"}', "not_json", 6),
    (b'{"a":"\\x"}', "not_json", 6),
    (b'{"a":01}', "not_json", 5),
    (b'{"a":+1}', "not_json", 5),
    (b'{"a":.5}', "not_json", 5),
    (b'{"a":1.}', "not_json", 7),
    (b'{"a":1e}', "not_json", 7),
    (b'{"a":tru}', "not_json", 5),
    (b'{"a" 1}', "not_json", 5),
    (b'{"x":nul}', "not_json", 5),
    (b'{"a":"\xff"}', "invalid_utf8", 6),
    (b'{"a":"\xc0\x80"}', "invalid_utf8", 6),
    (b'{"a":"\xed\xa0\x80"}', "invalid_utf8", 6),
    (b'{"a":"\xf4\x90\x80\x80"}', "invalid_utf8", 6),
    (b'{"\xff":1}', "invalid_utf8", 2),
    (b'{"x":1,"x":1}', "duplicate", 11),
    (b'{"x":null,"x":1}', "duplicate", 14),
    (b'{"x":"1","x":', "not_json", 13),
    (b"[" * 100_000, "too_deep", 100),
    (b'{"a":' * 100_000, "too_deep", 500),
    (b'{"d":' + b"[" * 100 + b"]" * 100 + b"}", "too_deep", 104),
]


@pytest.mark.parametrize(("value", "row"), LANDS)
def test_valid_values_land(value: bytes | None, row: dict[str, object]) -> None:
    landed = convert_one(X, value)
    assert {k: landed.get(k, "quarantined") for k in row} == row


@pytest.mark.parametrize(("value", "reason", "position"), REFUSED)
def test_invalid_values_are_refused_with_reason_and_position(value: bytes, reason: str, position: int | None) -> None:
    row = convert_one(X, value)
    assert (row["reason"], row["byte"]) == (reason, position)
    assert row["value"] == value


def test_tombstone_lands_despite_required_fields() -> None:
    assert (
        convert_one({"x": "int32 not null", "y": "struct<a:int32 not null> not null"}, None)["kafka_tombstone"] is True
    )


def test_invalid_json_is_reported_before_invalid_values() -> None:
    assert convert_one(X, b'{"x":"wrong","y":')["reason"] == "not_json"
    assert convert_one({"x": "int8", "y": "int8"}, b'{"x":1000,"y":"wrong"}')["field"] == "y"
    assert convert_one({"x": "int8", "y": "int8"}, b'{"y":1000,"x":1000}')["field"] == "x"


EXTRAS = re.findall(r"^\| `(\w+): (.+)` \| `(.+)` \| `(.+)` \|$", DOCS, re.MULTILINE)


@pytest.mark.parametrize(("name", "kind", "value", "extra"), EXTRAS)
def test_fields_not_in_the_schema_land_in_extra(name: str, kind: str, value: str, extra: str) -> None:
    assert convert_one({name: kind}, value.encode())["_extra"] == extra


def test_docs_have_the_table_of_extra_fields() -> None:
    assert len(EXTRAS) == 4
