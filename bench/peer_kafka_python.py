"""The loop that many begin with, as a peer: kafka-python in one process, its records put into Parquet by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from bench.loop import ROWS, Lot, write
from bench.stand import PeerTask, Ready, serve

_POLL_RECORDS = 5_000


@contextmanager
def stand(task: PeerTask) -> Iterator[Ready]:
    yield Ready(partial(_land, task), {name: version(name) for name in ("kafka-python", "lz4", "orjson", "pyarrow")})


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    write(_lots(task), task, out)
    return {}


def _lots(task: PeerTask) -> Iterator[Lot]:
    gathered: list[Any] = []
    for records in _poll(task):
        gathered += records
        if len(gathered) >= ROWS:
            yield _columns(gathered)
            gathered = []
    if gathered:
        yield _columns(gathered)


def _poll(task: PeerTask) -> Iterator[list[Any]]:
    with KafkaConsumer(bootstrap_servers=task.bootstrap, group_id=None, max_poll_records=_POLL_RECORDS) as consumer:
        partitions = [TopicPartition(task.topic, p) for p in task.ends]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        while any(consumer.position(tp) < task.ends[tp.partition] for tp in partitions):
            yield from consumer.poll(timeout_ms=1000).values()


def _columns(records: list[Any]) -> Lot:
    return {
        "key": [r.key for r in records],
        "value": [r.value for r in records],
        "topic": [r.topic for r in records],
        "partition": [r.partition for r in records],
        "offset": [r.offset for r in records],
        "timestamp": [r.timestamp for r in records],
        "timestampType": [r.timestamp_type for r in records],
        "headers": [[{"key": k, "value": v} for k, v in r.headers] for r in records],
    }


if __name__ == "__main__":
    serve(stand)
