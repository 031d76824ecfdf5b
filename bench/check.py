"""Whether a peer landed what it had to: every row, with its offset, key, value, time and headers.

A digest is a count and a sum of row hashes for each partition, by DuckDB; it does not depend on the order of rows or on
how they lie over files. What it must be is computed from what was sent, never from what anybody read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from sluice.bench.workloads import TRACE
from sluice.pipelines.errors import ProofFailed

_HEADERS = 'STRUCT("key" VARCHAR, "value" BLOB)[]'
_DIGEST = """
    SELECT partition::INT, count(*),
        sum(hash("offset"::BIGINT, key::BLOB, value, stamp::BIGINT, headers)::HUGEINT)
    FROM ({rows}) GROUP BY ALL
"""
_SENT = f"""
    SELECT {{partition}} AS partition, "offset", key, {{value}} AS value, timestamp AS stamp,
        CASE WHEN trace IS NULL THEN [] ELSE [{{{{'key': '{TRACE}', 'value': trace::BLOB}}}}] END::{_HEADERS} AS headers
    FROM sent
"""
_LANDED = f"""
    SELECT "{{k}}partition" AS partition, "{{k}}offset" AS "offset", "{{k}}key" AS key, {{value}} AS value,
        epoch_ms("{{k}}timestamp") AS stamp, coalesce("{{k}}headers", [])::{_HEADERS} AS headers
    FROM read_parquet($files) WHERE "{{k}}topic" = $topic AND "{{k}}timestampType" = 0
"""
Schema = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Digest:
    """What one partition holds, in two numbers."""

    rows: int = 0
    sum: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.rows + other.rows, self.sum + other.sum)


def digest_of_sent(partition: int, rows: pa.Table, schema: Schema = ()) -> Digest:
    """Of rows as workloads make them, their values typed by DuckDB's own JSON reader when there is a schema."""
    with duckdb.connect() as db:
        db.register("sent", rows)
        value = _row((f"value->>'{name}'", kind) for name, kind in schema)
        return _digests(db, _SENT.format(partition=partition, value=value), {}).get(partition, Digest())


def digests_of_landed(files: Iterable[Path], topic: str, schema: Schema = ()) -> dict[int, Digest]:
    """By partition, of Parquet files with the columns of Spark's Kafka source; typed: under `kafka_`, beside fields."""
    with duckdb.connect() as db:
        db.execute("SET timezone = 'UTC'")
        landed = _LANDED.format(k="kafka_" if schema else "", value=_row(schema))
        return _digests(db, landed, {"files": [str(f) for f in files], "topic": topic})


def _row(columns: Iterable[tuple[str, str]]) -> str:
    """SQL for what is compared of a value: its typed columns, or its bytes."""
    typed = [f"epoch_us(({c})::TIMESTAMPTZ)" if kind == "timestamp" else f"({c})::{kind}" for c, kind in columns]
    return f"row({', '.join(typed)})" if typed else "value::BLOB"


def _digests(db: duckdb.DuckDBPyConnection, rows: str, given: Mapping[str, object]) -> dict[int, Digest]:
    found = db.execute(_DIGEST.format(rows=rows), given).fetchall()
    return {int(partition): Digest(int(count), int(total)) for partition, count, total in found}


def check_landed(
    peer: str, folder: Path, topic: str, expected: Mapping[int, Digest], schema: Schema = ()
) -> tuple[int, int]:
    """Parquet files and their bytes below the folder. Raises ProofFailed unless they hold exactly what is expected."""
    files = sorted(folder.rglob("*.parquet"))
    found = digests_of_landed(files, topic, schema) if files else {}
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
