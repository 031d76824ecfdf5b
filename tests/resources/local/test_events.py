"""Sample events: a seed always gives the same bytes, and the reported numbers are those that a consumer reads."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaConsumer, TopicPartition

from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.resources.local import events
from sluice.resources.local.events import Mix, SendOptions
from sluice.resources.local.local_kafka import LocalKafka

HOUR = 3_600_000
NOW = 1_795_000_000_000


def make_events(mix: Mix, count: int = 2000) -> list[events.SampleEvent]:
    return list(events.orders(mix, count, NOW - HOUR, NOW))


@given(st.integers(0, 2**32), st.integers(0, 10**9))
def test_same_seed_repeats_events_and_different_seed_changes_events(seed: int, first: int) -> None:
    mix = Mix(seed, first, bad=0.1, tombstones=0.1, headers=0.3)
    assert make_events(mix, 50) == make_events(mix, 50)
    assert make_events(mix, 50) != make_events(Mix(seed + 1, first, bad=0.1, tombstones=0.1, headers=0.3), 50)


def test_events_are_orders_of_about_190_bytes_in_order_of_time() -> None:
    sample = make_events(Mix(1, first=500))
    assert [e.timestamp for e in sample] == sorted(e.timestamp for e in sample)
    assert (sample[0].timestamp, sample[-1].timestamp) == (NOW - HOUR, NOW)
    orders = [json.loads(e.value or b"") for e in sample]
    assert len({o["order_id"] for o in orders}) == len(orders)
    assert all(o["customer"].encode() == e.key for o, e in zip(orders, sample, strict=True))
    assert {len(o) for o in orders} == {9}
    assert 170 < sum(len(e.value or b"") for e in sample) / len(sample) < 200


def test_shares_of_special_events_match_the_mix() -> None:
    sample = make_events(Mix(2, bad=0.05, tombstones=0.1, headers=0.5), 20_000)
    assert 0.09 < sum(e.value is None for e in sample) / 20_000 < 0.11
    assert 0.04 < sum(e.malformed for e in sample) / 20_000 < 0.06
    assert 0.48 < sum(bool(e.headers) for e in sample) / 20_000 < 0.52
    assert not any(_is_order(e.value) for e in sample if e.malformed)
    assert all(_is_order(e.value) for e in sample if e.value is not None and not e.malformed)


def _is_order(value: bytes | None) -> bool:
    try:
        order = json.loads(value or b"")
    except ValueError:
        return False
    return isinstance(order, dict) and isinstance(order.get("items"), int)


@pytest.mark.parametrize("transactional_id", [None, "events-test"])
def test_reported_counts_match_a_consumer(
    transactional_id: str | None, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topics = (fresh_topic(partitions=3), fresh_topic(partitions=2))
    access = KafkaSettings(bootstrap=kafka.bootstrap)
    mix = Mix(3, tombstones=0.05, headers=0.2, bad=0.02, aborted=0.4)
    heard: list[int] = []
    how = SendOptions(topics, transactional_id, transaction_records=200, compression="gzip")
    sent = events.send(access, events.orders(mix, 5000, NOW - HOUR, NOW), mix, how, heard.append)
    assert sent.records == 5000 == heard[-1]
    assert sent.committed + sent.aborted == 5000
    assert (sent.aborted > 0) is (transactional_id is not None)

    records = [r for t in topics for r in _consume_topic(kafka, t)]
    assert len(records) == sent.committed
    assert sum(r.value is None for r in records) == sent.tombstones
    assert sum(bool(r.headers) for r in records) == sent.with_headers
    assert sum(len(r.value or b"") for r in records) == sent.bytes
    partitions = {(r.topic, r.key): r.partition for r in records}
    assert all(partitions[r.topic, r.key] == r.partition for r in records)


def _consume_topic(kafka: LocalKafka, topic: str) -> list[object]:
    consumer = KafkaConsumer(
        bootstrap_servers=kafka.bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    try:
        tps = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic)]
        consumer.assign(tps)
        ends = consumer.end_offsets(tps)
        consumed: list[object] = []
        while any(consumer.position(p) < ends[p] for p in tps):
            for records in consumer.poll(timeout_ms=500).values():
                consumed += records
        return consumed
    finally:
        consumer.close()


def test_topic_creation_is_idempotent(kafka: LocalKafka) -> None:
    access = KafkaSettings(bootstrap=kafka.bootstrap)
    for _ in range(2):
        events.create(access, ["made-by-events"], 4)
    assert "made-by-events" in events.topics_of(access)


def test_unreachable_kafka_is_named_in_the_error() -> None:
    access = KafkaSettings(bootstrap="127.0.0.1:9", bootstrap_timeout_ms=300)
    with pytest.raises(KafkaUnavailable, match=r"127\.0\.0\.1:9"):
        events.topics_of(access)
