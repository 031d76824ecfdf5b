"""Feeds with tables, landed by `land` into a folder: the column names that a table accepts from any source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.pipelines.errors import TableRefused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.tables.sync import Synced, sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.open_ports import open_table
from sluice.testing import Message, land

FEED = """
kafka: {bootstrap: "127.0.0.1:9"}
topics: orders
start: earliest
format: json
schema: {id: int64, s: 'struct<a:int64>'}
policies: {on_drift: evolve}
"""
TABLES = {"iceberg": "table: {iceberg: {name: db.orders}}\n", "delta": "table: {delta: {}}\n"}
RECORDS = [{"id": 1, "_deleted": True, "_DELETED2": 5, "net price": 2}, {"id": 2, "_file": "a", "city": "Ulm"}]
NAMES = {
    "iceberg": ["id", "s", "_DELETED2", "net price", "city"],
    "delta": ["id", "s", "_deleted", "_DELETED2", "_file", "city"],
}


def _write_feed(root: Path, table: str) -> Feed:
    (root / "feeds").mkdir(exist_ok=True)
    path = root / "feeds" / "orders.yaml"
    path.write_text(FEED + table)
    return load_feed(path, {})


def _land(feed: Feed, root: Path) -> list[str]:
    """Returns the fields' columns of the newest rows; drifted fields become columns of the next batch."""
    for record in RECORDS * 2:
        rows = land(feed, [Message(json.dumps(record).encode())], lake=root / "lake").rows
    return [name for name in rows.schema.names if not name.startswith("kafka_") and name != "_extra"]


def _sync(feed: Feed, root: Path) -> Synced:
    lake = LocalLake(root / "lake")
    table = open_table(feed.model_copy(update={"lake": str(lake.root)}), lake)
    return sync(Ledger(lake, feed.name, lambda: 0), lake, FeedTables(table))


@pytest.mark.parametrize("kind", TABLES)
def test_drift_adds_no_column_that_the_table_cannot_have(kind: str, tmp_path: Path) -> None:
    feed = _write_feed(tmp_path, TABLES[kind])
    assert sorted(_land(feed, tmp_path)) == sorted(NAMES[kind])
    last = land(feed, [Message(json.dumps(RECORDS[0] | RECORDS[1]).encode())], lake=tmp_path / "lake").rows
    extra = json.loads(last["_extra"][0].as_py())
    assert extra.keys() == (RECORDS[0] | RECORDS[1]).keys() - {*NAMES[kind]}
    assert _sync(feed, tmp_path).added == 5


@pytest.mark.parametrize(("kind", "name"), [("iceberg", "_deleted"), ("delta", "net price")])
def test_new_table_with_unsupported_column_is_refused_by_name(kind: str, name: str, tmp_path: Path) -> None:
    _land(_write_feed(tmp_path, ""), tmp_path)
    with pytest.raises(TableRefused, match=f"cannot hold {name}: ") as refused:
        _sync(_write_feed(tmp_path, TABLES[kind]), tmp_path)
    assert "other format" in refused.value.remedy


@pytest.mark.parametrize(("kind", "names"), [("iceberg", ["a", "net price", "_file"]), ("delta", ["a", "_file"])])
def test_drift_adds_no_struct_member_that_the_table_cannot_have(kind: str, names: list[str], tmp_path: Path) -> None:
    """A member may have the name of a metadata column of Iceberg: only a column is confused with it."""
    feed, record = _write_feed(tmp_path, TABLES[kind]), {"id": 1, "s": {"a": 2, "net price": 3, "_file": "x"}}
    for _ in range(2):
        landed = land(feed, [Message(json.dumps(record).encode())], lake=tmp_path / "lake").rows
    (value,) = landed["s"].to_pylist()
    assert sorted(value) == sorted(names)
    assert ("net price" in value) is not ("net price" in (landed["_extra"][0].as_py() or ""))
    assert _sync(feed, tmp_path).added == 2
