"""A Kafka cluster in memory (partitions with a given state, or logs of records), and a fetcher over its logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.model.kafka import (
    Configs,
    FetchLimits,
    Isolation,
    OffsetAtTime,
    OpenTransaction,
    PartitionState,
    Tail,
    TopicPartition,
)
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import TaskTraffic
from sluice.pipelines.planning.boundary_search import Sample, search_boundary
from sluice.pipelines.ports import Fetched, FetchFailed
from sluice.testing.logs import Log


@dataclass
class MemoryCluster:
    """`ports.Cluster` in memory.

    `states` are its partitions. A partition that is in `logs` too ends at the end of its log, and look-ups by time
    search its records. `requests` counts the requests to a real cluster: one per leader and look-up, four to describe
    partitions.
    """

    states: dict[TopicPartition, PartitionState] = field(default_factory=dict)
    id: str = "cluster-1"
    at: dict[TopicPartition, OffsetAtTime] = field(default_factory=dict)
    """The answer to every look-up by time in a partition without a log."""
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    """End offsets of leader epochs."""
    open: dict[TopicPartition, OpenTransaction] = field(default_factory=dict)
    settings: Configs = field(default_factory=Configs)
    logs: dict[TopicPartition, Log] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    clock_lead: int | None = None

    def forget(self) -> None:
        """No-op: answers are never cached."""

    def get_age(self) -> int:
        return 0

    def get_clock_lead(self) -> int | None:
        return self.clock_lead

    def cluster_id(self) -> str:
        self.requests["Metadata"] += 1
        return self.id

    def topics(self) -> Mapping[str, str]:
        self.requests["Metadata"] += 1
        return {s.topic: s.topic_id for s in self.states.values()}

    def partitions(self, topics: Iterable[str], isolation: Isolation) -> tuple[PartitionState, ...]:
        wanted = set(topics)
        chosen = sorted(tp for tp in self.known() if tp.topic in wanted)
        self._ask("ListOffsets", chosen, 3)
        self._ask_leaders("DescribeLogDirs", chosen)
        return tuple(map(self.state, chosen))

    def offsets_at(
        self, times: Mapping[TopicPartition, int], max_skew: int | None = None
    ) -> Mapping[TopicPartition, OffsetAtTime | None]:
        self._ask_leaders("ListOffsets", times)
        hits = {tp: self.first(tp, time) for tp, time in times.items()}
        if max_skew is None:
            return hits
        return {tp: hit and self._search(tp, times[tp], hit, max_skew) for tp, hit in hits.items()}

    def _search(self, tp: TopicPartition, time: int, hit: OffsetAtTime, max_skew: int) -> OffsetAtTime:
        offsets, stamps = np.array([*self.list_stamps(tp)], np.int64).reshape(-1, 2).T
        if not len(offsets):
            return hit
        high = int(offsets[-1]) + 1
        search = search_boundary(time, max_skew, hit, high)
        position = next(search)
        while True:
            rest = offsets >= position
            try:
                position = search.send(Sample.take(offsets[rest], stamps[rest], offsets[rest], high))
            except StopIteration as stop:
                boundary: OffsetAtTime = stop.value
                return replace(boundary, by_marker=hit.by_marker)

    def open_transactions(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OpenTransaction]:
        return {tp: self.open[tp] for tp in partitions if tp in self.open}

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        self._ask("OffsetForLeaderEpoch", epochs)
        return {tp: end for tp in epochs if (end := self.epoch_end(tp)) is not None}

    def read_checksums(self, tails: Mapping[TopicPartition, Tail]) -> Mapping[TopicPartition, int]:
        self._ask_leaders("Fetch", tails)
        data = {tp: log.fetch(tails[tp].offset)[0] for tp in tails if (log := self.log(tp))}
        return {tp: int.from_bytes(batches[17:21], "big") for tp, batches in data.items() if batches[16:17] == b"\2"}

    def configs(self, topics: Iterable[str]) -> Configs:
        self.requests["DescribeConfigs"] += 1
        wanted = set(topics)
        chosen = {t: c for t, c in self.settings.topics.items() if t in wanted}
        return Configs(chosen, self.settings.broker, self.settings.denied)

    # -- for subclasses to override

    def known(self) -> Iterable[TopicPartition]:
        """Returns every partition."""
        return self.states

    def log(self, tp: TopicPartition) -> Log | None:
        return self.logs.get(tp)

    def leader(self, tp: TopicPartition) -> int:
        return self.states[tp].leader if tp in self.states else -1

    def state(self, tp: TopicPartition) -> PartitionState:
        state, log = self.states[tp], self.logs.get(tp)
        if log is None:
            return state
        start = max(state.log_start, log.start)
        return replace(state, log_start=start, last_stable_offset=log.last_stable_offset, high_watermark=log.end)

    def first(self, tp: TopicPartition, time: int) -> OffsetAtTime | None:
        """Returns the first record with this timestamp or a later one."""
        if tp not in self.logs:
            return self.at.get(tp)
        matches = ((o, s) for o, s in self.logs[tp].stamps() if s >= time and o >= self.states[tp].log_start)
        return next((OffsetAtTime(o, s) for o, s in matches), None)

    def list_stamps(self, tp: TopicPartition) -> Iterable[tuple[int, int]]:
        """Returns (offset, timestamp) of each record, in order."""
        return (
            (pair for pair in self.logs[tp].stamps() if pair[0] >= self.state(tp).log_start) if tp in self.logs else ()
        )

    def epoch_end(self, tp: TopicPartition) -> int | None:
        """Returns the end of the requested leader epoch, or None if it is unknown."""
        return self.ends.get(tp)

    def _ask(self, what: str, concerned: Iterable[TopicPartition], times: int = 1) -> None:
        self.requests["Metadata"] += 1
        self._ask_leaders(what, concerned, times)

    def _ask_leaders(self, what: str, concerned: Iterable[TopicPartition], times: int = 1) -> None:
        self.requests[what] += times * len({self.leader(tp) for tp in concerned})


def partition(topic: str = "orders", number: int = 0, **changes: object) -> PartitionState:
    """Returns a partition with 100 stable offsets on leader 1; `changes` are fields of PartitionState."""
    fields = {
        "topic_id": "id-1",
        "leader": 1,
        "leader_epoch": 0,
        "log_start": 0,
        "last_stable_offset": 100,
        "high_watermark": 100,
        "log_bytes": None,
    } | changes
    return PartitionState(topic, number, **fields)  # type: ignore[arg-type]


@dataclass
class MemoryFetcher:
    """`ports.Fetcher` over logs in memory.

    `damaged` is the number of streams that read a flipped bit in a partition, `failing` the error that ends its offset
    ranges. `read` collects the offset ranges of each stream. `cut_short` ends every stream after this number of
    responses. `counted` is the reported traffic.
    """

    logs: Mapping[TopicPartition, Log]
    answer_bytes: int = 1 << 20
    damaged: dict[TopicPartition, int] = field(default_factory=dict)
    failing: dict[TopicPartition, SluiceError] = field(default_factory=dict)
    read: list[tuple[OffsetRange, ...]] = field(default_factory=list)
    limits: FetchLimits | None = None
    cut_short: int | None = None
    counted: TaskTraffic = field(default_factory=TaskTraffic)

    def stream(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        self.read.append(tuple(ranges))
        self.limits = limits
        answers = self._answers(ranges, limits)
        for count, answer in enumerate(answers):
            if self.cut_short is not None and count >= self.cut_short:
                return
            yield answer

    def traffic(self) -> TaskTraffic:
        return self.counted

    def close(self) -> None: ...

    def _answers(self, ranges: Sequence[OffsetRange], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        """Yields one response for each active offset range in turn, like a leader."""
        waiting = list(enumerate(ranges))
        active: list[Iterator[Fetched | FetchFailed]] = []
        while waiting or active:
            while waiting and len(active) < limits.active_ranges:
                active.append(self._read_range(*waiting.pop(0)))
            for one in list(active):
                answer = next(one, None)
                if answer is None:
                    active.remove(one)
                else:
                    yield answer

    def _read_range(self, index: int, s: OffsetRange) -> Iterator[Fetched | FetchFailed]:
        log, position = self.logs[s.tp], s.start
        flip = self.damaged.get(s.tp, 0) > 0
        self.damaged[s.tp] = self.damaged.get(s.tp, 0) - 1
        while position < s.end:
            if s.tp in self.failing and position > s.start:
                yield FetchFailed(index, self.failing[s.tp])
                return
            data, aborted, position = self._answer(log, position)
            if flip:
                data = data[:-1] + bytes([data[-1] ^ 1])
            yield Fetched(index, data, tuple(aborted), position, position >= s.end, waited_ns=1)

    def _answer(self, log: Log, position: int) -> tuple[bytes, list[tuple[int, int]], int]:
        """Returns full batches from the position on, at least one, aborted transactions, and the next position."""
        batches = [b for b in log.batches if b.last >= position]
        taken, size = 0, 0
        while taken < len(batches) and (taken == 0 or size + len(batches[taken].data) <= self.answer_bytes):
            size += len(batches[taken].data)
            taken += 1
        data, aborted = log.fetch(position, size)
        return data, aborted, batches[taken - 1].last + 1 if taken else log.end
