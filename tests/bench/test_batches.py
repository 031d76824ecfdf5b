"""The batches that load a topic, read by kafka-python's own parser and by Sluice's codecs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords

from bench.batches import CODECS, EncodedBatch, batches
from sluice.pipelines.errors import Failed

Row = tuple[bytes, bytes, int, bytes | None]
_rows = st.lists(
    st.tuples(
        st.binary(max_size=40),
        st.binary(max_size=300),
        st.integers(0, 100_000),
        st.none() | st.binary(max_size=20),
    ),
    max_size=60,
)


def _build_table(rows: list[Row], first: int = 0) -> pa.Table:
    stamps, now = [], 1_700_000_000_000
    for _, _, later, _ in rows:
        now += later
        stamps.append(now)
    columns = {
        "offset": pa.array(range(first, first + len(rows)), pa.int64()),
        "key": pa.array([r[0] for r in rows], pa.binary()),
        "value": pa.array([r[1] for r in rows], pa.binary()),
        "timestamp": pa.array(stamps, pa.int64()),
        "trace": pa.array([r[3] for r in rows], pa.binary()),
    }
    return pa.table(columns)


def _read_records(batch: EncodedBatch) -> list[Any]:
    records: list[Any] = []
    memory = MemoryRecords(batch.data)
    while (kafka_batch := memory.next_batch()) is not None:
        assert kafka_batch.validate_crc()
        records += kafka_batch
    return records


@given(_rows, st.integers(1, 5_000))
def test_kafka_python_reads_encoded_batches(rows: list[Row], batch_bytes: int) -> None:
    table = _build_table(rows, first=7)
    encoded = list(batches(table, "none", batch_bytes))
    read = [(batch.base + record.offset, record) for batch in encoded for record in _read_records(batch)]
    assert [offset for offset, _ in read] == table.column("offset").to_pylist()
    assert [(r.key, r.value) for _, r in read] == [(key, value) for key, value, _, _ in rows]
    assert [r.timestamp for _, r in read] == table.column("timestamp").to_pylist()
    assert [dict(r.headers) for _, r in read] == [{} if t is None else {"trace": t} for _, _, _, t in rows]


def test_batches_close_once_they_are_full() -> None:
    rows: list[Row] = [(b"k", b"v" * 100, 1, None)] * 100
    encoded = list(batches(_build_table(rows), "none", 1_000))
    assert sum(b.records for b in encoded) == 100
    assert all(1_000 <= len(b.data) < 1_300 for b in encoded[:-1])


def test_kafka_python_reads_gzip_batches() -> None:
    rows: list[Row] = [(b"key-%d" % i, b"value" * i, i, None) for i in range(50)]
    read = [r for batch in batches(_build_table(rows), "gzip", 4_000) for r in _read_records(batch)]
    assert [(r.key, r.value) for r in read] == [(key, value) for key, value, _, _ in rows]


@pytest.mark.kafka
def test_producer_fails_unless_every_partition_has_a_leader(
    kafka: Any, fresh_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import produce

    monkeypatch.setattr(produce, "_PATIENCE_MS", 300)
    with pytest.raises(Failed, match=r"1 of .* 2 partitions"):
        produce.TopicProducer(kafka.bootstrap, fresh_topic(partitions=1), 2)


@pytest.mark.kafka
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_broker_and_console_consumer_accept_every_codec(codec: str, kafka: Any, fresh_topic: Any) -> None:
    from bench.produce import TopicProducer

    rows: list[Row] = [
        (b"key-%03d" % i, b"value %d" % i * (1 + i % 50), i, b"t" if i % 7 else None) for i in range(600)
    ]
    topic = fresh_topic(partitions=1)
    with TopicProducer(kafka.bootstrap, topic, 1) as producer:
        for batch in batches(_build_table(rows), codec, 70_000):
            producer.send({0: batch})
        producer.flush()
    output = kafka.tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", kafka.bootstrap, "--topic", topic, "--from-beginning", "--max-messages", "600"),
        *("--formatter-property", "print.key=true", "--formatter-property", "print.offset=true"),
    )
    assert output.stdout.splitlines() == [
        f"Offset:{i}\t{k.decode()}\t{v.decode()}" for i, (k, v, _, _) in enumerate(rows)
    ]
