"""Messages through a feed: landed and refused records with reasons, repeated landings in a lake, and plain errors."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.contract.expectation import Severity
from sluice.pipelines.errors import ContractBroken, FeedError, UnknownTopic, UsageError, WindowIncomplete
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import OriginEntry, OriginItem
from sluice.pipelines.model.kafka import Key
from sluice.reading import of_feed
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing import Message, land
from sluice.testing.lake import MemoryLake

FEED = "topics: orders\nstart: latest\nformat: json\nschema: {id: int64 not null, amount: 'decimal(8,2)'}\n"


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text(FEED)
    return path


def order(id: int, **more: Any) -> bytes:
    return json.dumps({"id": id} | more).encode()


def contract(orders: Path, *expectations: dict[str, Any]) -> None:
    suite = {"name": "orders", "expectations": list(expectations)}
    orders.with_suffix(".contract.json").write_text(json.dumps(suite))


def test_valid_records_land_and_others_are_quarantined_with_reason(orders: Path) -> None:
    landed = land(orders, [Message(order(1, amount=2.5)), Message(b"no json"), Message(order(2))])
    assert landed.rows.column("id").to_pylist() == [1, 2]
    assert [str(a) for a in landed.rows.column("amount").to_pylist()] == ["2.50", "None"]
    (refused,) = landed.quarantined.to_pylist()
    assert (refused["value"], refused["stage"], refused["reason"]) == (b"no json", "decode", "not_json")
    assert (landed.counts.landed, landed.counts.quarantined) == (2, 1)
    assert landed.windows == ["2026-01-01T00:00"]


def test_keys_headers_times_partitions_and_tombstones_are_landed(orders: Path) -> None:
    time = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    one = Message(order(1), b"k", [("source", b"shop")], time, partition=1)
    landed = land(orders, [one, Message(None, b"gone", time=1_772_366_400_001)])
    tombstone, row = landed.rows.to_pylist()
    assert (row["kafka_key"], row["kafka_timestamp"], row["kafka_partition"]) == (b"k", time, 1)
    assert row["kafka_headers"] == [{"key": "source", "value": b"shop"}]
    assert (tombstone["kafka_tombstone"], tombstone["kafka_timestamp"].hour) == (True, 12)


def test_a_contract_quarantines_rows_and_refuses_batches(orders: Path) -> None:
    rows = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "amount", "min_value": "0.01"}}
    many = {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 2}}
    contract(orders, rows, many | {"severity": "warning"})
    landed = land(orders, [Message(order(1, amount=0)), Message(order(2, amount=3))])
    assert landed.rows.column("id").to_pylist() == [2]
    assert landed.quarantined.column("detail").to_pylist() == ["amount should be at least 0.01"]
    first, second = landed.expectations
    assert (first.unexpected, first.passed) == (1, False)
    assert (second.severity, second.passed, second.observed) == (Severity.WARNING, False, "1 row")
    contract(orders, rows, many)
    with pytest.raises(ContractBroken, match="nothing of it is published"):
        land(orders, [Message(order(1, amount=1))])


def test_unknown_fields_are_reported(orders: Path) -> None:
    landed = land(orders, [Message(order(1, amount=1, channel="web"))])
    assert [(d.kind, d.field) for d in landed.drift] == [("new", "channel")]
    assert json.loads(landed.rows.column("_extra")[0].as_py()) == {"channel": "web"}


def test_lake_folder_is_readable_by_readers(orders: Path, tmp_path: Path) -> None:
    landed = land(orders, [Message(order(1))], lake=tmp_path / "lake")
    assert landed.rows.equals(of_feed(landed.feed, landed.windows[0]).arrow())


@pytest.mark.parametrize("in_memory", [True, False])
def test_landing_again_continues_after_existing_offsets(orders: Path, tmp_path: Path, in_memory: bool) -> None:
    lake = MemoryLake() if in_memory else tmp_path / "lake"
    land(orders, [Message(order(1)), Message(order(2))], lake=lake)
    again = land(orders, [Message(order(3)), Message(order(4), partition=2)], lake=lake)
    assert again.rows.select(["id", "kafka_offset"]).to_pylist() == [
        {"id": 3, "kafka_offset": 2},
        {"id": 4, "kafka_offset": 0},
    ]
    assert again.windows == ["2026-01-01T01:00"]
    nothing = land(orders, [], lake=lake)
    assert (nothing.rows.num_rows, nothing.quarantined.num_rows) == (0, 0)
    assert nothing.rows.schema.names == again.rows.schema.names


def test_refused_records_do_not_block_later_landings(orders: Path) -> None:
    lake = MemoryLake()
    contract(orders, {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 2}})
    with pytest.raises(ContractBroken):
        land(orders, [Message(order(1))], lake=lake)
    assert land(orders, [Message(order(2)), Message(order(3))], lake=lake).rows.column("id").to_pylist() == [2, 3]


def test_raw_feed_of_several_topics_lands(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text("topics: {include: ['shop\\..*'], exclude: ['.*-dlq']}\nstart: fail\n")
    landed = land(
        path, [Message(b"1", topic="shop.a"), Message(b"2", topic="shop.b-dlq"), Message(b"3", topic="shop.c")]
    )
    assert landed.rows.select(["topic", "value"]).to_pylist() == [
        {"topic": "shop.a", "value": b"1"},
        {"topic": "shop.c", "value": b"3"},
    ]
    with pytest.raises(UsageError, match="several topics"):
        land(path, [Message(b"1")])
    with pytest.raises(UnknownTopic, match="no topic"):
        land(path, [])


def test_record_limit_of_a_run_leaves_no_record_unlanded(orders: Path) -> None:
    orders.write_text(FEED + "limits: {records: 2}\n")
    assert land(orders, [Message(order(i)) for i in range(5)]).counts.landed == 5


def test_invalid_arguments_are_clear_errors(orders: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        land(orders, [], lake="s3://bucket/lake")
    with pytest.raises(UsageError, match="a message's time") as error:
        land(orders, [Message(order(1), time=datetime(2026, 1, 1))])  # noqa: DTZ001
    assert error.value.remedy == "a datetime needs its zone"
    orders.write_text(FEED + "kafka: {bootstrap: '${NOWHERE}'}\n")
    with pytest.raises(FeedError, match="NOWHERE"):
        land(orders, [])
    assert land(orders, [], environ={"NOWHERE": "k:9092"}).rows.num_rows == 0
    with pytest.raises(FeedError, match="does not exist"):
        land(tmp_path / "feeds" / "order.yaml", [])


def test_report_on_memory_lake_or_another_feed_is_refused(orders: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.sql"
    report.write_text("-- feed: orders\nSELECT 1\n")
    landed = land(orders, [Message(order(1))])
    with pytest.raises(UsageError, match="in memory") as error:
        landed.report(report)
    assert "lake=tmp_path" in error.value.remedy
    report.write_text("-- feed: others\nSELECT 1\n")
    with pytest.raises(UsageError, match="on feed others"):
        landed.report(report)


def test_report_covers_one_complete_window(orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("sluice.reading.run_report", lambda report, windows: calls.append(windows))
    (report := tmp_path / "r.sql").write_text("-- feed: orders\nSELECT 1\n")
    hours = [datetime(2026, 1, 1, h, tzinfo=UTC) for h in (5, 6)]
    landed = land(orders, [Message(order(h.hour), time=h) for h in hours], lake=tmp_path / "lake")
    with pytest.raises(UsageError, match="2 windows") as error:
        landed.report(report)
    assert error.value.remedy == "name it: report(…, window='2026-01-01T05:00')"
    landed.report(report, "2026-01-01T06")
    assert calls[0].arrow(["id"]).to_pylist() == [{"id": 6}]
    with pytest.raises(WindowIncomplete):
        landed.report(report, "2026-01-01T07")


def test_lake_of_a_real_kafka_is_refused(orders: Path, tmp_path: Path) -> None:
    """A batch planned there by a run would be abandoned as a refused batch of a test."""
    ledger = Ledger(LocalLake(tmp_path / "lake"), "orders", lambda: 0, "run", "a-real-cluster")
    key = Key("orders", 0, "id-1")
    ledger.append(lambda s: OriginEntry(items=(OriginItem(key=key, offset=0, committed=None, why="test"),)))
    before = ledger.read().number
    with pytest.raises(UsageError, match="a-real-cluster") as refused:
        land(orders, [Message(order(1))], lake=tmp_path / "lake")
    assert "tmp_path" in refused.value.remedy
    assert ledger.read().number == before
