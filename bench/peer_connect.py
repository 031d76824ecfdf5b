"""Kafka Connect as a peer: a standalone worker with Iceberg's sink, into a table in a folder, its catalog in SQLite.

Each landing is a new worker, which ends as soon as the table has all records. Connect's own transforms give the value
its topic, partition, offset and time; none can give it the key or headers.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from kafka import KafkaAdminClient

from bench.stand import PeerTask, Ready, serve
from bench.types import fields
from sluice.pipelines.schema.schema import arrow_type
from sluice.resources.local import java
from sluice.resources.local.local_kafka import free_ports

_TABLE, _CATALOG = "bench.records", "bench"
_KAFKA = {
    "kafka_topic": pa.string(),
    "kafka_partition": pa.int32(),
    "kafka_offset": pa.int64(),
    "kafka_timestamp": pa.timestamp("us", "UTC"),
}
_CONNECT = "org.apache.kafka.connect"
_TRANSFORMS = f"{_CONNECT}.transforms"
_PROPERTIES = {"write.parquet.compression-codec": "zstd", "write.parquet.compression-level": "1"}
_COMMIT_MS, _POLL_SECONDS, _PATIENCE_SECONDS = 1_000, 0.25, 600.0


@contextmanager
def prepare(task: PeerTask) -> Iterator[Ready]:
    import pyiceberg.catalog  # noqa: F401 - the table is made by it

    names = ("connect-runtime", "iceberg-kafka-connect", "iceberg-core")
    versions = dict(path.stem.rsplit("-", 1) for path in Path(task.jars).glob("*.jar"))
    yield Ready(partial(_land, task), {name: versions[name] for name in names})


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True)
    _create_table(task, out)
    name = f"bench-{uuid.uuid4().hex}"
    settings = {"worker": _make_worker(task, out), "sink": _make_sink(task, out, name)}
    for file, values in settings.items():
        (out / f"{file}.properties").write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    with KafkaAdminClient(bootstrap_servers=task.bootstrap) as admin:
        admin.create_topics({name: {"num_partitions": 1}}, wait_for_metadata=True)
        try:
            _run_worker(task, out)
        finally:
            admin.delete_topics([name])
    return {}


def _run_worker(task: PeerTask, out: Path) -> None:
    jars = [f"{task.jars}/*", *map(str, java.spark_jars().glob("hadoop-client-*.jar"))]
    command = [
        str(java.find_java()),
        "-Xmx4g",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-cp",
        ":".join(jars),
        f"{_CONNECT}.cli.ConnectStandalone",
    ]
    files = [str(out / f"{name}.properties") for name in ("worker", "sink")]
    with subprocess.Popen([*command, *files], stdout=sys.stderr) as worker:
        try:
            _wait_for_rows(task, out, worker)
        finally:
            worker.terminate()


def _wait_for_rows(task: PeerTask, out: Path, worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (rows := _count_rows(out)) < task.records:
        if worker.poll() is not None:
            raise RuntimeError(f"the worker ended with {worker.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{rows:,} rows of {task.records:,} came")
        time.sleep(_POLL_SECONDS)


def _count_rows(out: Path) -> int:
    """Rows of the table's newest snapshot, by its metadata."""
    with closing(sqlite3.connect(out / "catalog.db")) as catalog:
        ((location,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables").fetchall()
    metadata = json.loads(Path(location.removeprefix("file:").replace("///", "/")).read_text())
    counts = [int(snapshot["summary"]["total-records"]) for snapshot in metadata.get("snapshots", ())]
    return max(counts, default=0)


def _create_table(task: PeerTask, out: Path) -> None:
    from pyiceberg.catalog import load_catalog

    columns = [pa.field(f.name, arrow_type(f.type)) for f in fields(task.schema)] or [pa.field("value", pa.binary())]
    settings = {"uri": f"sqlite:///{out}/catalog.db", "warehouse": f"file://{out}/tables"}
    catalog = load_catalog(_CATALOG, type="sql", **settings)
    catalog.create_namespace(_TABLE.partition(".")[0])
    catalog.create_table(_TABLE, pa.schema([*columns, *_KAFKA.items()]), properties=_PROPERTIES)


def _make_worker(task: PeerTask, out: Path) -> Mapping[str, str]:
    ((port,),) = free_ports(1, 1)
    as_bytes, as_json = f"{_CONNECT}.converters.ByteArrayConverter", f"{_CONNECT}.json.JsonConverter"
    return {
        "bootstrap.servers": task.bootstrap,
        "key.converter": as_bytes,
        "value.converter": as_json if task.schema else as_bytes,
        "value.converter.schemas.enable": "false",
        # A task that waits for records takes part in no commit until its next flush of offsets.
        "offset.flush.interval.ms": str(_COMMIT_MS),
        "offset.storage.file.filename": str(out / "offsets"),
        "listeners": f"http://127.0.0.1:{port}",
        "consumer.auto.offset.reset": "earliest",
        "consumer.max.poll.records": "10000",
        "consumer.fetch.max.bytes": str(50 << 20),
    }


def _make_sink(task: PeerTask, out: Path, name: str) -> Mapping[str, str]:
    hoist = {"transforms.hoist.type": f"{_TRANSFORMS}.HoistField$Value", "transforms.hoist.field": "value"}
    return {
        "name": name,
        "connector.class": "org.apache.iceberg.connect.IcebergSinkConnector",
        "tasks.max": str(task.cores),
        "topics": task.topic,
        "transforms": "kafka" if task.schema else "hoist,kafka",
        **({} if task.schema else hoist),
        "transforms.kafka.type": f"{_TRANSFORMS}.InsertField$Value",
        **{f"transforms.kafka.{column.removeprefix('kafka_')}.field": column for column in _KAFKA},
        "iceberg.tables": _TABLE,
        "iceberg.catalog": _CATALOG,
        "iceberg.catalog.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        "iceberg.catalog.uri": f"jdbc:sqlite:{out}/catalog.db",
        "iceberg.catalog.warehouse": f"file://{out}/tables",
        "iceberg.control.topic": name,
        "iceberg.control.commit.interval-ms": str(_COMMIT_MS),
    }


if __name__ == "__main__":
    serve(prepare)
