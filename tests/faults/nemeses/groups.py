"""What others do to our group: they join it, commit into it, move its offsets, delete them."""

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
from tests.resources.kafka.tools import until

TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
_CONSOLE = "org.apache.kafka.tools.consumer.ConsoleConsumer"


def _consumer(field: Field) -> KafkaConsumer:
    return KafkaConsumer(
        bootstrap_servers=field.arena.kafka.bootstrap,
        group_id=field.group,
        client_id="stranger",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        heartbeat_interval_ms=300,
        session_timeout_ms=6000,
    )


@contextmanager
def joined(field: Field) -> Iterator[Callable[[], None]]:
    """An ordinary consumer is a member, and polls, until the block ends. It commits what it has read when told to."""
    done, lock = threading.Event(), threading.Lock()
    consumer = _consumer(field)
    consumer.subscribe([field.topic])
    # kafka-python's group leader assigns nothing, for good, when it joined before it knew the topic.
    until(lambda: consumer.partitions_for_topic(field.topic))

    def poll() -> None:
        while not done.is_set():
            with lock:
                consumer.poll(100)

    def commits() -> None:
        with lock:
            at = {tp.partition: consumer.position(tp) for tp in consumer.assignment()}
            consumer.commit({Plain(field.topic, p): OffsetAndMetadata(o, "", -1) for p, o in at.items()})
        field.hands += [((field.topic, p), o) for p, o in at.items()]
        field.account.did(f"it committed {at}")

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        until(consumer.assignment, 60)
        field.account.did("an ordinary consumer is in our group")
        yield commits
    finally:
        done.set()
        thread.join()
        consumer.close(autocommit=False)
        field.account.did("it has left")


@contextmanager
def joined_by_the_newer_protocol(field: Field) -> Iterator[None]:
    """Kafka's own console consumer is a member, by the protocol of KIP-848, until the block ends."""
    words = ["--bootstrap-server", field.arena.kafka.bootstrap, "--topic", field.topic, "--group", field.group]
    for setting in ("group.protocol=consumer", "client.id=newer", "enable.auto.commit=false"):
        words += ["--command-property", setting]
    jars = java.jars(f"kafka-{local_kafka.VERSION}", local_kafka.ARTIFACTS)
    command = [str(java.find_java()), "-Xmx128m", "-cp", f"{jars}/*", _CONSOLE, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _members(field), 90)
            field.account.did("a consumer of the newer protocol is in our group")
            yield
        finally:
            process.terminate()
            process.wait()
            until(lambda: not _members(field), 60)
            field.account.did("it has left")


def _members(field: Field) -> bool:
    with field.arena.admin() as admin:
        states = {g["group_id"]: g["group_state"] for g in admin.list_groups()}
    return states.get(field.group) == "Stable"


def committed(field: Field) -> dict[int, int | None]:
    """The group's offsets, as Kafka tells a consumer who waits for open transactions."""
    with closing(
        KafkaConsumer(
            bootstrap_servers=field.arena.kafka.bootstrap,
            group_id=field.group,
            isolation_level="read_committed",
            enable_auto_commit=False,
        )
    ) as consumer:
        return {p: consumer.committed(Plain(field.topic, p)) for p in range(field.partitions)}


def moved(field: Field, offsets: Mapping[int, int]) -> None:
    """Somebody sets offsets of the group by a consumer that is not a member."""
    with closing(_consumer(field)) as consumer:
        consumer.assign([Plain(field.topic, p) for p in offsets])
        consumer.commit({Plain(field.topic, p): OffsetAndMetadata(o, "", -1) for p, o in offsets.items()})
    field.hands += [((field.topic, p), o) for p, o in offsets.items()]
    field.account.did(f"somebody moved the group's offsets to {dict(offsets)}")


def moved_by_the_tool(field: Field, *words: str) -> None:
    """`kafka-consumer-groups --reset-offsets …` with all partitions; what it set is told to the checker."""
    where = ("--group", field.group, "--topic", field.topic)
    tool(field, *where, "--reset-offsets", *words, "--execute")
    field.hands += [((field.topic, p), o) for p, o in committed(field).items()]
    field.account.did(f"kafka-consumer-groups moved the group's offsets: {' '.join(words)}")


def deleted(field: Field, *, group: bool) -> None:
    """The committed offsets are gone, as when they expire; or the whole group."""
    with field.arena.admin() as admin:
        if group:
            admin.delete_groups([field.group])
        else:
            admin.delete_group_offsets(field.group, [Plain(field.topic, p) for p in range(field.partitions)])
    until(lambda: not any(committed(field).values()))
    field.account.did("the group is gone" if group else "the group's offsets are gone")


def tool(field: Field, *words: str) -> str:
    done = field.arena.kafka.tool(TOOL, "--bootstrap-server", field.arena.kafka.bootstrap, *words)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
