"""Reads records of a feed exactly as a run would land them, without landing them.

Promises: parts are written to the given scratch lake only. No group is queried and no offset moves. Reading is bounded
in records, and in bytes as far as brokers report the sizes of their logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.errors import Failed, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.lake import parquet
from sluice.pipelines.landing.task import Assignment, Tools, run_task
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import FetchLimits, PartitionState, Range, TopicPartition, union
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind, Task
from sluice.pipelines.model.receipts import (
    Counts,
    Part,
    PartKind,
    Progress,
    RangeFailure,
    Receipt,
    Reporter,
    TaskTraffic,
    sum_counts,
)
from sluice.pipelines.planning.windows import find_range_between
from sluice.pipelines.ports import Cluster, Fetched, Fetcher, FetchFailed, Lake, Ports
from sluice.pipelines.records.rows.row_format import WITHHELD, offset_column
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.schema import KAFKA
from sluice.pipelines.validation.batch_expectations import count_earlier_rows

TOMBSTONE = f"{KAFKA}tombstone"
NAME = "sample"
"""The feed's name in the scratch lake."""
MOST_BYTES = 256 << 20
"""The bytes of a sample, as the brokers hold it."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The newest records of these windows (their starts, ms) and offsets; without both, of the whole log. `shape`: that
    of the whole feed, also for a sample of one output."""

    shape: Shape
    records: int
    windows: Sequence[int]
    offsets: Mapping[TopicPartition, Sequence[Range]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Records made into rows of the shape, in a scratch lake; of an output, its own. `complete`: these are all
    requested records, not only the newest. `earlier`: the rows of earlier batches, for a sample of one window."""

    receipts: tuple[Receipt, ...]
    lake: Lake
    shape: Shape
    writers: WriterSchemas | None
    complete: bool
    earlier: Sequence[int]

    @property
    def counts(self) -> Counts:
        return sum_counts(self.receipts)

    @property
    def records(self) -> int:
        return self.counts.records

    @property
    def quarantine_files(self) -> list[str]:
        return [p.staged for r in self.receipts for p in r.of(PartKind.QUARANTINED)]


def build_sample_shape(feed: Feed, dataset: Feed, contract: Contract | None) -> Shape:
    """Returns the shape of records of a feed, or of the outputs of which `dataset` is one: only its rows have the
    contract."""
    shape = replace(dataset.shape, contract=contract, dropping=False)
    if (split := feed.shape.split) is None:
        return shape
    others = {name: replace(own, contract=None, dropping=False) for name, own in split.shapes.items()}
    return replace(feed.shape, dropping=False, split=replace(split, shapes=others | {dataset.output: shape}))


def take_sample(
    feed: Feed, ports: Ports, request: SampleRequest, lake: Lake, writers: WriterSchemas | None, report: Reporter
) -> Sample:
    """Read the requested records into the scratch lake.

    Raises UsageError, KafkaUnavailable, UnknownTopic, and Failed if there are no records or one cannot be read.
    """
    report(Progress("querying Kafka"))
    ranges, complete, earlier = _choose_ranges(feed, ports, request)
    shape, limits, memory = request.shape, feed.fetch.limits(), feed.task_memory
    settings = (NAME, 0, "", feed.isolation, NAME, feed.landing, limits, memory, shape.name)
    work = Assignment(*settings, dropping=shape.dropping)
    with ports.open_fetcher(feed.isolation) as fetcher:
        tools = Tools(ReportingFetcher(fetcher, report), lake, shape.format(writers))
        outcomes = run_task(Task(0, -1, ranges), work, tools)
    for failed in (o for o in outcomes if isinstance(o, RangeFailure)):
        tp = failed.offset_range.tp
        raise Failed(failed.message, remedy=failed.remedy, topic=tp.topic, partition=tp.partition)
    receipts, why = tuple(o for o in outcomes if isinstance(o, Receipt)), "were compacted away"
    if shape.split and feed.output:
        receipts, why = tuple(shape.select(r, feed.output) for r in receipts), "none of this output"
        shape, earlier = shape.datasets[feed.output], ()
    sample = Sample(receipts, lake, shape, writers, complete, earlier)
    if not sample.records:
        raise _build_no_records(feed, f"the offsets hold only control records, or {why}")
    return sample


# -- which offsets


def _choose_ranges(
    feed: Feed, ports: Ports, request: SampleRequest
) -> tuple[tuple[OffsetRange, ...], bool, Sequence[int]]:
    """Returns the ranges to read, True if these are all, and the number of rows of earlier batches."""
    spans, ranges = request.windows, {tp: [*r] for tp, r in request.offsets.items()}
    state = Ledger(ports.lake, feed.stored, ports.clock).read() if spans else State()
    topics = match(feed.topics, ports.cluster.topics())
    partitions = ports.cluster.partitions(topics, feed.isolation)
    for start in spans:
        end = feed.window.end_of(start)
        for tp, span in find_window_ranges(state, ports.cluster, partitions, start, end).items():
            ranges.setdefault(tp, []).append(span)
    if unknown := ranges.keys() - {p.tp for p in partitions}:
        raise UsageError(f"{min(unknown)} is not a partition of {feed.name}", remedy=f"it reads {feed.topics}")
    bounded = bool(spans or request.offsets)
    all_ = to_offset_ranges(partitions, {tp: union(r) for tp, r in ranges.items()} if bounded else None)
    if not all_:
        where = f"{', '.join(topics)}{' in this range' if bounded else ''}"
        raise _build_no_records(feed, f"Kafka has no stable record of {where}")
    chosen = choose_newest(all_, request.records, MOST_BYTES)
    # The windows to compare with.
    earlier = count_earlier_rows(state, Request(RequestKind.WINDOW), state.number) if len(spans) == 1 else []
    return chosen, bounded and list(chosen) == all_, earlier


def _build_no_records(feed: Feed, why: str) -> Failed:
    return Failed(
        f"no records to sample: {why}",
        remedy=f"choose other windows or offsets; sluice plan {feed.name} lists the records in Kafka",
    )


def find_window_ranges(
    state: State, cluster: Cluster, partitions: Sequence[PartitionState], start: int, end: int
) -> dict[TopicPartition, Range]:
    """Returns the offsets between two times (ms): as pinned in the ledger, or else from Kafka."""
    pinned = {p.tp: _find_window_range(state, p, start, end) for p in partitions}
    unknown = [p for p in partitions if pinned[p.tp] is None]
    first, last = (cluster.offsets_at({p.tp: time for p in unknown}) if unknown else {} for time in (start, end))
    ranges = {tp: r for tp, r in pinned.items() if r is not None}
    for p in unknown:
        a, b = (p.high_watermark if hit is None else hit.offset for hit in (first.get(p.tp), last.get(p.tp)))
        ranges[p.tp] = Range(a, max(a, b))
    return ranges


def _find_window_range(state: State, p: PartitionState, start: int, end: int) -> Range | None:
    key = state.current.get(p.tp)
    return find_range_between(state, key, start, end) if key and key.topic_id == p.topic_id else None


def to_offset_ranges(
    partitions: Iterable[PartitionState], ranges: Mapping[TopicPartition, Sequence[Range]] | None = None
) -> list[OffsetRange]:
    """The parts of `ranges` (None: of everything) that are stable and in Kafka, as offset ranges with estimated
    bytes.
    """
    out = []
    for p in partitions:
        per_record = (p.log_bytes or 0) / max(p.high_watermark - p.log_start, 1)
        for r in [Range(p.log_start, p.last_stable_offset)] if ranges is None else ranges.get(p.tp, ()):
            start, end = max(r.start, p.log_start), min(r.end, p.last_stable_offset)
            if start < end:
                size = int((end - start) * per_record)
                out.append(OffsetRange(p.topic, p.partition, p.topic_id, start, end, p.leader_epoch, size))
    return out


def choose_newest(ranges: Sequence[OffsetRange], records: int, size: int) -> tuple[OffsetRange, ...]:
    """The last offsets of each offset range, spread evenly: at most `records` in all, and at most about `size`
    bytes.
    """
    size_of_ranges = sum(s.estimated_bytes for s in ranges)
    remaining = (
        records if size_of_ranges <= size else min(records, sum(s.span for s in ranges) * size // size_of_ranges)
    )
    chosen: dict[OffsetRange, OffsetRange] = {}
    for i, s in enumerate(sorted(ranges, key=lambda s: s.span)):
        if take := min(s.span, remaining // (len(ranges) - i)):
            chosen[s] = replace(s, start=s.end - take, estimated_bytes=s.estimated_bytes * take // s.span)
            remaining -= take
    return tuple(chosen[s] for s in ranges if s in chosen)


# -- reading them


def read_landed(receipts: Iterable[Receipt], lake: Lake, names: Sequence[str]) -> pa.Table:
    """These columns of the rows that would land. Leaves out tombstones of typed feeds."""
    files = []
    for part in (p for r in receipts for p in r.of(PartKind.LANDED)):
        with lake.open(part.staged) as file:
            read = pq.ParquetFile(file)
            extra = [TOMBSTONE] if TOMBSTONE in read.schema_arrow.names else []
            first = part.shared.first if part.shared else 0
            rows = read.read(columns=[*names, *extra]).slice(first, part.rows)
        files.append(rows.filter(pc.invert(rows.column(TOMBSTONE))).select(names) if extra else rows)
    return pa.concat_tables(files) if files else pa.table({})


def read_rows_at(
    positions: Iterable[str],
    shape: Shape,
    receipts: Iterable[Receipt],
    lake: Lake,
    writers: WriterSchemas | None = None,
) -> dict[str, dict[str, pa.Scalar]]:
    """The typed rows of some records, by place (`topic:partition:offset`), each a mapping of column to value.

    Includes records that the contract put into quarantine. Leaves out records that cannot be typed, or have no value
    there because the feed protects fields.
    """
    wanted: dict[str, set[int]] = {}
    for position in positions:
        tp, _, offset = position.rpartition(":")
        wanted.setdefault(tp, set()).add(int(offset))
    bare, rows_by_position = replace(shape, contract=None).format(writers), {}
    for r in receipts:
        for part in r.parts if str(r.offset_range.tp) in wanted else ():
            rows = _read_rows_at(part, lake, wanted[str(r.offset_range.tp)])
            if part.kind is PartKind.QUARANTINED:
                rows = rows.filter(rows.column(WITHHELD.name).is_null())
                if not rows.num_rows:
                    continue
                chunk = rows.select(_DECODED).combine_chunks().to_batches()[0]
                rows = pa.Table.from_batches([f.landed for f in bare.convert(r.offset_range, chunk)])
            for row in range(rows.num_rows):
                cells = {name: rows.column(name)[row] for name in rows.column_names}
                rows_by_position[f"{r.offset_range.tp}:{cells[offset_column(rows.schema)].as_py()}"] = cells
    return rows_by_position


_DECODED = ("key", "value", "offset", "timestamp", "timestampType", "headers")


def _read_rows_at(part: Part, lake: Lake, offsets: set[int]) -> pa.Table:
    with lake.open(part.staged) as file:
        read = pq.ParquetFile(file)
        name = offset_column(read.schema_arrow)
        groups, before = parquet.find_row_groups(read.metadata, part)
        own = parquet.own_rows(read.iter_batches(row_groups=groups), part, before)
        batches = (b.filter(pc.is_in(b.column(name), pa.array([*offsets], pa.int64()))) for b in own)
        return pa.Table.from_batches([b for b in batches if b.num_rows], schema=read.schema_arrow)


class ReportingFetcher:
    """A fetcher that reports its progress."""

    def __init__(self, behind: Fetcher, report: Reporter) -> None:
        self._behind, self._report = behind, report

    def stream(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        at, total = [s.start for s in ranges], sum(s.span for s in ranges)
        with closing(cast(Any, self._behind.stream(ranges, limits))) as stream:
            for got in stream:
                if isinstance(got, Fetched):
                    at[got.index] = min(got.next_position, ranges[got.index].end)
                    done = sum(at) - sum(s.start for s in ranges)
                    self._report(Progress("read", done, total))
                yield got

    def traffic(self) -> TaskTraffic:
        return self._behind.traffic()

    def close(self) -> None:
        self._behind.close()
