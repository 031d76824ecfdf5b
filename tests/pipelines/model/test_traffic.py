"""Sums of traffic: equal in any grouping and order, bounded in size, and percentiles are never too low."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sluice.pipelines.model.plans import to_json
from sluice.pipelines.model.receipts import (
    BUCKETS,
    BrokerTraffic,
    Latency,
    TaskTraffic,
    Traffic,
    by_broker,
    find_bucket,
    get_bound_us,
    sum_brokers,
)

TIMES = st.integers(0, 100_000_000)
AMOUNTS = st.integers(0, 1 << 40)
LATENCIES = st.lists(TIMES, max_size=20).map(lambda times: sum(map(Latency.of, times), Latency()))
BROKERS = st.builds(
    BrokerTraffic,
    node=st.integers(0, 3),
    address=st.sampled_from(["", "a:9092", "b:9092"]),
    requests=AMOUNTS,
    empty=AMOUNTS,
    bytes=AMOUNTS,
    latency=LATENCIES,
    errors=st.dictionaries(st.sampled_from(["no answer", "NOT_LEADER_FOR_PARTITION", "x"]), st.integers(1, 9)),
    held_us=AMOUNTS,
    throttled=AMOUNTS,
    throttle_ms=AMOUNTS,
    moved=AMOUNTS,
    reconnects=AMOUNTS,
)
ENDS = st.dictionaries(st.sampled_from(["orders:0", "orders:1", "sales:0"]), AMOUNTS)
TASKS = st.builds(TaskTraffic, brokers=st.lists(BROKERS, max_size=5).map(by_broker), ends=ENDS)
BATCHES = st.builds(Traffic, brokers=st.lists(BROKERS, max_size=5).map(by_broker), behind=ENDS)


@given(TASKS, TASKS, TASKS)
def test_task_traffic_addition_is_associative_and_commutative(a: TaskTraffic, b: TaskTraffic, c: TaskTraffic) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + TaskTraffic() == a


@given(BATCHES, BATCHES, BATCHES)
def test_batch_traffic_addition_is_associative_and_keeps_latest_lag(a: Traffic, b: Traffic, c: Traffic) -> None:
    assert (a + b) + c == a + (b + c)
    assert (a + b).brokers == (b + a).brokers
    assert {t: n for t, n in (a + b).behind.items() if t in b.behind} == b.behind
    assert a + Traffic() == a == Traffic() + a


@given(st.lists(BROKERS))
def test_total_traffic_is_the_sum_over_brokers(brokers: list[BrokerTraffic]) -> None:
    total, merged = sum_brokers(brokers), sum_brokers(by_broker(brokers))
    assert total == merged
    assert (total.requests, total.bytes) == (sum(b.requests for b in brokers), sum(b.bytes for b in brokers))
    assert total.latency.count == sum(b.latency.count for b in brokers)


@given(TASKS)
def test_task_traffic_round_trips_through_json(sent: TaskTraffic) -> None:
    assert TypeAdapter(TaskTraffic).validate_json(to_json(sent)) == sent


@given(TIMES)
def test_latency_is_within_the_bounds_of_its_bucket(us: int) -> None:
    bucket = find_bucket(us)
    assert 0 <= bucket < BUCKETS
    assert bucket == BUCKETS - 1 or us < get_bound_us(bucket)
    assert bucket == 0 or us >= get_bound_us(bucket - 1)


@given(st.lists(TIMES, min_size=1, max_size=200), st.floats(0.01, 1))
def test_percentile_is_never_too_low_and_at_most_half_too_high(times: list[int], share: float) -> None:
    estimate = sum(map(Latency.of, times), Latency()).percentile_ms(share) * 1000
    ordered = sorted(times)
    true = next(t for i, t in enumerate(ordered, 1) if i >= share * len(ordered))
    assert estimate >= true * 0.999999
    if true < get_bound_us(BUCKETS - 2):
        assert estimate <= max(1.5 * true, 1000) * 1.000001


def test_percentile_is_zero_without_responses() -> None:
    assert Latency().percentile_ms(0.99) == 0


def test_broker_traffic_stays_small_after_many_requests() -> None:
    busy = BrokerTraffic(1, "broker-1.kafka.internal:9092", errors={"no answer": 3})
    for us in range(0, 60_000_000, 10_000):
        busy += BrokerTraffic(1, requests=1, bytes=1 << 20, latency=Latency.of(us))
    assert busy.requests == 6000
    assert len(to_json(busy)) < 700
    assert len(to_json(replace(busy, latency=Latency.of(5000)))) < 320
