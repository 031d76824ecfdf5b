"""A feed's section `table`: one format, and only columns that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.load import load_feed

FEED = "kafka: {bootstrap: '127.0.0.1:9'}\ntopics: orders\nstart: earliest\n"


def load_error(root: Path, more: str) -> str:
    """Load the feed, and return its error; empty if it is valid."""
    (root / "orders.yaml").write_text(FEED + more)
    try:
        load_feed(root / "orders.yaml", {})
    except FeedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("table", ["{delta: {}}", "{iceberg: {name: db.orders}}", "{delta: {}, keep_snapshots: 1d}"])
def test_a_table_has_a_format(table: str, tmp_path: Path) -> None:
    assert load_error(tmp_path, f"table: {table}\n") == ""


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{}", "table names no format"),
        ("{delta: null}", "table names no format"),
        ("[delta]", "table is not a section of keys and values"),
        ("7", "table is not a section of keys and values"),
        ("iceberg", "table is not a section of keys and values"),
        ("{delta: true}", "table.delta is not a section of keys and values"),
        ("{iceberg: db.orders}", "table.iceberg is not a section of keys and values"),
        ("{ice: {name: db.orders}}", "did you mean `iceberg`?"),
        ("{iceberg: {}}", "table.iceberg.name is missing"),
        ("{iceberg: {name: 7}}", "table.iceberg.name should be text; a number goes in quotes"),
        ("{iceberg: {name: ''}}", "table.iceberg.name is empty"),
        ("{iceberg: {name: db.o, catalog: 7}}", "table.iceberg.catalog is no catalog"),
        ("{iceberg: {name: db.o, catalog: ''}}", "table.iceberg.catalog is no catalog"),
        ("{iceberg: {name: db.o, catalog: {}}}", "table.iceberg.catalog is empty"),
        ("{iceberg: {name: db.o, catalog: {uri: [a]}}}", "has a list or a section as uri a property is one value"),
        ("{delta: {}, quarantine: 7}", "table.quarantine is neither true nor false"),
        ("{delta: {}, quarantine: []}", "table.quarantine is neither true nor false"),
        ("{delta: {}, keep_snapshots: []}", "table.keep_snapshots is not a duration such as 30s"),
        ("{delta: {}, iceberg: {name: db.orders}}", "table names two formats"),
        ("{delta: {path: x}}", "path"),
        ("{iceberg: {name: orders}}", "is not namespace.table"),
    ],
)
def test_invalid_table_is_reported(table: str, message: str, tmp_path: Path) -> None:
    assert message in load_error(tmp_path, f"table: {table}\n").replace(":", "")


@pytest.mark.parametrize("table", ["{delta: {}}", "{iceberg: {name: db.orders}}"])
@pytest.mark.parametrize("kind", ["uint32", "uint64", "timestamp(ns)", "list<uint64>"])
def test_types_that_readers_would_change_are_refused(table: str, kind: str, tmp_path: Path) -> None:
    error = load_error(tmp_path, f"format: json\nschema: {{n: '{kind}'}}\ntable: {table}\n")
    assert "cannot hold n" in error
    assert "write" in error


@pytest.mark.parametrize("kind", ["uint8", "uint16", "map<string, uint8>"])
def test_small_unsigned_types_are_refused_where_spark_does_not_read_them(kind: str, tmp_path: Path) -> None:
    feed = f"format: json\nschema: {{n: '{kind}'}}\n"
    assert "cannot hold n" in load_error(tmp_path, f"{feed}table: {{iceberg: {{name: db.orders}}}}\n")
    assert load_error(tmp_path, f"{feed}table: {{delta: {{}}}}\n") == ""


@pytest.mark.parametrize(
    ("table", "name", "path"),
    [
        *(
            ("{iceberg: {name: db.orders}}", name, name)
            for name in ("_deleted", "_file", "_pos", "_partition", "_row_id")
        ),
        *(("{delta: {}}", f"a{sign}b", f"a{sign}b") for sign in " ,;{}()="),
        ("{delta: {}}", "a", "a[]{}.net price"),
        ("{delta: {}}", "_tmp_metadata_row_index", "_tmp_metadata_row_index"),
        ("{delta: {}}", "__delta_internal_is_row_deleted", "__delta_internal_is_row_deleted"),
    ],
)
def test_names_that_spark_cannot_read_or_alter_are_refused(table: str, name: str, path: str, tmp_path: Path) -> None:
    kind = "list<map<string, struct<`net price`:int64>>>" if name == "a" else "int64"
    error = load_error(tmp_path, f"format: json\nschema: {{'{name}': '{kind}'}}\ntable: {table}\n")
    assert f"cannot hold {path}: " in error
    assert "leave it out of the schema" in error
    assert "write {iceberg" not in error, "that does not help"


@pytest.mark.parametrize(
    ("table", "name"),
    [
        *(("{iceberg: {name: db.orders}}", name) for name in ("_DELETED", "a,b", "a b", "_metadata", "_change_type")),
        *(("{delta: {}}", name) for name in ("_deleted", "_file", "_metadata", "ü-1", "a:b", "a[]")),
    ],
)
def test_names_that_spark_reads_are_accepted(table: str, name: str, tmp_path: Path) -> None:
    assert load_error(tmp_path, f"format: json\nschema: {{'{name}': int64}}\ntable: {table}\n") == ""
    nested = f"format: json\nschema: {{s: {{_deleted: int64, _file: string}}}}\ntable: {table}\n"
    assert load_error(tmp_path, nested) == ""


@pytest.mark.parametrize(
    ("table", "lake", "reason"),
    [
        ("{delta: {}}", "s3://bucket/a%20b", "deltalake takes %20"),
        ("{delta: {}}", "a%2Fb", "deltalake takes %2F"),
        ("{delta: {}}", "a\\b", "deltalake takes \\ for /"),
        ("{iceberg: {name: db.orders}}", "s3://bucket/a#b", "PyIceberg takes #"),
        ("{iceberg: {name: db.orders}}", "s3://bucket/a?b", "PyIceberg takes ?"),
    ],
)
def test_lakes_that_tables_would_be_written_outside_of_are_refused(
    table: str, lake: str, reason: str, tmp_path: Path
) -> None:
    error = load_error(tmp_path, f"lake: '{lake}'\ntable: {table}\n")
    assert "table: cannot lie in the lake" in error
    assert reason in error
    assert load_error(tmp_path, f"lake: '{lake}'\n") == ""


@pytest.mark.parametrize(
    ("table", "lake"),
    [
        *(("{delta: {}}", lake) for lake in ("s3://bucket/a#b?c", "a#b?c", "100%", "s3://bucket/100%-x", "a b")),
        *(("{iceberg: {name: db.orders}}", lake) for lake in ("a#b?c", "a%20b", "s3://bucket/a%20b", "a\\b")),
    ],
)
def test_lakes_that_contain_the_table_are_accepted(table: str, lake: str, tmp_path: Path) -> None:
    assert load_error(tmp_path, f"lake: '{lake}'\ntable: {table}\n") == ""
