"""Helpers of the Kafka tests: they produce and consume by kafka-python's clients, independently of Sluice."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import TopicPartition as Plain
from kafka.record import MemoryRecords

from sluice.pipelines.model.kafka import FetchLimits, Isolation, PartitionState, TopicPartition
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.ports import Fetched, FetchFailed
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.fetch.fetch import KafkaFetcher
from sluice.resources.local.local_kafka import LocalKafka

Record = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes], ...], int]
"""Offset, key, value, headers, timestamp."""


def make_address(cluster: LocalKafka, **client: Any) -> KafkaAddress:
    return KafkaAddress(cluster.bootstrap, client)


def is_stable(cluster: LocalKafka, topic: str) -> bool:
    """Returns whether no transaction is open in the topic."""
    return _read_ends(cluster, topic, "read_committed") == _read_ends(cluster, topic, "read_uncommitted")


def _read_ends(cluster: LocalKafka, topic: str, isolation: str) -> dict[Plain, int]:
    settings = {"isolation_level": isolation, "group_id": None, **cluster.client()}
    with closing(KafkaConsumer(bootstrap_servers=cluster.bootstrap, **settings)) as consumer:
        partitions = wait_until(lambda: consumer.partitions_for_topic(topic))
        ends: dict[Plain, int] = consumer.end_offsets([Plain(topic, p) for p in sorted(partitions)])
        return ends


@contextmanager
def open_producer(cluster: LocalKafka, **settings: Any) -> Iterator[KafkaProducer]:
    producer = KafkaProducer(bootstrap_servers=cluster.bootstrap, **settings)
    try:
        yield producer
        producer.flush()
    finally:
        producer.close(5)


def produce(
    cluster: LocalKafka,
    topic: str,
    count: int,
    partition: int = 0,
    size: int = 20,
    key: Callable[[int], bytes | None] = lambda n: b"k%d" % n,
    value: Callable[[int], bytes | None] | None = None,
    **settings: Any,
) -> None:
    """Produce `count` records with headers into one partition; every seventh is a tombstone."""
    make = value or (lambda n: None if n % 7 == 0 else (b"v%d " % n).ljust(size, b"."))
    with open_producer(cluster, **settings) as producer:
        for n in range(count):
            producer.send(topic, value=make(n), key=key(n), partition=partition, headers=[("n", b"%d" % n)])


@contextmanager
def open_transaction(cluster: LocalKafka, topic: str, count: int, partition: int = 0) -> Iterator[KafkaProducer]:
    """Begin a transaction with `count` records on the broker; the caller commits or aborts it."""
    name = f"tx-{topic}-{time.monotonic_ns()}"
    with closing(
        KafkaProducer(bootstrap_servers=cluster.bootstrap, transactional_id=name, transaction_timeout_ms=600_000)
    ) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for n in range(count):
            producer.send(topic, value=b"tx %d" % n, key=b"t%d" % n, partition=partition)
        producer.flush()
        yield producer


def describe(
    cluster: LocalKafka, *topics: str, isolation: Isolation = Isolation.READ_COMMITTED
) -> tuple[PartitionState, ...]:
    with closing(KafkaCluster(make_address(cluster))) as kafka:
        return kafka.partitions(topics, isolation)


def build_ranges(
    cluster: LocalKafka, *topics: str, isolation: Isolation = Isolation.READ_COMMITTED
) -> list[OffsetRange]:
    """Returns one offset range for each partition, from its log start to its last stable offset."""
    return [
        build_range(state, state.log_start, state.last_stable_offset)
        for state in describe(cluster, *topics, isolation=isolation)
        if state.last_stable_offset > state.log_start
    ]


def build_range(state: PartitionState, start: int, end: int) -> OffsetRange:
    return OffsetRange(state.topic, state.partition, state.topic_id, start, end, state.leader_epoch)


def fetch(
    cluster: LocalKafka,
    pieces: Sequence[OffsetRange],
    limits: FetchLimits | None = None,
    isolation: Isolation = Isolation.READ_COMMITTED,
    **settings: Any,
) -> list[Fetched | FetchFailed]:
    with closing(KafkaFetcher(make_address(cluster), isolation, **settings)) as fetcher:
        return list(fetcher.stream(pieces, limits or FetchLimits()))


def unpack_records(items: Iterable[Fetched | FetchFailed], pieces: Sequence[OffsetRange]) -> dict[int, list[Record]]:
    """Returns each offset range's visible records, decoded by kafka-python. Checks the guarantees of a stream."""
    records: dict[int, list[Record]] = {index: [] for index in range(len(pieces))}
    positions = {index: piece.start for index, piece in enumerate(pieces)}
    ended: set[int] = set()
    for item in items:
        assert isinstance(item, Fetched), item
        assert item.index not in ended, "something after the last"
        assert item.next_position >= positions[item.index], "the position went back"
        positions[item.index] = item.next_position
        wanted = range(pieces[item.index].start, pieces[item.index].end)
        offsets = {record[0] for record in records[item.index]}
        new = [r for r in _read_records(item) if r[0] in wanted and r[0] not in offsets]
        records[item.index] += new
        if item.last:
            assert item.next_position >= pieces[item.index].end
            ended.add(item.index)
    assert ended == set(range(len(pieces)))
    return records


def _read_records(item: Fetched) -> Iterator[Record]:
    """Yield the records except for control records and those of aborted transactions (KIP-98)."""
    aborted: set[int] = set()
    due = sorted(item.aborted, key=lambda pair: pair[1])
    memory = MemoryRecords(bytes(item.records))
    while memory.has_next():
        batch = memory.next_batch()
        while due and due[0][1] <= batch.last_offset:
            aborted.add(due.pop(0)[0])
        if batch.is_control_batch:
            aborted.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in aborted):
            for record in batch:
                yield (record.offset, record.key, record.value, tuple(record.headers), record.timestamp)


def consume_records(
    cluster: LocalKafka, piece: OffsetRange, isolation: Isolation = Isolation.READ_COMMITTED
) -> list[Record]:
    """Returns the records of an offset range as kafka-python's consumer reads them."""
    tp = Plain(piece.topic, piece.partition)
    with closing(
        KafkaConsumer(
            bootstrap_servers=cluster.bootstrap,
            isolation_level=str(isolation),
            auto_offset_reset="none",
            check_crcs=True,
        )
    ) as consumer:
        consumer.assign([tp])
        consumer.seek(tp, piece.start)
        records: list[Record] = []
        while consumer.position(tp) < piece.end:
            for record in consumer.poll(500).get(tp, []):
                if record.offset < piece.end:
                    records.append((record.offset, record.key, record.value, tuple(record.headers), record.timestamp))
        return records


@contextmanager
def open_admin(cluster: LocalKafka) -> Iterator[KafkaAdminClient]:
    with closing(KafkaAdminClient(bootstrap_servers=cluster.bootstrap)) as client:
        yield client


def wait_until(true: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait until the condition is true, and return its value. Checks of it take at most half of the time."""
    deadline, began = time.monotonic() + seconds, time.monotonic()
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(max(0.05, time.monotonic() - began))
        began = time.monotonic()
    return value


def free_port() -> int:
    """Returns a loopback port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def to_tp(state: PartitionState | OffsetRange) -> TopicPartition:
    return TopicPartition(state.topic, state.partition)
