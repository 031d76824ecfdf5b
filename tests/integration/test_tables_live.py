"""A table over a real Kafka during the life of its feed: shared files, a window landed again, a replay, a schema that
grows. The format's own library reads the table; the rows are compared with an independent consumer's records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaProducer

from sluice.pipelines.errors import TableRefused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.maintenance.fixers import Fixer, Record
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.tables.check import compare
from sluice.pipelines.tables.sync import sync
from sluice.pipelines.tables.table_windows import FeedTables
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_table, open_tables
from tests.integration.support import FeedProject, consume_topic, open_feed_ledger, open_inline_ports, run

HOUR = 3_600_000
TABLES = {
    "iceberg": "{iceberg: {name: db.orders, catalog: {type: sql, uri: 'sqlite:///catalog.db'}}, quarantine: true}",
    "delta": "{delta: {}, quarantine: true}",
}
LARGE = 1 << 40


def make_value(i: int) -> Any:
    """Make the value of record `i`: of ten records one has its amount as text; the last forty have a coupon."""
    order: dict[str, Any] = {"id": i, "amount": f"{i}" if i % 10 == 7 else i}
    return order | ({"coupon": f"c{i}"} if i >= 80 else {})


def produce(project: FeedProject, first: int, records: range) -> None:
    with closing(KafkaProducer(bootstrap_servers=project.kafka.bootstrap)) as producer:
        for i in records:
            stamp = first + i * 2 * HOUR // 120
            producer.send(
                project.topic, json.dumps(make_value(i)).encode(), b"%d" % i, partition=i % 4, timestamp_ms=stamp
            )


class LiveFeed:
    """A feed of two hours, and its table."""

    def __init__(self, project: FeedProject, kind: str) -> None:
        self.project, self.kind = project, kind

    def write_feed(self, amount: str = "int32") -> Feed:
        return self.project.write_feed(
            format="json",
            schema=json.dumps({"id": "int64 not null", "amount": amount}),
            policies="{on_drift: evolve, quarantine_limit: {share: 1.0}}",
            landing="{shared_files: true}",
            table=TABLES[self.kind],
        )

    def sync(self, feed: Feed) -> pa.Table:
        """Sync the tables and compare them with the ledger. Returns the table's rows in the order of their ids."""
        with open_inline_ports(feed) as ports, open_tables(feed, ports.lake) as tables:
            ledger = open_feed_ledger(feed, ports)
            sync(ledger, ports.lake, FeedTables(tables.rows, tables.quarantine))
            for kind, table in tables.of_parts:
                comparison = compare(ledger, ports.lake, table, table.look(), ledger.read(), kind)
                assert comparison.same, comparison
            names = ("kafka_partition", "kafka_offset", "id", "amount")
            return tables.rows.rows(names).sort_by([("id", "ascending")])

    def read_quarantined_keys(self, feed: Feed) -> list[int]:
        """Read the keys of the quarantined records from the quarantine's table."""
        with open_inline_ports(feed) as ports, open_tables(feed, ports.lake) as tables:
            assert tables.quarantine is not None
            tables.quarantine.look()
            return sorted(int(key) for key in tables.quarantine.rows(("key",))["key"].to_pylist())

    def expect_rows(self, ids: range) -> dict[str, list[Any]]:
        """Returns the table's expected columns for these records, by an independent consumer."""
        records = {int(r["key"]): r for r in consume_topic(self.project.kafka, self.project.topic)}
        return {
            "kafka_partition": [records[i]["partition"] for i in ids],
            "kafka_offset": [records[i]["offset"] for i in ids],
            "id": [*ids],
            "amount": [*ids],
        }


@pytest.mark.parametrize("kind", TABLES)
def test_table_follows_an_active_feed(
    kind: str, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    pytest.importorskip({"iceberg": "pyiceberg", "delta": "deltalake"}[kind])
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=4))
    first = time.time_ns() // 1_000_000 // HOUR * HOUR - 5 * HOUR
    live, ids = LiveFeed(project, kind), range(120)
    good = [i for i in ids if i % 10 != 7]

    produce(project, first, range(80))
    feed = live.write_feed()
    landed = run(feed)
    assert any(p.shared for b in landed.batches for r in b.receipts for p in r.parts), "offset ranges share files"
    assert live.sync(feed).to_pydict() == live.expect_rows([i for i in good if i < 80])  # type: ignore[arg-type]

    for numbers in (range(80, 100), range(100, 120)):
        produce(project, first, numbers)
        run(feed)
    assert live.sync(feed).to_pydict() == live.expect_rows(good)  # type: ignore[arg-type]
    run(feed, Request(RequestKind.WINDOW, window=first + HOUR, replace=True))
    assert live.sync(feed).to_pydict() == live.expect_rows(good)  # type: ignore[arg-type]
    with open_inline_ports(feed) as ports, closing(open_table(feed, ports.lake)) as table:
        table.look()
        coupons = table.rows(("id", "coupon")).sort_by([("id", "ascending")]).to_pydict()
    coupon_by_id = dict(zip(coupons["id"], coupons["coupon"], strict=True))
    assert [coupon_by_id[i] for i in good if i >= 100] == [f"c{i}" for i in good if i >= 100], (
        "the column exists from the next batch on"
    )

    def fix(record: Record) -> Any:
        return {k: int(v) if k == "amount" else v for k, v in json.loads(record.value or b"").items()}

    assert live.read_quarantined_keys(feed) == [i for i in ids if i % 10 == 7]
    with open_inline_ports(feed) as ports:
        replay(feed, ports, Filter(), Fixer(fix, __file__), new_owner("replay"), lambda progress: None)
    assert live.sync(feed).to_pydict() == live.expect_rows(ids)
    assert live.read_quarantined_keys(feed) == []

    with closing(KafkaProducer(bootstrap_servers=project.kafka.bootstrap)) as producer:
        producer.send(project.topic, json.dumps({"id": 120, "amount": LARGE}).encode(), b"120", partition=0)
    wider = live.write_feed("int64")
    run(wider)
    if kind == "delta":
        with pytest.raises(TableRefused, match="amount is integer in it and would become long: Delta widens no column"):
            live.sync(wider)
        return
    assert live.sync(wider).to_pydict()["amount"] == [*ids, LARGE]
