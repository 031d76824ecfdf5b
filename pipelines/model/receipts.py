"""The result of an offset range: parts, counts, drift, receipts and traffic. Also a batch's owner, and its liveness.

Traffic is counted once for each answer of a broker, never for a record: a range keeps one entry for each broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, Protocol, TypeVar

from pydantic import Field as Exclude

from sluice.pipelines.model.kafka import Range, Tail
from sluice.pipelines.model.plans import JSON_CONFIG, OffsetRange, Request
from sluice.pipelines.schema.wider import join_texts
from sluice.pipelines.util.documents import AsText, Derived, Flat, Instant, Internal


class PartKind(StrEnum):
    """The contents of a part: landed rows or quarantined records."""

    LANDED = "landed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A Parquet file that several offset ranges share, as one of them sees it: its own rows begin at row `first`, and
    the whole file has `rows` rows and `bytes` bytes.
    """

    first: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one offset range in one Parquet file. `staged` is the file's lake path before publishing, `path` its
    lake path afterwards, and `sha256` its hash.

    `rows` and `bytes` are the range's. If `shared` is not set, the file holds nothing else. In a shared file, the bytes
    of all ranges add up to the file's.
    """

    name: str
    kind: PartKind
    staged: str
    path: str
    rows: int
    bytes: int
    sha256: str
    shared: SharedFile | None = None

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.shared.bytes if self.shared else self.bytes

    @property
    def output(self) -> str:
        """The output of a split feed to which the rows belong; empty for records without one, and in other feeds."""
        return find_output(self.path)


def find_output(path: str) -> str:
    """Returns the output of the published part at `path`: the folder between the feed's and the window's."""
    below = path.split("/")[2:-1]
    return below[0] if below and "=" not in below[0] else ""


def name_dataset(feed: str, output: str) -> str:
    """Returns the name of rows: the feed's, or `feed.output`."""
    return f"{feed}.{output}" if output else feed


@dataclass(frozen=True, slots=True)
class Counts:
    """Where the offsets of a range went. The counts add up to its span.

    `control` and `aborted` are records of control batches and of aborted transactions. `compacted` are offsets that no
    batch holds: log compaction leaves such gaps, and a broker that lost a segment. `erased` are records whose rows an
    erasure removed. In the receipt of one output of a split feed, `elsewhere` are records of the others; it is 0 in
    every receipt of a ledger. `copies` is no class: the rows of landed records that lie in several outputs, beyond the
    first of each.
    """

    landed: int = 0
    quarantined: int = 0
    dropped: int = 0
    control: int = 0
    aborted: int = 0
    compacted: int = 0
    erased: int = 0
    elsewhere: Internal[Annotated[int, Exclude(exclude=True)]] = 0
    copies: Internal[int] = 0

    @property
    def landed_rows(self) -> int:
        """The number of landed rows in files."""
        return self.landed + self.copies

    @property
    def rows(self) -> int:
        """The number of landed and quarantined rows in files."""
        return self.landed_rows + self.quarantined

    @property
    def no_record(self) -> int:
        return self.control + self.aborted + self.compacted

    @property
    def records(self) -> int:
        """The number of landed and quarantined records."""
        return self.landed + self.quarantined

    @property
    def quarantined_share(self) -> float:
        """The share of quarantined records among the landed and quarantined ones; 0 without any."""
        return self.quarantined / self.records if self.records else 0.0

    @property
    def total(self) -> int:
        return self.records + self.dropped + self.no_record + self.erased + self.elsewhere

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Tally:
    """The result of one row expectation.

    `expectation` is its index in the contract. It checked `checked` rows (without nulls, unless it is about nulls), of
    which `unexpected` broke it. `first` has the offsets of the first of these.
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
"""How many offsets a tally keeps. Only offsets: record contents stay out of receipts and the ledger."""


class DriftKind(StrEnum):
    """How a field differs from the schema.

    NEW: the schema does not name it. MISSING: no record has it. WIDENED: it holds a larger type of the same kind.
    WRONG: it holds a type of another kind. UNROUTED: its value leads to no output of a split feed. The others are
    values of the right kind that no type of it can hold.
    """

    NEW = "new"
    MISSING = "missing"
    WIDENED = "widened"
    WRONG = "wrong"
    OUT_OF_RANGE = "out_of_range"
    INEXACT = "inexact"
    MALFORMED = "malformed"
    UNLISTED = "unlisted"
    UNROUTED = "unrouted"


@dataclass(frozen=True, slots=True)
class Drift:
    """One field that differs from the schema.

    `records` counts the records, `first` is the offset of the first one. `type` is the smallest type for all
    values, spelled as in a schema; empty when unknown. Of a MISSING field it is the field's own if the schema names the
    place of its values (`from`, `at`, `header`), else empty. In a split feed, `field` begins with the output and a
    slash.
    """

    kind: DriftKind
    field: str
    records: int
    first: int
    type: str = ""

    def __add__(self, other: Drift) -> Drift:
        """Add other records of the same kind and field. The type is the smallest that would hold all of them."""
        records, first = self.records + other.records, min(self.first, other.first)
        kind = self.type if self.type == other.type else join_texts(self.type, other.type)
        return Drift(self.kind, self.field, records, first, kind)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A task's report of a finished offset range.

    `position` is where reading stopped (≥ `offset_range.end`). `input_bytes` came over the wire. `timings` are
    nanoseconds by activity: `wait`, `crc`, `decompress`, `decode`, `type`, `validate`, `encode`, `write`. `format` is
    the name of the shape that made the rows (`Shape.name`), with its `tallies` and `drift`. `relanded` are
    offsets that were quarantined first and landed later by a replay; `mended` are those of them whose bytes a fix
    function changed. `erased` are the offsets of records that an erasure removed. `tail` is the last batch read.
    `batch_bytes` is the bound above which a batch was oversized; 0 if none was. `adopted` is set when an earlier
    attempt wrote the receipt.
    """

    offset_range: OffsetRange
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
    erased: tuple[Range, ...] = ()
    tail: Tail | None = None
    batch_bytes: int = 0
    adopted: bool = field(default=False, compare=False)
    __pydantic_config__ = JSON_CONFIG

    def of(self, kind: PartKind) -> tuple[Part, ...]:
        """The parts that hold rows of this kind."""
        return tuple(p for p in self.parts if p.kind is kind)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that have rows of the range, sorted; only the empty one in feeds without `split`."""
        return tuple(sorted({"", *(p.output for p in self.parts)}))

    def of_output(self, output: str) -> Receipt:
        """Returns the receipt of one output: its parts, with the records of all others counted as `elsewhere`.

        Records that were dropped or erased belong to the empty output. A record that lies in several counts in each.
        """
        parts = tuple(p for p in self.parts if p.output == output)
        landed, quarantined = (sum(p.rows for p in parts if p.kind is kind) for kind in PartKind)
        counts = replace(self.counts, landed=landed, quarantined=quarantined, copies=0)
        if output:
            counts = replace(counts, dropped=0, erased=0)
        counts = replace(counts, elsewhere=self.counts.total - counts.total)
        own = f"{output}/"
        drift = tuple(replace(d, field=d.field.removeprefix(own)) for d in self.drift if d.field.startswith(own))
        return replace(self, parts=parts, counts=counts, drift=drift)


def sum_counts(receipts: Iterable[Receipt]) -> Counts:
    """Returns where the offsets of all these ranges went."""
    numbers = attrgetter(*Counts.__dataclass_fields__)  # by field: a run over a month adds up thousands
    return Counts(*map(sum, zip(*(numbers(r.counts) for r in receipts), strict=True)))


class HasParts(Protocol):
    """A receipt, or what stands for some."""

    @property
    def parts(self) -> tuple[Part, ...]: ...


H = TypeVar("H", bound=HasParts)


def count_files(receipts: Iterable[HasParts]) -> int:
    """How many Parquet files hold the rows: one that offset ranges share counts once."""
    return len({p.staged for r in receipts for p in r.parts})


def group_by_sharing(receipts: Sequence[H]) -> list[list[H]]:
    """The receipts in groups: those that share a file, directly or through others, are in one. Order is kept."""
    above = list(range(len(receipts)))

    def top(at: int) -> int:
        while above[at] != at:
            at = above[at]
        return at

    first: dict[str, int] = {}
    for at, receipt in enumerate(receipts):
        for path in (p.staged for p in receipt.parts if p.shared):
            one, other = sorted((top(first.setdefault(path, at)), top(at)))
            above[other] = one
    groups: dict[int, list[H]] = {}
    for at, receipt in enumerate(receipts):
        groups.setdefault(top(at), []).append(receipt)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class RangeFailure:
    """Why an offset range was not finished. `error` is the error's class name; `fatal` means that a retry will not
    help.
    """

    offset_range: Flat[OffsetRange]
    error: str
    message: str
    remedy: str = ""
    fatal: bool = False
    __pydantic_config__ = JSON_CONFIG


Outcome = Receipt | RangeFailure


@dataclass(frozen=True, slots=True)
class TaskTime:
    """Start and end of a task, in nanoseconds since the epoch by the clock of its machine.

    `task` is its index in the plan. `attempt` counts from 0.
    """

    task: int
    began: int
    ended: int
    attempt: int
    host: str
    pid: int


class Scheduler(StrEnum):
    """The program that starts a project's runs."""

    DAGSTER = "dagster"
    AIRFLOW = "airflow"
    NONE = "none"


class EngineKind(StrEnum):
    """The programs that can run a feed's tasks: Spark, or processes of this machine without a JVM."""

    SPARK = "spark"
    PROCESSES = "processes"


ENGINE = "SLUICE_ENGINE"
"""The environment variable with the engine of all feeds, whatever their files name."""


def find_scheduler(run: str) -> Scheduler:
    """Returns the scheduler of a run by its id: `airflow:DAG.TASK:RUN`, `none:UUID`, or Dagster's plain UUID."""
    prefix, colon, _ = run.partition(":")
    return Scheduler(prefix) if colon and prefix in {*Scheduler} else Scheduler.DAGSTER


def describe_run(run: str) -> str:
    """Returns the name of a run by its id, for messages: `Airflow run scheduled__2026-11-20 of land_orders.land`."""
    scheduler, (_, _, rest) = find_scheduler(run), run.partition(":")
    match scheduler:
        case Scheduler.AIRFLOW:
            task, _, of = rest.partition(":")
            return f"Airflow run {of} of {task}"
        case Scheduler.NONE:
            return f"run {rest[:8]} without a scheduler"
    return f"run {run[:8]}"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that works on a batch. `token` is unique to the process, `run` the run's id, `started` in ms."""

    token: Internal[str]
    run: str
    host: str
    pid: int
    started: Instant

    def describe(self) -> str:
        return f"{describe_run(self.run)} (pid {self.pid} on {self.host})"


class Life(StrEnum):
    """The state of an owner or a run."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "not known yet"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of an owner or a run, and the evidence: "its process (pid 7) is gone from this machine".

    While the state is unknown, `why` names the missing evidence.
    """

    life: Life
    why: str

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD


class Fate(StrEnum):
    """A run's decision on an unfinished batch of another run."""

    TAKEN_OVER = "taken over"
    GIVEN_UP = "given up"
    LEFT = "left as it is"


@dataclass(frozen=True, slots=True)
class Met:
    """An unfinished batch of another run, and this run's decision on it.

    `verdict` is the state of the other run. `why` is the reason to abandon or keep the batch. `ways` are pairs of a
    command and its effect on the batch. `refused`: limits or contract refused it, so that it waits for a decision.
    """

    batch: int
    request: AsText[Request]
    owner: Owner
    verdict: Verdict
    fate: Fate = Fate.LEFT
    why: str = ""
    ways: tuple[tuple[str, str], ...] = ()
    refused: bool = False

    @property
    def text(self) -> str:
        """One sentence, without the evidence."""
        if self.refused:
            return f"batch {self.batch} ({self.request}) was refused, and waits for a decision"
        return f"batch {self.batch} ({self.request}) {_STANDS[self.verdict.life].format(self.owner.describe())}"

    def __str__(self) -> str:
        return f"{self.text}: {self.verdict.why}"


_STANDS = {
    Life.ALIVE: "is at work: {} lives",
    Life.DEAD: "is unfinished, and {} is dead",
    Life.UNKNOWN: "may be at work: whether {} lives is not known yet",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is.

    `stage` is the stage's name; `done` of `total` offsets are done where the stage counts them. `met` is another run's
    batch that was just taken over, given up or left; the last report about a batch holds.
    """

    stage: str
    done: int = 0
    total: int = 0
    note: str = ""
    met: Met | None = None


Reporter = Callable[[Progress], None]


BUCKETS = 32
"""How many buckets a `Latency` has. The last one has no upper bound."""
_FIRST_US = 1000
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
"""The percentiles that are shown."""
K = TypeVar("K")


def find_bucket(us: int) -> int:
    """The bucket of a time: 0 for less than 1 ms, then two for each doubling (1, 1.5, 2, 3, 4, 6, 8 ms …)."""
    if us < _FIRST_US:
        return 0
    octave = (us // _FIRST_US).bit_length() - 1
    upper_half = 2 * us >= 3 * (_FIRST_US << octave)
    return min(2 * octave + 1 + upper_half, BUCKETS - 1)


def get_bound_us(bucket: int) -> int:
    """Times in the bucket are shorter than this. Of the last one this is where it begins: it has no upper bound."""
    octave, upper_half = divmod(min(bucket, BUCKETS - 2), 2)
    return (_FIRST_US << octave) * (2 + upper_half) // 2


@dataclass(frozen=True, slots=True)
class LatencyBucket:
    below_ms: float
    answers: int


@dataclass(frozen=True, slots=True)
class Latency:
    """How long answers took: how many by bucket, the sum and the longest, in microseconds."""

    counts: Internal[dict[int, int]] = field(default_factory=dict)
    total_us: int = 0
    max_us: int = 0

    @classmethod
    def of(cls, us: int) -> Latency:
        """One answer."""
        return cls({find_bucket(us): 1}, us, us)

    @property
    def count(self) -> Derived[int]:
        return sum(self.counts.values())

    @property
    def percentiles_ms(self) -> Derived[Mapping[str, float]]:
        """Upper bounds of the shares that are shown."""
        return {name: self.percentile_ms(share) for name, share in SHARES.items()}

    @property
    def buckets(self) -> Derived[tuple[LatencyBucket, ...]]:
        return tuple(LatencyBucket(get_bound_us(i) / 1000, n) for i, n in sorted(self.counts.items()))

    def __add__(self, other: Latency) -> Latency:
        counts = add_counts(self.counts, other.counts)
        return Latency(counts, self.total_us + other.total_us, max(self.max_us, other.max_us))

    def percentile_ms(self, share: float) -> float:
        """Returns an upper bound, in ms, of this share (0 to 1) of the response times; 0 without responses.

        The bound is never too low, and at most half too high.
        """
        if not self.count:
            return 0.0
        ordered = sorted(self.counts)
        reached = zip(ordered, accumulate(self.counts[b] for b in ordered), strict=True)
        bucket = next((b for b, n in reached if n >= share * self.count), ordered[-1])
        return (self.max_us if bucket >= BUCKETS - 1 else min(get_bound_us(bucket), self.max_us)) / 1000


@dataclass(frozen=True, slots=True)
class BrokerTraffic:
    """The requests to one broker and their outcome.

    `requests` are fetches sent, `latency` is how long their answers took, `empty` are answers without any record, and
    `bytes` those of whole answers. `errors` counts by kind: refusals of a partition, and requests that got no answer.
    `held_us` is how long requests waited because this side had no room: it decoded and wrote too slowly. `throttled`
    are responses that request a pause, and `throttle_ms` for how long (throttle_time_ms, KIP-219). `moved` are
    partitions that this broker led until another one did, `reconnects` connections to it beyond the first of a task.
    """

    node: int
    address: str = ""
    requests: int = 0
    empty: int = 0
    bytes: int = 0
    latency: Latency = field(default_factory=Latency)
    errors: dict[str, int] = field(default_factory=dict)
    held_us: int = 0
    throttled: int = 0
    throttle_ms: int = 0
    moved: int = 0
    reconnects: int = 0

    def __add__(self, other: BrokerTraffic) -> BrokerTraffic:
        """Both, of the same broker; of two addresses the greater one, so that order does not matter."""
        return BrokerTraffic(
            self.node,
            max(self.address, other.address),
            self.requests + other.requests,
            self.empty + other.empty,
            self.bytes + other.bytes,
            self.latency + other.latency,
            add_counts(self.errors, other.errors),
            self.held_us + other.held_us,
            self.throttled + other.throttled,
            self.throttle_ms + other.throttle_ms,
            self.moved + other.moved,
            self.reconnects + other.reconnects,
        )

    @property
    def seconds(self) -> float:
        """The time that went by with this broker: until it answered, while it had us pause, while we had no room."""
        return (self.latency.total_us + self.held_us) / 1e6 + self.throttle_ms / 1e3


@dataclass(frozen=True, slots=True)
class TaskTraffic:
    """The requests of tasks to brokers, as sent to the driver.

    `ends` is the high watermark of each partition (`orders:3`) when it was read last.
    """

    brokers: tuple[BrokerTraffic, ...] = ()
    ends: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: TaskTraffic) -> TaskTraffic:
        partitions = (self.ends | other.ends).keys()
        ends = {tp: max(self.ends.get(tp, 0), other.ends.get(tp, 0)) for tp in sorted(partitions)}
        return TaskTraffic(by_broker((*self.brokers, *other.brokers)), ends)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The engine that ran tasks. The others are Spark's: its master, its application, and the address of its UI or of
    its event log; empty without one."""

    kind: EngineKind
    master: str = ""
    application: str = ""
    page: str = ""

    def __str__(self) -> str:
        if self.kind is EngineKind.PROCESSES:
            return "processes of this machine"
        return f"Spark {self.master}" + (f", application {self.application}" if self.application else "")


@dataclass(frozen=True, slots=True)
class Traffic:
    """A batch's requests to brokers and the engines that sent them, as its publish entry stores them.

    `behind` is the lag of each topic in offsets, from the end of the read ranges to the high watermark of the last
    fetch.
    """

    brokers: tuple[BrokerTraffic, ...] = ()
    behind: dict[str, int] = field(default_factory=dict)
    engines: tuple[EngineUse, ...] = ()

    def __add__(self, later: Traffic) -> Traffic:
        """Return the sum. The lag is the later one's."""
        engines = tuple(dict.fromkeys((*self.engines, *later.engines)))
        return Traffic(by_broker((*self.brokers, *later.brokers)), self.behind | later.behind, engines)


NO_TRAFFIC = Traffic()


def by_broker(traffic: Iterable[BrokerTraffic]) -> tuple[BrokerTraffic, ...]:
    """One for each broker, sorted by node."""
    brokers: dict[int, BrokerTraffic] = {}
    for b in traffic:
        brokers[b.node] = brokers[b.node] + b if b.node in brokers else b
    return tuple(b for _, b in sorted(brokers.items()))


def sum_brokers(traffic: Iterable[BrokerTraffic]) -> BrokerTraffic:
    """The sum over all of them, as of a broker −1 without address."""
    return sum((replace(b, node=-1, address="") for b in traffic), BrokerTraffic(-1))


def add_counts(one: Mapping[K, int], other: Mapping[K, int]) -> dict[K, int]:
    """The sums by key."""
    return {k: one.get(k, 0) + other.get(k, 0) for k in (*one, *(k for k in other if k not in one))}
