"""Types from a sample: each is one that the typed format takes for every value that it was learnt from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.schema.inference import sampled
from sluice.pipelines.schema.schema import parse_schema
from tests.examples import examples
from tests.pipelines.records.typed.rows import convert


def guessed(*values: Any) -> dict[str, str]:
    return sampled(json.dumps(v).encode() for v in values).columns


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([1, 2], "int64"),
        ([1, 2.5], "float64"),
        ([True], "bool"),
        (["a", "2026-11-20"], "string"),
        (["2026-11-20", None], "date"),
        (["2026-11-20T10:00:00.123Z", "2026-11-20T10:00:00+01:00"], "timestamp"),
        ([1, "a"], "json"),
        ([None], "json"),
        ([[]], "list<json>"),
        ([[1], [2.5]], "list<float64>"),
        ([{"a": 1}, {"a": 2, "b": "x"}], "struct<a:int64, b:string>"),
        ([1 << 70], "json"),
    ],
)
def test_the_smallest_type_for_all_values(values: list[Any], type_: str) -> None:
    assert guessed(*({"x": v} for v in values))["x"].replace(" ", "") == type_.replace(" ", "")


def test_what_no_schema_can_name_stays_out() -> None:
    assert guessed({"a.b": 1, "kafka_x": 1, "A": 1, "a": 2, "": 3, "good": 1}) == {"A": "int64", "good": "int64"}


def test_what_is_no_json_is_counted() -> None:
    found = sampled([b"{}", b"[1]", None, b"\xff", b'{"a": 1}', b"{" * 100_000])
    assert (found.values, found.tombstones, found.objects, found.other, found.typed) == (6, 1, 2, 3, False)


LEAVES = st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(-1e300, 1e300) | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=examples(150))
@given(st.lists(st.dictionaries(st.text("abcdeXY_.`", max_size=3), JSON, max_size=4), min_size=1, max_size=6))
def test_every_value_fits_the_type_that_was_learnt_from_it(objects: list[dict[str, Any]]) -> None:
    values = [json.dumps(o).encode() for o in objects]
    columns = sampled(values).columns
    if not columns:
        return
    landed, quarantined = convert(parse_schema(columns), values)
    assert quarantined is None, (columns, quarantined.to_pylist())
    assert landed.num_rows == len(values)
