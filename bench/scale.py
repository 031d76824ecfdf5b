"""Cost of a feed's size for its driver: the real planner, ledger, proof and manifests over a cluster in memory.

Positions and topology of a thousand brokers are simulated (`simulated_cluster`), nothing is read and rows
are not landed; everything else is the product's code, from the survey to the manifest of the window. CPU seconds are
those of this process, so a busy machine does not change them much. Bytes and requests are exact.
"""

from __future__ import annotations

import pickle
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from rich.console import RenderableType

from bench.simulated_cluster import EvenCluster, UnreadEngine
from sluice.cli.terminal.output import heading, table
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.preview import Preview, preview
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.landing.task import Assignment, Tools, adopt
from sluice.pipelines.landing.writer import PartTarget, PartWriter
from sluice.pipelines.ledger import Ledger, checkpoint
from sluice.pipelines.ledger.entries import PlanEntry
from sluice.pipelines.model.kafka import Isolation
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, to_json
from sluice.pipelines.model.receipts import Counts, Outcome, Owner, Progress, Receipt
from sluice.pipelines.ports import Ports
from sluice.pipelines.records.rows.row_format import HEADERS, RawFormat
from sluice.pipelines.util.units import HOUR
from sluice.testing.engine import MemoryLiveness
from sluice.testing.group import MemoryGroup
from sluice.testing.lake import MemoryLake

Note = Callable[[str], None]
T = TypeVar("T")

BEGINS = 1_795_132_800_000
"""2026-11-20, in UTC."""
FIRST_HOURS = 6
"""Of records that stand there when the feed begins."""
CORES = 64
"""That Spark runs tasks on."""
PARTITION_BYTES = 100 << 20
"""A day, of a partition, on average."""
PROVEN = 300
"""Files that are written and proven, to know what one costs."""
_CATCH_UP = Request(RequestKind.CATCH_UP)


@dataclass(frozen=True, slots=True)
class Topology:
    partitions: int
    brokers: int

    @property
    def topics(self) -> int:
        return max(1, self.partitions // 1000)


SIZES = (Topology(1_000, 10), Topology(10_000, 100), Topology(100_000, 1_000))


@dataclass(frozen=True, slots=True)
class Balance:
    """How a plan spreads over tasks. `heaviest`: bytes of the largest task over the mean; `most_ranges` of any task."""

    tasks: int
    offset_ranges: int
    heaviest: float
    most_ranges: int
    shipped_bytes: int
    """What Spark ships to each of its workers."""

    @classmethod
    def of(cls, plan: Plan) -> Balance:
        loads = [t.estimated_bytes for t in plan.tasks]
        ranges = [len(t.offset_ranges) for t in plan.tasks]
        heaviest = max(loads) * len(loads) / max(sum(loads), 1)
        return cls(len(loads), sum(ranges), round(heaviest, 2), max(ranges), len(pickle.dumps(plan.tasks)))


@dataclass(frozen=True, slots=True)
class Scaled:
    """One topology: CPU seconds by what took them, requests to Kafka by what for, bytes by what holds them."""

    topology: Topology
    cpu: Mapping[str, float]
    requests: Mapping[str, Mapping[str, int]]
    bytes: Mapping[str, int]
    first: Balance
    next: Balance
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ScaleReport:
    scaled: tuple[Scaled, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(note: Note, sizes: Sequence[Topology] = SIZES) -> ScaleReport:
    """Each topology, the smallest first: the peak of memory is that of this process since it began."""
    return ScaleReport(tuple(_measure_topology(s, note) for s in sizes))


def _measure_topology(topology: Topology, note: Note) -> Scaled:
    world = _World(topology)
    note(f"{topology.partitions:,} partitions on {topology.brokers:,} brokers: the first {FIRST_HOURS} hours")
    first = world.costing("plan at first", world.preview)
    world.land("first")
    note("an hour later, by a new process")
    world.cluster.now += HOUR
    world.costing("read the ledger", lambda: world.ledger().read())
    next_ = world.costing("plan an hour", world.preview)
    world.land("hour")
    note("receipts and files in staging")
    world.receipts()
    world.files()
    scale = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    sizes = [Balance.of(p.plan) for p in (first, next_) if p.plan]
    return Scaled(topology, world.cpu, world.requests, world.bytes(), sizes[0], sizes[-1], peak)


# -- for people


def scale_view(report: ScaleReport) -> Iterator[RenderableType]:
    """A column for each topology, for the terminal."""
    sizes = [f"{s.topology.partitions:,}" for s in report.scaled]
    yield heading(
        "scale", "a cluster in memory; " + ", ".join(f"{s.topology.brokers:,} brokers" for s in report.scaled)
    )
    yield _table(
        "CPU seconds", sizes, [s.cpu for s in report.scaled], lambda v: f"{v:,.2f}" if v >= 0.01 else f"{v:.5f}"
    )
    requests = [{f"{w}: {k}": n for w, r in s.requests.items() for k, n in r.items() if n} for s in report.scaled]
    yield _table("requests to Kafka", sizes, requests, count)
    yield _table("bytes in the lake", sizes, [s.bytes for s in report.scaled], size)
    plans = [_plans(s) for s in report.scaled]
    yield _table("plans", sizes, plans, lambda v: f"{v:,.10g}")


def _plans(s: Scaled) -> dict[str, float]:
    plans = {"first": s.first, "hour": s.next}
    return {f"{n}: {k}": v for n, b in plans.items() for k, v in asdict(b).items()} | {
        "driver's peak bytes": s.peak_bytes
    }


def _table(
    name: str, sizes: Sequence[str], columns: Sequence[Mapping[str, Any]], say: Callable[[Any], str]
) -> RenderableType:
    rows = [[what, *(say(c.get(what, 0)) for c in columns)] for what in columns[0]]
    return table([name, *sizes], rows, right=" ".join(sizes))


# -- one topology


@dataclass
class _World:
    """One feed over one topology, and its cost up to this point."""

    topology: Topology
    cpu: dict[str, float] = field(default_factory=dict)
    requests: dict[str, dict[str, int]] = field(default_factory=dict)
    lake: MemoryLake = field(default_factory=MemoryLake)
    engine: UnreadEngine = field(default_factory=UnreadEngine)

    def __post_init__(self) -> None:
        t = self.topology
        self.cluster = EvenCluster(t.partitions, t.brokers, t.topics, BEGINS, t.partitions * PARTITION_BYTES)
        self.cluster.now += FIRST_HOURS * HOUR
        settings = {
            "feed": "scale",
            "kafka": {"bootstrap": "127.0.0.1:9"},
            "topics": {"include": [r"topic-.*"]},
            "start": "earliest",
            "lake": "/nowhere",
            "commit": "none",
        }
        self.feed = Feed.model_validate(settings, context={"root": Path("/")})

    def ports(self) -> Ports:
        outside = (
            self.cluster,
            MemoryGroup(),
            self.lake,
            self.engine,
            MemoryLiveness(),
            lambda: self.cluster.now,
            None,
        )
        return Ports(*outside, parallelism=CORES)

    def ledger(self) -> Ledger:
        return Ledger(self.lake, self.feed.stored, lambda: self.cluster.now)

    def costing(self, what: str, work: Callable[[], T]) -> T:
        self.cluster.requests.clear()
        began = time.process_time()
        done = work()
        self.cpu[what] = round(time.process_time() - began, 3)
        if self.cluster.requests:
            self.requests[what] = dict(self.cluster.requests)
        return done

    def preview(self) -> Preview:
        return preview(self.feed, self.ports(), _CATCH_UP)

    def land(self, name: str) -> None:
        """Everything that a run does but Dagster and Spark, by stage."""
        spent, stage, since = Counter[str](), "open", time.process_time()

        def report(progress: Progress) -> None:
            nonlocal stage, since
            if progress.stage != stage:
                now = time.process_time()
                spent[stage] += now - since  # type: ignore[assignment]
                stage, since = progress.stage, now

        land(self.feed, self.ports(), _CATCH_UP, Owner(name, name, "here", 1, 0), report).check()
        report(Progress("end"))
        self.cpu |= {f"{name}: {s}": round(took, 3) for s, took in spent.items() if s not in ("start workers", "land")}

    def receipts(self) -> None:
        """Measure a task's search for earlier attempts, and the driver's progress, with all receipts written."""
        job = self.engine.ran[-1]
        lake = MemoryLake()
        for outcome in UnreadEngine().run(job, range(len(job.plan.tasks))):
            if isinstance(outcome, Receipt):
                path = paths.receipt_path(self.feed.stored, job.batch, outcome.attempt, outcome.offset_range)
                lake.put(path, to_json(outcome).encode())
        work = Assignment(
            self.feed.name, job.batch, job.plan.hash, Isolation.READ_COMMITTED, "again", self.feed.landing,
            self.feed.fetch.limits(), self.feed.limits.task_memory,
        )  # fmt: skip
        tools = Tools(None, lake, RawFormat())  # type: ignore[arg-type]
        none_of_its = [OffsetRange("other", 0, "id", 0, 1)]
        self.costing("a task's search in staging", lambda: adopt(none_of_its, work, tools))

    def files(self) -> None:
        """Measure the proof of a file."""
        job, lake = self.engine.ran[-1], MemoryLake()
        ranges = [s for s in job.plan.offset_ranges if s.span][:PROVEN]
        plan = Plan(job.plan.feed, job.plan.cluster, _CATCH_UP, job.plan.isolation, job.plan.tasks[:0])
        outcomes = [_write_range(lake, plan, job.batch, s) for s in ranges]
        judge = _Chosen(plan, tuple(ranges))
        receipts, failures = self.costing("proof", lambda: prove(judge, job.batch, outcomes, lake))  # type: ignore[arg-type]
        if failures or not receipts:
            raise AssertionError(failures[:1])
        self.cpu["proof of a file"] = round(self.cpu.pop("proof") / len(receipts), 6)

    def bytes(self) -> dict[str, int]:
        """The newest entry of each kind (those that follow each other), the first plan's, and a checkpoint."""
        ledger = self.ledger()
        sizes: dict[str, int] = {}
        before = ""
        for number, entry in ledger.entries():
            written = len(self.lake.files[paths.log_path(self.feed.stored, number)])
            sizes[entry.kind] = written + (sizes[before] if entry.kind == before else 0)
            before = entry.kind
            if isinstance(entry, PlanEntry):
                sizes.setdefault("first plan", sizes["plan"])
        return sizes | {"checkpoint": len(checkpoint.dump(ledger.read()))}


@dataclass(frozen=True)
class _Chosen:
    """A plan of some offset ranges, under the hash of the files that were written for it."""

    plan: Plan
    offset_ranges: tuple[OffsetRange, ...]

    @property
    def feed(self) -> str:
        return self.plan.feed

    @property
    def hash(self) -> str:
        return self.plan.hash


def _write_range(lake: MemoryLake, plan: Plan, batch: int, s: OffsetRange) -> Outcome:
    """One row of the offset range in a file; the others were compacted away."""
    target = PartTarget(plan.feed, batch, plan.hash, "attempt", s)
    row = pa.record_batch(
        {
            "key": pa.array([b"key"], pa.binary()),
            "value": pa.array([b"value"], pa.binary()),
            "offset": pa.array(np.array([s.start])),
            "timestamp": pa.array([BEGINS], pa.timestamp("ms", "UTC")),
            "timestampType": pa.array([0], pa.int32()),
            "headers": pa.nulls(1, HEADERS),
        }
    )
    rows = next(RawFormat().convert(s, row)).landed
    writer = PartWriter(
        lake, target, rows.schema, Feed.model_fields["landing"].get_default(call_default_factory=True), 1 << 20
    )
    writer.write(rows)
    return Receipt(s, s.end, Counts(landed=1, compacted=s.span - 1), writer.close(), "attempt")
