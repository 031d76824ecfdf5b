"""Membership of a real consumer group: exclusive, with fenced commits whose outcome is known or reported as unknown."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing, contextmanager

import pytest
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata
from kafka import TopicPartition as Plain

from sluice.pipelines.errors import CommitFenced, GroupHeld, KafkaUnavailable, ProofFailed, UsageError
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.connection.connections import Coordinators, Wire
from sluice.resources.kafka.group.all_groups import KafkaGroups
from sluice.resources.kafka.group.group import KafkaGroup
from sluice.resources.kafka.group.membership import Heart
from sluice.resources.kafka.protocol.group_api import Seat
from sluice.resources.kafka.protocol.kafka_errors import BrokerNotReached
from sluice.resources.local import java, local_kafka
from tests.resources.kafka.tools import make_address, open_admin, wait_until


@pytest.fixture
def topic(fresh_topic):
    return fresh_topic(partitions=3)


@pytest.fixture
def group(kafka, topic):
    with closing(
        KafkaGroup(make_address(kafka), f"g-{topic}", session=2.0, transaction=2.0, patience=10.0)
    ) as kafka_group:
        yield kafka_group


def list_spots(topic):
    return [TopicPartition(topic, partition) for partition in range(3)]


@contextmanager
def run_consumer(kafka, topic, **settings):
    """Run a consumer of the topic's group that polls in its own thread until the block ends."""
    done = threading.Event()
    with closing(
        KafkaConsumer(
            topic, bootstrap_servers=kafka.bootstrap, group_id=f"g-{topic}", auto_offset_reset="earliest", **settings
        )
    ) as consumer:
        # kafka-python's group leader never assigns anything if it joins before it knows the topic.
        wait_until(lambda: consumer.partitions_for_topic(topic))
        assigned: list[int] = []

        def poll():
            while not done.is_set():
                consumer.poll(100)
                assigned.append(len(consumer.assignment()))

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield assigned, consumer
        finally:
            done.set()
            thread.join()


def test_uncommitted_partitions_have_no_offset(group, topic):
    assert group.fetch_committed(list_spots(topic)) == dict.fromkeys(list_spots(topic))
    assert group.fetch_committed([]) == {}
    assert group.members() == ()


@pytest.mark.parametrize("transactional", [True, False])
def test_committed_offsets_are_read_back_immediately(kafka, group, topic, transactional):
    first, second, third = list_spots(topic)
    with group.join([topic], f"t-{topic}" if transactional else None) as member:
        if transactional:
            member.init_transactions()
        commit = member.commit_transaction if transactional else member.commit_plain
        for n in range(1, 6):  # a read that does not require stable offsets is sometimes one behind
            offsets = {first: CommittedOffset(n, 0, f"mark {n}"), second: CommittedOffset(n * 10, -1, "é" * n)}
            commit(offsets)
            assert member.fetch_committed([first, second, third]) == offsets | {third: None}
        commit({})
    with closing(KafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=f"g-{topic}")) as plain:
        assert plain.committed(Plain(topic, 0), metadata=True) == OffsetAndMetadata(5, "mark 5", 0)
    assert group.members() == ()


def test_offset_fetch_waits_for_open_transaction(kafka, group, topic):
    """While transactional offsets are pending, the previous ones are not returned."""

    spot, *_ = list_spots(topic)
    with closing(KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=f"other-{topic}")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({Plain(topic, 0): OffsetAndMetadata(7, "", -1)}, f"g-{topic}")
        with (
            closing(KafkaGroup(make_address(kafka), f"g-{topic}", patience=0.3)) as hasty,
            pytest.raises(KafkaUnavailable, match="UNSTABLE_OFFSET_COMMIT"),
        ):
            hasty.fetch_committed([spot])
        threading.Timer(0.3, producer.commit_transaction).start()
        assert group.fetch_committed([spot]) == {spot: CommittedOffset(7)}


def test_a_live_consumer_is_not_disturbed(kafka, group, topic):
    with run_consumer(kafka, topic, client_id="somebody") as (assigned, consumer):
        wait_until(lambda: assigned and assigned[-1] == 3)
        generation = consumer.group_metadata().generation_id
        (member,) = group.members()
        assert (member.client_id, member.host) == ("somebody", "127.0.0.1")
        with pytest.raises(GroupHeld, match="somebody at 127"), group.join([topic], f"t-{topic}"):
            pass
        assert consumer.group_metadata().generation_id == generation
        assert set(assigned[assigned.index(3) :]) == {3}


def test_stopped_static_member_blocks_join_and_is_named(kafka, group, topic):
    static = {"client_id": "somebody", "group_instance_id": "loader-1", "session_timeout_ms": 6000}
    with run_consumer(kafka, topic, **static) as (assigned, _):
        wait_until(lambda: assigned and assigned[-1] == 3)
    with (
        pytest.raises(GroupHeld, match=r"somebody at 127.* \(static member loader-1\)") as caught,
        group.join([topic], f"t-{topic}"),
    ):
        pass
    assert "until its session.timeout.ms has passed" in caught.value.remedy
    wait_until(lambda: not group.members())


def test_consumer_that_joins_later_fences_commits(kafka, group, topic):
    spot, *_ = list_spots(topic)
    with group.join([topic], f"t-{topic}") as member:
        member.init_transactions()
        member.commit_transaction({spot: CommittedOffset(1)})
        with run_consumer(kafka, topic) as (assigned, _):
            wait_until(lambda: assigned and assigned[-1] == 3)
            with pytest.raises(CommitFenced, match=r"ILLEGAL_GENERATION|UNKNOWN_MEMBER"):
                member.commit_transaction({spot: CommittedOffset(2)})
            with pytest.raises(CommitFenced, match=r"ILLEGAL_GENERATION|UNKNOWN_MEMBER"):
                member.commit_plain({spot: CommittedOffset(3)})
            # The refused transaction was aborted: no reader has to wait for it to time out.
            assert group.fetch_committed([spot]) == {spot: CommittedOffset(1)}


def test_a_second_committer_fences_the_first(kafka, group, topic):
    spot, *_ = list_spots(topic)
    with group.join([topic], f"t-{topic}") as member:
        member.init_transactions()
        with (
            closing(KafkaGroup(make_address(kafka), f"other-{topic}")) as other,
            other.join([topic], f"t-{topic}") as rival,
        ):
            rival.init_transactions()
            with pytest.raises(CommitFenced, match=r"PRODUCER_FENCED|INVALID_PRODUCER_EPOCH"):
                member.commit_transaction({spot: CommittedOffset(1)})
            rival.commit_transaction({spot: CommittedOffset(2)})
        assert group.fetch_committed([spot]) == {spot: None}


def test_join_waits_for_crashed_run_to_expire(kafka, group, topic):
    crash = (
        "import os, sys\n"
        "from sluice.resources.kafka.group.group import KafkaGroup\n"
        "from sluice.resources.kafka.connection.connection_settings import KafkaAddress\n"
        "with KafkaGroup(KafkaAddress(sys.argv[1]), sys.argv[2], session=2.0).join([sys.argv[3]], None):\n"
        "    os._exit(9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", crash, kafka.bootstrap, f"g-{topic}", topic], check=False)
    assert ended.returncode == 9
    assert len(group.members()) == 1
    with group.join([topic], None):
        assert len(group.members()) == 1


def test_live_run_keeps_membership_while_second_run_waits(group, kafka, topic):
    spot, *_ = list_spots(topic)
    with (
        closing(KafkaGroup(make_address(kafka), f"g-{topic}", session=1.0)) as other,
        other.join([topic], None) as member,
    ):
        with pytest.raises(GroupHeld, match="sluice at"), group.join([topic], None):
            pass
        # The other member waited longer than the session lasts: heartbeats kept the seat.
        member.commit_plain({spot: CommittedOffset(4)})
    assert group.fetch_committed([spot]) == {spot: CommittedOffset(4)}


def test_member_leaves_when_block_fails(group, topic):
    with pytest.raises(ZeroDivisionError), group.join([topic], None):
        raise ZeroDivisionError
    assert group.members() == ()


def test_invalid_commit_is_refused_before_sending(group, topic):
    first, second, _ = list_spots(topic)
    with group.join([topic], f"t-{topic}") as member:
        with pytest.raises(UsageError, match="not started"):
            member.commit_transaction({first: CommittedOffset(1)})
        member.init_transactions()
        for commit in (member.commit_transaction, member.commit_plain):
            with pytest.raises(ProofFailed) as caught:
                commit({first: CommittedOffset(1), second: CommittedOffset(-1)})
            assert (caught.value.topic, caught.value.partition) == (topic, 1)
        assert member.fetch_committed([first]) == {first: None}
    with group.join([topic], None) as member, pytest.raises(UsageError, match="no transactional id"):
        member.init_transactions()


def test_deleted_group_has_no_committed_offsets(kafka, group, topic):
    spot, *_ = list_spots(topic)
    with group.join([topic], None) as member:
        member.commit_plain({spot: CommittedOffset(9)})
    with open_admin(kafka) as client:
        client.delete_groups([f"g-{topic}"])
    assert group.fetch_committed([spot]) == {spot: None}


def test_join_is_refused_while_group_uses_newer_protocol(kafka, group, topic):
    """No request of the classic protocol lists its members (KIP-848)."""
    consumer = _start_console_consumer(kafka, topic)
    try:
        wait_until(lambda: _is_held(group))
        with pytest.raises(GroupHeld, match="newer"), group.join([topic], None):
            pass
    finally:
        consumer.terminate()
        consumer.wait()


def test_consumer_of_newer_protocol_fences_commits(kafka, topic):
    """The coordinator converts the group, and accepts commits of our generation until our session has passed."""
    spot, *_ = list_spots(topic)
    with (
        closing(KafkaGroup(make_address(kafka), f"g-{topic}", session=30.0, transaction=2.0, patience=10.0)) as group,
        closing(KafkaGroups(make_address(kafka))) as groups,
        group.join([topic], f"t-{topic}") as member,
    ):
        member.init_transactions()
        member.commit_transaction({spot: CommittedOffset(1)})
        consumer = _start_console_consumer(kafka, topic)
        try:
            wait_until(lambda: groups.view(f"g-{topic}").kind == "consumer")
            with pytest.raises(CommitFenced, match="newer group protocol"):
                member.commit_transaction({spot: CommittedOffset(2)})
            with pytest.raises(CommitFenced, match="newer group protocol"):
                member.commit_plain({spot: CommittedOffset(3)})
            assert group.fetch_committed([spot]) == {spot: CommittedOffset(1)}
        finally:
            consumer.terminate()
            consumer.wait()


def _is_held(group):
    try:
        group.members()
    except GroupHeld:
        return True
    return False


def _start_console_consumer(kafka, topic):
    jars = java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS)
    name = "org.apache.kafka.tools.consumer.ConsoleConsumer"
    where = ["--bootstrap-server", kafka.bootstrap, "--topic", topic, "--group", f"g-{topic}"]
    return subprocess.Popen(
        [
            java.find_java(),
            "-Xmx128m",
            "-cp",
            f"{jars}/*",
            name,
            *where,
            "--command-property",
            "group.protocol=consumer",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_join_fails_if_broker_is_unreachable():
    with (
        closing(KafkaGroup(KafkaAddress("127.0.0.1:1", {"bootstrap_timeout_ms": 200}), "g")) as group,
        pytest.raises(KafkaUnavailable, match="connection refused"),
        group.join(["t"], None),
    ):
        pass


def test_heartbeats_look_up_coordinator_again_when_unreachable(monkeypatch):
    """Otherwise a member that commits long after it joined would have lost its seat."""

    async def raise_not_reached(*_):
        raise BrokerNotReached("gone")

    forgotten = threading.Event()
    monkeypatch.setattr(Wire, "send", raise_not_reached)
    monkeypatch.setattr(Wire, "forget_coordinator", lambda *_: forgotten.set())
    with closing(Wire(KafkaAddress("127.0.0.1:1"))) as wire:
        heart = Heart(Coordinators(wire, 1.0), Seat("g", "m", 1), 0.01)
        assert forgotten.wait(30)
        heart.stop()
