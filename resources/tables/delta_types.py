"""Columns as Delta's log spells them, and its statistics of each file: rows, nulls, smallest and largest values."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.lake.parquet import Bounds, read_bounds
from sluice.pipelines.schema.schema import Kind, Type
from sluice.pipelines.schema.wider import parse_type

_BOUNDED = {"byte", "short", "integer", "long", "date", "timestamp"}
"""The types of columns that have bounds in each file that lands."""
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - in UTC, as Delta's log spells times


def delta_field(name: str, text: str) -> dict[str, Any]:
    """A column, whose type is spelled as in a schema, in the JSON of Delta's log."""
    return _make_field(name, parse_type(text.removesuffix(" not null")))


def _make_field(name: str, t: Type) -> dict[str, Any]:
    return {"name": name, "type": _spell_type(t), "nullable": True, "metadata": {}}


def _spell_type(t: Type) -> str | dict[str, Any]:
    match t.kind:
        case Kind.DECIMAL:
            return f"decimal({t.precision},{t.scale})"
        case Kind.LIST:
            return {"type": "array", "elementType": _spell_type(t.fields[0].type), "containsNull": True}
        case Kind.MAP:
            value = _spell_type(t.fields[0].type)
            return {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": True}
        case Kind.STRUCT:
            return {"type": "struct", "fields": [_make_field(f.name, f.type) for f in t.fields]}
        case kind:
            return kind.delta


def grown(have: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Returns whether the wanted column is the table's column with more struct members. Raises ValueError if its
    type has changed: Delta widens no column."""
    return _grown(wanted["name"], have["type"], wanted["type"])


def _grown(path: str, have: Any, wanted: Any) -> bool:
    if isinstance(have, str) or isinstance(wanted, str):
        if have != wanted:
            raise ValueError(f"{path} is {_kind(have)} in it and would become {_kind(wanted)}: Delta widens no column")
        return False
    if have["type"] != wanted["type"]:
        raise ValueError(f"{path} is {_kind(have)} in it and would become {_kind(wanted)}")
    match have["type"]:
        case "array":
            return _grown(f"{path}[]", have["elementType"], wanted["elementType"])
        case "map":
            return _grown(f"{path}{{}}", have["valueType"], wanted["valueType"])
    there = {f["name"]: f for f in have["fields"]}
    more = [
        f["name"] not in there or _grown(f"{path}.{f['name']}", there[f["name"]]["type"], f["type"])
        for f in wanted["fields"]
    ]
    return any(more)


def _kind(spelled: Any) -> str:
    return spelled if isinstance(spelled, str) else str(spelled["type"])


def list_bounded(fields: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the columns, as Delta's log spells them, that have bounds in each file with any statistics."""
    return tuple(f["name"] for f in fields if str(f["type"]) in _BOUNDED)


def stats_of(file: BinaryIO, columns: Sequence[str]) -> tuple[int, str]:
    """The file's size, and its statistics as the JSON of Delta's log. Raises ArrowException for no Parquet file.

    All of `columns` have bounds and a number of nulls in them, or no column has: deltalake reads missing bounds as
    bounds that no value meets.
    """
    footer = pq.read_metadata(file)
    size, bounds = file.seek(0, 2), read_bounds(footer)
    absent = set(columns).difference(footer.schema.to_arrow_schema().names)
    bounds |= {name: Bounds(pa.null(), None, None, footer.num_rows) for name in absent}
    stats: dict[str, Any] = {"numRecords": footer.num_rows}
    try:
        bounded_columns = [(name, bounds[name]) for name in columns]
        stats["minValues"] = {n: _spell(b.kind, b.low, up=False) for n, b in bounded_columns if b.low is not None}
        stats["maxValues"] = {n: _spell(b.kind, b.high, up=True) for n, b in bounded_columns if b.high is not None}
        stats["nullCount"] = {n: b.nulls for n, b in bounded_columns}
    except (KeyError, OverflowError):  # a column without bounds, or a time that Delta cannot spell
        stats = {"numRecords": footer.num_rows}
    return size, json.dumps(stats, separators=(",", ":"))


def says_all(stats: Mapping[str, Any], columns: Sequence[str]) -> bool:
    """Returns whether a file's flat deltalake statistics have bounds for all of these columns, or for none."""
    values = [[stats.get(f"{what}.{name}") for what in ("null_count", "min", "max")] for name in columns]
    full = (n == stats["num_records"] or None not in (n, low, high) for n, low, high in values)
    return all(full) or all(value is None for triple in values for value in triple)


def _spell(kind: pa.DataType, value: int, *, up: bool) -> int | str:
    """A bound as JSON. Times are whole milliseconds, as Spark writes them. Raises OverflowError."""
    if pa.types.is_date(kind):
        return (_EPOCH + dt.timedelta(days=value)).date().isoformat()
    if not pa.types.is_timestamp(kind):
        return value
    per_ms = {"ms": 1, "us": 1000}[kind.unit]
    rounded = -(-value // per_ms) if up else value // per_ms
    return f"{(_EPOCH + dt.timedelta(milliseconds=rounded)).isoformat(timespec='milliseconds')}Z"
