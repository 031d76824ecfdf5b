"""A simulated cluster of any size, and an engine that reads nothing.

The planner, the ledger and its fold, the proof and the manifests run over them, and over `sluice.testing`, as they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

from sluice.pipelines.model.kafka import OffsetAtTime, PartitionState, TopicPartition
from sluice.pipelines.model.plans import Task
from sluice.pipelines.model.receipts import Counts, Outcome, Receipt
from sluice.pipelines.ports import Job
from sluice.pipelines.util.units import DAY
from sluice.testing.cluster import MemoryCluster
from sluice.testing.engine import MemoryEngine

RECORD_BYTES = 200


class EvenCluster(MemoryCluster):
    """A cluster of partitions that fill evenly from `begins` (ms) on, with `day_bytes` a day in total.

    Partitions are spread over brokers and topics in turn. Their sizes differ as those of real ones do (log-normal).
    """

    def __init__(self, partitions: int, brokers: int, topics: int, begins: int, day_bytes: int) -> None:
        super().__init__(id="memory")
        self.now = begins
        self._begins = begins
        rng = random.Random(1)
        weights = [rng.lognormvariate(0, 1) for _ in range(partitions)]
        per_day = day_bytes / RECORD_BYTES / sum(weights)
        names = [TopicPartition(f"topic-{i % topics:03}", i // topics) for i in range(partitions)]
        self._per_day = {tp: w * per_day for tp, w in zip(names, weights, strict=True)}
        self._leaders = {tp: rng.randrange(brokers) for tp in names}

    def topics(self) -> Mapping[str, str]:
        self.requests["Metadata"] += 1
        return {tp.topic: f"id-of-{tp.topic}" for tp in self._leaders}

    def known(self) -> Iterable[TopicPartition]:
        return self._leaders

    def leader(self, tp: TopicPartition) -> int:
        return self._leaders[tp]

    def state(self, tp: TopicPartition) -> PartitionState:
        end = self.epoch_end(tp)
        size = end * RECORD_BYTES
        return PartitionState(*tp, f"id-of-{tp.topic}", self._leaders[tp], 0, 0, end, end, size)

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        at = max(math.ceil(self._per_day[tp] * (time - self._begins) / DAY), 0)
        return OffsetAtTime(at, max(time, self._begins)) if at < self.epoch_end(tp) else None

    def epoch_end(self, tp: TopicPartition) -> int:
        """The end: no leader ever changed."""
        return int(self._per_day[tp] * (self.now - self._begins) / DAY)


class UnreadEngine(MemoryEngine):
    """Says of each offset range that its offsets were all compacted away: a whole receipt, without a file."""

    def carry_out(self, job: Job, task: Task) -> list[Outcome]:
        spent = dict.fromkeys(("wait", "crc", "decompress", "decode", "type", "validate", "encode", "write"), 1_000_000)
        return [
            Receipt(s, s.end, Counts(compacted=s.span), (), f"{job.attempt}-00000000", s.estimated_bytes, spent)
            for s in task.offset_ranges
        ]
