"""Foreign clients in the feed's group: they join it, commit to it, move its offsets, delete them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

from kafka import KafkaConsumer
from kafka import TopicPartition as Plain
from kafka.structs import OffsetAndMetadata

from sluice.resources.local import java, local_kafka
from tests.faults.field import Field
from tests.resources.kafka.tools import wait_until

TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
_CONSOLE = "org.apache.kafka.tools.consumer.ConsoleConsumer"


def _connect_consumer(field: Field) -> KafkaConsumer:
    return KafkaConsumer(
        bootstrap_servers=field.arena.kafka.bootstrap,
        group_id=field.group,
        client_id="stranger",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        heartbeat_interval_ms=300,
        session_timeout_ms=6000,
    )


@contextmanager
def join_group(field: Field) -> Iterator[Callable[[], None]]:
    """Keep an ordinary consumer in the group.

    Yields a function that commits its position and returns once the log has grown beyond: a commit at the frontier of
    the next run would be accepted.
    """
    stopped, lock = threading.Event(), threading.Lock()
    consumer = _connect_consumer(field)
    consumer.subscribe([field.topic])
    # kafka-python's group leader never assigns partitions if it joins before it knows the topic.
    wait_until(lambda: consumer.partitions_for_topic(field.topic))

    def poll() -> None:
        while not stopped.is_set():
            with lock:
                consumer.poll(100)

    def commit() -> None:
        with lock:
            positions = {tp.partition: consumer.position(tp) for tp in consumer.assignment()}
            consumer.commit({Plain(field.topic, p): OffsetAndMetadata(o, "", -1) for p, o in positions.items()})
        field.foreign_commits += [((field.topic, p), o) for p, o in positions.items()]
        field.account.log(f"it committed {positions}")
        wait_until(lambda: any(get_position(p) > o for p, o in positions.items()), 60)

    def get_position(partition: int) -> int:
        with lock:
            return consumer.position(Plain(field.topic, partition)) or 0

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        wait_until(consumer.assignment, 60)
        field.account.log("an ordinary consumer is in our group")
        yield commit
    finally:
        stopped.set()
        thread.join()
        consumer.close(autocommit=False)
        field.account.log("it has left")


@contextmanager
def join_by_newer_protocol(field: Field) -> Iterator[None]:
    """Keep Kafka's console consumer in the group, by the protocol of KIP-848."""
    arguments = ["--bootstrap-server", field.arena.kafka.bootstrap, "--topic", field.topic, "--group", field.group]
    for setting in ("group.protocol=consumer", "client.id=newer", "enable.auto.commit=false"):
        arguments += ["--command-property", setting]
    jars = java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS)
    command = [str(java.find_java()), "-Xmx128m", "-cp", f"{jars}/*", _CONSOLE, *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: _has_members(field), 90)
            field.account.log("a consumer of the newer protocol is in our group")
            yield
        finally:
            process.terminate()
            process.wait()
            wait_until(lambda: not _has_members(field), 60)
            field.account.log("it has left")


def _has_members(field: Field) -> bool:
    with field.arena.connect_admin() as admin:
        states = {g["group_id"]: g["group_state"] for g in admin.list_groups()}
    return states.get(field.group) == "Stable"


def fetch_offsets(field: Field) -> dict[int, int | None]:
    """Returns the group's committed offsets, read at read_committed."""
    with closing(
        KafkaConsumer(
            bootstrap_servers=field.arena.kafka.bootstrap,
            group_id=field.group,
            isolation_level="read_committed",
            enable_auto_commit=False,
        )
    ) as consumer:
        return {p: consumer.committed(Plain(field.topic, p)) for p in range(field.partitions)}


def move_offsets(field: Field, offsets: Mapping[int, int]) -> None:
    """Set offsets of the group by a consumer that is not a member."""
    with closing(_connect_consumer(field)) as consumer:
        consumer.assign([Plain(field.topic, p) for p in offsets])
        consumer.commit({Plain(field.topic, p): OffsetAndMetadata(o, "", -1) for p, o in offsets.items()})
    field.foreign_commits += [((field.topic, p), o) for p, o in offsets.items()]
    field.account.log(f"somebody moved the group's offsets to {dict(offsets)}")


def reset_offsets_by_tool(field: Field, *reset: str) -> None:
    """Run `kafka-consumer-groups --reset-offsets …` for all partitions, and note the offsets for the checker."""
    options = ("--group", field.group, "--topic", field.topic)
    run_tool(field, *options, "--reset-offsets", *reset, "--execute")
    field.foreign_commits += [((field.topic, p), o) for p, o in fetch_offsets(field).items()]
    field.account.log(f"kafka-consumer-groups moved the group's offsets: {' '.join(reset)}")


def delete_offsets(field: Field, *, group: bool) -> None:
    """Delete the committed offsets, as when they expire, or the whole group."""
    with field.arena.connect_admin() as admin:
        if group:
            admin.delete_groups([field.group])
        else:
            admin.delete_group_offsets(field.group, [Plain(field.topic, p) for p in range(field.partitions)])
    wait_until(lambda: not any(fetch_offsets(field).values()))
    field.account.log("the group is gone" if group else "the group's offsets are gone")


def run_tool(field: Field, *arguments: str) -> str:
    result = field.arena.kafka.tool(TOOL, "--bootstrap-server", field.arena.kafka.bootstrap, *arguments)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout
