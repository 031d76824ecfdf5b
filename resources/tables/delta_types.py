"""Columns as Delta's log spells them, and what it says of each file: rows, nulls, smallest and largest values."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from sluice.pipelines.schema.schema import Kind, Type
from sluice.pipelines.schema.wider import parse_type

_NAMES = {
    Kind.INT8: "byte",
    Kind.INT16: "short",
    Kind.INT32: "integer",
    Kind.INT64: "long",
    # signed, and wide enough
    Kind.UINT8: "short",
    Kind.UINT16: "integer",
    Kind.FLOAT32: "float",
    Kind.FLOAT64: "double",
    Kind.BOOL: "boolean",
    Kind.STRING: "string",
    Kind.JSON: "string",
    Kind.BINARY: "binary",
    Kind.DATE: "date",
    Kind.TIMESTAMP: "timestamp",
    Kind.EPOCH: "timestamp",
}
MOST_TEXT = 32
"""Longer texts are no bounds of a file: readers prune by the short ones."""


def delta_field(name: str, text: str) -> dict[str, Any]:
    """A column, whose type is spelled as in a schema, in the JSON of Delta's log."""
    return _field(name, parse_type(text.removesuffix(" not null")))


def _field(name: str, t: Type) -> dict[str, Any]:
    return {"name": name, "type": _spelled(t), "nullable": True, "metadata": {}}


def _spelled(t: Type) -> str | dict[str, Any]:
    match t.kind:
        case Kind.DECIMAL:
            return f"decimal({t.precision},{t.scale})"
        case Kind.LIST:
            return {"type": "array", "elementType": _spelled(t.fields[0].type), "containsNull": True}
        case Kind.MAP:
            value = _spelled(t.fields[0].type)
            return {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": True}
        case Kind.STRUCT:
            return {"type": "struct", "fields": [_field(f.name, f.type) for f in t.fields]}
        case kind:
            return _NAMES[kind]


def grown(have: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the wanted column is the one that the table has, with more members in its structs. Raises ValueError
    when it has become another type: Delta widens no column."""
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


def stats_of(file: BinaryIO) -> tuple[int, str]:
    """The file's size, and its statistics as the JSON of Delta's log. Raises ArrowException for no Parquet file."""
    found = pq.read_metadata(file)
    size = file.seek(0, 2)
    nulls: dict[str, int] = {}
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for i in range(found.num_columns):
        name = found.schema.column(i).path
        if "." in name:
            continue  # inside of a struct, a list or a map
        told = [found.row_group(g).column(i).statistics for g in range(found.num_row_groups)]
        if any(s is None for s in told):
            continue
        if all(s.has_null_count for s in told):
            nulls[name] = sum(s.null_count for s in told)
        if (bounds := _bounds(told)) is not None:
            low[name], high[name] = bounds
    said = {"numRecords": found.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}
    return size, json.dumps(said, separators=(",", ":"))


def _bounds(told: list[Any]) -> tuple[Any, Any] | None:
    """The smallest and the largest value of a column, from the statistics of all row groups; None if any is lacking."""
    some = [s for s in told if s.has_min_max or s.num_values]
    if not some or not all(s.has_min_max for s in some):
        return None
    try:
        low, high = _told(min(s.min for s in some), up=False), _told(max(s.max for s in some), up=True)
    except (OverflowError, ValueError):  # a time that Python does not have
        return None
    return None if low is None or high is None else (low, high)


def _told(value: Any, *, up: bool) -> Any:
    """A bound as JSON; None for what is no bound. Times are whole milliseconds, as Spark writes them."""
    match value:
        case bool():
            return None
        case int():
            return value
        case dt.datetime():
            utc = value if value.tzinfo is None else value.astimezone(dt.UTC)
            part = utc.microsecond % 1000
            whole = utc + dt.timedelta(microseconds=(1000 - part) if up and part else -part)
            return f"{whole.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
        case dt.date():
            return value.isoformat()
        case str() if len(value) <= MOST_TEXT:
            return value
        case _:
            return None
