"""An oracle for JSON values, in slow, plain Python that shares nothing with the loops."""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from sluice.pipelines.schema.schema import Encoding, Field, Kind, Schema, Type

DEPTH = 100
NOT_JSON = {"not_json", "invalid_utf8", "too_deep"}
_INTS = {f"int{b}": (-(1 << b - 1), (1 << b - 1) - 1) for b in (8, 16, 32, 64)} | {
    f"uint{b}": (0, (1 << b) - 1) for b in (8, 16, 32, 64)
}
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[Tt ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d+))?)?([Zz]|[+-]\d\d(?::?\d\d)?)?)?", re.ASCII
)
YEAR_1, YEAR_9999 = ((date(y, 1, 1) - date(1970, 1, 1)) // timedelta(seconds=1) for y in (1, 9999))
YEAR_10000 = YEAR_9999 + 365 * 86400
_UNITS = {"s": 3, "ms": 3, "us": 6, "ns": 9}


class Pairs(list[tuple[str, Any]]):
    """An object with its duplicates and its order."""


@dataclass(frozen=True)
class Number:
    text: str


class _Constant(ValueError):
    pass


@dataclass
class Verdict:
    """Either `row` (name → value, `_extra` as Pairs or None), or the reasons that may be given for a refusal."""

    row: dict[str, Any] | None
    reasons: set[str]


def judge(schema: Schema, value: bytes | None) -> Verdict:
    """Return the verdict on one record's value."""
    if value is None:
        return Verdict({f.name: None for f in schema.fields} | {"_extra": None}, set())
    try:
        parsed = parse(value)
    except (ValueError, RecursionError):
        return Verdict(None, NOT_JSON)
    if measure_depth(parsed) > DEPTH:
        return Verdict(None, {"too_deep"})
    if not isinstance(parsed, Pairs):
        return Verdict(None, {"wrong_type"})
    problems: set[str] = set()
    row = _judge_struct(schema.fields, parsed, problems)
    row["_extra"] = drop_named(Type(Kind.STRUCT, fields=schema.fields), parsed)
    return Verdict(None, problems) if problems else Verdict(row, set())


def parse(value: bytes) -> Any:
    """Parse JSON with Python's reader, numbers as they are written. Raises ValueError."""

    def refuse_constant(text: str) -> Any:
        raise _Constant(text)

    text = value.decode("utf-8").removeprefix("\ufeff")
    return json.loads(
        text, parse_int=Number, parse_float=Number, parse_constant=refuse_constant, object_pairs_hook=Pairs
    )


def measure_depth(value: Any) -> int:
    if isinstance(value, Pairs):
        return 1 + max((measure_depth(v) for _, v in value), default=0)
    if isinstance(value, list):
        return 1 + max(map(measure_depth, value), default=0)
    return 0


def _judge_struct(fields: tuple[Field, ...], pairs: Pairs, problems: set[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for f in fields:
        values = [v for k, v in pairs if k == f.json_name]
        if len(values) > 1:
            problems.add("duplicate")
        if not values and f.required:
            problems.add("missing")
        for v in values or [None]:
            row[f.name] = _judge_value(f, v, problems) if values else None
    return row


def drop_named(t: Type, value: Any) -> Any:
    """Return the value without the members that the type names; None if nothing remains. Elements keep their index."""
    if t.kind is Kind.STRUCT and isinstance(value, Pairs):
        types = {f.json_name: f.type for f in t.fields}
        pairs = [(k, drop_named(types[k], v) if k in types else v) for k, v in value]
        return Pairs((k, v) for k, v in pairs if v is not None or k not in types) or None
    if t.kind is Kind.MAP and isinstance(value, Pairs):
        return (
            Pairs((k, remaining) for k, v in value if (remaining := drop_named(t.fields[0].type, v)) is not None)
            or None
        )
    if t.kind is Kind.LIST and isinstance(value, list):
        remaining = [drop_named(t.fields[0].type, v) for v in value]
        while remaining and remaining[-1] is None:
            remaining.pop()
        empty: Any = [] if t.fields[0].type.kind is Kind.LIST else Pairs()
        return [empty if v is None else v for v in remaining] or None
    return None


def list_unnamed_members(t: Type, value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the members that the type does not name, each as the path of the object and the name."""
    match t.kind:
        case Kind.STRUCT if isinstance(value, Pairs):
            fields = {f.json_name: f for f in t.fields}
            yield from ((path, k) for k, _ in value if k not in fields)
            for f, v in ((fields[k], v) for k, v in value if k in fields):
                yield from list_unnamed_members(f.type, v, f"{path}.{f.name}" if path else f.name)
        case Kind.MAP if isinstance(value, Pairs):
            for _, v in value:
                yield from list_unnamed_members(t.fields[0].type, v, path + "{}")
        case Kind.LIST if isinstance(value, list):
            for v in value:
                yield from list_unnamed_members(t.fields[0].type, v, path + "[]")


def _judge_value(f: Field, value: Any, problems: set[str]) -> Any:
    if value is None:
        if f.required:
            problems.add("missing")
        return None
    try:
        return (_convert_encoded if f.type.encoding else _convert)(f.type, value, problems)
    except _Refused as refused:
        problems.add(refused.reason)
        return None


class _Refused(Exception):
    def __init__(self, reason: str) -> None:
        self.reason = reason


_TEXT_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def _convert_encoded(t: Type, value: Any, problems: set[str]) -> Any:
    match t.encoding:
        case Encoding.TEXT if isinstance(value, str):
            if not _TEXT_NUMBER.fullmatch(_check_text(value)):
                raise _Refused("malformed")
            return _convert(replace(t, encoding=None), Number(value.removeprefix("+")), problems)
        case Encoding.BASE64 if isinstance(value, str):
            data = _parse_binary(_check_text(value))
            number = int.from_bytes(data, "big", signed=True)
            if not data:
                raise _Refused("malformed")
            _check_range(number, 1 - 10**t.precision, 10**t.precision - 1)
            return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -t.scale))
        case Encoding.DAYS if isinstance(value, Number):
            return _check_range(_parse_integer(value.text), YEAR_1 // 86400, YEAR_10000 // 86400 - 1)
    raise _Refused("wrong_type")


def _convert(t: Type, value: Any, problems: set[str]) -> Any:
    match t.kind:
        case Kind.JSON:
            return value
        case Kind.STRUCT if isinstance(value, Pairs):
            return _judge_struct(t.fields, value, problems)
        case Kind.LIST if isinstance(value, list) and not isinstance(value, Pairs):
            return [_judge_value(t.fields[0], v, problems) for v in value]
        case Kind.MAP if isinstance(value, Pairs):
            if len({k for k, _ in value}) < len(value):
                problems.add("duplicate")
            return [(_check_text(k), _judge_value(t.fields[0], v, problems)) for k, v in value]
        case Kind.BOOL if isinstance(value, bool):
            return value
        case Kind.STRING if isinstance(value, str):
            return _check_text(value)
        case Kind.BINARY if isinstance(value, str):
            return _parse_binary(_check_text(value))
        case Kind.DATE if isinstance(value, str):
            return _parse_date(_check_text(value))
        case Kind.TIMESTAMP if isinstance(value, str):
            return _parse_time(_check_text(value), t.unit)
        case Kind.DECIMAL if isinstance(value, Number):
            return _parse_decimal(value.text, t.precision, t.scale)
        case Kind.FLOAT32 | Kind.FLOAT64 if isinstance(value, Number):
            return _parse_float(value.text, single=t.kind is Kind.FLOAT32)
        case Kind.EPOCH if isinstance(value, Number):
            units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[t.unit]
            number = _check_range(
                _parse_integer(value.text), max(YEAR_1 * units, -(1 << 63)), min(YEAR_10000 * units, 1 << 63) - 1
            )
            return number * (1000 if t.unit == "s" else 1)
        case kind if str(kind) in _INTS and isinstance(value, Number):
            return _check_range(_parse_integer(value.text), *_INTS[str(kind)])
    raise _Refused("wrong_type")


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Refused("lone_surrogate") from None
    return text


def _check_range(n: int, low: int, high: int) -> int:
    if not low <= n <= high:
        raise _Refused("out_of_range")
    return n


def parse_number(text: str) -> tuple[int, int]:
    """Return the mantissa without trailing zeros, and the power of ten."""
    mantissa, _, exponent = text.lower().partition("e")
    integer, _, after = mantissa.partition(".")
    digits = (integer + after).lstrip("-").lstrip("0")
    short = digits.rstrip("0")
    power = (int(exponent or 0) if len(exponent) < 4000 else 10**12 * (-1 if "-" in exponent else 1)) - len(after)
    if not short:
        return 0, 0
    sign = -1 if text.startswith("-") else 1
    return sign * int(short), power + len(digits) - len(short)


def _parse_integer(text: str) -> int:
    mantissa, power = parse_number(text)
    if len(str(abs(mantissa))) + power > 20:
        raise _Refused("out_of_range")
    if power < 0:
        raise _Refused("inexact")
    return mantissa * 10**power


def _parse_decimal(text: str, precision: int, scale: int) -> Decimal:
    mantissa, power = parse_number(text)
    if mantissa and len(str(abs(mantissa))) + power > precision - scale:
        raise _Refused("out_of_range")
    if mantissa and power < -scale:
        raise _Refused("inexact")
    return Decimal((int(mantissa < 0), tuple(map(int, str(abs(mantissa) * 10 ** (power + scale)))), -scale))


def _parse_float(text: str, *, single: bool) -> float:
    number = float(text)
    if single:
        number = _find_nearest_single(text)
    if number in (float("inf"), float("-inf")):
        raise _Refused("out_of_range")
    return number


def _find_nearest_single(text: str) -> float:
    """Return the nearest float32 by exact arithmetic, ties to even."""
    mantissa, power = parse_number(text)
    if mantissa and not -60 < len(str(abs(mantissa))) + power < 60:
        return float(np.copysign(np.inf if power > 0 else 0.0, -1 if text[0] == "-" else 1))
    value = abs(Fraction(mantissa) * Fraction(10) ** power)
    with np.errstate(all="ignore"):
        near = np.float32(float(value))
        near = np.float32(3.4028234663852886e38) if np.isinf(near) else near
        around = [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))]
    largest = Fraction(float(np.finfo(np.float32).max))
    if value >= largest + Fraction(2) ** 103:
        best = float("inf")
    else:
        finite = [c for c in around if not np.isinf(c)]
        best = float(min(finite, key=lambda c: (abs(Fraction(float(c)) - value), _get_bits(c) & 1)))
    return -best if text.startswith("-") else best


def _get_bits(x: np.float32) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits


def _parse_binary(text: str) -> bytes:
    try:
        decoded = base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, ValueError):
        raise _Refused("malformed") from None
    if base64.b64encode(decoded).decode() != text:
        raise _Refused("malformed")
    return decoded


def _parse_date(text: str) -> int:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        raise _Refused("malformed")
    return _count_days(int(text[:4]), int(text[5:7]), int(text[8:]))


def _count_days(year: int, month: int, day: int) -> int:
    try:
        return (date(year, month, day) - date(1970, 1, 1)).days
    except ValueError:
        raise _Refused("malformed") from None


def _parse_time(text: str, unit: str) -> int:
    match = _TIME.fullmatch(text)
    if not match or len(text) > 64:
        raise _Refused("malformed")
    year, month, day, hour, minute, second = (int(match[i] or 0) for i in range(1, 7))
    seconds = _count_days(year, month, day) * 86400 + hour * 3600 + minute * 60 + second
    zone = match[8] or "Z"
    if hour > 23 or minute > 59 or second > 59:
        raise _Refused("malformed")
    if zone not in "Zz":
        hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
        if hours > 23 or minutes > 59:
            raise _Refused("malformed")
        seconds -= int(zone[0] + "1") * (hours * 3600 + minutes * 60)
    digits = _UNITS[unit]
    units = seconds * 10**digits + int((match[7] or "")[:digits].ljust(digits, "0"))
    if not YEAR_1 <= seconds < YEAR_10000 or not -(2**63) <= units < 2**63:
        raise _Refused("out_of_range")
    return units
