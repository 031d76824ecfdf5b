"""Counts what fetching asks of brokers, while it does: once for each request and answer, never for a record."""

from __future__ import annotations

from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.traffic import BrokerTraffic, TaskTraffic


class TrafficCounter:
    """Filled on the thread that fetches; `total` may be asked for on any other when that is done."""

    def __init__(self) -> None:
        self._brokers: dict[int, BrokerTraffic] = {}
        self._ends: dict[str, int] = {}

    def add(self, traffic: BrokerTraffic) -> None:
        """Something more about one broker."""
        total = self._brokers.get(traffic.node)
        self._brokers[traffic.node] = total + traffic if total else traffic

    def saw_end(self, tp: TopicPartition, high_watermark: int) -> None:
        """Where the partition's log ended when it was read a moment ago."""
        self._ends[str(tp)] = max(high_watermark, self._ends.get(str(tp), 0))

    def total(self) -> TaskTraffic:
        """All that was counted."""
        return TaskTraffic(tuple(b for _, b in sorted(self._brokers.items())), dict(self._ends))
