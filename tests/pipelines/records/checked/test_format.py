"""The format with a contract: each record in one place, in order, and each quarantined one with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import EXAMPLES, Tally
from sluice.pipelines.records.rows.row_format import HEADERS, REFUSED, Formatted
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import Schema, parse_schema
from tests.examples import scale_examples

SCHEMA = parse_schema({"n": "int64", "s": "string"})
BETWEEN = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "n", "min_value": 0, "max_value": 9}}
WORDS = {"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "s", "value_set": ["a", "b"]}}
THERE = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n"}}
RANGE = OffsetRange("orders", 3, "i", 100, 10_000)


def make_contract(*items: dict[str, Any], schema: Schema | None = SCHEMA) -> Contract:
    return parse_contract(json.dumps({"expectations": items}).encode(), schema)


def make_chunk(values: Sequence[bytes | None], offsets: Sequence[int] | None = None) -> pa.RecordBatch:
    n = len(values)
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % i if i % 2 else None for i in range(n)], pa.binary()),
            "value": pa.array(values, pa.binary()),
            "offset": pa.array(offsets or range(100, 100 + n), pa.int64()),
            "timestamp": pa.array([1_700_000_000_000] * n, pa.timestamp("ms", "UTC")),
            "timestampType": pa.array([0] * n, pa.int32()),
            "headers": pa.array([None] * n, HEADERS),
        }
    )


def record(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def convert(shape: Shape, records: pa.RecordBatch) -> list[Formatted]:
    return [*shape.format().convert(RANGE, records)]


def list_offsets(rows: pa.RecordBatch | None, column: str) -> list[int]:
    return rows.column(column).to_pylist() if rows is not None else []


def test_rows_breaking_a_critical_expectation_are_quarantined_with_details() -> None:
    contract = make_contract(BETWEEN, WORDS | {"severity": "warning"}, THERE)
    values = [record(n=1, s="a"), record(n=10, s="z"), b"no json", record(s="z"), record(n=3), None]
    (piece,) = convert(Shape(SCHEMA, contract), make_chunk(values))
    assert list_offsets(piece.landed, "kafka_offset") == [100, 104, 105]
    assert piece.quarantined is not None
    assert piece.quarantined.schema == REFUSED
    rows = piece.quarantined.to_pylist()
    reasons = [(r["offset"], r["stage"], r["reason"], r["expectation"], r["field"], r["detail"]) for r in rows]
    assert reasons == [
        (101, "contract", "out_of_bounds", BETWEEN["type"], "n", "n should be between 0 and 9"),
        (102, "decode", "not_json", None, None, rows[1]["detail"]),
        (103, "contract", "is_null", THERE["type"], "n", "n should not be null"),
    ]
    assert [r["byte"] for r in rows] == [None, 0, None]
    assert [(r["key"], r["value"]) for r in rows] == [(b"k1", values[1]), (None, values[2]), (b"k3", values[3])]
    assert piece.tallies == (Tally(0, 3, 1, (101,)), Tally(1, 3, 2, (101, 103)), Tally(2, 4, 1, (103,)))


def test_first_broken_expectation_of_the_contract_is_reported_for_a_row() -> None:
    for order in ([BETWEEN, WORDS], [WORDS, BETWEEN]):
        (piece,) = convert(Shape(SCHEMA, make_contract(*order)), make_chunk([record(n=10, s="z")]))
        assert piece.quarantined is not None
        assert piece.quarantined.column("expectation").to_pylist() == [order[0]["type"]]


@pytest.mark.parametrize(
    "override", [{"severity": "warning"}, {"severity": "info"}, {"kwargs": {**BETWEEN["kwargs"], "mostly": 0.9}}]
)  # type: ignore[dict-item]
def test_rows_breaking_lenient_expectations_are_counted_and_land(override: dict[str, Any]) -> None:
    (piece,) = convert(Shape(SCHEMA, make_contract(BETWEEN | override)), make_chunk([record(n=10), record(n=1)]))
    assert (piece.landed.num_rows, piece.quarantined) == (2, None)
    assert piece.tallies == (Tally(0, 2, 1, (100,)),)


def test_tombstones_are_exempt_from_not_null_expectations() -> None:
    key = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "kafka_key"}}
    values = [None, record(n=1), None, record(n=11), None]
    (piece,) = convert(Shape(SCHEMA, make_contract(THERE, key, BETWEEN)), make_chunk(values))
    assert list_offsets(piece.landed, "kafka_offset") == [100, 101, 102, 104]
    assert list_offsets(piece.quarantined, "offset") == [103]
    assert piece.tallies == (Tally(0, 2), Tally(1, 2), Tally(2, 2, 1, (103,)))


def test_dropped_records_are_counted() -> None:
    (piece,) = convert(
        Shape(SCHEMA, make_contract(BETWEEN), dropping=True), make_chunk([b"x", record(n=10), record(n=1)])
    )
    assert (list_offsets(piece.landed, "kafka_offset"), piece.quarantined, piece.dropped) == ([102], None, 2)


def test_contract_of_a_raw_feed_checks_its_columns() -> None:
    contract = make_contract({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "key"}}, schema=None)
    (piece,) = convert(Shape(None, contract), make_chunk([b"a", b"b", None]))
    assert list_offsets(piece.landed, "offset") == [101]
    assert piece.quarantined is not None
    assert piece.quarantined.column("value").to_pylist() == [b"a", None]
    assert piece.quarantined.column("field").to_pylist() == ["key", "key"]
    assert piece.tallies == (Tally(0, 3, 2, (100, 102)),)


def test_topic_column_is_checked_once_for_all_rows() -> None:
    topic = {"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "kafka_topic", "value_set": ["other"]}}
    (piece,) = convert(Shape(SCHEMA, make_contract(topic)), make_chunk([record(n=1)] * 5))
    assert (piece.landed.num_rows, piece.tallies) == (0, (Tally(0, 5, 5, (100, 101, 102)),))


def test_empty_chunk_breaks_no_expectation() -> None:
    shape = Shape(SCHEMA, make_contract(BETWEEN, WORDS))
    for piece in convert(shape, make_chunk([])):
        assert piece.tallies == (Tally(0, 0), Tally(1, 0))
    assert all(p.landed.schema == shape.format().schema for p in convert(shape, make_chunk([record(n=77)])))


VALUES = st.one_of(
    st.none(),
    st.just(b"{"),
    st.builds(record, n=st.integers(-2, 12), s=st.sampled_from(["a", "b", "c", None])),
)


@settings(max_examples=scale_examples(60))
@given(values=st.lists(VALUES, max_size=40), dropping=st.booleans(), gaps=st.randoms(use_true_random=False))
def test_each_record_is_in_one_dataset_and_in_order(values: list[bytes | None], dropping: bool, gaps: Any) -> None:
    at = sorted(gaps.sample(range(100, 10_000), len(values)))
    pieces = convert(Shape(SCHEMA, make_contract(BETWEEN, WORDS), dropping=dropping), make_chunk(values, at))
    landed = [o for p in pieces for o in list_offsets(p.landed, "kafka_offset")]
    quarantined = [o for p in pieces for o in list_offsets(p.quarantined, "offset")]
    good = [o for o, v in zip(at, values, strict=True) if v is None or _is_good(v)]
    assert landed == good
    assert sorted(landed + quarantined) == (good if dropping else at)
    assert quarantined == sorted(quarantined)
    assert sum(p.total for p in pieces) == len(values)
    assert all(len(t.first) == min(t.unexpected, EXAMPLES) for p in pieces for t in p.tallies)


def _is_good(value: bytes) -> bool:
    if value == b"{":
        return False
    fields = json.loads(value)
    return 0 <= fields["n"] <= 9 and fields["s"] in ("a", "b", None)


def test_tallies_of_several_pieces_add_up() -> None:
    schema = parse_schema({"n": "int64", "s": "string"} | {f"c{i}": "int64" for i in range(400)})
    shape = Shape(schema, make_contract(BETWEEN, schema=schema))
    n = 30_000
    pieces = convert(shape, make_chunk([record(n=i % 11) for i in range(n)]))
    assert len(pieces) > 1
    total = pieces[0].tallies[0]
    for piece in pieces[1:]:
        total += piece.tallies[0]
    bad = [100 + i for i in range(n) if i % 11 > 9]
    assert total == Tally(0, n, len(bad), tuple(bad[:EXAMPLES]))
    assert [o for p in pieces for o in list_offsets(p.quarantined, "offset")] == bad


def test_workers_do_not_load_pandas() -> None:
    suite = json.dumps({"expectations": [BETWEEN, WORDS, THERE, _GREATER, _PAIRS, _REGEX, _SUM]}).encode()
    script = f"""
import sys
import numpy as np, pyarrow as pa
from sluice.pipelines.records.contract_rows.contract_format import RowChecks
from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.schema.arrays import fixed_width, text_array
from sluice.pipelines.schema.schema import parse_schema
contract = parse_contract({suite!r}, parse_schema({{"n": "int64", "s": "string"}}))
numbers = fixed_width(pa.int64(), np.arange(5, 15))
rows = pa.RecordBatch.from_arrays([numbers, text_array(["a", "c"] * 5), numbers], names=["n", "s", "kafka_offset"])
checks = RowChecks(contract)
broken = checks.check(rows).broken
assert broken.rows.tolist() == list(range(10)), broken
checks.reason_columns(broken)
assert "pandas" not in sys.modules
assert "great_expectations" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


_GREATER = {
    "type": "expect_column_pair_values_a_to_be_greater_than_b",
    "kwargs": {"column_A": "n", "column_B": "kafka_offset"},
}
_PAIRS = {
    "type": "expect_column_pair_values_to_be_in_set",
    "kwargs": {"column_A": "n", "column_B": "s", "value_pairs_set": [[5, "a"], [6, None]]},
}
_REGEX = {"type": "expect_column_values_to_match_regex", "kwargs": {"column": "s", "regex": "^[a-c]$"}}
_SUM = {"type": "expect_multicolumn_sum_to_equal", "kwargs": {"column_list": ["n", "kafka_offset"], "sum_total": 10}}
