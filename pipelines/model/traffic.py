"""What fetching asked of the brokers, counted: requests, bytes, latency, waiting, throttling, leaders that moved.

Every value can be added to another of its kind, in any order and grouping, and stays small: a batch's traffic has an
entry for each broker that it read from, however many requests there were. Counted once for each answer of a broker,
never for a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

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
class Latency:
    """How long answers took: how many by bucket, the sum and the longest, in microseconds."""

    counts: dict[int, int] = field(default_factory=dict)
    total_us: int = 0
    max_us: int = 0

    @classmethod
    def of(cls, us: int) -> Latency:
        """One answer."""
        return cls({find_bucket(us): 1}, us, us)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def __add__(self, other: Latency) -> Latency:
        counts = add_counts(self.counts, other.counts)
        return Latency(counts, self.total_us + other.total_us, max(self.max_us, other.max_us))

    def percentile_ms(self, share: float) -> float:
        """So many milliseconds or less took this share (0 to 1) of the answers; 0 without answers.

        Never too little, and too much by half at most.
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
    are answers that told us to pause, and `throttle_ms` for how long (throttle_time_ms, KIP-219). `moved` are
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
    """What one task, or several, asked of brokers, on its way to the driver.

    `ends` is the high watermark of each partition (`orders:3`) when it was read last.
    """

    brokers: tuple[BrokerTraffic, ...] = ()
    ends: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: TaskTraffic) -> TaskTraffic:
        partitions = (self.ends | other.ends).keys()
        ends = {tp: max(self.ends.get(tp, 0), other.ends.get(tp, 0)) for tp in sorted(partitions)}
        return TaskTraffic(by_broker((*self.brokers, *other.brokers)), ends)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A batch's requests to brokers, as its publish entry stores them.

    `behind` is, for each topic, how many offsets lay between what the batch read and the end of the log (the high
    watermark, as its last fetch saw it).
    """

    brokers: tuple[BrokerTraffic, ...] = ()
    behind: dict[str, int] = field(default_factory=dict)

    def __add__(self, later: Traffic) -> Traffic:
        """Both; how far a topic is behind, the later one knows."""
        return Traffic(by_broker((*self.brokers, *later.brokers)), self.behind | later.behind)


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
