"""What starting costs: a whole run in a new process, stage by stage, or next to peers; a small catch-up on a warm
session; planning.

Each is the product's own path on a real Kafka of this machine. The catch-up is compared with an empty Spark job of as
many tasks: Spark's own scheduling. Of planning, the time in calls to Kafka is reported separately.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import NewTopic
from rich.console import RenderableType

from bench import machine, timeline
from bench.check import check_landed
from bench.load import Loaded, ensure
from bench.measure import metering
from bench.peers import Peer, connector_jars, running
from bench.stand import PeerTask
from bench.workloads import TYPED_ORDERS
from sluice.cli.terminal.output import facts, heading, table
from sluice.pipelines.batch.land import land
from sluice.pipelines.batch.preview import preview
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import EngineKind
from sluice.pipelines.ports import Ports
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.liveness import new_owner
from sluice.resources.local import events
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.open_ports import open_ports
from sluice.resources.spark.engine import context

Note = Callable[[str], None]

RECORDS = 20_000
PARTITIONS = 1000
"""Of the topic that is planned."""
KINDS = {
    "Sluice on Spark, through Dagster": (),
    "Sluice on Spark, without Dagster": ("--no-dagster",),
    "Sluice in processes, through Dagster": ("--engine", "processes"),
    "Sluice in processes, without Dagster": ("--engine", "processes", "--no-dagster"),
}
"""Options of `sluice run` in a new process, by title."""
_CATCH_UP = Request(RequestKind.CATCH_UP)
_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Cold:
    """A `sluice run` in a new process: seconds from its start to its end, CPU of all its processes, and the stages;
    "exit" is the time after the last of them. A peer has no stages."""

    seconds: float
    cpu: float | None
    stages: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Warm:
    """A catch-up of `RECORDS` on a session that stood: seconds, and those of a Spark job of as many empty tasks."""

    seconds: float
    bare: float


@dataclass(frozen=True, slots=True)
class PlanTiming:
    """A plan over `PARTITIONS`: seconds in calls to Kafka, and the others; CPU of this process."""

    kafka: float
    ours: float
    cpu: float


@dataclass(frozen=True, slots=True)
class StartReport:
    """`first` is the first run of a project, `cold` are later ones, by title: `KINDS`, and other tools. `warm` are
    catch-ups on each engine."""

    first: Cold
    cold: Mapping[str, tuple[Cold, ...]]
    warm: Mapping[EngineKind, tuple[Warm, ...]] = field(default_factory=dict)
    planned: tuple[PlanTiming, ...] = ()

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def medians(self) -> dict[str, tuple[float, float]]:
        """Seconds and CPU seconds of a run in a new process, by title."""
        return {
            title: (round(_median(c.seconds for c in of), 2), round(_median(c.cpu or 0.0 for c in of), 2))
            for title, of in self.cold.items()
        }


def draw(folder: Path, note: Note) -> str:
    """Return the picture of a run's timeline, after a first run of the project. Raises SetupError, Failed."""
    with LocalKafka(folder / "kafka-1") as kafka, removing(folder / f"start-{secrets.token_hex(4)}") as scratch:
        window = _project(scratch, kafka.bootstrap, 2)
        _cold(scratch, 0, window, note)
        note("a run in a new process, watched")
        run = timeline.watch(_build_command(1, window), scratch, environment())
    return f"{timeline.draw(run)}\n"


def run(repeat: int, folder: Path, note: Note, peers: Sequence[Peer] = ()) -> StartReport:
    """Measure each of them `repeat` times, in `folder`; with `peers`, only whole runs and theirs.

    Raises SetupError, Failed, and ProofFailed (a peer landed something else than was sent).
    """
    with LocalKafka(folder / "kafka-1") as kafka, removing(folder / f"start-{secrets.token_hex(4)}") as scratch:
        loaded = ensure(TYPED_ORDERS.of(RECORDS), kafka.bootstrap, folder / "topics", note)
        window = _project(scratch, kafka.bootstrap, len(KINDS) * repeat + 1)
        adopting_orphans()
        first, numbers, runs = _cold(scratch, 0, window, note), count(1), dict[str, list[Cold]]()
        for _ in range(repeat):  # in turn: the machine's speed drifts
            for title, options in KINDS.items():
                runs.setdefault(title, []).append(_cold(scratch, next(numbers), window, note, *options))
        cold = {title: tuple(of) for title, of in runs.items()}
        if peers:
            others = {p.title: _measure_peer(p, kafka.bootstrap, loaded, folder, repeat, note) for p in peers}
            return StartReport(first, cold | others)
        warm = {
            engine: tuple(_warm(scratch, kafka.bootstrap, loaded.topic, repeat, note, engine)) for engine in EngineKind
        }
        return StartReport(first, cold, warm, tuple(_time_plans(scratch, kafka.bootstrap, repeat, note)))


@contextmanager
def removing(folder: Path) -> Iterator[Path]:
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _feed_text(bootstrap: str, topic: str, lake: Path | str) -> dict[str, Any]:
    return {
        "kafka": {"bootstrap": bootstrap},
        "topics": topic,
        "start": "earliest",
        "commit": "transactional",
        "lake": str(lake),
        "format": "json",
        "schema": dict(TYPED_ORDERS.schema),
    }


# -- cold


def _project(folder: Path, bootstrap: str, feeds: int) -> str:
    """Create a project with a feed and a lake for each run; all have one window of `RECORDS` pending."""
    (folder / "feeds").mkdir(parents=True)
    topic, now = f"start-{secrets.token_hex(4)}", time.time_ns() // 1_000_000
    for number in range(feeds):
        settings = _feed_text(bootstrap, topic, f"lake-{number}") | {"group": f"{topic}-{number}"}
        (folder / "feeds" / f"cold{number}.yaml").write_text(json.dumps(settings))
    kafka = _make_feed(folder, settings).kafka
    events.create(kafka, (topic,), 4)
    mix = events.Mix(1)
    events.send(
        kafka, events.orders(mix, 3 * RECORDS, now - 3 * HOUR, now), mix, events.SendOptions((topic,)), lambda n: None
    )
    return show_window(now - now % HOUR - 2 * HOUR)


def _cold(folder: Path, number: int, window: str, note: Note, *options: str) -> Cold:
    note(f"a run in a new process ({'the first of a project' if number == 0 else number})")
    command = _build_command(number, window, *options)
    with metering(os.getpid()) as meter:
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(), check=False)
        seconds = time.perf_counter() - began
        reap()
    if done.returncode:
        raise Failed(f"sluice run ended with {done.returncode}: {done.stderr[-500:]}")
    stages = json.loads(done.stdout)["feeds"][0]["runs"][0]["seconds"]
    return Cold(seconds, meter.cost.cpu, stages | {"exit": round(seconds - sum(stages.values()), 3)})


def _build_command(number: int, window: str, *options: str) -> list[str]:
    sluice = Path(sys.executable).with_name("sluice")
    return [str(sluice), "run", f"cold{number}", "--window", window, "--json", *options]


def _measure_peer(
    peer: Peer, bootstrap: str, loaded: Loaded, folder: Path, repeat: int, note: Note
) -> tuple[Cold, ...]:
    """Landings of the topic by new processes of the peer, after one that does not count: it may fetch and build."""
    schema = dict(TYPED_ORDERS.schema)
    task = PeerTask(bootstrap, loaded.topic, loaded.ends, machine.cores(), connector_jars(peer), schema)
    cold = []
    for number in range(repeat + 1):
        note(f"{peer.title} in a new process ({number})")
        with removing(folder / "out" / peer.name) as out:
            cold.append(_land_cold(peer, task, folder, out))
            check_landed(peer.title, out, loaded.topic, loaded.digests, TYPED_ORDERS.schema, peer.layout)
    return tuple(cold[1:])


def _land_cold(peer: Peer, task: PeerTask, folder: Path, out: Path) -> Cold:
    with metering(os.getpid()) as total, running(peer, task, folder) as ready, metering(ready.pid) as program:
        ready.land(out)
    cost = (program if peer.program else total).cost
    return Cold(cost.seconds, cost.cpu, {})


def environment() -> dict[str, str]:
    """Ours, but modules are compiled once a machine and not in each process."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def adopting_orphans() -> None:
    """Adopt the processes that a run leaves behind, such as Spark's JVM, so that their CPU time is counted."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


# -- warm


def _warm(folder: Path, bootstrap: str, topic: str, repeat: int, note: Note, engine: EngineKind) -> Iterator[Warm]:
    note(f"catch-ups of {RECORDS:,} records, warm: {engine}")
    for number in range(-2, repeat):
        lake = folder / f"warm-{engine}-{number}"
        feed = _make_feed(folder, _feed_text(bootstrap, topic, lake) | {"commit": "none", "engine": engine})
        with open_ports(feed) as ports:
            began = time.perf_counter()
            landed = land(feed, ports, _CATCH_UP, new_owner("bench"), lambda progress: None)
            seconds = time.perf_counter() - began
        landed.check()
        if number >= 0:
            yield Warm(seconds, _bare(feed, _tasks(landed)) if engine is EngineKind.SPARK else 0.0)
    if engine is EngineKind.SPARK:
        context(feed.spark).stop()


def _tasks(landed: Landed) -> int:
    return sum(len(b.plan.tasks) for b in landed.batches)


def _bare(feed: Feed, tasks: int) -> float:
    began = time.perf_counter()
    context(feed.spark).parallelize(range(tasks), tasks).mapPartitions(lambda rows: rows).collect()
    return time.perf_counter() - began


def _make_feed(folder: Path, settings: Mapping[str, Any]) -> Feed:
    return Feed.model_validate({"feed": "bench", **settings}, context={"root": folder})


# -- planning


def _time_plans(folder: Path, bootstrap: str, repeat: int, note: Note) -> Iterator[PlanTiming]:
    note(f"planning {PARTITIONS:,} partitions")
    topic = f"start-{secrets.token_hex(4)}"
    with KafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=120_000) as admin:
        admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
        try:
            feed = _make_feed(folder, _feed_text(bootstrap, topic, folder / "planned"))
            for _ in range(repeat):
                with open_ports(feed) as ports:
                    yield _plan(feed, ports)
        finally:
            admin.delete_topics([topic])


def _plan(feed: Feed, ports: Ports) -> PlanTiming:
    cluster, group = Timed(ports.cluster), Timed(ports.group)
    began, cpu = time.perf_counter(), time.process_time()
    preview(feed, replace(ports, cluster=cluster, group=group), _CATCH_UP)
    seconds, kafka = time.perf_counter() - began, cluster.seconds + group.seconds
    return PlanTiming(kafka, seconds - kafka, time.process_time() - cpu)


@dataclass
class Timed:
    """A port, and how long calls to it took."""

    port: Any
    seconds: float = field(default=0.0)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.port, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


# -- for people


def start_view(report: StartReport) -> Iterator[RenderableType]:
    """Medians, for the terminal."""
    runs = {**report.cold, "a project's first": (report.first,)}
    yield heading("start", f"{RECORDS:,} typed records landed by a new process: medians")
    if not report.warm:
        rows = [(title, f"{seconds:.2f}", f"{cpu:.2f}") for title, (seconds, cpu) in report.medians.items()]
        yield table(("", "seconds", "CPU, all processes"), rows, right="seconds CPU")
        return
    names = dict.fromkeys(name for of in runs.values() for c in of for name in c.stages)
    stages = [
        (
            title,
            f"{_median(c.seconds for c in of):.2f}",
            f"{_median(c.cpu or 0.0 for c in of):.2f}",
            *(f"{_median(c.stages.get(name, 0.0) for c in of):.2f}" for name in names),
        )
        for title, of in runs.items()
    ]
    yield table(("", "seconds", "CPU", *names), stages, right=" ".join(("seconds", "CPU", *names)))
    yield heading(f"a catch-up of {RECORDS:,} records, warm")
    spark, bare = (_median(getattr(w, name) for w in report.warm[EngineKind.SPARK]) for name in ("seconds", "bare"))
    processes = _median(w.seconds for w in report.warm[EngineKind.PROCESSES])
    yield facts(("on Spark", f"{spark:.2f} s"), ("an empty job of Spark", f"{bare:.2f} s"))
    yield facts(("in processes", f"{processes:.2f} s"))
    yield heading(f"a plan over {PARTITIONS:,} partitions")
    kafka, ours, cpu_ = (_median(getattr(p, name) for p in report.planned) for name in ("kafka", "ours", "cpu"))
    yield facts(("in Kafka", f"{kafka:.2f} s"), ("besides", f"{ours:.2f} s"), ("CPU", f"{cpu_:.2f} s"))


def _median(values: Iterable[float]) -> float:
    """0 of none."""
    numbers = list(values)
    return statistics.median(numbers) if numbers else 0.0
