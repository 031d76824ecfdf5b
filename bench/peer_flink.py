"""Flink as a peer: a batch INSERT in SQL from its Kafka connector into its filesystem sink, on as many slots as cores.

The JVM with its planner stands by; each landing is a job on a cluster of its own within it, as Flink does locally.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from bench.stand import PeerTask, Ready, serve
from sluice.resources.local import java

_CONF = {"table.local-time-zone": "UTC", "rest.address": "127.0.0.1", "rest.bind-address": "127.0.0.1"}
_TYPES = {
    "string": "STRING",
    "int32": "INT",
    "int64": "BIGINT",
    "float64": "DOUBLE",
    "bool": "BOOLEAN",
    "timestamp": "TIMESTAMP_LTZ(3)",
}
_KAFKA = (
    ("topic", "STRING", "topic"),
    ("partition", "INT", "partition"),
    ("offset", "BIGINT", "offset"),
    ("timestamp", "TIMESTAMP_LTZ(3)", "timestamp"),
    ("timestampType", "STRING", "timestamp-type"),
    ("headers", "MAP<STRING, BYTES>", "headers"),
)
"""Columns of the connector's metadata: our name less its prefix, type, and the connector's name."""
_JSON = {"value.format": "json", "value.json.timestamp-format.standard": "ISO-8601"}


@contextmanager
def prepare(task: PeerTask) -> Iterator[Ready]:
    """A JVM with a table environment in batch mode."""
    spark = java.spark_jars()  # has py4j's side of Java and Hadoop's classes, which Flink's Parquet needs
    jars = [*Path(task.jars).glob("*.jar"), *spark.glob("hadoop-client-*.jar")]
    exports = [f"--add-opens=java.base/java.{p}=ALL-UNNAMED" for p in ("lang", "nio", "time", "util")]
    port = launch_gateway(
        jarpath=str(next(spark.glob("py4j-*.jar"))),
        classpath=":".join(map(str, jars)),
        javaopts=["-Xmx4g", *exports],
        java_path=str(java.find_java()),
        die_on_exit=True,
        redirect_stdout=sys.stderr,
        redirect_stderr=sys.stderr,
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    try:
        versions = dict(p.stem.rsplit("-", 1) for p in jars if p.stem.startswith(("flink-runtime", "flink-parquet")))
        yield Ready(partial(_land, _make_environment(gateway.jvm, task), task), versions)
    finally:
        gateway.shutdown()


def _make_environment(jvm: Any, task: PeerTask) -> Any:
    configuration = jvm.org.apache.flink.configuration.Configuration()
    cores = str(task.cores)
    for name, value in (_CONF | {"parallelism.default": cores, "taskmanager.numberOfTaskSlots": cores}).items():
        configuration.setString(name, value)
    api = jvm.org.apache.flink.table.api
    settings = api.EnvironmentSettings.newInstance().inBatchMode().withConfiguration(configuration).build()
    return api.TableEnvironment.create(settings)


def _land(environment: Any, task: PeerTask, out: Path) -> dict[str, Any]:
    values = {name: _TYPES.get(kind, kind) for name, kind in task.schema.items()} or {"value": "BYTES"}
    columns = [*(f"`{name}` {kind}" for name, kind in values.items()), "`kafka_key` BYTES"]
    read = [f"`kafka_{name}` {kind} METADATA FROM '{origin}' VIRTUAL" for name, kind, origin in _KAFKA]
    written = [f"`kafka_{name}` {kind}" for name, kind, _ in _KAFKA]
    names = ", ".join(f"`{name}`" for name in (*values, "kafka_key", *(f"kafka_{name}" for name, *_ in _KAFKA)))
    for statement in (
        f"CREATE TEMPORARY TABLE topic ({', '.join((*columns, *read))}) WITH ({_show_options(_make_source(task))})",
        f"CREATE TEMPORARY TABLE files ({', '.join((*columns, *written))}) WITH ({_show_options(_make_sink(out))})",
    ):
        environment.executeSql(statement)
    getattr(environment.executeSql(f"INSERT INTO files SELECT {names} FROM topic"), "await")()
    for table in ("topic", "files"):
        environment.executeSql(f"DROP TEMPORARY TABLE {table}")
    return {}


def _make_source(task: PeerTask) -> dict[str, str]:
    return {
        "connector": "kafka",
        "topic": task.topic,
        "properties.bootstrap.servers": task.bootstrap,
        "properties.group.id": "bench",
        "scan.startup.mode": "earliest-offset",
        "scan.bounded.mode": "latest-offset",
        "key.format": "raw",
        "key.fields": "kafka_key",
        "value.fields-include": "EXCEPT_KEY",
        **(_JSON if task.schema else {"value.format": "raw"}),
    }


def _make_sink(out: Path) -> dict[str, str]:
    return {
        "connector": "filesystem",
        "path": out.as_uri(),
        "format": "parquet",
        # As for Spark: its faster choices.
        "parquet.compression": "ZSTD",
        "parquet.compression.codec.zstd.level": "1",
        "parquet.write.int64.timestamp": "true",
        "parquet.timestamp.time.unit": "micros",
        "parquet.utc-timezone": "true",
    }


def _show_options(options: dict[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in options.items())


if __name__ == "__main__":
    serve(prepare)
