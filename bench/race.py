"""A race: several peers land one topic, in turn, again and again, and every landing is checked before it counts.

Promises: all peers read the same topic in the same Kafka on the same number of cores; they take turns, and who begins
changes with every round, so that a busy minute of the machine hits all; a landing that counts follows directly upon
one that does not, for every peer that warms up.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from bench.check import check_landed
from bench.load import Loaded, ensure
from bench.measure import metering
from bench.peers import BUDGET, SLUICE, Peer, Running, connector_jars, running, select_available
from bench.results import CheckedLanding, PartTimes, Pass, PeerResult, RaceResult
from bench.stand import PeerTask
from bench.workloads import Workload
from sluice.resources.local.local_kafka import LocalKafka

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Race:
    """One named benchmark: a topic, its rows and its peers. The others are compared with the first peer. `also`
    may take part, and do where they are asked for by name."""

    name: str
    about: str
    workload: Workload
    peers: tuple[Peer, ...]
    also: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """How a race is run. `peers` empty: all of the race's.

    `warm_ups` are landings before the first turn; unless it is 0, each turn begins with one more.
    """

    cores: int
    repeat: int = 5
    warm_ups: int = 2
    peers: tuple[Peer, ...] = ()


def run(race: Race, terms: Terms, folder: Path, note: Note) -> RaceResult:
    """Run it in `folder`, where topics stay loaded for the next time.

    Raises SetupError, Failed (a peer ended) or ProofFailed (a peer landed something else than was sent).
    """
    workload = race.workload
    peers = select_available((p for p in (*race.peers, *race.also) if p in (terms.peers or race.peers)), note)
    with LocalKafka(folder / f"kafka-{workload.brokers}", brokers=workload.brokers) as kafka:
        loaded = ensure(workload, kafka.bootstrap, folder / "topics", note)
        track = _Track(kafka, loaded, workload, folder, terms, note)
        results, budget = track.run(peers, parts=SLUICE in peers and len(race.peers) > 1)
    shape = (workload.records, len(workload.weights), workload.codec, terms.cores)
    return RaceResult(race.name, f"{race.about}: {workload.about}", *shape, tuple(results), budget)


@dataclass(frozen=True, slots=True)
class _Track:
    """Everything that the peers of one race share."""

    kafka: LocalKafka
    loaded: Loaded
    workload: Workload
    folder: Path
    terms: Terms
    note: Note

    def run(self, peers: Sequence[Peer], *, parts: bool) -> tuple[list[PeerResult], PartTimes | None]:
        """Returns each peer's cost and, if requested, the times of the parts of Sluice's work.

        The parts are measured directly after each landing of Sluice.
        """
        passes: list[Pass] = []
        with ExitStack() as stack:
            ready = [stack.enter_context(self._standing_by(peer)) for peer in peers]
            each_core = self._one_for_each_core() if parts else []
            alone = [stack.enter_context(self._standing_by(peer)) for peer in each_core]
            for peer in ready:
                self._warm(peer, self.terms.warm_ups)
            landings: dict[str, list[CheckedLanding]] = {peer.peer.name: [] for peer in ready}
            for turn in range(self.terms.repeat):
                for peer in _rotate(ready, turn):
                    # Spark ends Python workers that were idle for a minute, as they are while others take their turn.
                    self._warm(peer, min(self.terms.warm_ups, 1))
                    landings[peer.peer.name].append(self._land(peer, f"{turn + 1} of {self.terms.repeat}"))
                    if peer.peer is SLUICE and alone:
                        passes.append(self._pass(alone))
            records = sum(self.loaded.ends.values())
            results = [
                PeerResult(p.peer.name, p.peer.title, p.versions, records, tuple(landings[p.peer.name])) for p in ready
            ]
        return results, PartTimes(tuple(passes)) if passes else None

    def _one_for_each_core(self) -> list[Peer]:
        """A landing has all cores at work, and each of them is slower for it than one alone."""
        return [replace(BUDGET, name=f"{BUDGET.name}-{core}") for core in range(self.terms.cores)]

    def _pass(self, alone: Sequence[Running]) -> Pass:
        """Returns the mean cost of the parts of Sluice's work by themselves, on all cores at once."""
        with ThreadPoolExecutor(len(alone)) as pool:
            took = [answer["parts"] for answer in pool.map(lambda one: one.land(self.folder), alone)]
        return {part: fmean(one[part] for one in took) for part in took[0]}

    @contextmanager
    def _standing_by(self, race_peer: Peer) -> Iterator[Running]:
        peer = race_peer.of(self.workload.format)
        self.note(f"{peer.title}: getting ready")
        jars = connector_jars(peer)
        loaded, schema = self.loaded, dict(self.workload.schema)
        where = (self.kafka.bootstrap, loaded.topic, loaded.ends, self.terms.cores)
        assignment = PeerTask(*where, jars, schema, self.workload.contract, self.workload.format)
        with running(peer, assignment, self.folder) as ready:
            yield ready

    def _warm(self, peer: Running, times: int) -> None:
        for _ in range(times if peer.peer.warms_up else 0):
            self._land(peer, "warm-up")

    def _land(self, peer: Running, which: str) -> CheckedLanding:
        out = self.folder / "out" / peer.peer.name
        shutil.rmtree(out, ignore_errors=True)
        try:
            with metering(peer.pid, self._brokers()) as meter:
                detail = peer.land(out)
            files, size = self._check(peer.peer, out)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        rate = sum(self.loaded.ends.values()) / meter.cost.seconds
        self.note(f"{peer.peer.title}, {which}: {meter.cost.seconds:.2f} s, {rate:,.0f} records/s, rows checked")
        return CheckedLanding(meter.cost, files, size, detail)

    def _check(self, peer: Peer, out: Path) -> tuple[int, int]:
        """Parquet files and their bytes, all of whose rows are right, and where they belong. Raises ProofFailed."""
        loaded, schema = self.loaded, self.workload.schema
        if not (self.workload.contract and peer.validates):
            return check_landed(peer.title, out, loaded.topic, loaded.digests, schema, peer.layout)
        landed = check_landed(peer.title, out / "data", loaded.topic, loaded.sound, schema)
        quarantined = check_landed(peer.title, out / "quarantine", loaded.topic, loaded.bad)
        return landed[0] + quarantined[0], landed[1] + quarantined[1]

    def _brokers(self) -> tuple[int, ...]:
        return tuple(broker.pid for broker in self.kafka.status().brokers if broker.pid)


def _rotate(peers: Sequence[Running], turn: int) -> list[Running]:
    cut = turn % len(peers)
    return [*peers[cut:], *peers[:cut]]
