"""The loop that many begin with, as a peer: kafka-python in one process, its records put into Parquet by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from kafka import KafkaConsumer, TopicPartition

from sluice.bench.stand import Assignment, Ready, serve

_ROWS = 100_000
_POLL_RECORDS = 5_000
_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


@contextmanager
def stand(given: Assignment) -> Iterator[Ready]:
    yield Ready(partial(_land, given), {name: version(name) for name in ("kafka-python", "lz4", "pyarrow")})


def _land(given: Assignment, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True)
    gathered: list[Any] = []
    with pq.ParquetWriter(out / "all.parquet", _SCHEMA, compression="zstd") as writer:
        for records in _polled(given):
            gathered += records
            if len(gathered) >= _ROWS:
                writer.write_table(_table(gathered))
                gathered = []
        writer.write_table(_table(gathered))
    return {}


def _polled(given: Assignment) -> Iterator[list[Any]]:
    with KafkaConsumer(bootstrap_servers=given.bootstrap, group_id=None, max_poll_records=_POLL_RECORDS) as consumer:
        partitions = [TopicPartition(given.topic, p) for p in given.ends]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        while any(consumer.position(tp) < given.ends[tp.partition] for tp in partitions):
            yield from consumer.poll(timeout_ms=1000).values()


def _table(records: list[Any]) -> pa.Table:
    columns = {
        "key": [r.key for r in records],
        "value": [r.value for r in records],
        "topic": [r.topic for r in records],
        "partition": [r.partition for r in records],
        "offset": [r.offset for r in records],
        "timestamp": [r.timestamp for r in records],
        "timestampType": [r.timestamp_type for r in records],
        "headers": [[{"key": k, "value": v} for k, v in r.headers] for r in records],
    }
    return pa.table(columns, schema=_SCHEMA)


if __name__ == "__main__":
    serve(stand)
