"""Batches of ours in a real log: what Kafka's own tools read of them, and what transactions and marks make of them."""

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
from tests.integration.support import consumed
from tests.resources.kafka.tools import address, until

STAMP = 1_700_000_000_000
PRODUCE, ADD_PARTITIONS = 0, 24
"""API keys."""


def row(n: int) -> dict[str, Any]:
    return {
        "key": None if n % 5 == 0 else b"k%d" % n,
        "value": None if n % 7 == 0 else b"value %d " % n * 9,
        "timestamp": STAMP + n,
        "headers": [{"key": "n", "value": b"%d" % n}, {"key": "é", "value": None}] if n % 3 else None,
    }


def batches(
    count: int, codec: int = 3, partition: Callable[[int], int] = lambda n: 0, most: int = 900_000, first: int = 0
) -> Iterator[SealedBatch]:
    rows = pa.RecordBatch.from_pylist([row(n) for n in range(first, first + count)], schema=TO_SEND)
    accumulator = Accumulator(codec, most)
    numbers = np.arange(first, first + count)
    yield from accumulator.add(rows, np.array([partition(int(n)) for n in numbers]), numbers)
    yield from accumulator.flush()


def target(kafka: LocalKafka, topic: str, **options: Any) -> Any:
    return closing(KafkaTarget(address(kafka), topic, f"t-{topic}", **options))


def content(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: r[k] for k in TO_SEND.names} for r in found]


def test_closed_connections_leave_no_round_to_wait_for() -> None:
    wire = Wire(KafkaAddress("127.0.0.1:1"))
    wire.close()
    producer, backpressure = group_api.ProducerId("", 1, 0), send_queue.Backpressure(60)
    queue = send_queue.SendQueue(Coordinators(wire, 1), producer, "orders", 60, _renew, backpressure)
    queue.put(next(batches(1)))
    with pytest.raises(KafkaUnavailable, match="closed"):
        queue.finish()
    assert queue._rounds == 0
    queue.stop()


async def _renew() -> group_api.ProducerId:
    raise AssertionError


def test_kafkas_own_tools_read_every_codec(kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path) -> None:
    topic = fresh_topic(partitions=len(CODECS))
    with target(kafka, topic) as to:
        assert to.partitions() == len(CODECS)
        assert to.begin() is None
        sent = [
            d
            for p, codec in enumerate(CODECS.values())
            for d in to.send(batches(100, codec.number, lambda n, p=p: p, most=2000), str)
        ]
        to.commit(CommittedOffset(1, metadata="so far"))
        assert to.begin() == CommittedOffset(1, metadata="so far")
    found = until(lambda: len(r := consumed(kafka, topic)) == 500 and r)
    assert [content([r for r in found if r["partition"] == p]) for p in range(5)] == [[row(n) for n in range(100)]] * 5
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in found} == by_place

    # Markers of today begin a second segment behind records of 2023.
    segments = [str(path) for folder in folders(kafka) for path in folder.glob(f"{topic}-*/*.log")]
    said = kafka.tool("org.apache.kafka.tools.DumpLogSegments", "--files", ",".join(segments), "--print-data-log")
    assert said.returncode == 0, said.stderr
    assert "isvalid: false" not in said.stdout
    assert all(f"compresscodec: {name}" in said.stdout for name in CODECS)
    assert said.stdout.count("payload: value 8 value 8") == 5


def test_javas_producer_writes_the_same_bytes_to_the_same_partitions(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    """Each batch that Kafka's console producer wrote, made again by us from what a consumer reads of it."""
    topic, draw = fresh_topic(partitions=7), random.Random(1)
    lines = []
    for n in range(1500):
        key = "".join(draw.choice("aZ09 _-.é€😀") for _ in range(n % 41)) or "-"
        headers = f"trace:{n},kind:é{n % 5}" if n % 3 else "none:"
        lines.append(f"{headers}\t{key}\t{'value ' * (n % 30)}{n}\n")
    reading = ("parse.key=true", "parse.headers=true", "key.separator=\t")
    said = kafka.tool(
        *("org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", kafka.bootstrap, "--topic", topic),
        *(word for one in reading for word in ("--reader-property", one)),
        *("--command-property", "compression.type=none"),
        stdin="".join(lines),
    )
    assert said.returncode == 0, said.stderr
    found = until(lambda: len(r := consumed(kafka, topic)) == 1500 and r)
    keys = pa.array([r["key"] for r in found], pa.binary())
    assert by_key(keys, 7, np.zeros(len(found), np.int64)).tolist() == [r["partition"] for r in found]

    compared = 0
    for p, folder in ((p, folder) for p in range(7) for folder in folders(kafka)):
        by_offset = {r["offset"]: content([r])[0] for r in found if r["partition"] == p}
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
            made = ours.encode(Numbering(producer, epoch, sequence, transactional=False))
            theirs, data = data[: 12 + size], data[12 + size :]
            # Brokers write the first offset, and the leader's epoch behind the length.
            assert (made[8:12], made[16:]) == (theirs[8:12], theirs[16:])
            compared += last + 1
    assert compared == 1500


def folders(kafka: LocalKafka) -> list[Path]:
    return [b.log.parent / "data" for b in kafka.status().brokers]


def test_what_is_not_committed_is_not_there_and_a_second_sender_fences_the_first(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(partitions=2)
    with target(kafka, topic) as first, target(kafka, topic) as second:
        first.begin()
        first.send(batches(50, partition=lambda n: n % 2), str)
        assert second.begin() is None
        second.send(batches(10, partition=lambda n: n % 2), str)
        second.commit(CommittedOffset(10))
        with pytest.raises(CommitFenced):
            first.commit(CommittedOffset(50))
        assert second.send(batches(5, first=10), str)[0].partition == 0
        second.commit(CommittedOffset(15))
        assert first.begin() == CommittedOffset(15)
    found = until(lambda: len(r := consumed(kafka, topic)) == 15 and r)
    assert sorted(r["timestamp"] - STAMP for r in found) == list(range(15))


def test_large_batches_are_split_and_a_record_that_is_too_large_is_named(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(config={"max.message.bytes": "3000"})
    with target(kafka, topic) as to:
        to.begin()
        sent = to.send(batches(200, codec=0), str)
        assert len(sent) > 4
        assert [n for d in sorted(sent, key=lambda d: d.first) for n in d.numbers] == list(range(200))
        huge = pa.RecordBatch.from_pylist(
            [row(0), {"key": None, "value": bytes(4000), "timestamp": 1, "headers": None}], schema=TO_SEND
        )
        accumulator = Accumulator()
        made = [*accumulator.add(huge, np.zeros(2, np.int64), np.arange(2)), *accumulator.flush()]
        with pytest.raises(UsageError, match=r"record of old:1 (?s:.)*max.message.bytes"):
            to.send(iter([made[0]]), lambda n: f"old:{n}")
        assert to.begin() is None
    assert consumed(kafka, topic) == []


def test_without_transactions_a_producer_that_is_forgotten_goes_on_as_another(
    kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(partitions=2)
    with closing(KafkaSender.connect(address(kafka))) as sender:
        sender.begin()
        sender.send(topic, batches(200, partition=lambda n: n % 2, most=1000))
        sent = sender.flush(topic)
        sender._queues[topic]._sequences[1] += 7  # as if the leader had lost some of it
        sender.send(topic, batches(100, partition=lambda n: n % 2, most=1000, first=200))
        sent += sender.flush(topic)
    found = until(lambda: len(r := consumed(kafka, topic)) == 300 and r)
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in found} == by_place
    for p in range(2):
        assert [r["timestamp"] - STAMP for r in found if r["partition"] == p] == list(range(p, 300, 2))


def test_a_quota_slows_it_down_and_is_told(kafka: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    """Kafka's own tool sets it. A tenth of its bytes a second are free for ten seconds; the rest takes its time."""
    topic, client, rate = fresh_topic(partitions=2), "throttled", 200_000
    said = kafka.tool(
        *("kafka.admin.ConfigCommand", "--bootstrap-server", kafka.bootstrap, "--alter"),
        *("--entity-type", "clients", "--entity-name", client, "--add-config", f"producer_byte_rate={rate}"),
    )
    assert said.returncode == 0, said.stderr
    values = [random.Random(n).randbytes(10_000) for n in range(280)]
    rows = pa.RecordBatch.from_pylist(
        [{"key": None, "value": v, "timestamp": STAMP + n, "headers": None} for n, v in enumerate(values)],
        schema=TO_SEND,
    )
    numbers, accumulator = np.arange(len(values)), Accumulator(CODECS["lz4"].number, 100_000)
    with closing(KafkaTarget(address(kafka, client_id=client), topic, f"t-{topic}")) as to:
        to.begin()
        made = [*accumulator.add(rows, numbers % 2, numbers), *accumulator.flush()]
        sent = to.send(iter(made), str)
        to.commit(CommittedOffset(1))
        assert to.throttled_ms > 0
    assert sorted(n for d in sent for n in d.numbers) == list(range(len(values)))
    found = until(lambda: len(r := consumed(kafka, topic)) == len(values) and r)
    assert [r["value"] for r in sorted(found, key=lambda r: r["timestamp"])] == values


def test_brokers_that_do_not_describe_transactions_are_too_old(
    kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(transactional_id: str) -> None:
        raise IncompatibleBrokerVersion(f"no DescribeTransactions of {transactional_id}")

    monkeypatch.setattr(group_api, "ask_transaction", ask)
    with target(kafka, fresh_topic()) as to, pytest.raises(BrokerTooOld, match=r"needs brokers of Apache Kafka 3\.0"):
        to.begin()


def test_on_a_machine_that_has_just_booted(
    kafka: LocalKafka, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock, which counts from the boot, is near zero."""
    booted = time.monotonic() - 1
    monkeypatch.setattr(send_queue, "time", SimpleNamespace(monotonic=lambda: time.monotonic() - booted))
    topic = fresh_topic()
    with closing(KafkaSender.connect(address(kafka), seconds=2)) as sender:
        sender.begin()
        sender.send(topic, batches(10))
        assert [d.first for d in sender.flush(topic)] == [0]


def test_a_topic_that_is_not_there_is_not_created(kafka: LocalKafka) -> None:
    with target(kafka, "nowhere-to-send") as to, pytest.raises(UnknownTopic, match="create the topic"):
        to.partitions()


@pytest.mark.faults
@pytest.mark.parametrize("key", [PRODUCE, ADD_PARTITIONS])
def test_lost_answers_double_nothing(behind: Any, fresh_topic: Callable[..., str], key: int) -> None:
    topic = fresh_topic(partitions=2, cluster=behind.cluster)
    with target(behind.cluster, topic) as to:
        to.begin()
        behind.proxy.lose = {key: 2}
        sent = to.send(batches(300, partition=lambda n: n % 2, most=1000), str)
        to.commit(CommittedOffset(300))
    assert behind.proxy.lose == {key: 0}
    found = until(lambda: len(r := consumed(behind.cluster, topic)) == 300 and r)
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in found} == by_place


@pytest.mark.faults
def test_without_transactions_lost_answers_double_nothing(behind: Any, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic(partitions=2, cluster=behind.cluster)
    with closing(KafkaSender.connect(address(behind.cluster))) as sender:
        sender.begin()
        behind.proxy.lose = {PRODUCE: 3}
        sender.send(topic, batches(300, partition=lambda n: n % 2, most=1000))
        sent = sender.flush(topic)
    assert behind.proxy.lose == {PRODUCE: 0}
    found = until(lambda: len(r := consumed(behind.cluster, topic)) == 300 and r)
    by_place = {(d.partition, d.first + i): int(n) for d in sent for i, n in enumerate(d.numbers)}
    assert {(r["partition"], r["offset"]): r["timestamp"] - STAMP for r in found} == by_place
