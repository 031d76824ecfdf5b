"""The benchmarks by name. A new one is an entry here, over a workload and peers of their own modules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench import workloads
from bench.peers import (
    CHDB,
    CONFLUENT_KAFKA,
    CONNECT,
    DAFT,
    DLT,
    FLINK,
    KAFKA_PYTHON,
    POLARS,
    RUST,
    SLUICE,
    SLUICE_APART,
    SLUICE_PLACED,
    SLUICE_PROCESSES,
    SLUICE_PROTECTED,
    SLUICE_SPLIT,
    SPARK,
    Peer,
)
from bench.race import Race
from bench.workloads import Workload
from sluice.pipelines.errors import UsageError

ALL, FLAT = "all", "flat"
_LOOPS = (CONFLUENT_KAFKA, KAFKA_PYTHON)
_BY_NAME = (RUST, POLARS, CHDB, FLINK, CONNECT)
"""Other tools, which take part where they are asked for."""
_MAIN = (
    Race(
        "raw",
        "all of Kafka's columns into Parquet (zstd 1)",
        workloads.ORDERS,
        (SLUICE, SLUICE_PROCESSES, SPARK, *_LOOPS),
        (*_BY_NAME, DAFT),
    ),
    Race(
        "typed",
        "9 fields of JSON typed, and Kafka's other columns, into Parquet (zstd 1)",
        workloads.TYPED_ORDERS,
        (SLUICE, SLUICE_PROCESSES, SPARK, *_LOOPS),
        _BY_NAME,
    ),
    Race(
        "contract",
        "as typed, by Sluice with a contract of 10 row expectations, by the other with no validation at all",
        workloads.CHECKED_ORDERS,
        (SLUICE, SLUICE_PROCESSES, SPARK),
    ),
)


def _typed_race(name: str, workload: Workload, *more: Peer) -> Race:
    return Race(
        name, f"{len(workload.schema)} fields of JSON typed", workload, (SLUICE, SLUICE_PROCESSES, SPARK, *more)
    )


def _race_of(name: str, title: str, workload: Workload, *others: Peer, also: tuple[Peer, ...] = ()) -> Race:
    """The nine fields of `typed` in a format with schemas of its own."""
    about = f"9 fields of {title} typed, and Kafka's other columns, into Parquet (zstd 1)"
    return Race(name, about, workload, (SLUICE, SLUICE_PROCESSES, *others), also)


_OTHERS = (
    _typed_race("uncompressed", workloads.UNCOMPRESSED),
    _typed_race("gzip", workloads.GZIP),
    _typed_race("snappy", workloads.SNAPPY),
    _typed_race("zstd", workloads.ZSTD),
    _typed_race("small", workloads.SMALL),
    _typed_race("large", workloads.LARGE),
    _typed_race("nested", workloads.NESTED),
    _typed_race("escapes", workloads.ESCAPES),
    _typed_race("partitions", workloads.PARTITIONS, SLUICE_APART),
    _typed_race("skewed", workloads.SKEWED),
    _typed_race("brokers", workloads.BROKERS),
    _race_of("avro", "Avro", workloads.AVRO_ORDERS, SPARK, CONFLUENT_KAFKA, also=(RUST,)),
    _race_of("protobuf", "Protobuf", workloads.PROTOBUF_ORDERS, CONFLUENT_KAFKA),
    _race_of("json_schema", "JSON Schema", workloads.JSON_SCHEMA_ORDERS, SPARK, CONFLUENT_KAFKA),
    Race(
        "rows",
        "9 fields of JSON typed, and the same with a header of every tenth record, or in three datasets",
        workloads.ROWS_ORDERS,
        (SLUICE, SLUICE_PLACED, SLUICE_PROTECTED, SLUICE_SPLIT),
    ),
    Race(
        "kinds",
        "events of three kinds in one dataset of all their fields, or split into three of their own",
        workloads.MIXED_EVENTS,
        (SLUICE, SLUICE_SPLIT),
    ),
    Race(
        "dlt",
        "Kafka's columns into Parquet; dlt's are without headers",
        workloads.FEW_ORDERS,
        (SLUICE, SLUICE_PROCESSES, SPARK, DLT),
    ),
)
SUITE: Mapping[str, Race] = {race.name: race for race in (*_MAIN, *_OTHERS)}
FLAT_RECORDS = 10_000_000
_LEAST, _PARTITIONS, _MANY = 1_000_000, 4, (1, 32, 200)


def flat(limit: int | None = None) -> list[Race]:
    """Sluice alone over topics that grow to this number of records, and over more and more partitions of the
    smallest."""
    top = limit or FLAT_RECORDS
    minimum = min(_LEAST, -(-top // 10))
    middle = float(f"{math.sqrt(minimum * top):.0e}")
    sizes = [(records, _PARTITIONS) for records in sorted({minimum, int(middle), top})]
    return [_flat(*size) for size in (*sizes, *((minimum, partitions) for partitions in _MANY))]


def _flat(records: int, partitions: int) -> Race:
    workload = replace(workloads.TYPED_ORDERS, weights=(1,) * partitions).of(records)
    return Race(f"{FLAT} {records:,} x {partitions}", "9 fields of JSON typed", workload, (SLUICE,))


def races(names: Sequence[str], records: int | None = None) -> list[Race]:
    """The benchmarks of these names, `all` of them, or, when there are no names, the main ones.

    Over the records of their workloads, or this number; of `flat`, in its largest topic. Raises UsageError.
    """
    chosen: list[Race] = []
    for name in (*SUITE, FLAT) if ALL in names else names or [r.name for r in _MAIN]:
        if name != FLAT and name not in SUITE:
            raise UsageError(
                f"no benchmark {name!r}", remedy=f"benchmarks: {', '.join(SUITE)}, {FLAT}, {ALL}; lake alone"
            )
        chosen += flat(records) if name == FLAT else [replace(SUITE[name], workload=SUITE[name].workload.of(records))]
    return chosen
