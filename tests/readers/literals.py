"""Literals for filters: a value of a type in the syntax of each engine."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tests.readers.values import Query

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def _get_kind(text: str) -> str:
    word = text.partition("(")[0]
    return {"epoch": "timestamp", "json": "string"}.get(word, "int" if "int" in word else word)


def to_native(text: str, value: Any) -> Any:
    """Returns the value as a Python object; nanoseconds as an Arrow scalar."""
    match _get_kind(text):
        case "date":
            return (EPOCH + dt.timedelta(days=value)).date()
        case "timestamp" if "ns" not in text:
            return EPOCH + dt.timedelta(microseconds=value)
        case "timestamp":
            return to_arrow(text, value)
    return value


def to_arrow(text: str, value: Any) -> pa.Scalar:
    match _get_kind(text):
        case "date":
            return pa.scalar(value, pa.int32()).cast(pa.date32())
        case "timestamp":
            return pa.scalar(value, pa.timestamp("ns" if "ns" in text else "us", "UTC"))
        case "decimal":
            return pa.scalar(value, pa.decimal128(*_parse_decimal(text)))
        case "int":
            return pa.scalar(value, pa.uint64() if text == "uint64" else pa.int64())
        case "float32":
            return pa.scalar(value, pa.float32())
    return pa.scalar(value)


def _parse_decimal(text: str) -> tuple[int, int]:
    match = _DECIMAL.fullmatch(text)
    assert match is not None
    return int(match[1]), int(match[2])


def _to_hex(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).hex()


def _format_float(value: float) -> str:
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(str(value), repr(value))


def to_spark(text: str, value: Any) -> str:
    match _get_kind(text):
        case "int":
            return f"cast('{value}' as {'decimal(20,0)' if text == 'uint64' else 'bigint'})"
        case "float32" | "float64" as kind:
            return f"cast('{_format_float(value)}' as {'float' if kind == 'float32' else 'double'})"
        case "decimal":
            return f"cast('{value}' as {text})"
        case "string":
            return f"cast(X'{_to_hex(value)}' as string)"
        case "binary":
            return f"X'{_to_hex(value)}'"
        case "date":
            return f"date_from_unix_date({value})"
        case "timestamp":
            return f"timestamp_micros({value})"
    return str(value).lower()


def to_duckdb(text: str, value: Any) -> str:
    match _get_kind(text):
        case "int":
            return f"'{value}'::{'UBIGINT' if text == 'uint64' else 'BIGINT'}"
        case "float32" | "float64" as kind:
            return f"'{value!r}'::{'FLOAT' if kind == 'float32' else 'DOUBLE'}"
        case "decimal":
            return f"'{value}'::{text}"
        case "string":
            return f"decode(unhex('{_to_hex(value)}'))"
        case "binary":
            return f"unhex('{_to_hex(value)}')"
        case "date":
            return f"(DATE '1970-01-01' + {value})"
        case "timestamp":
            return f"make_timestamp_ns({value})::TIMESTAMPTZ_NS" if "ns" in text else f"make_timestamptz({value})"
    return str(value)


def to_datafusion(text: str, value: Any) -> str:
    match _get_kind(text):
        case "int":
            return f"arrow_cast('{value}', '{'UInt64' if text == 'uint64' else 'Int64'}')"
        case "float32" | "float64" as kind:
            return f"arrow_cast('{value!r}', '{kind.title()}')"
        case "decimal":
            return f"arrow_cast('{value}', 'Decimal128({', '.join(map(str, _parse_decimal(text)))})')"
        case "string":
            return "'{}'".format(value.replace("'", "''"))
        case "binary":
            return f"X'{_to_hex(value)}'"
        case "date":
            return f"arrow_cast(arrow_cast('{value}', 'Int32'), 'Date32')"
        case "timestamp":
            return f"arrow_cast(arrow_cast('{value}', 'Int64'), 'Timestamp(Microsecond, Some(\"UTC\"))')"
    return str(value)


def to_clickhouse(text: str, value: Any) -> str:
    match _get_kind(text):
        case "int":
            return f"to{'UInt64' if text == 'uint64' else 'Int64'}('{value}')"
        case "float32" | "float64" as kind:
            return f"to{kind.title()}('{value!r}')"
        case "decimal":
            return f"toDecimal128('{value}', {_parse_decimal(text)[1]})"
        case "string" | "binary":
            return f"unhex('{_to_hex(value)}')"
        case "date":
            return f"toDate32({value})"
        case "timestamp":
            return f"fromUnixTimestamp64{'Nano' if 'ns' in text else 'Micro'}(toInt64('{value}'), 'UTC')"
    return str(value)


Literal = Callable[[str, Any], str]


def build_where(query: Query, literal: Literal, column: str = "") -> str:
    """Returns the filter in SQL. The names are plain words, so they need no quotes."""
    column = column or ".".join(query.leaf.path)
    if query.operation == "is null":
        return f"{column} IS NULL"
    values = [literal(query.leaf.type, v) for v in query.values]
    if query.operation == "in":
        return f"{column} IN ({', '.join(values)})"
    return f"{column} {query.operation} {values[0]}"


def normalize_column(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Convert a column of any Arrow type to comparable values: times in nanoseconds, floats as text, maps as pairs."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    kind = column.type
    if isinstance(kind, pa.DictionaryType):
        return normalize_column(column.dictionary_decode())
    if pa.types.is_timestamp(kind):
        factor = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[kind.unit]
        return [None if v is None else v * factor for v in column.cast(pa.int64()).to_pylist()]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.large_binary()).to_pylist()  # ClickHouse has one type for text and bytes
    if pa.types.is_date32(kind):
        return column.cast(pa.int32()).to_pylist()
    if pa.types.is_floating(kind):
        return [None if v is None else _format_float(v) for v in column.to_pylist()]
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        inner = [normalize_column(column.field(i)) for i in range(kind.num_fields)]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*inner, strict=True)]
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if pa.types.is_map(kind):
        return [
            None if v is None else sorted(zip(normalize_column(v.keys), normalize_column(v.items), strict=True))
            for v in _list_maps(column)
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [None if not v.is_valid else normalize_column(v.values) for v in column]
    return column.to_pylist()


def _list_maps(column: pa.Array) -> list[Any]:
    class Pairs:
        def __init__(self, rows: pa.Array) -> None:
            self.keys, self.items = rows.field(0), rows.field(1)

    return [Pairs(v.values) if v.is_valid else None for v in column]


def normalize(text: str, value: Any) -> Any:
    """Convert a value as `normalize_column` does."""
    from tests.readers.values import parse_members

    kind, _, rest = text.partition("<")
    match kind.partition("(")[0]:
        case _ if value is None:
            return None
        case "timestamp" | "epoch":
            return value if "ns" in text else value * 1000
        case "float32" | "float64":
            return _format_float(value)
        case "string" | "json":
            return value.encode()
        case "struct":
            return {name: normalize(member, value[name]) for name, member in parse_members(text)}
        case "list":
            return [normalize(rest[:-1], inner) for inner in value]
        case "map":
            return sorted((key.encode(), normalize(rest[:-1].partition(", ")[2], v)) for key, v in value.items())
    return value
