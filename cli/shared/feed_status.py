"""The status of a feed in its ledger, its group and Kafka, for `sluice status` and `sluice metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.pipelines.errors import BatchRefused, SluiceError
from sluice.pipelines.model.kafka import BrokerConfig, Key, OpenTransaction, PartitionState, TopicPartition
from sluice.pipelines.model.receipts import Met
from sluice.pipelines.status.window_state import WindowStanding

if TYPE_CHECKING:
    from sluice.cli.app.invocation import OpenPorts
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ledger import Batch, Ledger, State
    from sluice.pipelines.planning.held_back import HeldBack
    from sluice.pipelines.ports import Ports
    from sluice.pipelines.status.outlook import Outlook


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition: `frontier` None before its first plan, `end` None when Kafka did not answer.

    `age` (ms): how old the oldest record is that it owes, None where that is not known. `unstable`: offsets above the
    last stable offset, which open transactions hold.
    """

    key: Key
    origin: int | None
    frontier: int | None
    committed: int | None
    end: int | None
    holes: tuple[tuple[int, int], ...]
    age: int | None = None
    unstable: int = 0

    @property
    def lag(self) -> int | None:
        """Stable offsets above the frontier."""
        return None if self.end is None or self.frontier is None else max(0, self.end - self.frontier)


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One feed; `error` says why Kafka's side is missing or refused, and then there is no `outlook`.

    Its newest windows last `length` ms each. `losses`: what is owed and gone from Kafka, by partition; `held`: what
    open transactions hold back; `met`: how the runs of the live batches stand; `heartbeats`: by live batch, how long
    ago (ms) its owner was heard of; `refused`: by live batch whose run is dead, why it was not published;
    `start_not_used`: why the first run will not begin as `start` says.
    """

    feed: str
    partitions: tuple[PartitionStatus, ...]
    live: tuple[Batch, ...]
    last: Batch | None
    error: SluiceError | None
    length: int
    windows: tuple[WindowStanding, ...]
    outlook: Outlook | None = None
    losses: tuple[SluiceError, ...] = ()
    held: tuple[HeldBack, ...] = ()
    heartbeats: Mapping[int, int] = field(default_factory=dict)
    met: Mapping[int, Met] = field(default_factory=dict)
    refused: Mapping[int, BatchRefused] = field(default_factory=dict)
    start_not_used: str = ""

    @property
    def lag(self) -> int | None:
        lags = [p.lag for p in self.partitions]
        return None if None in lags or self.error else sum(lag or 0 for lag in lags)

    @property
    def uncommitted(self) -> int:
        """Offsets below the frontier that the group has not committed."""
        return sum(max(0, p.frontier - (p.committed or p.origin or 0)) for p in self.partitions if p.frontier)


def look_if_possible(open_ports: OpenPorts, feed: Feed, last: int) -> FeedStatus:
    """As `look`. If this feed cannot be inspected (a missing extra, for example), only its own status has the error."""
    try:
        return look(open_ports, feed, last)
    except SluiceError as stopped:
        return FeedStatus(feed.name, (), (), None, stopped, feed.window.length, ())


def look(open_ports: OpenPorts, feed: Feed, last: int) -> FeedStatus:
    """The feed's status. If Kafka does not answer, the ledger's part alone; Kafka's error is kept, not raised."""
    from sluice.pipelines.ledger import Ledger

    with open_ports(feed) as edges:
        return look_through(edges, feed, Ledger(edges.lake, feed.name, edges.clock), last)


def look_through(edges: Ports, feed: Feed, ledger: Ledger, last: int) -> FeedStatus:
    """As `look`, through edges that are open."""
    from sluice.pipelines.batch.survey import start_not_used, survey
    from sluice.pipelines.ledger import State
    from sluice.pipelines.planning.held_back import unstable_partitions
    from sluice.pipelines.planning.origins import check_cluster
    from sluice.pipelines.status.outlook import look_ahead

    reading = _FeedReading(State())
    try:
        reading.state = ledger.read()
        reading.committed = dict(reading.state.commits)
        check_cluster(reading.state, edges.cluster.cluster_id(), feed.name)
        result = survey(feed, edges, ledger)
        reading.state, reading.error = result.state, result.refusals[0].error if result.refusals else None
        reading.start_not_used = start_not_used(feed, result)
        reading.committed = {k: c.offset for k in result.partitions if (c := result.committed.get(k.tp))}
        reading.partitions = result.partitions
        waiting = [p.tp for p in unstable_partitions(result.partitions.values())]
        reading.holders = edges.cluster.open_transactions(waiting) if waiting else {}
        reading.outlook = look_ahead(feed, ledger, result.state, edges.cluster, result.partitions, edges.clock())
    except SluiceError as stopped:
        reading.error = stopped
    return _status(feed, edges, ledger, reading, last)


@dataclass(slots=True)
class _FeedReading:
    """The findings about a feed, as far as the look got."""

    state: State
    committed: Mapping[Key, int] = field(default_factory=dict)
    partitions: Mapping[Key, PartitionState] = field(default_factory=dict)
    holders: Mapping[TopicPartition, OpenTransaction] = field(default_factory=dict)
    outlook: Outlook | None = None
    error: SluiceError | None = None
    start_not_used: str = ""


def _status(feed: Feed, edges: Ports, ledger: Ledger, reading: _FeedReading, last: int) -> FeedStatus:
    from sluice.pipelines.publishing import owners

    state = reading.state
    keys = sorted({*reading.partitions, *state.known()})
    heartbeats = {
        b.id: edges.clock() - at for b in state.live() if (at := edges.liveness.last_heartbeat(b.owner)) is not None
    }
    verdicts = owners.judge_batches(edges.liveness, state.live(), watch=False)
    dead = [b for b in state.live() if verdicts[b.id].dead]
    refused = _refused_batches(feed, edges, ledger, reading, dead)
    return FeedStatus(
        feed=feed.name,
        partitions=tuple(_partition(reading, k) for k in keys),
        live=state.live(),
        last=next((ledger.recall(b) for b in state.batches.newest_first() if not b.merges), None),
        error=reading.error,
        length=feed.window.length,
        windows=_windows(feed, edges, ledger, reading, last, dead),
        outlook=reading.outlook,
        losses=_losses(feed, reading.outlook),
        held=_held_back(feed, reading, edges.clock()),
        heartbeats=heartbeats,
        met={b.id: owners.met(feed.name, b, verdicts[b.id]) for b in state.live()},
        refused=refused,
        start_not_used=reading.start_not_used,
    )


def _refused_batches(
    feed: Feed, edges: Ports, ledger: Ledger, reading: _FeedReading, dead: Sequence[Batch]
) -> Mapping[int, BatchRefused]:
    """The refused batches, judged as the next run would judge them. If the lake fails, its error is kept."""
    from sluice.pipelines.quarantine.held import refusals_of_staged

    try:
        return refusals_of_staged(feed, ledger, reading.state, edges.lake, {b.id for b in dead})
    except SluiceError as stopped:
        reading.error = reading.error or stopped
        return {}


def _windows(
    feed: Feed, edges: Ports, ledger: Ledger, reading: _FeedReading, last: int, dead: Sequence[Batch]
) -> tuple[WindowStanding, ...]:
    from sluice.pipelines.status import strip

    state, now = reading.state, edges.clock()
    windows = strip.last_windows(state, feed.window, now, last)
    ends = {k: p.last_stable_offset for k, p in reading.partitions.items()}
    return strip.standings(
        state, feed.window, windows, now, strip.outside_facts(ledger, state, ends, reading.holders, dead)
    )


def _losses(feed: Feed, outlook: Outlook | None) -> tuple[SluiceError, ...]:
    """Owed offsets that are gone, for which a run would refuse."""
    from sluice.pipelines.planning.origins import out_of_range

    lost = outlook.lost if outlook else ()
    return tuple(e for o in lost if (e := out_of_range(o.lost[0].start, o.key, o.partition, feed.name)))


def _held_back(feed: Feed, reading: _FeedReading, now: int) -> tuple[HeldBack, ...]:
    from sluice.pipelines.planning.held_back import held_back

    broker = reading.outlook.broker if reading.outlook else BrokerConfig()
    return held_back(feed, reading.partitions.values(), reading.holders, broker, now)


def _partition(reading: _FeedReading, key: Key) -> PartitionStatus:
    state, p, committed = reading.state, reading.partitions.get(key), reading.committed.get(key)
    end = p.last_stable_offset if p else None
    unstable = p.high_watermark - p.last_stable_offset if p else 0
    if key not in state.origins:
        return PartitionStatus(key, None, None, committed, end, (), unstable=unstable)
    frontier = state.frontier(key)
    above = tuple((r.start, r.end) for r in state.accounted(key) if r.start > frontier)
    age = reading.outlook.ages().get(key) if reading.outlook else None
    return PartitionStatus(key, state.origins[key].offset, frontier, committed, end, above, age, unstable)
