"""What happens to logs while they are read: retention, compaction, truncation, other topics, transactions that hang."""

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
from tests.faults.field import REPOSITORY, SLUICE, Field, Running
from tests.resources.kafka.proxy import FETCH
from tests.resources.kafka.tools import until

MADE_TO_LOSE = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
"""Of a topic whose follower may lead although it has not everything."""
_TRANSACTIONS = "org.apache.kafka.tools.TransactionsCommand"
_numbers = itertools.count(1)


def written(field: Field, counts: Mapping[int, int]) -> None:
    """So many values to each partition, noted; all acknowledged."""
    producer = Noting(field.root / "by-hand.jsonl", f"h{next(_numbers)}", field.arena.kafka.bootstrap)
    if field.root / "by-hand.jsonl" not in field.notes:
        field.notes.append(field.root / "by-hand.jsonl")
    for partition, count in counts.items():
        producer.send(field.topic, partition, count)
    producer.close()


def commanded(field: Field, *words: str) -> tuple[int, dict[str, Any]]:
    """`sluice …` as a user calls it: its exit code and document."""
    field.feed()
    command = [*SLUICE, *words, "--project", str(field.root), "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    field.account.did(f"sluice {' '.join(words)}: exit {done.returncode}")
    return done.returncode, said


def accepted(field: Field, event: str, *more: str) -> dict[str, Any]:
    code, said = commanded(
        field, "accept", field.name, event, "--reason", f"fault {field.account.fault}", "--yes", *more
    )
    assert code == 0, said
    return said


def configured(field: Field, **config: str) -> None:
    """Settings of the topic, as Kafka spells them but for underscores."""
    resource = ConfigResource("TOPIC", field.topic, {k.replace("_", "."): v for k, v in config.items()})
    with field.arena.admin() as admin:
        admin.alter_configs([resource], incremental=True)


def lagging(field: Field, seconds: int, draw: Random) -> None:
    """Two transactions, one of three aborted, of a producer whose records are stamped so long ago."""
    name = f"lags{next(_numbers)}"
    producer = Noting(field.noted(name), name, field.arena.kafka.bootstrap, f"{name}-{field.topic}", -1000 * seconds)
    for _ in range(2):
        with producer.transaction(commits=draw.random() > 1 / 3):
            for partition in range(field.partitions):
                producer.send(field.topic, partition, draw.randint(1, 8))
    producer.close()
    field.account.did(f"transactions lag by {seconds} s")


@contextmanager
def in_mid_read(field: Field, wanted: int = 1) -> Iterator[Running]:
    """A run that stands before its next fetch, of so many leaders at least, until the block ends; then it goes on."""
    for proxy in field.arena.proxies.values():
        proxy.hold(FETCH)
    running = field.start()
    try:
        until(lambda: sum(bool(p.held) for p in field.arena.proxies.values()) >= wanted or running.process.poll(), 120)
        assert running.process.poll() is None, running.wait()
        field.account.did("a run is about to fetch")
        yield running
    finally:
        for proxy in field.arena.proxies.values():
            proxy.heal()


def landed_up_to(field: Field) -> dict[int, int]:
    """The frontiers, as `sluice status` tells them."""
    return {p["partition"]: p["frontier"] for p in commanded(field, "status", field.name)[1]["feeds"][0]["partitions"]}


# -- what is deleted


def log_starts(field: Field) -> dict[int, int]:
    with field.arena.admin() as admin:
        return {tp.partition: start for tp, start in _offsets(admin, field, "EARLIEST").items()}


def log_ends(field: Field) -> dict[int, int]:
    with field.arena.admin() as admin:
        return {tp.partition: end for tp, end in _offsets(admin, field, "LATEST").items()}


def _offsets(admin: Any, field: Field, which: str) -> dict[Plain, int]:
    from kafka.admin import OffsetSpec

    asked = {Plain(field.topic, p): getattr(OffsetSpec, which) for p in field.arena.leaders(field.topic)}
    return {tp: found.offset for tp, found in admin.list_partition_offsets(asked).items()}


@contextmanager
def retention(field: Field, **config: str) -> Iterator[None]:
    """Kafka deletes what is older or more than that, until the block ends."""
    configured(field, segment_ms="500", **config)
    field.account.did(f"the topic keeps {config}")
    yield
    configured(field, retention_ms="-1", retention_bytes="-1", segment_ms="604800000")
    field.account.did(f"the topic keeps everything again; its logs start at {log_starts(field)}")


@contextmanager
def compaction(field: Field) -> Iterator[None]:
    """Kafka compacts the topic all the time, until the block ends."""
    configured(
        field,
        cleanup_policy="compact",
        segment_ms="500",
        min_cleanable_dirty_ratio="0.001",
        max_compaction_lag_ms="500",
        delete_retention_ms="0",
    )
    field.account.did("the topic is compacted")
    yield
    configured(field, cleanup_policy="delete", segment_ms="604800000")
    field.account.did("the topic is not compacted any more")


def flipped(field: Field, partition: int, offset: int) -> tuple[int, int]:
    """A bit of the batch that holds the offset turns over on every broker's disk; the batch's first and next offset."""
    found = None
    for segment in sorted(field.arena.kafka.status().root.glob(f"node-*/data/{field.topic}-{partition}/*.log")):
        with segment.open("r+b") as log:
            data, at = log.read(), 0
            while at + 61 <= len(data):
                base, size, last = *struct.unpack_from(">qi", data, at), struct.unpack_from(">i", data, at + 23)[0]
                if base <= offset <= base + last:
                    spot = at + 12 + size - 2  # in a value: Kafka's tools stop at a count of headers that is wrong
                    log.seek(spot)
                    log.write(bytes([data[spot] ^ 1]))
                    found = base, base + last + 1
                at += 12 + size
    assert found, f"no segment holds offset {offset}"
    field.account.did(f"a bit of the batch {found} of partition {partition} was turned over")
    return found


# -- truncation


def truncated(field: Field, partition: int, meanwhile: Callable[[], None], then: Callable[[], None]) -> tuple[int, int]:
    """The leader of a partition with two replicas dies while its follower is away, which then comes back and leads.

    What is written `meanwhile` is lost by that. `then` is called once the follower leads. The offsets where the log
    ended before and after.
    """
    kafka = field.arena.kafka
    leader, follower = _replicas(field, partition)
    kafka.kill_broker(follower)
    until(lambda: _in_sync(field, partition) == [leader], 60)
    field.account.did(f"broker {follower}, which follows, was killed")
    meanwhile()
    before = log_ends(field)[partition]
    kafka.kill_broker(leader)
    kafka.start_broker(follower)
    until(lambda: field.arena.leaders(field.topic)[partition] == follower, 60)
    after = log_ends(field)[partition]
    field.account.did(f"broker {leader} was killed; {follower} leads partition {partition}, up to {after} of {before}")
    then()
    field.arena.heal()
    return before, after


def _replicas(field: Field, partition: int) -> tuple[int, int]:
    """Leader and follower."""
    described = _described(field, partition)
    (follower,) = {*described["replica_nodes"]} - {described["leader_id"]}
    return described["leader_id"], follower


def _in_sync(field: Field, partition: int) -> list[int]:
    with suppress(KafkaError):  # a controller may be among those who died
        return list(_described(field, partition)["isr_nodes"])
    return []


def _described(field: Field, partition: int) -> dict[str, Any]:
    with field.arena.admin() as admin:
        (described,) = admin.describe_topics([field.topic])
    found: dict[str, Any] = next(p for p in described["partitions"] if p["partition_index"] == partition)
    return found


# -- other topics


def recreated(field: Field, partitions: int | None = None) -> None:
    """The topic is deleted, and there is another one of its name; with fewer partitions, if so."""
    field.partitions = partitions or field.partitions
    with field.arena.admin() as admin:
        admin.delete_topics([field.topic])
        until(lambda: field.topic not in admin.list_topics())
    until(lambda: _created(field))
    field.account.did("the topic was deleted and created again")


def _created(field: Field) -> bool:
    try:
        field.arena.create(field.topic, field.partitions, first=next(_numbers))
    except KafkaError:
        return False
    return True


def partitions_added(field: Field, count: int) -> None:
    with field.arena.admin() as admin:
        admin.create_partitions({field.topic: NewPartitions(count)})
    until(lambda: len(field.arena.leaders(field.topic)) == count and min(field.arena.leaders(field.topic).values()) > 0)
    field.account.did(f"the topic has {count} partitions now")


# -- transactions


@contextmanager
def left_open(field: Field, partition: int, time: int, *, unknown: bool = False) -> Iterator[tuple[str, int]]:
    """A transaction of which nobody ends anything, with ten minutes to live; its transactional id and first offset.

    Its records are stamped then (ms). `unknown`: its coordinator knows nothing of it, so that nobody ever will.
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
    field.account.did(f"transaction {name} has records in partition {partition}, and its producer is silent")
    try:
        yield name, sent[0].get(0).offset
    finally:
        producer.close(0)


@contextmanager
def unverified(field: Field) -> Iterator[None]:
    """The brokers take records of transactions that no coordinator knows of, as before Kafka 3.6 (KIP-890)."""
    name = "transaction.partition.verification.enable"
    with field.arena.admin() as admin:
        for value in ("false", "true"):
            brokers = [ConfigResource("BROKER", str(b), {name: value}) for b in field.arena.kafka.broker_ids]
            admin.alter_configs(brokers, incremental=True)
            if value == "false":
                yield


def aborted_by_the_tool(field: Field, arguments: str) -> None:
    """What Sluice says is to be run of Kafka's own tool: the words behind its name."""
    words = arguments.split()
    given = () if "--bootstrap-server" in words else ("--bootstrap-server", field.arena.kafka.bootstrap)
    done = field.arena.kafka.tool(_TRANSACTIONS, *given, *words)
    assert done.returncode == 0, done.stderr + done.stdout
    field.account.did(f"kafka-transactions {' '.join(words)}")


def stamped(field: Field, time: int, each: int) -> None:
    """So many values to each partition, stamped then (ms)."""
    producer = KafkaProducer(bootstrap_servers=field.arena.kafka.bootstrap)
    for partition in range(field.partitions):
        for n in range(each):
            producer.send(field.topic, b"%d" % n, partition=partition, timestamp_ms=time + n)
    producer.close()
