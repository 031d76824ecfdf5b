"""The benchmarks by name. A new one is an entry here, over a workload and peers of their own modules."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.bench.peers import KAFKA_PYTHON, SLUICE, SPARK
from sluice.bench.race import Race
from sluice.bench.workloads import CHECKED_ORDERS, ORDERS, TYPED_ORDERS
from sluice.pipelines.errors import UsageError

RAW = Race(
    name="raw",
    about="all of Kafka's columns into Parquet (zstd 1)",
    workload=ORDERS,
    peers=(SLUICE, SPARK, KAFKA_PYTHON),
)
TYPED = Race(
    name="typed",
    about="9 fields of JSON typed, and Kafka's other columns, into Parquet (zstd 1)",
    workload=TYPED_ORDERS,
    peers=(SLUICE, SPARK),
)
CONTRACT = Race(
    name="contract",
    about="as typed, by Sluice with a contract of 10 row expectations, by the other with no validation at all",
    workload=CHECKED_ORDERS,
    peers=(SLUICE, SPARK),
)
SUITE: Mapping[str, Race] = {race.name: race for race in (RAW, TYPED, CONTRACT)}


def race(name: str) -> Race:
    """The benchmark of that name. Raises UsageError."""
    if name not in SUITE:
        raise UsageError(f"no benchmark {name!r}", remedy=f"benchmarks: {', '.join(SUITE)}")
    return SUITE[name]
