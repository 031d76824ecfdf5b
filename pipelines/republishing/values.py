"""Typed rows as JSON again: the value of a record from its columns.

What comes out lands as the same row. It is not the value that came in: the order of fields is the schema's, blanks are
gone, numbers and times are spelled in one way, a field that was null is left out, unknown fields inside structs are
lost, and `_extra` comes last.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.schema.schema import EXTRA, Kind, Schema, Type

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
Texts = list[str | None]
"""The JSON text of each row; None where it is null."""


def json_values(rows: pa.RecordBatch, schema: Schema) -> pa.Array:
    """The values of typed rows as JSON objects in UTF-8; null for tombstones."""
    named = [(json.dumps(f.name, ensure_ascii=False), _column(rows, f.name, f.type)) for f in schema.fields]
    extra = _extra(rows)
    values: list[bytes | None] = []
    for n, tombstone in enumerate(rows.column("kafka_tombstone").to_pylist()):
        members = [f"{name}:{text}" for name, texts in named if texts is not None and (text := texts[n]) is not None]
        if extra and (inside := extra[n]):
            members.append(inside)
        values.append(None if tombstone else f"{{{','.join(members)}}}".encode())
    return pa.array(values, pa.binary())


def _column(rows: pa.RecordBatch, name: str, kind: Type) -> Texts | None:
    """None for a column that these rows do not have."""
    at = rows.schema.get_field_index(name)
    return None if at < 0 else _texts(rows.column(at), kind)


def _extra(rows: pa.RecordBatch) -> Texts | None:
    """The members of the objects in `_extra`, without braces."""
    at = rows.schema.get_field_index(EXTRA)
    found = None if at < 0 else rows.column(at).to_pylist()
    return found and [None if text is None else text.strip()[1:-1].strip() for text in found]


def _texts(column: pa.Array, kind: Type) -> Texts:
    match kind.kind:
        case Kind.STRUCT:
            return _structs(column, kind)
        case Kind.LIST:
            return _lists(column, kind)
        case Kind.MAP:
            return _maps(column, kind)
        case Kind.TIMESTAMP | Kind.EPOCH:
            ticks = column.cast(pa.int64()).to_pylist()
            per_second = _PER_SECOND[column.type.unit]
            spell = _instant if kind.kind is Kind.TIMESTAMP else _number_of(kind.unit)
            return [None if t is None else spell(t, per_second) for t in ticks]
        case _:
            spelling = _SPELLED.get(kind.kind, str)
            return [None if v is None else spelling(v) for v in column.to_pylist()]


def _structs(column: pa.Array, kind: Type) -> Texts:
    named = [
        (json.dumps(f.name, ensure_ascii=False), _texts(column.field(f.name), f.type))
        for f in kind.fields
        if column.type.get_field_index(f.name) >= 0
    ]
    return [
        f"{{{','.join(f'{name}:{texts[n]}' for name, texts in named if texts[n] is not None)}}}" if there else None
        for n, there in enumerate(column.is_valid().to_pylist())
    ]


def _lists(column: pa.Array, kind: Type) -> Texts:
    elements = [text or "null" for text in _texts(column.values, kind.fields[0].type)]
    return [None if bounds is None else f"[{','.join(elements[slice(*bounds)])}]" for bounds in _bounds(column)]


def _maps(column: pa.Array, kind: Type) -> Texts:
    names = [json.dumps(name, ensure_ascii=False) for name in column.keys.to_pylist()]
    values = [text or "null" for text in _texts(column.items, kind.fields[0].type)]
    members = [f"{name}:{value}" for name, value in zip(names, values, strict=True)]
    return [None if bounds is None else f"{{{','.join(members[slice(*bounds)])}}}" for bounds in _bounds(column)]


def _bounds(column: pa.Array) -> Sequence[tuple[int, int] | None]:
    """Where each row's elements lie; None for a null."""
    ends = column.offsets.to_pylist()
    there = column.is_valid().to_pylist()
    return [(ends[n], ends[n + 1]) if valid else None for n, valid in enumerate(there)]


def _instant(ticks: int, per_second: int) -> str:
    seconds, rest = divmod(ticks, per_second)
    digits = len(str(per_second)) - 1
    fraction = f".{rest:0{digits}}" if rest else ""
    moment = (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None)
    return f'"{moment.isoformat()}{fraction}Z"'


def _number_of(unit: str) -> Callable[[int, int], str]:
    def spell(ticks: int, per_second: int) -> str:
        return _plain(Decimal(ticks) * _PER_SECOND[unit] / per_second)

    return spell


def _plain(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _float32(value: float) -> str:
    return str(np.float32(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _date(value: date) -> str:
    return f'"{value.isoformat()}"'


_SPELLED: dict[Kind, Callable[[Any], str]] = {
    Kind.BOOL: lambda value: "true" if value else "false",
    Kind.STRING: _text,
    Kind.BINARY: lambda value: f'"{base64.b64encode(value).decode()}"',
    Kind.DATE: _date,
    Kind.JSON: str,
    Kind.DECIMAL: lambda value: f"{value:f}",
    Kind.FLOAT32: _float32,
    Kind.FLOAT64: repr,
}
