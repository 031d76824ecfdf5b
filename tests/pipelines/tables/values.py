"""A column of each type that a table holds, with two values each, and functions that write them to files."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake.parquet import TimeBounds
from sluice.pipelines.landing.writer import choose_options
from sluice.pipelines.model.tables import TableChange, TableOperation
from sluice.pipelines.ports import Lake, Table
from sluice.pipelines.schema.schema import arrow_type
from sluice.pipelines.schema.wider import parse_type

NOON = dt.datetime(2026, 11, 20, 12, 0, 0, 123456, dt.UTC)
VALUES: dict[str, list[Any]] = {
    "int8": [-128, 127],
    "int64": [-(2**63), 2**63 - 1],
    "uint8": [0, 255],
    "uint16": [0, 65535],
    "float32": [1.5, float("nan")],
    "float64": [1.5, None],
    "bool": [True, False],
    "string": ["a", "ü" * 50],
    "binary": [b"\0", b"\xff"],
    "date": [dt.date(1969, 1, 1), dt.date(9999, 12, 31)],
    "json": ["{}", None],
    "decimal(38,4)": [Decimal("-1.0001"), Decimal("9" * 34 + ".9999")],
    "timestamp(ms)": [NOON.replace(microsecond=123000), None],
    "timestamp(us)": [NOON, dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC)],
    "epoch(s)": [NOON.replace(microsecond=0), NOON.replace(microsecond=0)],
    "list<struct<a:int32, b:string>>": [[{"a": 1, "b": "x"}], []],
    "map<string, int64>": [[("k", 1)], None],
    "struct<a:struct<b:int8>>": [{"a": {"b": 1}}, None],
}
COLUMNS = {f"c{i}": text for i, text in enumerate(VALUES)}
ROWS = dict(zip(COLUMNS, VALUES.values(), strict=True))
SIGNED = {c: text for c, text in COLUMNS.items() if not text.startswith("uint")}
"""The columns that an Iceberg table can have."""


def write_as_landing(
    lake: Lake, path: str, columns: Mapping[str, str], values: Mapping[str, list[Any]], group_rows: int = 1 << 20
) -> str:
    """Write a file that is encoded as a landed one: some columns have no bounds. Returns its address."""
    rows = pa.table({c: pa.array(values[c], arrow_type(parse_type(text))) for c, text in columns.items()})
    times = TimeBounds(rows.schema)
    with (
        lake.create(path) as file,
        pq.ParquetWriter(file, rows.schema, **choose_options(rows, LandingSettings())) as writer,
    ):
        writer.write_table(rows, row_group_size=group_rows)
        times.add(rows)
        writer.add_key_value_metadata(times.metadata())
    return lake.locate(path)


def write(lake: Lake, path: str, columns: Mapping[str, str], values: Mapping[str, list[Any]]) -> str:
    """Write a file with these values into the lake. Returns its address."""
    arrays = {c: pa.array(values[c], arrow_type(parse_type(text))) for c, text in columns.items()}
    with lake.create(path) as file:
        pq.write_table(pa.table(arrays), file)
    return lake.locate(path)


class WrittenTable:
    """A table over files that are written by hand to a folder of the lake."""

    root = "data/orders"

    def __init__(self, lake: Lake, table: Table) -> None:
        self.lake, self.table, self.mark = lake, table, 0

    def write(self, name: str, columns: Mapping[str, str], values: Mapping[str, list[Any]]) -> str:
        return write(self.lake, f"{self.root}/{name}", columns, values)

    def add(self, columns: Mapping[str, str], *addresses: str) -> None:
        if self.table.look() is None:
            self.table.create(columns, {"sluice.ledger": "x"})
            self.table.look()
        self.mark += 1
        self.table.commit(TableChange(TableOperation.APPEND, self.mark, addresses, (), columns, {}))


def format_values(values: list[Any]) -> str:
    """Returns the values as text, with one spelling of UTC for all readers."""
    return str(values).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc")


OUTER = {
    "n": "int64",
    "s": "struct<a:struct<b:int8>>",
    "l": "list<struct<x:int64>>",
    "m": "map<string, struct<v:int8>>",
}
INNER = {
    "n": "int64",
    "s": "struct<a:struct<b:int8, c:string>, d:json>",
    "l": "list<struct<x:int64, y:string>>",
    "m": "map<string, struct<v:int8, w:bool>>",
}
"""The columns of `OUTER` with new members at every depth."""
BEFORE: dict[str, list[Any]] = {"n": [1], "s": [{"a": {"b": 1}}], "l": [[{"x": 1}]], "m": [[("k", {"v": 1})]]}
AFTER: dict[str, list[Any]] = {
    "n": [2],
    "s": [{"a": {"b": 2, "c": "c"}, "d": "[]"}],
    "l": [[{"x": 2, "y": "y"}]],
    "m": [[("k", {"v": 2, "w": True})]],
}
GROWN = [
    {"n": 1, "s": {"a": {"b": 1, "c": None}, "d": None}, "l": [{"x": 1, "y": None}], "m": [("k", {"v": 1, "w": None})]},
    {name: values[0] for name, values in AFTER.items()},
]
