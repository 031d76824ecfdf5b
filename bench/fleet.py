"""Cost of a fleet: many small feeds, one window each, landed by a run for each feed and by one run for all.

    one by one     `sluice run FEED`, a process for each; measured for some feeds, and reckoned up for all
    in one run     `sluice run --all`
    nothing pending  the same again, with nothing pending
    status         `sluice status` of all

All of it on a real Kafka of this machine, whose requests are counted by API on the way (`counting`). CPU is that of all
processes that a command starts, Spark's included; the broker's is reported separately.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from bench import machine
from bench.counting import Counting
from bench.measure import metering
from bench.start import adopting_orphans, environment, reap, removing
from bench.workloads import TYPED_ORDERS
from sluice.cli.terminal.output import facts, heading, table
from sluice.pipelines.errors import Failed, ProofFailed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.records.kafka_batches.encode import Accumulator
from sluice.pipelines.util.units import HOUR
from sluice.resources.kafka.connection.connection_settings import KafkaAddress
from sluice.resources.kafka.produce.sender import KafkaSender
from sluice.resources.local import events
from sluice.resources.local.local_kafka import LocalKafka

Note = Callable[[str], None]

FEEDS, PARTITIONS, RECORDS = 50, 3, 300
"""How many feeds, partitions of each, and records of a partition."""
SAMPLE = 3
"""Feeds that are run one by one."""
_CREATED_AT_ONCE = 50
"""Topics of one request to create."""


@dataclass(frozen=True, slots=True)
class Took:
    """Cost of `runs` commands, each for `feeds` feeds. CPU (None: unknown) without the brokers', which is
    `broker_cpu`; `requests` to Kafka by API."""

    name: str
    runs: int
    feeds: int
    seconds: float
    cpu: float | None
    broker_cpu: float | None
    requests: Mapping[str, int]
    connections: int

    def per_feed(self, figure: float) -> float:
        return figure / (self.runs * self.feeds)

    @property
    def asked(self) -> int:
        return sum(self.requests.values())


@dataclass(frozen=True, slots=True)
class FleetReport:
    feeds: int
    partitions: int
    records: int
    took: tuple[Took, ...]
    machine: Mapping[str, Any]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(feeds: int, folder: Path, note: Note) -> FleetReport:
    """Measure them, one after the other, in `folder`. Raises SetupError, Failed, ProofFailed."""
    with removing(folder / f"fleet-{secrets.token_hex(4)}") as scratch:
        scratch.mkdir(parents=True)

        def broker() -> tuple[str, int]:
            host, port = LocalKafka.attach(scratch / "kafka").bootstrap.rsplit(":", 1)
            return host, int(port)

        with closing(Counting(broker)) as counting:
            settings = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{counting.port}"}
            with LocalKafka(scratch / "kafka", settings=settings) as kafka:
                adopting_orphans()  # the broker is none of ours
                pids = tuple(b.pid for b in kafka.status().brokers if b.pid)
                took = tuple(_measure(_Track(scratch, feeds, counting, pids, note)))
    return FleetReport(feeds, PARTITIONS, RECORDS, took, machine.machine())


@dataclass(frozen=True, slots=True)
class _Track:
    """The projects, `alone` and `fleet`, and the measurements of their commands."""

    folder: Path
    feeds: int
    counting: Counting
    brokers: tuple[int, ...]
    note: Note

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.counting.port}"

    def command(self, name: str, project: str, commands: Sequence[Sequence[str]], feeds: int) -> tuple[Took, list[Any]]:
        """Run the commands one after the other; return their cost and the documents that they printed. Raises
        Failed."""
        documents, ours, own = [], self.counting, time.process_time()
        ours.reset()
        with metering(os.getpid(), self.brokers) as meter:
            for command in commands:
                documents.append(_documents_of([*command, "--json"], self.folder / project))
            reap()
        cost, own = meter.cost, time.process_time() - own  # the counting is ours, not theirs
        cpu = None if cost.cpu is None else cost.cpu - own
        took = Took(
            name,
            len(commands),
            feeds,
            cost.seconds,
            cpu,
            cost.beside_cpu,
            dict(ours.seen.most_common()),
            ours.connections,
        )
        self.note(f"{name}: {took.seconds:.1f} s, {took.cpu or 0:.1f} s of CPU, {took.asked:,} requests to Kafka")
        return took, documents


def _measure(track: _Track) -> Iterator[Took]:
    track.note(f"{track.feeds} topics of {PARTITIONS} partitions, {RECORDS} records in each")
    topics = [f"fleet_{n:03}" for n in range(track.feeds)]
    _fill(track.bootstrap, topics)
    sample = topics[: min(SAMPLE, len(topics))]
    _project(track, "alone", sample)
    _project(track, "fleet", topics)
    # The first run of a machine compiles loops and lays out classes: it is not counted.
    _project(track, "first", topics[:1])
    _documents_of(["run", topics[0], "--json"], track.folder / "first")
    pending = PARTITIONS * RECORDS
    took, documents = track.command("one by one", "alone", [["run", t] for t in sample], 1)
    _check(documents, pending * len(sample))
    yield took
    took, (said_of_all,) = track.command("in one run", "fleet", [["run", "--all"]], track.feeds)
    _check([said_of_all], pending * track.feeds)
    yield took
    took, (said_of_all,) = track.command("nothing pending", "fleet", [["run", "--all"]], track.feeds)
    _check([said_of_all], 0)
    yield took
    yield track.command("status", "fleet", [["status"]], track.feeds)[0]


def _check(documents: Sequence[Mapping[str, Any]], records: int) -> None:
    """Raises ProofFailed if the runs of these documents landed another number of records."""
    landed = sum(b["landed"] for d in documents for feed in d["feeds"] for run in feed["runs"] for b in run["batches"])
    if landed != records:
        raise ProofFailed(f"{landed:,} records landed where {records:,} were pending", remedy="this is a bug")


def _fill(bootstrap: str, topics: Sequence[str]) -> None:
    """Orders of one hour that has passed, as many in each partition of each topic."""
    now, per_topic = time.time_ns() // 1_000_000, PARTITIONS * RECORDS
    for first in range(0, len(topics), _CREATED_AT_ONCE):
        chunk = topics[first : first + _CREATED_AT_ONCE]
        events.create(KafkaSettings(bootstrap=bootstrap), chunk, PARTITIONS)
    start = now - now % HOUR - 2 * HOUR
    with closing(KafkaSender.connect(KafkaAddress(bootstrap, {}))) as sender:
        sender.begin()
        for number, topic in enumerate(topics):
            batch = events.to_send([*events.orders(events.Mix(number), per_topic, start, start + HOUR - 1)])
            waiting, numbers = Accumulator(), np.arange(per_topic)
            sender.send(topic, chain(waiting.add(batch, numbers % PARTITIONS, numbers), waiting.flush()))
            sender.flush(topic)


def _project(track: _Track, name: str, topics: Sequence[str]) -> None:
    folder = track.folder / name / "feeds"
    folder.mkdir(parents=True)
    for topic in topics:
        settings = {
            "kafka": {"bootstrap": track.bootstrap},
            "topics": topic,
            "group": f"{name}-{topic}",
            "start": "earliest",
            "format": "json",
            "schema": dict(TYPED_ORDERS.schema),
        }
        (folder / f"{topic}.yaml").write_text(json.dumps(settings))


def _documents_of(command: Sequence[str], folder: Path) -> Any:
    sluice = str(Path(sys.executable).with_name("sluice"))
    done = subprocess.run(
        [sluice, *command], cwd=folder, capture_output=True, text=True, env=environment(), check=False
    )
    if done.returncode:
        raise Failed(f"sluice {' '.join(command)} ended with {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout)


# -- for people


def fleet_view(report: FleetReport) -> Iterator[RenderableType]:
    """For the terminal."""
    about = f"{report.feeds} feeds of {report.partitions} partitions, {report.records} records in each, one window"
    yield heading("fleet", about)
    rows = [
        (
            took.name,
            str(took.runs * took.feeds),
            f"{took.seconds:.1f}",
            _number(took.cpu),
            f"{took.per_feed(took.cpu or 0.0):.2f}",
            f"{took.asked:,}",
            f"{took.per_feed(took.asked):.1f}",
        )
        for took in report.took
    ]
    yield table(
        ("", "feeds", "seconds", "CPU s", "CPU a feed", "requests", "requests a feed"),
        rows,
        right="feeds seconds CPU requests",
        optional="requests",
    )
    alone, together, *_ = report.took
    all_feeds = alone.per_feed(alone.cpu or 0.0) * report.feeds, alone.per_feed(alone.seconds) * report.feeds
    ratio = all_feeds[0] / together.cpu if together.cpu else 0.0
    yield facts(
        (
            f"{report.feeds} one by one",
            f"{all_feeds[0]:,.0f} s of CPU, {all_feeds[1]:,.0f} s: reckoned from {alone.runs} of them",
        ),
        ("in one run", f"{ratio:.1f} times less CPU"),
        ("the broker's CPU", ", ".join(f"{t.name} {_number(t.broker_cpu)} s" for t in report.took)),
        *((f"{t.name} asked", ", ".join(f"{api} {n:,}" for api, n in t.requests.items())) for t in report.took),
        ("on", f"{report.machine['cpu']}, {report.machine['cores']} cores"),
    )


def _number(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.1f}"
