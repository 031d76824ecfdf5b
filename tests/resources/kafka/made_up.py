"""Fake brokers: they serve logs in memory as Kafka does, and count requests by kind."""

from __future__ import annotations

import asyncio
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kafka.errors import OffsetOutOfRangeError

from sluice.pipelines.model.kafka import TopicPartition
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.protocol.messages import ClusterView, FetchAnswer, FetchPart, Leadership, printed_id
from sluice.testing.logs import Log

TOPIC_ID = printed_id(uuid.UUID(int=7))


class Brokers:
    """A replacement for the wire. `count` brokers lead the `logs` in turn; `starts` are log starts above 0.

    As in Kafka, a look-up by time may answer with a marker. The first partition of a fetch returns at least one whole
    batch of any size (KIP-74); later batches are cut at the limit. An answer has at most `limit` bytes.
    """

    bootstrap = "made:up"

    def __init__(self, logs: Mapping[TopicPartition, Log], count: int = 1, limit: int = 55 << 20) -> None:
        self.logs, self.limit = dict(logs), limit
        self.starts: dict[TopicPartition, int] = {}
        self.requests: Counter[str] = Counter()
        self._indexes: dict[int, Index] = {}
        self._hits: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.sent = 0
        """Bytes of records."""
        self.places = {tp: Leadership(tp, TOPIC_ID, i % count, 0, None) for i, tp in enumerate(self.logs)}
        self.after: Callable[[str], None] = lambda kind: None
        """Called after each request, with its kind."""

    def build_cluster(self) -> KafkaCluster:
        kafka = KafkaCluster(KafkaAddress(self.bootstrap, {}))
        kafka._wire = self  # type: ignore[assignment]
        return kafka

    def run(self, doing: str, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return asyncio.run(function(*args))  # type: ignore[arg-type]

    async def gather(self, coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
        return [await one for one in coroutines]

    async def layout(self, topics: Iterable[str] | None) -> ClusterView:
        return ClusterView("c", {tp.topic: TOPIC_ID for tp in self.logs}, self.places, {})

    async def send(self, leader: int, request: Any) -> Any:
        kind = type(request).__name__.removesuffix("Request")
        self.requests[kind] += 1
        answer = {"ListOffsets": self._list_offsets, "Fetch": self._fetch}[kind](request)
        self.after(kind)
        return answer

    def _list_offsets(self, request: Any) -> Any:
        topics = [
            SimpleNamespace(name=t.name, partitions=[self._find_offset(t.name, p) for p in t.partitions])
            for t in request.topics
        ]
        return SimpleNamespace(topics=topics)

    def _find_offset(self, topic: str, request: Any) -> Any:
        tp = TopicPartition(topic, request.partition_index)
        start, records = self.starts.get(tp, 0), self._get_index(tp).records
        hit = self._hits.get(key := (id(self.logs[tp]), start, request.timestamp))
        if hit is None:
            matches = ((o, s) for o, s in records if o >= start and s >= request.timestamp)
            hit = self._hits[key] = next(matches, (-1, -1))
        return SimpleNamespace(partition_index=tp.partition, error_code=0, offset=hit[0], timestamp=hit[1])

    def _get_index(self, tp: TopicPartition) -> Index:
        log = self.logs[tp]
        if id(log) not in self._indexes:
            self._indexes[id(log)] = Index(log, [b.last for b in log.batches], log.stamps(markers=True))
        return self._indexes[id(log)]

    def _fetch(self, request: Any) -> FetchAnswer:
        answer, budget, first = FetchAnswer(0, None), min(request.max_bytes, self.limit), True
        for topic in request.topics:
            topic_id = printed_id(topic.topic_id)
            for p in topic.partitions:
                tp = TopicPartition(topic.topic, p.partition)
                part = self._build_part(tp, p.fetch_offset, min(p.partition_max_bytes, budget), first)
                answer.parts[topic_id, tp.partition] = part
                budget -= min(len(part.records), budget)
                first = first and not len(part.records)
                self.sent += len(part.records)
        return answer

    def _build_part(self, tp: TopicPartition, position: int, limit: int, first: bool) -> FetchPart:
        index = self._get_index(tp)
        end = index.log.end
        if not self.starts.get(tp, 0) <= position <= end:
            return FetchPart(OffsetOutOfRangeError, -1, -1, -1, (), memoryview(b""))
        data, at = b"", bisect_left(index.lasts, position)
        size = len(index.log.batches[at].data) if at < len(index.lasts) else 0
        limit = max(limit, size) if first else limit
        while size <= limit and len(data) < limit and at < len(index.lasts):
            data, at = data + index.log.batches[at].data, at + 1
        return FetchPart(None, end, end, -1, (), memoryview(data[:limit]), self.starts.get(tp, 0))


@dataclass(frozen=True)
class Index:
    """A log with its batches' last offsets and its records' stamps, for repeated look-ups."""

    log: Log
    lasts: list[int]
    records: list[tuple[int, int]]


def find_first_records(log: Log, times: Sequence[int]) -> list[tuple[int, int] | None]:
    """Returns (offset, stamp) of each time's first record with that stamp or a later one; markers are ignored."""
    records = log.stamps()
    return [next(((o, s) for o, s in records if s >= time), None) for time in times]
