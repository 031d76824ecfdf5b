"""Facts about brokers from fetching: the lag at the end of a batch, and notable delays and errors."""

from __future__ import annotations

from dataclasses import replace

from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import (
    BrokerTraffic,
    Counts,
    EngineKind,
    EngineUse,
    Latency,
    Receipt,
    TaskTraffic,
    Traffic,
)
from sluice.pipelines.status.batch_facts import TopicTraffic, by_topic, notable, traffic_of


def make_receipt(topic: str, partition: int, start: int, end: int) -> Receipt:
    counts = Counts(landed=end - start - 1, compacted=1)
    return Receipt(
        OffsetRange(topic, partition, "id", start, end), end, counts, (), "a", input_bytes=10 * (end - start)
    )


def make_traffic(node: int, ms: int, count: int = 10, **more: int) -> BrokerTraffic:
    latency = sum([Latency.of(ms * 1000)] * count, Latency())
    return BrokerTraffic(node, f"b{node}:9092", requests=count, bytes=count << 20, latency=latency, **more)


def test_topic_lag_is_counted_from_end_of_last_range() -> None:
    """A partition that two tasks read counts once, from where the later offset range ends."""
    receipts = [make_receipt("orders", 0, 0, 50), make_receipt("orders", 0, 50, 100), make_receipt("orders", 1, 0, 10)]
    sent = [TaskTraffic(ends={"orders:0": 110}), TaskTraffic(ends={"orders:0": 120, "orders:1": 10, "gone:0": 7})]
    traffic = traffic_of(sent, receipts, EngineUse(EngineKind.PROCESSES))
    assert traffic.behind == {"orders": 20}
    assert by_topic(receipts, traffic) == (TopicTraffic("orders", 107, 1100, 20),)


def test_adopted_ranges_are_not_counted_again() -> None:
    receipts = [make_receipt("orders", 0, 0, 50), replace(make_receipt("orders", 1, 0, 50), adopted=True)]
    assert by_topic(receipts, Traffic()) == (TopicTraffic("orders", 49, 500, None),)


def test_normal_traffic_is_not_notable() -> None:
    assert notable([make_traffic(1, 5), make_traffic(2, 9, throttle_ms=1), make_traffic(3, 40)]) == []
    assert notable([]) == []
    assert notable([BrokerTraffic(1)]) == []


def test_throttling_is_reported_with_quota_to_raise() -> None:
    (note,) = notable([make_traffic(1, 10, throttle_ms=900, throttled=3), make_traffic(2, 10)])
    assert note.startswith("broker 1 at b1:9092 throttled this client for 0.9 s, 90 % of the time")
    assert "consumer_byte_rate" in note


def test_slow_broker_is_detected_by_comparison_with_other_brokers() -> None:
    (note,) = notable([make_traffic(1, 20), make_traffic(2, 3000), make_traffic(3, 20)])
    assert note.startswith("broker 2 at b2:9092 takes 3,000 ms")
    assert notable([make_traffic(1, 3000), make_traffic(2, 3000)]) == []
    assert notable([make_traffic(1, 3000)]) == []


def test_leader_changes_and_lost_connections_are_reported() -> None:
    moved, lost = notable(
        [make_traffic(1, 5, moved=2), replace(make_traffic(2, 5, reconnects=1), errors={"no answer": 1})]
    )
    assert "gave up the lead of 2 partitions" in moved
    assert "left 1 request without an answer and was connected to again 1 time:" in lost


def test_many_small_fetch_responses_are_reported() -> None:
    (note,) = notable([replace(make_traffic(1, 5, count=300), bytes=300_000)])
    assert note.startswith("300 fetches brought 1.0 kB each")
