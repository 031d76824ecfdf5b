"""Which types hold all values of other types, and the smallest type that holds the values of two. Light: no Arrow.

Promise: if `holds(wide, narrow)`, Arrow casts every value of `narrow` to `wide` without loss. Arrow, DuckDB and Spark
then read files of both types as one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, reduce

from sluice.pipelines.schema.schema import Field, Kind, SchemaError, Type, parse_field

MOST_DIGITS = 38
SIGNED = (Kind.INT8, Kind.INT16, Kind.INT32, Kind.INT64)
UNSIGNED = (Kind.UINT8, Kind.UINT16, Kind.UINT32, Kind.UINT64)
_BITS = {k: 8 << i for kinds in (SIGNED, UNSIGNED) for i, k in enumerate(kinds)}
_FLOATS = {Kind.FLOAT32: 24, Kind.FLOAT64: 53}
"""The widest integers, in bits, that each float type holds exactly."""
_TIMES = (Kind.TIMESTAMP, Kind.EPOCH)
_TEXTS = (Kind.STRING, Kind.JSON)
RAW_TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int32",
    "offset": "int64",
    "timestamp": "timestamp(ms)",
    "timestampType": "int32",
    "headers": "list<struct<key:string, value:binary>>",
}
"""The columns of raw feeds, spelled as in a schema."""
QUARANTINED_TYPES = RAW_TYPES | {
    **dict.fromkeys(("stage", "reason", "expectation", "field", "detail"), "string"),
    "byte": "int32",
    "batch": "int64",
    "contract": "string",
    "withheld_bytes": "int32",
}
"""The columns of quarantined records, spelled in the same way."""


def holds(wide: Type, narrow: Type) -> bool:
    """Returns whether `wide` holds every value that lands as `narrow`."""
    a, b = wide.kind, narrow.kind
    if b in _BITS:
        bits = _BITS[narrow.kind]
        if wide.kind in _FLOATS:
            return bits <= _FLOATS[wide.kind]
        if wide.kind in SIGNED and narrow.kind in UNSIGNED:
            return _BITS[wide.kind] > bits
        alike = (wide.kind in SIGNED) is (narrow.kind in SIGNED)
        return wide.kind in _BITS and alike and _BITS[wide.kind] >= bits
    if a in _TIMES and b in _TIMES:
        units = unit_of(wide), unit_of(narrow)
        return units[0] == units[1] or units == ("us", "ms")  # the years 1 to 9999 fit into both of these alone
    if a in _TEXTS and b in _TEXTS:
        return True
    if a in _FLOATS and b in _FLOATS:
        return _FLOATS[a] >= _FLOATS[b]
    if a is not b:
        return False
    match a:
        case Kind.DECIMAL:
            return wide.scale >= narrow.scale and _whole(wide) >= _whole(narrow)
        case Kind.LIST | Kind.MAP:
            return holds(wide.fields[0].type, narrow.fields[0].type)
        case Kind.STRUCT:
            # A struct may gain and lose members; those of the same name must hold their values.
            there = {f.name.casefold(): f for f in wide.fields}
            both = ((there[f.name.casefold()], f) for f in narrow.fields if f.name.casefold() in there)
            return all(a.name == b.name and holds(a.type, b.type) for a, b in both)
        case _:
            return True


def unit_of(t: Type) -> str:
    """Returns the unit of time in which a timestamp or epoch lands."""
    return "ms" if t.unit == "s" else t.unit


def _whole(t: Type) -> int:
    """The number of a decimal's digits before the point."""
    return t.precision - t.scale


def common_type(a: Type, b: Type) -> Type | None:
    """The type as which values landed as `a` and as `b` can both be read; None when there is none."""
    if a.kind is b.kind is Kind.STRUCT:
        members = {f.name: f.type for f in a.fields}
        for f in b.fields:
            common = common_type(members[f.name], f.type) if f.name in members else f.type
            if common is None:
                return None
            members[f.name] = common
        if len({name.casefold() for name in members}) < len(members):
            return None
        return Type(a.kind, fields=tuple(Field(name, t) for name, t in members.items()))
    if a.kind is b.kind and a.kind in (Kind.LIST, Kind.MAP):
        inner = common_type(a.fields[0].type, b.fields[0].type)
        return Type(a.kind, fields=(Field("", inner),)) if inner else None
    return a if holds(a, b) else b if holds(b, a) else None


def join(a: Type, b: Type) -> Type:
    """The smallest type for values seen as both. Numbers get a number type that fits; anything else becomes JSON."""
    if a.kind is not b.kind and a.kind in _TEXTS and b.kind in _TEXTS:
        return Type(Kind.JSON)
    if holds(a, b):
        return a
    if holds(b, a):
        return b
    if a.kind in _BITS and b.kind in _BITS:
        return next((t for k in SIGNED if holds(t := Type(k), a) and holds(t, b)), Type(Kind.FLOAT64))
    if a.kind is b.kind is Kind.DECIMAL:
        scale = max(a.scale, b.scale)
        digits = max(_whole(a), _whole(b)) + scale
        return Type(Kind.DECIMAL, digits, scale) if digits <= MOST_DIGITS else Type(Kind.JSON)
    numbers = {*_BITS, *_FLOATS}
    return Type(Kind.FLOAT64 if a.kind in numbers and b.kind in numbers else Kind.JSON)


@lru_cache(1024)
def parse_type(text: str) -> Type:
    """The type that a feed file spells so. Raises SchemaError."""
    return parse_field("x", text).type


@lru_cache(1024)
def join_texts(*texts: str) -> str:
    """The smallest type for values seen as each of these types, as text. Empty texts do not count."""
    try:
        types = [parse_type(t) for t in dict.fromkeys(texts) if t]
    except SchemaError:
        return str(Kind.JSON)
    return str(reduce(join, types)) if types else ""


def one_table(before: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """The columns of both tables, with types that read both. Types that cannot be read as one give the later one."""
    out = dict(before)
    for name, value in more.items():
        text = _without_names(value)
        if out.setdefault(name, text) != text:
            out[name] = str(common_type(parse_type(out[name]), parse_type(text)) or parse_type(text))
    return out


@lru_cache(1024)
def _without_names(text: str) -> str:
    """The type without the names and forms that its fields have in records."""
    return str(_without_sources(parse_type(text)))


def _without_sources(t: Type) -> Type:
    fields = tuple(replace(f, type=_without_sources(f.type), source=None) for f in t.fields)
    return replace(t, fields=fields, encoding=None)
