"""Answers to fetches, decoded without kafka-python: with its results, and never beyond their last byte."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.errors import KafkaProtocolError
from kafka.protocol.admin import DescribeConfigsResponse
from kafka.protocol.consumer import FetchResponse
from kafka.protocol.producer import ProduceRequest

from sluice.pipelines.model.kafka import BrokerConfig, TopicConfig, TopicPartition
from sluice.resources.kafka.fetch.broker_sessions import parts_of
from sluice.resources.kafka.protocol import messages
from sluice.resources.kafka.protocol.group_api import ProducerId, ask_produce
from sluice.resources.kafka.protocol.messages import FetchAsk, FetchPart, Leadership

int64 = st.integers(0, 2**62)
parts = st.fixed_dictionaries(
    {
        "error_code": st.sampled_from([0, 0, 1, 6, 74]),
        "high_watermark": int64,
        "last_stable_offset": int64,
        "log_start_offset": int64,
        "preferred_read_replica": st.integers(-1, 9),
        "records": st.none() | st.binary(max_size=300),
        "aborted": st.none() | st.lists(st.tuples(int64, int64), max_size=3),
    }
)
names = st.text("abc.-_", min_size=1, max_size=200)
answers = st.dictionaries(names, st.dictionaries(st.integers(0, 99), parts, max_size=4), max_size=3)


@given(answer=answers, version=st.sampled_from([12, 13]), throttled=st.integers(0, 1000))
def test_fetch_response_is_decoded_by_its_schema(answer, version, throttled):
    data = _encode_answer(answer, version, throttled)
    read = messages.read_fetch(memoryview(b"head" + data), 4, version)
    assert (read.throttle_time_ms, read.error) == (throttled, None)
    assert read.parts == {
        (name if version == 12 else messages.printed_id(_make_id(name)), number): _build_expected(part)
        for name, numbers in answer.items()
        for number, part in numbers.items()
    }


@given(answer=answers, version=st.sampled_from([12, 13]), data=st.data())
def test_damaged_fetch_response_raises_or_stays_within_its_bytes(answer, version, data):
    encoded = bytearray(_encode_answer(answer, version, 0))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(0, 255))
    cut = encoded[: data.draw(st.integers(at, len(encoded)))]
    try:
        read = messages.read_fetch(memoryview(bytes(cut)), 0, version)
    except KafkaProtocolError:
        return
    assert sum(len(part.records) for part in read.parts.values()) <= len(cut)


@given(
    records=st.dictionaries(st.integers(0, 9000), st.binary(min_size=61, max_size=400), min_size=1, max_size=5),
    producer=st.sampled_from(["", "sluice-republish-orders-1"]),
    topic=names,
    version=st.integers(8, 11),
)
def test_produce_request_is_encoded_as_by_kafka_python(records, producer, topic, version):
    views = {partition: memoryview(batch) for partition, batch in records.items()}
    encoded = []
    for request in (ask_produce(ProducerId(producer, 7, 1), topic, batches) for batches in (views, records)):
        request.API_VERSION = version
        request.with_header(correlation_id=12, client_id="sluice-orders")
        encoded.append(bytes(request.encode(header=True, framed=True)))
    theirs = bytes(ProduceRequest.encode(request, header=True, framed=True))
    assert encoded == [theirs, theirs]


@pytest.mark.parametrize("version", [12, 13])
def test_topic_named_like_id_of_other_topic_gets_its_own_records(version):
    """Kafka allows such a name. Before Kafka 3.1, answers name topics by their names."""
    topic_id = messages.printed_id(_make_id("orders"))
    part = {"error_code": 0, "high_watermark": 9, "last_stable_offset": 9, "log_start_offset": 0}
    part |= {"preferred_read_replica": -1, "aborted": None}
    answer = {name: {0: part | {"records": name.encode()}} for name in ("orders", topic_id)}
    read = messages.read_fetch(memoryview(_encode_answer(answer, version, 0)), 0, version)
    asks = [
        FetchAsk(Leadership(TopicPartition(name, 0), messages.printed_id(_make_id(name)), 1, 0, None), 0, 100)
        for name in answer
    ]
    assert [bytes(part.records).decode() for part in parts_of(read, asks)] == ["orders", topic_id]


def test_unterminated_length_is_refused():
    with pytest.raises(KafkaProtocolError):
        messages.read_fetch(memoryview(bytes(10) + b"\xff" * 20), 0, 12)


@given(st.uuids())
def test_topic_id_survives_print_and_parse(topic_id):
    printed = messages.printed_id(topic_id)
    assert len(printed) == 22
    assert messages.parsed_id(printed) == topic_id


def _make_id(name: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, name)


def _build_expected(part) -> FetchPart:
    return FetchPart(
        messages.error_of(part["error_code"]),
        part["high_watermark"],
        part["last_stable_offset"],
        part["preferred_read_replica"],
        tuple(part["aborted"] or ()),
        memoryview(part["records"] or b""),
        part["log_start_offset"],
    )


def _encode_answer(answer, version: int, throttled: int) -> bytes:
    topic = FetchResponse.FetchableTopicResponse
    response = FetchResponse(
        throttle_time_ms=throttled,
        error_code=0,
        session_id=0,
        responses=[
            topic(
                topic=name,
                topic_id=_make_id(name),
                partitions=[
                    topic.PartitionData(
                        partition_index=number,
                        **{k: v for k, v in part.items() if k != "aborted"},
                        aborted_transactions=None
                        if part["aborted"] is None
                        else [
                            topic.PartitionData.AbortedTransaction(producer_id=p, first_offset=o)
                            for p, o in part["aborted"]
                        ],
                    )
                    for number, part in numbers.items()
                ],
            )
            for name, numbers in answer.items()
        ],
    )
    return bytes(response.encode(version=version))


def test_partitions_are_grouped_by_topic_in_order():
    wanted = {TopicPartition("b", 1): 1, TopicPartition("a", 0): 2, TopicPartition("b", 0): 3}
    assert messages.by_topic(wanted) == [("b", [(1, 1), (0, 3)]), ("a", [(0, 2)])]


def test_unreadable_or_invalid_settings_are_unknown() -> None:
    def build_result(
        kind: int, name: str, error: int = 0, **configs: str
    ) -> DescribeConfigsResponse.DescribeConfigsResult:
        result = DescribeConfigsResponse.DescribeConfigsResult
        one = result.DescribeConfigsResourceResult
        values = [one(name=k.replace("_", "."), value=v) for k, v in configs.items()]
        return result(error_code=error, resource_type=kind, resource_name=name, configs=values)

    configs = messages.read_configs(
        DescribeConfigsResponse(
            results=[
                build_result(2, "orders", cleanup_policy="compact, delete", retention_ms="-1", retention_bytes="100"),
                build_result(2, "changelog", cleanup_policy="compact", retention_ms="604800000", retention_bytes="-1"),
                build_result(2, "odd", cleanup_policy="", retention_ms="², soon", retention_bytes=""),
                build_result(2, "secret", error=29),
                build_result(4, "1", error=31, offsets_retention_minutes="10080"),
            ]
        )
    )
    assert configs.topics == {
        "orders": TopicConfig(retention_bytes=100, compacts=True),
        "changelog": TopicConfig(retention_ms=604_800_000, deletes=False, compacts=True),
        "odd": TopicConfig(deletes=False),
    }
    assert configs.broker == BrokerConfig()
