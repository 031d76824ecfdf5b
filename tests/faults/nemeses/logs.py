"""Faults of logs that runs read: retention, compaction, truncation, recreated topics, hanging transactions."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

from kafka import KafkaProducer
from kafka import TopicPartition as Plain
from kafka.admin import ConfigResource, NewPartitions
from kafka.errors import KafkaError

from tests.checker.producers import Noting
from tests.faults.field import REPOSITORY, Field, Running
from tests.integration.support import SLUICE
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import wait_until

UNCLEAN_ELECTION = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
"""Settings of a topic whose followers may lead although they lack records."""
_TRANSACTIONS = "org.apache.kafka.tools.TransactionsCommand"
_numbers = itertools.count(1)


def produce(field: Field, counts: Mapping[int, int]) -> None:
    """Produce a number of values to each partition, all acknowledged and noted for the checker."""
    producer = Noting(field.root / "by-hand.jsonl", f"h{next(_numbers)}", field.arena.kafka.bootstrap)
    if field.root / "by-hand.jsonl" not in field.notes:
        field.notes.append(field.root / "by-hand.jsonl")
    for partition, count in counts.items():
        producer.send(field.topic, partition, count)
    producer.close()


def run_sluice(field: Field, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `sluice …` as a user does. Returns the exit code and the JSON document."""
    field.write_feed()
    command = [*SLUICE, *words, "--project", str(field.root), "--json"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in result.stderr, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    field.account.log(f"sluice {' '.join(words)}: exit {result.returncode}")
    return result.returncode, document


def accept_event(field: Field, event: str, *options: str) -> dict[str, Any]:
    code, document = run_sluice(
        field, "accept", field.name, event, "--reason", f"fault {field.account.fault}", "--yes", *options
    )
    assert code == 0, document
    return document


def configure_topic(field: Field, **config: str) -> None:
    """Change settings of the topic, named as in Kafka, with underscores for dots."""
    resource = ConfigResource("TOPIC", field.topic, {k.replace("_", "."): v for k, v in config.items()})
    with field.arena.connect_admin() as admin:
        admin.alter_configs([resource], incremental=True)


def produce_lagging(field: Field, seconds: int, draw: Random) -> None:
    """Produce two transactions with timestamps `seconds` in the past. On average one of three is aborted."""
    name = f"lags{next(_numbers)}"
    producer = Noting(
        field.add_notes(name), name, field.arena.kafka.bootstrap, f"{name}-{field.topic}", -1000 * seconds
    )
    for _ in range(2):
        with producer.run_transaction(commits=draw.random() > 1 / 3):
            for partition in range(field.partitions):
                producer.send(field.topic, partition, draw.randint(1, 8))
    producer.close()
    field.account.log(f"transactions lag by {seconds} s")


@contextmanager
def hold_in_mid_read(field: Field, leaders: int = 1) -> Iterator[Running]:
    """Start a run and hold its fetches until the block ends. At least `leaders` leaders hold one before the block."""
    for proxy in field.arena.proxies.values():
        proxy.hold(FETCH, committed=True)
    running = field.start()
    try:
        wait_until(
            lambda: sum(bool(p.held) for p in field.arena.proxies.values()) >= leaders or running.process.poll(), 120
        )
        assert running.process.poll() is None, running.wait()
        field.account.log("a run is about to fetch")
        yield running
    finally:
        for proxy in field.arena.proxies.values():
            proxy.heal()


def read_frontiers(field: Field) -> dict[int, int]:
    """Returns the frontiers, by `sluice status`."""
    return {p["partition"]: p["frontier"] for p in run_sluice(field, "status", field.name)[1]["feeds"][0]["partitions"]}


# -- deletion


def fetch_log_starts(field: Field) -> dict[int, int]:
    with field.arena.connect_admin() as admin:
        return {tp.partition: start for tp, start in _fetch_offsets(admin, field, "EARLIEST").items()}


def fetch_log_ends(field: Field) -> dict[int, int]:
    with field.arena.connect_admin() as admin:
        return {tp.partition: end for tp, end in _fetch_offsets(admin, field, "LATEST").items()}


def _fetch_offsets(admin: Any, field: Field, spec: str) -> dict[Plain, int]:
    from kafka.admin import OffsetSpec

    specs = {Plain(field.topic, p): getattr(OffsetSpec, spec) for p in field.arena.find_leaders(field.topic)}
    return {tp: result.offset for tp, result in admin.list_partition_offsets(specs).items()}


@contextmanager
def apply_retention(field: Field, **config: str) -> Iterator[None]:
    """Apply retention settings until the block ends."""
    configure_topic(field, segment_ms="500", **config)
    field.account.log(f"the topic keeps {config}")
    yield
    configure_topic(field, retention_ms="-1", retention_bytes="-1", segment_ms="604800000")
    field.account.log(f"the topic keeps everything again; its logs start at {fetch_log_starts(field)}")


@contextmanager
def compact_topic(field: Field) -> Iterator[None]:
    """Compact the topic continuously until the block ends."""
    configure_topic(
        field,
        cleanup_policy="compact",
        segment_ms="500",
        min_cleanable_dirty_ratio="0.001",
        max_compaction_lag_ms="500",
        delete_retention_ms="0",
    )
    field.account.log("the topic is compacted")
    yield
    configure_topic(field, cleanup_policy="delete", segment_ms="604800000")
    field.account.log("the topic is not compacted any more")


def flip_bit(field: Field, partition: int, offset: int) -> tuple[int, int]:
    """Flip a bit of the batch at the offset on every broker's disk. Returns the batch's first and next offset."""
    batch = None
    for segment in sorted(field.arena.kafka.status().root.glob(f"node-*/data/{field.topic}-{partition}/*.log")):
        with segment.open("r+b") as log:
            data, position = log.read(), 0
            while position + 61 <= len(data):
                base, size, last = (
                    *struct.unpack_from(">qi", data, position),
                    struct.unpack_from(">i", data, position + 23)[0],
                )
                if base <= offset <= base + last:
                    spot = position + 12 + size - 2  # in a value: Kafka's tools fail at a wrong count of headers
                    log.seek(spot)
                    log.write(bytes([data[spot] ^ 1]))
                    batch = base, base + last + 1
                position += 12 + size
    assert batch, f"no segment holds offset {offset}"
    field.account.log(f"a bit of the batch {batch} of partition {partition} was turned over")
    return batch


# -- truncation


def truncate_log(
    field: Field, partition: int, produce_lost: Callable[[], None], after_failover: Callable[[], None]
) -> tuple[int, int]:
    """Kill the leader of a partition with two replicas while its follower is down, then let the follower lead.

    Records that `produce_lost` produces are lost. `after_failover` is called once the follower leads. Returns the
    log's end offsets before and after.
    """
    kafka = field.arena.kafka
    leader, follower = _find_replicas(field, partition)
    kafka.kill_broker(follower)
    wait_until(lambda: _list_in_sync(field, partition) == [leader], 60)
    field.account.log(f"broker {follower}, which follows, was killed")
    produce_lost()
    before = fetch_log_ends(field)[partition]
    kafka.kill_broker(leader)
    kafka.start_broker(follower)
    wait_until(lambda: field.arena.find_leaders(field.topic)[partition] == follower, 60)
    after = fetch_log_ends(field)[partition]
    field.account.log(f"broker {leader} was killed; {follower} leads partition {partition}, up to {after} of {before}")
    after_failover()
    field.arena.heal()
    return before, after


def _find_replicas(field: Field, partition: int) -> tuple[int, int]:
    """Returns the leader and the follower."""
    description = _describe_partition(field, partition)
    (follower,) = {*description["replica_nodes"]} - {description["leader_id"]}
    return description["leader_id"], follower


def _list_in_sync(field: Field, partition: int) -> list[int]:
    with suppress(KafkaError):  # the dead brokers may include a controller
        return list(_describe_partition(field, partition)["isr_nodes"])
    return []


def _describe_partition(field: Field, partition: int) -> dict[str, Any]:
    with field.arena.connect_admin() as admin:
        (topic,) = admin.describe_topics([field.topic])
    description: dict[str, Any] = next(p for p in topic["partitions"] if p["partition_index"] == partition)
    return description


# -- other topics


def recreate_topic(field: Field, partitions: int | None = None) -> None:
    """Delete the topic and create it again, with other `partitions` if given."""
    field.partitions = partitions or field.partitions
    with field.arena.connect_admin() as admin:
        admin.delete_topics([field.topic])
        wait_until(lambda: field.topic not in admin.list_topics())
    wait_until(lambda: _create_topic(field))
    field.account.log("the topic was deleted and created again")


def _create_topic(field: Field) -> bool:
    try:
        field.arena.create(field.topic, field.partitions, first=next(_numbers))
    except KafkaError:
        return False
    return True


def add_partitions(field: Field, count: int) -> None:
    with field.arena.connect_admin() as admin:
        admin.create_partitions({field.topic: NewPartitions(count)})
    wait_until(
        lambda: (
            len(field.arena.find_leaders(field.topic)) == count
            and min(field.arena.find_leaders(field.topic).values()) > 0
        )
    )
    field.account.log(f"the topic has {count} partitions now")


# -- transactions


@contextmanager
def leave_transaction_open(
    field: Field, partition: int, time: int, *, unknown: bool = False
) -> Iterator[tuple[str, int]]:
    """Open a transaction with a timeout of ten minutes. Yields its transactional id and first offset.

    `time`: the timestamp of its records (ms). `unknown`: its coordinator does not know of it and never ends it.
    """
    name = f"stuck-{field.topic}-{next(_numbers)}"
    producer = KafkaProducer(
        bootstrap_servers=field.arena.kafka.bootstrap, transactional_id=name, transaction_timeout_ms=600_000
    )
    producer.init_transactions()
    producer.begin_transaction()
    if unknown:
        producer._transaction_manager._partitions_in_transaction.add(Plain(field.topic, partition))
    sent = [producer.send(field.topic, b"stuck %d" % n, partition=partition, timestamp_ms=time + n) for n in range(5)]
    producer.flush()
    field.account.log(f"transaction {name} has records in partition {partition}, and its producer is silent")
    try:
        yield name, sent[0].get(0).offset
    finally:
        producer.close(0)


@contextmanager
def disable_verification(field: Field) -> Iterator[None]:
    """Let brokers accept records of transactions unknown to their coordinator, as before Kafka 3.6 (KIP-890)."""
    name = "transaction.partition.verification.enable"
    with field.arena.connect_admin() as admin:
        for value in ("false", "true"):
            brokers = [ConfigResource("BROKER", str(b), {name: value}) for b in field.arena.kafka.broker_ids]
            admin.alter_configs(brokers, incremental=True)
            if value == "false":
                yield


def abort_by_tool(field: Field, arguments: str) -> None:
    """Run `kafka-transactions.sh` with the arguments that Sluice recommends."""
    options = arguments.split()
    bootstrap = () if "--bootstrap-server" in options else ("--bootstrap-server", field.arena.kafka.bootstrap)
    result = field.arena.kafka.tool(_TRANSACTIONS, *bootstrap, *options)
    assert result.returncode == 0, result.stderr + result.stdout
    field.account.log(f"kafka-transactions {' '.join(options)}")


def produce_stamped(field: Field, time: int, count: int) -> None:
    """Produce `count` values to each partition, with timestamps from `time` (ms)."""
    producer = KafkaProducer(bootstrap_servers=field.arena.kafka.bootstrap)
    for partition in range(field.partitions):
        for n in range(count):
            producer.send(field.topic, b"%d" % n, partition=partition, timestamp_ms=time + n)
    producer.close()
