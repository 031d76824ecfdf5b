"""Expectations about whole batches agree with Great Expectations on the same rows in pandas, in bounded memory.

Cases that it does not cover (history, tombstones, empty batches, exactness) are as documented.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sluice.pipelines.contract.catalogue import RULES, Result, Scope
from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.errors import LakeUnavailable
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.pipelines.records.shape import RAW, Shape
from sluice.pipelines.schema.schema import parse_schema
from sluice.pipelines.validation.batch_expectations import DECIDED, NO_ROWS, hold_whole
from sluice.testing.lake import MemoryLake
from tests.examples import scale_examples

SCHEMA = parse_schema(
    {
        "n": "int32",
        "f": "float64",
        "s": "string",
        "b": "bool not null",
        "a": "decimal(9,2) not null",
        "d": "date not null",
        "t": "timestamp(ms)",
    }
)
TYPES = {
    "n": pa.int32(),
    "f": pa.float64(),
    "s": pa.string(),
    "b": pa.bool_(),
    "a": pa.decimal128(9, 2),
    "d": pa.date32(),
    "t": pa.timestamp("ms", "UTC"),
}
Row = Mapping[str, Any]
Expectation = tuple[str, dict[str, Any]]


def make_receipt(lake: MemoryLake, rows: Sequence[Row], start: int = 0, tombstones: Iterable[int] = ()) -> Receipt:
    """Returns the receipt of a range of `orders:0`: these rows are its one part, in row groups of three."""
    dead = set(tombstones)
    columns = {c: pa.array([None if i in dead else r[c] for i, r in enumerate(rows)], t) for c, t in TYPES.items()}
    columns["kafka_offset"] = pa.array(range(start, start + len(rows)), pa.int64())
    columns["kafka_tombstone"] = pa.array([i in dead for i in range(len(rows))])
    pq.write_table(pa.table(columns), sink := io.BytesIO(), row_group_size=3)
    lake.put(path := f"_staging/{start}-{len(rows)}", sink.getvalue())
    s = OffsetRange("orders", 0, "id-1", start, start + len(rows))
    part = Part(path, PartKind.LANDED, path, path, len(rows), len(sink.getvalue()), "")
    return Receipt(s, s.end, Counts(landed=len(rows)), (part,), "a-1")


def shape(*expectations: Expectation, raw: bool = False) -> Shape:
    """Returns the shape that a feed's files with these expectations give."""
    columns = None if raw else SCHEMA
    suite = {"name": "orders", "expectations": [{"type": t, "kwargs": kwargs} for t, kwargs in expectations]}
    return Shape(columns, parse_contract(json.dumps(suite).encode(), columns))


def evaluate(rows: Sequence[Row], *expectations: Expectation, earlier: Sequence[int] = ()) -> list[Result]:
    lake = MemoryLake()
    cut = len(rows) // 2
    receipts = [make_receipt(lake, rows[:cut]), make_receipt(lake, rows[cut:], start=cut)]
    return list(hold_whole(shape(*expectations), receipts, lake, earlier))  # type: ignore[arg-type]


# -- Great Expectations as the oracle

QUARTERS = st.integers(-8, 8).map(lambda n: n / 4)
"""Their sums are exact, so an observed value can equal a bound."""
NUMBERS = st.sampled_from([-2, -0.5, 0, 0.25, 1, 1.5, 3])
DAYS = st.integers(1, 4).map(lambda day: date(2026, 11, day))
rows_ = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-3, 3),
        "f": st.none() | st.just(math.nan) | QUARTERS,
        "s": st.none() | st.sampled_from(["", "a", "b", "B", "é", "a "]),
        "b": st.booleans(),
        "a": QUARTERS.map(Decimal),
        "d": DAYS,
        "t": st.none() | st.integers(1, 3).map(lambda hour: datetime(2026, 11, 20, hour, tzinfo=UTC)),
    }
)
SETS: Mapping[str, st.SearchStrategy[Any]] = {
    "n": st.integers(-3, 3),
    "f": QUARTERS,
    "s": st.sampled_from(["", "a", "b", "c", "é"]),
    "b": st.booleans(),
    "d": DAYS.map(str),
}


def make_limits(numbers: st.SearchStrategy[Any], strict: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    def order_bounds(bounds: dict[str, Any]) -> dict[str, Any]:
        low, high = bounds.get("min_value"), bounds.get("max_value")
        if low is not None and high is not None and low > high:
            return bounds | {"min_value": high, "max_value": low}
        return bounds

    flags = {"strict_min": st.booleans(), "strict_max": st.booleans()} if strict else {}
    both = st.fixed_dictionaries({"min_value": numbers, "max_value": numbers}, optional=flags)
    one = st.sampled_from(["min_value", "max_value"]).flatmap(
        lambda name: st.fixed_dictionaries({name: numbers}, optional=flags)
    )
    return st.one_of(both.map(order_bounds), one)


def expect_column(type_: str, columns: str, more: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Expectation]:
    column = st.sampled_from(list(columns))
    return st.tuples(column, more).map(lambda drawn: (f"expect_column_{type_}", {"column": drawn[0]} | drawn[1]))


TIMES = st.integers(1, 3).map(lambda hour: f"2026-11-20T{hour:02}:00:00Z")
ROUND = st.sampled_from([0.013, 0.377, 0.811, 1.293, 2.117])
"""No standard deviation of these rows equals one of them."""
SHARES = st.sampled_from([0, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 1])
MOSTLY = st.sampled_from([{}, {"mostly": 0.5}, {"mostly": 2 / 3}, {"mostly": 0.75}])
RANGES = st.tuples(NUMBERS, NUMBERS).map(sorted) | NUMBERS.map(lambda n: [None, n]) | NUMBERS.map(lambda n: [n, None])
QUANTILES = st.lists(st.sampled_from([0, 0.1, 0.25, 0.3, 0.5, 0.57, 0.75, 0.9, 1]), min_size=1, max_size=4, unique=True)
quantile_ranges = QUANTILES.flatmap(
    lambda q: st.lists(RANGES, min_size=len(q), max_size=len(q)).map(
        lambda ranges: {"quantile_ranges": {"quantiles": sorted(q), "value_ranges": ranges}}
    )
)
members = st.sampled_from(list(SETS)).flatmap(
    lambda column: st.lists(SETS[column], min_size=1, max_size=5).map(lambda s: {"column": column, "value_set": s})
)
together = st.fixed_dictionaries(
    {"column_list": st.permutations("nsabt").map(lambda names: names[:2])},
    optional={
        "ignore_row_if": st.sampled_from(["all_values_are_missing", "any_value_is_missing", "never"]),
        "mostly": st.sampled_from([0.5, 0.75]),
    },
)
expectations_ = st.one_of(
    st.tuples(st.just("expect_table_row_count_to_be_between"), make_limits(st.integers(0, 9))),
    st.tuples(st.just("expect_table_row_count_to_equal"), st.fixed_dictionaries({"value": st.integers(0, 9)})),
    expect_column("min_to_be_between", "nfa", make_limits(NUMBERS)),
    expect_column("max_to_be_between", "nfa", make_limits(NUMBERS)),
    expect_column("min_to_be_between", "t", make_limits(TIMES)),
    expect_column("max_to_be_between", "t", make_limits(TIMES)),
    expect_column("mean_to_be_between", "nfa", make_limits(NUMBERS)),
    expect_column("sum_to_be_between", "nfa", make_limits(NUMBERS)),
    expect_column("median_to_be_between", "nfa", make_limits(NUMBERS)),
    expect_column("stdev_to_be_between", "nfa", make_limits(ROUND)),
    expect_column("quantile_values_to_be_between", "nf", quantile_ranges),
    expect_column("values_to_be_unique", "nfsabdt", MOSTLY),
    st.tuples(st.just("expect_compound_columns_to_be_unique"), together),
    expect_column("unique_value_count_to_be_between", "nfsabdt", make_limits(st.integers(0, 5))),
    expect_column("proportion_of_unique_values_to_be_between", "nfsabdt", make_limits(SHARES)),
    expect_column("proportion_of_non_null_values_to_be_between", "nfsabdt", make_limits(SHARES)),
    *(
        st.tuples(st.just(f"expect_column_distinct_values_to_{how}_set"), members)
        for how in ("be_in", "equal", "contain")
    ),
    st.tuples(
        st.just("expect_column_most_common_value_to_be_in_set"),
        st.tuples(members.filter(lambda m: m["column"] != "d"), st.sampled_from([{}, {"ties_okay": True}])).map(
            lambda drawn: drawn[0] | drawn[1]
        ),
    ),
)


@cache
def load_oracle() -> Any:
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    return context.data_sources.add_pandas("p").add_dataframe_asset("a").add_batch_definition_whole_dataframe("b")


def evaluate_with_gx(rows: Sequence[Row], expectations: Sequence[Expectation]) -> list[tuple[bool, Any]]:
    """Returns whether Great Expectations lets each expectation pass, and the value that it observed."""
    import great_expectations as gx
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    frame = pa.table({c: pa.array([r[c] for r in rows], t) for c, t in TYPES.items()}).to_pandas()
    configured = [ExpectationConfiguration(type=t, kwargs=kw, meta={"at": i}) for i, (t, kw) in enumerate(expectations)]
    suite = gx.ExpectationSuite("s", expectations=[c.to_domain_obj() for c in configured])
    validation = load_oracle().get_batch({"dataframe": frame}).validate(suite)
    raised = [r.exception_info for r in validation.results if r.exception_info.get("raised_exception", True)]
    assert not raised, raised
    outcomes = {
        r.expectation_config.meta["at"]: (bool(r.success), r.result.get("observed_value")) for r in validation.results
    }
    return [outcomes[i] for i in range(len(expectations))]


def _drop_clashes(expectations: list[Expectation]) -> list[Expectation]:
    """Drop expectations that Great Expectations would confuse with another one of the same suite.

    It takes the quantiles, or the value set, of one expectation for those of another of the same column.
    """

    def get_key(at: int, type_: str, kwargs: Mapping[str, Any]) -> object:
        shared = next((word for word in ("quantile", "distinct_values") if word in type_), None)
        return (shared, kwargs["column"]) if shared else at

    return list({get_key(i, *expectation): expectation for i, expectation in enumerate(expectations)}.values())


@pytest.mark.slow
@settings(
    max_examples=scale_examples(15),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(rows_, min_size=1, max_size=9), st.lists(expectations_, min_size=10, max_size=20).map(_drop_clashes))
def test_results_match_great_expectations(rows: list[Row], expectations: list[Expectation]) -> None:
    for expectation, result, (passed, observed) in zip(
        expectations, evaluate(rows, *expectations), evaluate_with_gx(rows, expectations), strict=True
    ):
        assert result.passed == passed, (expectation, result, observed)
        if isinstance(observed, int | float | Decimal) and not isinstance(observed, bool):
            number = float(result.observed.split()[0].replace(",", ""))
            assert number == pytest.approx(float(observed), abs=1e-12), (expectation, result)


def test_every_batch_expectation_is_implemented() -> None:
    assert {t for t, e in RULES.items() if e.scope is Scope.WHOLE} == DECIDED


# -- cases outside Great Expectations

ROW: Row = {"n": 1, "f": 0.5, "s": "x", "b": True, "a": Decimal("0.10"), "d": date(2026, 11, 20), "t": None}


def test_column_expectations_use_landed_columns() -> None:
    names = [*TYPES, "_extra", *(f"kafka_{c}" for c in ("key", "topic", "partition", "offset", "timestamp"))]
    names += ["kafka_timestampType", "kafka_headers", "kafka_tombstone"]
    cases: list[tuple[Expectation, bool]] = [
        (("expect_table_columns_to_match_ordered_list", {"column_list": names}), True),
        (("expect_table_columns_to_match_ordered_list", {"column_list": names[::-1]}), False),
        (("expect_table_columns_to_match_set", {"column_set": names[::-1]}), True),
        (("expect_table_columns_to_match_set", {"column_set": ["n"]}), False),
        (("expect_table_columns_to_match_set", {"column_set": ["n"], "exact_match": False}), True),
        (("expect_table_columns_to_match_set", {"column_set": ["gone"], "exact_match": False}), False),
        (("expect_table_column_count_to_equal", {"value": len(names)}), True),
        (("expect_table_column_count_to_be_between", {"max_value": 3}), False),
        (("expect_column_to_exist", {"column": "f"}), True),
        (("expect_column_to_exist", {"column": "f", "column_index": 1}), True),
        (("expect_column_to_exist", {"column": "f", "column_index": 2}), False),
        (("expect_column_to_exist", {"column": "f", "column_index": 99}), False),
    ]
    assert [r.passed for r in evaluate([ROW], *(e for e, _ in cases))] == [passed for _, passed in cases]


def test_tombstones_only_add_to_the_row_count() -> None:
    lake = MemoryLake()
    rows = [ROW, ROW | {"n": 3}, ROW, ROW]
    contract_shape = shape(
        ("expect_table_row_count_to_equal", {"value": 4}),
        ("expect_column_proportion_of_non_null_values_to_be_between", {"column": "n", "min_value": 1}),
        ("expect_compound_columns_to_be_unique", {"column_list": ["n", "t"], "ignore_row_if": "never"}),
        ("expect_column_mean_to_be_between", {"column": "n", "min_value": 2, "max_value": 2}),
    )
    results = hold_whole(contract_shape, [make_receipt(lake, rows, tombstones=[2, 3])], lake)  # type: ignore[arg-type]
    assert [r.passed for r in results] == [True] * 4
    assert [r.checked for r in results] == [0, 0, 2, 0]


def test_empty_batch_fails_only_row_count_expectations() -> None:
    lake = MemoryLake()
    contract_shape = shape(
        ("expect_column_mean_to_be_between", {"column": "n", "min_value": 2}),
        ("expect_column_distinct_values_to_contain_set", {"column": "s", "value_set": ["x"]}),
        ("expect_table_row_count_to_be_between", {"min_value": 1}),
    )
    empty = replace(make_receipt(lake, []), parts=(), counts=Counts(compacted=3))
    for receipts in ([empty], [empty, make_receipt(lake, [ROW], tombstones=[0])]):
        results = hold_whole(contract_shape, receipts, lake)  # type: ignore[arg-type]
        assert [(r.passed, r.observed) for r in results[:2]] == [(True, NO_ROWS)] * 2
        assert results[2].passed == (len(receipts) == 2)


@pytest.mark.parametrize(
    ("expectation", "rows", "observed"),
    [
        (("expect_column_max_to_be_between", {"column": "a", "min_value": 0.1, "max_value": 0.1}), [ROW], "0.10"),
        (("expect_column_max_to_be_between", {"column": "a", "max_value": "0.10"}), [ROW], "0.10"),
        (("expect_column_distinct_values_to_equal_set", {"column": "a", "value_set": [0.1]}), [ROW], None),
        (("expect_column_max_to_be_between", {"column": "d", "max_value": "2026-11-20"}), [ROW], "2026-11-20"),
        (("expect_column_min_to_be_between", {"column": "kafka_offset", "min_value": 0}), [ROW], "0"),
        (
            ("expect_column_sum_to_be_between", {"column": "n", "min_value": 2**32 - 2}),
            [ROW | {"n": 2**31 - 1}] * 2,
            "4,294,967,294",
        ),
    ],
)
def test_values_are_compared_with_precision_of_their_column(
    expectation: Expectation, rows: list[Row], observed: str | None
) -> None:
    (result,) = evaluate(rows, expectation)
    assert result.passed
    assert observed is None or result.observed == observed


@pytest.mark.parametrize(("values", "passed"), [((1e200, -1e200), True), ((math.inf, 1.0), False)])
def test_infinite_or_nan_deviation_is_handled_as_in_pandas(values: tuple[float, float], passed: bool) -> None:
    """The same as in pandas; DuckDB before version 2 raises an error for both."""
    row = {"n": 1, "s": "", "b": True, "a": Decimal(1), "d": date(2026, 11, 1), "t": None}
    bounds = {"column": "f", "min_value": 0}
    rules = [(f"expect_column_{name}_to_be_between", bounds) for name in ("stdev", "max")]
    assert [r.passed for r in evaluate([row | {"f": value} for value in values], *rules)] == [passed, True]


def test_nanoseconds_are_not_rounded() -> None:
    lake, schema = MemoryLake(), parse_schema({"t": "timestamp(ns)"})
    times = [1_795_000_000_000_000_001, 1_795_000_000_000_000_002]
    columns = {"t": pa.array(times, pa.timestamp("ns", "UTC")), "kafka_offset": [0, 1], "kafka_tombstone": [False] * 2}
    pq.write_table(pa.table(columns), sink := io.BytesIO())
    lake.put("x", sink.getvalue())
    expectations = [
        ("expect_column_values_to_be_unique", {"column": "t"}),
        ("expect_column_max_to_be_between", {"column": "t", "max_value": "2026-11-18T11:06:40.000000002Z"}),
        ("expect_column_max_to_be_between", {"column": "t", "max_value": "2026-11-18T11:06:40.000000001Z"}),
    ]
    suite = {"name": "x", "expectations": [{"type": t, "kwargs": kw} for t, kw in expectations]}
    receipt = Receipt(
        OffsetRange("o", 0, "i", 0, 2), 2, Counts(landed=2), (Part("x", PartKind.LANDED, "x", "x", 2, 1, ""),), "a"
    )
    results = hold_whole(Shape(schema, parse_contract(json.dumps(suite).encode(), schema)), [receipt], lake)  # type: ignore[arg-type]
    assert [r.passed for r in results] == [True, True, False]
    assert results[1].observed == "2026-11-18T11:06:40.000000002Z"


def test_duplicate_rows_are_listed_in_order() -> None:
    rows = [ROW | {"s": s} for s in "abcxbxay"]
    (result,) = evaluate(rows, ("expect_column_values_to_be_unique", {"column": "s"}))
    assert (result.checked, result.unexpected) == (8, 6)
    assert result.first == ("orders:0:0", "orders:0:1", "orders:0:3")


def test_strings_with_zero_bytes_are_compared_in_full() -> None:
    """In pandas, and so in Great Expectations, a string ends at a zero byte."""
    rows = [ROW | {"s": s} for s in ("a", "a\0", "a\0b")]
    expectations = [
        ("expect_column_values_to_be_unique", {"column": "s"}),
        ("expect_column_distinct_values_to_be_in_set", {"column": "s", "value_set": ["a", "a\0"]}),
    ]
    assert [r.passed for r in evaluate(rows, *expectations)] == [True, False]
    assert evaluate(rows[:2], expectations[1])[0].passed


def test_results_do_not_reveal_record_text() -> None:
    rows = [ROW | {"s": "secret"}, ROW | {"s": "secret"}, ROW | {"s": "other"}]
    types = [t for t, e in RULES.items() if e.scope is Scope.WHOLE and "value_set" in e.kwargs]
    expectations: list[Expectation] = [(t, {"column": "s", "value_set": ["x"]}) for t in types]
    expectations += [("expect_column_values_to_be_unique", {"column": "s"})]
    results = evaluate(rows, *expectations)
    assert not any(r.passed for r in results)
    assert "secret" not in repr(results)


def test_raw_feed_expectations_use_record_columns() -> None:
    lake = MemoryLake()
    table = pa.table({"key": pa.array([b"a", b"a", None, b"\xff"]), "offset": [0, 1, 2, 3]})
    pq.write_table(table, sink := io.BytesIO())
    lake.put("x", sink.getvalue())
    contract_shape = shape(
        ("expect_column_values_to_be_unique", {"column": "key", "mostly": 0.3}),
        ("expect_column_unique_value_count_to_be_between", {"column": "key", "min_value": 2, "max_value": 2}),
        ("expect_column_max_to_be_between", {"column": "offset", "max_value": 3}),
        raw=True,
    )
    receipt = Receipt(
        OffsetRange("o", 0, "i", 0, 4), 4, Counts(landed=4), (Part("x", PartKind.LANDED, "x", "x", 4, 1, ""),), "a"
    )
    results = hold_whole(contract_shape, [receipt], lake)  # type: ignore[arg-type]
    assert [(r.passed, r.checked, r.unexpected) for r in results] == [(True, 3, 2), (True, 0, 0), (True, 0, 0)]
    assert results[0].first == ("o:0:0", "o:0:1")
    assert RAW.contract is None
    assert hold_whole(RAW, [receipt], lake) == ()  # type: ignore[arg-type]


# -- the volume against the batches before


def expect_volume(fn: str = "mean", range_: int = 3, strict: bool = False, **bounds: float) -> Expectation:
    window = {"constraint_fn": fn, "range": range_, "strict": strict, "offset": {"positive": 0.5, "negative": 0.5}}
    windows = [window | {"parameter_name": name} for name in bounds]
    return "expect_table_row_count_to_be_between", {n: {"$PARAMETER": n} for n in bounds} | {"windows": windows}


@pytest.mark.parametrize(
    ("expectation", "earlier", "passed"),
    [
        (expect_volume(min_value=1), [8, 8, 8], True),
        (expect_volume(min_value=1), [9, 8, 8], False),
        (expect_volume(min_value=1), [8, 8, 8, 1000], True),
        (expect_volume(max_value=1), [3, 3, 3], True),
        (expect_volume(max_value=1), [2, 3, 2], False),
        (expect_volume("median", min_value=1), [1, 8, 1000], True),
        (expect_volume("min", min_value=1), [8, 90, 90], True),
        (expect_volume("max", max_value=1), [1, 1, 3], True),
        (expect_volume(min_value=1, max_value=1), [4, 4, 4], True),
        (expect_volume(min_value=1), [100, 100], True),
        (expect_volume(min_value=1, strict=True), [100, 100], False),
    ],
)
def test_row_count_is_compared_with_earlier_batches(expectation: Expectation, earlier: list[int], passed: bool) -> None:
    (result,) = evaluate([ROW] * 4, expectation, earlier=earlier)
    assert result.passed == passed
    assert ("no history yet: 2 of 3 batches" in result.observed) == (len(earlier) < 3)


# -- memory, and errors of the lake


def test_lake_error_is_raised_unchanged() -> None:
    class Away(MemoryLake):
        def open(self, path: str) -> Any:
            raise LakeUnavailable("away")

    lake = MemoryLake()
    receipt = make_receipt(lake, [ROW])
    with pytest.raises(LakeUnavailable):
        hold_whole(shape(("expect_column_values_to_be_unique", {"column": "s"})), [receipt], Away())  # type: ignore[arg-type]


_LARGE = """
import io, resource
import numpy as np, pyarrow as pa, pyarrow.compute as pc, pyarrow.parquet as pq
from sluice.testing.lake import MemoryLake
from tests.pipelines.validation.test_batch_expectations import shape
from sluice.pipelines.validation.batch_expectations import hold_whole
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt, OffsetRange
lake, receipts, rows = MemoryLake(), [], 100_000
asked = shape(
    ("expect_column_values_to_be_unique", {"column": "s"}),
    ("expect_column_median_to_be_between", {"column": "f", "min_value": 0}),
)
for i in range(8):
    at = np.arange(i * rows, (i + 1) * rows)
    text = pc.binary_join_element_wise(pa.array(at).cast(pa.string()), "x" * 300, "-")
    columns = {"s": text, "f": at * 7919 % 1000003 / 8, "kafka_offset": at, "kafka_tombstone": np.zeros(rows, bool)}
    pq.write_table(pa.table(columns), sink := io.BytesIO(), row_group_size=1 << 14)
    lake.put(name := f"p{i}", sink.getvalue())
    part = Part(name, PartKind.LANDED, name, name, rows, 1, "")
    s = OffsetRange("o", 0, "i", i * rows, (i + 1) * rows)
    receipts.append(Receipt(s, s.end, Counts(landed=rows), (part,), "a"))
del at, text, columns, sink
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = hold_whole(asked, receipts, lake, memory=96 << 20)
assert [(r.passed, r.checked) for r in found] == [(True, 800_000), (True, 0)], found
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10)
"""


@pytest.mark.slow
def test_memory_is_bounded_for_large_batch() -> None:
    """800,000 distinct strings of 306 bytes are 245 MB; counting them takes twice that."""
    root = str(Path(__file__).parents[3])
    env = os.environ | {"PYTHONPATH": root}
    command = [sys.executable, "-c", _LARGE]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 240, "MiB more than the files"
