"""Cluster metadata: ids, leaders, ends, offsets by time and epochs, compared with Kafka's tools."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from random import Random

import pytest

from sluice.pipelines.errors import KafkaUnavailable, NotAuthorized, UnknownTopic
from sluice.pipelines.model.kafka import Isolation, OffsetAtTime, TopicPartition
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from tests.resources.kafka.tools import (
    build_range,
    consume_records,
    describe,
    make_address,
    open_admin,
    open_producer,
    open_transaction,
    produce,
    wait_until,
)


@pytest.fixture
def cluster(kafka):
    with closing(KafkaCluster(make_address(kafka))) as kafka_cluster:
        yield kafka_cluster


def test_topic_ids_match_kafka_tools(kafka, cluster, fresh_topic):
    topic = fresh_topic(partitions=2)
    produce(kafka, topic, 1)
    with open_transaction(kafka, topic, 1) as producer:  # creates internal topics, which are ignored
        producer.abort_transaction()
    process = kafka.tool(
        "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", kafka.bootstrap, "--describe", "--topic", topic
    )
    assert f"TopicId: {cluster.topics()[topic]}" in process.stdout
    assert not [name for name in cluster.topics() if name.startswith("__")]
    assert cluster.cluster_id() == kafka.status().cluster_id


def test_partition_ends_are_read_under_both_isolation_levels(kafka, fresh_topic):
    topic = fresh_topic(partitions=3)
    produce(kafka, topic, 10, partition=1)
    with open_transaction(kafka, topic, 5, partition=1) as producer:
        empty, state, _ = describe(kafka, topic)
        assert (state.log_start, state.last_stable_offset, state.high_watermark) == (0, 10, 15)
        assert (empty.log_start, empty.last_stable_offset, empty.high_watermark, empty.log_bytes) == (0, 0, 0, 0)
        assert (state.leader, state.leader_epoch) == (1, 0)
        assert state.log_bytes
        (_, uncommitted, _) = describe(kafka, topic, isolation=Isolation.READ_UNCOMMITTED)
        assert uncommitted.last_stable_offset == 15
        producer.commit_transaction()
    wait_until(lambda: describe(kafka, topic)[1].last_stable_offset == 16)


def test_transaction_blocking_last_stable_offset_is_named(kafka, cluster, fresh_topic):
    topic = fresh_topic(partitions=2)
    blocked, free = TopicPartition(topic, 0), TopicPartition(topic, 1)
    produce(kafka, topic, 3, partition=0)
    with open_transaction(kafka, topic, 2, partition=0) as producer:
        (transaction,) = cluster.open_transactions([blocked, free]).values()
        assert (transaction.start, transaction.name) == (3, producer.config["transactional_id"])
        assert transaction.producer_id >= 0
        producer.commit_transaction()
    wait_until(lambda: not cluster.open_transactions([blocked, free]))


def test_offsets_by_time_include_record_timestamp(kafka, cluster, fresh_topic):
    topic = fresh_topic(partitions=2)
    with open_producer(kafka) as producer:
        for stamp in (1_000, 2_000, 3_000):
            producer.send(topic, b"x", partition=0, timestamp_ms=stamp)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    assert cluster.offsets_at({first: 1_500, second: 0}) == {first: OffsetAtTime(1, 2_000), second: None}
    assert cluster.offsets_at({first: 3_001}) == {first: None}
    assert cluster.offsets_at({first: -5}) == {first: OffsetAtTime(0, 1_000)}
    with open_transaction(kafka, topic, 1) as producer:
        assert cluster.offsets_at({first: 3_001})[first].offset == 3, "over all records, also unstable ones"
        producer.abort_transaction()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ["in order", "out of order"])
def test_offsets_by_time_never_point_at_markers(kafka, cluster, fresh_topic, seed, order):
    """Records of committed and aborted transactions arrive late; the expected ones are read by Kafka's consumer."""
    topic, draw = fresh_topic(partitions=3), Random(seed)
    written = _produce_lagging(kafka, topic, draw, order == "in order")
    states = cluster.partitions([topic], Isolation.READ_UNCOMMITTED)
    records = {
        s.tp: consume_records(kafka, build_range(s, 0, s.high_watermark), Isolation.READ_UNCOMMITTED)
        for s in states
        if s.high_watermark
    }
    for at in draw.sample(range(min(written) - 10, max(written) + 10), 40):
        offsets = cluster.offsets_at({s.tp: at for s in states})
        assert offsets == {s.tp: _find_first(records.get(s.tp, ()), at) for s in states}, at
    assert cluster.offsets_at({s.tp: max(written) + 1 for s in states}) == {s.tp: None for s in states}


def _produce_lagging(kafka, topic: str, draw: Random, in_order: bool) -> list[int]:
    """Produce records stamped within one hour a day ago, in transactions of two producers; return the stamps."""
    stamps = [time.time_ns() // 1_000_000 - 86_400_000 + draw.randrange(3_600_000) for _ in range(300)]
    unsent = sorted(stamps, reverse=True) if in_order else list(stamps)
    with ExitStack() as stack:
        producers = [
            stack.enter_context(open_producer(kafka, transactional_id=f"lag-{topic}-{n}", batch_size=2_000))
            for n in range(2)
        ]
        for producer in producers:
            producer.init_transactions()
        while unsent:
            producer = draw.choice(producers)
            producer.begin_transaction()
            for _ in range(min(draw.randint(1, 40), len(unsent))):
                value = b"x" * draw.choice((10, 500))
                producer.send(topic, value, partition=draw.choice((0, 0, 1, 2)), timestamp_ms=unsent.pop())
            producer.abort_transaction() if draw.random() < 0.3 else producer.commit_transaction()
    return stamps


def _find_first(records, at: int) -> OffsetAtTime | None:
    """Returns the first record with at least this stamp; a record is offset, key, value, headers and stamp."""
    return next((OffsetAtTime(r[0], r[-1]) for r in records if r[-1] >= at), None)


def test_offsets_by_time_follow_recreated_and_grown_topic(kafka, cluster, fresh_topic):
    topic = fresh_topic()
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    produce(kafka, topic, 3)
    cluster.partitions([topic], Isolation.READ_COMMITTED)
    assert cluster.offsets_at({first: 0})[first].offset == 0
    with open_admin(kafka) as client:
        client.delete_topics([topic])
        wait_until(lambda: topic not in cluster.topics())
        with pytest.raises(UnknownTopic):
            cluster.offsets_at({first: 0})
        client.create_topics({topic: {"num_partitions": 2}}, wait_for_metadata=True)
    produce(kafka, topic, 2, 1)
    offsets = cluster.offsets_at({first: 0, second: 0})
    assert (offsets[first], offsets[second].offset) == (None, 0)


def test_all_partitions_of_large_topic_are_read(kafka, cluster, fresh_topic):
    topic = fresh_topic(partitions=200)
    states = cluster.partitions([topic], Isolation.READ_COMMITTED)
    assert [s.partition for s in states] == list(range(200))
    assert {s.topic_id for s in states} == {cluster.topics()[topic]}
    assert cluster.epoch_ends({s.tp: s.leader_epoch for s in states}) == {s.tp: 0 for s in states}


@pytest.mark.faults
def test_leaders_and_epochs_are_current_after_leader_change(kafka3, fresh_topic):
    # With one of two replicas down, the high watermark would otherwise wait for the second: OFFSET_NOT_AVAILABLE.
    alone_will_do = {"min.insync.replicas": "1"}
    topic = fresh_topic(cluster=kafka3, assignments={0: [2, 1], 1: [1, 3]}, config=alone_will_do)
    alone = fresh_topic(cluster=kafka3, assignments={0: [1], 1: [2]})
    for partition in range(2):
        produce(kafka3, topic, 10, partition)
    began = KafkaCluster(make_address(kafka3))
    before = began.partitions([topic], Isolation.READ_UNCOMMITTED)
    kafka3.kill_broker(2)
    try:
        with closing(began):
            offsets = began.offsets_at(dict.fromkeys((s.tp for s in before), 0))
        assert [offsets[s.tp].offset for s in before] == [0, 0], "of the leaders as they are now"
        after = wait_until(lambda: [s for s in describe(kafka3, topic) if s.partition == 0 and s.leader == 1])[0]
        assert after.leader_epoch > before[0].leader_epoch
        assert (after.log_start, after.last_stable_offset) == (0, 10)
        produce(kafka3, topic, 5, 0, acks=1)
        with closing(KafkaCluster(make_address(kafka3))) as cluster:
            first, second = (s.tp for s in before)
            ends = cluster.epoch_ends({first: before[0].leader_epoch, second: before[1].leader_epoch})
            assert ends == {first: 10, second: 10}
            assert cluster.epoch_ends({first: after.leader_epoch}) == {first: 15}
            assert cluster.epoch_ends({first: after.leader_epoch + 7}) == {}
        with (
            closing(KafkaCluster(make_address(kafka3), patience=1.0)) as cluster,
            pytest.raises(KafkaUnavailable, match="LEADER_NOT_AVAILABLE") as caught,
        ):
            cluster.partitions([alone], Isolation.READ_COMMITTED)
        assert (caught.value.topic, caught.value.partition) == (alone, 1)
    finally:
        kafka3.start_broker(2)


def test_an_unknown_topic_is_named(cluster, fresh_topic):
    with pytest.raises(UnknownTopic, match="nowhere") as caught:
        cluster.partitions([fresh_topic(), "nowhere"], Isolation.READ_COMMITTED)
    assert caught.value.topic == "nowhere"
    with pytest.raises(UnknownTopic):
        cluster.offsets_at({TopicPartition(fresh_topic(), 99): 0})
    with pytest.raises(UnknownTopic):
        cluster.partitions(["no such name!"], Isolation.READ_COMMITTED)


def test_unreachable_brokers_are_reported_with_each_address():
    nowhere = KafkaAddress("127.0.0.1:1,127.0.0.1:2", {"bootstrap_timeout_ms": 200, "sasl_plain_password": "sesame"})
    with closing(KafkaCluster(nowhere)) as cluster, pytest.raises(KafkaUnavailable) as caught:
        cluster.topics()
    assert "127.0.0.1:1: connection refused" in caught.value.message
    assert "127.0.0.1:2: connection refused" in caught.value.message
    assert "127.0.0.1:1,127.0.0.1:2" in caught.value.remedy
    assert "sesame" not in str(caught.value)


def test_login_to_listener_without_authentication_is_refused(kafka):
    login = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"}
    user = {"sasl_plain_username": "ali", "sasl_plain_password": "sesame"}
    with closing(KafkaCluster(make_address(kafka, **login, **user))) as cluster, pytest.raises(NotAuthorized) as caught:
        cluster.topics()
    assert "security_protocol" in caught.value.remedy
    assert "sesame" not in str(caught.value)
