"""Broker traffic of a batch: sums by broker and by topic, and which of it is notable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.model.traffic import BrokerTraffic, TaskTraffic, Traffic, by_broker
from sluice.pipelines.util.units import many

THROTTLED_SHARE = 0.1
"""The share of the time with a broker from which throttling is worth a word."""
SLOW_MS, SLOW_TIMES = 1000.0, 4.0
"""A broker is slow whose median answer takes this long, and this many times the median of all others."""
SMALL_BYTES, MANY_REQUESTS = 64 << 10, 200
"""This many requests with no more than this each cost more than their records."""


@dataclass(frozen=True, slots=True)
class TopicTraffic:
    """A batch's reads of one topic. `behind` is as in `Traffic`; None where nobody counted."""

    topic: str
    records: int = 0
    bytes: int = 0
    behind: int | None = None


def traffic_of(sent: Iterable[TaskTraffic], receipts: Sequence[Receipt]) -> Traffic:
    """Returns the traffic of a batch, from its tasks' traffic and finished offset ranges."""
    total = sum(sent, TaskTraffic())
    read: dict[str, int] = {}
    topics: dict[str, str] = {}
    for r in receipts:
        tp = str(r.offset_range.tp)
        read[tp], topics[tp] = max(read.get(tp, 0), r.offset_range.end), r.offset_range.topic
    behind: dict[str, int] = {}
    for tp in sorted(read.keys() & total.ends.keys()):
        behind[topics[tp]] = behind.get(topics[tp], 0) + max(total.ends[tp] - read[tp], 0)
    return Traffic(by_broker(total.brokers), behind)


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
    """The broker, for people."""
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
                " new leader; if nobody restarted that broker, see its log"
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
