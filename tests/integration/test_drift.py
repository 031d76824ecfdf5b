"""A schema that grows on a real Kafka: drift is refused or adopted, and a window of two schemas reads as one table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from sluice import reading
from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.errors import SchemaChanged, SchemaDrifted
from sluice.pipelines.ledger import checkpoint
from sluice.pipelines.maintenance.replay import replay
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Counts, DriftKind
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.validation.drift import sum_drift
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark import engine
from tests.integration.support import (
    FeedProject,
    list_files,
    open_feed_ledger,
    open_inline_ports,
    query_files,
    request_offsets,
    run,
)

pytestmark = pytest.mark.usefixtures("default_engine")

HOUR = 3_600_000
OLD, NEW = 40, 60
"""Numbers of records before and after a change of the producers: a coupon, and in every tenth an id beyond int32."""


def generate_orders(first: int) -> Iterable[tuple[int, dict[str, Any]]]:
    for i in range(OLD + NEW):
        value: dict[str, Any] = {"id": i, "price": i / 4}
        if i >= OLD:
            value |= {"coupon": f"c{i}", "id": i + (1 << 40 if i % 10 == 0 else 0)}
        yield first + i * 1000, value


@pytest.mark.spark
def test_schema_drift_is_refused_or_adopted_and_reads_as_one_table(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=1))
    first = time.time_ns() // 1_000_000 // HOUR * HOUR - 5 * HOUR
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    for stamp, value in generate_orders(first):
        producer.send(project.topic, json.dumps(value).encode(), timestamp_ms=stamp, partition=0)
    producer.close()
    schema = json.dumps({"id": "int32", "price": "decimal(8,2)"})

    def write_feed(on_drift: str) -> Any:
        limit = "quarantine_limit: {share: 0.5}"
        return project.write_feed(format="json", schema=schema, policies=f"{{on_drift: {on_drift}, {limit}}}")

    run(write_feed("fail"), request_offsets(project.topic, 0, 0, OLD))
    files = list_files(write_feed("fail"))
    middle = OLD + NEW // 2
    with pytest.raises(SchemaDrifted, match=r"coupon \(string\) is not in the schema, 27 records"):
        run(write_feed("fail"), request_offsets(project.topic, 0, OLD, middle))
    assert list_files(write_feed("fail")) == files

    evolving = write_feed("evolve")
    (batch,) = run(evolving, request_offsets(project.topic, 0, OLD, middle)).batches
    assert (batch.counts, batch.adopted_offset_ranges) == (Counts(landed=27, quarantined=3), 1)
    assert [(d.kind, d.field, d.records, d.type) for d in sum_drift(batch.receipts)] == [
        (DriftKind.NEW, "coupon", 27, "string"),
        (DriftKind.WIDENED, "id", 3, "int64"),
    ]
    (batch, *_) = run(evolving).batches
    assert (batch.counts, sum_drift(batch.receipts)) == (Counts(landed=30), ())

    with open_inline_ports(evolving) as ports:
        ledger = open_feed_ledger(evolving, ports)
        assert ledger.read().evolved == {"id": "int64", "coupon": "string"}
        replay(evolving, ports, Filter(), None, new_owner("test"), lambda progress: None)
        report = audit(ledger, ports.lake, hashes=True)
        partitions = {
            ledger.read().current[p.tp]: p for p in ports.cluster.partitions([project.topic], evolving.isolation)
        }
        fetcher = KafkaFetcher(evolving.kafka, evolving.isolation)
        report = rescan(report, ledger, ports.lake, evolving.shape, CurrentLog(fetcher, evolving.isolation, partitions))
        fetcher.close()
    assert (report.problems, report.compared) == ((), OLD + NEW)

    window = reading.of_feed(evolving, first)
    names = ["id", "price", "coupon", "kafka_offset"]
    rows = window.arrow(names).to_pylist()
    assert [r["id"] for r in rows] == [value["id"] for _, value in generate_orders(first)]
    assert [r["coupon"] for r in rows if r["kafka_offset"] >= middle] == [f"c{i}" for i in range(middle, OLD + NEW)]
    assert window.duckdb().select(*names).order("kafka_offset").to_arrow_table().to_pylist() == rows
    frame = window.spark(engine.session(evolving.spark)).select(*names).orderBy("kafka_offset")
    assert [r.asDict() for r in frame.collect()] == rows


@pytest.mark.slow
def test_wrong_type_is_corrected_once_no_row_has_it(
    tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    """Codes that were declared as numbers, and lost their zeros. A batch by the former type may not land afterwards."""
    project = FeedProject(tmp_path, kafka, fresh_topic(partitions=1))
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for i in range(40):
            producer.send(project.topic, b'{"id": %d, "code": %s}' % (i, b'"007"' if i > 20 else b"7"), partition=0)

    def write_feed(**columns: str) -> Any:
        policies = "{on_drift: extra, quarantine_limit: {share: 0.9}}"
        return project.write_feed(format="json", schema=json.dumps({"id": "int64"} | columns), policies=policies)

    def request_again(start: int, end: int) -> Request:
        return replace(request_offsets(project.topic, 0, start, end), replace=True)

    wrong = write_feed(code="int64")
    for start in (0, 10):
        run(wrong, request_offsets(project.topic, 0, start, start + 10))
    right = write_feed(code="string")
    with pytest.raises(SchemaChanged, match="code is string, and has landed as int64") as refused:
        run(right)
    assert "leave code out, land the rows of the old type again" in refused.value.remedy
    without = write_feed()
    run(without, request_again(0, 10))
    with pytest.raises(SchemaChanged):
        run(right)
    run(without, request_again(10, 20))
    with open_inline_ports(right) as ports:
        ledger = open_feed_ledger(right, ports)
        stale = ledger.read()
        assert preview(right, ports, Request(RequestKind.CATCH_UP)).plan is not None
    run(right, request_again(0, 40))
    query = "select id, code from read_parquet($files, hive_partitioning = false) order by id"
    rows = [(row["id"], row["code"]) for row in query_files(right, query, list_files(right)).to_pylist()]
    assert rows == [(i, "007") for i in range(21, 40)]
    with open_inline_ports(right) as ports:
        ledger = open_feed_ledger(right, ports)
        assert audit(ledger, ports.lake, hashes=True).problems == ()
        assert checkpoint.load(checkpoint.dump(ledger.read())) == ledger.read()
    assert stale.table["code"] == "int64"
    with pytest.raises(SchemaChanged, match="code is int64, and has landed as string"):
        run(wrong)
