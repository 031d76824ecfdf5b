"""The facts of a batch, or of several: sums over its receipts, its traffic, and the results of its contract.

The terminal, Dagster's metadata, metrics and the batch report show these values and compute none of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from sluice.pipelines.contract.catalogue import ExpectationOutcome, Result, contract_results
from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.model.kafka import Key, Range, union
from sluice.pipelines.model.plans import Plan, Task
from sluice.pipelines.model.receipts import (
    NO_TRAFFIC,
    BrokerTraffic,
    Counts,
    Drift,
    EngineUse,
    Part,
    PartKind,
    Receipt,
    TaskTraffic,
    Traffic,
    by_broker,
    count_files,
    sum_brokers,
    sum_counts,
)
from sluice.pipelines.util.documents import Derived
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.units import many
from sluice.pipelines.validation.drift import sum_drift

THROTTLED_SHARE = 0.1
"""The share of the time with a broker from which throttling is worth a word."""
SLOW_MS, SLOW_TIMES = 1000.0, 4.0
"""A broker is slow whose median answer takes this long, and this many times the median of all others."""
SMALL_BYTES, MANY_REQUESTS = 64 << 10, 200
"""This many requests with no more than this each cost more than their records."""


@dataclass(frozen=True, slots=True)
class TopicTraffic:
    """A batch's reads of one topic. `behind` is as in `Traffic`; None if not counted."""

    topic: str
    records: int = 0
    bytes: int = 0
    behind: int | None = None


def traffic_of(sent: Iterable[TaskTraffic], receipts: Sequence[Receipt], engine: EngineUse) -> Traffic:
    """Returns the traffic of a batch, from its tasks' traffic, its finished offset ranges, and the tasks' engine."""
    total = sum(sent, TaskTraffic())
    read: dict[str, int] = {}
    topics: dict[str, str] = {}
    for r in receipts:
        tp = str(r.offset_range.tp)
        read[tp], topics[tp] = max(read.get(tp, 0), r.offset_range.end), r.offset_range.topic
    behind: dict[str, int] = {}
    for tp in sorted(read.keys() & total.ends.keys()):
        behind[topics[tp]] = behind.get(topics[tp], 0) + max(total.ends[tp] - read[tp], 0)
    return Traffic(by_broker(total.brokers), behind, (engine,))


def by_topic(receipts: Iterable[Receipt], traffic: Traffic) -> tuple[TopicTraffic, ...]:
    """Returns the reads of each topic, by name. Leaves out adopted offset ranges: an earlier attempt read them."""
    records: dict[str, int] = {}
    volume: dict[str, int] = {}
    for r in receipts:
        if not r.adopted:
            topic = r.offset_range.topic
            records[topic] = records.get(topic, 0) + r.counts.total - r.counts.compacted
            volume[topic] = volume.get(topic, 0) + r.input_bytes
    return tuple(TopicTraffic(t, n, volume[t], traffic.behind.get(t)) for t, n in sorted(records.items()))


def notable(brokers: Sequence[BrokerTraffic]) -> list[str]:
    """Returns warnings about these brokers, a sentence with a remedy each."""
    return [
        *_describe_throttling(brokers),
        *_slow(brokers),
        *_describe_moves(brokers),
        *_lost(brokers),
        *_small(brokers),
    ]


def name_of(b: BrokerTraffic) -> str:
    """Returns the broker's readable name."""
    return f"broker {b.node}" + (f" at {b.address}" if b.address else "")


def _describe_throttling(brokers: Sequence[BrokerTraffic]) -> Iterator[str]:
    for b in brokers:
        if b.throttle_ms / 1e3 > THROTTLED_SHARE * b.seconds:
            yield (
                f"{name_of(b)} throttled this client for {b.throttle_ms / 1e3:.1f} s,"
                f" {b.throttle_ms / 10 / b.seconds:.0f} % of the time with it: a quota (consumer_byte_rate,"
                " request_percentage) of its user or client id is used up; raise it with kafka-configs, or land fewer"
                " feeds at once"
            )


def _slow(brokers: Sequence[BrokerTraffic]) -> Iterator[str]:
    for b in brokers:
        median = b.latency.percentile_ms(0.5)
        others = sorted(o.latency.percentile_ms(0.5) for o in brokers if o is not b and o.latency.count)
        usual = others[len(others) // 2] if others else 0.0
        if others and median >= SLOW_MS and median > SLOW_TIMES * usual:
            yield (
                f"{name_of(b)} takes {median:,.0f} ms for half of its answers, the others {usual:,.0f} ms: check its"
                " disk, its load and the network to it, or move leaders away from it"
            )


def _describe_moves(brokers: Sequence[BrokerTraffic]) -> Iterator[str]:
    for b in brokers:
        if b.moved:
            yield (
                f"{name_of(b)} gave up the lead of {many(b.moved, 'partition')} amid reading, which went on with the"
                " new leader; if that broker was not restarted, see its log"
            )


def _lost(brokers: Sequence[BrokerTraffic]) -> Iterator[str]:
    for b in brokers:
        lost = b.errors.get("no answer", 0)
        if lost or b.reconnects:
            yield (
                f"{name_of(b)} left {many(lost, 'request')} without an answer and was connected to again"
                f" {many(b.reconnects, 'time')}: see its log and the network to it; nothing was lost, the missing"
                " answers were requested again"
            )


def _small(brokers: Sequence[BrokerTraffic]) -> Iterator[str]:
    answers, volume = sum(b.latency.count for b in brokers), sum(b.bytes for b in brokers)
    if answers >= MANY_REQUESTS and volume < SMALL_BYTES * answers:
        yield (
            f"{answers:,} fetches brought {volume / answers / 1000:,.1f} kB each: many small answers cost more time"
            " than their records; raise tuning.partition_bytes or tuning.request_bytes where the feed lowered them, and"
            " see batch.size and linger.ms of who produces"
        )


K = TypeVar("K")

ACTIVITIES = {
    "wait": "waiting for Kafka",
    "crc": "checksums",
    "decompress": "decompressing",
    "decode": "decoding records",
    "type": "typing JSON",
    "validate": "the contract",
    "encode": "encoding Parquet",
    "write": "writing to the lake",
}
"""A task's activities, in order: the name in receipts, and a description."""


@dataclass(frozen=True, slots=True)
class WorkTime:
    """Thread time in nanoseconds by activity, and the work done in it. `records` counts the visible ones."""

    ns: dict[str, int] = field(default_factory=dict)
    records: int = 0
    input_bytes: int = 0
    offset_ranges: int = 0

    @property
    def total(self) -> int:
        return sum(self.ns.values())

    def __add__(self, other: WorkTime) -> WorkTime:
        ns = {a: self.ns.get(a, 0) + other.ns.get(a, 0) for a in (self.ns | other.ns)}
        amounts = (
            self.records + other.records,
            self.input_bytes + other.input_bytes,
            self.offset_ranges + other.offset_ranges,
        )
        return WorkTime(ns, *amounts)

    @property
    def ns_per_record(self) -> Derived[dict[str, float]]:
        return {activity: round(self.per_record(ns), 1) for activity, ns in self.ns.items()}

    def per_record(self, ns: int) -> float:
        """`ns` for each record; 0 without records."""
        return ns / self.records if self.records else 0.0


@dataclass(frozen=True)
class BatchFacts:
    """The facts of these receipts. `took` is the time from the plan to the publish entry (ms), 0 if unknown."""

    receipts: Sequence[Receipt]
    traffic: Traffic = NO_TRAFFIC
    contract: Contract | None = None
    results: Sequence[Result] = ()
    took: int = 0

    @cached_property
    def counts(self) -> Counts:
        return sum_counts(self.receipts)

    @cached_property
    def bytes(self) -> int:
        return sum(p.bytes for r in self.receipts for p in r.parts)

    @cached_property
    def input_bytes(self) -> int:
        return sum(r.input_bytes for r in self.receipts)

    @cached_property
    def files(self) -> int:
        return count_files(self.receipts)

    @property
    def part_count(self) -> int:
        """The number of parts: a file that offset ranges share counts for each."""
        return sum(len(r.parts) for r in self.receipts)

    @cached_property
    def adopted_receipts(self) -> tuple[Receipt, ...]:
        """The receipts of offset ranges that an earlier attempt had finished."""
        return tuple(r for r in self.receipts if r.adopted)

    @cached_property
    def ordered_receipts(self) -> list[Receipt]:
        """The receipts in log order."""
        return sorted(self.receipts, key=lambda r: (r.offset_range.key, r.offset_range.start))

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The offset ranges, joined. For receipts of one partition."""
        return union(r.offset_range.range for r in self.receipts)

    def group(self, key: Callable[[Receipt], K]) -> dict[K, BatchFacts]:
        """Returns the facts of the receipts with the same key, in the order of the keys' first receipts."""
        return {k: BatchFacts(receipts) for k, receipts in group_by(self.receipts, key).items()}

    @property
    def by_partition(self) -> dict[Key, BatchFacts]:
        """The facts of each partition, by key."""
        return dict(sorted(self.group(lambda r: r.offset_range.key).items()))

    def parts(self, kind: PartKind) -> list[tuple[Receipt, Part]]:
        """The files of a kind, in log order."""
        return [(r, p) for r in self.ordered_receipts for p in r.of(kind)]

    def per_second(self, amount: int) -> float:
        """Returns the amount for each second from plan to publish; 0 if the time is unknown."""
        return amount * 1000 / self.took if self.took else 0.0

    @cached_property
    def task_time(self) -> WorkTime:
        return sum_times(self.receipts)

    @cached_property
    def topics(self) -> tuple[TopicTraffic, ...]:
        """The reads of each topic, by name."""
        return by_topic(self.receipts, self.traffic)

    @property
    def all_brokers(self) -> BrokerTraffic:
        """The traffic of all brokers together."""
        return sum_brokers(self.traffic.brokers)

    @cached_property
    def broker_notes(self) -> list[str]:
        """The notable traffic, a sentence each with a remedy; mostly none."""
        return notable(self.traffic.brokers)

    @cached_property
    def drift(self) -> tuple[Drift, ...]:
        return sum_drift(self.receipts)

    @cached_property
    def outcomes(self) -> list[ExpectationOutcome]:
        """The result of each expectation that is decided."""
        return contract_results(self.contract, self.receipts, self.results) if self.contract else []


def sum_times(receipts: Iterable[Receipt]) -> WorkTime:
    """The sum of these receipts, without offset ranges that an earlier attempt had finished."""
    read = (r for r in receipts if not r.adopted)
    times = (WorkTime(r.timings, r.counts.records + r.counts.dropped, r.input_bytes, 1) for r in read)
    return sum(times, WorkTime(dict.fromkeys(ACTIVITIES, 0)))


def by_task(plan: Plan, receipts: Iterable[Receipt]) -> list[tuple[Task, WorkTime]]:
    """Returns each task of the plan with the time of its finished offset ranges."""
    by_range = {r.offset_range: r for r in receipts}
    return [(task, sum_times(by_range[s] for s in task.offset_ranges if s in by_range)) for task in plan.tasks]
