"""Describes feeds as sources of dbt: their tables or files, columns, tests, and the freshness of complete windows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from sluice.pipelines.contract.catalogue import get_argument, text
from sluice.pipelines.contract.expectation import Expectation, Severity
from sluice.pipelines.feed.changes_section import AFTER, ORDER, ChangeFormat, ChangesSettings
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.table_section import WINDOWS_TABLE
from sluice.pipelines.lake import paths
from sluice.pipelines.records.rows.row_format import landed_schema
from sluice.pipelines.schema.schema import KAFKA
from sluice.pipelines.util.units import HOUR, MINUTE

FILES = "sluice"
"""The name of the source of all datasets without a table."""
_LIVE = {"where": f"{KAFKA}tombstone is not true"}
"""Excludes tombstones, whose columns are all null."""
_TYPES = {  # Arrow's name: DuckDB's and Spark's
    "int8": ("tinyint", "tinyint"),
    "int16": ("smallint", "smallint"),
    "int32": ("integer", "int"),
    "int64": ("bigint", "bigint"),
    "uint8": ("utinyint", "smallint"),
    "uint16": ("usmallint", "int"),
    "uint32": ("uinteger", "bigint"),
    "uint64": ("ubigint", "decimal(20,0)"),
    "float": ("float", "float"),
    "double": ("double", "double"),
    "bool": ("boolean", "boolean"),
    "string": ("varchar", "string"),
    "binary": ("blob", "binary"),
    "date32[day]": ("date", "date"),
}


def describe_sources(feeds: Iterable[Feed], database: str | None = None) -> dict[str, Any]:
    """Returns the document of a properties file of dbt 1.10.5 or newer, with a source for each schema.

    Datasets without a table are files for dbt-duckdb, Iceberg's are tables of their namespace (in `database`, if
    set), and Delta's are Spark's tables by path. Texts are escaped for Jinja.
    """
    sources = dict[str, dict[str, Any]]()
    for dataset in (d for feed in feeds for d in feed.datasets):
        table = dataset.table
        schema = FILES if table is None else table.iceberg.name.rpartition(".")[0] if table.iceberg else "delta"
        source = sources.setdefault(
            schema, {"name": schema.replace(".", "_"), "schema": schema, "loader": "Sluice", "tables": []}
        )
        if database and table and table.iceberg:
            source["database"] = database
        source["tables"].append(_describe_table(dataset, database))
        if table and dataset.changes and table.current:
            schema = str(table.current).rpartition(".")[0] if table.iceberg else schema
            more = {"name": schema.replace(".", "_"), "schema": schema, "loader": "Sluice", "tables": []}
            source = sources.setdefault(schema, more | {k: v for k, v in source.items() if k == "database"})
            source["tables"].append(_describe_current(dataset, dataset.changes, str(table.current)))
    document: dict[str, Any] = _escape({"version": 2, "sources": [*sources.values()]})
    return document


def list_untested(dataset: Feed) -> list[str]:
    """Returns the expectations of the dataset's contract that have no equal test in dbt, in words."""
    types = _list_types(dataset)
    return [text(e) for e in _list_expectations(dataset) if _build_test(e, types) is None]


def build_freshness_query(dataset: Feed, database: str | None = None) -> str:
    """Returns SQL for the end of the dataset's newest complete window, null without any.

    Without a table, it is DuckDB's, over the names of the manifests: each confirms a window, and no file is opened.
    """
    if dataset.table is None:
        files = _quote_pattern(dataset, paths.manifest_folder(dataset.stored), "json")
        name = r"/(\d{4}-\d\d-\d\dT\d{4})-(\d+[a-z]+)[.]json$"
        return (
            "select max(strptime(named.start, '%Y-%m-%dT%H%M') + cast(named.length as interval)) from (select"
            f" regexp_extract(file, '{name}', ['start', 'length']) as named from glob({files})) where named.start != ''"
        )
    if dataset.table.iceberg:
        table = ".".join([*([database] if database else []), dataset.table.iceberg.name + WINDOWS_TABLE])
    else:
        table = f"delta.`{dataset.lake}/{paths.windows_table_root(dataset.stored_dataset)}`"
    return f"select max(window_end) from {table}"


def _describe_table(dataset: Feed, database: str | None) -> dict[str, Any]:
    description = {"description": dataset.description} if dataset.description else {}
    longest = dataset.window.length + (HOUR if dataset.window.timezone else 0)  # the day on which summer time ends
    config: dict[str, Any] = {
        "freshness": {"error_after": {"count": -(-(longest + dataset.window.grace) // MINUTE), "period": "minute"}},
        "loaded_at_query": build_freshness_query(dataset, database),
    }
    where: dict[str, Any] = {}
    if dataset.table is None:
        files = _quote_pattern(dataset, paths.delta_root(dataset.stored, output=dataset.output), "parquet")
        config["meta"] = {"external_location": f"read_parquet({files}, union_by_name = true)"}
    elif dataset.table.iceberg:
        where = {"identifier": dataset.table.iceberg.name.rpartition(".")[2]}
    else:
        root = f"{dataset.lake}/{paths.delta_root(dataset.stored, output=dataset.output)}"
        where = {"identifier": root, "quoting": {"identifier": True}}
    name = dataset.dataset.replace(".", "__")
    return {"name": name} | where | description | {"config": config, "columns": [*_describe_columns(dataset)]}


def _describe_current(dataset: Feed, changes: ChangesSettings, name: str) -> dict[str, Any]:
    """Returns the table of current rows. It has no freshness: no query has the window up to which it is folded."""
    landed, prefix = landed_schema(dataset.landed_columns), KAFKA if dataset.columns else ""
    rows = [*landed.field(AFTER).type] if changes.format is ChangeFormat.DEBEZIUM else [*landed]
    rows += [landed.field(prefix + column) for column in ("topic", "partition", "offset", "timestamp")]
    rows += [pa.field(ORDER, pa.string())] if changes.order_by else []
    types = {f.name: f.type for f in rows if f.name != f"{KAFKA}tombstone"}
    keys = changes.key or (f"{prefix}key",)
    tests = {"quote": True, "data_tests": ["not_null", *(["unique"] if len(keys) == 1 else [])]}
    columns = [
        {"name": n, "data_type": _spell_type(t, of_table=True)} | (tests if n in keys else {}) for n, t in types.items()
    ]
    where: dict[str, Any] = {"identifier": name.rpartition(".")[2]}
    if dataset.table and dataset.table.delta:
        root = f"{dataset.lake}/{paths.get_current_table_root(dataset.stored_dataset)}"
        where = {"identifier": root, "quoting": {"identifier": True}}
    description = f"The rows as of now: the last change of each key in {dataset.name}."
    return {"name": f"{dataset.name}__current"} | where | {"description": description, "columns": columns}


def _describe_columns(dataset: Feed) -> Iterator[dict[str, Any]]:
    types, tests = _list_types(dataset), dict[str, list[Any]]()
    schema = dataset.landed_columns
    own = {f.name for f in landed_schema(schema) if not f.nullable}
    required = {f.name for f in schema.fields if f.required} if schema else set()
    for name in types:
        if name in own | required:
            tests[name] = [{"not_null": {"config": _LIVE}} if name in required else "not_null"]
    for e in _list_expectations(dataset):
        test = _build_test(e, types)
        if test and not ("not_null" in test and e.kwargs["column"] in required):
            tests.setdefault(e.kwargs["column"], []).append(test)
    for name, t in types.items():
        described = {"description": dataset.descriptions[name]} if name in dataset.descriptions else {}
        # `offset`, `order` and other words of SQL need quotes
        tested = {"quote": True, "data_tests": tests[name]} if name in tests else {}
        yield {"name": name, "data_type": _spell_type(t, dataset.table is not None)} | described | tested


def _build_test(e: Expectation, types: Mapping[str, pa.DataType]) -> dict[str, Any] | None:
    """Returns the test of dbt that fails on the same rows, or None. Uniqueness is of a batch here, of all rows there:
    it warns."""
    config: dict[str, Any] = {} if e.severity is Severity.CRITICAL else {"severity": "warn"}
    match e.type:
        case "expect_column_values_to_not_be_null" if get_argument(e, "mostly") == 1:
            return {"not_null": {"config": config | (_LIVE if f"{KAFKA}tombstone" in types else {})}}
        case "expect_column_values_to_be_unique" if get_argument(e, "mostly") == 1:
            return {"unique": {"config": {"severity": "warn"}}}
        case "expect_column_values_to_be_in_set" if get_argument(e, "mostly") == 1:
            pass
        case "expect_column_distinct_values_to_be_in_set":
            pass
        case _:
            return None
    t, values = types[e.kwargs["column"]], [*e.kwargs["value_set"]]
    is_text = pa.types.is_string(t)
    if not (is_text or pa.types.is_integer(t) or pa.types.is_decimal(t) or pa.types.is_boolean(t)):
        return None
    if any(v is None or (is_text and not {*"'\\"}.isdisjoint(v)) for v in values):
        return None  # dbt puts values between quotes as they are
    arguments = {"values": values} if is_text else {"values": [*map(str, values)], "quote": False}
    return {"accepted_values": {"arguments": arguments} | ({"config": config} if config else {})}


def _list_expectations(dataset: Feed) -> tuple[Expectation, ...]:
    return dataset.contract.expectations if dataset.contract else ()


def _list_types(dataset: Feed) -> dict[str, pa.DataType]:
    fields = landed_schema(dataset.landed_columns)
    return {f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in fields}


def _spell_type(t: pa.DataType, of_table: bool) -> str:
    """Returns a type in DuckDB's SQL, or of a table in Spark's."""
    t = t.value_type if pa.types.is_dictionary(t) else t
    if pa.types.is_timestamp(t):
        return "timestamp" if of_table else "timestamp with time zone"
    if pa.types.is_decimal(t):
        return f"decimal({t.precision},{t.scale})"
    if pa.types.is_list(t):
        element = _spell_type(t.value_type, of_table)
        return f"array<{element}>" if of_table else f"{element}[]"
    if pa.types.is_map(t):
        inside = f"{_spell_type(t.key_type, of_table)}, {_spell_type(t.item_type, of_table)}"
        return f"map<{inside}>" if of_table else f"map({inside})"
    if pa.types.is_struct(t):
        name, begin, end = ("`{}`: ", "struct<", ">") if of_table else ('"{}" ', "struct(", ")")
        return f"{begin}{', '.join(name.format(f.name) + _spell_type(f.type, of_table) for f in t)}{end}"
    return _TYPES[str(t)][of_table]


def _quote_pattern(dataset: Feed, folder: str, ending: str) -> str:
    """Returns DuckDB's pattern for the files of a folder of the lake, as text of SQL."""
    root = re.sub(r"[*?\[]", r"[\g<0>]", f"{dataset.lake}/{folder}").replace("'", "''")
    return f"'{root}/**/*.{ending}'"


def _escape(value: Any) -> Any:
    """Returns the document with texts that Jinja would take for code as its literals."""
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [*map(_escape, value)]
    if isinstance(value, str) and any(sign in value for sign in ("{{", "{%", "{#")):
        return f"{{{{ {json.dumps(value, ensure_ascii=False)} }}}}"
    return value
