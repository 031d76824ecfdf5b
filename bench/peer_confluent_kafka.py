"""The fast loop in Python, as a peer: confluent-kafka in one process, values by orjson, Parquet by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from confluent_kafka import TIMESTAMP_CREATE_TIME

from bench.consume import message_lots
from bench.loop import ROWS, Lot, write
from bench.stand import PeerTask, Ready, serve


@contextmanager
def stand(task: PeerTask) -> Iterator[Ready]:
    yield Ready(partial(_land, task), {name: version(name) for name in ("confluent-kafka", _reader(task), "pyarrow")})


def _reader(task: PeerTask) -> str:
    return {"avro": "fastavro", "protobuf": "protobuf"}.get(task.format, "orjson")


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    write((_columns(task.topic, messages) for messages in message_lots(task, ROWS)), task, out)
    return {}


def _columns(topic: str, messages: list[Any]) -> Lot:
    stamps = [m.timestamp() for m in messages]
    return {
        "key": [m.key() for m in messages],
        "value": [m.value() for m in messages],
        "topic": [topic] * len(messages),
        "partition": [m.partition() for m in messages],
        "offset": [m.offset() for m in messages],
        "timestamp": [ms for _, ms in stamps],
        "timestampType": [kind - TIMESTAMP_CREATE_TIME for kind, _ in stamps],
        "headers": [m.headers() for m in messages],
    }


if __name__ == "__main__":
    serve(stand)
