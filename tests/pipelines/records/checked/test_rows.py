"""Row expectations find the same rows as Great Expectations on pandas; cases without an oracle follow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sluice.pipelines.contract.catalogue import RULES, Scope
from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.contract.suite import parse_contract
from sluice.pipelines.records.contract_rows.contract_format import RowChecks
from sluice.pipelines.schema.schema import Schema, parse_schema

COLUMNS = {
    "n": "int64",
    "k": "int8",
    "f": "float64",
    "g": "float32",
    "m": "decimal(9,2)",
    "s": "string",
    "r": "string",
    "t": "timestamp(ms)",
    "u": "timestamp(us)",
    "d": "date",
    "e": "date",
    "b": "bool",
    "j": "json",
}
TIMES = [
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2026, 1, 1, 0, 0, 0, 1000, tzinfo=UTC),
    datetime(1969, 7, 1, tzinfo=UTC),
]
DATES = [date(2026, 1, 1), date(2026, 1, 2), date(1960, 2, 29)]
WORDS = ["", "a", "ab", "EUR", "Ärger", "a\nb", "x1", "日本", "a b", "abc" * 9]
FLOATS = [0.0, -0.0, 0.25, 1.5, -2.0, math.inf, -math.inf, math.nan]
POOLS: Mapping[str, Sequence[Any]] = {
    "n": [-3, 0, 1, 2, 3, 1 << 40],
    "k": [-3, 0, 1, 2, 127],
    "f": FLOATS,
    "g": FLOATS,
    "m": [Decimal(q) / 4 for q in (-8, 0, 1, 6, 400)],
    "s": WORDS,
    "r": WORDS,
    "t": TIMES,
    "u": [*TIMES, TIMES[0] + timedelta(microseconds=1)],
    "d": DATES,
    "e": DATES,
    "b": [True, False],
    "j": ["null", "[]"],
}
ARROW = {
    "n": pa.int64(),
    "k": pa.int8(),
    "f": pa.float64(),
    "g": pa.float32(),
    "m": pa.decimal128(9, 2),
    "s": pa.string(),
    "r": pa.dictionary(pa.int16(), pa.string()),
    "t": pa.timestamp("ms", "UTC"),
    "u": pa.timestamp("us", "UTC"),
    "d": pa.date32(),
    "e": pa.date32(),
    "b": pa.bool_(),
    "j": pa.string(),
}
NUMBERS = ("n", "k", "f", "g", "m")
REGEXES = ["a", "^a", "b$", "[A-Z]{3}", "^$", "(?i)eur", "a|x1", "[0-9]", "^[^a]+$", "日", "^.{2}$", r"\.", "(?s)a.b"]

Table = dict[str, list[Any]]
Expectation = tuple[str, dict[str, Any]]


def make_rows(table: Table, first: int = 100) -> pa.RecordBatch:
    """Make rows of a typed feed, with the columns that checks read."""
    n = len(next(iter(table.values())))
    arrays = {name: pa.array(values, ARROW[name]) for name, values in table.items()}
    arrays["kafka_offset"] = pa.array(range(first, first + n), pa.int64())
    arrays["kafka_tombstone"] = pa.array([False] * n)
    return pa.record_batch(arrays)


def make_contract(*expectations: Expectation, schema: Schema | None = None, severity: str = "critical") -> Contract:
    items = [{"type": t, "kwargs": k, "severity": severity} for t, k in expectations]
    text = json.dumps({"expectations": items}, default=_to_text)
    return parse_contract(text.encode(), schema or parse_schema(COLUMNS))


def _to_text(value: object) -> object:
    return str(value) if isinstance(value, Decimal) else value.isoformat()  # type: ignore[attr-defined]


# -- the oracle


class Oracle:
    """Judges expectations with Great Expectations on pandas."""

    def __init__(self) -> None:
        os.environ["GX_ANALYTICS_ENABLED"] = "false"
        import great_expectations as gx

        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False, "metric_calculations": False}
        asset = context.data_sources.add_pandas("rows").add_dataframe_asset("rows")
        self._definition = asset.add_batch_definition_whole_dataframe("rows")
        self._gx = gx

    def judge(self, table: Table, expectations: Sequence[Expectation]) -> list[tuple[int, list[int]]]:
        """Return, for each expectation, the number of rows that it checked and the unexpected rows."""
        import great_expectations.expectations as gxe

        suite = self._gx.ExpectationSuite(name="rows")
        for index, (type_, kwargs) in enumerate(expectations):
            name = "".join(w.capitalize() for w in type_.split("_"))
            native = {k: _to_native(v) for k, v in kwargs.items()}
            suite.add_expectation(getattr(gxe, name)(**native, meta={"place": index}))
        batch = self._definition.get_batch({"dataframe": self._make_frame(table)})
        validation = batch.validate(suite, result_format={"result_format": "COMPLETE"})
        in_order = sorted(validation.results, key=lambda r: int(r.expectation_config.meta["place"]))
        return [self._read(r) for r in in_order]

    @staticmethod
    def _read(result: Any) -> tuple[int, list[int]]:
        assert not result.exception_info.get("raised_exception", True), result.exception_info
        details = result.result
        return details["element_count"] - (details.get("missing_count") or 0), details["unexpected_index_list"]

    @staticmethod
    def _make_frame(table: Table) -> Any:
        import pandas as pd

        frame = {}
        for name, values in table.items():
            if name in NUMBERS:
                frame[name] = pd.Series([math.nan if v is None else float(v) for v in values], dtype="float64")
            elif name in ("t", "u"):
                frame[name] = pd.to_datetime(pd.Series(values, dtype="datetime64[ns, UTC]"), utc=True)
            else:
                frame[name] = pd.Series(values, dtype=object)
        return pd.DataFrame(frame)


def _to_native(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_native(v) for v in value]
    return float(value) if isinstance(value, Decimal) else value


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def generate_members(name: str) -> st.SearchStrategy[list[Any]]:
    finite = [v for v in POOLS[name] if not isinstance(v, float) or math.isfinite(v)]
    return st.lists(st.sampled_from(finite), min_size=1, max_size=4)


@st.composite
def generate_bounds(draw: st.DrawFn, values: Sequence[Any]) -> dict[str, Any]:
    low, high = sorted(draw(st.tuples(st.sampled_from(values), st.sampled_from(values))))
    limits = {"min_value": low, "max_value": high}
    if draw(st.integers(0, 3)) == 0:
        del limits[draw(st.sampled_from(["min_value", "max_value"]))]
    return limits | {k: True for k in ("strict_min", "strict_max") if draw(st.booleans())}


BOUNDS: Mapping[str, Sequence[Any]] = {
    "n": [-3, 0, 1, 0.5, 2.5, 1 << 40],
    "k": [-300, -3, 0, 1.5, 127, 300],
    "f": [-2.0, 0.0, 0.25, 1.5],
    "g": [-2.0, 0.0, 0.25, 1.5],
    "m": [Decimal("-2.00"), Decimal("0.25"), Decimal("0.251"), 100],
    "t": [*TIMES, TIMES[0] + timedelta(microseconds=1)],
    "d": DATES,
}


@st.composite
def generate_expectations(draw: st.DrawFn) -> list[Expectation]:
    """Generate at least one of every row expectation, on columns of every family."""
    c = "expect_column_values_to_"
    expectations: list[Expectation] = [
        (f"{c}{check}", {"column": name}) for name in ("f", "s", "j") for check in ("be_null", "not_be_null")
    ]
    for name in ("n", "f", "g", "m", "s", "r", "t", "d", "b"):
        for kind in ("be_in_set", "not_be_in_set"):
            expectations.append((c + kind, {"column": name, "value_set": draw(generate_members(name))}))
    expectations += [
        (f"{c}be_between", {"column": name} | draw(generate_bounds(values))) for name, values in BOUNDS.items()
    ]
    for name in ("s", "r"):
        lengths = draw(generate_bounds([0, 1, 2, 3, 27]))
        expectations.append(("expect_column_value_lengths_to_be_between", {"column": name} | lengths))
        expectations.append(
            ("expect_column_value_lengths_to_equal", {"column": name, "value": draw(st.integers(0, 5))})
        )
        for kind in ("match_regex", "not_match_regex"):
            expectations.append((c + kind, {"column": name, "regex": draw(st.sampled_from(REGEXES))}))
        regexes = st.lists(st.sampled_from(REGEXES), min_size=1, max_size=3, unique=True)
        on = draw(st.sampled_from(["any", "all"]))
        expectations.append((c + "match_regex_list", {"column": name, "regex_list": draw(regexes), "match_on": on}))
        expectations.append((c + "not_match_regex_list", {"column": name, "regex_list": draw(regexes)}))
    return expectations + draw(generate_multicolumn())


@st.composite
def generate_multicolumn(draw: st.DrawFn) -> list[Expectation]:
    expectations: list[Expectation] = []
    pair = partial(st.sampled_from, ["both_values_are_missing", "either_value_is_missing", "neither"])
    many = partial(st.sampled_from, ["all_values_are_missing", "any_value_is_missing", "never"])
    p = "expect_column_pair_values_"
    for a, b in (["n", "k"], ["s", "r"], ["t", "u"], ["d", "e"], ["f", "g"], ["n", "m"], ["n", "f"]):
        names = {"column_A": a, "column_B": b}
        expectations.append((f"{p}to_be_equal", names | {"ignore_row_if": draw(pair())}))
        pairs = draw(
            st.lists(st.tuples(*(st.sampled_from([*_list_finite(x), None]) for x in (a, b))).map(list), min_size=1)
        )
        expectations.append((f"{p}to_be_in_set", names | {"value_pairs_set": pairs[:6], "ignore_row_if": draw(pair())}))
        if a != "s":
            or_equal = draw(st.booleans())
            greater = names | {"or_equal": or_equal, "ignore_row_if": draw(pair())}
            expectations.append((f"{p}a_to_be_greater_than_b", greater))
    for names_ in (["n", "k", "m"], ["s", "r"], ["t", "u"], ["d", "e"], ["f", "g", "n"]):
        unique = {"column_list": names_, "ignore_row_if": draw(many())}
        expectations.append(("expect_select_column_values_to_be_unique_within_record", unique))
    for names_, total in ((["n", "k", "m"], 3.25), (["n", "k"], 3), (["f", "g"], 1.75), (["k", "m"], 0.125)):
        sums = {"column_list": names_, "sum_total": total, "ignore_row_if": draw(many())}
        expectations.append(("expect_multicolumn_sum_to_equal", sums))
    return expectations


def _list_finite(name: str) -> list[Any]:
    return [v for v in POOLS[name] if not isinstance(v, float) or math.isfinite(v)]


@st.composite
def generate_table(draw: st.DrawFn) -> Table:
    n = draw(st.integers(1, 40))
    return {
        name: draw(st.lists(st.sampled_from([*pool, None]), min_size=n, max_size=n)) for name, pool in POOLS.items()
    }


@pytest.mark.slow
@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
@given(table=generate_table(), expectations=generate_expectations())
def test_unexpected_rows_match_great_expectations_on_pandas(
    oracle: Oracle, table: Table, expectations: list[Expectation]
) -> None:
    assert {t for t, _ in expectations} == {e.type for e in RULES.values() if e.scope is Scope.ROW}
    result = RowChecks(make_contract(*expectations, severity="info")).check(make_rows(table))
    results = [(t.checked, find_broken_rows(t, table, expectations[t.expectation])) for t in result.tallies]
    for expectation, ours, theirs in zip(expectations, results, oracle.judge(table, expectations), strict=True):
        assert ours == theirs, expectation


def find_broken_rows(tally: Any, table: Table, expectation: Expectation) -> list[int]:
    """Return the rows that break one expectation: those that it alone would quarantine."""
    result = RowChecks(make_contract(expectation)).check(make_rows(table))
    assert result.tallies[0].unexpected == tally.unexpected == len(result.broken.rows)
    assert [100 + r for r in result.broken.rows[:3].tolist()] == list(tally.first)
    return result.broken.rows.tolist()


# -- cases without an oracle

EXTREMES = {
    "n": (pa.int64(), [-(1 << 63), -1, 0, 1, (1 << 53) + 1, (1 << 63) - 1]),
    "w": (pa.uint64(), [0, 1, (1 << 53), (1 << 63), (1 << 64) - 1, (1 << 53) + 1]),
    "t": (pa.int64(), [-(1 << 63), -1, 0, 1, 1_700_000_000_000, (1 << 63) - 1]),
    "u": (pa.int64(), [-(1 << 63), -1000, 1, 1000, 1_700_000_000_000_000, (1 << 63) - 1]),
    "m": (
        pa.decimal128(18, 4),
        [Decimal("-99999999999999.9999"), Decimal(-1), Decimal("0.0001"), Decimal(1), Decimal(0), None],
    ),
}
WIDE = parse_schema({"n": "int64", "w": "uint64", "t": "timestamp(ms)", "u": "timestamp(us)", "m": "decimal(18,4)"})


def make_extremes() -> pa.RecordBatch:
    arrays = {name: pa.array(values, kind) for name, (kind, values) in EXTREMES.items()}
    arrays |= {k: arrays[k].view(pa.timestamp(unit, "UTC")) for k, unit in (("t", "ms"), ("u", "us"))}
    return pa.record_batch(arrays | {"kafka_offset": pa.array(range(6), pa.int64())})


@pytest.mark.parametrize(("a", "b", "factor"), [("n", "w", 1), ("t", "u", 1000), ("n", "m", 1), ("w", "m", 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_extreme_values_are_compared_exactly(a: str, b: str, factor: int, turned: bool) -> None:
    left_values = [None if v is None else v * factor for v in EXTREMES[a][1]]
    right_values = EXTREMES[b][1]
    names = {"column_A": b, "column_B": a} if turned else {"column_A": a, "column_B": b}
    pairs = [*zip(right_values, left_values, strict=True)] if turned else [*zip(left_values, right_values, strict=True)]
    greater = make_contract(("expect_column_pair_values_a_to_be_greater_than_b", names), schema=WIDE)
    equal = make_contract(("expect_column_pair_values_to_be_equal", names), schema=WIDE)
    unequal = [i for i, (x, y) in enumerate(pairs) if x is None or y is None or x != y]
    assert RowChecks(equal).check(make_extremes()).broken.rows.tolist() == unequal
    assert RowChecks(greater).check(make_extremes()).broken.rows.tolist() == [
        i for i, (x, y) in enumerate(pairs) if x is None or y is None or x <= y
    ]


def test_sums_do_not_overflow() -> None:
    expectation = ("expect_multicolumn_sum_to_equal", {"column_list": ["n", "w"], "sum_total": -1})
    left_values, right_values = EXTREMES["n"][1], EXTREMES["w"][1]
    assert RowChecks(make_contract(expectation, schema=WIDE)).check(make_extremes()).broken.rows.tolist() == [
        i for i, (x, y) in enumerate(zip(left_values, right_values, strict=True)) if x + y != -1
    ]


@pytest.mark.parametrize("total", [1 << 63, -(1 << 64), 1e300, -(1 << 63), 254])
def test_sums_of_narrow_integers_match_only_exact_totals(total: float) -> None:
    """254 is the sum of the first row."""
    expectation = ("expect_multicolumn_sum_to_equal", {"column_list": ["a", "b"], "sum_total": total})
    rows = pa.record_batch(
        {name: pa.array([127, -128, 0], pa.int8()) for name in "ab"} | {"kafka_offset": pa.array(range(3), pa.int64())}
    )
    broken = (
        RowChecks(make_contract(expectation, schema=parse_schema({"a": "int8", "b": "int8"}))).check(rows).broken.rows
    )
    assert broken.tolist() == ([1, 2] if total == 254 else [0, 1, 2])


def test_set_members_are_rounded_to_the_nearest_narrow_float() -> None:
    """The nearest float to 1e-320 is 0, of either sign."""
    table: Table = {"g": [0.0, -0.0, 0.1, math.inf, 3.4e38]}
    expectation = ("expect_column_values_to_be_in_set", {"column": "g", "value_set": [1e-320, 0.1, 3.4e38]})
    assert RowChecks(make_contract(expectation)).check(make_rows(table)).broken.rows.tolist() == [3]


@pytest.mark.parametrize(
    ("kwargs", "broken"),
    [
        ({"min_value": 0.1}, [0, 3]),
        ({"max_value": 0.1}, [1, 2, 4]),
        ({"min_value": 0.10000000149011612, "strict_min": True}, [0, 1, 3]),
        ({"min_value": 1e39}, [0, 1, 2, 3]),
        ({"max_value": -1e39}, [0, 1, 2, 4]),
    ],
)
def test_bounds_are_rounded_inward_to_narrow_floats(kwargs: dict[str, float], broken: list[int]) -> None:
    """0.1 is between two such floats: the one above is 0.10000000149011612."""
    table: Table = {"g": [0.05, 0.1, 1.0, -math.inf, math.inf, math.nan, None]}
    result = RowChecks(make_contract(("expect_column_values_to_be_between", {"column": "g"} | kwargs))).check(
        make_rows(table)
    )
    assert result.broken.rows.tolist() == broken
    assert result.tallies[0].checked == 5


@pytest.mark.parametrize(
    ("column", "kwargs", "broken"),
    [
        ("k", {"min_value": 128}, [0, 1, 2]),
        ("k", {"max_value": 127}, []),
        ("k", {"min_value": -0.5, "max_value": 0.5}, [0, 2]),
        ("m", {"min_value": "0.001"}, [0]),
        ("m", {"min_value": 0, "strict_min": True}, [0]),
        ("m", {"max_value": "9999999.99", "strict_max": True}, [2]),
        ("t", {"max_value": "2026-01-01T00:00:00.0009"}, [2]),
        ("t", {"min_value": "2026-01-01T00:00:00.0001+00:00"}, [0, 1]),
        ("t", {"min_value": "2026-01-01T01:00:00+01:00", "strict_min": True}, [0, 1]),
        ("d", {"min_value": "2026-01-01", "strict_min": True, "max_value": "9999-12-31"}, [0, 1]),
    ],
)
def test_bounds_finer_or_wider_than_the_column_are_applied_exactly(
    column: str, kwargs: dict[str, Any], broken: list[int]
) -> None:
    table: Table = {
        "k": [-128, 0, 127, None],
        "m": [Decimal(0), Decimal("0.01"), Decimal("9999999.99"), None],
        "t": [datetime(1, 1, 1, tzinfo=UTC), TIMES[0], TIMES[1], None],
        "d": [date(1, 1, 1), DATES[0], DATES[1], None],
    }
    expectation = ("expect_column_values_to_be_between", {"column": column} | kwargs)
    assert RowChecks(make_contract(expectation)).check(make_rows(table)).broken.rows.tolist() == broken


def test_batch_slice_is_checked_like_a_copied_batch() -> None:
    table: Table = {"s": [*WORDS, None] * 3, "f": [0.0, None, math.nan] * 11, "n": [*range(33)]}
    c = "expect_column_values_to_"
    checks = RowChecks(
        make_contract(
            (f"{c}match_regex", {"column": "s", "regex": "^a"}),
            ("expect_column_value_lengths_to_be_between", {"column": "s", "max_value": 2}),
            (f"{c}not_be_null", {"column": "f"}),
            (f"{c}not_be_in_set", {"column": "f", "value_set": [0]}),
            (
                "expect_column_pair_values_to_be_in_set",
                {"column_A": "n", "column_B": "s", "value_pairs_set": [[20, "r"]]},
            ),
        )
    )
    batch = make_rows(table)
    parts = [checks.check(pa.record_batch(batch.slice(i, 5))) for i in range(0, 33, 5)]
    copied = [checks.check(batch.take(pa.array(range(i, min(i + 5, 33))))) for i in range(0, 33, 5)]
    assert [p.tallies for p in parts] == [p.tallies for p in copied]
    assert [p.broken.rows.tolist() for p in parts] == [p.broken.rows.tolist() for p in copied]
    assert [p.broken.expectations.tolist() for p in parts] == [p.broken.expectations.tolist() for p in copied]


def test_regex_classes_are_ascii_and_dollar_matches_only_the_end() -> None:
    table: Table = {"s": ["٣", "3", "Ä", "x", "x\n"]}
    for regex, broken in ((r"^\d$", [0, 2, 3, 4]), (r"^\w$", [0, 2, 4]), ("^.$", [4])):
        expectation = ("expect_column_values_to_match_regex", {"column": "s", "regex": regex})
        assert RowChecks(make_contract(expectation)).check(make_rows(table)).broken.rows.tolist() == broken
