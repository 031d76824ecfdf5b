"""Who writes to a topic all the time: Kafka's own VerifiableProducer, and transactions that commit or abort."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kafka.errors import KafkaError

from tests.checker.facts import write_lines
from tests.checker.producers import Noting
from tests.checker.tools import Java
from tests.faults.arena import Arena, words
from tests.resources.kafka.tools import until

_numbers = itertools.count(1)
_LINGER_MS = 250
"""A request for each record costs three brokers more CPU than all runs together."""
_START_SECONDS = 60
_END_SECONDS = 150
"""VerifiableProducer gives up a record after two minutes; what it never sent it says within them."""


@contextmanager
def verifiable(arena: Arena, topic: str, notes: Path, rate: int = 200) -> Iterator[None]:
    """Kafka's producer (idempotent, acks=all), so many records a second; what became of each goes to `notes`.

    The block begins once a record was acknowledged: a JVM on a busy machine takes longer to start than a run to end.
    """
    java, number, said = Java.of_local_kafka(), next(_numbers), notes.with_suffix(".said")
    config = notes.with_suffix(".properties")
    config.write_text(f"linger.ms={_LINGER_MS}\n")
    command = [java.java, "-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{java.jars}/*"]
    command += ["org.apache.kafka.tools.VerifiableProducer", "--bootstrap-server", arena.kafka.bootstrap]
    command += ["--topic", topic, "--throughput", str(rate), "--value-prefix", str(number)]
    command += ["--command-config", str(config)]
    with said.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.DEVNULL)
    try:
        until(lambda: b"producer_send_success" in said.read_bytes(), _START_SECONDS)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        write_lines(notes, _notes(str(number), topic, words(said)))


def _notes(producer: str, topic: str, said: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in said:
        if line["name"] not in ("producer_send_success", "producer_send_error"):
            continue
        known = line["name"] == "producer_send_success"
        yield {
            "producer": producer,
            "sequence": int(line["value"].partition(".")[2]),
            "topic": topic,
            "partition": line["partition"] if known else -1,
            "offset": line["offset"] if known else None,
            "outcome": "acknowledged" if known else "unknown",
            "transaction": None,
        }


@contextmanager
def transactions(
    arena: Arena,
    topic: str,
    partitions: int,
    notes: Path,
    seed: int,
    fields: Sequence[dict[str, Any]] = (),
    pause: float = 1.0,
) -> Iterator[None]:
    """Transactions over the partitions, one of three aborted. Where there is trouble, a new producer goes on.

    `pause`: seconds between two of them, at most. `fields` are added to the values.
    """
    ended = threading.Event()
    given = (arena, topic, partitions, notes, seed, fields, pause, ended)
    thread = threading.Thread(target=_transact, args=given, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _transact(
    arena: Arena,
    topic: str,
    partitions: int,
    notes: Path,
    seed: int,
    fields: Sequence[dict[str, Any]],
    pause: float,
    ended: threading.Event,
) -> None:
    brokers, given = arena.kafka.bootstrap, {"transaction_timeout_ms": 10_000, **arena.kafka.client()}
    draw = random.Random(seed)
    while not ended.is_set():
        producer = None
        with suppress(KafkaError, TimeoutError, OSError):
            name = f"t{next(_numbers)}"
            producer = Noting(notes, name, brokers, f"writes-{topic}", **given)
            while not ended.is_set():
                with producer.transaction(commits=draw.random() > 1 / 3):
                    for partition in draw.sample(range(partitions), draw.randint(1, partitions)):
                        producer.send(topic, partition, draw.randint(1, 8), fields)
                ended.wait(draw.random() * pause)
        if producer is not None:
            with suppress(KafkaError, TimeoutError, OSError):
                producer.close()
        ended.wait(0.5)
