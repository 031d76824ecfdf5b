"""Proposals from a sample: the sample meets them, they form a contract, and too few rows give none."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.contract.contract_proposal import ENOUGH, Proposal, candidates, propose
from sluice.pipelines.contract.expectation import Contract, Severity
from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.records.contract_rows.contract_format import RowChecks
from sluice.pipelines.records.rows.row_format import HEADERS
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import Schema, arrow_type, parse_schema
from tests.examples import scale_examples

N = 1000


def propose_for(type_: str, values: list[Any], name: str = "x") -> dict[str, dict[str, Any]]:
    """Returns the proposals for one column, by the last part of the expectation's name."""
    schema = parse_schema({name: type_})
    column = pa.array(values, arrow_type(schema.fields[0].type))
    proposals = propose(pa.table({name: column, "kafka_key": pa.nulls(len(values), pa.binary())}), schema)
    return {p.type.removeprefix("expect_column_").removeprefix("values_to_"): dict(p.kwargs) for p in proposals}


def make_contract(proposals: tuple[Proposal, ...], schema: Schema) -> Contract:
    suite = {"name": "x", "expectations": [p.item for p in proposals]}
    return parse_contract(json.dumps(suite).encode(), schema)


# -- properties of a column


@pytest.mark.parametrize(
    ("type_", "values", "expected"),
    [
        ("int32", [1 + i % 8 for i in range(N)], {"min_value": 0, "max_value": 12}),
        ("int32", [-5 - i % 10 for i in range(N)], {"min_value": -19, "max_value": 0}),
        ("int64", [1_000_000 + i for i in range(N)], {"min_value": 990_000, "max_value": 1_100_000}),
        ("decimal(12,2)", [Decimal(i) / 100 for i in range(N)], {"min_value": 0, "max_value": 15}),
        ("decimal(5,4)", [Decimal(1000 + i) / 10000 for i in range(N)], {"min_value": 0.05, "max_value": 0.25}),
        ("float64", [math.nan, *(i / 1000 for i in range(N))], {"min_value": 0, "max_value": 1.5}),
        (
            "timestamp",
            [datetime(2026, 11, 20, 0, i % 60, tzinfo=UTC) for i in range(N)],
            {"min_value": "2025-01-01", "max_value": "2036-01-01"},
        ),
        (
            "date",
            [date(1950 + i % 50, 1, 1) for i in range(N)],
            {"min_value": "1949-01-01", "max_value": "2009-01-01"},
        ),
    ],
)
def test_ranges_have_margin_and_round_bounds(type_: str, values: list[Any], expected: dict[str, Any]) -> None:
    assert propose_for(type_, values)["be_between"] == expected


def test_few_frequent_values_are_a_set() -> None:
    assert propose_for("string", ["EUR", "USD"] * N)["be_in_set"] == {"value_set": ["EUR", "USD"]}
    assert propose_for("int32", [200, 404, 500] * N)["be_in_set"] == {"value_set": [200, 404, 500]}
    assert "be_in_set" not in propose_for("string", ["EUR", "USD"] * N + ["once"])
    assert "be_in_set" not in propose_for("string", ["x" * 65] * N)
    assert "be_in_set" not in propose_for("int32", [i % 8 for i in range(N)]), "numbers side by side are a range"


@pytest.mark.parametrize(
    ("values", "regex"),
    [
        ([f"0000{i:04}-1c2d-4e5f-8a9b-0123456789ab" for i in range(N)], "[0-9a-fA-F]{8}-"),
        ([chr(65 + i % 26) + chr(65 + i // 26 % 26) for i in range(N)], "^[A-Z]{2}$"),
        ([f"c-{i:06}" for i in range(N)], "^c-[0-9]{6}$"),
        ([f"order {i}" for i in range(1, N)], "^order [0-9]+$"),
        ([f"a{i}@example.org" for i in range(N)], "@"),
        ([f"(+{i}) [x]" for i in range(N)], r"^\(\+[0-9]+\) \[x\]$"),
    ],
)
def test_obvious_pattern_is_proposed(values: list[str], regex: str) -> None:
    assert regex in propose_for("string", values)["match_regex"]["regex"]
    other = propose_for("string", [*values, "~"])
    assert "match_regex" not in other, "one value that does not match rules out a pattern"
    assert other["value_lengths_to_be_between"]["min_value"] == 1


def test_keys_are_unique_by_name_and_sample() -> None:
    assert "be_unique" in propose_for("string", [f"{i:x}" for i in range(N)], "order_id")
    assert propose_for("int64", list(range(N)), "orderId").keys() == {"be_unique", "not_be_null"}
    assert "be_unique" not in propose_for("string", [f"{i:x}" for i in range(N)], "note")
    assert "be_unique" not in propose_for("string", [f"{i % 999:x}" for i in range(N)], "order_id")


def test_not_null_is_proposed_for_nullable_columns_without_nulls() -> None:
    assert "not_be_null" in propose_for("string", ["a"] * N)
    assert "not_be_null" not in propose_for("string", ["a"] * N + [None])
    assert "not_be_null" not in propose_for("string not null", ["a"] * N)
    assert "not_be_null" in propose_for("list<int32>", [[1]] * N)


def test_small_sample_proposes_nothing() -> None:
    few = ENOUGH - 1
    assert propose_for("int32", list(range(few))) == {}
    assert propose_for("int32", [1] * few + [None] * N) == {}
    assert propose_for("float64", [math.nan] * N) == {}  # a null to expectations


def test_proposals_are_warnings_with_counts_and_without_values() -> None:
    schema = parse_schema({"amount": "int32"})
    rows = pa.table({"amount": pa.array(range(N), pa.int32()), "kafka_key": pa.array([b"secret"] * N)})
    proposals = propose(rows, schema)
    assert {p.item["severity"] for p in proposals} == {"warning"}
    assert [p.item["meta"] for p in proposals] == [
        {"sluice": {"seen": {"rows": N, "nulls": 0}}},
        {"sluice": {"seen": {"values": N}}},
        {"sluice": {"seen": {"rows": N, "nulls": 0}}},
    ]
    assert [f.name for f in candidates(None)] == ["key"]


# -- arbitrary values


_COLUMNS = {
    "i": ("int64", st.integers(-(1 << 63), (1 << 63) - 1)),
    "u": ("uint64", st.integers(0, (1 << 64) - 1)),
    "s_id": ("int32", st.integers(-1000, 1000)),
    "f": ("float64", st.floats()),
    "g": ("float32", st.floats(width=32)),
    "d": ("decimal(38,10)", st.decimals(-(10**27), 10**27, places=10)),
    "t": ("timestamp(ms)", st.datetimes().map(lambda t: t.replace(microsecond=0, tzinfo=UTC))),
    "e": ("epoch(ns)", st.integers(-(1 << 63), (1 << 63) - 1)),
    "day": ("date", st.dates()),
    "text": ("string", st.text(max_size=20)),
    "code": ("string", st.from_regex(r"[a-c]?[0-9]{1,3}[.*\]^-]", fullmatch=True)),
}


@settings(max_examples=scale_examples(60))
@given(st.data(), st.sampled_from(sorted(_COLUMNS)), st.integers(1, 40))
def test_sample_satisfies_the_proposed_contract(data: st.DataObject, name: str, distinct: int) -> None:
    check_sample(name, data.draw(st.lists(st.none() | _COLUMNS[name][1], min_size=1, max_size=distinct)))


@pytest.mark.parametrize("sample", [[0.0, 1.0, math.inf], [0.0, 1.7e308], [-1.7e308, 1.7e308], [math.nan, 1.0, 2.5]])
def test_sample_with_extreme_floats_satisfies_the_proposal(sample: list[float]) -> None:
    check_sample("f", sample)


def check_sample(name: str, sample: list[Any]) -> None:
    type_, _ = _COLUMNS[name]
    column = [sample[i % len(sample)] for i in range(3 * ENOUGH)]
    schema = parse_schema({name: type_})
    landed = Shape(schema).landed
    columns = {f.name: pa.nulls(len(column), f.type if f.name != "kafka_headers" else HEADERS) for f in landed}
    columns[name] = pa.array(column, landed.field(name).type)
    columns["kafka_tombstone"] = pa.array([False] * len(column))
    columns["kafka_offset"] = pa.array(range(len(column)), pa.int64())
    columns["kafka_topic"] = pa.nulls(len(column), pa.string()).dictionary_encode()
    rows = pa.table(columns)
    if proposals := propose(rows.select([name, "kafka_key"]), schema):
        contract = make_contract(proposals, schema)
        assert {e.severity for e in contract.expectations} == {Severity.WARNING}
        checked = RowChecks(contract).check(rows.to_batches()[0])
        assert [t.unexpected for t in checked.tallies] == [0] * len(checked.tallies)
