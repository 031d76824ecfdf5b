"""A Fetcher over logs in memory, with responses of any size, damage and failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.model.kafka import FetchLimits, TopicPartition
from sluice.pipelines.model.plans import Slice
from sluice.pipelines.model.traffic import TaskTraffic
from sluice.pipelines.ports import Fetched, FetchFailed
from sluice.testing.logs import Log


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
    read: list[tuple[Slice, ...]] = field(default_factory=list)
    limits: FetchLimits | None = None
    cut_short: int | None = None
    counted: TaskTraffic = field(default_factory=TaskTraffic)

    def stream(self, slices: Sequence[Slice], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        self.read.append(tuple(slices))
        self.limits = limits
        answers = self._answers(slices, limits)
        for count, answer in enumerate(answers):
            if self.cut_short is not None and count >= self.cut_short:
                return
            yield answer

    def traffic(self) -> TaskTraffic:
        return self.counted

    def close(self) -> None: ...

    def _answers(self, slices: Sequence[Slice], limits: FetchLimits) -> Iterator[Fetched | FetchFailed]:
        """Yields one response for each active offset range in turn, like a leader."""
        waiting = list(enumerate(slices))
        active: list[Iterator[Fetched | FetchFailed]] = []
        while waiting or active:
            while waiting and len(active) < limits.active_slices:
                active.append(self._slice(*waiting.pop(0)))
            for one in list(active):
                answer = next(one, None)
                if answer is None:
                    active.remove(one)
                else:
                    yield answer

    def _slice(self, index: int, s: Slice) -> Iterator[Fetched | FetchFailed]:
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
