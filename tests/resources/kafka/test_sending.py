"""Batches written by Sluice in a real log: read by Kafka's tools, sent in transactions, with offsets committed."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kafka.errors import IncompatibleBrokerVersion

from sluice.pipelines.errors import BrokerTooOld, CommitFenced, KafkaUnavailable, UnknownTopic, UsageError
from sluice.pipelines.model.kafka import CommittedOffset
from sluice.pipelines.records.kafka_batches.encode import CODECS, TO_SEND, Accumulator, SealedBatch, by_key
from sluice.pipelines.records.kafka_batches.encode.accumulator import Numbering
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.connection.connections import Coordinators, Wire
from sluice.resources.kafka.produce import send_queue
from sluice.resources.kafka.produce.sender import KafkaSender, KafkaTarget
from sluice.resources.kafka.protocol import group_api
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.support import consume_topic
from tests.resources.kafka.tools import make_address, wait_until

STAMP = 1_700_000_000_000
PRODUCE, ADD_PARTITIONS = 0, 24
"""API keys."""


def make_row(n: int) -> dict[str, Any]:
    return {
        "key": None if n % 5 == 0 else b"k%d" % n,
        "value": None if n % 7 == 0 else b"value %d " % n * 9,
        "timestamp": STAMP + n,
        "headers": [{"key": "n", "value": b"%d" % n}, {"key": "é", "value": None}] if n % 3 else None,
    }


def make_batches(
    count: int, codec: int = 3, partition: Callable[[int], int] = lambda n: 0, limit: int = 900_000, first: int = 0
) -> Iterator[SealedBatch]:
    rows = pa.RecordBatch.from_pylist([make_row(n) for n in range(first, first + count)], schema=TO_SEND)
    accumulator = Accumulator(codec, limit)
    numbers = np.arange(first, first + count)
    yield from accumulator.add(rows, np.array([partition(int(n)) for n in numbers]), numbers)
    yield from accumulator.flush()


def open_target(kafka: LocalKafka, topic: str, **options: Any) -> Any:
    return closing(KafkaTarget(make_address(kafka), topic, f"t-{topic}", **options))


def select_columns(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: r[k] for k in TO_SEND.names} for r in records]


def test_closed_connections_leave_no_pending_round() -> None:
    wire = Wire(KafkaAddress("127.0.0.1:1"))
    wire.close()
    producer, backpressure = group_api.ProducerId("", 1, 0), send_queue.Backpressure(60)
    queue = send_queue.SendQueue(Coordinators(wire, 1), producer, "orders", 60, _renew, backpressure)
    queue.put(next(make_batches(1)))
    with pytest.raises(KafkaUnavailable, match="closed"):
        queue.finish()
    assert queue._rounds == 0
    queue.stop()


async def _renew() -> group_api.ProducerId:
    raise AssertionError


def test_kafka_command_line_tools_read_every_codec(
    kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = fresh_topic(partitions=len(CODECS))
    with open_target(kafka, topic) as target:
        assert target.partitions() == len(CODECS)
        assert target.begin() is None
        sent = [
            d
            for p, codec in enumerate(CODECS.values())
            for d in target.send(make_batches(100, codec.number, lambda n, p=p: p, limit=2000), str)
        ]
        target.commit(CommittedOffset(1, metadata="so far"))
        assert target.begin() == CommittedOffset(1, metadata="so far")
    records = wait_until(lambda: len(r := consume_topic(kafka, topic)) == 500 and r)
    assert [select_columns([r for r in records if r["partition"] == p]) for p in range(5)] == [
        [make_row(n) for n in range(100)]
    ] * 5
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in records} == by_place

    # Transaction markers, stamped now, begin a second segment after records of 2023.
    segments = [str(path) for folder in list_folders(kafka) for path in folder.glob(f"{topic}-*/*.log")]
    process = kafka.tool("org.apache.kafka.tools.DumpLogSegments", "--files", ",".join(segments), "--print-data-log")
    assert process.returncode == 0, process.stderr
    assert "isvalid: false" not in process.stdout
    assert all(f"compresscodec: {name}" in process.stdout for name in CODECS)
    assert process.stdout.count("payload: value 8 value 8") == 5


def test_java_producer_writes_the_same_bytes_to_the_same_partitions(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    """Each batch of Kafka's console producer is encoded again from its consumed records."""
    topic, draw = fresh_topic(partitions=7), random.Random(1)
    lines = []
    for n in range(1500):
        key = "".join(draw.choice("aZ09 _-.é€😀") for _ in range(n % 41)) or "-"
        headers = f"trace:{n},kind:é{n % 5}" if n % 3 else "none:"
        lines.append(f"{headers}\t{key}\t{'value ' * (n % 30)}{n}\n")
    reading = ("parse.key=true", "parse.headers=true", "key.separator=\t")
    process = kafka.tool(
        *("org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", kafka.bootstrap, "--topic", topic),
        *(word for one in reading for word in ("--reader-property", one)),
        *("--command-property", "compression.type=none"),
        stdin="".join(lines),
    )
    assert process.returncode == 0, process.stderr
    records = wait_until(lambda: len(r := consume_topic(kafka, topic)) == 1500 and r)
    keys = pa.array([r["key"] for r in records], pa.binary())
    assert by_key(keys, 7, np.zeros(len(records), np.int64)).tolist() == [r["partition"] for r in records]

    compared = 0
    for p, folder in ((p, folder) for p in range(7) for folder in list_folders(kafka)):
        by_offset = {r["offset"]: select_columns([r])[0] for r in records if r["partition"] == p}
        data = next((folder / f"{topic}-{p}").glob("*.log")).read_bytes()
        while data:
            base, size = struct.unpack_from(">qi", data)
            (last,) = struct.unpack_from(">i", data, 23)
            producer, epoch, sequence = struct.unpack_from(">qhi", data, 43)
            rows = pa.RecordBatch.from_pylist([by_offset[base + i] for i in range(last + 1)], schema=TO_SEND)
            accumulator = Accumulator(CODECS["none"].number)
            (ours,) = [
                *accumulator.add(rows, np.zeros(last + 1, np.int64), np.arange(last + 1)),
                *accumulator.flush(),
            ]
            encoded = ours.encode(Numbering(producer, epoch, sequence, transactional=False))
            theirs, data = data[: 12 + size], data[12 + size :]
            # Brokers set the first offset, and the leader epoch after the length.
            assert (encoded[8:12], encoded[16:]) == (theirs[8:12], theirs[16:])
            compared += last + 1
    assert compared == 1500


def list_folders(kafka: LocalKafka) -> list[Path]:
    return [b.log.parent / "data" for b in kafka.status().brokers]


def test_uncommitted_records_are_invisible_and_second_sender_fences_first(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(partitions=2)
    with open_target(kafka, topic) as first, open_target(kafka, topic) as second:
        first.begin()
        first.send(make_batches(50, partition=lambda n: n % 2), str)
        assert second.begin() is None
        second.send(make_batches(10, partition=lambda n: n % 2), str)
        second.commit(CommittedOffset(10))
        with pytest.raises(CommitFenced):
            first.commit(CommittedOffset(50))
        assert second.send(make_batches(5, first=10), str)[0].partition == 0
        second.commit(CommittedOffset(15))
        assert first.begin() == CommittedOffset(15)
    records = wait_until(lambda: len(r := consume_topic(kafka, topic)) == 15 and r)
    assert sorted(r["timestamp"] - STAMP for r in records) == list(range(15))


def test_large_batches_are_split_and_too_large_record_is_named(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(config={"max.message.bytes": "3000"})
    with open_target(kafka, topic) as target:
        target.begin()
        sent = target.send(make_batches(200, codec=0), str)
        assert len(sent) > 4
        assert [n for d in sorted(sent, key=lambda d: d.first) for n in d.numbers] == list(range(200))
        huge = pa.RecordBatch.from_pylist(
            [make_row(0), {"key": None, "value": bytes(4000), "timestamp": 1, "headers": None}], schema=TO_SEND
        )
        accumulator = Accumulator()
        batches = [*accumulator.add(huge, np.zeros(2, np.int64), np.arange(2)), *accumulator.flush()]
        with pytest.raises(UsageError, match=r"record of old:1 (?s:.)*max.message.bytes"):
            target.send(iter([batches[0]]), lambda n: f"old:{n}")
        assert target.begin() is None
    assert consume_topic(kafka, topic) == []


def test_forgotten_producer_without_transactions_continues_with_new_id(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(partitions=2)
    with closing(KafkaSender.connect(make_address(kafka))) as sender:
        sender.begin()
        sender.send(topic, make_batches(200, partition=lambda n: n % 2, limit=1000))
        sent = sender.flush(topic)
        sender._queues[topic]._sequences[1] += 7  # as if the leader had lost some batches
        sender.send(topic, make_batches(100, partition=lambda n: n % 2, limit=1000, first=200))
        sent += sender.flush(topic)
    records = wait_until(lambda: len(r := consume_topic(kafka, topic)) == 300 and r)
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in records} == by_place
    for p in range(2):
        assert [r["timestamp"] - STAMP for r in records if r["partition"] == p] == list(range(p, 300, 2))


def test_quota_throttles_sending_and_is_reported(kafka: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    """Kafka's tool sets the quota, which allows bursts of ten seconds; the remaining bytes are throttled."""
    topic, client, rate = fresh_topic(partitions=2), "throttled", 200_000
    process = kafka.tool(
        *("kafka.admin.ConfigCommand", "--bootstrap-server", kafka.bootstrap, "--alter"),
        *("--entity-type", "clients", "--entity-name", client, "--add-config", f"producer_byte_rate={rate}"),
    )
    assert process.returncode == 0, process.stderr
    values = [random.Random(n).randbytes(10_000) for n in range(280)]
    rows = pa.RecordBatch.from_pylist(
        [{"key": None, "value": v, "timestamp": STAMP + n, "headers": None} for n, v in enumerate(values)],
        schema=TO_SEND,
    )
    numbers, accumulator = np.arange(len(values)), Accumulator(CODECS["lz4"].number, 100_000)
    with closing(KafkaTarget(make_address(kafka, client_id=client), topic, f"t-{topic}")) as target:
        target.begin()
        batches = [*accumulator.add(rows, numbers % 2, numbers), *accumulator.flush()]
        sent = target.send(iter(batches), str)
        target.commit(CommittedOffset(1))
        assert target.throttled_ms > 0
    assert sorted(n for d in sent for n in d.numbers) == list(range(len(values)))
    records = wait_until(lambda: len(r := consume_topic(kafka, topic)) == len(values) and r)
    assert [r["value"] for r in sorted(records, key=lambda r: r["timestamp"])] == values


def test_brokers_that_do_not_describe_transactions_are_too_old(
    kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(transactional_id: str) -> None:
        raise IncompatibleBrokerVersion(f"no DescribeTransactions of {transactional_id}")

    monkeypatch.setattr(group_api, "ask_transaction", ask)
    with (
        open_target(kafka, fresh_topic()) as target,
        pytest.raises(BrokerTooOld, match=r"needs brokers of Apache Kafka 3\.0"),
    ):
        target.begin()


def test_sending_on_a_freshly_booted_machine(
    kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock, which counts from the boot, is near zero."""
    booted = time.monotonic() - 1
    monkeypatch.setattr(send_queue, "time", SimpleNamespace(monotonic=lambda: time.monotonic() - booted))
    topic = fresh_topic()
    with closing(KafkaSender.connect(make_address(kafka), seconds=2)) as sender:
        sender.begin()
        sender.send(topic, make_batches(10))
        assert [d.first for d in sender.flush(topic)] == [0]


def test_missing_topic_is_not_created(kafka: LocalKafka) -> None:
    with open_target(kafka, "nowhere-to-send") as target, pytest.raises(UnknownTopic, match="create the topic"):
        target.partitions()


@pytest.mark.faults
@pytest.mark.parametrize("key", [PRODUCE, ADD_PARTITIONS])
def test_lost_responses_cause_no_duplicates(behind: Any, fresh_topic: Callable[..., str], key: int) -> None:
    topic = fresh_topic(partitions=2, cluster=behind.cluster)
    with open_target(behind.cluster, topic) as target:
        target.begin()
        behind.proxy.lose = {key: 2}
        sent = target.send(make_batches(300, partition=lambda n: n % 2, limit=1000), str)
        target.commit(CommittedOffset(300))
    assert behind.proxy.lose == {key: 0}
    records = wait_until(lambda: len(r := consume_topic(behind.cluster, topic)) == 300 and r)
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in records} == by_place


@pytest.mark.faults
def test_lost_responses_without_transactions_cause_no_duplicates(behind: Any, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic(partitions=2, cluster=behind.cluster)
    with closing(KafkaSender.connect(make_address(behind.cluster))) as sender:
        sender.begin()
        behind.proxy.lose = {PRODUCE: 3}
        sender.send(topic, make_batches(300, partition=lambda n: n % 2, limit=1000))
        sent = sender.flush(topic)
    assert behind.proxy.lose == {PRODUCE: 0}
    records = wait_until(lambda: len(r := consume_topic(behind.cluster, topic)) == 300 and r)
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in records} == by_place
