"""The local Kafka is a real one: it answers once started, survives kills, and ends only its own processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition

from sluice.pipelines.errors import SetupError
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.process import Process

pytestmark = pytest.mark.kafka


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LocalKafka]:
    """A cluster for this test only, kept and not started; its folder has a name that is awkward to quote."""
    cluster = LocalKafka(tmp_path / "a b,ü=#", settings={"log.segment.bytes": "1234567"})
    yield cluster
    cluster.stop()


def produce(cluster: LocalKafka, topic: str, *values: bytes) -> None:
    producer = KafkaProducer(bootstrap_servers=cluster.bootstrap, acks="all")
    try:
        for sent in [producer.send(topic, value) for value in values]:
            sent.get(timeout=60)
    finally:
        producer.close()


def consume_values(cluster: LocalKafka, topic: str) -> list[bytes]:
    partition = TopicPartition(topic, 0)
    consumer = KafkaConsumer(bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest")
    try:
        consumer.assign([partition])
        end = consumer.end_offsets([partition])[partition]
        values: list[bytes] = []
        while consumer.position(partition) < end:
            for records in consumer.poll(timeout_ms=1000).values():
                values.extend(record.value for record in records)
        return values
    finally:
        consumer.close()


def get_pid(cluster: LocalKafka, broker: int = 1) -> int:
    pid = cluster.status().brokers[broker - 1].pid
    assert pid is not None
    return pid


def test_kafka_console_consumer_reads_produced_records(kafka: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic()
    produce(kafka, topic, b"one", b"two", "drei ü".encode())
    process = kafka.tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", kafka.bootstrap, "--topic", topic, "--from-beginning", "--max-messages", "3"),
    )
    assert process.stdout.splitlines() == ["one", "two", "drei ü"], process.stderr


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")
"""127.0.0.1 in Linux's tables of sockets, for IPv4 and IPv6."""


def list_listeners(pid: int) -> list[str]:
    """Returns the addresses on which a process listens; empty where the system does not show them."""
    descriptors = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").glob("*") if path.is_symlink()}
    tables = [path.read_text().splitlines()[1:] for path in Path(f"/proc/{pid}/net").glob("tcp*")]
    sockets = [line.split() for table in tables for line in table]
    return [s[1].partition(":")[0] for s in sockets if s[3] == "0A" and f"socket:[{s[9]}]" in descriptors]


def test_broker_listens_on_loopback_only_and_auto_creates_no_topic(kafka: LocalKafka) -> None:
    for broker in kafka.status().brokers:
        assert broker.address.startswith("127.0.0.1:")
        assert broker.pid is not None
        assert {address in LOOPBACK for address in list_listeners(broker.pid)} <= {True}
        assert len(list_listeners(broker.pid)) == 2 or not Path("/proc/self/net/tcp").exists()
    with KafkaAdminClient(bootstrap_servers=kafka.bootstrap) as admin:
        admin.describe_topics(["never-made"])
        assert "never-made" not in admin.list_topics()


@pytest.mark.faults
def test_kept_cluster_restarts_with_its_ports_data_and_settings(own: LocalKafka) -> None:
    own.start()
    first = own.status()
    with KafkaAdminClient(bootstrap_servers=own.bootstrap) as admin:
        admin.create_topics({"kept": {"num_partitions": 1}}, wait_for_metadata=True)
    produce(own, "kept", b"before")

    own.kill_broker(1)
    assert not own.status().answering
    own.start()
    produce(own, "kept", b"between")
    own.stop()
    assert [broker.pid for broker in own.status().brokers] == [None]

    again = LocalKafka.attach(first.root).start()
    assert (again.status().cluster_id, again.bootstrap) == (first.cluster_id, first.bootstrap)
    assert consume_values(again, "kept") == [b"before", b"between"]
    assert "log.segment.bytes = 1234567" in again.status().brokers[0].log.read_text()


def test_start_of_an_attached_cluster_keeps_the_running_process(own: LocalKafka) -> None:
    pid = get_pid(own.start())
    attached = LocalKafka.attach(own.status().root)
    assert get_pid(attached.start()) == pid
    attached.stop()
    assert own.status().brokers[0].pid is None
    attached.stop()


def test_temporary_cluster_leaves_only_files_that_existed_before(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not Kafka's")
    with LocalKafka(tmp_path, keep=False) as cluster:
        process = _open_process(tmp_path)
        assert cluster.status().answering
    assert not process.alive
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.faults
def test_temporary_cluster_ends_with_its_parent_process(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from sluice.resources.local.local_kafka import LocalKafka\n"
        f"LocalKafka(Path({str(tmp_path)!r}), keep=False).start(); print('up', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        process = _open_process(tmp_path)
        starter.kill()
    assert process.wait(60)


@pytest.mark.faults
def test_used_port_is_reported(own: LocalKafka) -> None:
    own.start()
    port = int(own.bootstrap.rpartition(":")[2])
    own.stop()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(SetupError, match=f"port {port} .*taken"):
        own.start()
    assert own.start().status().answering


@pytest.mark.faults
def test_log_of_a_broker_that_fails_to_start_is_quoted(own: LocalKafka) -> None:
    own.start()
    root = own.status().root
    own.stop()
    meta = root / "node-1" / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=7"))
    with pytest.raises(SetupError, match="ended while it was starting") as caught:
        own.start()
    assert "node id 7" in str(caught.value) or "node.id" in str(caught.value), str(caught.value)
    assert own.status().brokers[0].pid is None


def test_refused_broker_setting_is_quoted_and_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"num\.io\.threads"):
        LocalKafka(tmp_path / "new", keep=False, settings={"num.io.threads": "none"}).start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_reused_pid_is_not_signalled(own: LocalKafka) -> None:
    own.start()
    root = own.status().root
    own.kill_broker(1)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        record = root / "node-1" / "process.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"pid": stranger.pid}))
        own.stop()
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.faults
def test_stop_ends_a_frozen_broker_despite_a_damaged_state_file(own: LocalKafka) -> None:
    root = own.start().status().root
    process = _open_process(root)
    own.kill_broker(1, signal.SIGSTOP)
    (root / "cluster.json").write_text("?")
    own.stop()
    assert not process.alive


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ports": 1}'])
def test_damaged_state_file_of_the_cluster_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "cluster.json").write_text(content)
    with pytest.raises(SetupError, match="cannot be read"):
        LocalKafka.attach(tmp_path)


def test_attaching_without_a_cluster_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no local Kafka"):
        LocalKafka.attach(tmp_path)
    LocalKafka(tmp_path / "never").stop()
    assert not (tmp_path / "never").exists()


def test_number_of_brokers_cannot_change(kafka: LocalKafka) -> None:
    with pytest.raises(SetupError, match="has 1 brokers"):
        LocalKafka(kafka.status().root, brokers=3).start()
    assert kafka.status().answering


@pytest.mark.faults
def test_three_brokers_continue_after_one_is_killed(kafka3: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic(cluster=kafka3, assignments={0: [3, 1, 2]})
    produce(kafka3, topic, b"three")
    os_pid = get_pid(kafka3, 3)
    kafka3.kill_broker(3)
    produce(kafka3, topic, b"two of three")
    assert consume_values(kafka3, topic) == [b"three", b"two of three"]
    kafka3.start_broker(3)
    assert kafka3.status().answering
    assert get_pid(kafka3, 3) != os_pid


def _open_process(root: Path) -> Process:
    record = json.loads((root / "node-1" / "process.json").read_text())
    process = Process(record["pid"], record["born"])
    os.kill(process.pid, 0)
    assert process.alive
    return process
