"""Proposes a contract from a sample: expectations that held for every row seen, and that may be intended.

Promises: each proposal holds for the whole sample. All are warnings, so that none quarantines a row before somebody
decides. The sample shows in counts; values of records appear only in proposed sets, in the fixed parts of patterns and,
rounded outwards, in bounds. Nothing is proposed for columns with too few rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from math import isfinite
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.contract.expectation import Severity
from sluice.pipelines.contract.literals import PER_UNIT
from sluice.pipelines.schema.schema import KAFKA, Field, Kind, Schema, Type, TypeFamily
from sluice.pipelines.schema.wider import unit_of
from sluice.pipelines.util.units import many, show_float

ENOUGH = 200
"""The least number of rows, and of values in a column, for a proposal."""
MOST_IN_SET = 30
MOST_TEXT = 64
"""The most characters of a value in a set."""
_LEAST_OFTEN = 20
_LEAST_SHARE = 1000
"""Each value of a set occurs at least `_LEAST_OFTEN` times, and once in `_LEAST_SHARE` rows."""
_KEY_LIKE = re.compile(r"(^|[_-])(id|uuid|guid|key|no|number)$|[a-z](Id|ID|Key|Uuid)$", re.IGNORECASE)
_PATTERNS = (
    ("a UUID", r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"),
    ("two capitals, as countries have", r"^[A-Z]{2}$"),
    ("three capitals, as currencies have", r"^[A-Z]{3}$"),
    ("32 hexadecimal digits", r"^[0-9a-f]{32}$"),
    ("40 hexadecimal digits", r"^[0-9a-f]{40}$"),
    ("64 hexadecimal digits", r"^[0-9a-f]{64}$"),
    ("an e-mail address", r"^[^@\s]+@[^@\s]+\.[^@\s]+$"),
    ("a web address", r"^https?://[^\s]+$"),
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """One expectation that the sample suggests. `why` is a readable reason; `seen` has counts."""

    column: str
    type: str
    kwargs: Mapping[str, Any]
    why: str
    seen: Mapping[str, int]

    @property
    def item(self) -> dict[str, Any]:
        """The expectation as a suite writes it."""
        kwargs, meta = {"column": self.column, **self.kwargs}, {"sluice": {"seen": dict(self.seen)}}
        return {"type": self.type, "kwargs": kwargs, "severity": str(Severity.WARNING), "meta": meta}


def candidates(columns: Schema | None, protected: Collection[str] = ()) -> tuple[Field, ...]:
    """The columns that are examined: a typed feed's own and the records' keys, without protected ones: contracts see
    other values than land."""
    key = Type(Kind.BINARY)
    fields = (*columns.fields, Field(f"{KAFKA}key", key)) if columns else (Field("key", key),)
    return tuple(f for f in fields if f.name not in protected)


def propose(rows: pa.Table, columns: Schema | None, protected: Collection[str] = ()) -> tuple[Proposal, ...]:
    """Returns proposals from rows, column by column. `rows` has the columns of `candidates`, and at least ENOUGH."""
    if rows.num_rows < ENOUGH:
        return ()
    return tuple(p for f in candidates(columns, protected) for p in _of_column(f, rows.column(f.name)))


def _of_column(f: Field, column: pa.ChunkedArray) -> Iterator[Proposal]:
    floats = f.type.kind in (Kind.FLOAT32, Kind.FLOAT64)
    rows, nulls = len(column), pc.sum(column.is_null(nan_is_null=floats)).as_py()
    if not nulls and not f.required:  # where it is required, the schema sees to it
        yield Proposal(f.name, "expect_column_values_to_not_be_null", {}, "never null", {"rows": rows, "nulls": 0})
    values = column.drop_null().combine_chunks()
    if floats:
        if pc.any(pc.is_inf(values)).as_py():
            return  # where all is allowed, no bound means anything
        values = values.filter(pc.is_finite(values))
    if len(values) < ENOUGH:
        return
    match f.type.kind.family:
        case TypeFamily.NUMBER:
            yield from _of_numbers(f, values)
        case TypeFamily.TEXT:
            yield from _of_texts(f, values)
        case TypeFamily.TIME:
            yield from _of_times(f.name, values.cast(pa.int64()), PER_UNIT[unit_of(f.type)])
        case TypeFamily.DAY:
            yield from _of_times(f.name, values.cast(pa.int32()), 86_400 * 10**9)


# -- numbers


def _of_numbers(f: Field, values: pa.Array) -> Iterator[Proposal]:
    integral = f.type.kind not in (Kind.FLOAT32, Kind.FLOAT64, Kind.DECIMAL)
    if integral and _is_key(f.name, values):
        yield _unique(f.name, values)
        return
    low, high = (Decimal(str(v.as_py())) for v in pc.min_max(values).values())
    counts = _counts(values) if integral else {}
    if counts and (len(counts) == 1 or high - low >= 2 * len(counts)):
        yield _in_set(f.name, counts, len(values))
    elif low < high:
        # Half the range as room on both sides, rounded outwards. Bounds do not cross 0 if no value did.
        margin = (high - low) / 2
        minimum, maximum = _round(low - margin, ROUND_FLOOR, integral), _round(high + margin, ROUND_CEILING, integral)
        minimum = max(minimum, Decimal(0)) if low >= 0 else minimum
        maximum = min(maximum, Decimal(0)) if high <= 0 else maximum
        why = f"seen {_format_decimal(low)} to {_format_decimal(high)}"
        # With room around it, a bound may be beyond all floats, which is none.
        bounds = {k: v for k, v in (("min_value", _number(minimum)), ("max_value", _number(maximum))) if isfinite(v)}
        if bounds:
            yield Proposal(f.name, "expect_column_values_to_be_between", bounds, why, {"values": len(values)})


def _round(value: Decimal, how: str, integral: bool = True) -> Decimal:
    """Round to two significant digits, or to a whole number."""
    step = Decimal(1).scaleb(max(value.adjusted() - 1, 0) if integral else value.adjusted() - 1)
    return (value / step).to_integral_value(how) * step


def _number(value: Decimal) -> int | float:
    """The same number for JSON. A float's text holds two digits and a power of ten exactly."""
    return int(value) if value == value.to_integral_value() and abs(value) < 10**15 else float(value)


def _format_decimal(value: Decimal) -> str:
    return f"{value:,f}" if -12 < value.adjusted() < 15 else show_float(float(value), 3)


# -- times


def _of_times(name: str, values: pa.Array, nanoseconds: int) -> Iterator[Proposal]:
    """Bounds in whole years, with room for years to come. Times beyond them have the wrong unit, or no year."""
    try:
        ages = (timedelta(microseconds=v.as_py() * nanoseconds // 1000) for v in pc.min_max(values).values())
        first, last = (datetime(1970, 1, 1, tzinfo=UTC) + age for age in ages)
    except OverflowError:
        return
    bounds = {"min_value": f"{max(first.year - 1, 1):04}-01-01", "max_value": f"{min(last.year + 10, 9999):04}-01-01"}
    why = f"seen {first:%Y-%m} to {last:%Y-%m}"
    yield Proposal(name, "expect_column_values_to_be_between", bounds, why, {"values": len(values)})


# -- texts


def _of_texts(f: Field, values: pa.Array) -> Iterator[Proposal]:
    counts = _counts(values)
    if counts and all(len(str(v)) <= MOST_TEXT for v in counts):
        yield _in_set(f.name, counts, len(values))
        return
    if _is_key(f.name, values):
        yield _unique(f.name, values)
    yield _pattern(f.name, values) or _lengths(f.name, values)


def _pattern(name: str, values: pa.Array) -> Proposal | None:
    for what, regex in (*_PATTERNS, *_pattern_of_digits(values)):
        if pc.all(pc.match_substring_regex(values, regex)).as_py():
            why = f"each is {what}"
            return Proposal(name, "expect_column_values_to_match_regex", {"regex": regex}, why, {"values": len(values)})
    return None


def _pattern_of_digits(values: pa.Array) -> Iterator[tuple[str, str]]:
    """A pattern for values that differ only in digits. It fixes their number if they begin with zeros."""
    frames = pc.unique(pc.replace_substring_regex(values, r"[0-9]+", "0"))
    frame = frames[0].as_py()
    if len(frames) > 1 or len(frame) > MOST_TEXT or "0" not in frame or not frame.isprintable():
        return
    lengths = pc.min_max(pc.utf8_length(values))
    padded = pc.any(pc.match_substring_regex(values, r"(^|[^0-9])0[0-9]")).as_py()
    if padded and frame.count("0") == 1 and lengths["min"].as_py() == lengths["max"].as_py():
        digits = f"[0-9]{{{lengths['max'].as_py() - len(frame) + 1}}}"
    else:
        digits = "[0-9]+"
    yield "alike but for its digits", f"^{digits.join(map(_literal, frame.split('0')))}$"


def _literal(text: str) -> str:
    """The text, escaped for both kinds of regular expressions."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def _lengths(name: str, values: pa.Array) -> Proposal:
    minimum, maximum = (v.as_py() for v in pc.min_max(pc.utf8_length(values)).values())
    statistics = {"values": len(values)}
    if minimum == maximum:
        return Proposal(
            name,
            "expect_column_value_lengths_to_equal",
            {"value": maximum},
            f"each has {many(maximum, 'character')}",
            statistics,
        )
    bounds = {"min_value": min(minimum, 1), "max_value": int(_round(Decimal(2 * maximum), ROUND_CEILING))}
    why = f"seen {minimum} to {maximum} characters"
    return Proposal(name, "expect_column_value_lengths_to_be_between", bounds, why, statistics)


# -- sets and keys


def _counts(values: pa.Array) -> dict[Any, int]:
    """How often each value occurs, if there are few and each occurs often; otherwise empty."""
    counted = pc.value_counts(values)
    if len(counted) > MOST_IN_SET:
        return {}
    counts = {row["values"]: row["counts"] for row in counted.to_pylist()}
    often = min(counts.values()) >= max(_LEAST_OFTEN, len(values) // _LEAST_SHARE)
    return dict(sorted(counts.items())) if often else {}


def _in_set(name: str, counts: Mapping[Any, int], count: int) -> Proposal:
    minimum = min(counts.values())
    summary = "always the same value" if len(counts) == 1 else f"{len(counts)} values, each at least {minimum:,} times"
    statistics = {"values": count, "distinct": len(counts), "least_often": minimum}
    return Proposal(name, "expect_column_values_to_be_in_set", {"value_set": [*counts]}, summary, statistics)


def _is_key(name: str, values: pa.Array) -> bool:
    return bool(_KEY_LIKE.search(name)) and pc.count_distinct(values).as_py() == len(values)


def _unique(name: str, values: pa.Array) -> Proposal:
    statistics = {"values": len(values), "distinct": len(values)}
    return Proposal(name, "expect_column_values_to_be_unique", {}, "called a key, and no value came twice", statistics)
