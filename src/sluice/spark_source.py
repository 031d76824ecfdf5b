"""`spark.read.format("sluice")`: landed windows, or pinned ranges of Kafka, as a DataFrame.

    spark.dataSource.register(SluiceSource)
    spark.read.format("sluice").option("feed", "orders").option("window", "2026-11-20T14").load()
    spark.read.format("sluice").option("feed", "orders").option("offsets", "orders:0:100-200, orders:1:0-50").load()

Windows are read from their Parquet parts, by the ledger: one that is not complete raises WindowIncomplete. Ranges are
read from their leaders by Sluice's own fetcher, exactly `[start, end)`, aborted and control records left out as the
feed's isolation says, with the columns of Spark's Kafka source; a range that Kafka does not hold, or that is not stable
yet, is refused. Both are planned where the driver is and carried out on the executors, a task at a time in bounded
memory. Nothing is written, no group is joined, no offset committed.

Needs PySpark 4.0 or newer: 3.5 has no data sources in Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
except ModuleNotFoundError as error:
    raise ImportError(
        "sluice.spark_source needs PySpark 4.0 or newer; sluice.read(…).spark(session) works with 3.5, too",
        name=error.name,
    ) from None

from sluice.pipelines.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.model.kafka import Isolation
    from sluice.pipelines.model.plans import Plan, Task
    from sluice.reading import Windows
    from sluice.resources.spark.executor import Wiring
    from sluice.resources.spark.parts import Share

OPTIONS = ("feed", "project", "window", "from", "to", "kind", "offsets")
RANGE_BYTES = 64 << 20
"""Of a range that one task reads, as far as the cluster tells."""


class SluiceSource(DataSource):
    """Options: `feed`; `window`, or `from` and `to`, or `offsets`; `kind` (`landed`, `quarantined`) of windows;
    `project`, the folder that holds `feeds/` (the one Spark was started in, or `$SLUICE_PROJECT`).
    """

    @classmethod
    def name(cls) -> str:
        return "sluice"

    def schema(self) -> StructType:
        from sluice import reading
        from sluice.resources.spark import parts

        options = _SourceOptions.of(self.options)
        if options.offsets:
            from sluice.pipelines.records.rows.row_format import RawFormat

            return parts.spark_schema(RawFormat.schema)
        return parts.spark_schema(reading.schema_of(options.feed, reading.parse_kind(options.kind)))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = _SourceOptions.of(self.options)
        return _KafkaReader(options, schema) if options.offsets else _LandedReader(options.windows(), schema)


@dataclass(frozen=True, slots=True)
class _SourceOptions:
    """The options, understood."""

    feed: Feed
    window: str | None
    start: str | None
    end: str | None
    offsets: str | None
    kind: str

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _SourceOptions:
        """Raises UsageError for options that are unknown, missing or contradict each other."""
        from pathlib import Path

        from sluice.resources.project import Project

        values = {name.lower(): value for name, value in options.items()}
        if unknown := sorted(values.keys() - set(OPTIONS)):
            raise UsageError(f"the source has no option {', '.join(unknown)}", remedy=f"it has {', '.join(OPTIONS)}")
        if "feed" not in values:
            raise UsageError("no feed", remedy='name one: .option("feed", "orders")')
        ways = [name for name in ("window", "from", "offsets") if name in values]
        if len(ways) != 1 or ("to" in values and "from" not in values):
            raise UsageError(
                f"what to read is not clear from {', '.join(sorted(values))}",
                remedy="give one of: `window`; `from` and `to`; `offsets`",
            )
        project = Project.find(Path(values["project"]) if values.get("project") else None)
        find_feed = project.feed if "offsets" in values else project.readable_feed
        feed = find_feed(values["feed"])
        kind = values.get("kind", "landed")
        return cls(feed, values.get("window"), values.get("from"), values.get("to"), values.get("offsets"), kind)

    def windows(self) -> Windows:
        from sluice import reading

        if self.start and not self.end:
            raise UsageError("`from` without `to`", remedy="say which window is the first to be left out")
        return reading.of_feed(self.feed, self.window or self.start or "", to=self.end, kind=self.kind)


# -- landed windows


@dataclass(frozen=True)
class _SharePartition(InputPartition):
    share: Share


class _LandedReader(DataSourceReader):
    """Rows of the windows' files, in Spark's types."""

    def __init__(self, windows: Windows, schema: StructType) -> None:
        from sluice.resources.lake import open_lake

        self._lake, self._files, self._schema = open_lake(windows.feed), windows.files, schema

    def partitions(self) -> Sequence[InputPartition]:
        from sluice.resources.spark.parts import shares

        return [_SharePartition(share) for share in shares(self._lake, self._files)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from sluice.resources.spark.parts import rows

        return rows(self._lake, partition.share, self._schema) if isinstance(partition, _SharePartition) else iter(())


# -- pinned ranges of Kafka


@dataclass(frozen=True)
class _TaskPartition(InputPartition):
    """Work of one task on one leader."""

    task: Task


class _KafkaReader(DataSourceReader):
    """Records of exactly the ranges that were asked for, as they are in Kafka."""

    def __init__(self, options: _SourceOptions, schema: StructType) -> None:
        from sluice.resources.spark.executor import Wiring

        self._feed, self._asked = options.feed, options.offsets or ""
        self._wiring, self._isolation, self._schema = Wiring.of(options.feed), options.feed.isolation, schema

    def partitions(self) -> Sequence[InputPartition]:
        return [_TaskPartition(task) for task in _plan_ranges(self._feed, self._asked).tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from sluice.resources.spark.parts import arrow_schema, conform

        target = arrow_schema(self._schema)
        if isinstance(partition, _TaskPartition):
            for rows in _records(partition.task, self._wiring, self._isolation):
                yield conform(rows, target)


def _plan_ranges(feed: Feed, offsets: str) -> Plan:
    """The ranges, cut and packed by leader as a batch's are. Raises UsageError, OffsetsLost, KafkaUnavailable."""
    from sluice.pipelines.ledger import State
    from sluice.pipelines.model.plans import Plan, Request, RequestKind, parse_offset_range
    from sluice.pipelines.planning import plan as planning
    from sluice.pipelines.planning.assignment import Sizing
    from sluice.pipelines.planning.origins import explain_out_of_range, find_key
    from sluice.resources.kafka.cluster.cluster import KafkaCluster

    if feed.protect:
        raise UsageError(
            f"{feed.name} protects fields, and records as they came would show them",
            remedy="read complete windows: the option `window` instead of `offsets`",
        )
    request = Request(RequestKind.OFFSETS, tuple(parse_offset_range(text.strip()) for text in offsets.split(",")))
    # An empty ledger: neither boundaries nor landed ranges cut or shorten the requested ranges.
    nothing = State()
    with closing(KafkaCluster(feed.kafka)) as cluster:
        states = cluster.partitions(sorted({r.topic for r in request.ranges}), feed.isolation)
        pending, _ = planning.find_pending_ranges(
            request, nothing, {find_key(nothing, p): p for p in states}, feed.window
        )
        for o in pending:
            if o.lost and (lost := explain_out_of_range(o.lost[0].start, o.key, o.partition, feed.name)):
                lost.remedy = f"read {o.key} from offset {o.partition.log_start} on"
                raise lost
        sizing = Sizing(RANGE_BYTES, RANGE_BYTES, os.cpu_count() or 1, feed.limits.max_tasks)
        blank = Plan(feed.stored, cluster.cluster_id(), request, feed.isolation, ())
        plan = planning.build(blank, pending, sizing, nothing, feed.window)
    if plan is None:
        raise UsageError("no offsets are asked for", remedy="write TOPIC:PARTITION:START-END, several with commas")
    return plan


def _records(task: Task, wiring: Wiring, isolation: Isolation) -> Iterator[pa.RecordBatch]:
    """All visible records of the task's offset ranges, each range's in offset order. Raises the error that stops a
    range.
    """
    from sluice.pipelines.records.shape import RAW
    from sluice.streaming import decode_ranges

    with wiring.open(isolation, RAW) as tools:
        for s, _, chunk in decode_ranges(tools.fetcher, task.offset_ranges, wiring.limits, isolation):
            if chunk is not None:
                yield from (piece.landed for piece in tools.format.convert(s, chunk))
