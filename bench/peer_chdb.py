"""chDB as a peer: ClickHouse's Kafka engine, a view of it into a table in memory, and from there one Parquet file.

Each landing is a new process, `python -m bench.peer_chdb TASK OUT`: reading from the engine directly loses records at
the end of each query, and its File engine cannot append to Parquet.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.stand import PeerTask, Ready, serve

_TYPES = {
    "string": "String",
    "int32": "Int32",
    "int64": "Int64",
    "float64": "Float64",
    "bool": "Bool",
    "timestamp": "DateTime64(6, 'UTC')",
}
_KAFKA = (
    ("key", "String", "_key"),
    ("topic", "String", "_topic"),
    ("partition", "Int32", "_partition"),
    ("offset", "Int64", "_offset"),
    ("timestamp", "DateTime64(3, 'UTC')", "assumeNotNull(_timestamp_ms)"),
    (
        "headers",
        "Array(Tuple(key String, value String))",
        "arrayMap((n, v) -> CAST((n, v), 'Tuple(key String, value String)'), `_headers.name`, `_headers.value`)",
    ),
)
"""Our name less its prefix, type, and an expression over the engine's virtual columns."""
_POLL_SECONDS, _PATIENCE_SECONDS = 0.02, 60.0


@contextmanager
def prepare(task: PeerTask) -> Iterator[Ready]:
    from importlib.metadata import version

    yield Ready(partial(_start, task), {"chdb": version("chdb")})


def _start(task: PeerTask, out: Path) -> dict[str, Any]:
    subprocess.run([sys.executable, "-m", "bench.peer_chdb", task.to_json(), out], check=True)
    return {}


def land(task: PeerTask, out: Path) -> None:
    """Land the topic in this process."""
    from chdb.session import Session

    out.mkdir(parents=True)
    values = {name: _TYPES.get(kind) or kind.title() for name, kind in task.schema.items()} or {"value": "String"}
    columns = [f"`{name}` {kind}" for name, kind in values.items()]
    kafka = [f"kafka_{name} {kind}" for name, kind, _ in _KAFKA]
    read = [*(f"`{name}`" for name in values), *(f"{source} AS kafka_{name}" for name, _, source in _KAFKA)]
    session = Session()
    for statement in (
        f"CREATE TABLE topic ({', '.join(columns)}) ENGINE = Kafka SETTINGS {_list_settings(task)}",
        f"CREATE TABLE landed ({', '.join((*columns, *kafka))}) ENGINE = Memory",
        f"CREATE MATERIALIZED VIEW reading TO landed AS SELECT {', '.join(read)} FROM topic",
    ):
        session.query(statement)
    _wait_for_rows(session, task.records)
    session.query(
        f"INSERT INTO FUNCTION file('{out}/all.parquet', 'Parquet') SELECT * FROM landed"
        " SETTINGS output_format_parquet_compression_method = 'zstd'"
    )
    session.close()


def _wait_for_rows(session: Any, records: int) -> None:
    rows, since = 0, time.monotonic()
    while rows < records:
        time.sleep(_POLL_SECONDS)
        before, rows = rows, int(str(session.query("SELECT count() FROM landed")))
        since = time.monotonic() if rows > before else since
        if time.monotonic() - since > _PATIENCE_SECONDS:
            raise TimeoutError(f"{rows:,} rows of {records:,} came")


def _list_settings(task: PeerTask) -> str:
    settings: dict[str, Any] = {
        "kafka_broker_list": task.bootstrap,
        "kafka_topic_list": task.topic,
        "kafka_group_name": f"bench-{uuid.uuid4().hex}",
        "kafka_format": "JSONEachRow" if task.schema else "RawBLOB",
        "kafka_num_consumers": task.cores,
        "kafka_thread_per_consumer": 1,
        "kafka_max_block_size": 262_144,
        "kafka_poll_max_batch_size": 65_536,
        "kafka_poll_timeout_ms": 100,
        "kafka_flush_interval_ms": 1_000,
        "date_time_input_format": "best_effort",
    }
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        land(PeerTask.from_json(sys.argv[1]), Path(sys.argv[2]))
    else:
        serve(prepare)
