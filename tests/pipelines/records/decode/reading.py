"""Reads logs in memory like a task: their bytes pass through the decoder into plain rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from sluice.pipelines.records.kafka_batches.decode import SCHEMA, BatchDecoder, DecodeOptions, next_position
from sluice.testing.logs import HUGE, Log, Row


def make_decoder(start: int = 0, end: int = HUGE, **options: Any) -> BatchDecoder:
    return BatchDecoder(
        "orders", 3, start, end, DecodeOptions(**{"chunk_rows": 1000, "chunk_bytes": 1 << 20} | options)
    )


def to_rows(chunks: Iterable[pa.RecordBatch]) -> list[Row]:
    """Convert chunks to plain rows, times as numbers. Every chunk must be valid Arrow."""
    out: list[Row] = []
    for chunk in chunks:
        chunk.validate(full=True)
        assert chunk.schema == SCHEMA
        times = chunk.column("timestamp").cast(pa.int64())
        out += chunk.set_column(3, "timestamp", times).to_pylist()
    return out


def decode(data: bytes, aborted: Sequence[tuple[int, int]] = (), **options: Any) -> list[Row]:
    """Decode all rows of one response."""
    d = make_decoder(**options)
    return to_rows([*d.feed(data, aborted), *d.finish()])


def read(source: Log, d: BatchDecoder, end: int, sizes: Iterable[int] = ()) -> list[Row]:
    """Fetch and decode from a log until the position reaches `end`, with responses cut at the given sizes."""
    out, wanted = [], iter(sizes)
    while d.position < end:
        limit = next(wanted, HUGE)
        data, aborted = source.fetch(d.position, limit)
        reached = next_position(data, d.position)
        if reached == d.position:
            data, aborted = source.fetch(d.position)
        out += to_rows(d.feed(data, aborted))
    return out + to_rows(d.finish())
