"""Row expectations as functions over columns that return the rows which break them (docs/contracts.md).

Checks have the meaning of Great Expectations on pandas: nulls, and NaN as a null, are left out unless the expectation
is about them. Promise: no value of a record makes a check raise, nothing is rounded, and while all rows are good a
check allocates little more than a bit per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial, reduce
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.contract.arguments import digits_of_sum
from sluice.pipelines.contract.catalogue import get_argument
from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.contract.literals import PER_UNIT, member, parse_bound, whole_range
from sluice.pipelines.records.contract_rows.check_arrays import (
    FLOATS,
    array_of,
    int32s,
    is_ascii,
    numbers,
    scalar,
    type_of,
    without_nan,
)
from sluice.pipelines.records.contract_rows.text_tables import fixed_form, short_set
from sluice.pipelines.schema.arrays import as_mask, boolean_array, get_value_type
from sluice.pipelines.schema.schema import Kind, Type

Columns = Sequence[pa.Array]
Check = Callable[[Columns], "CheckResult"]
"""Checks the expectation's columns, given in its order."""
Breaks = Callable[[pa.Array], "pa.BooleanArray | None"]
"""Which values of a column break the expectation. Null and false are fine; None means that all are."""


class CheckResult(NamedTuple):
    """How many rows an expectation checked, and which broke it: true in `broken`, which is None when none did."""

    checked: int
    broken: pa.BooleanArray | None


def check_of(expectation: Expectation, types: Sequence[pa.DataType]) -> Check:
    """The check for a row expectation, on columns of these types."""
    return _BUILDERS[expectation.type](expectation, types)


# -- one column


def _check_nulls(e: Expectation, types: Sequence[pa.DataType], *, wanted: bool) -> Check:
    def check(columns: Columns) -> CheckResult:
        column = without_nan(columns[0])
        nulls = column.null_count
        if nulls == (len(column) if wanted else 0):
            return CheckResult(len(column), None)
        return CheckResult(len(column), pc.is_valid(column) if wanted else pc.is_null(column))

    return check


def _check_values(breaks: Breaks) -> Check:
    """A check of one column, without its nulls. In a column of few values, each value is checked once."""

    def check(columns: Columns) -> CheckResult:
        column = without_nan(columns[0])
        few = pa.types.is_dictionary(column.type)
        broken = breaks(column.dictionary if few else column)
        if broken is not None and few:
            broken = broken.take(column.indices)
        if broken is not None and not broken.true_count:
            broken = None
        return CheckResult(len(column) - column.null_count, broken)

    return check


def _check_range(e: Expectation, types: Sequence[pa.DataType]) -> Check:
    t = type_of(types[0])
    plain = numbers(array_of(types[0], [])).type
    limits = _get_limits(t, e) if t.kind not in FLOATS else _get_float_limits(t, e)
    if limits is None:
        return _check_values(pc.is_valid)
    low, high = (None if v is None else scalar(plain, v) for v in limits)
    return _check_values(lambda column: _find_outside(numbers(column), low, high))


def _find_outside(column: pa.Array, low: pa.Scalar | None, high: pa.Scalar | None) -> pa.BooleanArray | None:
    below = None if low is None else pc.less(column, low)
    above = None if high is None else pc.greater(column, high)
    if below is None or not below.true_count:
        return above
    return below if above is None or not above.true_count else pc.or_(below, above)


def _read_bounds(t: Type, e: Expectation) -> tuple[Any, Any]:
    limits = (e.kwargs.get("min_value"), e.kwargs.get("max_value"))
    low, high = (None if v is None else parse_bound(t, v) for v in limits)
    return low, high


def _get_limits(t: Type, e: Expectation) -> tuple[int | None, int | None] | None:
    """The smallest and largest number that the column can hold and that is allowed; None: no limit, or there is none
    such at all."""
    per = Fraction(10**t.scale, PER_UNIT.get(t.unit, 1))
    low, high = (None if v is None else Fraction(v) * per for v in _read_bounds(t, e))
    minimum, maximum = (
        (1 - 10**t.precision, 10**t.precision - 1)
        if t.kind is Kind.DECIMAL
        else whole_range({Kind.TIMESTAMP: Type(Kind.INT64), Kind.DATE: Type(Kind.INT32)}.get(t.kind, t))
    )
    first = last = None
    if low is not None:
        first = math.floor(low) + 1 if get_argument(e, "strict_min") else math.ceil(low)
    if high is not None:
        last = math.ceil(high) - 1 if get_argument(e, "strict_max") else math.floor(high)
    if (first is not None and first > maximum) or (last is not None and last < minimum):
        return None
    return (first if first is not None and first > minimum else None), (
        last if last is not None and last < maximum else None
    )


def _get_float_limits(t: Type, e: Expectation) -> tuple[float | None, float | None]:
    """The allowed floats of the column's width that are nearest to the bounds."""
    low, high = _read_bounds(t, e)
    kind = FLOATS[t.kind]
    first = None if low is None else _round_limit(kind, low, math.inf, strict=get_argument(e, "strict_min"))
    last = None if high is None else _round_limit(kind, high, -math.inf, strict=get_argument(e, "strict_max"))
    return first, last


def _round_limit(kind: type[Any], limit: float, towards: float, *, strict: bool) -> float:
    with np.errstate(over="ignore"):
        near = kind(limit)
    outside = float(near) < limit if towards > 0 else float(near) > limit
    return float(np.nextafter(near, kind(towards)) if outside or (strict and float(near) == limit) else near)


def _check_set(e: Expectation, types: Sequence[pa.DataType], *, wanted: bool) -> Check:
    allowed = _make_members(types[0], get_argument(e, "value_set"))
    among = short_set(allowed) or partial(pc.is_in, value_set=allowed)

    def breaks(column: pa.Array) -> pa.BooleanArray | None:
        member = among(column)
        if not wanted:
            return member
        if member.true_count == len(column) - column.null_count:
            return None
        return pc.and_not(pc.is_valid(column), member)

    return _check_values(breaks)


def _make_members(arrow: pa.DataType, values: Sequence[object]) -> pa.Array:
    """The members of a set as an array, each once. It holds zero with both signs: Arrow compares floats' bits."""
    t = type_of(arrow)
    plain = arrow.value_type if pa.types.is_dictionary(arrow) else arrow
    members = [_to_units(t, member(t, v)) for v in values]
    if t.kind in FLOATS and any(FLOATS[t.kind](v) == 0 for v in members):
        members += [0.0, -0.0]
    return array_of(plain, members)


def _to_units(t: Type, value: Any) -> Any:
    if t.kind in FLOATS:
        return value + 0.0
    return int(Fraction(value) * 10**t.scale) if t.kind is Kind.DECIMAL else value


def _check_lengths(e: Expectation, types: Sequence[pa.DataType]) -> Check:
    value = e.kwargs.get("value")
    allowed = _get_limits(Type(Kind.UINT32), e) if value is None else (int(value), int(value))
    low, high = allowed or (None, -1)
    limits = [None if v is None else scalar(pa.int32(), min(v, _LONGEST)) for v in (low, high)]
    # Where each character is one byte, the offsets alone tell the length.
    return _check_values(
        lambda column: _find_outside(pc.binary_length(column) if is_ascii(column) else pc.utf8_length(column), *limits)
    )


_LONGEST = (1 << 31) - 1


def _check_regex(e: Expectation, types: Sequence[pa.DataType], *, wanted: bool) -> Check:
    """Patterns match anywhere in the value, as in Great Expectations."""
    patterns = [e.kwargs["regex"]] if "regex" in e.kwargs else e.kwargs["regex_list"]
    every = wanted and "regex_list" in e.kwargs and get_argument(e, "match_on") == "all"
    matching = [fixed_form(p) or partial(pc.match_substring_regex, pattern=p) for p in patterns]

    def breaks(column: pa.Array) -> pa.BooleanArray | None:
        masks = (matches(column) for matches in matching)
        if not wanted:
            return reduce(pc.or_, masks)
        matched = reduce(pc.and_ if every else pc.or_, masks)
        return None if matched.true_count == len(column) - column.null_count else pc.invert(matched)

    return _check_values(breaks)


# -- several columns

_IGNORED = {
    "both_values_are_missing": pc.and_,
    "all_values_are_missing": pc.and_,
    "either_value_is_missing": pc.or_,
    "any_value_is_missing": pc.or_,
}


def _check_several(e: Expectation, good: Callable[[Columns], pa.BooleanArray]) -> Check:
    """`good` is null where a null keeps it from saying: such rows break it, unless they are ignored."""
    ignored = _IGNORED.get(get_argument(e, "ignore_row_if"))

    def check(columns: Columns) -> CheckResult:
        plain = [c.dictionary.take(c.indices) if pa.types.is_dictionary(c.type) else without_nan(c) for c in columns]
        met = good(plain)
        n = checked = len(met)
        if ignored is not None and any(c.null_count for c in plain):
            passed = reduce(ignored, map(pc.is_null, plain))
            met, checked = pc.or_kleene(met, passed), n - passed.true_count
        if met.true_count == n:
            return CheckResult(checked, None)
        return CheckResult(checked, pc.invert(pc.fill_null(met, _FALSE)))

    return check


_FALSE = scalar(pa.bool_(), False)


def _check_pair(e: Expectation, types: Sequence[pa.DataType], *, greater: bool) -> Check:
    compare = pc.equal
    if greater:
        compare = pc.greater_equal if get_argument(e, "or_equal") else pc.greater
    alike = _make_comparable(types)
    return _check_several(e, lambda columns: compare(*alike(columns)))


def _check_distinct(e: Expectation, types: Sequence[pa.DataType]) -> Check:
    """Nulls count as equal to one another."""
    alike = _make_comparable(types)

    def same(a: pa.Array, b: pa.Array) -> pa.BooleanArray:
        equal = pc.equal(a, b)
        if not a.null_count and not b.null_count:
            return equal
        return pc.if_else(pc.is_valid(equal), equal, pc.and_(pc.is_null(a), pc.is_null(b)))

    def good(columns: Columns) -> pa.BooleanArray:
        pairs = combinations(alike(columns), 2)
        return pc.invert(reduce(pc.or_, (same(a, b) for a, b in pairs)))

    return _check_several(e, good)


def _make_comparable(types: Sequence[pa.DataType]) -> Callable[[Columns], list[pa.Array]]:
    """A function that makes columns of any values exactly comparable; whole numbers and floats become floats.

    Arrow's own conversions would fail on values out of range.
    """
    kinds = {type_of(t).kind for t in types}
    if len({*map(str, map(get_value_type, types))}) == 1:
        return lambda columns: [numbers(c) for c in columns]
    if kinds & {*FLOATS}:
        return lambda columns: [pc.cast(c, pa.float64(), safe=False) for c in columns]
    units = [PER_UNIT.get(type_of(t).unit, 1) for t in types]
    finest = min(units)
    return lambda columns: [_cast_decimal(numbers(c), u // finest) for c, u in zip(columns, units, strict=True)]


def _cast_decimal(column: pa.Array, times: int = 1) -> pa.Array:
    """The column as decimals: exact, whatever its width."""
    if not pa.types.is_decimal(column.type):
        digits = 20 if pa.types.is_uint64(column.type) else 19
        column = pc.cast(column, pa.decimal128(digits, 0))
    if times == 1:
        return column
    return pc.multiply(column, scalar(pa.decimal128(len(str(times)), 0), times))


def _check_pairs(e: Expectation, types: Sequence[pa.DataType]) -> Check:
    """Each value becomes its index among the members; absent values and nulls have indices of their own.

    A table lists the pairs of indices.
    """
    pairs = get_argument(e, "value_pairs_set")
    values = [_index_members(types[k], [pair[k] for pair in pairs]) for k in (0, 1)]
    table = np.zeros((len(values[0][0]) + 2, len(values[1][0]) + 2), np.bool_)
    for a, b in zip(values[0][1], values[1][1], strict=True):
        table[a, b] = True

    def good(columns: Columns) -> pa.BooleanArray:
        first, second = (_find_codes(c, members) for c, (members, _) in zip(columns, values, strict=True))
        return boolean_array(table[first, second])

    return _check_several(e, good)


def _index_members(arrow: pa.DataType, values: Sequence[object]) -> tuple[pa.Array, list[int]]:
    """The distinct members, and for each given value its code among them."""
    t = type_of(arrow)
    measured = [None if v is None else _to_units(t, member(t, v)) for v in values]
    order = {v: i for i, v in enumerate(dict.fromkeys(v for v in measured if v is not None))}
    return array_of(get_value_type(arrow), [*order]), [len(order) + 1 if v is None else order[v] for v in measured]


def _find_codes(column: pa.Array, members: pa.Array) -> Any:
    if pa.types.is_floating(column.type):
        column = pc.add(column, scalar(column.type, 0.0))  # minus zero is zero
    codes = int32s(pc.index_in(column, members), len(members))
    if not column.null_count:
        return codes
    return np.where(as_mask(pc.is_valid(column)), codes, len(members) + 1)


def _sum(e: Expectation, types: Sequence[pa.DataType]) -> Check:
    sum_total = e.kwargs["sum_total"]
    added = [type_of(t) for t in types]
    if any(t.kind in FLOATS for t in added):
        return _check_several(
            e, _check_sum(lambda c: pc.cast(c, pa.float64(), safe=False), scalar(pa.float64(), sum_total))
        )
    if all(t.kind in _SMALL for t in added) and abs(sum_total) < 1 << 62 and float(sum_total).is_integer():
        return _check_several(e, _check_sum(lambda c: pc.cast(c, pa.int64()), scalar(pa.int64(), int(sum_total))))
    digits, scale = digits_of_sum(added)
    total = Fraction(Decimal(repr(sum_total))) * 10**scale
    if total.denominator != 1 or abs(total) >= 10**digits:
        return _check_several(e, lambda columns: pc.not_equal(columns[0], columns[0]))
    return _check_several(e, _check_sum(_cast_decimal, scalar(pa.decimal128(digits, scale), int(total))))


_SMALL = {Kind.INT8, Kind.INT16, Kind.INT32, Kind.UINT8, Kind.UINT16, Kind.UINT32}
"""Whole-number types whose sums fit into 64 bits, with as many columns as an expectation can name."""


def _check_sum(number: Callable[[pa.Array], pa.Array], total: pa.Scalar) -> Callable[[Columns], pa.BooleanArray]:
    return lambda columns: pc.equal(reduce(pc.add, map(number, columns)), total)


_BUILDERS: Mapping[str, Callable[[Expectation, Sequence[pa.DataType]], Check]] = {
    "expect_column_values_to_not_be_null": partial(_check_nulls, wanted=False),
    "expect_column_values_to_be_null": partial(_check_nulls, wanted=True),
    "expect_column_values_to_be_in_set": partial(_check_set, wanted=True),
    "expect_column_values_to_not_be_in_set": partial(_check_set, wanted=False),
    "expect_column_values_to_be_between": _check_range,
    "expect_column_value_lengths_to_be_between": _check_lengths,
    "expect_column_value_lengths_to_equal": _check_lengths,
    "expect_column_values_to_match_regex": partial(_check_regex, wanted=True),
    "expect_column_values_to_not_match_regex": partial(_check_regex, wanted=False),
    "expect_column_values_to_match_regex_list": partial(_check_regex, wanted=True),
    "expect_column_values_to_not_match_regex_list": partial(_check_regex, wanted=False),
    "expect_column_pair_values_a_to_be_greater_than_b": partial(_check_pair, greater=True),
    "expect_column_pair_values_to_be_equal": partial(_check_pair, greater=False),
    "expect_column_pair_values_to_be_in_set": _check_pairs,
    "expect_select_column_values_to_be_unique_within_record": _check_distinct,
    "expect_multicolumn_sum_to_equal": _sum,
}
