"""Measurements as values: repetitions, medians, spreads and ratios; JSON-ready.

Rates are records a second of wall time, CPU is nanoseconds a record over all processes of a peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.measure import Cost

FORMAT = 3


@dataclass(frozen=True, slots=True)
class CheckedLanding:
    """One landing whose rows were checked: its cost, its Parquet files, and the peer's report."""

    cost: Cost
    files: int
    bytes: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def elsewhere(self) -> float | None:
        """The share of the machine's CPU time that went to neither peer nor broker: how noisy it was."""
        c = self.cost
        if c.machine_cpu is None or c.cpu is None or c.beside_cpu is None:
            return None
        return max(0.0, 1 - (c.cpu + c.beside_cpu) / c.machine_cpu) if c.machine_cpu else 0.0


@dataclass(frozen=True, slots=True)
class PeerResult:
    """All repetitions of one peer over `records` records, in order."""

    peer: str
    title: str
    versions: Mapping[str, str]
    records: int
    landings: tuple[CheckedLanding, ...]

    @property
    def seconds(self) -> float:
        """Median wall time of a landing."""
        return median(x.cost.seconds for x in self.landings)

    @property
    def rate(self) -> float:
        return self.records / self.seconds

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest repetition's rate."""
        rates = [self.records / x.cost.seconds for x in self.landings]
        return min(rates), max(rates)

    @property
    def cpu_ns(self) -> float | None:
        """Median CPU time of a record."""
        return _median([x.cost.cpu for x in self.landings], 1e9 / self.records)

    def cpu_ns_of(self, kind: str) -> float | None:
        """The same of one kind of process."""
        return _median(
            [None if x.cost.cpus is None else x.cost.cpus.get(kind) for x in self.landings], 1e9 / self.records
        )

    @property
    def kinds(self) -> list[str]:
        """Kinds of processes that were seen."""
        return sorted({kind for x in self.landings for kind in x.cost.peaks})

    @property
    def broker_cpu_ns(self) -> float | None:
        return _median([x.cost.beside_cpu for x in self.landings], 1e9 / self.records)

    @property
    def elsewhere(self) -> float | None:
        return _median([x.elsewhere for x in self.landings])

    @property
    def output_bytes(self) -> int:
        return self.landings[-1].bytes

    def peak(self, kind: str) -> int | None:
        """The highest resident size of any one process of that kind."""
        return max((x.cost.peaks[kind] for x in self.landings if kind in x.cost.peaks), default=None)

    def document(self) -> dict[str, Any]:
        """JSON-ready, derived figures next to the raw ones."""
        slow, fast = self.spread
        return {
            "peer": self.peer,
            "title": self.title,
            "versions": dict(self.versions),
            "records": self.records,
            "seconds": round(self.seconds, 3),
            "records_per_second": round(self.rate),
            "slowest_and_fastest": [round(slow), round(fast)],
            "cpu_ns_per_record": _round(self.cpu_ns),
            "cpu_ns_per_record_by_process": {kind: _round(self.cpu_ns_of(kind)) for kind in self.kinds},
            "broker_cpu_ns_per_record": _round(self.broker_cpu_ns),
            "share_of_cpu_spent_elsewhere": _round(self.elsewhere, 3),
            "output_bytes": self.output_bytes,
            "landings": [asdict(x) for x in self.landings],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PeerResult:
        """Parse the raw figures of `document`."""
        landings = tuple(CheckedLanding(**x | {"cost": Cost(**x["cost"])}) for x in document["landings"])
        return cls(document["peer"], document["title"], document["versions"], document["records"], landings)


Pass = Mapping[str, float]
"""CPU nanoseconds a record that the parts of Sluice's work took by themselves."""


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Cost of the parts by themselves: one pass directly after each landing of Sluice, in order."""

    passes: tuple[Pass, ...]

    @property
    def parts(self) -> Pass:
        """Medians."""
        return {part: median(p[part] for p in self.passes) for part in self.passes[0]}

    @property
    def sum(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which call of the benchmark something comes from."""

    command: str
    when: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Peers side by side over one topic. The first peer is the one that the others are compared with."""

    name: str
    about: str
    records: int
    partitions: int
    codec: str
    cores: int
    results: tuple[PeerResult, ...]
    budget: PartTimes | None = None
    run: Provenance | None = None

    @property
    def over_budget(self) -> tuple[float | None, float] | None:
        """How many times the sum of its parts the first peer took: in CPU time, and of all cores' wall time.

        Each landing is compared with the pass that followed it, as the machine's speed changes by the minute. Medians.
        """
        if not self.budget:
            return None
        costs = [x.cost for x in self.results[0].landings]
        sums = [sum(p.values()) * self.records / 1e9 for p in self.budget.passes]
        pairs = list(zip(costs, sums, strict=True))
        cpu = _median([None if cost.cpu is None else cost.cpu / parts for cost, parts in pairs])
        return cpu, median(cost.seconds * self.cores / parts for cost, parts in pairs)

    def of(self, peer: str) -> PeerResult | None:
        """Returns the result of that peer, if it took part."""
        return next((r for r in self.results if r.peer == peer), None)

    def ratio(self, other: PeerResult) -> float:
        """How many times the rate of `other` the first peer reaches, by medians."""
        return self.results[0].rate / other.rate

    def cpu_ratio(self, other: PeerResult) -> float | None:
        """How many times the CPU time of the first peer `other` needs for a record."""
        ours, theirs = self.results[0].cpu_ns, other.cpu_ns
        return theirs / ours if ours and theirs else None

    def document(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "name": self.name,
            "about": self.about,
            "records": self.records,
            "partitions": self.partitions,
            "codec": self.codec,
            "cores": self.cores,
            "peers": [r.document() for r in self.results],
            "ratios": {r.peer: round(self.ratio(r), 2) for r in self.results[1:]},
            "cpu_ratios": {r.peer: _round(self.cpu_ratio(r), 2) for r in self.results[1:]},
        }
        if self.budget and (over := self.over_budget):
            fields["budget"] = {
                "cpu_ns_per_record": {part: round(ns, 1) for part, ns in self.budget.parts.items()},
                "sum": round(self.budget.sum, 1),
                "cpu_over_sum": _round(over[0], 2),
                "wall_times_cores_over_sum": round(over[1], 2),
                "passes": [{part: round(ns, 1) for part, ns in p.items()} for p in self.budget.passes],
            }
        return fields | ({"run": asdict(self.run)} if self.run else {})

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> RaceResult:
        """Parse the raw figures of `document`."""
        budget, run = document.get("budget"), document.get("run")
        return cls(
            name=document["name"],
            about=document["about"],
            records=document["records"],
            partitions=document["partitions"],
            codec=document["codec"],
            cores=document["cores"],
            results=tuple(map(PeerResult.from_document, document["peers"])),
            budget=PartTimes(tuple(budget["passes"])) if budget else None,
            run=Provenance(**run) if run else None,
        )


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Medians of runs in new processes over `records` records: seconds, and CPU seconds of all processes, by title."""

    records: int
    seconds: Mapping[str, Sequence[float]]
    run: Provenance


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Cells of the table of waits, and the call that measured them."""

    rows: Sequence[Sequence[str]]
    run: Provenance


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Benchmarks, each with the call that it comes from, and the newest times of starts and of other waits."""

    races: tuple[RaceResult, ...]
    start: StartTimes | None = None
    waits: WaitTimes | None = None

    def document(self) -> dict[str, Any]:
        others = {name: asdict(of) for name in ("start", "waits") if (of := getattr(self, name))}
        return {"format": FORMAT, "benchmarks": [r.document() for r in self.races]} | others

    def find(self, name: str) -> RaceResult | None:
        """Returns the race of that name, if it was measured."""
        return next((r for r in self.races if r.name == name), None)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> BenchReport:
        """Parse `document`; a document of another format gives no results."""
        races = document["benchmarks"] if document.get("format") == FORMAT else []
        start = document.get("start")
        times = StartTimes(start["records"], start["seconds"], Provenance(**start["run"])) if start else None
        waits = document.get("waits")
        rows = WaitTimes(waits["rows"], Provenance(**waits["run"])) if waits else None
        return cls(tuple(map(RaceResult.from_document, races)), times, rows)

    def over(self, older: BenchReport, order: Sequence[str]) -> BenchReport:
        """These benchmarks, and those of an older report that are none of these by name. In the order of names given;
        behind them the others, by partitions and records."""
        mine = {r.name for r in self.races}
        both = [*self.races, *(r for r in older.races if r.name not in mine)]
        positions = {name: i for i, name in enumerate(order)}
        races = sorted(both, key=lambda r: (positions.get(r.name, len(positions)), r.partitions, r.records))
        return BenchReport(tuple(races), self.start or older.start, self.waits or older.waits)


def _median(values: list[float | None], scale: float = 1.0) -> float | None:
    numbers = [v for v in values if v is not None]
    return median(numbers) * scale if numbers else None


def _round(value: float | None, digits: int = 0) -> float | None:
    return None if value is None else round(value, digits or None)
