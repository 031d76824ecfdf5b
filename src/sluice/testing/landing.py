"""Land messages through a feed, without Kafka, Spark or Dagster, in tests of feeds, contracts and reports.

    landed = land("feeds/orders.yaml", [Message(b'{"id": 1}'), Message(b"no json")])
    landed.rows, landed.quarantined

The real pipeline runs over ports in memory: the messages are encoded as Kafka stores them, then decoded, typed, checked
against the contract, written as Parquet, proven and published. Offsets are not committed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from sluice.pipelines.batch.land import land as land_batch
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.contract.catalogue import ExpectationOutcome
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import find_output, load_feed
from sluice.pipelines.feed.sections import LOCAL_KAFKA
from sluice.pipelines.feed.sql_report import load_report
from sluice.pipelines.lake import parquet
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Counts, Drift, PartKind
from sluice.pipelines.planning.schema_changes import find_columns
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.publishing.publish import abandon
from sluice.pipelines.records.rows.row_format import QUARANTINED, landed_schema
from sluice.pipelines.schema.arrays import plain
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.util.units import parse_instant, show_window
from sluice.reading import When, Windows, find_one
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.liveness import new_owner
from sluice.testing.cluster import MemoryCluster, MemoryFetcher, partition
from sluice.testing.engine import MemoryClock, MemoryEngine, MemoryLiveness
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake
from sluice.testing.logs import Log, LogBatch, LogRecord, log

BEGIN = parse_instant("2026-01-01T00:00:00Z")
"""The time of messages without one, in a new lake."""
_CLUSTER, _TOPIC_ID = "sluice-testing", "memory"
_BATCH_RECORDS = 1000
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Message:
    """One record as a producer sends it; a value of None is a tombstone.

    `time` is a datetime with a zone, or ms since the epoch. The default is 2026-01-01T00:00Z in a new lake, else the
    end of the newest complete window. `topic` is optional if the feed reads one topic.
    """

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    time: datetime | int | None = None
    topic: str = ""
    partition: int = 0


@dataclass(frozen=True)
class LandedMessages:
    """The result of the messages of one call."""

    feed: Feed = field(repr=False)
    lake: Lake = field(repr=False)
    result: Landed = field(repr=False)
    """The result of the run: batches with plan and receipts, and frontiers."""

    @cached_property
    def rows(self) -> pa.Table:
        """Landed rows, by topic, partition and offset. Raises UsageError for a split feed: see `rows_of`."""
        if self.feed.split:
            names = ", ".join(d.output for d in self.feed.datasets)
            raise UsageError(f"feed {self.feed.name} is split", remedy=f"rows_of one of its outputs: {names}")
        return self._table(PartKind.LANDED)

    def rows_of(self, output: str) -> pa.Table:
        """Landed rows of one output of a split feed, by topic, partition and offset. Raises FeedError."""
        return self._table(PartKind.LANDED, find_output(self.feed, output))

    @cached_property
    def quarantined(self) -> pa.Table:
        """Refused records with their original bytes, `stage`, `reason`, `expectation`, `field` and `detail`."""
        return self._table(PartKind.QUARANTINED)

    @property
    def counts(self) -> Counts:
        """Numbers of landed, quarantined, dropped and other messages."""
        return self._facts.counts

    @property
    def expectations(self) -> list[ExpectationOutcome]:
        """The result of each expectation of the feed's contract, in its order."""
        return self._facts.outcomes

    @property
    def drift(self) -> list[Drift]:
        """Differences between the messages and the feed's schema, by kind and field."""
        return list(self._facts.drift)

    @property
    def windows(self) -> list[str]:
        """Windows that this call completed, by their starts in UTC: `2026-01-01T00:00`."""
        return [show_window(w) for w in self.result.windows]

    def report(self, path: str | os.PathLike[str], window: When | None = None) -> pa.Table:
        """Returns the report's result over a complete window, by default the window of the messages.

        Spark runs it in this process, with the feed's `spark.conf`, over the files of a lake in a folder. Raises
        FeedError for an invalid report, WindowIncomplete, Failed with Spark's error in the SQL, and SetupError without
        Spark.
        """
        from sluice.reading import run_report  # late: landing needs no Spark

        report = load_report(Path(path))
        if report.feed != self.feed.name:
            raise UsageError(
                f"{path} is a report on feed {report.feed}, and these messages landed in {self.feed.name}",
                remedy=f"land messages in feed {report.feed}",
            )
        if not isinstance(self.lake, LocalLake):
            raise UsageError(
                "a report reads files, and this lake is in memory", remedy="land into a folder: land(…, lake=tmp_path)"
            )
        start = self._window() if window is None else find_one(self.feed, window)
        here = self.feed.model_copy(update={"spark": self.feed.spark.model_copy(update={"master": "local[1]"})})
        return run_report(report, Windows.of(here, self._ledger, self.lake, (start,), PartKind.LANDED))

    def _window(self) -> int:
        windows = {r.offset_range.window for r in self._facts.receipts if r.counts.landed}
        if len(windows) == 1 and (start := windows.pop()) is not None:
            return start
        raise UsageError(
            f"the messages landed in {len(windows)} windows, and a report is over one",
            remedy=f"name it: report(…, window={self.windows[0]!r})" if self.windows else "land some messages first",
        )

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.lake, self.feed.stored, lambda: 0)

    @cached_property
    def _facts(self) -> BatchFacts:
        batches = self.result.batches
        receipts, results = [r for b in batches for r in b.receipts], [r for b in batches for r in b.results]
        receipts.sort(key=lambda r: (r.offset_range.tp, r.offset_range.start))
        return BatchFacts(receipts, contract=self.feed.contract, results=results)

    def _table(self, kind: PartKind, feed: Feed | None = None) -> pa.Table:
        feed = feed or self.feed
        every = (p for r in self._facts.receipts for p in r.of(kind))
        parts = (p.path for p in every if p.output == feed.output or kind is PartKind.QUARANTINED)
        batches = [b for path in parts for b in parquet.read_batches(self.lake, path, _BATCH_ROWS)]
        landed = landed_schema(find_columns(feed, self._ledger.read()))
        schema = QUARANTINED if kind is PartKind.QUARANTINED else landed
        table = pa.Table.from_batches(batches) if batches else schema.empty_table()
        return table.cast(plain(table.schema)).replace_schema_metadata()


def land(
    feed: str | os.PathLike[str] | Feed,
    messages: Iterable[Message],
    *,
    lake: str | os.PathLike[str] | Lake | None = None,
    environ: Mapping[str, str] | None = None,
) -> LandedMessages:
    """Land the messages through a feed (a file, or a loaded feed), in memory or in the folder `lake`.

    Every message lands, regardless of the feed's `start`. A second call with the same lake (a folder, or `.lake` of an
    earlier result) continues after the first. `environ` replaces the environment variables of the feed file.

    Raises FeedError for an invalid feed file or contract, and the errors of a run: ContractBroken for a batch that
    breaks its contract, QuarantineExceeded, SchemaDrifted and others, from `sluice.pipelines.errors`.
    """
    if not isinstance(feed, Feed):
        feed = load_feed(Path(feed), {LOCAL_KAFKA: "memory:9092", **(os.environ if environ is None else environ)})
    target = _open_lake(lake)
    if isinstance(target, LocalLake):
        feed = feed.model_copy(update={"lake": str(target.root)})
    # A test lands all of its messages, without the limits of a run.
    unlimited = feed.limits.model_copy(update={"records": None, "bytes": None})
    clock = MemoryClock(BEGIN)
    ledger = Ledger(target, feed.stored, clock, "", _CLUSTER)
    if (cluster := ledger.read().cluster) not in ("", _CLUSTER):
        raise UsageError(
            f"the lake {lake} has rows that feed {ledger.feed} landed from Kafka cluster {cluster}",
            remedy="land into a folder of the test's own, such as tmp_path",
        )
    for batch in ledger.read().live():  # refused by earlier calls: their messages are gone
        abandon(ledger, batch.id, "messages of a test")
    state = ledger.read()
    begin = state.boundary_times[-1] if state.boundary_times else feed.window.start_of(BEGIN)
    logs, newest = _build_logs(feed, state, messages, begin)
    # Time is set behind the newest message's window, so that all windows are closed.
    clock.now = feed.window.end_of(newest) + feed.window.grace
    states = {tp: partition(*tp, topic_id=_TOPIC_ID) for tp in logs}
    ports = Ports(
        cluster=MemoryCluster(states, id=_CLUSTER, logs=logs),
        group=MemoryGroup({tp: CommittedOffset(0) for tp in logs if tp not in state.current}),
        lake=target,
        engine=MemoryEngine(target, lambda: MemoryFetcher(logs), feed.landing),
        liveness=MemoryLiveness(),
        clock=clock,
        wiring=None,
        parallelism=1,
    )
    unlimited_feed = feed.model_copy(update={"limits": unlimited})
    result = land_batch(unlimited_feed, ports, Request(RequestKind.CATCH_UP), new_owner("test"), lambda progress: None)
    result.check()
    return LandedMessages(feed, target, result)


def _open_lake(lake: str | os.PathLike[str] | Lake | None) -> Lake:
    if lake is None:
        return MemoryLake()
    if not isinstance(lake, str | os.PathLike):
        return lake
    if "://" in str(lake):
        raise UsageError(f"{lake} is no folder", remedy="name a folder, or omit `lake` to land in memory")
    return LocalLake(Path(lake))


def _build_logs(
    feed: Feed, state: State, messages: Iterable[Message], begin: int
) -> tuple[dict[TopicPartition, Log], int]:
    """Returns the log of each partition, from its frontier on, and the newest time in them."""
    records: dict[TopicPartition, list[LogRecord]] = {tp: [] for tp in state.current}
    records |= {tp: [] for topic in feed.topics.names if (tp := TopicPartition(topic, 0)) not in records}
    times = [begin] if state.boundary_times else []
    for m in messages:
        time = begin if m.time is None else _parse_time(m.time)
        times.append(time)
        tp = TopicPartition(m.topic or _get_only_topic(feed), m.partition)
        records.setdefault(tp, []).append(LogRecord(m.key, m.value, time, tuple(m.headers)))
    starts = {tp: state.frontier(key) for tp, key in state.current.items()}
    return {
        tp: log(
            *(LogBatch(tuple(batches[at : at + _BATCH_RECORDS])) for at in range(0, len(batches), _BATCH_RECORDS)),
            start=starts.get(tp, 0),
        )
        for tp, batches in records.items()
    }, max(times, default=begin)


def _get_only_topic(feed: Feed) -> str:
    if len(feed.topics.names) == 1:
        return feed.topics.names[0]
    raise UsageError(
        f"feed {feed.name} reads several topics", remedy="name the topic of each message: Message(…, topic=…)"
    )


def _parse_time(time: datetime | int) -> int:
    try:
        return time if isinstance(time, int) else parse_instant(time)
    except ValueError as error:
        raise UsageError(f"a message's time {time!r} {error}", remedy="a datetime needs its zone") from None
