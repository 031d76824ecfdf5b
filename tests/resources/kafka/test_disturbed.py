"""Lost answers, missing permissions, TLS and holes in logs, with a separate broker behind a proxy."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext

import numpy as np
import pyarrow as pa
import pytest
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType

from sluice.pipelines.errors import FeedError, KafkaUnavailable, NotAuthorized, Unknown
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.model.kafka import CommittedOffset, FetchLimits, Isolation, TopicPartition
from sluice.pipelines.ports import DeadLetter, FetchFailed
from sluice.pipelines.records.kafka_batches.encode import TO_SEND, Accumulator
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.kafka.group.all_groups import KafkaGroups
from sluice.resources.kafka.group.group import KafkaGroup
from sluice.resources.kafka.produce.sender import KafkaTarget
from sluice.resources.local import events
from tests.resources.kafka.proxy import (
    API_VERSIONS,
    DESCRIBE_CONFIGS,
    DESCRIBE_LOG_DIRS,
    END_TXN,
    FETCH,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FOR_LEADER_EPOCH,
    SYNC_GROUP,
)
from tests.resources.kafka.tools import (
    build_range,
    build_ranges,
    consume_records,
    describe,
    fetch,
    make_address,
    open_admin,
    open_producer,
    open_transaction,
    produce,
    unpack_records,
    wait_until,
)

pytestmark = [pytest.mark.kafka, pytest.mark.faults]
SMALL = FetchLimits(active_ranges=3, request_bytes=64 << 10, partition_bytes=16 << 10, ahead_bytes=64 << 10)


# -- lost answers


@pytest.mark.parametrize("lost", [1, 99])
@pytest.mark.parametrize("transactional", [True, False])
def test_lost_commit_response_is_retried_or_reported_as_unknown(behind, fresh_topic, lost, transactional):
    topic = fresh_topic(cluster=behind.cluster)
    spot = TopicPartition(topic, 0)
    offset = CommittedOffset(5, 0, "mark")
    with (
        closing(KafkaGroup(make_address(behind.cluster), f"g-{topic}", patience=3.0)) as group,
        group.join([topic], f"t-{topic}" if transactional else None) as member,
    ):
        if transactional:
            member.init_transactions()
        commit = member.commit_transaction if transactional else member.commit_plain
        behind.proxy.lose = {END_TXN if transactional else OFFSET_COMMIT: lost}
        with nullcontext() if lost == 1 else pytest.raises(Unknown, match="lost"):
            commit({spot: offset})
        behind.proxy.lose = {}
        assert member.fetch_committed([spot]) == {spot: offset}


def test_lost_commit_response_is_unknown_if_login_fails(behind, fresh_topic, monkeypatch):
    """The token endpoint is down when the commit has to be repeated over a new connection."""
    topic, committed = fresh_topic(cluster=behind.cluster), CommittedOffset(5, 0, "mark")
    spot = TopicPartition(topic, 0)

    async def refuse(*_):
        raise KafkaUnavailable("the token endpoint does not answer", remedy="wait")

    with (
        closing(KafkaGroup(make_address(behind.cluster), f"g-{topic}", patience=3.0)) as group,
        group.join([topic], f"t-{topic}") as member,
    ):
        member.init_transactions()
        behind.proxy.lose = {END_TXN: 1}
        with monkeypatch.context() as patched:
            patched.setattr(Wire, "find_coordinator", refuse)
            with pytest.raises(Unknown, match=r"lost.*token endpoint"):
                member.commit_transaction({spot: committed})
        assert member.fetch_committed([spot]) == {spot: committed}


def test_lost_join_response_leaves_only_one_member(behind, fresh_topic):
    topic = fresh_topic(cluster=behind.cluster)
    with closing(KafkaGroup(make_address(behind.cluster), f"g-{topic}", session=2.0)) as group:
        behind.proxy.lose = {JOIN_GROUP: 2}
        with group.join([topic], None) as member:
            assert len(group.members()) == 1
            member.commit_plain({TopicPartition(topic, 0): CommittedOffset(1)})
        assert group.members() == ()


def test_member_expired_during_join_joins_again(behind, fresh_topic):
    """The coordinator expires the only member while it joins."""
    topic = fresh_topic(cluster=behind.cluster)
    here = make_address(behind.cluster)
    with (
        closing(KafkaGroup(here, f"g-{topic}", session=1.0)) as group,
        closing(KafkaGroup(here, f"g-{topic}")) as looking,
        ThreadPoolExecutor() as pool,
    ):
        behind.proxy.hold(SYNC_GROUP)
        joining = group.join([topic], None)
        try:
            taking = pool.submit(joining.__enter__)
            wait_until(lambda: behind.proxy.held)
            wait_until(lambda: not looking.members())
        finally:
            behind.proxy.heal()
        taking.result().commit_plain({TopicPartition(topic, 0): CommittedOffset(1)})
        assert len(looking.members()) == 1
        joining.__exit__(None, None, None)


def test_leave_does_not_wait_for_response(behind, fresh_topic):
    topic, patient = fresh_topic(cluster=behind.cluster), {"request_timeout_ms": 3_600_000}
    with closing(KafkaGroup(make_address(behind.cluster, **patient), f"g-{topic}", session=2.0)) as group:
        with group.join([topic], None):
            behind.proxy.hold(LEAVE_GROUP)
        assert behind.proxy.held == (LEAVE_GROUP,)
        behind.proxy.heal()


def test_connection_lost_during_stream_is_reopened(behind, fresh_topic):
    topic = fresh_topic(partitions=2, cluster=behind.cluster)
    for partition in range(2):
        produce(behind.cluster, topic, 2000, partition)
    pieces = build_ranges(behind.cluster, topic)
    with closing(KafkaFetcher(make_address(behind.cluster), Isolation.READ_COMMITTED)) as fetcher:
        stream = fetcher.stream(pieces, SMALL)
        items = [next(stream)]
        behind.proxy.lose = {FETCH: 2}
        items += stream
        (traffic,) = fetcher.traffic().brokers
    assert behind.proxy.lose == {FETCH: 0}
    assert (traffic.errors, traffic.reconnects) == ({"no answer": 2}, 2)
    assert traffic.requests == traffic.latency.count + 2
    records = unpack_records(items, pieces)
    assert records == {index: consume_records(behind.cluster, piece) for index, piece in enumerate(pieces)}


def test_slow_responses_are_measured_in_latency(behind, fresh_topic):
    topic = fresh_topic(cluster=behind.cluster)
    produce(behind.cluster, topic, 1000)
    pieces = build_ranges(behind.cluster, topic)
    with closing(KafkaFetcher(make_address(behind.cluster), Isolation.READ_COMMITTED)) as fetcher:
        behind.proxy.delay = 0.2
        unpack_records(fetcher.stream(pieces, SMALL), pieces)
        behind.proxy.heal()
        (traffic,) = fetcher.traffic().brokers
    assert traffic.latency.percentile_ms(0.01) >= 200
    assert traffic.latency.total_us >= traffic.requests * 200_000


# -- nothing twice


def test_known_metadata_is_not_requested_again(behind, fresh_topic):
    """A check of a feed asks for topics, positions, the cluster's id, leader epochs, settings and a time."""
    topic = fresh_topic(partitions=2, cluster=behind.cluster)
    produce(behind.cluster, topic, 5)
    spots = [TopicPartition(topic, p) for p in range(2)]
    cluster_id = behind.cluster.status().cluster_id
    with closing(KafkaCluster(make_address(behind.cluster))) as cluster:
        behind.proxy.requests.clear()
        assert topic in cluster.topics()
        states = cluster.partitions([topic], Isolation.READ_COMMITTED)
        assert cluster.cluster_id() == cluster_id
        assert cluster.epoch_ends({s.tp: s.leader_epoch for s in states}) == {spots[0]: 5, spots[1]: 0}
        assert set(cluster.configs([topic]).topics) == {topic}
        assert cluster.offsets_at(dict.fromkeys(spots, 0))[spots[1]] is None
        requests = behind.proxy.requests.copy()
        del requests[API_VERSIONS]
        assert requests == {
            METADATA: 1,
            LIST_OFFSETS: 5,
            DESCRIBE_LOG_DIRS: 1,
            OFFSET_FOR_LEADER_EPOCH: 1,
            DESCRIBE_CONFIGS: 1,
            FETCH: 1,
        }
        produce(behind.cluster, topic, 3)
        behind.proxy.requests.clear()
        first, _ = cluster.partitions([topic], Isolation.READ_COMMITTED)
        assert first.last_stable_offset == 8
        assert behind.proxy.requests[METADATA] >= 1, "positions of another moment are asked for again, leaders too"


# -- TLS


def test_fetch_works_over_tls(behind, fresh_topic):
    topic = fresh_topic(partitions=2, cluster=behind.cluster)
    for partition in range(2):
        produce(behind.cluster, topic, 2000, partition, size=500)
    pieces = build_ranges(behind.cluster, topic)
    secure = _make_tls_address(behind, str(behind.proxy.certificate))
    with closing(KafkaFetcher(secure, Isolation.READ_COMMITTED)) as fetcher:
        records = unpack_records(fetcher.stream(pieces, FetchLimits()), pieces)
    assert records == {index: consume_records(behind.cluster, piece) for index, piece in enumerate(pieces)}


def test_untrusted_certificate_is_refused(behind):
    stranger = KafkaAddress(f"127.0.0.1:{behind.proxy.port}", {"security_protocol": "SSL", "bootstrap_timeout_ms": 500})
    with (
        closing(KafkaCluster(stranger)) as cluster,
        pytest.raises(KafkaUnavailable, match="CERTIFICATE_VERIFY_FAILED") as caught,
    ):
        cluster.cluster_id()
    assert "ssl_cafile" in caught.value.remedy
    with pytest.raises(FeedError, match=r"/nowhere/ca\.pem is no file"):
        KafkaCluster(_make_tls_address(behind, "/nowhere/ca.pem"))


def _make_tls_address(behind, cafile):
    return KafkaAddress(f"127.0.0.1:{behind.proxy.port}", {"security_protocol": "SSL", "ssl_cafile": cafile})


# -- rights


def test_missing_permissions_are_named(behind, fresh_topic):
    topic = fresh_topic(cluster=behind.cluster)
    produce(behind.cluster, topic, 10)
    pieces, group_name = build_ranges(behind.cluster, topic), f"g-{topic}"
    spot = TopicPartition(topic, 0)
    with closing(KafkaGroup(make_address(behind.cluster), group_name)) as group:
        with (
            _deny(behind, ResourceType.TRANSACTIONAL_ID, f"t-{topic}"),
            group.join([topic], f"t-{topic}") as member,
            pytest.raises(NotAuthorized, match="TRANSACTIONAL_ID"),
        ):
            member.init_transactions()
        letter, letters = DeadLetter(0, 1, b"k", b"v", (), "orders:0:1"), fresh_topic(cluster=behind.cluster)
        with group.join([topic], f"t-{topic}") as member:
            member.init_transactions()
            with (
                _deny(behind, ResourceType.TOPIC, letters, ACLOperation.WRITE),
                pytest.raises(NotAuthorized, match="WRITE on topic"),
            ):
                member.commit_transaction({spot: CommittedOffset(1)}, letters, [letter])
        with _deny(behind, ResourceType.GROUP, group_name), pytest.raises(NotAuthorized, match="GROUP") as caught:
            group.fetch_committed([spot])
        assert group_name in caught.value.message
        assert "grant" in caught.value.remedy
    with _deny(behind, ResourceType.TOPIC, topic):
        (failed,) = fetch(behind.cluster, pieces)
        assert isinstance(failed, FetchFailed)
        assert isinstance(failed.error, NotAuthorized)
        with pytest.raises(NotAuthorized) as caught:
            describe(behind.cluster, topic)
        assert caught.value.topic == topic
    with _deny(behind, ResourceType.CLUSTER, "kafka-cluster", ACLOperation.DESCRIBE):
        (state,) = describe(behind.cluster, topic)
        assert state.log_bytes is None
        assert state.last_stable_offset == 10


def test_missing_permission_of_producer_is_named(behind, fresh_topic):
    topic, spare = fresh_topic(cluster=behind.cluster), "nowhere-yet"
    kafka, mix = KafkaSettings(bootstrap=behind.cluster.bootstrap), events.Mix(1)

    def find_remedy(**how):
        with pytest.raises(NotAuthorized) as caught:
            events.send(kafka, events.orders(mix, 5000, 0, 1000), mix, events.SendOptions((topic,), **how))
        assert "commit: plain" not in caught.value.remedy
        return caught.value.remedy

    for denied in (ACLOperation.WRITE, ACLOperation.ALL):
        with _deny(behind, ResourceType.TOPIC, topic, denied):
            assert "WRITE on topic" in find_remedy()
            assert "WRITE on topic" in find_remedy(transactional_id="t")
    with _deny(behind, ResourceType.TRANSACTIONAL_ID, "t"):
        assert "WRITE on transactional id t to User:ANONYMOUS: kafka-acls" in find_remedy(transactional_id="t")
    with (
        _deny(behind, ResourceType.CLUSTER, "kafka-cluster", ACLOperation.CREATE),
        _deny(behind, ResourceType.TOPIC, spare, ACLOperation.CREATE),
        pytest.raises(NotAuthorized) as caught,
    ):
        events.create(kafka, [spare], 1)
    assert "CREATE on topic" in caught.value.remedy


def test_missing_permission_of_republish_is_named(behind, fresh_topic):
    topic, name = fresh_topic(cluster=behind.cluster), "sluice-republish-orders-x"
    lacking = {
        (ResourceType.TOPIC, topic, ACLOperation.WRITE): "WRITE on topic",
        (ResourceType.TOPIC, topic, ACLOperation.READ): "READ on topic",
        (ResourceType.GROUP, name, ACLOperation.ALL): "READ on group",
        (ResourceType.TRANSACTIONAL_ID, name, ACLOperation.ALL): "WRITE on transactional id",
    }
    rows = pa.RecordBatch.from_pylist([{"key": None, "value": b"x", "timestamp": 1, "headers": None}], schema=TO_SEND)

    def republish(target):
        accumulator = Accumulator()
        batches = [*accumulator.add(rows, np.zeros(1, np.int64), np.arange(1)), *accumulator.flush()]
        target.begin()
        target.send(iter(batches), str)
        target.commit(CommittedOffset(1))

    for right, missing in lacking.items():
        with (
            closing(KafkaTarget(make_address(behind.cluster), topic, name)) as target,
            _deny(behind, *right),
            pytest.raises(NotAuthorized) as caught,
        ):
            republish(target)
        assert missing in caught.value.remedy
        assert "kafka-acls" in caught.value.remedy


def test_hidden_group_is_distinguished_from_missing_group(behind):
    with closing(KafkaGroups(make_address(behind.cluster))) as groups:
        assert not groups.view("hidden").exists
        with _deny(behind, ResourceType.GROUP, "hidden"), pytest.raises(NotAuthorized) as caught:
            groups.view("hidden")
    assert "DESCRIBE on group hidden" in caught.value.remedy


def test_topics_with_unreadable_settings_are_named(behind, fresh_topic):
    topic, other = fresh_topic(cluster=behind.cluster), fresh_topic(cluster=behind.cluster)
    with closing(KafkaCluster(make_address(behind.cluster))) as cluster:
        assert cluster.configs([topic, other]).denied == ()
        with _deny(behind, ResourceType.TOPIC, topic, ACLOperation.DESCRIBE_CONFIGS):
            configs = cluster.configs([topic, other])
    assert (configs.denied, list(configs.topics)) == ((topic,), [other])


@contextmanager
def _deny(behind, kind, name, operation=ACLOperation.ALL):
    """Deny everybody this operation only, until the block ends."""
    rules = {ACLOperation.ALL: ACLPermissionType.ALLOW} | {operation: ACLPermissionType.DENY}
    acls = [ACL("User:*", "*", what, rule, ResourcePattern(kind, name)) for what, rule in rules.items()]
    with open_admin(behind.cluster) as client:
        client.create_acls(acls)
        yield
        client.delete_acls(acls)


# -- a hole in the log


def test_segment_lost_from_disk_is_not_treated_as_gap(behind, fresh_topic):
    """The topic is not compacted: another replica, or a backup, may have the records."""
    cluster = behind.cluster
    topic = fresh_topic(config={"segment.ms": "1"}, cluster=cluster)
    produce(cluster, topic, 80, enable_idempotence=False, linger_ms=10_000)  # one batch, so one segment
    (state,) = describe(cluster, topic)
    with open_transaction(cluster, topic, 1) as still_open:  # rolls the segment, and holds the last stable offset at 80
        cluster.kill_broker(1, signal.SIGTERM)
        os.truncate(behind.root / "node-1" / "data" / f"{topic}-0" / f"{0:020}.log", 0)
        cluster.start_broker(1)
        (item,) = fetch(cluster, [build_range(state, 0, 80)], patience=1.0)
        still_open.abort_transaction()
    assert isinstance(item, FetchFailed)
    assert "no records" in str(item.error)
    assert "kafka-dump-log" in item.error.remedy


def test_compacted_range_without_batches_is_read_to_its_end(behind, fresh_topic):
    """No batch covers the end of the offset range: the position moves there by the leader's last stable offset.

    Cleaners of old brokers left such logs; current ones keep an empty last batch, which the test cuts off.
    """
    cluster = behind.cluster
    eager = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.0",
        "delete.retention.ms": "0",
        "segment.ms": "1",
    }
    topic = fresh_topic(config=eager, cluster=cluster)
    with open_producer(cluster, enable_idempotence=False) as producer:
        for value in (b"x", None):
            for n in range(40):
                producer.send(topic, value=value, key=b"k%d" % n, partition=0)
    (state,) = describe(cluster, topic)
    piece = build_range(state, 0, 80)
    with open_transaction(cluster, topic, 1) as still_open:  # rolls the segment, and holds the last stable offset at 80
        wait_until(lambda: all(record[2] is None for record in consume_records(cluster, piece)))
        cluster.kill_broker(1, signal.SIGTERM)
        os.truncate(behind.root / "node-1" / "data" / f"{topic}-0" / f"{0:020}.log", 0)
        cluster.start_broker(1)
        (state,) = describe(cluster, topic)
        assert (state.log_start, state.last_stable_offset, state.high_watermark) == (0, 80, 81)
        (only,) = fetch(cluster, [piece])
        assert (only.last, only.next_position, len(only.records)) == (True, 80, 0)
        still_open.abort_transaction()
    wait_until(lambda: describe(cluster, topic)[0].last_stable_offset == 82)
    *_, last = fetch(cluster, [piece])
    assert (last.last, last.next_position) == (True, 81)
