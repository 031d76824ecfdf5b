"""Feeds of changes that are refused, each with its key and remedy, and the columns that an envelope lands as."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed

START = "kafka: {bootstrap: 'k:9'}\ntopics: customers\nstart: earliest\n"
ROW = 'schema: {id: int64, name: string not null, "no": "list<string>"}\n'
NOW = "table: {iceberg: {name: db.customers}, current: db.customers_now}\n"


def load(root: Path, text: str) -> Feed:
    (root / "feeds").mkdir(exist_ok=True)
    path = root / "feeds" / "customers.yaml"
    path.write_text(START + text)
    return load_feed(path, {})


def test_envelope_has_the_row_twice_with_its_key(tmp_path: Path) -> None:
    feed = load(tmp_path, f"changes: {{format: debezium, key: id, order_by: source.lsn}}\n{ROW}{NOW}")
    assert feed.columns
    texts = feed.columns.texts()
    assert texts["before"] == "struct<id:int64 not null, name:string, no:list<string>>"
    assert texts["after"] == "struct<id:int64 not null, name:string not null, no:list<string>>"
    assert (texts["op"], texts["source"]) == ("string not null", "json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NOW, "`changes`"),
        (f"changes: {{format: debezium}}\n{ROW}", "key: [id]"),
        ("changes: {format: debezium, key: id}\n", "`schema`"),
        (f"changes: {{format: debezium, key: [idd]}}\n{ROW}", "idd"),
        (f"changes: {{format: debezium, key: ['no']}}\n{ROW}", "list<string>"),
        (f"changes: {{format: debezium, key: id, deletes: keep}}\n{ROW}", "deletes"),
        (f"changes: {{format: debezium, key: id, order_by: sources.lsn}}\n{ROW}", "kafka_timestamp"),
        (f"changes: {{format: debezium, key: id, order_by: after}}\n{ROW}", "orders by after"),
        ("changes: {format: upsert, order_by: kafka_time}\n", "orders by kafka_time"),
        (f"changes: {{format: upsert}}\nformat: json\nschema: {{change_order: int64}}\n{NOW}", "change_order"),
        (f"changes: {{format: debezium, key: id}}\nschema: {{id: int64, _file: string}}\n{NOW}", "_file"),
        (f"changes: {{format: debezium, key: id}}\n{ROW}protect: {{'*.id': {{keep_last: 2}}}}\n", "protect"),
        ("changes: {format: upsert}\nprotect: {_key: drop}\n", "protect"),
        ("changes: {format: upsert}\ntable: {iceberg: {name: db.c}, current: true}\n", "db.customers_now"),
        ("changes: {format: upsert}\ntable: {iceberg: {name: db.c}, current: db.c}\n", "db.customers_now"),
        ("changes: {format: upsert}\ntable: {delta: {}, current: db.c}\n", "current: true"),
        ("changes: {format: upsert}\nsplit: {by: {header: k}, into: {a: {schema: {x: string}}}}\n", "split"),
    ],
)
def test_changes_that_cannot_be_folded_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FeedError) as refusal:
        load(tmp_path, text)
    assert words in f"{refusal.value.message} {refusal.value.remedy}"
