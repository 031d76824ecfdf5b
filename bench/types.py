"""A feed's types as DuckDB (which checks landed rows) and Spark (which reads them) spell them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sluice.pipelines.schema.schema import Field, Kind, Type, parse_schema

_DUCKDB = {
    Kind.INT32: "INTEGER",
    Kind.INT64: "BIGINT",
    Kind.FLOAT64: "DOUBLE",
    Kind.BOOL: "BOOLEAN",
    Kind.STRING: "VARCHAR",
    Kind.TIMESTAMP: "TIMESTAMPTZ",
}
_SPARK = {
    Kind.INT32: "int",
    Kind.INT64: "bigint",
    Kind.FLOAT64: "double",
    Kind.BOOL: "boolean",
    Kind.STRING: "string",
    Kind.TIMESTAMP: "timestamp",
}


def fields(schema: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[Field, ...]:
    """The fields of a schema as written in a workload or an assignment; empty for an empty text."""
    types = dict(schema)
    return parse_schema(types).fields if types else ()


def duckdb_type(t: Type) -> str:
    """SQL for the type in DuckDB."""
    match t.kind:
        case Kind.LIST:
            return f"{duckdb_type(t.fields[0].type)}[]"
        case Kind.STRUCT:
            members = (f'"{f.name}" {duckdb_type(f.type)}' for f in t.fields)
            return f"STRUCT({', '.join(members)})"
        case Kind.DECIMAL:
            return f"DECIMAL({t.precision},{t.scale})"
        case kind:
            return _DUCKDB[kind]


def duckdb_texts(t: Type) -> Any:
    """The shape that DuckDB's `from_json` is to look for, JSON-ready, with each value still a text."""
    match t.kind:
        case Kind.LIST:
            return [duckdb_texts(t.fields[0].type)]
        case Kind.STRUCT:
            return {f.name: duckdb_texts(f.type) for f in t.fields}
        case _:
            return "VARCHAR"


def spark_type(t: Type) -> str:
    """The type in Spark's DDL."""
    match t.kind:
        case Kind.LIST:
            return f"array<{spark_type(t.fields[0].type)}>"
        case Kind.STRUCT:
            members = (f"`{f.name}`:{spark_type(f.type)}" for f in t.fields)
            return f"struct<{', '.join(members)}>"
        case Kind.DECIMAL:
            return f"decimal({t.precision},{t.scale})"
        case kind:
            return _SPARK[kind]
