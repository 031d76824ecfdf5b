"""Forecasts for a feed: how far behind it is, when it will have caught up, and what retention will take first.

These are pure functions of the ledger's fold, Kafka's answers, and the time. A forecast warns early rather than late: a
range is at risk from the moment at which Kafka may delete its first record, though segments usually go later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.ledger import State
from sluice.pipelines.ledger.fold import NO_PINS
from sluice.pipelines.model.kafka import BrokerConfig, Key, PartitionState, Range, TopicConfig, intersect
from sluice.pipelines.util.documents import Flat, Instant
from sluice.pipelines.util.units import DAY, show_about, show_duration

# -- pending offsets


@dataclass(frozen=True, slots=True)
class Backlog:
    """A partition's stable offsets that are not accounted for, from its frontier on. `since` is when the first of them
    that Kafka still holds was stamped (ms), if known.
    """

    key: Key
    partition: PartitionState
    ranges: tuple[Range, ...]
    since: int | None = None

    @property
    def lost(self) -> tuple[Range, ...]:
        """The part that Kafka has deleted already."""
        return intersect(self.ranges, Range(0, self.partition.log_start))

    @property
    def held(self) -> tuple[Range, ...]:
        """The part that Kafka still holds."""
        return intersect(self.ranges, Range(self.partition.log_start, self.partition.last_stable_offset))


def backlogs(state: State, partitions: Mapping[Key, PartitionState]) -> tuple[Backlog, ...]:
    """The backlog of each partition that has an origin and pending offsets."""
    opened = ((k, p) for k, p in sorted(partitions.items()) if k in state.origins)
    pending = (Backlog(k, p, state.pending(k, p.last_stable_offset)) for k, p in opened)
    return tuple(o for o in pending if o.ranges)


# -- rates


def production(state: State, key: Key, end: int, now: int) -> float | None:
    """Offsets a second produced into a partition in the last day or so, from a pinned boundary up to `end`.

    None before any boundary is pinned.
    """
    pins = state.boundaries.get(key, NO_PINS)
    if not len(pins):
        return None
    time, offset = pins[min(bisect_left(pins.times, now - DAY), len(pins) - 1)]
    return max(0, end - offset) * 1000 / (now - time) if now > time else None


@dataclass(frozen=True, slots=True)
class BatchPace:
    """How fast a published batch was: the offsets it read, and the ms from its plan to its publish entry."""

    offsets: int
    ms: int


_SHORTEST = 1000
"""Batches shorter than this (ms) say more about the clock than about their work."""
_FURTHEST = 100
"""A batch's rate is trusted for up to this many times the amount it read."""


def landing(recent: Sequence[BatchPace]) -> float | None:
    """Offsets a second while a batch is at work, by the fastest batch: a small one says more about its start than
    about its work. None without batches.
    """
    return max((w.offsets * 1000 / w.ms for w in recent if w.ms >= _SHORTEST), default=0.0) or None


def eta(lag: int, recent: Sequence[BatchPace], produced: float | None) -> int | None:
    """How long (ms) consecutive runs take to catch up, and no less than the shortest of them. None if it is unknown,
    never at these rates, or too far beyond all landed records.
    """
    landed = landing(recent)
    gain = (landed or 0) - (produced or 0)
    if not landed or gain <= 0 or lag > _FURTHEST * max(w.offsets for w in recent):
        return None
    return max(int(lag * 1000 / gain), min(w.ms for w in recent if w.ms >= _SHORTEST)) if lag else 0


# -- retention


@dataclass(frozen=True, slots=True)
class AtRisk:
    """Pending ranges that Kafka will soon delete, from the time
    `deleted_from` (ms) on, because of a setting."""

    key: Flat[Key]
    ranges: tuple[Range, ...]
    deleted_from: Instant
    setting: str

    def describe(self, now: int) -> str:
        """`orders:0 [120, 900) will begin to be deleted in about 3 h (retention.ms 7d)`."""
        left = self.deleted_from - now
        when = f"will begin to be deleted in about {show_about(left)}" if left > 0 else _ANY_MOMENT
        more = f" and {len(self.ranges) - 1} more" if len(self.ranges) > 1 else ""
        return f"{self.key} {self.ranges[0]}{more} {when} ({self.setting})"


_ANY_MOMENT = "may be deleted at any moment"


@dataclass(frozen=True, slots=True)
class Deletion:
    """Kafka may begin to delete the pending offsets of a partition at `at` (ms). As far as we look ahead, it deletes
    everything stamped up to `stamped` (ms), or everything below `below`, whichever bound comes first.
    """

    pending: Backlog
    at: int
    why: str
    stamped: int | None = None
    below: int = 0

    def at_risk(self, end: int | None) -> AtRisk:
        """`end`: the first offset stamped later than `stamped` (None: there is none, or it was not requested)."""
        pending = self.pending.held
        first, last = pending[0].start, pending[-1].end
        bound = self.below if self.stamped is None else last if end is None else end
        return AtRisk(self.pending.key, intersect(pending, Range(first, max(bound, first + 1))), self.at, self.why)


def deletions(
    pending: Sequence[Backlog],
    configs: Mapping[str, TopicConfig],
    rates: Mapping[Key, float],
    now: int,
    notice: int,
    needed: int = 0,
) -> Iterator[Deletion]:
    """The deletions that begin within `notice` ms, or before the `needed` ms that landing takes have passed.

    For a topic with a retention of less than twice the notice, the notice is half of the retention. `rates` are the
    offsets a second produced into each partition. Topics without config are left out.
    """
    for o in pending:
        config = configs.get(o.key.topic)
        if config is None or not config.deletes or not o.held:
            continue
        bounds = _by_age(o, config, now, notice, needed), _by_size(o, config, rates.get(o.key), now, notice, needed)
        yield from sorted((b for b in bounds if b is not None), key=lambda b: b.at)[:1]


def _by_age(o: Backlog, config: TopicConfig, now: int, notice: int, needed: int) -> Deletion | None:
    keeps = config.retention_ms
    if keeps is None or o.since is None:
        return None
    at, ahead = o.since + keeps, max(min(notice, keeps // 2), needed)
    return None if at > now + ahead else Deletion(o, at, f"retention.ms {show_duration(keeps)}", now + ahead - keeps)


def _by_size(
    o: Backlog, config: TopicConfig, rate: float | None, now: int, notice: int, needed: int
) -> Deletion | None:
    """Computed from the mean size of the records in the partition now: Kafka tells no more."""
    p, first = o.partition, o.held[0].start
    span = p.high_watermark - p.log_start
    if config.retention_bytes is None or not p.log_bytes or span <= 0:
        return None
    capacity = int(config.retention_bytes * span / p.log_bytes)  # how many offsets fit in
    room = capacity - (p.high_watermark - first)
    ahead = 0 if rate is None else int(rate * max(notice, needed) / 1000)
    if room > ahead:
        return None
    at = now + (int(room * 1000 / rate) if rate and room > 0 else 0)
    return Deletion(o, at, f"retention.bytes {config.retention_bytes:,}", below=p.high_watermark + ahead - capacity)


def list_size_limits(
    partitions: Mapping[Key, PartitionState], configs: Mapping[str, TopicConfig], rates: Mapping[Key, float]
) -> int | None:
    """How long (ms) Kafka keeps a record before it may delete it, in the partition where that is shortest: by time, or
    by size at the rate of production (`rates`: offsets a second). None if nothing is known to be deleted."""
    limits = ((k, p, configs[k.topic]) for k, p in partitions.items() if k.topic in configs)
    bounds = (b for k, p, c in limits if c.deletes for b in (c.retention_ms, _lasts(p, c, rates.get(k))))
    return min((b for b in bounds if b is not None), default=None)


def _lasts(p: PartitionState, config: TopicConfig, rate: float | None) -> int | None:
    """How long (ms) it takes to write as many records as `retention.bytes` holds."""
    span = p.high_watermark - p.log_start
    if config.retention_bytes is None or not p.log_bytes or span <= 0 or not rate:
        return None
    return int(config.retention_bytes * span / p.log_bytes / rate * 1000)


# -- what Kafka forgets


@dataclass(frozen=True, slots=True)
class KafkaExpiry:
    """Something that Kafka forgets at `at` (ms) unless it is used before, because of a setting."""

    what: str
    at: Instant
    setting: str

    def describe(self, now: int) -> str:
        """`committed offsets of group g: kept for about 6 d more (offsets.retention.minutes 7d)`."""
        retention = f"kept for about {show_about(self.at - now)} more" if self.at > now else "no longer kept"
        return f"{self.what}: {retention} ({self.setting})"


def expiries(
    group: str, transactional_id: str | None, used: int | None, config: BrokerConfig
) -> tuple[KafkaExpiry, ...]:
    """When Kafka forgets the group's offsets and the transactional id, if commits use one. Last `used` is in ms."""
    lasting = [
        (f"committed offsets of group {group}", "offsets.retention.minutes", config.offsets_retention),
        (f"transactional id {transactional_id}", "transactional.id.expiration.ms", config.transactional_id_expiration),
    ]
    lasting = lasting if transactional_id else lasting[:1]
    return tuple(
        KafkaExpiry(what, used + ms, f"{setting} {show_duration(ms)}")
        for what, setting, ms in lasting
        if used is not None and ms is not None
    )
