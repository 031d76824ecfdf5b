"""Reads the values in a contract's file exactly, for the type of a column. Light: no Arrow.

    whole numbers          numbers; 10.0 is 10
    floats                 numbers
    decimals               numbers of up to 17 digits, or text of any number of digits: "0.10"
    timestamps, epochs     text: "2026-11-20", "2026-11-20T10:00", "2026-11-20T10:00:00.123456789+01:00"; else in UTC
    dates                  text: "2026-11-20"
    strings, booleans      text, true and false

A bound may be finer than the column: 0.5 for whole numbers, microseconds for milliseconds. A member of a set may not,
because no row could have it.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal

from sluice.pipelines.schema.schema import Kind, Type, TypeFamily
from sluice.pipelines.schema.wider import unit_of

Value = int | float | Decimal | str | bool


_DIGITS = 38
_EXACT = Context(prec=2 * _DIGITS + 100)
_LARGEST_SINGLE = Decimal("3.4028234663852886e38")
PER_UNIT = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""Nanoseconds in a unit of time."""
_TIME = re.compile(
    r"(\d{4}-\d{2}-\d{2})(?:[T ](\d{2}):(\d{2})(?::(\d{2})(?:\.(\d{1,9}))?)?(Z|[+-]\d{2}:\d{2})?)?", re.ASCII
)
_DECIMAL = re.compile(r"[+-]?(\d{1,38}(\.\d{0,38})?|\.\d{1,38})([eE][+-]?\d{1,2})?", re.ASCII)


def parse_bound(t: Type, value: object) -> int | float | Decimal:
    """A bound for a column: a number, a time (ns since the epoch) or a date (days since the epoch).

    Raises ValueError, which names the accepted forms.
    """
    match t.kind.family:
        case TypeFamily.TIME:
            return _nanoseconds(value)
        case TypeFamily.DAY:
            return _days(value)
        case TypeFamily.NUMBER:
            number = _number(value, text=t.kind is Kind.DECIMAL)
            return float(number) if t.kind in (Kind.FLOAT32, Kind.FLOAT64) else number
        case kind:
            raise ValueError(f"there are no bounds for {kind}")


def member(t: Type, value: object) -> Value:
    """A value that the column can hold, as with `bound`, but times in the column's unit. Raises ValueError."""
    match t.kind.family:
        case TypeFamily.TEXT:
            if isinstance(value, str):
                return value
            raise ValueError("should be text in quotes")
        case TypeFamily.TRUTH:
            if isinstance(value, bool):
                return value
            raise ValueError("should be true or false")
        case TypeFamily.TIME:
            unit = unit_of(t)
            count, rest = divmod(_nanoseconds(value), PER_UNIT[unit])
            if rest or not -(1 << 63) <= count < 1 << 63:
                raise ValueError(f"is not a time in {unit}")
            return count
        case TypeFamily.DAY:
            return _days(value)
        case TypeFamily.NUMBER:
            return _exact_value(t, _number(value, text=t.kind is Kind.DECIMAL))
        case kind:
            raise ValueError(f"{kind} are not compared")


def whole_range(t: Type) -> tuple[int, int]:
    """The smallest and the largest value of a whole-number type."""
    bits = int(str(t.kind).lstrip("uint"))
    return (0, (1 << bits) - 1) if t.kind.startswith("u") else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _number(value: object, *, text: bool) -> int | Decimal:
    """The exact number. A float counts as its shortest text, which is what its author meant."""
    if isinstance(value, float) and math.isfinite(value):
        number = Decimal(repr(value))
        return int(number) if number == number.to_integral_value() and abs(number) < 10**_DIGITS else number
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**_DIGITS:
        return value
    if text and isinstance(value, str) and _DECIMAL.fullmatch(value):
        return Decimal(value)
    raise ValueError(f"should be a number{' or its digits in quotes' if text else ''}")


def _exact_value(t: Type, number: int | Decimal) -> Value:
    match t.kind:
        case Kind.FLOAT32 | Kind.FLOAT64:
            if t.kind is Kind.FLOAT32 and not -_LARGEST_SINGLE <= number <= _LARGEST_SINGLE:
                raise ValueError(f"is not a value of {t}")
            return float(number)
        case Kind.DECIMAL:
            exact = Decimal(number)
            exponent = exact.normalize(_EXACT).as_tuple().exponent
            fits = isinstance(exponent, int) and -exponent <= t.scale
            if not fits or abs(exact) >= 10 ** (t.precision - t.scale):
                raise ValueError(f"is not a value of {t}")
            return exact
        case _:
            low, high = whole_range(t)
            if not isinstance(number, int) or not low <= number <= high:
                raise ValueError(f"is not a value of {t}")
            return number


def _nanoseconds(value: object) -> int:
    what = "should be a time such as 2026-11-20T10:00:00Z"
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(what)
    day, hour, minute, second, fraction, zone = match.groups()
    try:
        text = f"{day}T{hour or '00'}:{minute or '00'}:{second or '00'}{(zone or 'Z').replace('Z', '+00:00')}"
        seconds = (datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    except ValueError:
        raise ValueError(what) from None
    return seconds * 10**9 + int((fraction or "").ljust(9, "0"))


def _days(value: object) -> int:
    try:
        if isinstance(value, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII):
            return (date.fromisoformat(value) - date(1970, 1, 1)).days
    except ValueError:
        pass
    raise ValueError("should be a date such as 2026-11-20")
