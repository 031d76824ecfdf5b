"""What came of a slice: parts, counts, drift, receipts, and who owns the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sluice.pipelines.schema.wider import join_texts
from sluice.pipelines.vocabulary.plans import Request, Slice
from sluice.pipelines.vocabulary.ranges import Range


class PartKind(StrEnum):
    LANDED = "landed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file. `staged` is its lake path until it is published, `path` its lake path afterwards."""

    name: str
    kind: PartKind
    staged: str
    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Where the offsets of a range went; they add up to its span.

    `compacted` counts offsets that no batch holds (log compaction, or gaps that transactions leave).
    """

    landed: int = 0
    quarantined: int = 0
    dropped: int = 0
    control: int = 0
    aborted: int = 0
    compacted: int = 0

    @property
    def invisible(self) -> int:
        return self.control + self.aborted + self.compacted

    @property
    def total(self) -> int:
        return self.landed + self.quarantined + self.dropped + self.invisible

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Tally:
    """What rows say to one row expectation: its place in the contract, how many rows it looked at (nulls are none of
    its business, unless it is about them), how many of these broke it, and the offsets of the first of those.
    """

    expectation: int
    checked: int
    unexpected: int = 0
    first: tuple[int, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        first = tuple(sorted(self.first + other.first)[:EXAMPLES])
        checked, unexpected = self.checked + other.checked, self.unexpected + other.unexpected
        return Tally(self.expectation, checked, unexpected, first)


EXAMPLES = 3
"""Offsets that a tally keeps: what was in the records stays out of receipts and the ledger."""


class DriftKind(StrEnum):
    """How records differ from the schema: a field that it does not name, one that no record has, one of a larger type
    of the same kind, one of another kind."""

    NEW = "new"
    MISSING = "missing"
    WIDENED = "widened"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Drift:
    """One field that drifts: in how many records, the offset of the first, and the type (as a schema says it; empty:
    unknown) that would hold what was seen."""

    kind: DriftKind
    field: str
    records: int
    first: int
    type: str = ""

    def __add__(self, other: Drift) -> Drift:
        """Of other records of the same kind and field; the type is the least that would hold all of them."""
        records, first = self.records + other.records, min(self.first, other.first)
        return Drift(self.kind, self.field, records, first, join_texts(self.type, other.type))


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a task says of a finished slice.

    `position` is where reading stopped (≥ `slice.end`), `input_bytes` what came over the wire, `timings` the
    nanoseconds spent by activity (`wait`, `crc`, `decompress`, `decode`, `type`, `validate`, `encode`, `write`),
    `format` the name of what made rows of the records (`Shape.name`), `tallies` and `drift` what it saw of them.
    `relanded` are offsets that were quarantined and landed later, by a replay; `mended` are those of them whose bytes
    are not the log's any more.
    """

    slice: Slice
    position: int
    counts: Counts
    parts: tuple[Part, ...]
    attempt: str
    input_bytes: int = 0
    timings: dict[str, int] = field(default_factory=dict, compare=False)
    format: str = "raw"
    tallies: tuple[Tally, ...] = ()
    drift: tuple[Drift, ...] = ()
    relanded: tuple[Range, ...] = ()
    mended: tuple[Range, ...] = ()
    adopted: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class SliceFailure:
    """Why a slice was not finished. `error` is the error's class name; `fatal` says that a retry will not help."""

    slice: Slice
    error: str
    message: str
    remedy: str = ""
    fatal: bool = False


Outcome = Receipt | SliceFailure


@dataclass(frozen=True, slots=True)
class Owner:
    """Who works on a batch. `token` is unique to a run's process; `run` is the Dagster run id."""

    token: str
    run: str
    host: str
    pid: int
    started: int

    def describe(self) -> str:
        return f"run {self.run[:8]} (pid {self.pid} on {self.host})"


class Life(StrEnum):
    """How an owner, or a run, stands."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "not known yet"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an owner, or a run, stands, and by what evidence: "its process (pid 7) is gone from this machine". Of one
    that is not known yet: what would tell."""

    life: Life
    why: str

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD


class Fate(StrEnum):
    """What became of a batch that a dead run left."""

    TAKEN_OVER = "taken over"
    GIVEN_UP = "given up"
    LEFT = "left as it is"


@dataclass(frozen=True, slots=True)
class Met:
    """A live batch of another run that somebody came upon: how that run stands, and what became of the batch.

    `why`: what it was given up for, or what keeps it. `ways`: commands, each with what it does to the batch.
    """

    batch: int
    request: Request
    owner: Owner
    verdict: Verdict
    fate: Fate = Fate.LEFT
    why: str = ""
    ways: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """Without the evidence."""
        return f"batch {self.batch} ({self.request}) {_STANDS[self.verdict.life].format(self.owner.describe())}"

    def __str__(self) -> str:
        return f"{self.text}: {self.verdict.why}"


_STANDS = {
    Life.ALIVE: "is at work: {} lives",
    Life.DEAD: "is unfinished, and {} is dead",
    Life.UNKNOWN: "may be at work: whether {} lives is not known yet",
}
