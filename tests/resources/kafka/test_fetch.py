"""Offset ranges read from real brokers: records as in Kafka, and a reason for each range that cannot be read."""

from __future__ import annotations

import dataclasses
import threading
import time
from contextlib import closing
from itertools import pairwise

import pytest
from kafka import TopicPartition as Plain
from kafka.errors import KafkaConnectionError

from sluice.pipelines.errors import (
    CorruptBatch,
    KafkaUnavailable,
    LogTruncated,
    OffsetsLost,
    TopicRecreated,
    UnknownTopic,
)
from sluice.pipelines.model.kafka import FetchLimits, Isolation
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.ports import Fetched, FetchFailed
from sluice.pipelines.status.batch_facts import notable
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.connection.connections import Wire
from sluice.resources.kafka.fetch.broker_sessions import Sources
from sluice.resources.kafka.fetch.fetch import KafkaFetcher, RangeReader
from sluice.resources.kafka.protocol import messages
from sluice.testing.logs import LogBatch, LogRecord, log
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

SMALL = FetchLimits(active_ranges=3, request_bytes=64 << 10, partition_bytes=16 << 10, ahead_bytes=64 << 10)


def list_errors(items):
    return [item.error for item in items if isinstance(item, FetchFailed)]


@pytest.mark.parametrize(("codec", "version"), [(None, 13), ("gzip", 12)])
def test_fetch_from_three_leaders_matches_plain_consumer(kafka3, fresh_topic, codec, version, monkeypatch):
    monkeypatch.setattr(messages, "FETCH_VERSIONS", (12, version))
    topic = fresh_topic(partitions=3, cluster=kafka3, assignments={0: [1, 2, 3], 1: [2, 3, 1], 2: [3, 1, 2]})
    for partition in range(3):
        produce(kafka3, topic, 3000, partition, compression_type=codec)
    pieces = build_ranges(kafka3, topic)
    assert {state.leader for state in describe(kafka3, topic)} == {1, 2, 3}
    records = unpack_records(fetch(kafka3, pieces, SMALL), pieces)
    assert records == {index: consume_records(kafka3, piece) for index, piece in enumerate(pieces)}


def test_fetch_traffic_is_counted_by_leader(kafka3, fresh_topic):
    topic = fresh_topic(cluster=kafka3, assignments={0: [1, 2, 3], 1: [1, 2, 3], 2: [3, 1, 2]})
    for partition in range(3):
        produce(kafka3, topic, 2000, partition)
    full_ranges = build_ranges(kafka3, topic)
    pieces = [dataclasses.replace(piece, end=1500) for piece in full_ranges]
    with closing(KafkaFetcher(make_address(kafka3), Isolation.READ_COMMITTED)) as fetcher:
        assert fetcher.traffic().brokers == ()
        items = list(fetcher.stream(pieces, SMALL))
        traffic = fetcher.traffic()
    assert traffic.ends == {f"{topic}:{p}": 2000 for p in range(3)}
    assert [b.node for b in traffic.brokers] == [1, 3]
    one, three = traffic.brokers
    assert one.bytes + three.bytes > sum(len(item.records) for item in items) > 2 * three.bytes
    for b in traffic.brokers:
        assert b.address in kafka3.bootstrap
        assert b.requests == b.latency.count >= 2
        assert 0 < b.latency.max_us <= b.latency.total_us
        assert (b.errors, b.moved, b.reconnects, b.throttled, b.empty) == ({}, 0, 0, 0, 0)


def test_pause_caused_by_idle_consumer_is_measured(kafka, fresh_topic):
    topic = fresh_topic(partitions=3)
    for partition in range(3):
        produce(kafka, topic, 3000, partition, size=300)
    with closing(KafkaFetcher(make_address(kafka), Isolation.READ_COMMITTED)) as fetcher:
        stream = fetcher.stream(build_ranges(kafka, topic), SMALL)
        next(stream)
        (running,) = fetcher._streams
        wait_until(lambda: running._sources.budget._waiting)
        time.sleep(0.2)  # the first pause may have ended with the first item
        list(stream)
        (traffic,) = fetcher.traffic().brokers
    assert traffic.held_us >= 100_000


@pytest.fixture
def throttled_client(kafka):
    """The id of a client with a quota of 100 kB a second."""
    entity = ["--entity-type", "clients", "--entity-name", "throttled"]
    alter = ["kafka.admin.ConfigCommand", "--bootstrap-server", kafka.bootstrap, "--alter", *entity]
    kafka.tool(*alter, "--add-config", "consumer_byte_rate=100000")
    yield "throttled"
    kafka.tool(*alter, "--delete-config", "consumer_byte_rate")


def test_quota_throttles_reading_and_is_reported(kafka, fresh_topic, throttled_client):
    """No request is refused: brokers answer how long to pause, and get no request until then."""
    topic = fresh_topic(partitions=2)
    for partition in range(2):
        produce(kafka, topic, 2000, partition, size=500)
    pieces = build_ranges(kafka, topic)
    with closing(KafkaFetcher(make_address(kafka, client_id=throttled_client), Isolation.READ_COMMITTED)) as fetcher:
        records = unpack_records(fetcher.stream(pieces, FetchLimits(partition_bytes=64 << 10)), pieces)
        (traffic,) = fetcher.traffic().brokers
    assert records == {index: consume_records(kafka, piece) for index, piece in enumerate(pieces)}
    assert traffic.throttled >= 1
    assert traffic.throttle_ms > 500
    assert traffic.errors == {}
    assert "throttled this client" in notable([traffic])[0]


def test_ranges_can_begin_and_end_at_any_offset(kafka, fresh_topic):
    topic = fresh_topic(partitions=2)
    for partition in range(2):
        produce(kafka, topic, 2000, partition)
    states = describe(kafka, topic)
    cuts = [0, 1, 499, 500, 731, 1998, 2000]
    pieces = [build_range(s, a, b) for s in states for a, b in pairwise(cuts)]
    records_by_range = unpack_records(fetch(kafka, pieces, SMALL), pieces)
    assert {i: [r[0] for r in records] for i, records in records_by_range.items()} == {
        i: list(range(piece.start, piece.end)) for i, piece in enumerate(pieces)
    }


def test_adjacent_ranges_are_read_from_one_answer(kafka, fresh_topic):
    topic = fresh_topic(partitions=2)
    for partition in range(2):
        produce(kafka, topic, 2000, partition)
    states = describe(kafka, topic)
    pieces = [build_range(s, at, at + 50) for at in range(0, 2000, 50) for s in states]
    with closing(KafkaFetcher(make_address(kafka), Isolation.READ_COMMITTED)) as fetcher:
        records = unpack_records(fetcher.stream(pieces, FetchLimits()), pieces)
        (broker,) = fetcher.traffic().brokers
    assert {i: [r[0] for r in got] for i, got in records.items()} == {
        i: list(range(piece.start, piece.end)) for i, piece in enumerate(pieces)
    }
    assert broker.requests <= 4


def test_adjacent_ranges_cut_transactions_anywhere(kafka, fresh_topic):
    """Those of aborted ones are fetched for each range: an answer names the transactions from its first batch on."""
    topic = fresh_topic()
    for commit in (True, False, True, False, True):
        produce(kafka, topic, 9)
        with open_transaction(kafka, topic, 20) as producer:
            producer.commit_transaction() if commit else producer.abort_transaction()
    (state,) = describe(kafka, topic)
    cuts = [*range(0, state.last_stable_offset, 6), state.last_stable_offset]
    pieces = [build_range(state, a, b) for a, b in pairwise(cuts)]
    records = unpack_records(fetch(kafka, pieces), pieces)
    expected = consume_records(kafka, build_range(state, 0, state.last_stable_offset))
    assert [r for i in range(len(pieces)) for r in records[i]] == expected


@pytest.mark.parametrize(("epochs", "answers"), [((5, 5), 1), ((5, 6), 2)])
def test_range_is_read_from_an_earlier_answer_only_in_its_leader_epoch(monkeypatch, epochs, answers):
    data = log(LogBatch((LogRecord(b"k", b"v"),)), LogBatch((LogRecord(b"k", b"w"),))).data
    requests = []

    async def send(wire, node, request, seconds=None):
        requests.append(request)
        part = messages.FetchPart(None, 2, 2, -1, (), memoryview(data))
        return messages.FetchAnswer(0, None, len(data), {("A" * 22, 0): part})

    async def settle(reader):
        return messages.Leadership(reader._range.tp, "A" * 22, 1, epochs[reader._range.start], None)

    _answer_by(monkeypatch, send)
    monkeypatch.setattr(RangeReader, "_settle", settle)
    pieces = [OffsetRange("t", 0, "A" * 22, n, n + 1) for n in range(2)]
    with closing(KafkaFetcher(KafkaAddress("127.0.0.1:1"), Isolation.READ_COMMITTED)) as fetcher:
        records = unpack_records(fetcher.stream(pieces, SMALL), pieces)
    assert [r[2] for n in range(2) for r in records[n]] == [b"v", b"w"]
    assert len(requests) == answers


def test_batch_larger_than_every_limit_arrives_complete(kafka, fresh_topic):
    topic = fresh_topic(partitions=3, config={"max.message.bytes": "9000000"})
    for partition in range(3):
        with open_producer(kafka, max_request_size=9_000_000) as producer:
            for n in range(3):
                producer.send(topic, value=bytes([65 + n]) * 3_000_000, partition=partition).get(10)
    pieces = build_ranges(kafka, topic)
    records = unpack_records(fetch(kafka, pieces, SMALL), pieces)
    assert [[len(r[2] or b"") for r in records[index]] for index in range(3)] == [[3_000_000] * 3] * 3


def test_aborted_transactions_are_listed_and_unstable_records_omitted(kafka, fresh_topic):
    topic = fresh_topic()
    produce(kafka, topic, 10)
    for commit in (False, True, False):
        with open_transaction(kafka, topic, 20) as producer:
            producer.commit_transaction() if commit else producer.abort_transaction()
    with open_transaction(kafka, topic, 5) as still_open:
        produce(kafka, topic, 10)
        (state,) = describe(kafka, topic)
        assert state.last_stable_offset == 10 + 3 * 21
        assert state.high_watermark == state.last_stable_offset + 15
        pieces = build_ranges(kafka, topic)
        items = fetch(kafka, pieces)
        assert len({pair for item in items if isinstance(item, Fetched) for pair in item.aborted}) == 2
        assert unpack_records(items, pieces)[0] == consume_records(kafka, pieces[0])
        uncommitted = build_ranges(kafka, topic, isolation=Isolation.READ_UNCOMMITTED)
        read = unpack_records(fetch(kafka, uncommitted, isolation=Isolation.READ_UNCOMMITTED), uncommitted)
        assert len(read[0]) == 10 + 3 * 20 + 15
        still_open.abort_transaction()


def test_deleted_offsets_fail_with_exact_range_and_other_ranges_continue(kafka, fresh_topic):
    topic = fresh_topic(partitions=2)
    for partition in range(2):
        produce(kafka, topic, 100, partition)
    pieces = build_ranges(kafka, topic)
    with open_admin(kafka) as client:
        client.delete_records({Plain(topic, 1): 37})
    items = fetch(kafka, pieces)
    (error,) = list_errors(items)
    assert isinstance(error, OffsetsLost)
    assert (error.topic, error.partition, error.start, error.end) == (topic, 1, 0, 37)
    assert "[0, 37)" in error.message
    assert [item.last for item in items if item.index == 0][-1]


@pytest.mark.parametrize("version", messages.FETCH_VERSIONS)
def test_recreated_topic_is_detected(kafka, fresh_topic, version, monkeypatch):
    """Also while it is being read, and where requests name topics without ids (before version 13)."""
    monkeypatch.setattr(messages, "FETCH_VERSIONS", (12, version))
    topic = fresh_topic()
    produce(kafka, topic, 2000)
    (piece,) = build_ranges(kafka, topic)
    tiny = FetchLimits(1, 16 << 10, 16 << 10, 16 << 10)
    with closing(KafkaFetcher(make_address(kafka), Isolation.READ_COMMITTED)) as fetcher:
        stream = fetcher.stream([piece], tiny)
        assert not next(stream).last
        with open_admin(kafka) as client:
            client.delete_topics([topic])
            wait_until(lambda: topic not in client.list_topics())
            client.create_topics({topic: {"num_partitions": 1}}, wait_for_metadata=True)
        produce(kafka, topic, 2000)
        *_, end = stream
    assert isinstance(end.error, TopicRecreated)
    (error,) = list_errors(fetch(kafka, [piece]))
    assert isinstance(error, TopicRecreated)
    assert piece.incarnation in error.message


def test_deleted_topic_is_reported_as_unknown(kafka, fresh_topic):
    topic = fresh_topic()
    produce(kafka, topic, 10)
    pieces = build_ranges(kafka, topic)
    with open_admin(kafka) as client:
        client.delete_topics([topic])
    (error,) = list_errors(fetch(kafka, pieces))
    assert isinstance(error, UnknownTopic)
    assert error.topic == topic


def test_log_that_ends_before_range_is_reported_as_truncated(kafka, fresh_topic):
    topic = fresh_topic()
    produce(kafka, topic, 10)
    (state,) = describe(kafka, topic)
    for epoch in (state.leader_epoch, -1):
        piece = dataclasses.replace(build_range(state, 5, 15), leader_epoch=epoch)
        (error,) = list_errors(fetch(kafka, [piece]))
        assert isinstance(error, LogTruncated)
        assert (error.start, error.end) == (10, 15)


@pytest.mark.faults
def test_fetch_follows_new_leader_and_gives_up_on_missing_leader(kafka3, fresh_topic):
    topic = fresh_topic(cluster=kafka3, assignments={0: [3, 1, 2], 1: [1, 2, 3]})
    alone = fresh_topic(cluster=kafka3, assignments={0: [3]}, config={"min.insync.replicas": "1"})
    for name, partition in ((topic, 0), (topic, 1), (alone, 0)):
        produce(kafka3, name, 3000, partition, size=100)
    pieces, lonely = build_ranges(kafka3, topic), build_ranges(kafka3, alone)
    with closing(KafkaFetcher(make_address(kafka3), Isolation.READ_COMMITTED)) as fetcher:
        stream = fetcher.stream(pieces, SMALL)
        items = [next(stream)]
        while items[-1].index != 0:  # until the broker that is to die has answered once
            items.append(next(stream))
        kafka3.kill_broker(3)
        items += stream
        brokers = {b.node: b for b in fetcher.traffic().brokers}
    assert brokers[3].moved == 1
    assert brokers[1].moved == 0
    assert set(brokers[3].errors) & {"no answer", "not reached"}
    (error,) = list_errors(fetch(kafka3, lonely, patience=1.0))
    kafka3.start_broker(3)
    records = unpack_records(items, pieces)
    assert [[r[0] for r in records[index]] for index in range(2)] == [list(range(3000))] * 2
    assert isinstance(error, KafkaUnavailable)
    assert (error.topic, error.partition, error.start, error.end) == (alone, 0, 0, 3000)
    assert unpack_records(fetch(kafka3, lonely), lonely)[0] == consume_records(kafka3, lonely[0])


def test_only_first_range_waits_while_brokers_are_unreachable(monkeypatch):
    """Otherwise a run without brokers waits for its patience once per offset range."""
    patience_by_topic = []

    class Stub:
        def __init__(self, sources, index, piece, emit, patience, *_):
            patience_by_topic.append((piece.topic, patience))
            self.position, self._sources, self._answers = piece.start, sources, piece.topic == "healthy"

        async def run(self):
            if not self._answers:
                raise KafkaConnectionError("gone")
            self._sources.next_answer()

    monkeypatch.setattr("sluice.resources.kafka.fetch.fetch.RangeReader", Stub)
    order = ["gone", "gone", "also gone", "healthy", "moved", "gone"]
    pieces = [OffsetRange(topic, 0, "id", n, n + 1) for n, topic in enumerate(order)]
    with closing(KafkaFetcher(KafkaAddress("127.0.0.1:1"), Isolation.READ_COMMITTED, patience=60.0)) as fetcher:
        failed = list_errors(fetcher.stream(pieces, dataclasses.replace(SMALL, active_ranges=1)))
    assert patience_by_topic == list(zip(order, [60.0, 0.0, 0.0, 0.0, 60.0, 0.0], strict=True))
    assert [type(error) for error in failed] == [KafkaUnavailable] * 5


def test_many_ranges_are_read_with_small_read_ahead(kafka, fresh_topic):
    topic = fresh_topic(partitions=4)
    for partition in range(4):
        produce(kafka, topic, 1000, partition, size=200)
    pieces = [build_range(s, at, at + 50) for at in range(0, 1000, 50) for s in describe(kafka, topic)]
    records = unpack_records(fetch(kafka, pieces, SMALL), pieces)
    assert sum(map(len, records.values())) == 4000


def test_read_ahead_is_bounded(kafka, fresh_topic):
    topic = fresh_topic(partitions=3)
    for partition in range(3):
        produce(kafka, topic, 3000, partition, size=300)
    pieces = build_ranges(kafka, topic)
    with closing(KafkaFetcher(make_address(kafka), Isolation.READ_COMMITTED)) as fetcher:
        stream = fetcher.stream(pieces, SMALL)
        next(stream)
        (running,) = fetcher._streams
        # The consumer takes nothing, so the reader fills its budget and stops.
        budget = running._sources.budget
        wait_until(lambda: budget._waiting)
        assert budget._held <= SMALL.ahead_bytes
        stream.close()
        assert not any(t.name.startswith("kafka-io-sluice") for t in threading.enumerate())


def test_closing_from_another_thread_wakes_the_consumer(kafka, fresh_topic):
    topic = fresh_topic()
    produce(kafka, topic, 10)
    (state,) = describe(kafka, topic)
    fetcher = KafkaFetcher(make_address(kafka), Isolation.READ_UNCOMMITTED)
    with open_transaction(kafka, topic, 1) as still_open:
        # A read-committed range that reaches beyond the start of the open transaction never ends by itself.
        waiting = KafkaFetcher(make_address(kafka), Isolation.READ_COMMITTED)
        stream = waiting.stream([build_range(state, 0, 11)], FetchLimits())
        assert next(stream).next_position == 10
        threading.Timer(0.2, waiting.close).start()
        with pytest.raises(KafkaUnavailable, match="closed"):
            next(stream)
        still_open.abort_transaction()
    fetcher.close()


def test_damaged_responses_release_their_read_ahead(monkeypatch):
    """Each takes a third of the budget: unless it is released, the fourth reader waits forever."""
    damaged = memoryview(bytes(SMALL.ahead_bytes // 3))

    async def settle(reader):
        return messages.Leadership(reader._range.tp, "A" * 22, 1, 0, None)

    async def reach(wire, node):
        return "made:up", 1

    async def send(wire, node, request, seconds=None):
        parts = {(t.topic, p.partition): part for t in request.topics for p in t.partitions}
        parts |= {(messages.printed_id(t.topic_id), p.partition): part for t in request.topics for p in t.partitions}
        return messages.FetchAnswer(0, None, len(damaged), parts)

    part = messages.FetchPart(None, 10, 10, -1, (), damaged)
    monkeypatch.setattr(RangeReader, "_settle", settle)
    monkeypatch.setattr(Wire, "reach", reach)
    monkeypatch.setattr(Wire, "send", send)
    pieces = [OffsetRange("t", p, "A" * 22, 0, 10) for p in range(8)]
    with closing(KafkaFetcher(KafkaAddress("127.0.0.1:1"), Isolation.READ_COMMITTED)) as fetcher:
        giving_up = threading.Timer(10, fetcher.close)
        giving_up.start()
        errors = list_errors(fetcher.stream(pieces, SMALL))
        giving_up.cancel()
    assert [type(e) for e in errors] == [CorruptBatch] * 8


def test_fetch_returns_to_leader_if_replicas_redirect_to_each_other(monkeypatch):
    requests = []

    async def send(wire, node, request, seconds=None):
        requests.append((node, request.rack_id))
        assert len(requests) < 10, "without end"
        replica = 3 if node == 2 else 2
        part = messages.FetchPart(None, 10, 10, replica, (), memoryview(b""))
        return messages.FetchAnswer(0, None, 0, {("A" * 22, 0): part})

    _answer_by(monkeypatch, send)
    with closing(KafkaFetcher(KafkaAddress("127.0.0.1:1"), Isolation.READ_COMMITTED, rack="here")) as fetcher:
        (item,) = fetcher.stream([OffsetRange("t", 0, "A" * 22, 0, 10)], SMALL)
    assert item.last
    assert requests == [(1, "here"), (2, "here"), (1, ""), (1, "")]


def test_leaders_only_fetch_avoids_damaged_replica(monkeypatch):
    """The replica's disk may be damaged; nothing is lost as long as the leader has the batch."""
    sent = log(LogBatch((LogRecord(b"k", b"v"),))).data

    async def send(wire, node, request, seconds=None):
        replica = 2 if request.rack_id and node == 1 else -1
        records = b"" if replica > 0 else sent if node == 1 else sent[:-1] + bytes([sent[-1] ^ 1])
        part = messages.FetchPart(None, 1, 1, replica, (), memoryview(records))
        return messages.FetchAnswer(0, None, len(records), {("A" * 22, 0): part})

    _answer_by(monkeypatch, send)
    piece = OffsetRange("t", 0, "A" * 22, 0, 1)
    with closing(KafkaFetcher(KafkaAddress("127.0.0.1:1"), Isolation.READ_COMMITTED, rack="here")) as fetcher:
        limits = (SMALL, dataclasses.replace(SMALL, leaders_only=True))
        first, second = (bytes(next(iter(fetcher.stream([piece], bounds))).records) for bounds in limits)
    assert first != sent
    assert second == sent


@pytest.mark.parametrize("cut", [1, 30])
def test_incomplete_batch_is_not_treated_as_gap(monkeypatch, cut):
    """Kafka returns whole batches for the first partition; Kafka-compatible brokers may not."""
    records = memoryview(log(LogBatch((LogRecord(b"k", b"v"),))).data[:-cut])

    async def send(wire, node, request, seconds=None):
        part = messages.FetchPart(None, 10, 10, -1, (), records)
        return messages.FetchAnswer(0, None, 0, {("A" * 22, 0): part})

    _answer_by(monkeypatch, send)
    with closing(KafkaFetcher(KafkaAddress("127.0.0.1:1"), Isolation.READ_COMMITTED, patience=0.0)) as fetcher:
        (item,) = fetcher.stream([OffsetRange("t", 0, "A" * 22, 0, 10)], SMALL)
    assert isinstance(item, FetchFailed)
    assert isinstance(item.error, KafkaUnavailable)
    assert "no whole record batch" in str(item.error)


def _answer_by(monkeypatch, send):
    """Replace the leader of one partition: `send` answers its fetches."""

    async def settle(reader):
        return messages.Leadership(reader._range.tp, "A" * 22, 1, 0, None)

    async def reach(wire, node):
        return "made:up", 1

    async def find_starts(send, leader, leaderships):
        return {leadership.tp: 0 for leadership in leaderships}

    async def confirm(reader):
        return None

    async def may_compact(sources, leadership):
        return True

    monkeypatch.setattr(RangeReader, "_settle", settle)
    monkeypatch.setattr(RangeReader, "_confirm", confirm)
    monkeypatch.setattr(Sources, "may_compact", may_compact)
    monkeypatch.setattr(Wire, "reach", reach)
    monkeypatch.setattr(Wire, "send", send)
    monkeypatch.setattr("sluice.resources.kafka.fetch.fetch.find_local_starts", find_starts)


def test_unreachable_address_fails_every_range():
    pieces = [OffsetRange("t", p, "A" * 22, 0, 10) for p in range(2)]
    nowhere = KafkaAddress("127.0.0.1:1", {"bootstrap_timeout_ms": 200})
    with closing(KafkaFetcher(nowhere, Isolation.READ_COMMITTED)) as fetcher:
        errors = list_errors(fetcher.stream(pieces, FetchLimits()))
    assert [type(e) for e in errors] == [KafkaUnavailable] * 2
    assert "127.0.0.1:1: connection refused" in errors[0].message
