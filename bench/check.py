"""Checks that a peer landed every row, with its offset, key, value, time and headers.

A digest is a count and two sums of row hashes for each partition, by DuckDB; it does not depend on the order of rows or
on how they lie over files. The expected value is computed from the sent records, never from read ones. A peer that
lands no headers is held to everything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import pyarrow as pa

from bench.types import duckdb_texts, duckdb_type, fields
from bench.workloads import TRACE
from sluice.pipelines.errors import ProofFailed
from sluice.pipelines.schema.schema import Field, Kind

_HEADERS = 'STRUCT("key" VARCHAR, "value" BLOB)[]'
_DIGEST = """
    SELECT partition::INT, count(*),
        sum(hash("offset"::BIGINT, key::BLOB, value, stamp::BIGINT)::HUGEINT),
        sum(hash("offset"::BIGINT, headers)::HUGEINT)
    FROM ({rows}) GROUP BY ALL
"""
_SENT = f"""
    SELECT {{partition}} AS partition, "offset", encode(key) AS key, {{value}} AS value, timestamp AS stamp,
        CASE WHEN trace IS NULL THEN [] ELSE [{{{{'key': '{TRACE}', 'value': encode(trace)}}}}] END::{_HEADERS}
            AS headers
    FROM (SELECT *, {{read}} AS read FROM sent)
"""
_LANDED = f"""
    SELECT {{partition}} AS partition, {{offset}} AS "offset", {{key}} AS key, {{value}} AS value,
        epoch_ms({{time}}) AS stamp, coalesce({{headers}}, [])::{_HEADERS} AS headers
    FROM read_parquet($files, union_by_name = true) WHERE {{topic}} = $topic AND {{time_type}} = 0
"""
Schema = Sequence[tuple[str, str]]


VERSION = f"{hashlib.sha256((_DIGEST + _SENT).encode()).hexdigest()[:6]}-duckdb{duckdb.__version__}"
"""Of what digests say: DuckDB's row hash is stable within a version only."""


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """How a peer's rows lie: SQL for the compared values, and which files below its folder hold them.

    `value` is for rows that are not typed; typed fields are columns by their names. `headers` empty: none are landed.
    `typed_key` replaces `key` next to typed fields.
    """

    topic: str
    partition: str
    offset: str
    key: str
    value: str
    time: str
    time_type: str
    headers: str
    files: str = "**/*.parquet"
    typed_key: str = ""


def _of_spark(prefix: str) -> PeerLayout:
    """The columns of Spark's Kafka source."""
    names = ("topic", "partition", "offset", "key", "value", "timestamp", "timestampType", "headers")
    return PeerLayout(*(f'"{prefix}{name}"' for name in names))


RAW, TYPED = _of_spark(""), _of_spark("kafka_")
"""The columns of Spark's Kafka source; next to typed fields they carry a prefix."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The contents of one partition, in three numbers."""

    rows: int = 0
    sum: int = 0
    headers: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.rows + other.rows, self.sum + other.sum, self.headers + other.headers)


def digest_of_sent(partition: int, rows: pa.Table, schema: Schema = ()) -> Digest:
    """Of rows as workloads make them, their values typed by DuckDB's own JSON reader when there is a schema."""
    columns = fields(schema)
    shape = json.dumps({f.name: duckdb_texts(f.type) for f in columns})
    read = f"from_json(value::VARCHAR, '{shape}')" if columns else "encode(value)"
    value = _row([f'read."{f.name}"' for f in columns], columns) if columns else "read"
    with _database() as db:
        db.register("sent", rows)
        sent = _SENT.format(partition=partition, read=read, value=value)
        return _digests(db, sent, {}).get(partition, Digest())


def digests_of_landed(
    files: Iterable[Path], topic: str, schema: Schema = (), layout: PeerLayout | None = None
) -> dict[int, Digest]:
    """By partition, of Parquet files as Spark's Kafka source would lay them out, unless another layout is given."""
    columns = fields(schema)
    lies = layout or (TYPED if columns else RAW)
    value = _row([f'"{f.name}"' for f in columns], columns) if columns else f"({lies.value})::BLOB"
    renames = {name: getattr(lies, name) for name in ("topic", "partition", "offset", "key", "time", "time_type")}
    renames["key"] = (lies.typed_key if columns else "") or lies.key
    with _database() as db:
        landed = _LANDED.format(**renames, value=value, headers=lies.headers or "NULL")
        return _digests(db, landed, {"files": [str(f) for f in files], "topic": topic})


def _database() -> duckdb.DuckDBPyConnection:
    db = duckdb.connect()
    db.execute("SET timezone = 'UTC'")
    return db


def _row(columns: Iterable[str], typed: Sequence[Field]) -> str:
    """SQL for the typed columns as they are compared."""
    return f"row({', '.join(_typed_column(c, f) for c, f in zip(columns, typed, strict=True))})"


def _typed_column(column: str, field: Field) -> str:
    typed = f"({column})::{duckdb_type(field.type)}"
    # The hash of a list takes an empty one, one of a null and none at all for the same: their texts differ.
    return f"to_json({typed})::VARCHAR" if field.type.kind in (Kind.LIST, Kind.STRUCT) else typed


def _digests(db: duckdb.DuckDBPyConnection, rows: str, parameters: Mapping[str, object]) -> dict[int, Digest]:
    rows_of_digests = db.execute(_DIGEST.format(rows=rows), parameters).fetchall()
    return {int(partition): Digest(*map(int, sums)) for partition, *sums in rows_of_digests}


def check_landed(
    peer: str,
    folder: Path,
    topic: str,
    expected: Mapping[int, Digest],
    schema: Schema = (),
    layout: PeerLayout | None = None,
) -> tuple[int, int]:
    """Parquet files and their bytes below the folder. Raises ProofFailed unless they hold exactly the expected rows."""
    files = sorted(folder.glob(layout.files if layout else RAW.files))
    digests = digests_of_landed(files, topic, schema, layout) if files else {}
    headers = layout is None or bool(layout.headers)
    for partition in sorted(expected.keys() | digests.keys()):
        wanted, got = (_without_headers(of.get(partition, Digest()), headers) for of in (expected, digests))
        if wanted != got:
            what = f"{got.rows:,} rows for {wanted.rows:,}" if got.rows != wanted.rows else "other rows than were sent"
            raise ProofFailed(
                f"{peer} landed {what} in {topic}:{partition}",
                remedy="its time does not count; this is a bug in the peer or in the benchmark",
                topic=topic,
                partition=partition,
            )
    return len(files), sum(f.stat().st_size for f in files)


def _without_headers(digest: Digest, headers: bool) -> Digest:
    return digest if headers else replace(digest, headers=0)
