"""Values of each type that a feed supports, as records contain them, and the rows that a filter must find.

A time is an integer of microseconds since 1970 (nanoseconds in the set `nanos`), a date an integer of days.
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


def _list_bounds(bits: int, signed: bool = True) -> list[int]:
    low = -(1 << bits - 1) if signed else 0
    high = (1 << bits - signed) - 1
    return [low, low + 1, 0, 1, high - 1, high]


def _truncate_times(unit: int, *times: int) -> list[int]:
    return sorted({time // unit * unit for time in times})


_TIMES = (YEAR_1, -1, 0, 1, NOON, YEAR_9999_END)
TYPES: dict[str, list[Any]] = {
    "int8": _list_bounds(8),
    "int16": _list_bounds(16),
    "int32": _list_bounds(32),
    "int64": [*_list_bounds(64), 1 << 53, (1 << 53) + 1],
    "uint8": _list_bounds(8, signed=False),
    "uint16": _list_bounds(16, signed=False),
    "uint32": _list_bounds(32, signed=False),
    "uint64": _list_bounds(64, signed=False),
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
    "timestamp(ms)": _truncate_times(1000, *_TIMES),
    "timestamp(us)": [*_TIMES],
    "epoch(s)": _truncate_times(1_000_000, *_TIMES),
    "epoch(ms)": _truncate_times(1000, *_TIMES),
    "epoch(us)": [*_TIMES],
}
NESTED: dict[str, list[Any]] = {
    "struct<a:int64, b:string, t:timestamp(ms)>": [
        {"a": 1, "b": "", "t": _truncate_times(1000, NOON)[0]},
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
"""The types that land together, by the feed's name. Avro records hold the numbers that JSON cannot express."""
OPERATIONS = ("=", "<", ">=", "in", "is null")


@dataclass(frozen=True)
class Column:
    """A column of a set, and the values of its rows, file by file. The last file has only nulls."""

    name: str
    type: str
    files: tuple[tuple[Any, ...], ...]

    @property
    def rows(self) -> list[Any]:
        return [value for file in self.files for value in file]


def build_columns(values: Mapping[str, Sequence[Any]]) -> list[Column]:
    """Build a column of each type, with three files: smaller values and a null, larger values, nulls."""
    half = max((len(v) + 1) // 2 for v in values.values())
    built = []
    for number, (text, all_) in enumerate(values.items()):
        low, high = all_[: (len(all_) + 1) // 2], all_[(len(all_) + 1) // 2 :] or all_
        filled = [[*(part[i % len(part)] for i in range(half))] for part in (low, high)]
        built.append(Column(f"c{number}", text, ((*filled[0], None), (*filled[1],), (None, None))))
    return built


@dataclass(frozen=True)
class Leaf:
    """The subject of a filter: a column, or a member of a struct in it."""

    path: tuple[str, ...]
    type: str
    rows: tuple[Any, ...]
    """The values, by row number."""


def list_leaves(column: Column) -> list[Leaf]:
    return [*_list_leaves((column.name,), column.type, tuple(column.rows))]


def _list_leaves(path: tuple[str, ...], text: str, rows: tuple[Any, ...]) -> list[Leaf]:
    leaves = [Leaf(path, text, rows)]
    if text.startswith("struct<"):
        for name, member in parse_members(text):
            inner = tuple(None if row is None else row[name] for row in rows)
            leaves += _list_leaves((*path, name), member, inner)
    return leaves


def parse_members(text: str) -> list[tuple[str, str]]:
    """Returns the members of a struct type and their types."""
    parts = re.split(r", (?![^<(]*[>)])", text[len("struct<") : -1])
    return [(name, kind) for name, _, kind in (part.partition(":") for part in parts)]


@dataclass(frozen=True)
class Query:
    """A filter on a leaf: an operation and its values (none for `is null`)."""

    leaf: Leaf
    operation: str
    values: tuple[Any, ...] = ()

    def find_rows(self, *, nan_is_largest: bool) -> list[int]:
        """Returns the numbers of the rows that the query must find.

        In some engines NaN equals itself and is larger than all other numbers; others follow IEEE 754, by which no
        comparison with NaN holds.
        """
        return [n for n, value in enumerate(self.leaf.rows) if self._is_match(value, nan_is_largest)]

    def _is_match(self, value: Any, nan_is_largest: bool) -> bool:
        if self.operation == "is null":
            return value is None
        if value is None:
            return False
        pairs = [(_get_sort_key(value), _get_sort_key(x)) for x in self.values]
        if not nan_is_largest and self.operation != "in":
            pairs = [(a, b) for a, b in pairs if not a[0] and not b[0]]
        holds = {
            "=": lambda a, b: a == b,
            "in": lambda a, b: a == b,
            "<": lambda a, b: a < b,
            ">=": lambda a, b: a >= b,
        }
        return any(holds[self.operation](a, b) for a, b in pairs)


def _get_sort_key(value: Any) -> tuple[int, Any]:
    if isinstance(value, float):
        return (1, 0.0) if value != value else (0, value)
    return (0, value.encode() if isinstance(value, str) else value)


def build_queries(leaf: Leaf, limit: int | None = None) -> list[Query]:
    """Build every filter on the leaf, on at most `limit` of its values. Lists, maps and structs get only `is null`."""
    queries = [Query(leaf, "is null")]
    if "<" in leaf.type:
        return queries
    values = list({repr(v): v for v in leaf.rows if v is not None}.values())
    chosen = values if limit is None else values[:: max(1, len(values) // limit)][-limit:]
    for value in chosen:
        queries += [Query(leaf, operation, (value,)) for operation in ("=", "<", ">=")]
        queries.append(Query(leaf, "in", (value, values[0])))
    return queries


def as_json(text: str, value: Any) -> str:
    """Returns the value as JSON text."""
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
            return f'"{_format_iso(value, nanos="ns" in text)}"'
        case "epoch":
            return str(value // {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 1}[text[6:-1]])
        case "struct":
            return as_object({name: as_json(member, value[name]) for name, member in parse_members(text)})
        case "list":
            return f"[{', '.join(as_json(rest[:-1], inner) for inner in value)}]"
        case "map":
            inner = rest[:-1].partition(", ")[2]
            return as_object({key: as_json(inner, v) for key, v in value.items()})
    return json.dumps(value)


def as_object(members: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in members.items())}}}"


def _format_iso(time: int, *, nanos: bool) -> str:
    micros, rest = divmod(time, 1000) if nanos else (time, 0)
    moment = dt.datetime(1, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=micros - YEAR_1)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='microseconds')}{f'{rest:03d}' if nanos else ''}Z"
