"""Speed of producers: ours compared with Kafka's own, confluent-kafka's in Python and kafka-python's.

All send the same payloads of about 190 bytes in one run, in turn: idempotent, acks=all, lz4, to a new topic of four
partitions each time. A peer is a process of its own, from its start to its last acknowledgement. What starting costs
is taken off by a second run with few records: figures are those of a record more. There is none where this is no more
than what starts differ by. Every run's topic is counted.
Then a whole `sluice republish` by tasks of Spark is measured (`whole_republish`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from rich.console import RenderableType

from bench import machine, whole_republish
from bench.measure import metering
from bench.packages import make_python_path, packages
from bench.peers import CONFLUENT_KAFKA, KAFKA_PYTHON
from sluice.cli.terminal.output import facts, heading, table
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.errors import Failed, ProofFailed
from sluice.pipelines.records.kafka_batches.encode.accumulator import BATCH_BYTES
from sluice.resources.local import events, java
from sluice.resources.local.local_kafka import ARTIFACTS, VERSION, LocalKafka
from sluice.resources.spark.daemon import WORKERS_ENVIRONMENT

Note = Callable[[str], None]

RECORDS = 3_000_000
FEW = 100_000
PARTITIONS = 4
PAYLOADS = 10_000
LINGER_MS = 50
"""Of the peers, whose batches are as large as ours. With 128 KiB and 5 ms they take more CPU."""
NOISE = 0.25
"""Minimum difference between two starts, as a share of the cost of a start."""


@dataclass(frozen=True, slots=True)
class SendingPeer:
    """A program that sends. A slow one sends only that `share` of the records. `environment` is added to ours."""

    name: str
    title: str
    command: Callable[[_Stand, str, int], list[str]]
    share: float = 1.0
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sends:
    """One process: seconds, CPU seconds, and the most memory that it had (bytes)."""

    records: int
    seconds: float
    cpu: float
    peak: int


@dataclass(frozen=True, slots=True)
class PeerSends:
    """The figures of one peer, with many records and with few."""

    name: str
    title: str
    many: tuple[Sends, ...]
    few: tuple[Sends, ...]

    @property
    def cpu(self) -> float | None:
        """Microseconds of CPU for a record more; None: these runs cannot tell."""
        more = self._more(lambda s: s.cpu)
        return None if more is None else 1e6 * more

    @property
    def rate(self) -> float | None:
        """Records a second; None: these runs cannot tell."""
        more = self._more(lambda s: s.seconds)
        return None if more is None else 1 / more

    @property
    def peak(self) -> int:
        return max(s.peak for s in self.many)

    def _more(self, of: Callable[[Sends], float]) -> float | None:
        """Cost of one more record; None if it is lost in the noise."""
        many, few = list(map(of, self.many)), list(map(of, self.few))
        more, start = median(many) - median(few), median(few)
        if more <= max(max(many) - min(many), max(few) - min(few), NOISE * start):
            return None
        return more / (self.many[0].records - self.few[0].records)


@dataclass(frozen=True, slots=True)
class SendReport:
    """`whole` is a republish by tasks; `machine` says on what."""

    peers: tuple[PeerSends, ...]
    whole: whole_republish.Whole
    machine: dict[str, Any]

    def document(self) -> dict[str, Any]:
        peers = [
            asdict(p)
            | {
                "cpu_us_per_record": p.cpu and round(p.cpu, 3),
                "records_per_second": p.rate and round(p.rate),
                "peak": p.peak,
            }
            for p in self.peers
        ]
        return {"peers": peers, "whole": asdict(self.whole), "machine": self.machine}


def _ours(mode: str) -> Callable[[_Stand, str, int], list[str]]:
    def command(stand: _Stand, topic: str, records: int) -> list[str]:
        return [*_python("sender_sluice"), stand.bootstrap, topic, str(stand.payloads), str(records), mode]

    return command


def _java(stand: _Stand, topic: str, records: int) -> list[str]:
    settings = _settings() | {"bootstrap.servers": stand.bootstrap}
    return [
        *(str(java.find_java()), "-Xmx512m", "-cp", f"{java.jars(f'kafka-{VERSION}', ARTIFACTS)}/*"),
        *("org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", str(records)),
        *("--throughput", "-1", "--payload-file", str(stand.payloads)),
        *("--producer-props", *(f"{name}={value}" for name, value in settings.items())),
    ]


def _confluent(stand: _Stand, topic: str, records: int) -> list[str]:
    settings = [f"{name}={value}" for name, value in _settings().items()]
    return [*_python("sender_confluent_kafka"), stand.bootstrap, topic, str(stand.payloads), str(records), *settings]


def _kafka_python(stand: _Stand, topic: str, records: int) -> list[str]:
    words = [stand.bootstrap, topic, str(stand.payloads), str(records), str(BATCH_BYTES), str(LINGER_MS)]
    return [*_python("sender_kafka_python"), *words]


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", f"bench.{module}"]


def _settings() -> dict[str, Any]:
    return {
        "acks": "all",
        "enable.idempotence": "true",
        "compression.type": "lz4",
        "batch.size": BATCH_BYTES,
        "linger.ms": LINGER_MS,
    }


PEERS = (
    # As Spark's tasks have it.
    SendingPeer("sluice", "Sluice, idempotent", _ours("idempotent"), environment=WORKERS_ENVIRONMENT),
    SendingPeer("transactional", "Sluice, in transactions", _ours("transactional"), environment=WORKERS_ENVIRONMENT),
    SendingPeer("java", "ProducerPerformance (Java)", _java),
    SendingPeer("confluent-kafka", "confluent-kafka", _confluent, 0.5, CONFLUENT_KAFKA.packages),
    SendingPeer("kafka-python", "kafka-python", _kafka_python, 0.1, KAFKA_PYTHON.packages),
)


def run(records: int, repeat: int, folder: Path, note: Note) -> SendReport:
    """Measure every peer `repeat` times, in turn. Raises SetupError, Failed (a peer ended), ProofFailed."""
    with LocalKafka(folder / "kafka-1") as kafka:
        stand = _Stand(kafka.bootstrap, folder, note)
        took: dict[str, tuple[list[Sends], list[Sends]]] = {p.name: ([], []) for p in PEERS}
        for turn in range(repeat + 1):  # the first warms up
            for peer in PEERS[turn % len(PEERS) :] + PEERS[: turn % len(PEERS)]:
                sent = max(int(records * peer.share), 2)
                results = stand.measure(peer, sent), stand.measure(peer, max(min(FEW, sent // 10), 1))
                for samples, one in zip(took[peer.name], results, strict=True):
                    samples += [one] if turn else []
        republish = whole_republish.measure(kafka.bootstrap, stand.fill, folder, note)
    peers = tuple(PeerSends(p.name, p.title, *map(tuple, took[p.name])) for p in PEERS)
    return SendReport(peers, republish, machine.machine())


class _Stand:
    """Shared state of the peers of one run."""

    def __init__(self, bootstrap: str, folder: Path, note: Note) -> None:
        self.bootstrap, self._folder, self._note = bootstrap, folder, note

    @cached_property
    def payloads(self) -> Path:
        """A file of payloads, one a line, which each peer picks from."""
        path = self._folder / f"payloads-{PAYLOADS}.txt"
        values = (e.value or b"" for e in events.orders(events.Mix(1), PAYLOADS, 0, 3_600_000))
        path.write_bytes(b"\n".join(values) + b"\n")
        return path

    def fill(self, topic: str, records: int) -> None:
        """Send this number of records to an existing topic. Raises Failed."""
        _measured(PEERS[0], PEERS[0].command(self, topic, records), {**os.environ, **make_python_path()}, records)

    def measure(self, peer: SendingPeer, records: int) -> Sends:
        topic = f"bench-send-{secrets.token_hex(4)}"
        command = peer.command(self, topic, records)
        needs = [packages(peer.needs, self._folder)] if peer.needs else []
        environment = {**os.environ, **peer.environment, **make_python_path(*needs)}
        with KafkaAdminClient(bootstrap_servers=self.bootstrap) as admin:
            admin.create_topics({topic: {"num_partitions": PARTITIONS}}, wait_for_metadata=True)
            try:
                sent, output = _measured(peer, command, environment, records)
                self._check(peer, topic, records, output)
            finally:
                admin.delete_topics([topic])
        rate = f"{records / sent.seconds:,.0f} records/s"
        self._note(f"{peer.title}: {records:,} records in {sent.seconds:.2f} s with its start, {rate}")
        return sent

    def _check(self, peer: SendingPeer, topic: str, records: int, output: str) -> None:
        """Check the number of records in the topic, and the markers of its transactions."""
        transactions = json.loads(output)["transactions"] if output.startswith("{") else 0
        with KafkaConsumer(bootstrap_servers=self.bootstrap, allow_auto_create_topics=False) as consumer:
            ends = consumer.end_offsets([TopicPartition(topic, p) for p in range(PARTITIONS)])
        markers, written = transactions * PARTITIONS, sum(ends.values())
        if not records <= written <= records + markers:
            raise ProofFailed(f"{peer.title} sent {records:,} records, and {written:,} offsets are in its topic")


def _measured(
    peer: SendingPeer, command: Sequence[str], environment: dict[str, str], records: int
) -> tuple[Sends, str]:
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    with metering(process.pid) as meter:  # its own peak: that of its usage is ours, from before it was another program
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Failed(f"{peer.title} ended with {process.returncode}; its output:\n{output[-2000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return Sends(records, seconds, cpu, max(meter.cost.peaks.values(), default=0)), output


# -- for people


def send_view(report: SendReport) -> Iterator[RenderableType]:
    """Medians, for the terminal."""
    about = f"records of about 190 B, lz4, {PARTITIONS} partitions, acks=all, idempotent"
    yield heading("republish", about)
    ours = report.peers[0]
    rows = [
        (
            p.title,
            _figure(p.cpu, "{:.2f}"),
            _figure(p.rate, "{:,.0f}"),
            _times(p.cpu, ours.cpu),
            _times(ours.rate, p.rate),
            size(p.peak),
        )
        for p in report.peers
    ]
    yield table(
        ("", "CPU µs a record", "records/s", "CPU, times ours", "ours, times its rate", "memory"),
        rows,
        right="CPU records ours memory",
        optional="memory",
    )
    runs, untold = ours.many, [p.title for p in report.peers if p.cpu is None or p.rate is None]
    notes = [
        ("records", f"{count(runs[0].records)}, {len(runs)} times; confluent-kafka half, kafka-python a tenth of them"),
        ("on", f"{report.machine['cpu']}, {report.machine['cores']} cores"),
    ]
    if untold:
        notes.append(("–", f"lost in what starts differ by: {', '.join(untold)}; ask for more --records"))
    yield facts(*notes)
    w = report.whole
    yield heading("sluice republish", f"{count(w.records)} records of {w.partitions} partitions by Spark here")
    yield facts(
        ("took", f"{w.seconds:.1f} s with its start"),
        ("memory", f"of a task {size(w.task_memory)}, in {w.lanes} lanes; " + ", ".join(_sizes(w.peaks))),
    )


def _sizes(peaks: Mapping[str, int]) -> Iterator[str]:
    kinds = {"driver": "the command", "jvm": "Spark's JVM"}
    return (f"{kinds[kind]} {size(peak)}" for kind, peak in sorted(peaks.items()) if kind in kinds)


def _figure(of: float | None, text: str) -> str:
    return "–" if of is None else text.format(of)


def _times(of: float | None, other: float | None) -> str:
    return "–" if of is None or other is None else f"{of / other:.1f}"
