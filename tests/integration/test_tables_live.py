"""A table over a real Kafka while its feed lives: shared files, a window landed again, a quarantine replayed, a schema
that grows. Read by the format's own library, held against an independent consumer."""

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
from tests.integration.support import Place, consumed, edges, ledger, run

HOUR = 3_600_000
TABLES = {
    "iceberg": "{iceberg: {name: db.orders, catalog: {type: sql, uri: 'sqlite:///catalog.db'}}, quarantine: true}",
    "delta": "{delta: {}, quarantine: true}",
}
LARGE = 1 << 40


def value(i: int) -> Any:
    """Of ten records one has its amount as text; the last forty have a coupon."""
    found: dict[str, Any] = {"id": i, "amount": f"{i}" if i % 10 == 7 else i}
    return found | ({"coupon": f"c{i}"} if i >= 80 else {})


def produce(place: Place, first: int, records: range) -> None:
    with closing(KafkaProducer(bootstrap_servers=place.kafka.bootstrap)) as producer:
        for i in records:
            stamp = first + i * 2 * HOUR // 120
            producer.send(place.topic, json.dumps(value(i)).encode(), b"%d" % i, partition=i % 4, timestamp_ms=stamp)


class Live:
    """A feed of two hours, and its table."""

    def __init__(self, place: Place, kind: str) -> None:
        self.place, self.kind = place, kind

    def feed(self, amount: str = "int32") -> Feed:
        return self.place.feed(
            format="json",
            schema=json.dumps({"id": "int64 not null", "amount": amount}),
            policies="{on_drift: evolve, quarantine_limit: {share: 1.0}}",
            landing="{shared_files: true}",
            table=TABLES[self.kind],
        )

    def sync(self, feed: Feed) -> pa.Table:
        """Bring it up, compare it and the quarantine's, and read it by `(partition, offset)`."""
        with edges(feed) as opened, open_tables(feed, opened.lake) as tables:
            book = ledger(feed, opened)
            sync(book, opened.lake, FeedTables(tables.rows, tables.quarantine))
            for kind, table in tables.of_parts:
                found = compare(book, opened.lake, table, table.look(), book.read(), kind)
                assert found.same, found
            names = ("kafka_partition", "kafka_offset", "id", "amount")
            return tables.rows.rows(names).sort_by([("id", "ascending")])

    def refused(self, feed: Feed) -> list[int]:
        """The keys of what is in quarantine, by its table."""
        with edges(feed) as opened, open_tables(feed, opened.lake) as tables:
            assert tables.quarantine is not None
            tables.quarantine.look()
            return sorted(int(key) for key in tables.quarantine.rows(("key",))["key"].to_pylist())

    def landed(self, ids: range) -> dict[str, list[Any]]:
        """What an independent consumer says of these records, as the table has them."""
        seen = {int(r["key"]): r for r in consumed(self.place.kafka, self.place.topic)}
        return {
            "kafka_partition": [seen[i]["partition"] for i in ids],
            "kafka_offset": [seen[i]["offset"] for i in ids],
            "id": [*ids],
            "amount": [*ids],
        }


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_follows_a_feed_that_lives(
    kind: str, tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    pytest.importorskip({"iceberg": "pyiceberg", "delta": "deltalake"}[kind])
    place = Place(tmp_path, kafka, fresh_topic(partitions=4))
    first = time.time_ns() // 1_000_000 // HOUR * HOUR - 5 * HOUR
    live, whole = Live(place, kind), range(120)
    good = [i for i in whole if i % 10 != 7]

    produce(place, first, range(80))
    feed = live.feed()
    landed = run(feed)
    assert any(p.shared for b in landed.batches for r in b.receipts for p in r.parts), "offset ranges share files"
    assert live.sync(feed).to_pydict() == live.landed([i for i in good if i < 80])  # type: ignore[arg-type]

    for some in (range(80, 100), range(100, 120)):
        produce(place, first, some)
        run(feed)
    assert live.sync(feed).to_pydict() == live.landed(good)  # type: ignore[arg-type]
    run(feed, Request(RequestKind.WINDOW, window=first + HOUR, replace=True))
    assert live.sync(feed).to_pydict() == live.landed(good)  # type: ignore[arg-type]
    with edges(feed) as opened, closing(open_table(feed, opened.lake)) as table:
        table.look()
        coupons = table.rows(("id", "coupon")).sort_by([("id", "ascending")]).to_pydict()
    found = dict(zip(coupons["id"], coupons["coupon"], strict=True))
    assert [found[i] for i in good if i >= 100] == [f"c{i}" for i in good if i >= 100], (
        "a column from the next batch on"
    )

    def fix(record: Record) -> Any:
        return {k: int(v) if k == "amount" else v for k, v in json.loads(record.value or b"").items()}

    assert live.refused(feed) == [i for i in whole if i % 10 == 7]
    with edges(feed) as opened:
        replay(feed, opened, Filter(), Fixer(fix, __file__), new_owner("replay"), lambda progress: None)
    assert live.sync(feed).to_pydict() == live.landed(whole)
    assert live.refused(feed) == []

    with closing(KafkaProducer(bootstrap_servers=place.kafka.bootstrap)) as producer:
        producer.send(place.topic, json.dumps({"id": 120, "amount": LARGE}).encode(), b"120", partition=0)
    wider = live.feed("int64")
    run(wider)
    if kind == "delta":
        with pytest.raises(TableRefused, match="amount is integer in it and would become long: Delta widens no column"):
            live.sync(wider)
        return
    assert live.sync(wider).to_pydict()["amount"] == [*whole, LARGE]
