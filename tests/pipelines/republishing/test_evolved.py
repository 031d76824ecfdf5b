"""Values of rows with columns learnt from records are sent completely, and a condition may name these columns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.planning.schema_changes import find_columns
from sluice.pipelines.ports import Lake
from sluice.pipelines.republishing import row_filter
from sluice.pipelines.republishing.republish_plan import Republish, Wishes, plan_republish
from sluice.pipelines.republishing.republish_rows import Shelf, records_of
from sluice.pipelines.republishing.send_lane import FREELY
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.republish_tasks import sending
from sluice.testing import Message, land

FEED = """\
kafka: {bootstrap: "memory:9092"}
topics: orders
start: earliest
format: json
schema: {id: int64, s: "struct<a:int32>"}
policies: {on_drift: evolve}
"""
VALUES = [{"id": n, "s": {"a": 1, "b": "x"}, "note": f"n{n}"} for n in range(10)]


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    """In its first file, `note` and `s.b` are in `_extra`; in the second they are columns."""
    (tmp_path / "feeds").mkdir()
    path = tmp_path / "feeds" / "orders.yaml"
    path.write_text(FEED)
    for values in (VALUES[:5], VALUES):
        messages = [Message(json.dumps(v).encode(), b"k", time=1_767_225_600_000) for v in values]
        land(path, messages, lake=tmp_path / "lake", environ={})
    return load_feed(path, {})


def open_plan(feed: Feed, root: Path) -> tuple[Republish, Lake, Ledger]:
    lake = LocalLake(root / "lake")
    ledger = Ledger(lake, feed.name, lambda: 0)
    state = ledger.read()
    ((key, ranges),) = state.landed.items()
    return plan_republish(feed, state, Wishes("to", 1), [(key, r) for r in ranges], 0), lake, ledger


def test_sent_values_contain_columns_added_by_records(feed: Feed, tmp_path: Path) -> None:
    plan, lake, ledger = open_plan(feed, tmp_path)
    shape = sending(feed, lake, plan, 3, FREELY, tmp_path).shape
    cursor, sent = Shelf(lake, ledger, ledger.read(), plan).cursor(0, 0), []
    for rows in cursor.read_between(0, plan.offsets, lambda: plan.offsets):
        sent += records_of(rows, plan.sources[0], plan, shape, 0).column("value").to_pylist()
    assert {v["id"]: v for v in map(json.loads, sent)} == {v["id"]: v for v in VALUES}


def test_stand_ins_of_oversized_records_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "feeds").mkdir()
    path = tmp_path / "feeds" / "orders.yaml"
    path.write_text(FEED)
    messages = [Message(value, b"k", time=1_767_225_600_000) for value in (b"[1]", bytes(36 << 20))]
    for message in messages:
        land(path, [message], lake=tmp_path / "lake", environ={})
    plan, lake, ledger = open_plan(load_feed(path, {}), tmp_path)
    plan = replace(plan, wishes=replace(plan.wishes, kind=PartKind.QUARANTINED))
    shelf = Shelf(lake, ledger, ledger.read(), plan)
    assert shelf.amount(0)[0] == 2
    rows = shelf.cursor(0, 0).read_between(0, plan.offsets, lambda: plan.offsets)
    assert [r["value"] for batch in rows for r in batch.to_pylist()] == [b"[1]"]


def test_condition_can_name_column_added_by_records(feed: Feed, tmp_path: Path) -> None:
    """In files older than the column it is null, as for readers."""
    plan, lake, ledger = open_plan(feed, tmp_path)
    state = ledger.read()
    columns = find_columns(feed, state)
    for where, ids in (("note = 'n7'", [7]), ("note is null", [0, 1, 2, 3, 4])):
        wishes = replace(plan.wishes, where=where)
        row_filter.check(wishes, columns)
        with row_filter.open_condition(wishes, columns) as condition:
            rows = Shelf(lake, ledger, state, plan, condition).cursor(0, 0)
            read = [r for batch in rows.read_between(0, plan.offsets, lambda: plan.offsets) for r in batch.to_pylist()]
        assert [r["id"] for r in read] == ids
        assert "note" not in read[0] or where == "note = 'n7'"
