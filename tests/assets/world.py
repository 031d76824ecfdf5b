"""A project whose feeds run over memory: one cluster, one lake, a group each, and an engine that makes up rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa

from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.execution import run_feeds
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import committed_key, landed_key
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import CorruptBatch, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.proof import to_failure
from sluice.pipelines.landing.writer import PartTarget, PartWriter
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.model.kafka import OffsetAtTime, TopicPartition
from sluice.pipelines.model.plans import AskedRange, OffsetRange, Request, RequestKind, Task, to_json
from sluice.pipelines.model.receipts import (
    Counts,
    Drift,
    Outcome,
    Part,
    PartKind,
    Progress,
    Receipt,
    Tally,
    TaskTraffic,
)
from sluice.pipelines.ports import Group, Job, Ports
from sluice.pipelines.records.rows.row_format import HEADERS, REFUSED, RawFormat, quarantine_rows
from sluice.resources.project import Project
from sluice.running import RunResult
from sluice.testing.cluster import MemoryCluster, partition
from sluice.testing.engine import MemoryClock, MemoryEngine, MemoryLiveness, owner
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake

CATCH_UP = Request(RequestKind.CATCH_UP)
SECRET = "correct-horse-battery"
FEED = f"""\
kafka:
  bootstrap: 127.0.0.1:9
  security_protocol: SASL_PLAINTEXT
  sasl_mechanism: PLAIN
  sasl_plain_username: reader
  sasl_plain_password: {SECRET}
topics: orders
start: 2024-05-01T00:00:00Z
"""
MIDNIGHT = 1_714_521_600_000
"""2024-05-01, in UTC: long enough ago for every window of that day to be a partition."""
HOUR = 3_600_000
P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def at_hour(number: int) -> int:
    """Returns the start of that day's n-th hour in milliseconds."""
    return MIDNIGHT + number * HOUR


def in_hour(number: int, only: tuple[TopicPartition, ...] = ()) -> Request:
    return Request(RequestKind.WINDOW, window=at_hour(number), only=only)


@dataclass
class StampedCluster(MemoryCluster):
    """A cluster that looks up offsets by time from the records' stamps."""

    stamps: dict[TopicPartition, list[int]] = field(default_factory=dict)
    hidden: dict[TopicPartition, int] = field(default_factory=dict)
    """Offsets that a look-up by time answers with a marker, so that the record has to be searched for."""

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        matches = ((o, s) for o, s in enumerate(self.stamps.get(tp, ())) if s >= time)
        return next((OffsetAtTime(o, s, by_marker=o == self.hidden.get(tp)) for o, s in matches), None)

    def write(self, tp: TopicPartition, stamps: Iterable[int]) -> None:
        """Append records; all of them are stable at once."""
        self.stamps.setdefault(tp, []).extend(stamps)
        end = len(self.stamps[tp])
        self.states[tp] = partition(tp.topic, tp.partition, last_stable_offset=end, high_watermark=end)

    def hold(self, tp: TopicPartition, last_stable_offset: int) -> None:
        """Open a transaction at the last stable offset."""
        self.states[tp] = replace(self.states[tp], last_stable_offset=last_stable_offset)


@dataclass
class MadeUpEngine(MemoryEngine):
    """An engine that writes a row for each offset; it fails the partitions in `failing` and raises `raising`.

    `bad`: the number of offsets at the end of each offset range that are no JSON. `absent`: the number at its
    start in no batch. `refusal`: the reason columns of quarantined rows. `observe`: the tallies and drift of a range.
    `keeps_staging`: receipts stay in staging, as after tasks. `traffic`: the traffic that each job reports.
    """

    failing: set[TopicPartition] = field(default_factory=set)
    failure: SluiceError | None = None
    bad: int = 0
    absent: int = 0
    refusal: tuple[str | None, ...] = ("decode", "not_json", None, None, "no JSON value begins here")
    observe: Callable[[OffsetRange], tuple[tuple[Tally, ...], tuple[Drift, ...]]] = lambda s: ((), ())
    raising: BaseException | None = None
    keeps_staging: bool = False
    traffic: tuple[TaskTraffic, ...] = ()

    def run(self, job: Job, tasks: Sequence[int]) -> Sequence[Outcome | TaskTraffic]:  # type: ignore[override]
        if self.raising is not None:
            raise self.raising
        return [*super().run(job, tasks), *self.traffic]

    def carry_out(self, job: Job, task: Task) -> list[Outcome]:
        outcomes = [self._build_range(job, s) for s in task.offset_ranges]
        for r in outcomes if self.keeps_staging else ():
            if isinstance(r, Receipt):
                path = paths.receipt_path(job.plan.feed, job.batch, job.attempt, r.offset_range)
                self.lake.put(path, to_json(r).encode())
        return outcomes

    def _build_range(self, job: Job, s: OffsetRange) -> Outcome:
        if s.tp in self.failing:
            damage = CorruptBatch(f"{s}: does not match its CRC", remedy="check the broker's disk")
            return to_failure(s, self.failure or damage)
        good = next(RawFormat().convert(s, _build_records(s))).landed.slice(
            self.absent, s.span - self.bad - self.absent
        )
        parts = self._write_parts(job, s, PartKind.LANDED, good)
        if self.bad:
            bad = OffsetRange(s.topic, s.partition, s.incarnation, s.end - self.bad, s.end)
            parts += self._write_parts(
                job, s, PartKind.QUARANTINED, _build_quarantine_rows(bad, self.refusal, job.batch)
            )
        counts = Counts(landed=good.num_rows, quarantined=self.bad, compacted=self.absent)
        tallies, drift = self.observe(s)
        took = {"wait": 10 * s.span, "encode": 30 * s.span}
        receipt = Receipt(s, s.end, counts, parts, job.attempt, s.span * 10, took, format=job.shape.name)
        return replace(receipt, tallies=tallies, drift=drift)

    def _write_parts(self, job: Job, s: OffsetRange, kind: PartKind, rows: pa.RecordBatch) -> tuple[Part, ...]:
        target = PartTarget(job.plan.feed, job.batch, job.plan.hash, job.attempt, s, kind)
        writer = PartWriter(self.lake, target, rows.schema, LandingSettings(), 1 << 20)
        writer.write(rows)
        return writer.close()


def _build_quarantine_rows(s: OffsetRange, refusal: tuple[str | None, ...], batch: int) -> pa.RecordBatch:
    raw = next(RawFormat().convert(s, _build_records(s))).landed
    texts = [pa.array([word] * s.span, pa.string()).dictionary_encode() for word in refusal]
    columns = [*raw.columns, *texts, pa.nulls(s.span, pa.int32())]
    return quarantine_rows(
        pa.RecordBatch.from_arrays([c.cast(f.type) for c, f in zip(columns, REFUSED, strict=True)], schema=REFUSED),
        batch,
        "",
    )


def _build_records(s: OffsetRange) -> pa.RecordBatch:
    offsets = pa.array(np.arange(s.start, s.end))
    values = pa.array([b"v"] * s.span, pa.binary())
    stamps = pa.array([0] * s.span, pa.timestamp("ms", "UTC"))
    columns = {
        "key": pa.nulls(s.span, pa.binary()),
        "value": values,
        "offset": offsets,
        "timestamp": stamps,
        "timestampType": pa.array([0] * s.span, pa.int32()),
        "headers": pa.nulls(s.span, HEADERS),
    }
    return pa.RecordBatch.from_pydict(columns)


class World:
    """`orders`, two partitions of 100 offsets, 25 in each of the day's first four hours; it is six o'clock."""

    def __init__(self, root: Path, feeds: dict[str, str] | None = None) -> None:
        self.project = Project(root)
        self.project.feeds_folder.mkdir()
        for name, text in (feeds or {"orders": FEED}).items():
            (self.project.feeds_folder / f"{name}.yaml").write_text(text)
        self.lake, self.liveness = MemoryLake(), MemoryLiveness()
        self.groups: defaultdict[str, MemoryGroup] = defaultdict(MemoryGroup)
        self.other_store: Group | None = None
        self.cluster = StampedCluster()
        for tp in (P0, P1):
            self.cluster.write(tp, (MIDNIGHT + i * HOUR // 25 for i in range(100)))
        self.engine = MadeUpEngine(self.lake)
        self.progress: list[Progress] = []
        self.clock = MemoryClock(at_hour(6), step=1000)

    @contextmanager
    def open_ports(self, feed: Feed) -> Iterator[Ports]:
        yield Ports(self.cluster, self.groups[feed.group], self.lake, self.engine, self.liveness, self.clock, None)

    @property
    def group(self) -> MemoryGroup:
        """The group of feed `orders`."""
        return self.groups["sluice-orders"]

    def at(self, number: int, minutes: int = 30) -> None:
        """Set the clock to that day's n-th hour."""
        self.clock.now = at_hour(number) + minutes * 60_000

    def time(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now / 1000, UTC)

    def bury(self) -> None:
        """Declare the owner of each live batch dead."""
        self.liveness.dead = {b.owner.token for b in self.state().live()}

    def grow(self, number: int, end: int) -> None:
        """Append records stamped now, up to the offset `end`."""
        tp = TopicPartition("orders", number)
        self.cluster.write(tp, [self.clock.now] * (end - len(self.cluster.stamps[tp])))

    def run(self, request: Request = CATCH_UP, feed: str = "orders") -> RunResult:
        return run_feeds(self.project, {feed: request}, lambda name: self.progress.append, self.open_ports)[feed]

    def land_unrecorded(self, request: Request = CATCH_UP) -> Landed:
        """Publish a batch by a run that dies before it reports to Dagster."""
        feed = self.make_session().feed("orders")
        with self.open_ports(feed) as ports:
            return land(feed, ports, request, owner("dead", "dead-run"), self.progress.append)

    def land_in_pieces(self) -> None:
        """Publish the first two hours, in batches of five offsets a partition."""
        for start in range(0, 50, 5):
            ranges = tuple(AskedRange(tp.topic, tp.partition, start, start + 5) for tp in (P0, P1))
            self.land_unrecorded(Request(RequestKind.OFFSETS, ranges))

    def open_ledger_view(self) -> LedgerView:
        feed = self.make_session().feed("orders")
        with self.open_ports(feed) as ports:
            return LedgerView.open(feed, ports, ledger=self.open_ledger())

    def make_session(self) -> RunSession:
        return RunSession(self.project, self.open_ports, lambda feed: self.lake)

    def open_ledger(self) -> Ledger:
        return Ledger(self.lake, "orders", self.clock, "test", self.cluster.id)

    def state(self) -> State:
        return self.open_ledger().read()


def resolve_landing(definitions: dg.Definitions, feed: str = "orders", prefix: Sequence[str] = ()) -> dg.JobDefinition:
    """Returns the job of a run of a feed's windows: two assets of Dagster's job over all assets."""
    every = definitions.resolve_implicit_global_asset_job_def()
    keys = [key.with_prefix(prefix) if prefix else key for key in (landed_key(feed), committed_key(feed))]
    assets = [definitions.resolve_assets_def(key) for key in keys]
    checks = {key for asset in assets for key in asset.check_keys}
    return every.get_subset(asset_selection={a.key for a in assets}, asset_check_selection=checks)


# -- events in Dagster


def read_metadata(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[dict[str, Any]]:
    """Returns the metadata of the asset's materializations without partition, oldest first."""
    return [_get_values(m.metadata) for m in _fetch_materializations(instance, key) if m.partition is None]


def read_windows(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, dict[str, Any]]:
    """Returns the newest metadata of each materialized partition."""
    return {
        m.partition: _get_values(m.metadata) for m in _fetch_materializations(instance, key) if m.partition is not None
    }


def list_versions(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str | None) -> list[str]:
    """Returns the data versions of a partition, oldest first."""
    materializations = [m for m in _fetch_materializations(instance, key) if m.partition == partition]
    return [(m.tags or {})["dagster/data_version"] for m in materializations]


def _fetch_materializations(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[dg.AssetMaterialization]:
    records = instance.fetch_materializations(key, limit=1000, ascending=True).records
    return [r.asset_materialization for r in records if r.asset_materialization]


def _get_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.value for k, v in metadata.items()}


def read_checks(instance: dg.DagsterInstance, run: str, name: str) -> dict[str | None, dg.AssetCheckEvaluation]:
    """Returns a run's evaluations of a check, by partition."""
    records = instance.get_records_for_run(run, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION).records
    events = [r.event_log_entry.dagster_event for r in records]
    evaluations = [e.asset_check_evaluation_data for e in events if e]
    return {e.partition: e for e in evaluations if e.check_name == name}


def read_cells(table: Any) -> list[dict[str, Any]]:
    return [dict(r.data) for r in table.records]
