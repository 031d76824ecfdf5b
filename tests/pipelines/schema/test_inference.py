"""Types inferred from a sample: the typed format accepts every value of the sample."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.schema.schema import parse_schema
from tests.examples import scale_examples
from tests.pipelines.records.json.rows import convert
from tests.pipelines.schema.samples import sample_values


def infer_columns(*values: Any) -> dict[str, str]:
    return sample_values(json.dumps(v).encode() for v in values).columns


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([1, 2], "int64"),
        ([1, 2.5], "float64"),
        ([True], "bool"),
        (["a", "2026-11-20"], "string"),
        (["2026-11-20", None], "date"),
        (["2026-11-20T10:00:00.123Z", "2026-11-20T10:00:00+01:00"], "timestamp"),
        (["2026-11-20T10:00:00,123Z"], "string"),
        (["2026-11-20T24:00:00Z"], "string"),
        (["2026-11-20", "0000-00-00"], "string"),
        (["2026-02-30T10:00"], "string"),
        (["2026-W47-5"], "string"),
        ([1, "a"], "json"),
        ([None], "json"),
        ([[]], "list<json>"),
        ([[1], [2.5]], "list<float64>"),
        ([{"a": 1}, {"a": 2, "b": "x"}], "struct<a:int64, b:string>"),
        ([1 << 70], "json"),
    ],
)
def test_inferred_type_is_smallest_for_all_values(values: list[Any], type_: str) -> None:
    assert infer_columns(*({"x": v} for v in values))["x"].replace(" ", "") == type_.replace(" ", "")


@pytest.mark.parametrize(
    ("numbers", "type_"),
    [
        (["0.1", "1.50", "1e3", "9007199254740992"], "float64"),
        (["0.1", "9007199254740993"], "json"),
        (["1234567890.123456789"], "json"),
        (["0.1000000000000000055511151231257827"], "json"),
        (["1e400"], "json"),
        (["1e-400"], "json"),
        (["1e99999999999999999999"], "json"),
    ],
)
def test_float_is_proposed_only_where_it_has_all_digits(numbers: list[str], type_: str) -> None:
    assert sample_values(f'{{"x": {n}}}'.encode() for n in numbers).columns == {"x": type_}


def test_fields_with_invalid_column_names_get_other_names() -> None:
    odd = {
        "a.b": 1,
        "kafka_x": 1,
        "A": 1,
        "a": 2,
        "": 3,
        "good": 1,
        "_extra": 1,
        "a_b": 1,
        "s": {"x.y": 1, "X": 2, "x": 3},
    }
    assert infer_columns(odd) == {
        "a_b_2": 'int64 from "a.b"',
        "record_kafka_x": 'int64 from "kafka_x"',
        "A": "int64",
        "a_2": 'int64 from "a"',
        "field": 'int64 from ""',
        "good": "int64",
        "extra": 'int64 from "_extra"',
        "a_b": "int64",
        "s": 'struct<x_y:int64 from "x.y", X:int64, x_2:int64 from "x">',
    }
    landed, quarantined = convert(parse_schema(infer_columns(odd)), [json.dumps(odd).encode()])
    assert (quarantined, landed["_extra"].to_pylist()) == (None, [None])


def test_fields_with_unusable_names_are_left_out() -> None:
    long = "x" * 1001
    sample = sample_values([json.dumps({"\ud800": 1, long: 2, "id": 3}).encode()])
    assert (sample.columns, sample.left_out) == ({"id": "int64"}, ["\ud800", long])


def test_field_names_that_are_data_get_no_columns() -> None:
    sample = sample_values(json.dumps({"id": 1, f"user-{i:04}": i}).encode() for i in range(50))
    assert (sample.columns, len(sample.left_out), sample.is_typed) == ({"id": "int64"}, 50, True)


@pytest.mark.parametrize(
    ("name", "values", "type_"),
    [
        ("created", [1_795_000_000, None], "epoch(s)"),
        ("createdAt", [1_795_000_000_000], "epoch(ms)"),
        ("source_ts_us", [1_795_000_000_000_000], "epoch(us)"),
        ("eventTime", [1_795_000_000_000_000_000], "epoch(ns)"),
        ("timestamps", [[1_795_000_000, 1_795_000_001]], "list<epoch(s)>"),
        ("created", [1_795_000_000, 1_795_000_000_000], "int64"),
        ("created", [0, 1_795_000_000], "int64"),
        ("created", [1_795_000_000.5], "float64"),
        ("time_ms", [1200], "int64"),
        ("account", [1_795_000_000], "int64"),
        ("lsn", [1_795_000_000_000], "int64"),
    ],
)
def test_integers_are_inferred_as_times_by_name_and_range(name: str, values: list[Any], type_: str) -> None:
    assert infer_columns(*({name: v} for v in values))[name] == type_


def test_values_other_than_json_objects_are_counted() -> None:
    sample = sample_values([b"{}", b"[1]", None, b"\xff", b'{"a": 1}', b"{" * 100_000])
    assert (sample.values, sample.tombstones, sample.objects, sample.is_typed) == (6, 1, 2, False)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_json_in_other_encoding_is_detected_and_counted(encoding: str) -> None:
    sample = sample_values(
        [json.dumps({"a": i}).encode(encoding) for i in range(5)] + [b"\xef\xbb\xbf{}", b'{"a": NaN}']
    )
    assert (sample.objects, sample.is_typed, sample.encoded) == (1, False, {encoding[:6].upper(): 5})


def test_values_with_nan_are_counted_separately_from_objects() -> None:
    values = [b'{"a": 1, "b": %d}' % i for i in range(9)] + [b'{"a": NaN, "c": -Infinity}']
    sample = sample_values(values)
    assert (sample.objects, sample.constants, sample.is_typed) == (9, 1, True)
    assert sample.columns == {"a": "int64", "b": "int64"}
    _, quarantined = convert(parse_schema(sample.columns), values)
    assert quarantined is not None
    assert quarantined["reason"].to_pylist() == ["not_json"]
    assert not sample_values([values[-1]] * 5).is_typed


def test_object_with_data_as_names_is_inferred_as_map() -> None:
    ids = infer_columns(*({"m": {f"k{i}": i, f"l{i % 97}": 1.5}, "s": {"a": 1, "b": 2}} for i in range(200)))
    assert ids == {"m": "map<string, float64>", "s": "struct<a:int64, b:int64>"}
    nested = infer_columns(*({"m": [{f"a.{i}.{j}": {"x": j}} for j in range(3)]} for i in range(50)))
    assert nested == {"m": "list<map<string, struct<x:int64>>>"}
    assert infer_columns(*({"m": {f"k{i}": "x" if i % 2 else 1}} for i in range(200)))["m"] == "map<string, json>"
    for name in ("2026-11-20", "9b2f0a54-5d7e-4c3b-8d7f-2f1f7d2f6a11", "4711", "ann@example.com", "user_1234"):
        assert infer_columns({"m": {name: 1}})["m"] == "map<string, int64>"
    often = infer_columns(*({"m": {f"k{i}": 1 for i in range(40)}} for _ in range(50)))
    assert often["m"].startswith("struct<k0:int64"), "these are in every object"
    one_usual = infer_columns(*({"m": {"id": i, f"k{i}": i}} for i in range(40)))
    assert one_usual["m"].startswith("struct<"), "id is in every one"
    assert infer_columns(*({"m": {f"k{i}": 1}} for i in range(10)))["m"].startswith("struct<"), "too few to tell"


LEAVES = st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(-1e300, 1e300) | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=scale_examples(150))
@given(st.lists(st.dictionaries(st.text("abcdeXY_.`", max_size=3), JSON, max_size=4), min_size=1, max_size=6))
def test_every_sampled_value_fits_the_inferred_type(objects: list[dict[str, Any]]) -> None:
    values = [json.dumps(o).encode() for o in objects]
    columns = sample_values(values).columns
    if not columns:
        return
    landed, quarantined = convert(parse_schema(columns), values)
    assert quarantined is None, (columns, quarantined.to_pylist())
    assert landed.num_rows == len(values)
