"""Reports about Parquet files in the hands of other readers: nulls in nests, bounds, names, decimals, empty parts.

Rows land in a folder; DuckDB, Polars and pyarrow read the files and filter by each value. Plain Python computes the
expected rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.errors import FeedError
from tests.reports.test_avro import BARE, encode, make_field, record
from tests.reports.world import JSON, land_values

Values = Sequence[Any]


def land(root: Path, type: str, values: Values, more: str = "") -> list[str]:
    """Land objects with a number `n` and the value `x`, and return the files."""
    lines = [json.dumps({"n": i, "x": v}, default=str).encode() for i, v in enumerate(values)]
    lines = [line.replace(b'"<', b"").replace(b'>"', b"") for line in lines]
    land_values(root, JSON % (f"n: int32, x: '{type}'", "") + more, lines, root / "lake")
    return sorted(map(str, (root / "lake" / "data").rglob("*.parquet")))


def find_by_duckdb(files: list[str], where: str, *values: Any) -> list[int]:
    query = f"select n from read_parquet($1, hive_partitioning = false) where {where} order by n"
    return [n for (n,) in duckdb.connect().execute(query, [files, *values]).fetchall()]


def find_by_polars(files: list[str], where: pl.Expr) -> list[int]:
    return sorted(pl.scan_parquet(files, hive_partitioning=False).filter(where).select("n").collect()["n"].to_list())


def find_by_pyarrow(files: list[str], where: Any) -> list[int]:
    return sorted(ds.dataset(files, format="parquet").to_table(filter=where)["n"].to_pylist())


def read_all(files: list[str]) -> list[tuple[Any, Any, Any]]:
    """Returns the column `x` as read by each reader, in the order of `n`."""
    by_duckdb = (
        duckdb.connect()
        .execute("select x from read_parquet($1, hive_partitioning = false) order by n", [files])
        .fetchall()
    )
    by_polars = pl.read_parquet(files, hive_partitioning=False).sort("n")["x"].to_list()
    by_pyarrow = ds.dataset(files, format="parquet").to_table().sort_by("n")["x"].to_pylist()
    return [(a, b, c) for (a,), b, c in zip(by_duckdb, by_polars, by_pyarrow, strict=True)]


NESTS: dict[str, tuple[str, Values]] = {
    "jorgecarleitao/arrow2#983": ("list<int32>", [[1, 2], [], None]),
    "aloneguid/parquet-dotnet#630": ("list<string>", [None, [], [None], ["a", None], [""]]),
    "apache/paimon#4785": ("struct<f1:int32, f2:int32>", [{"f1": None, "f2": None}, None, {"f1": 1, "f2": None}]),
    "apache/iceberg-python#2246": (
        "list<struct<a:list<int32>>>",
        [None, [], [None], [{"a": None}], [{"a": []}], [{"a": [None]}], [{"a": [1, None]}, None]],
    ),
    "pola-rs/polars#21202": ("list<struct<s:string>>", [[{"s": "größe 漢字 \U0001f600" * i}] for i in range(40)]),
}


@pytest.mark.parametrize("report", NESTS)
def test_null_and_empty_nested_values_are_distinguished(report: str, tmp_path: Path) -> None:
    type, values = NESTS[report]
    for value, readers in zip(values, read_all(land(tmp_path, type, values)), strict=True):
        assert readers == (value, value, value)


def test_null_and_empty_maps_are_distinguished(tmp_path: Path) -> None:
    """apache/parquet-format#308: an empty map or list could not be written."""
    values = [{}, None, {"a": None}, {"a": 1, "b": 2}]
    files = land(tmp_path, "map<string, int32>", values)
    rows = ds.dataset(files, format="parquet").to_table().sort_by("n")["x"].to_pylist()
    assert [None if r is None else dict(r) for r in rows] == values
    query = "select x from read_parquet($1, hive_partitioning = false) order by n"
    assert [r for (r,) in duckdb.connect().execute(query, [files]).fetchall()] == values


LONG = "a" * 300
TEXTS: dict[str, list[str]] = {
    "duckdb/duckdb#22538": ["A123456789", "A123456788", "A1234567"],
    "apache/datafusion#1433": ["Two Way", "Incoming", "Outgoing"],
    "apache/parquet-format#305": [LONG + "b", LONG + "a", LONG, "z" * 5000],
    "duckdb/duckdb#16736": ["\U0010ffff" * 200, "\U0010ffff" * 199, "\x7f" * 300, "é" * 300, "", "\0", "\0\0"],
}


@pytest.mark.parametrize("report", TEXTS)
def test_filter_on_string_matches_its_row(report: str, tmp_path: Path) -> None:
    """Bounds of long texts are truncated; readers that rely on them still find each value and the minimum."""
    values = TEXTS[report]
    files = land(tmp_path, "string", values)
    for i, value in enumerate(values):
        assert find_by_duckdb(files, "x = $2", value) == [i]
        assert find_by_polars(files, pl.col("x") == value) == [i]
        assert find_by_pyarrow(files, pc.field("x") == value) == [i]
        above = sorted(j for j, v in enumerate(values) if v.encode() >= value.encode())
        assert find_by_duckdb(files, "x >= $2", value) == above
        assert find_by_polars(files, pl.col("x") >= value) == above
        assert find_by_pyarrow(files, pc.field("x") >= value) == above
    query = "select min(x), max(x) from read_parquet($1, hive_partitioning = false)"
    by_bytes = sorted(values, key=str.encode)
    assert duckdb.connect().execute(query, [files]).fetchone() == (by_bytes[0], by_bytes[-1])


def test_filter_on_unsigned_integer_matches_its_row(tmp_path: Path) -> None:
    """pola-rs/polars#15323: bounds of unsigned 64-bit numbers were compared as signed ones."""
    values = [0, 1 << 63, (1 << 64) - 1, 7]
    files = land(tmp_path, "uint64", values)
    for i, value in enumerate(values):
        assert find_by_duckdb(files, "x = $2", value) == [i]
        assert find_by_polars(files, pl.col("x") == pl.lit(value, pl.UInt64)) == [i]
        assert find_by_polars(files, pl.col("x").is_in(pl.lit(pl.Series([value], dtype=pl.UInt64)).implode())) == [i]
        assert find_by_pyarrow(files, pc.field("x") == pa.scalar(value, pa.uint64())) == [i]


@pytest.mark.parametrize("digits", [4, 9, 18, 38])
def test_filter_on_negative_decimal_matches_its_row(digits: int, tmp_path: Path) -> None:
    """apache/gluten#2834: -7.00 as decimal(5,2) was read as 42949665.96."""
    values = [Decimal("-7.00"), Decimal("7.00"), Decimal("-0.01"), Decimal("0.00"), Decimal("-99.99")]
    files = land(tmp_path, f"decimal({digits},2)", [f"<{v}>" for v in values])
    for i, value in enumerate(values):
        assert find_by_duckdb(files, f"x = {value}") == [i]
        assert find_by_duckdb(files, f"x < {value}") == [j for j, v in enumerate(values) if v < value]
        assert find_by_polars(files, pl.col("x") == pl.lit(value, pl.Decimal(digits, 2))) == [i]
        assert find_by_pyarrow(files, pc.field("x") == pa.scalar(value, pa.decimal128(digits, 2))) == [i]


NAN = float("nan")
FLOATS: dict[str, list[float]] = {
    "parquet-go/parquet-go#459": [0.0, -0.0, 5e-324, -1.7976931348623157e308, NAN, 2.0],
    "apache/datafusion#24804": [1.0, NAN],
}


@pytest.mark.parametrize("report", FLOATS)
def test_filter_on_float_matches_its_rows_next_to_nan(report: str, tmp_path: Path) -> None:
    """Bounds omit NaN; DuckDB and Polars order it as the largest value, pyarrow does not order it."""
    values = FLOATS[report]
    schema = record(make_field("n", "int"), make_field("x", "double"))
    rows = [encode(schema, {"n": i, "x": v})[5:] for i, v in enumerate(values)]
    land_values(tmp_path, BARE, rows, tmp_path / "lake", order__avsc=json.dumps(schema))
    files = sorted(map(str, (tmp_path / "lake" / "data").rglob("*.parquet")))
    for value in (v for v in values if not math.isnan(v)):
        same = [i for i, v in enumerate(values) if v == value]
        above = [i for i, v in enumerate(values) if v > value]
        above_or_nan = [i for i, v in enumerate(values) if v > value or math.isnan(v)]
        assert find_by_duckdb(files, "x = $2", value) == same
        assert find_by_polars(files, pl.col("x") == value) == same
        assert find_by_pyarrow(files, pc.field("x") == value) == same
        assert find_by_duckdb(files, "x > $2", value) == above_or_nan
        assert find_by_polars(files, pl.col("x") > value) == above_or_nan
        assert find_by_pyarrow(files, pc.field("x") > value) == above


def test_column_names_with_spaces_and_symbols_are_readable(tmp_path: Path) -> None:
    """snowflakedb/snowpark-python#335: a column with a blank in its name could not be read."""
    schema = '"my field": int32, "max(t)": int32, "größe": int32, "a-b": int32'
    land_values(
        tmp_path,
        JSON % (schema, ""),
        [b'{"my field": 1, "max(t)": 2, "gr\\u00f6\\u00dfe": 3, "a-b": 4}'],
        tmp_path / "lake",
    )
    files = sorted(map(str, (tmp_path / "lake" / "data").rglob("*.parquet")))
    query = 'select "my field", "max(t)", "größe", "a-b" from read_parquet($1) where "my field" = 1 and "a-b" = 4'
    assert duckdb.connect().execute(query, [files]).fetchall() == [(1, 2, 3, 4)]
    row = pl.scan_parquet(files).filter(pl.col("max(t)") == 2).select("my field", "größe").collect()
    assert row.rows() == [(1, 3)]


REFUSED_NAMES: dict[str, str] = {
    "duckdb/duckdb#13053": "FOO: int32, foo: int32",
    "apache/spark#17680": '"col.dots": int32',
    "trinodb/trino#23050": "a: 'struct<X:int32, x:int32>'",
}


@pytest.mark.parametrize("report", REFUSED_NAMES)
def test_column_names_ambiguous_for_readers_are_refused(report: str, tmp_path: Path) -> None:
    with pytest.raises(FeedError, match=r"case only|without dots"):
        land_values(tmp_path, JSON % (REFUSED_NAMES[report], ""), [b"{}"])


def test_later_column_is_null_in_older_files(tmp_path: Path) -> None:
    """duckdb/duckdb#16859: a column that only newer files have could not be selected."""
    lake = tmp_path / "lake"
    land_values(tmp_path, JSON % ("n: int32", ""), [b'{"n": 0}'], lake)
    land_values(tmp_path, JSON % ("n: int32, f: string", ""), [b'{"n": 1, "f": "x"}'], lake)
    files = sorted(map(str, (lake / "data").rglob("*.parquet")))
    query = "select n, f from read_parquet($1, union_by_name = true, hive_partitioning = false) order by n"
    assert duckdb.connect().execute(query, [files]).fetchall() == [(0, None), (1, "x")]
    query = "select n from read_parquet($1, union_by_name = true) where f = 'x'"
    assert duckdb.connect().execute(query, [files]).fetchall() == [(1,)]
    frame = pl.scan_parquet(files, missing_columns="insert", extra_columns="ignore", schema=_read_latest_schema(files))
    assert frame.filter(pl.col("f") == "x").select("n").collect().rows() == [(1,)]


def _read_latest_schema(files: list[str]) -> Any:
    return max((pl.read_parquet_schema(f) for f in files), key=len)


@pytest.mark.parametrize("rows", [999, 1000, 1001, 2000])
def test_no_row_group_is_empty(rows: int, tmp_path: Path) -> None:
    """delta-io/delta-rs#2172: a writer left an empty row group where rows ended at the bound of one."""
    (file,) = land(tmp_path, "int32", range(rows), "landing: {row_group_rows: 1000}\n")
    meta = pq.ParquetFile(file).metadata
    sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    assert (min(sizes) > 0, sum(sizes)) == (True, rows)
