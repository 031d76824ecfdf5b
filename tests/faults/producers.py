"""Background producers: Kafka's VerifiableProducer, and transactions that commit or abort."""

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
from tests.faults.arena import Arena, read_json_lines
from tests.resources.kafka.tools import wait_until

_numbers = itertools.count(1)
_LINGER_MS = 250
"""One request per record would cost three brokers more CPU than all runs together."""
_START_SECONDS = 60
_END_SECONDS = 150
"""VerifiableProducer gives up a record after two minutes, and reports unsent ones within that time."""


@contextmanager
def run_verifiable_producer(arena: Arena, topic: str, notes: Path, rate: int = 200) -> Iterator[None]:
    """Run Kafka's producer (idempotent, acks=all) at `rate` records a second. Each record's outcome goes to `notes`.

    The block begins after the first acknowledgement: on a busy machine a JVM starts slower than a run ends.
    """
    java, number, output = Java.of_local_kafka(), next(_numbers), notes.with_suffix(".said")
    config = notes.with_suffix(".properties")
    config.write_text(f"linger.ms={_LINGER_MS}\n")
    command = [java.java, "-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{java.jars}/*"]
    command += ["org.apache.kafka.tools.VerifiableProducer", "--bootstrap-server", arena.kafka.bootstrap]
    command += ["--topic", topic, "--throughput", str(rate), "--value-prefix", str(number)]
    command += ["--command-config", str(config)]
    with output.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: b"producer_send_success" in output.read_bytes(), _START_SECONDS)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        write_lines(notes, _convert_notes(str(number), topic, read_json_lines(output)))


def _convert_notes(producer: str, topic: str, lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line["name"] not in ("producer_send_success", "producer_send_error"):
            continue
        acknowledged = line["name"] == "producer_send_success"
        yield {
            "producer": producer,
            "sequence": int(line["value"].partition(".")[2]),
            "topic": topic,
            "partition": line["partition"] if acknowledged else -1,
            "offset": line["offset"] if acknowledged else None,
            "outcome": "acknowledged" if acknowledged else "unknown",
            "transaction": None,
        }


@contextmanager
def run_transactions(
    arena: Arena,
    topic: str,
    partitions: int,
    notes: Path,
    seed: int,
    fields: Sequence[dict[str, Any]] = (),
    pause: float = 1.0,
) -> Iterator[None]:
    """Run transactions over the partitions, a third of them aborted. After an error a new producer takes over.

    `pause`: the longest time between transactions in seconds. `fields` are added to the values.
    """
    ended = threading.Event()
    arguments = (arena, topic, partitions, notes, seed, fields, pause, ended)
    thread = threading.Thread(target=_send_transactions, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _send_transactions(
    arena: Arena,
    topic: str,
    partitions: int,
    notes: Path,
    seed: int,
    fields: Sequence[dict[str, Any]],
    pause: float,
    ended: threading.Event,
) -> None:
    brokers, options = arena.kafka.bootstrap, {"transaction_timeout_ms": 10_000, **arena.kafka.client()}
    draw = random.Random(seed)
    while not ended.is_set():
        producer = None
        with suppress(KafkaError, TimeoutError, OSError):
            name = f"t{next(_numbers)}"
            producer = Noting(notes, name, brokers, f"writes-{topic}", **options)
            while not ended.is_set():
                with producer.run_transaction(commits=draw.random() > 1 / 3):
                    for partition in draw.sample(range(partitions), draw.randint(1, partitions)):
                        producer.send(topic, partition, draw.randint(1, 8), fields)
                ended.wait(draw.random() * pause)
        if producer is not None:
            with suppress(KafkaError, TimeoutError, OSError):
                producer.close()
        ended.wait(0.5)
