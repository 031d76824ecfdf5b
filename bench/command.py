"""One call of the benchmark, from the request to the report; `cli` is its command line.

Everything it needs is set up by itself and kept for the next time in the user's cache: a Kafka of its own, loaded
topics, jars and packages of the peers.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench import age, cluster, fleet, lake, machine, peers, race, scale, send, start, suite, table, waits
from bench.results import BenchReport, Provenance, RaceResult
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util import extras

Note = Callable[[str], None]
Keep = Callable[[BenchReport], None]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The requested benchmarks by name (none: the main ones), their repetitions, and other options."""

    names: tuple[str, ...] = ()
    records: int | None = None
    repeat: int = 5
    warm_ups: int = 2
    cores: int | None = None
    peers: tuple[str, ...] = ()
    folder: Path | None = None
    feeds: int | None = None
    months: tuple[int, ...] = ()


def run(request: BenchRequest, arguments: Sequence[str], note: Note, keep: Keep) -> BenchReport:
    """Measure and report. `arguments` are the command's, for the report; `note` hears how far it is, and `keep` gets
    each benchmark as soon as it is done: what fails later takes nothing of it away.

    Raises UsageError for unknown names or another benchmark under way, SetupError, Failed, ProofFailed.
    """
    chosen = tuple(peers.find_peer(name) for name in request.peers)
    races = [r for r in suite.races(request.names, request.records) if not chosen or {*chosen} & {*r.peers, *r.also}]
    if not races:
        raise UsageError(
            f"{', '.join(request.peers)} takes no part in these", remedy="name raw, typed or dlt, or no peer"
        )
    terms = race.Terms(request.cores or machine.cores(), request.repeat, request.warm_ups, chosen)
    provenance = describe(arguments)
    done: list[RaceResult] = []
    with _alone(request.folder or default_folder()) as folder:
        for r in races:
            done.append(replace(race.run(r, terms, folder, note), run=provenance))
            keep(BenchReport((done[-1],)))
    return BenchReport(tuple(done))


def describe(arguments: Sequence[str]) -> Provenance:
    """Returns the call with these arguments on this machine, now."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Provenance(shlex.join(["python", "-m", "bench", *arguments]), when, machine.machine(), machine.versions())


def run_lake(request: BenchRequest, note: Note) -> lake.LakeReport:
    """Compare the lake on S3 with a local one. Raises as `run`."""
    with _alone(request.folder or default_folder()) as folder:
        return lake.run(request.records or lake.RECORDS, folder, note)


def run_cluster(request: BenchRequest, note: Note) -> cluster.ClusterReport:
    """Compare a standalone Spark with a local one. Raises as `run`."""
    with _alone(request.folder or default_folder()) as folder:
        return cluster.run(request.records or cluster.RECORDS, request.repeat, folder, note)


def run_start(request: BenchRequest, note: Note) -> start.StartReport:
    """Measure the cost of a start, next to peers of `typed`. Raises as `run`, and ProofFailed."""
    typed = suite.SUITE["typed"]
    chosen = [peers.find_peer(name) for name in request.peers]
    if others := [peer.name for peer in chosen if peer not in (*typed.peers[1:], *typed.also)]:
        raise UsageError(f"{', '.join(others)} takes no part in start", remedy="name other peers of typed")
    able = peers.select_available(chosen, note) if chosen else []
    with _alone(request.folder or default_folder()) as folder:
        return start.run(request.repeat, folder, note, able)


def draw_start(request: BenchRequest, note: Note) -> str:
    """The timeline of a cold run, as a picture. Raises as `run`."""
    with _alone(request.folder or default_folder()) as folder:
        return start.draw(folder, note)


def run_fleet(request: BenchRequest, note: Note) -> fleet.FleetReport:
    """Many small feeds, each by itself and in one run. Raises as `run`, and ProofFailed."""
    with _alone(request.folder or default_folder()) as folder:
        return fleet.run(request.feeds or fleet.FEEDS, folder, note)


def run_scale(request: BenchRequest, note: Note) -> scale.ScaleReport:
    """Measure the cost of a feed's size for its driver. Raises UsageError for another benchmark under way."""
    with _alone(request.folder or default_folder()):
        return scale.run(note)


def run_age(request: BenchRequest, note: Note) -> age.AgeReport:
    """Measure the cost of an hour for an old feed. Raises UsageError for another benchmark under way."""
    with _alone(request.folder or default_folder()) as folder:
        return age.run(folder, note, request.months or age.MONTHS)


def run_waits(request: BenchRequest, note: Note) -> waits.WaitReport:
    """Measure commands and reads next to plain scripts. Raises as `run`, and ProofFailed."""
    with _alone(request.folder or default_folder()) as folder:
        return waits.run(folder, note, request.repeat)


def run_send(request: BenchRequest, note: Note) -> send.SendReport:
    """Compare our producer with others. Raises as `run`."""
    with _alone(request.folder or default_folder()) as folder:
        return send.run(request.records or send.RECORDS, request.repeat, folder, note)


def run_table(request: BenchRequest, note: Note) -> table.TableReport:
    """Measure the cost of a batch for an old table. Raises UsageError for another benchmark under way, and
    SetupError."""
    extras.require("pyiceberg")
    extras.require("deltalake")
    with _alone(request.folder or default_folder()) as folder:
        return table.run(folder, note, rows=request.records)


def default_folder() -> Path:
    """Where the benchmark keeps its things: the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / "bench"


@contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """Two benchmarks at once would measure each other."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "running.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError("another benchmark is under way", remedy="wait until it has ended") from None
        yield folder.absolute()
