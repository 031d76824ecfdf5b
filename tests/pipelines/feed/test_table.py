"""A feed's section `table`: one format, and only columns that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.vocabulary.errors import FeedError

FEED = "kafka: {bootstrap: '127.0.0.1:9'}\ntopics: orders\nstart: earliest\n"


def load(root: Path, more: str) -> str:
    """What is wrong with the feed; empty if nothing is."""
    (root / "orders.yaml").write_text(FEED + more)
    try:
        load_feed(root / "orders.yaml", {})
    except FeedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("table", ["{delta: {}}", "{iceberg: {name: db.orders}}", "{delta: {}, keep_snapshots: 1d}"])
def test_a_table_has_a_format(table: str, tmp_path: Path) -> None:
    assert load(tmp_path, f"table: {table}\n") == ""


@pytest.mark.parametrize(
    ("table", "said"),
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
def test_what_is_no_table_is_told(table: str, said: str, tmp_path: Path) -> None:
    assert said in load(tmp_path, f"table: {table}\n").replace(":", "")


@pytest.mark.parametrize("table", ["{delta: {}}", "{iceberg: {name: db.orders}}"])
@pytest.mark.parametrize("kind", ["uint32", "uint64", "timestamp(ns)", "list<uint64>"])
def test_types_that_readers_would_change_are_refused(table: str, kind: str, tmp_path: Path) -> None:
    said = load(tmp_path, f"format: json\nschema: {{n: '{kind}'}}\ntable: {table}\n")
    assert "cannot hold n" in said
    assert "write" in said


@pytest.mark.parametrize("kind", ["uint8", "uint16", "map<string, uint8>"])
def test_small_unsigned_types_are_refused_where_spark_does_not_read_them(kind: str, tmp_path: Path) -> None:
    feed = f"format: json\nschema: {{n: '{kind}'}}\n"
    assert "cannot hold n" in load(tmp_path, f"{feed}table: {{iceberg: {{name: db.orders}}}}\n")
    assert load(tmp_path, f"{feed}table: {{delta: {{}}}}\n") == ""
