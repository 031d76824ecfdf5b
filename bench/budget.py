"""What landing cannot do without, each part by itself: the CPU time that Sluice's own pieces take over a topic's bytes.

A process of its own, with a worker's environment, has the bytes in memory and takes part after part: record batches
(checksums, codec, decoding), JSON, the contract, Parquet. There is no Kafka in it, no Spark, no lake and no proof, so
that the time of a landing beyond the sum is the cost of all these. Pieces that one call does together share its CPU
time as they share its wall time. One landing is one pass over all parts, after a warm-up.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

import pyarrow as pa

from bench.peer_sluice import feed_of
from bench.stand import PeerTask, Ready, serve
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.landing.task import Assignment as Work
from sluice.pipelines.landing.task import share_memory
from sluice.pipelines.landing.writer import PartTarget, PartWriter
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.ports import Fetched, FetchFailed, Lake
from sluice.pipelines.records.kafka_batches.decode import BatchDecoder, DecodeOptions
from sluice.pipelines.records.rows.row_format import Formatted, quarantine_rows
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.lake import open_lake
from sluice.resources.open_ports import open_ports
from sluice.resources.registry import writers_of
from sluice.resources.spark.executor import Wiring

MOST_RECORDS, MOST_BYTES = 600_000, 48 << 20
"""Bytes of the topic, as stored in Kafka, that are kept in memory."""
Spent = Mapping[str, float]
"""CPU nanoseconds by part."""


@dataclass(frozen=True, slots=True)
class BufferedRange:
    """An offset range of the topic in memory, and its limit of rows in a task."""

    offset_range: OffsetRange
    answers: tuple[Fetched, ...]
    chunk_bytes: int


@contextmanager
def stand(task: PeerTask) -> Iterator[Ready]:
    with TemporaryDirectory() as lake:
        feed = feed_of(task, Path(lake))
        ranges = _fetch_ranges(feed)
        yield Ready(lambda _out: _parts(feed, ranges), {})


def _parts(feed: Feed, ranges: Sequence[BufferedRange]) -> dict[str, Any]:
    measure_parts(feed, ranges)  # a first call takes longer, and the caches are cold
    records, spent = measure_parts(feed, ranges)
    return {"records": records, "parts": {part: ns / records for part, ns in spent.items()}}


def _fetch_ranges(feed: Feed) -> list[BufferedRange]:
    with open_ports(feed) as ports:
        plan = preview(feed, ports, Request(RequestKind.CATCH_UP)).plan
    if plan is None:
        raise Failed("nothing is pending of the topic whose parts are to be measured", remedy="repeat; this is a bug")
    wiring = Wiring.of(feed)
    work = Work(feed.name, 0, plan.hash, plan.isolation, "", wiring.landing, wiring.limits, wiring.memory)
    ranges = first([s for task in plan.tasks for s in task.offset_ranges])
    answers: dict[int, list[Fetched]] = {i: [] for i in range(len(ranges))}
    with closing(KafkaFetcher(feed.kafka, plan.isolation)) as fetcher:
        for got in fetcher.stream(ranges, wiring.limits):
            if isinstance(got, FetchFailed):
                raise got.error
            answers[got.index].append(got)
    chunks, _ = share_memory(ranges, work)
    return [BufferedRange(s, tuple(answers[i]), chunks[s]) for i, s in enumerate(ranges)]


def first(ranges: Sequence[OffsetRange]) -> list[OffsetRange]:
    """Offset ranges of a plan in their order, up to the bytes in memory; cut where they are too large."""
    chosen: list[OffsetRange] = []
    records, size = MOST_RECORDS, MOST_BYTES
    for s in ranges:
        fit = min(s.span, records, size * s.span // max(s.estimated_bytes, 1))
        if fit > 0:
            chosen.append(replace(s, end=s.start + fit))
            records, size = records - fit, size - s.estimated_bytes * fit // s.span
    return chosen


def measure_parts(feed: Feed, ranges: Sequence[BufferedRange]) -> tuple[int, Spent]:
    """Records, and what each part took for all of them together."""
    chunks, spent = _decode(feed, ranges)
    records = sum(chunk.num_rows for _, chunk in chunks)
    rows, typed = _type_rows(feed, chunks)
    del chunks
    return records, {**spent, **typed, **_encode_rows(feed, rows)}


def _decode(
    feed: Feed, ranges: Sequence[BufferedRange]
) -> tuple[list[tuple[BufferedRange, pa.RecordBatch]], dict[str, float]]:
    chunks: list[tuple[BufferedRange, pa.RecordBatch]] = []
    wall: Counter[str] = Counter()
    begun = time.process_time_ns()
    for h in ranges:
        s, rows = h.offset_range, feed.landing.row_group_rows
        options = DecodeOptions(chunk_rows=rows, chunk_bytes=h.chunk_bytes)
        decoder = BatchDecoder(s.topic, s.partition, s.start, s.end, options)
        for got in h.answers:
            chunks += ((h, chunk) for chunk in decoder.feed(got.records, got.aborted))
        chunks += ((h, chunk) for chunk in decoder.finish())
        wall.update(decoder.timings)
    return chunks, share_cpu(time.process_time_ns() - begun, wall)


def _type_rows(
    feed: Feed, chunks: Sequence[tuple[BufferedRange, pa.RecordBatch]]
) -> tuple[list[tuple[BufferedRange, Formatted]], Spent]:
    writers = writers_of(feed, open_lake(feed), keep=False)
    form, begun, started = feed.shape.format(writers), time.process_time_ns(), time.perf_counter_ns()
    rows = [(h, piece) for h, chunk in chunks for piece in form.convert(h.offset_range, chunk)]
    took, cpu = time.perf_counter_ns() - started, time.process_time_ns() - begun
    validated = sum(piece.validate_ns for _, piece in rows)
    spent = share_cpu(cpu, {"type": took - validated, "validate": validated})
    wanted = {"type": feed.columns is not None, "validate": feed.contract is not None}
    return rows, {part: ns for part, ns in spent.items() if wanted[part]}


def _encode_rows(feed: Feed, rows: Sequence[tuple[BufferedRange, Formatted]]) -> Spent:
    """Without what hashing and writing the encoded bytes takes."""
    writers: dict[tuple[OffsetRange, PartKind], PartWriter] = {}
    contract, begun = feed.shape.format().contract, time.process_time_ns()
    for h, piece in rows:
        _write(writers, feed, h, PartKind.LANDED, piece.landed)
        if piece.quarantined is not None:
            _write(writers, feed, h, PartKind.QUARANTINED, quarantine_rows(piece.quarantined, 0, contract))
    for writer in writers.values():
        writer.close()
    wall = {"encode": sum(w.encode_ns for w in writers.values()), "write": sum(w.write_ns for w in writers.values())}
    return {"encode": share_cpu(time.process_time_ns() - begun, wall)["encode"]}


def _write(
    writers: dict[tuple[OffsetRange, PartKind], PartWriter],
    feed: Feed,
    h: BufferedRange,
    kind: PartKind,
    rows: pa.RecordBatch,
) -> None:
    key = h.offset_range, kind
    if key not in writers:
        target = PartTarget(feed.name, 0, "", "", h.offset_range, kind)
        writers[key] = PartWriter(cast(Lake, _Nowhere()), target, rows.schema, feed.landing, h.chunk_bytes)
    writers[key].write(rows)


class _Nowhere:
    """A lake that keeps nothing."""

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        yield cast(BinaryIO, _Sink())


class _Sink(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def share_cpu(cpu: float, wall: Mapping[str, int]) -> dict[str, float]:
    """CPU time by part, of parts with these wall times."""
    total = sum(wall.values()) or 1
    return {part: cpu * ns / total for part, ns in wall.items()}


if __name__ == "__main__":
    serve(stand)
