"""Wiring for Spark's workers over logs in memory, which can kill or hang them. Workers import it by name."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.landing.task import Tools
from sluice.pipelines.model.kafka import FetchLimits, Isolation, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.ports import Fetched, FetchFailed
from sluice.pipelines.records.shape import Shape
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.logs import LZ4, Log, LogBatch, LogRecord, log

LOG = log(*[LogBatch(tuple(LogRecord(b"k%d" % i, b"value %d" % i) for i in range(500)), LZ4) for _ in range(4)])
LOGS = {TopicPartition("orders", p): LOG for p in range(3)}
RANGES = tuple(OffsetRange("orders", p, "topic-id", 0, LOG.end, estimated_bytes=1000) for p in range(3))
TASKS = (Task(0, 1, RANGES[:1]), Task(1, 2, RANGES[1:]))
PLAN = Plan("sales", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, TASKS)


@dataclass(frozen=True)
class LogWiring:
    """`dies`: how often the process of partition 0's task gets the signal `by`; `hangs`: it hangs. `notes`: a file per
    process."""

    lake: Path
    notes: Path
    logs: Mapping[TopicPartition, Log]
    dies: int = 0
    by: signal.Signals = signal.SIGKILL
    hangs: bool = False
    broken: bool = False
    landing: LandingSettings = field(default_factory=LandingSettings)
    limits: FetchLimits = field(default_factory=FetchLimits)
    memory: int = 512 << 20

    @contextmanager
    def open(self, isolation: Isolation, shape: Shape) -> Iterator[Tools]:
        if self.broken:
            raise ModuleNotFoundError("No module named 'elsewhere'")
        yield Tools(Deadly(self.logs, wiring=self), LocalLake(self.lake), shape.format())


@dataclass
class Deadly(MemoryFetcher):
    wiring: LogWiring | None = None

    def stream(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        for one in super().stream(ranges, limits):
            if any(s.partition == 0 for s in ranges):
                self._kill_or_hang()
            yield one

    def _kill_or_hang(self) -> None:
        wiring = self.wiring
        if wiring is None:
            return
        begun = len(list(wiring.notes.iterdir()))
        (wiring.notes / f"{os.getpid()}").touch()
        if wiring.hangs:
            threading.Event().wait(600)
        if begun < wiring.dies:
            os.kill(os.getpid(), wiring.by)
