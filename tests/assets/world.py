"""A project whose feeds run over memory: one cluster, one group and one lake, and an engine that makes up rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from sluice.assets.execution import RunOutcome, run_feed
from sluice.assets.session import Session
from sluice.pipelines.batch import Edges, Landed, land
from sluice.pipelines.feed import Feed, LandingSettings
from sluice.pipelines.formats import HEADERS, RawFormat
from sluice.pipelines.landing import PartWriter, Target
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ports import Job, Progress
from sluice.pipelines.values import (
    Counts,
    Outcome,
    Receipt,
    Request,
    RequestKind,
    Slice,
    SliceFailure,
    TopicPartition,
)
from sluice.resources.project import Project
from tests.fakes import FakeCluster, FakeGroup, FakeLiveness, MemoryLake, owner, partition

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
start: earliest
"""


@dataclass
class MadeUpEngine:
    """Writes a row for each offset; fails where told to, raises when told to."""

    lake: MemoryLake
    failing: set[TopicPartition] = field(default_factory=set)
    raising: BaseException | None = None
    canceled: int = 0

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        if self.raising is not None:
            raise self.raising
        return [self._slice(job, s) for s in job.plan.slices]

    def cancel(self) -> None:
        self.canceled += 1

    def _slice(self, job: Job, s: Slice) -> Outcome:
        if s.tp in self.failing:
            return SliceFailure(s, "CorruptBatch", f"{s}: does not match its CRC", "look at the broker's disk")
        target = Target(job.plan.feed, job.batch, job.plan.hash, job.attempt, s)
        writer = PartWriter(self.lake, target, RawFormat.schema, LandingSettings(), 1 << 20)
        writer.write(RawFormat().convert(s, _records(s)).landed)
        return Receipt(s, s.end, Counts(landed=s.span), writer.close(), job.attempt, input_bytes=s.span * 10)


def _records(s: Slice) -> pa.RecordBatch:
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
    """`orders`, two partitions of 100 offsets, unless told otherwise."""

    def __init__(self, root: Path, feeds: dict[str, str] | None = None) -> None:
        self.project = Project(root)
        self.project.feeds_folder.mkdir()
        for name, text in (feeds or {"orders": FEED}).items():
            (self.project.feeds_folder / f"{name}.yaml").write_text(text)
        self.lake, self.group, self.liveness = MemoryLake(), FakeGroup(), FakeLiveness()
        states = [partition(number=0), partition(number=1)]
        self.cluster = FakeCluster({s.tp: s for s in states})
        self.engine = MadeUpEngine(self.lake)
        self.progress: list[Progress] = []
        self._now = 1_000_000

    def clock(self) -> int:
        self._now += 1000
        return self._now

    @contextmanager
    def open_edges(self, feed: Feed) -> Iterator[Edges]:
        yield Edges(self.cluster, self.group, self.lake, self.engine, self.liveness, self.clock, None)

    def grow(self, number: int, end: int) -> None:
        self.cluster.states[TopicPartition("orders", number)] = partition(
            number=number, stable_end=end, high_watermark=end
        )

    def run(self, request: Request = CATCH_UP, feed: str = "orders") -> RunOutcome:
        return run_feed(self.project, feed, request, self.progress.append, self.open_edges)

    def land_unrecorded(self) -> Landed:
        """A run that published and died before Dagster heard of it."""
        feed = self.session().feed("orders")
        with self.open_edges(feed) as edges:
            return land(feed, edges, CATCH_UP, owner("dead", "dead-run"), self.progress.append)

    def session(self) -> Session:
        return Session(self.project, self.open_edges)

    def ledger(self) -> Ledger:
        return Ledger(self.lake, "orders", self.clock, "test", self.cluster.id)

    def state(self) -> State:
        return self.ledger().read()
