"""Rows of an earlier schema are recast to a later one only if no value is lost."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.schema.arrays import holds, plain, recast, unfit

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
OTHERS = [
    pa.float32(),
    pa.float64(),
    pa.decimal128(5, 2),
    pa.decimal128(21, 2),
    pa.decimal128(38, 10),
    pa.timestamp("ms", "UTC"),
    pa.timestamp("us", "UTC"),
    pa.date32(),
    pa.string(),
    pa.binary(),
    pa.bool_(),
]
TYPES = INTEGERS + OTHERS


def _list_limits(kind: pa.DataType) -> list[int]:
    bits = kind.bit_width
    return [-(1 << bits - 1), (1 << bits - 1) - 1] if pa.types.is_signed_integer(kind) else [0, (1 << bits) - 1]


@given(st.sampled_from(INTEGERS), st.sampled_from(TYPES), st.integers(-5, 5))
def test_integers_are_recast_exactly_to_wider_types(old: pa.DataType, new: pa.DataType, near: int) -> None:
    if not holds(old, new):
        return
    low, high = _list_limits(old)
    values = [low, high, low + abs(near), high - abs(near), None]
    (column,) = recast(pa.record_batch({"x": pa.array(values, old)}), pa.schema([("x", new)])).columns
    assert [None if v is None else int(v) for v in column.to_pylist()] == values


@pytest.mark.parametrize(
    ("old", "new", "fits"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.int32(), pa.uint64(), False),
        (pa.uint32(), pa.int32(), False),
        (pa.int32(), pa.float32(), False),
        (pa.int64(), pa.decimal128(21, 2), True),
        (pa.int64(), pa.decimal128(20, 2), False),
        (pa.decimal128(12, 2), pa.decimal128(14, 4), True),
        (pa.decimal128(12, 2), pa.decimal128(13, 4), False),
        (pa.float32(), pa.float64(), True),
        (pa.string(), pa.int32(), False),
        (pa.date32(), pa.timestamp("us", "UTC"), False),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"), True),
        (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC"), False),
        (pa.list_(pa.int8()), pa.list_(pa.int16()), True),
        (pa.list_(pa.int8()), pa.int8(), False),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64()), True),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.string()), ("a", pa.int16())]), True),
        (pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.struct([("b", pa.int8()), ("a", pa.int8())]), False),
        (pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.struct([("a", pa.int8())]), False),
        (pa.string(), pa.dictionary(pa.int8(), pa.string()), True),
    ],
)
def test_recast_requires_type_that_keeps_all_values(old: pa.DataType, new: pa.DataType, fits: bool) -> None:
    schemas = pa.schema([("x", old)]), pa.schema([("x", new)])
    assert (unfit(*schemas) == "") is fits
    if fits:
        recast(pa.record_batch([pa.nulls(2, old)], schema=schemas[0]), schemas[1])


def test_nested_rows_are_recast_with_nulls_for_new_fields() -> None:
    old = pa.struct([("a", pa.int8())])
    rows = pa.record_batch({"x": pa.array([{"a": 1}, None], old), "y": pa.array(["p", None])})
    new = pa.schema([("z", pa.date32()), ("y", pa.string()), ("x", pa.struct([("a", pa.int64()), ("b", pa.string())]))])
    recast_rows: list[dict[str, Any]] = recast(rows, new).to_pylist()
    assert recast_rows == [{"z": None, "y": "p", "x": {"a": 1, "b": None}}, {"z": None, "y": None, "x": None}]


def test_unfit_names_column_that_prevents_recast() -> None:
    old = pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert unfit(old, pa.schema([("a", pa.int64())])) == "column b is no longer in the schema"
    assert unfit(old, pa.schema([("a", pa.int8()), ("b", pa.string())])).startswith("column a was int64, and int8")
    more = pa.schema([*old, pa.field("c", pa.int8(), nullable=False)])
    assert unfit(old, more) == "column c is new and may not be null"


def test_plain_schema_has_no_dictionary_types() -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    assert plain(pa.schema([("x", kind), ("y", pa.int8())])) == pa.schema([("x", pa.string()), ("y", pa.int8())])
