"""Spark's own Kafka connector as a peer: a batch read of the whole topic into Parquet, on the same number of cores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.avro.functions import from_avro
from pyspark.sql.functions import col, expr, from_json

from bench.formats import BEGIN, FORMATS
from bench.stand import PeerTask, Ready, serve
from bench.types import fields, spark_type

_CONF: dict[str, Any] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "4g",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # Its faster choices: the old INT96 stamps and zstd's level 3 would cost it time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.hadoop.parquet.compression.codec.zstd.level": "1",
}


@contextmanager
def stand(task: PeerTask) -> Iterator[Ready]:
    jars = sorted(Path(task.jars).glob("*.jar"))
    builder = SparkSession.builder.appName("bench").master(f"local[{task.cores}]")
    with builder.config(map=_CONF | {"spark.jars": ",".join(map(str, jars))}).getOrCreate() as spark:
        yield Ready(partial(_land, spark, task), {"pyspark": spark.version} | dict(map(_version, jars)))


def _version(jar: Path) -> tuple[str, str]:
    name, _, version = jar.stem.rpartition("-")
    return name, version


def _land(spark: SparkSession, task: PeerTask, out: Path) -> dict[str, Any]:
    options = {
        "kafka.bootstrap.servers": task.bootstrap,
        "subscribe": task.topic,
        "startingOffsets": "earliest",
        "endingOffsets": json.dumps({task.topic: {str(p): end for p, end in task.ends.items()}}),
        "includeHeaders": "true",
    }
    read = spark.read.format("kafka").options(**options).load()
    if task.schema:
        read = _typed_columns(read, task.schema, task.format)
    read.write.parquet(str(out), compression="zstd")
    return {}


def _typed_columns(read: DataFrame, schema: dict[str, str], format_: str) -> DataFrame:
    """The fields of the value, and all other columns under `kafka_`."""
    own = expr(f"substring(value, {BEGIN + 1}, length(value) - {BEGIN})") if format_ else col("value")
    columns = ", ".join(f"`{f.name}` {spark_type(f.type)}" for f in fields(schema))
    if format_ == "avro":
        value = from_avro(own, FORMATS[format_].schema, {"mode": "FAILFAST"}).alias("value")
    else:
        value = from_json(own.cast("string"), columns).alias("value")
    others = [c for c in read.columns if c != "value"]
    return read.select(value, *others).select("value.*", *(col(c).alias(f"kafka_{c}") for c in others))


if __name__ == "__main__":
    serve(stand)
