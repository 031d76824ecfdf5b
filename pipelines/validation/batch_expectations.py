"""Decides whether a batch meets its contract, before anything is published: expectations about all its rows at once.

A batch that fails a critical expectation stays staged and planned, and no offset moves. The next run takes it over:
under the same contract it decides again without reading from Kafka, under another one it reads again.

Expectations are decided as Great Expectations decides them on pandas. Nulls and NaN do not count as values. Tombstones
do not count as rows, except where rows are counted, because they land as rows. If nothing else landed, only
expectations about the numbers of rows and columns can be broken. Sums of integers are exact. Results contain numbers,
never text or bytes. Memory is bounded for any batch (`duckdb_table`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from sluice.pipelines.contract import literals
from sluice.pipelines.contract.catalogue import (
    RULES,
    ExpectationOutcome,
    Result,
    Scope,
    column_types,
    columns,
    contract_results,
    enough,
    get_argument,
    rule_of,
    text,
)
from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.errors import Breach, ContractBroken
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.model.plans import Request
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import Kind, Type, TypeFamily
from sluice.pipelines.schema.wider import unit_of
from sluice.pipelines.util.units import join_first, many, show_float
from sluice.pipelines.validation.duckdb_table import MEMORY, Counted, StagedTable

PARAMETER = "$PARAMETER"
FUNCTIONS: Mapping[str, Callable[[Sequence[int]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}
"""The values of `constraint_fn`, and their functions."""


class NoHistoryError(Exception):
    """A parameter has no value yet: it needs `needed` batches and has `there`. `strict` fails the expectation."""

    def __init__(self, strict: bool, needed: int, there: int) -> None:
        super().__init__(f"no history yet: {there} of {needed} batches")
        self.strict = strict


def find_bounds(e: Expectation, earlier: Sequence[int]) -> tuple[float | None, float | None]:
    """Returns the least and the most rows, or columns, that the expectation allows; None where there is no bound.

    One `value` is both. Bounds may be parameters (Great Expectations' `windows`, docs/contracts.md). A parameter's
    value is `constraint_fn` of the last `range` row counts in `earlier`, the newest first: a lower bound is that value
    less the share `negative`, an upper bound that value plus the share `positive`. Raises NoHistoryError when there are
    too few. The expectation then passes, or fails if the window is `strict`; in Great Expectations it always fails.
    """
    if (value := e.kwargs.get("value")) is not None:
        return value, value
    minimum = _compute_bound(e, "min_value", earlier, lambda w: 1 - float(w["offset"]["negative"]))
    maximum = _compute_bound(e, "max_value", earlier, lambda w: 1 + float(w["offset"]["positive"]))
    return minimum, maximum


def _compute_bound(
    e: Expectation, name: str, earlier: Sequence[int], factor: Callable[[Mapping[str, Any]], float]
) -> float | None:
    value = e.kwargs.get(name)
    if not isinstance(value, Mapping):
        return value
    window = next(w for w in e.kwargs.get("windows") or () if w["parameter_name"] == value[PARAMETER])
    rows = earlier[: window["range"]]
    if len(rows) < window["range"]:
        raise NoHistoryError(bool(window.get("strict")), window["range"], len(rows))
    return FUNCTIONS[window["constraint_fn"]](rows) * factor(window)


def count_earlier_rows(state: State, request: Request, before: int) -> list[int]:
    """How many rows each earlier batch landed, the newest first.

    Counts batches that were planned before ledger number `before`, for the same kind of request and the same
    partitions, and that landed as a whole.
    """
    like = (b for b in state.batches.newest_first(before) if _get_kind(b.request) == _get_kind(request))
    return [b.rows for b in like if b.published is not None and not b.failed]


def _get_kind(request: Request) -> tuple[object, ...]:
    """Returns the key of comparable requests: their kind, one window or several, and the partitions."""
    return request.kind, request.until is None, request.only


Number = int | float | Decimal
NO_ROWS = "no rows"
_MAX_NAMES = 20


def hold_whole(
    shape: Shape, receipts: Sequence[Receipt], lake: Lake, earlier: Sequence[int] = (), memory: int = MEMORY
) -> tuple[Result, ...]:
    """Returns the results of the batch's expectations, in the contract's order, from the receipts' staged parts.

    `earlier` are the row counts of earlier batches (`count_earlier_rows`). `memory` (bytes) limits DuckDB.
    Raises Failed if the local disk is full, LakeUnavailable, PartUnreadable.
    """
    expectations = [
        e for e in (shape.contract.expectations if shape.contract else ()) if rule_of(e).scope is Scope.WHOLE
    ]
    batch = BatchContext(sum(r.counts.landed for r in receipts), tuple(column_types(shape.landed_columns)), earlier)
    results = [_OF_TABLES[e.type](e, batch) for e in expectations if e.type in _OF_TABLES]
    if of_rows := [e for e in expectations if e.type not in _OF_TABLES]:
        results += _of_rows(of_rows, shape, receipts, lake, memory)
    return tuple(sorted(results, key=lambda r: r.expectation))


def is_between(value: Any, e: Expectation, low: Any, high: Any) -> bool:
    """Returns true if the value is within the bounds, which are inclusive unless the expectation is strict.

    None and NaN are never within.
    """
    if value is None or value != value:
        return False
    strict_min, strict_max = e.kwargs.get("strict_min"), e.kwargs.get("strict_max")
    above = low is None or (value > low if strict_min else value >= low)
    return above and (high is None or (value < high if strict_max else value <= high))


# -- expectations without rows


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The facts about a batch before its rows are read: rows, columns, and the rows of earlier batches."""

    rows: int
    columns: tuple[str, ...]
    earlier: Sequence[int]


def _check_row_count(e: Expectation, batch: BatchContext) -> Result:
    try:
        low, high = find_bounds(e, batch.earlier)
    except NoHistoryError as none:
        return Result(e.place, not none.strict, f"{batch.rows:,} rows; {none}")
    return Result(e.place, is_between(batch.rows, e, low, high), many(batch.rows, "row"))


def _check_column_count(e: Expectation, batch: BatchContext) -> Result:
    there = len(batch.columns)
    return Result(e.place, is_between(there, e, *find_bounds(e, ())), f"{there} columns")


def _check_column_set(e: Expectation, batch: BatchContext) -> Result:
    wanted, there = set(e.kwargs["column_set"]), set(batch.columns)
    missing, more = sorted(wanted - there), sorted(there - wanted)
    passed = not missing and not (more and get_argument(e, "exact_match"))
    differences = [
        f"{word} {join_first(names, _MAX_NAMES)}" for word, names in (("without", missing), ("with", more)) if names
    ]
    return Result(e.place, passed, "; ".join(differences))


def _check_column_list(e: Expectation, batch: BatchContext) -> Result:
    return Result(e.place, list(batch.columns) == list(e.kwargs["column_list"]), join_first(batch.columns, _MAX_NAMES))


def _check_column_exists(e: Expectation, batch: BatchContext) -> Result:
    """Great Expectations counts a column's index from 0, and takes index 0 for any place."""
    name, index = e.kwargs["column"], e.kwargs.get("column_index")
    passed = batch.columns[index : index + 1] == (name,) if index else name in batch.columns
    return Result(e.place, passed)


_OF_TABLES: Mapping[str, Callable[[Expectation, BatchContext], Result]] = {
    "expect_table_row_count_to_be_between": _check_row_count,
    "expect_table_row_count_to_equal": _check_row_count,
    "expect_table_column_count_to_be_between": _check_column_count,
    "expect_table_column_count_to_equal": _check_column_count,
    "expect_table_columns_to_match_set": _check_column_set,
    "expect_table_columns_to_match_ordered_list": _check_column_list,
    "expect_column_to_exist": _check_column_exists,
}


# -- expectations on rows


def _of_rows(
    expectations: Sequence[Expectation], shape: Shape, receipts: Sequence[Receipt], lake: Lake, memory: int
) -> Iterator[Result]:
    types = column_types(shape.landed_columns)
    needed = {name: types[name] for e in expectations for name in columns(e)}
    placed = any(e.type in _UNIQUE for e in expectations)
    with StagedTable.create(needed, typed=shape.columns is not None, placed=placed, memory=memory) as table:
        table.add(receipts, lake)
        if not table.rows:
            yield from (Result(e.place, True, NO_ROWS) for e in expectations)
            return
        yield from _of_aggregates([e for e in expectations if rule_of(e).aggregate], table, types)
        yield from (_QUANTILES[e.type](e, table) for e in expectations if e.type in _QUANTILES)
        counted = sorted((e for e in expectations if e.type in _COUNTED), key=columns)
        for names, group in groupby(counted, key=columns):
            with table.count_distinct(names) as values:
                yield from (_COUNTED[e.type](e, values, table, types[names[0]]) for e in group)


def _of_aggregates(
    expectations: Sequence[Expectation], table: StagedTable, types: Mapping[str, Type]
) -> Iterator[Result]:
    """Decide all aggregates in one query."""
    values = table.aggregates([(rule_of(e).aggregate, e.kwargs["column"]) for e in expectations])
    for e in expectations:
        function, column = rule_of(e).aggregate, e.kwargs["column"]
        value, t = values[function, column], types[column]
        if function in ("min", "max"):
            low, high = (_read_bound(t, e.kwargs.get(name)) for name in ("min_value", "max_value"))
            compared = value * literals.PER_UNIT[unit_of(t)] if value is not None and _is_time(t) else value
            yield Result(e.place, is_between(compared, e, low, high), _format_value(value, t))
        elif function == "count":
            yield _of_number(e, value / table.rows)
        else:
            yield _of_number(e, 0 if function == "sum" and value is None else value)


def _of_number(e: Expectation, value: Number | None) -> Result:
    return Result(
        e.place, is_between(value, e, e.kwargs.get("min_value"), e.kwargs.get("max_value")), format_number(value)
    )


def _read_bound(t: Type, value: object) -> Any:
    """The bound, as exact as the column: for a float32 column, 0.1 means the float32 nearest to it."""
    if value is None:
        return None
    bound = literals.parse_bound(t, value)
    return float(np.float32(bound)) if t.kind is Kind.FLOAT32 else bound


def _is_time(t: Type) -> bool:
    return t.kind.family is TypeFamily.TIME


def _check_median(e: Expectation, table: StagedTable) -> Result:
    column = e.kwargs["column"]
    n = table.aggregates([("count", column)])["count", column]
    if not n:
        return _of_number(e, None)
    values = table.read_ranks(column, [(n - 1) // 2, n // 2])
    low, high = values[(n - 1) // 2], values[n // 2]
    middle = low if n % 2 else (low + high) / 2
    return _of_number(e, float(middle) if isinstance(middle, Decimal) else middle)


def _check_quantiles(e: Expectation, table: StagedTable) -> Result:
    """For each quantile the value at the nearest rank; of two equally near ranks, the even one."""
    column, ranges = e.kwargs["column"], e.kwargs["quantile_ranges"]
    n = table.aggregates([("count", column)])["count", column]
    if not n:
        return Result(e.place, not ranges["quantiles"])
    ranks = [round((n - 1) * q) for q in ranges["quantiles"]]
    values = table.read_ranks(column, ranks)
    pairs = zip((values[rank] for rank in ranks), ranges["value_ranges"], strict=True)
    passed = all(_is_near(value, *limits) for value, limits in pairs)
    values_text = (f"{q:g}: {format_number(values[rank])}" for q, rank in zip(ranges["quantiles"], ranks, strict=True))
    return Result(e.place, passed, "; ".join(values_text))


def _is_near(value: Number, low: Number | None, high: Number | None) -> bool:
    """Returns true if the value is in the range, or within Great Expectations' tolerance (1 in 10,000) of its ends."""
    number = float(value)
    low, high = (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))
    return any(abs(number - end) <= 1e-8 + 1e-4 * abs(end) for end in (low, high) if math.isfinite(end)) or (
        low <= number <= high
    )


_QUANTILES: Mapping[str, Callable[[Expectation, StagedTable], Result]] = {
    "expect_column_median_to_be_between": _check_median,
    "expect_column_quantile_values_to_be_between": _check_quantiles,
}


def _check_unique(e: Expectation, values: Counted, table: StagedTable, t: Type) -> Result:
    ignored = get_argument(e, "ignore_row_if") if "column_list" in e.kwargs else "any_value_is_missing"
    which = {"all_values_are_missing": values.some, "any_value_is_missing": values.full, "never": values.all}[ignored]
    checked, unexpected = values.count_repeated(which)
    first = values.first_repeated(which) if unexpected else ()
    return Result(e.place, enough(checked, unexpected, get_argument(e, "mostly")), "", checked, unexpected, first)


def _check_distinct_count(e: Expectation, values: Counted, table: StagedTable, t: Type) -> Result:
    return _of_number(e, values.distinct)


def _check_distinct_share(e: Expectation, values: Counted, table: StagedTable, t: Type) -> Result:
    checked, _ = values.count_repeated(values.full)
    return _of_number(e, values.distinct / checked if checked else 0)


def _check_distinct_set(e: Expectation, values: Counted, table: StagedTable, t: Type) -> Result:
    """Reports the number of values outside and of missing members, never the values themselves."""
    strange, missing = values.against([literals.member(t, value) for value in e.kwargs["value_set"]])
    wrong = {
        "expect_column_distinct_values_to_be_in_set": strange,
        "expect_column_distinct_values_to_contain_set": missing,
        "expect_column_distinct_values_to_equal_set": strange + missing,
    }[e.type]
    return Result(e.place, not wrong, f"{many(strange, 'other value')}, {missing:,} of the set missing")


def _check_most_common(e: Expectation, values: Counted, table: StagedTable, t: Type) -> Result:
    modes, inside, often = values.most_common([literals.member(t, value) for value in e.kwargs["value_set"]])
    passed = inside > 0 if get_argument(e, "ties_okay") else modes == inside == 1
    return Result(e.place, passed, f"{many(modes, 'value')} {often:,} times, {inside:,} of the set")


_UNIQUE = ("expect_column_values_to_be_unique", "expect_compound_columns_to_be_unique")
_COUNTED: Mapping[str, Callable[[Expectation, Counted, StagedTable, Type], Result]] = {
    **dict.fromkeys(_UNIQUE, _check_unique),
    "expect_column_unique_value_count_to_be_between": _check_distinct_count,
    "expect_column_proportion_of_unique_values_to_be_between": _check_distinct_share,
    "expect_column_distinct_values_to_be_in_set": _check_distinct_set,
    "expect_column_distinct_values_to_contain_set": _check_distinct_set,
    "expect_column_distinct_values_to_equal_set": _check_distinct_set,
    "expect_column_most_common_value_to_be_in_set": _check_most_common,
}
DECIDED = frozenset({*_OF_TABLES, *_QUANTILES, *_COUNTED, *(t for t, rule in RULES.items() if rule.aggregate)})
"""The types of expectation that this module decides."""


# -- as people read it


def format_number(value: Number | None) -> str:
    """A number as text, to 15 digits."""
    if value is None:
        return "no values"
    return f"{value:,}" if isinstance(value, int | Decimal) else show_float(value, 15)


def _format_value(value: Any, t: Type) -> str:
    if value is None:
        return format_number(None)
    try:
        if _is_time(t):
            seconds, rest = divmod(value * literals.PER_UNIT[unit_of(t)], 10**9)
            text = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
            return text + (f".{rest:09}".rstrip("0") if rest else "") + "Z"
        return (
            str(date(1970, 1, 1) + timedelta(days=value)) if t.kind.family is TypeFamily.DAY else format_number(value)
        )
    except OverflowError:
        return f"{value:,} since 1970"


_MAX_LINES = 20


def check_contract(
    shape: Shape, ledger: Ledger, batch: Batch, receipts: Sequence[Receipt], lake: Lake, failed: int = 0
) -> tuple[Result, ...]:
    """The results of the expectations about whole batches, for the batch's proven receipts.

    Those of a split feed are decided output by output. `failed` is the number of offset ranges without a receipt.
    Raises ContractBroken when a critical expectation fails, unless it judges each row by itself.
    """
    if not receipts or not (shape.contract or shape.split):
        return ()
    if shape.split is None:
        earlier = count_earlier_rows(ledger.read(), batch.request, batch.id)
        return _check_output(shape, Dataset(ledger.feed, batch, earlier), receipts, lake, failed)
    results: list[Result] = []
    for output, own in shape.split.shapes.items():
        first, dataset = shape.split.find_first_place(output), Dataset(f"{ledger.feed}.{output}", batch, ())
        selected = [shape.select(r, output) for r in receipts]
        decided = _check_output(own, dataset, selected, lake, failed)
        results += (replace(r, expectation=first + r.expectation) for r in decided)
    return tuple(results)


class Dataset(NamedTuple):
    """A feed, or one output of it, with a batch of its rows and the row counts of earlier ones. Outputs have none."""

    name: str
    batch: Batch
    earlier: Sequence[int]


def _check_output(
    shape: Shape, dataset: Dataset, receipts: Sequence[Receipt], lake: Lake, failed: int
) -> tuple[Result, ...]:
    if shape.contract is None:
        return ()
    name, batch, earlier = dataset
    results = hold_whole(shape, receipts, lake, earlier)
    broken = [o for o in contract_results(shape.contract, receipts, results) if o.refuses]
    if not broken:
        return results
    lines = [_describe_broken(o) for o in broken[:_MAX_LINES]]
    lines += [f"… and {len(broken) - _MAX_LINES} more"] if len(broken) > _MAX_LINES else []
    lines += [f"{many(failed, 'offset range')} of it failed, and their rows are not counted"] if failed else []
    first = next((f"see the first row: sluice peek {o.first[0]} -n 1; " for o in broken if o.first), "")
    raise ContractBroken(
        f"batch {batch.id} breaks the contract; nothing of it is published:\n    " + "\n    ".join(lines),
        remedy=f"{first}fix feeds/{name}.contract.json, or the producer, and run again: records already"
        " read are reused unless the contract changes",
        breaches=[
            Breach("contract", _describe_broken(o), o.expectation.type, o.unexpected, o.checked, o.first)
            for o in broken
        ],
    )


def _describe_broken(o: ExpectationOutcome) -> str:
    details = [f"observed {o.observed}"] if o.observed else []
    if o.unexpected:
        details += [f"{o.unexpected:,} of {o.checked:,} rows are not so ({o.share:.2%})"]
        details += [f"the first at {', '.join(o.first)}"] if o.first else []
    return f"{text(o.expectation)}: {', '.join(details) or 'it is not so'}"
