"""Values of each type that a feed supports, as records carry them, and which rows a filter must find.

A time is a whole number of microseconds since 1970 (of nanoseconds in the set `nanos`), a day one of days.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

DAY_US = 86_400_000_000
YEAR_1, YEAR_9999_END = -719_162 * DAY_US, 2_932_897 * DAY_US - 1
NOON = 1_795_176_000_123_456


def _bits(bits: int, signed: bool = True) -> list[int]:
    low = -(1 << bits - 1) if signed else 0
    high = (1 << bits - signed) - 1
    return [low, low + 1, 0, 1, high - 1, high]


def _whole(unit: int, *times: int) -> list[int]:
    return sorted({time // unit * unit for time in times})


_TIMES = (YEAR_1, -1, 0, 1, NOON, YEAR_9999_END)
TYPES: dict[str, list[Any]] = {
    "int8": _bits(8),
    "int16": _bits(16),
    "int32": _bits(32),
    "int64": [*_bits(64), 1 << 53, (1 << 53) + 1],
    "uint8": _bits(8, signed=False),
    "uint16": _bits(16, signed=False),
    "uint32": _bits(32, signed=False),
    "uint64": _bits(64, signed=False),
    "float32": [-3.4028234663852886e38, -1.5, -0.0, 1.401298464324817e-45, 1.5, 3.4028234663852886e38],
    "float64": [-1.7976931348623157e308, -0.1, -0.0, 5e-324, 0.1, 1.7976931348623157e308],
    "decimal(5,2)": [Decimal(x) for x in ("-999.99", "-0.01", "0.00", "1.50", "999.99")],
    "decimal(18,3)": [Decimal(x) for x in ("-999999999999999.999", "0.000", "999999999999999.999")],
    "decimal(38,4)": [Decimal(x) for x in (f"-{'9' * 34}.9999", "-0.0001", "0.0000", f"{'9' * 34}.9999")],
    "bool": [False, True],
    "string": ["", "\0", " ", "'a\"", "a", "a" * 100, "ab", "z", "Ü" * 40, "ïñ", "日本", "\U0010ffff" * 20],
    "binary": [b"", b"\0", b"a", b"a" * 100, b"\xc3\x28", b"\xff" * 40],
    "date": [-719_162, -141_428, -1, 0, 20_777, 2_932_896],
    "json": ['"a"', '{"a":[1,null]}', "7", "[]"],
    "timestamp(ms)": _whole(1000, *_TIMES),
    "timestamp(us)": [*_TIMES],
    "epoch(s)": _whole(1_000_000, *_TIMES),
    "epoch(ms)": _whole(1000, *_TIMES),
    "epoch(us)": [*_TIMES],
}
NESTED: dict[str, list[Any]] = {
    "struct<a:int64, b:string, t:timestamp(ms)>": [
        {"a": 1, "b": "", "t": _whole(1000, NOON)[0]},
        {"a": -5, "b": "ü", "t": 0},
        {"a": None, "b": None, "t": None},
    ],
    "struct<a:struct<b:decimal(9,2), c:bool>>": [{"a": {"b": Decimal("1.50"), "c": True}}, {"a": None}],
    "list<int64>": [[1, 2], [], [None, -(1 << 63)]],
    "list<struct<a:int32, b:string>>": [[{"a": 1, "b": "x"}], [], [{"a": None, "b": ""}, None]],
    "map<string, int64>": [{"k": 1, "": None}, {}],
}
FLOATS = [float("-inf"), -1.5, -0.0, 1.5, float("inf"), float("nan")]
NANOS = [-1, 0, NOON * 1000 + 789, (1 << 63) - 1_000_000_000]

SETS: dict[str, dict[str, list[Any]]] = {
    "json": TYPES | NESTED,
    "avro": {"float32": FLOATS, "float64": FLOATS, "struct<x:float64>": [{"x": x} for x in FLOATS]},
    "nanos": {"timestamp(ns)": NANOS, "epoch(ns)": NANOS},
}
"""What lands together, by the feed's name. Avro's records hold what JSON has no numbers for."""
OPERATIONS = ("=", "<", ">=", "in", "is null")


@dataclass(frozen=True)
class Column:
    """A column of a set, and the values of its rows, file by file. The last file has nulls alone."""

    name: str
    type: str
    files: tuple[tuple[Any, ...], ...]

    @property
    def rows(self) -> list[Any]:
        return [value for file in self.files for value in file]


def columns(values: Mapping[str, Sequence[Any]]) -> list[Column]:
    """A column of each type, with three files: smaller values and a null, larger values, nulls."""
    half = max((len(v) + 1) // 2 for v in values.values())
    out = []
    for number, (text, all_) in enumerate(values.items()):
        low, high = all_[: (len(all_) + 1) // 2], all_[(len(all_) + 1) // 2 :] or all_
        filled = [[*(some[i % len(some)] for i in range(half))] for some in (low, high)]
        out.append(Column(f"c{number}", text, ((*filled[0], None), (*filled[1],), (None, None))))
    return out


@dataclass(frozen=True)
class Leaf:
    """What a filter is about: a column, or a member of a struct in it."""

    path: tuple[str, ...]
    type: str
    rows: tuple[Any, ...]
    """By the number of the row."""


def leaves(column: Column) -> list[Leaf]:
    return [*_leaves((column.name,), column.type, tuple(column.rows))]


def _leaves(path: tuple[str, ...], text: str, rows: tuple[Any, ...]) -> list[Leaf]:
    out = [Leaf(path, text, rows)]
    if text.startswith("struct<"):
        for name, member in members(text):
            inner = tuple(None if row is None else row[name] for row in rows)
            out += _leaves((*path, name), member, inner)
    return out


def members(text: str) -> list[tuple[str, str]]:
    """The members of a struct and their types."""
    parts = re.split(r", (?![^<(]*[>)])", text[len("struct<") : -1])
    return [(name, kind) for name, _, kind in (part.partition(":") for part in parts)]


@dataclass(frozen=True)
class Query:
    """A filter on a leaf: an operation and its values (none for `is null`)."""

    leaf: Leaf
    operation: str
    values: tuple[Any, ...] = ()

    def expected(self, *, nan_is_largest: bool) -> list[int]:
        """The numbers of the rows that it must find. Some engines have NaN above all other numbers and equal to
        itself, others follow IEEE 754: no comparison with NaN holds."""
        return [n for n, value in enumerate(self.leaf.rows) if self._holds(value, nan_is_largest)]

    def _holds(self, value: Any, nan_is_largest: bool) -> bool:
        if self.operation == "is null":
            return value is None
        if value is None:
            return False
        pairs = [(_key(value), _key(x)) for x in self.values]
        if not nan_is_largest and self.operation != "in":
            pairs = [(a, b) for a, b in pairs if not a[0] and not b[0]]
        holds = {
            "=": lambda a, b: a == b,
            "in": lambda a, b: a == b,
            "<": lambda a, b: a < b,
            ">=": lambda a, b: a >= b,
        }
        return any(holds[self.operation](a, b) for a, b in pairs)


def _key(value: Any) -> tuple[int, Any]:
    if isinstance(value, float):
        return (1, 0.0) if value != value else (0, value)
    return (0, value.encode() if isinstance(value, str) else value)


def queries(leaf: Leaf, most: int | None = None) -> list[Query]:
    """Every filter on the leaf, on at most so many of its values; a list, a map and a struct are compared with null."""
    out = [Query(leaf, "is null")]
    if "<" in leaf.type:
        return out
    values = list({repr(v): v for v in leaf.rows if v is not None}.values())
    some = values if most is None else values[:: max(1, len(values) // most)][-most:]
    for value in some:
        out += [Query(leaf, operation, (value,)) for operation in ("=", "<", ">=")]
        out.append(Query(leaf, "in", (value, values[0])))
    return out


def as_json(text: str, value: Any) -> str:
    """The value as a record of JSON spells it."""
    kind, _, rest = text.partition("<")
    match kind.partition("(")[0]:
        case _ if value is None:
            return "null"
        case "decimal" | "json":
            return str(value)
        case "binary":
            return json.dumps(base64.b64encode(value).decode())
        case "date":
            return f'"{dt.date(1, 1, 1) + dt.timedelta(days=value - YEAR_1 // DAY_US)}"'
        case "timestamp":
            return f'"{_iso(value, nanos="ns" in text)}"'
        case "epoch":
            return str(value // {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 1}[text[6:-1]])
        case "struct":
            return as_object({name: as_json(member, value[name]) for name, member in members(text)})
        case "list":
            return f"[{', '.join(as_json(rest[:-1], inner) for inner in value)}]"
        case "map":
            inner = rest[:-1].partition(", ")[2]
            return as_object({key: as_json(inner, v) for key, v in value.items()})
    return json.dumps(value)


def as_object(members: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in members.items())}}}"


def _iso(time: int, *, nanos: bool) -> str:
    micros, rest = divmod(time, 1000) if nanos else (time, 0)
    moment = dt.datetime(1, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=micros - YEAR_1)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='microseconds')}{f'{rest:03d}' if nanos else ''}Z"
