"""The benchmarks by name. A new one is an entry here, over a workload and peers of their own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice.bench import workloads
from sluice.bench.peers import CONFLUENT_KAFKA, DLT, KAFKA_PYTHON, SLUICE, SPARK
from sluice.bench.race import Race
from sluice.bench.workloads import Workload
from sluice.pipelines.errors import UsageError

ALL = "all"
_LOOPS = (CONFLUENT_KAFKA, KAFKA_PYTHON)
_MAIN = (
    Race("raw", "all of Kafka's columns into Parquet (zstd 1)", workloads.ORDERS, (SLUICE, SPARK, *_LOOPS)),
    Race(
        "typed",
        "9 fields of JSON typed, and Kafka's other columns, into Parquet (zstd 1)",
        workloads.TYPED_ORDERS,
        (SLUICE, SPARK, *_LOOPS),
    ),
    Race(
        "contract",
        "as typed, by Sluice with a contract of 10 row expectations, by the other with no validation at all",
        workloads.CHECKED_ORDERS,
        (SLUICE, SPARK),
    ),
)


def _typed(name: str, workload: Workload) -> Race:
    return Race(name, f"{len(workload.schema)} fields of JSON typed", workload, (SLUICE, SPARK))


_OTHERS = (
    _typed("uncompressed", workloads.UNCOMPRESSED),
    _typed("gzip", workloads.GZIP),
    _typed("snappy", workloads.SNAPPY),
    _typed("zstd", workloads.ZSTD),
    _typed("small", workloads.SMALL),
    _typed("large", workloads.LARGE),
    _typed("nested", workloads.NESTED),
    _typed("escapes", workloads.ESCAPES),
    _typed("partitions", workloads.PARTITIONS),
    _typed("skewed", workloads.SKEWED),
    _typed("brokers", workloads.BROKERS),
    Race("dlt", "Kafka's columns into Parquet; dlt's are without headers", workloads.FEW_ORDERS, (SLUICE, SPARK, DLT)),
)
SUITE: Mapping[str, Race] = {race.name: race for race in (*_MAIN, *_OTHERS)}


def races(names: Sequence[str]) -> list[Race]:
    """The benchmarks of these names, `all` of them, or, when there are no names, the main ones. Raises UsageError."""
    if ALL in names:
        return list(SUITE.values())
    for name in names:
        if name not in SUITE:
            raise UsageError(f"no benchmark {name!r}", remedy=f"benchmarks: {', '.join(SUITE)}, {ALL}")
    return [SUITE[name] for name in names] or list(_MAIN)
