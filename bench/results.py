"""What was measured, as values: repetitions, medians, spreads and ratios; JSON-ready.

Rates are records a second of wall time, CPU is nanoseconds a record over all processes of a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from sluice.bench.measure import Cost

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Landing:
    """One landing whose rows were checked: what it cost, the Parquet that it left, and what the peer tells of it."""

    cost: Cost
    files: int
    bytes: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def beside(self) -> float | None:
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
    landings: tuple[Landing, ...]

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

    @property
    def broker_cpu_ns(self) -> float | None:
        return _median([x.cost.beside_cpu for x in self.landings], 1e9 / self.records)

    @property
    def beside(self) -> float | None:
        return _median([x.beside for x in self.landings])

    @property
    def output_bytes(self) -> int:
        return self.landings[-1].bytes

    def peak(self, kind: str) -> int | None:
        """The highest resident size of any one process of that kind."""
        return max((x.cost.peaks[kind] for x in self.landings if kind in x.cost.peaks), default=None)

    def document(self) -> dict[str, Any]:
        """JSON-ready, derived figures beside the raw ones."""
        slow, fast = self.spread
        return {
            "peer": self.peer,
            "title": self.title,
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 3),
            "records_per_second": round(self.rate),
            "slowest_and_fastest": [round(slow), round(fast)],
            "cpu_ns_per_record": _rounded(self.cpu_ns),
            "broker_cpu_ns_per_record": _rounded(self.broker_cpu_ns),
            "share_of_cpu_spent_elsewhere": _rounded(self.beside, 3),
            "output_bytes": self.output_bytes,
            "landings": [asdict(x) for x in self.landings],
        }


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

    def ratio(self, other: PeerResult) -> float:
        """How many times the rate of `other` the first peer reaches, by medians."""
        return self.results[0].rate / other.rate

    def cpu_ratio(self, other: PeerResult) -> float | None:
        """How many times the CPU time of the first peer `other` needs for a record."""
        ours, theirs = self.results[0].cpu_ns, other.cpu_ns
        return theirs / ours if ours and theirs else None

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "about": self.about,
            "records": self.records,
            "partitions": self.partitions,
            "codec": self.codec,
            "cores": self.cores,
            "peers": [r.document() for r in self.results],
            "ratios": {r.peer: round(self.ratio(r), 2) for r in self.results[1:]},
            "cpu_ratios": {r.peer: _rounded(self.cpu_ratio(r), 2) for r in self.results[1:]},
        }


@dataclass(frozen=True, slots=True)
class Report:
    """One call of the benchmark."""

    command: str
    when: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    races: tuple[RaceResult, ...]

    def document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "command": self.command,
            "when": self.when,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "benchmarks": [r.document() for r in self.races],
        }


def _median(values: list[float | None], scale: float = 1.0) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) * scale if known else None


def _rounded(value: float | None, digits: int = 0) -> float | None:
    return None if value is None else round(value, digits or None)
