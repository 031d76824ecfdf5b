"""Ports in memory: a cluster of any size that nobody has here, a lake in a dict, an engine that reads nothing.

The planner, the ledger and its fold, the proof and the manifests run over them as they are. Requests are counted as the
real cluster sends them: one to each leader that a question concerns, four where partitions are described.
"""

from __future__ import annotations

import io
import math
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from sluice.pipelines.ports import Job, Member, Membership
from sluice.pipelines.vocabulary.kafka import (
    CommittedOffset,
    Configs,
    Isolation,
    OffsetAtTime,
    OpenTransaction,
    PartitionState,
    TopicPartition,
)
from sluice.pipelines.vocabulary.receipts import Counts, Life, Outcome, Owner, Receipt, Verdict
from sluice.pipelines.vocabulary.units import DAY


class MemoryLake:
    """A lake in a dict. `requests` counts calls by what they would be to a store."""

    uri = "memory://"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self._names: list[str] = []

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if path in self.files:
            return False
        self.put(path, data)
        return True

    def put(self, path: str, data: bytes) -> None:
        self.requests["put"] += 1
        if path not in self.files:
            insort(self._names, path)
        self.files[path] = data

    def get(self, path: str) -> bytes | None:
        self.requests["get"] += 1
        return self.files.get(path)

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        folder = prefix.rstrip("/") + "/"
        first, last = bisect_left(self._names, max(folder, after)), bisect_left(self._names, folder[:-1] + "0")
        found = [p for p in self._names[first:last] if p > after]
        self.requests["list"] += 1 + len(found) // 1000
        return iter(found)

    def size(self, path: str) -> int | None:
        self.requests["head"] += 1
        return len(self.files[path]) if path in self.files else None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        sink = io.BytesIO()
        yield sink
        self.put(path, sink.getvalue())

    def open(self, path: str) -> BinaryIO:
        self.requests["get"] += 1
        return io.BytesIO(self.files[path])

    def show(self, source: str, target: str) -> None:
        if source not in self.files:
            raise FileNotFoundError(source)
        self.put(target, self.files[source])

    def remove(self, path: str) -> None:
        self.requests["delete"] += 1
        if self.files.pop(path, None) is not None:
            del self._names[bisect_left(self._names, path)]

    def unfinished(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter(())

    def discard(self, name: str) -> None: ...

    def locate(self, path: str) -> str:
        return self.uri + path


class MemoryCluster:
    """Partitions spread over brokers and topics in turn, whose sizes differ as those of real ones do (log-normal), each
    filled evenly from `begins` on (ms), `day_bytes` a day in all."""

    def __init__(self, partitions: int, brokers: int, topics: int, begins: int, day_bytes: int) -> None:
        self.requests: Counter[str] = Counter()
        self.now = begins
        self._begins, self._brokers = begins, brokers
        rng = random.Random(1)
        weights = [rng.lognormvariate(0, 1) for _ in range(partitions)]
        per_day = day_bytes / RECORD_BYTES / sum(weights)
        names = [TopicPartition(f"topic-{i % topics:03}", i // topics) for i in range(partitions)]
        self._per_day = {tp: w * per_day for tp, w in zip(names, weights, strict=True)}
        self._leaders = {tp: rng.randrange(brokers) for tp in names}

    def cluster_id(self) -> str:
        self.requests["Metadata"] += 1
        return "memory"

    def topics(self) -> Mapping[str, str]:
        self.requests["Metadata"] += 1
        return {tp.topic: f"id-of-{tp.topic}" for tp in self._leaders}

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        wanted = set(topics)
        chosen = sorted(tp for tp in self._leaders if tp.topic in wanted)
        self._ask("ListOffsets", chosen, 3)
        self.requests["DescribeLogDirs"] += len({self._leaders[tp] for tp in chosen})
        return tuple(map(self._state, chosen))

    def offsets_at(self, times: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, OffsetAtTime | None]:
        self._ask_leaders("ListOffsets", times)
        return {tp: self._hit(tp, time) for tp, time in times.items()}

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        self._ask("OffsetForLeaderEpoch", epochs)
        return {tp: self._end(tp) for tp in epochs}

    def open_transactions(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OpenTransaction]:
        return {}

    def configs(self, topics: Iterable[str]) -> Configs:
        self.requests["DescribeConfigs"] += 1
        return Configs()

    def _ask(self, what: str, concerned: Iterable[TopicPartition], times: int = 1) -> None:
        self.requests["Metadata"] += 1
        self._ask_leaders(what, concerned, times)

    def _ask_leaders(self, what: str, concerned: Iterable[TopicPartition], times: int = 1) -> None:
        self.requests[what] += times * len({self._leaders[tp] for tp in concerned})

    def _state(self, tp: TopicPartition) -> PartitionState:
        end = self._end(tp)
        size = end * RECORD_BYTES
        return PartitionState(*tp, f"id-of-{tp.topic}", self._leaders[tp], 0, 0, end, end, size)

    def _end(self, tp: TopicPartition) -> int:
        return int(self._per_day[tp] * (self.now - self._begins) / DAY)

    def _hit(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        at = max(math.ceil(self._per_day[tp] * (time - self._begins) / DAY), 0)
        return OffsetAtTime(at, max(time, self._begins)) if at < self._end(tp) else None


RECORD_BYTES = 200


@dataclass
class MemoryEngine:
    """Says of each slice that its offsets were all compacted away: a whole receipt, without a file."""

    ran: list[Job] = field(default_factory=list)

    def start(self) -> None: ...

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        self.ran.append(job)
        spent = dict.fromkeys(("wait", "crc", "decompress", "decode", "type", "validate", "encode", "write"), 1_000_000)
        slices = (s for i in tasks for s in job.plan.tasks[i].slices)
        return [
            Receipt(s, s.end, Counts(compacted=s.span), (), f"{job.attempt}-00000000", s.estimated_bytes, spent)
            for s in slices
        ]

    def cancel(self) -> None: ...


class MemoryGroup:
    """A group that never committed."""

    def committed(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        return dict.fromkeys(partitions)

    def members(self) -> tuple[Member, ...]:
        return ()

    def join(self, topics: Sequence[str], transactional_id: str | None) -> AbstractContextManager[Membership]:
        raise NotImplementedError


class MemoryLiveness:
    """Everybody lives."""

    @contextmanager
    def beat(self, owner: Owner) -> Iterator[None]:
        yield

    def judge(self, owners: Iterable[Owner], *, watch: bool = True) -> Mapping[str, Verdict]:
        return {o.token: Verdict(Life.ALIVE, "everybody lives") for o in owners}

    def owners(self) -> tuple[Owner, ...]:
        return ()

    def last_beat(self, owner: Owner) -> int | None:
        return None
