"""The outlook of one feed: its lag, the age of that lag, and what Kafka will delete or forget.

`look_ahead` asks Kafka and the ledger and puts the answers of `forecast` together. `stamps` finds how old pending
records are without reading any: it asks Kafka for first records by time, all partitions at once. A position at a pinned
boundary, where a feed of whole windows stands, is found by the first question; the others by bisecting their window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode, OffsetStore
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.batches import Batch, reverse_batches
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.ledger.fold import NO_PINS
from sluice.pipelines.model.kafka import BrokerConfig, Key, OffsetAtTime, PartitionState
from sluice.pipelines.ports import Cluster
from sluice.pipelines.status import forecast
from sluice.pipelines.status.forecast import AtRisk, Backlog, BatchPace, Deletion, KafkaExpiry
from sluice.pipelines.util.documents import Derived, Instant, Internal
from sluice.pipelines.util.units import many

QUESTIONS = 8
"""The most requests to each leader, however many partitions there are."""

_FINENESS = 16
"""An age is exact to a 16th of it, and never too young if stamps are in order."""


def stamps(cluster: Cluster, state: State, positions: Mapping[Key, int], now: int) -> dict[Key, int]:
    """When (ms) the first record at or above each position was stamped, or shortly before. Positions without such a
    record are left out.

    If stamps are out of order, this may be the start of the position's window: only reading would tell more.
    """
    searches = {k: _search(state, k, position, now) for k, position in positions.items()}
    for _ in range(QUESTIONS):
        open_ = {k: s for k, s in searches.items() if not s.done(now)}
        if not open_:
            break
        offsets = cluster.offsets_at({k.tp: s.question for k, s in open_.items()})
        for key, search in open_.items():
            search.hear(offsets.get(key.tp))
    return {k: s.low for k, s in searches.items() if s.low}


@dataclass(slots=True)
class _TimeSearch:
    """The record at `position` is stamped between `low` and `high` (ms), most likely at `hint` or soon after."""

    position: int
    hint: int
    low: int
    high: int
    asked: bool = False
    exact: bool = False

    @property
    def question(self) -> int:
        """The hint; then the log's first record if nothing is known before the position; then the middle."""
        return (self.low and (self.low + self.high) // 2) if self.asked else self.hint

    def done(self, now: int) -> bool:
        return self.exact or (self.asked and self.high - self.low <= max(1000, (now - self.low) // _FINENESS))

    def hear(self, hit: OffsetAtTime | None) -> None:
        time, first, self.asked = self.question, not self.asked, True
        if hit is None or hit.offset > self.position:  # the record is older than that, or there is none
            self.high, self.exact = time, time == 0
            self.low = hit.timestamp if hit and self.exact else self.low
        elif hit.offset == self.position:
            self.low, self.exact = hit.timestamp, True
        elif hit.timestamp >= self.high:  # a record before the position, stamped after all this, hides the rest
            self.low, self.exact = (time if first else self.low), True
        else:
            self.low = max(hit.timestamp, 1)


def _search(state: State, key: Key, position: int, now: int) -> _TimeSearch:
    """A search between the boundaries around the position. A late record may be older than a boundary there."""
    pins = state.boundaries.get(key, NO_PINS)
    before, at = bisect_left(pins.offsets, position), bisect_right(pins.offsets, position)
    low = pins.times[before - 1] if before else 0
    hint = pins.times[at - 1] if at else 0
    high = pins.times[at] if at < len(pins) else now
    return _TimeSearch(position, hint, low, max(hint, high))


RECENT = 5
"""How many published batches the landing rate is computed from."""


@dataclass(frozen=True, slots=True)
class Unwarned:
    """Topics whose settings this client may not read, so that nothing can warn of retention."""

    topics: tuple[str, ...]
    bootstrap: str

    @property
    def text(self) -> str:
        first, rest = self.topics[0], len(self.topics) - 1
        more = f"; nor of {many(rest, 'more topic')}" if rest else ""
        return f"how long {first} keeps its records may not be asked: nothing warns before they are deleted{more}"

    @property
    def remedy(self) -> str:
        return (
            f"kafka-acls.sh --bootstrap-server {self.bootstrap} --add --allow-principal User:NAME --operation"
            f" DescribeConfigs --topic {self.topics[0]}"
        )


@dataclass(frozen=True, slots=True)
class Outlook:
    """One feed at `now` (ms). Rates are in offsets a second, None if unknown. `eta` (ms) is how long consecutive runs
    take to catch up; None if that is unknown, or never.
    """

    now: Instant
    pending: Internal[tuple[Backlog, ...]] = ()
    lag: int = 0
    landing: float | None = None
    production: float | None = None
    eta: Internal[int | None] = None
    at_risk: tuple[AtRisk, ...] = ()
    expires: tuple[KafkaExpiry, ...] = ()
    broker: Internal[BrokerConfig] = field(default_factory=BrokerConfig)
    compacted: tuple[str, ...] = ()
    """Topics that Kafka compacts: it may keep only the newest record of a key, whether older ones landed or not."""
    unwarned: Internal[Unwarned | None] = None
    gaps: Mapping[str, int] = field(default_factory=dict)
    """By topic that Kafka does not compact: the offsets of the newest batches that no batch of the log held."""
    kept: Internal[int | None] = None
    """How long (ms) Kafka keeps a record, in the partition where that is shortest; None if it deletes none, as far as
    is known."""

    @property
    def lost(self) -> tuple[Backlog, ...]:
        """The partitions with pending offsets that are gone from Kafka."""
        return tuple(o for o in self.pending if o.lost)

    @property
    def since(self) -> int | None:
        """When the oldest pending record was stamped (ms), if known."""
        return min((o.since for o in self.pending if o.since is not None), default=None)

    @property
    def age(self) -> int | None:
        """How old (ms) the oldest pending record is; 0 when nothing is pending."""
        if not self.pending:
            return 0
        return None if self.since is None else max(0, self.now - self.since)

    @property
    def lag_seconds(self) -> Derived[float | None]:
        return None if self.age is None else self.age / 1000

    @property
    def catch_up_seconds(self) -> Derived[float | None]:
        return None if self.eta is None else self.eta / 1000

    @property
    def settings_denied(self) -> Derived[tuple[str, ...]]:
        return self.unwarned.topics if self.unwarned else ()

    @property
    def falls_behind(self) -> Derived[bool]:
        """Returns whether more is produced than lands, as far as is known."""
        return bool(self.landing and self.production and self.production >= self.landing)

    def ages(self) -> dict[Key, int]:
        """How old (ms) the oldest pending record of each partition is, where known."""
        return {o.key: max(0, self.now - o.since) for o in self.pending if o.since is not None}


def look_ahead(
    feed: Feed, ledger: Ledger, state: State, cluster: Cluster, partitions: Mapping[Key, PartitionState], now: int
) -> Outlook:
    """Returns the outlook of the feed, given the state of its partitions.

    Raises KafkaUnavailable, LakeUnavailable.
    """
    pending = forecast.backlogs(state, partitions)
    oldest = {o.key: o.held[0].start for o in pending if o.held}
    times = stamps(cluster, state, oldest, now) if oldest else {}
    pending = tuple(replace(o, since=times.get(o.key)) for o in pending)
    # Offsets a second in the last day or so.
    rates = {
        k: r for k, p in partitions.items() if (r := forecast.production(state, k, p.high_watermark, now)) is not None
    }
    lag = sum(r.span for o in pending for r in o.ranges)
    published = read_recent(ledger, state)
    recent, produced = work(published), sum(rates.values()) if rates else None
    eta = forecast.eta(lag, recent, produced)
    configs = cluster.configs({p.topic for p in partitions.values()})
    notice = feed.alerts.retention
    due = list(forecast.deletions(pending, configs.topics, rates, now, notice, eta or 0))
    transactional = feed.transactional_id if feed.commit is CommitMode.TRANSACTIONAL else None
    # When offsets were last written, by the time of the intent. ZooKeeper's stay: Kafka deletes those of idle groups.
    commits = state.last_mark >= 0 and feed.offsets.store is OffsetStore.KAFKA
    committed = ledger.entry(state.last_mark).at if commits else None
    return Outlook(
        now=now,
        pending=pending,
        lag=lag,
        landing=forecast.landing(recent),
        production=produced,
        eta=eta,
        at_risk=_at_risk(cluster, due),
        expires=forecast.expiries(feed.group, transactional, committed, configs.broker),
        broker=configs.broker,
        compacted=tuple(sorted(t for t, c in configs.topics.items() if c.compacts)),
        unwarned=Unwarned(configs.denied, feed.kafka.bootstrap) if configs.denied else None,
        gaps=_count_gaps(published, {t for t, c in configs.topics.items() if c.only_deletes}),
        kept=forecast.list_size_limits(partitions, configs.topics, rates),
    )


def _at_risk(cluster: Cluster, due: Sequence[Deletion]) -> tuple[AtRisk, ...]:
    """The ranges at risk, the first to go first. Kafka is asked once for all their ends."""
    times = {d.pending.key.tp: d.stamped + 1 for d in due if d.stamped is not None}
    ends = cluster.offsets_at(times) if times else {}
    hits = ((d, ends.get(d.pending.key.tp)) for d in due)
    return tuple(
        sorted((d.at_risk(hit.offset if hit else None) for d, hit in hits), key=lambda r: (r.deleted_from, r.key))
    )


def read_recent(ledger: Ledger, state: State) -> list[tuple[Batch, PublishEntry]]:
    """The newest batches that landed something, with their publish entries. Left out are batches that wrote parts
    again."""
    landed = (b for b in state.batches.newest_first() if b.published is not None and not b.rewrites)
    recent = [ledger.recall(b) for b in reverse_batches(islice(landed, RECENT))]
    return [(b, ledger.publication(b)) for b in recent]


def _count_gaps(published: Iterable[tuple[Batch, PublishEntry]], topics: Collection[str]) -> dict[str, int]:
    """Returns the offsets of these topics that no batch of the log held, by topic with any."""
    gaps = Counter[str]()
    for r in (r for _, entry in published for r in entry.receipts if r.offset_range.topic in topics):
        gaps[r.offset_range.topic] += r.counts.compacted
    return dict(+gaps)


def work(published: Iterable[tuple[Batch, PublishEntry]]) -> list[BatchPace]:
    """The pace of the batches. Left out are those that adopted offset ranges of an earlier attempt, whose time is not
    their own.
    """
    own = ((b, e) for b, e in published if not any(r.adopted for r in e.receipts))
    return [BatchPace(sum(r.offset_range.span for r in e.receipts), max(e.at - b.planned_at, 1)) for b, e in own]
