"""Whether a peer landed what it had to: every row, with its offset, key, value, time and headers.

A digest is a count and a sum of row hashes for each partition, by DuckDB; it does not depend on the order of rows or on
how they lie over files. What it must be is computed from what was sent, never from what anybody read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from sluice.bench.workloads import TRACE
from sluice.pipelines.errors import ProofFailed

_HEADERS = 'STRUCT("key" VARCHAR, "value" BLOB)[]'
_DIGEST = """
    SELECT partition::INT, count(*),
        sum(hash("offset"::BIGINT, key::BLOB, value::BLOB, stamp::BIGINT, headers)::HUGEINT)
    FROM ({rows}) GROUP BY ALL
"""
_SENT = f"""
    SELECT {{partition}} AS partition, "offset", key, value, timestamp AS stamp,
        CASE WHEN trace IS NULL THEN [] ELSE [{{{{'key': '{TRACE}', 'value': trace::BLOB}}}}] END::{_HEADERS} AS headers
    FROM sent
"""
_LANDED = f"""
    SELECT partition, "offset", key, value, epoch_ms(timestamp) AS stamp, coalesce(headers, [])::{_HEADERS} AS headers
    FROM read_parquet($files) WHERE topic = $topic AND "timestampType" = 0
"""


@dataclass(frozen=True, slots=True)
class Digest:
    """What one partition holds, in two numbers."""

    rows: int = 0
    sum: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.rows + other.rows, self.sum + other.sum)


def digest_of_sent(partition: int, rows: pa.Table) -> Digest:
    """Of rows as workloads make them."""
    with duckdb.connect() as db:
        db.register("sent", rows)
        return _digests(db, _SENT.format(partition=partition), {}).get(partition, Digest())


def digests_of_landed(files: Iterable[Path], topic: str) -> dict[int, Digest]:
    """By partition, of Parquet files with the columns of Spark's Kafka source."""
    with duckdb.connect() as db:
        return _digests(db, _LANDED, {"files": [str(f) for f in files], "topic": topic})


def _digests(db: duckdb.DuckDBPyConnection, rows: str, given: Mapping[str, object]) -> dict[int, Digest]:
    found = db.execute(_DIGEST.format(rows=rows), given).fetchall()
    return {int(partition): Digest(int(count), int(total)) for partition, count, total in found}


def check_landed(peer: str, folder: Path, topic: str, expected: Mapping[int, Digest]) -> tuple[int, int]:
    """Parquet files and their bytes below the folder. Raises ProofFailed unless they hold exactly what is expected."""
    files = sorted(folder.rglob("*.parquet"))
    found = digests_of_landed(files, topic) if files else {}
    for partition in sorted(expected.keys() | found.keys()):
        wanted, got = expected.get(partition, Digest()), found.get(partition, Digest())
        if wanted != got:
            what = f"{got.rows:,} rows for {wanted.rows:,}" if got.rows != wanted.rows else "other rows than were sent"
            raise ProofFailed(
                f"{peer} landed {what} in {topic}:{partition}",
                remedy="its time does not count; this is a bug in the peer or in the benchmark",
                topic=topic,
                partition=partition,
            )
    return len(files), sum(f.stat().st_size for f in files)
