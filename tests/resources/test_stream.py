"""`sluice.stream` on a real Kafka: the records of a plain consumer in Arrow, open ranges, positions, and its ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from kafka import TopicPartition as Plain

import sluice
from sluice.pipelines.errors import OffsetsLost, TopicRecreated, UsageError
from sluice.resources.local.local_kafka import LocalKafka
from sluice.streaming import Place, Stream
from tests.resources.kafka.tools import (
    build_range,
    consume_records,
    describe,
    open_admin,
    open_transaction,
    produce,
    wait_until,
)

pytestmark = pytest.mark.kafka


@pytest.fixture
def topic(fresh_topic: Callable[..., str]) -> str:
    return fresh_topic(partitions=3)


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, topic: str) -> Path:
    (tmp_path / "feeds").mkdir()
    feed = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: earliest\nwindow: 1h\n"
    (tmp_path / "feeds" / "orders.yaml").write_text(feed)
    return tmp_path


def test_importing_the_module_keeps_the_function() -> None:
    assert callable(sluice.stream)


def collect_offsets(batches: Any) -> dict[int, list[int]]:
    offsets: dict[int, list[int]] = {}
    for batch in batches:
        (partition,) = set(batch.column("partition").to_pylist())
        offsets.setdefault(partition, []).extend(batch.column("offset").to_pylist())
    return offsets


def test_bounded_range_matches_a_plain_consumer(kafka: LocalKafka, project: Path, topic: str) -> None:
    for partition in range(3):
        produce(kafka, topic, 500, partition)
    with open_transaction(kafka, topic, 20) as aborted:
        aborted.abort_transaction()
    wait_until(
        lambda: all(s.last_stable_offset == s.high_watermark for s in describe(kafka, topic))
    )  # the marker is in
    stream = sluice.stream("orders", project=project)
    table = pa.Table.from_batches(list(stream), schema=stream.schema)
    for state in describe(kafka, topic):
        rows = table.filter(pc.equal(table["partition"], state.partition))
        wanted = consume_records(kafka, build_range(state, 0, state.last_stable_offset))
        assert rows["offset"].to_pylist() == [r[0] for r in wanted]
        assert stream.positions[f"{topic}:{state.partition}"].consumed == state.last_stable_offset
    assert table.num_rows == 1500


def test_offsets_select_partitions_and_their_ends(kafka: LocalKafka, project: Path, topic: str) -> None:
    produce(kafka, topic, 30, 1)
    with sluice.stream("orders", {f"{topic}:1": 7}, {f"{topic}:1": 19}, project=project) as stream:
        assert collect_offsets(stream) == {1: list(range(7, 19))}
        assert list(stream.positions) == [f"{topic}:1"]
    wrong = (
        ({f"{topic}:1": 31}, "lies outside"),
        ({f"{topic}:9": 0}, "not a partition"),
        ({f"{topic}:1": 7.5}, "no offset"),
    )
    for start, says in wrong:
        with pytest.raises(UsageError, match=says):
            sluice.stream("orders", start, project=project)


def test_fetched_position_runs_ahead_of_consumed_position(kafka: LocalKafka, project: Path, topic: str) -> None:
    produce(kafka, topic, 9, 0)
    with sluice.stream("orders", {f"{topic}:0": 0}, project=project) as stream:
        batch = next(stream)
        (position,) = stream.positions.values()
        assert (batch.num_rows, position.fetched, position.consumed) == (9, 9, 0)
        assert list(stream) == []
        assert stream.positions[f"{topic}:0"].consumed == 9


def test_open_range_continues_until_stopped_or_idle(kafka: LocalKafka, project: Path, topic: str) -> None:
    with sluice.stream("orders", "latest", follow=True, project=project) as stream, ThreadPoolExecutor() as pool:
        batches: list[pa.RecordBatch] = []

        def read() -> None:
            batches.extend(iter(lambda: next(stream, None), None))

        reading = pool.submit(read)
        for n in (1, 2):
            produce(kafka, topic, 5, 2)
            wait_until(lambda n=n: collect_offsets(batches) == {2: list(range(5 * n))})
        stream.stop()
        reading.result(30)
    with sluice.stream("orders", "latest", follow=True, timeout=0.2, project=project) as quiet:
        assert list(quiet) == []


def test_streams_share_the_partitions(kafka: LocalKafka, project: Path, topic: str) -> None:
    for partition in range(3):
        produce(kafka, topic, 40, partition)
    shared = sluice.streams("orders", 2, project=project)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(collect_offsets, shared)
    assert (sorted(first), sorted(second)) == ([0, 1], [2])
    assert first[0] == first[1] == second[2] == list(range(40))
    assert [len(s.positions) for s in sluice.streams("orders", 4, assignor="round_robin", project=project)] == [
        1,
        1,
        1,
        0,
    ]
    with pytest.raises(UsageError, match="range, round_robin"):
        sluice.streams("orders", 2, assignor="sticky", project=project)


def open_following_stream(project: Path, start: Place = "earliest") -> Stream:
    """Open a stream that has read all records and waits for more."""
    stream = sluice.stream("orders", start, follow=True, timeout=60, project=project)
    assert next(stream).num_rows == 10
    return stream


def test_offset_jump_is_an_error(kafka: LocalKafka, project: Path, topic: str) -> None:
    produce(kafka, topic, 10, 0)
    with open_following_stream(project) as stream:
        produce(kafka, topic, 10, 0)
        with open_admin(kafka) as client:
            client.delete_records({Plain(topic, 0): 15})
        with pytest.raises(OffsetsLost, match=r"\[10, 15\) are gone"):
            list(stream)


@pytest.mark.parametrize("partitions", [3, 1])
def test_recreated_topic_is_an_error(kafka: LocalKafka, project: Path, topic: str, partitions: int) -> None:
    produce(kafka, topic, 10, 2)
    with open_following_stream(project, {f"{topic}:2": 0}) as stream:
        with open_admin(kafka) as client:
            client.delete_topics([topic])
            wait_until(lambda: topic not in client.list_topics())
            client.create_topics({topic: {"num_partitions": partitions}}, wait_for_metadata=True)
        wait_until(lambda: len(describe(kafka, topic)) == partitions)
        with pytest.raises(TopicRecreated, match="another topic now"):
            list(stream)


def test_stream_with_both_end_and_follow_is_refused(project: Path, kafka: LocalKafka) -> None:
    with pytest.raises(UsageError, match="has no end"):
        sluice.stream("orders", end="latest", follow=True, project=project)
    before = threading.active_count()
    sluice.stream("orders", project=project).close()
    assert threading.active_count() == before
