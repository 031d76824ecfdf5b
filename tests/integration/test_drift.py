"""A schema that grows on a real Kafka: drift is refused or taken in, and one window in two shapes is one table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice import reading
from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.errors import SchemaDrifted
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.receipts import Counts, DriftKind
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.validation.drift import sum_drift
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark import engine
from tests.integration.support import Place, edges, ledger, offsets, run, visible

HOUR = 3_600_000
OLD, NEW = 40, 60
"""Records before the producers changed, and after: these have a coupon, and every tenth a number beyond int32."""


def orders(first: int) -> Iterable[tuple[int, dict[str, Any]]]:
    for i in range(OLD + NEW):
        value: dict[str, Any] = {"id": i, "price": i / 4}
        if i >= OLD:
            value |= {"coupon": f"c{i}", "id": i + (1 << 40 if i % 10 == 0 else 0)}
        yield first + i * 1000, value


@pytest.mark.spark
def test_a_feed_evolves_with_its_records(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    place = Place(tmp_path, kafka, fresh_topic(partitions=1))
    first = time.time_ns() // 1_000_000 // HOUR * HOUR - 5 * HOUR
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    for stamp, value in orders(first):
        producer.send(place.topic, json.dumps(value).encode(), timestamp_ms=stamp, partition=0)
    producer.close()
    schema = json.dumps({"id": "int32", "price": "decimal(8,2)"})

    def feed(on_drift: str) -> Any:
        limit = "quarantine_limit: {share: 0.5}"
        return place.feed(format="json", schema=schema, policies=f"{{on_drift: {on_drift}, {limit}}}")

    run(feed("fail"), offsets(place.topic, 0, 0, OLD))
    seen = visible(feed("fail"))
    middle = OLD + NEW // 2
    with pytest.raises(SchemaDrifted, match=r"coupon \(string\) is not in the schema, 27 records"):
        run(feed("fail"), offsets(place.topic, 0, OLD, middle))
    assert visible(feed("fail")) == seen

    evolving = feed("evolve")
    (batch,) = run(evolving, offsets(place.topic, 0, OLD, middle)).batches
    assert (batch.counts, batch.adopted) == (Counts(landed=27, quarantined=3), 1)
    assert [(d.kind, d.field, d.records, d.type) for d in sum_drift(batch.receipts)] == [
        (DriftKind.NEW, "coupon", 27, "string"),
        (DriftKind.WIDENED, "id", 3, "int64"),
    ]
    (batch, *_) = run(evolving).batches
    assert (batch.counts, sum_drift(batch.receipts)) == (Counts(landed=30), ())

    with edges(evolving) as opened:
        book = ledger(evolving, opened)
        assert book.read().evolved == {"id": "int64", "coupon": "string"}
        replay(evolving, opened, Filter(), None, new_owner("test"), lambda progress: None)
        report = audit(book, opened.lake, hashes=True)
        today = {book.read().current[p.tp]: p for p in opened.cluster.partitions([place.topic], evolving.isolation)}
        fetcher = KafkaFetcher(evolving.kafka, evolving.isolation)
        report = rescan(report, book, opened.lake, evolving.shape, CurrentLog(fetcher, evolving.isolation, today))
        fetcher.close()
    assert (report.problems, report.compared) == ((), OLD + NEW)

    window = reading.of_feed(evolving, first)
    names = ["id", "price", "coupon", "kafka_offset"]
    rows = window.arrow(names).to_pylist()
    assert [r["id"] for r in rows] == [value["id"] for _, value in orders(first)]
    assert [r["coupon"] for r in rows if r["kafka_offset"] >= middle] == [f"c{i}" for i in range(middle, OLD + NEW)]
    assert window.duckdb().select(*names).order("kafka_offset").to_arrow_table().to_pylist() == rows
    frame = window.spark(engine.session(evolving.spark)).select(*names).orderBy("kafka_offset")
    assert [r.asDict() for r in frame.collect()] == rows
