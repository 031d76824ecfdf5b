"""The groups of a real cluster are described without disturbing any; offsets are set only in groups without members."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaConsumer, OffsetAndMetadata
from kafka import TopicPartition as Plain
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment

from sluice.pipelines.errors import GroupHeld, KafkaUnavailable
from sluice.pipelines.model.consumer_groups import GroupState
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.group.all_groups import KafkaGroups
from sluice.resources.kafka.protocol import admin_api
from sluice.resources.local.local_kafka import LocalKafka
from tests.resources.kafka.tools import make_address, wait_until


@pytest.fixture
def groups(kafka: LocalKafka) -> Iterator[KafkaGroups]:
    with closing(KafkaGroups(make_address(kafka), patience=15.0)) as kafka_groups:
        yield kafka_groups


@contextmanager
def run_consumer(kafka: LocalKafka, topic: str, group: str, **settings: Any) -> Iterator[KafkaConsumer]:
    """Run a consumer that polls in its own thread until the block ends."""
    done = threading.Event()
    where = {"bootstrap_servers": kafka.bootstrap, "group_id": group, "enable_auto_commit": False}
    with closing(KafkaConsumer(topic, **where, **settings)) as consumer:
        wait_until(lambda: consumer.partitions_for_topic(topic))

        def poll() -> None:
            while not done.is_set():
                consumer.poll(100)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            wait_until(lambda: consumer.assignment())
            yield consumer
        finally:
            done.set()
            thread.join()


def test_missing_group_is_dead_and_is_not_created_by_viewing(groups: KafkaGroups) -> None:
    view = groups.view("nobody-ever")
    assert (view.exists, view.free, view.state, view.members) == (False, True, GroupState.DEAD, ())
    assert groups.fetch_committed("nobody-ever") == {}
    assert "nobody-ever" not in {g.group for g in groups.list_groups()}


def test_put_offsets_are_read_back_and_create_group_without_protocol(groups: KafkaGroups, fresh_topic: Any) -> None:
    topic = fresh_topic(partitions=2)
    offsets = {
        TopicPartition(topic, 0): CommittedOffset(3, metadata="by hand"),
        TopicPartition(topic, 1): CommittedOffset(0),
    }
    groups.put(f"g-{topic}", offsets)
    assert groups.fetch_committed(f"g-{topic}") == offsets
    view = groups.view(f"g-{topic}")
    assert (view.state, view.kind, view.protocol_type, view.members) == (GroupState.EMPTY, "classic", "", ())
    assert [(g.state, g.kind) for g in groups.list_groups() if g.group == f"g-{topic}"] == [("Empty", "classic")]


def test_live_group_is_described_and_its_offsets_cannot_be_set(
    kafka: LocalKafka, groups: KafkaGroups, fresh_topic: Any
) -> None:
    topic = fresh_topic(partitions=2)
    name, tps = f"g-{topic}", tuple(TopicPartition(topic, p) for p in range(2))
    settings = {"client_id": "loader", "group_instance_id": "loader-1", "session_timeout_ms": 6000}
    with run_consumer(kafka, topic, name, **settings) as consumer:
        view = wait_until(lambda: (v := groups.view(name)).state == GroupState.STABLE and v)
        assert (view.protocol_type, view.assignor, view.free) == ("consumer", "range", False)
        assert str(view.coordinator).endswith(kafka.bootstrap)
        (member,) = view.members or ()
        assert (member.client_id, member.host, member.instance_id, member.partitions) == (
            "loader",
            "127.0.0.1",
            "loader-1",
            tps,
        )
        with pytest.raises(GroupHeld):
            groups.put(name, {tps[0]: CommittedOffset(3)})
        consumer.commit({Plain(topic, 0): OffsetAndMetadata(1, "", -1)})  # its generation is still good
        assert groups.view(name).members == view.members
        assert groups.fetch_committed(name) == {tps[0]: CommittedOffset(1)}


def test_unreachable_cluster_is_reported() -> None:
    with (
        closing(KafkaGroups(KafkaAddress("127.0.0.1:9", {"bootstrap_timeout_ms": 300}), patience=1.0)) as groups,
        pytest.raises(KafkaUnavailable),
    ):
        groups.list_groups()


# -- assignments as members encode them

_PARTITIONS = st.dictionaries(st.text(min_size=1, max_size=9), st.lists(st.integers(0, 99), max_size=4), max_size=4)


@given(_PARTITIONS, st.integers(0, 3))
def test_assignment_encoded_by_consumers_is_decoded(assigned: dict[str, list[int]], version: int) -> None:
    one = ConsumerProtocolAssignment.TopicPartition
    entries = [one(topic=topic, partitions=numbers) for topic, numbers in assigned.items()]
    data = ConsumerProtocolAssignment(version=version, assigned_partitions=entries, user_data=b"x").encode(header=True)
    expected = tuple(sorted(TopicPartition(topic, p) for topic, numbers in assigned.items() for p in numbers))
    assert admin_api.read_assignment(bytes(data)) == expected


@given(st.binary(max_size=80))
def test_arbitrary_assignment_bytes_do_not_raise(data: bytes) -> None:
    assignment = admin_api.read_assignment(data)
    assert assignment is None or all(isinstance(tp, TopicPartition) for tp in assignment)
