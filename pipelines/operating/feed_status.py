"""The status of a feed in its ledger, its group and Kafka, as `sluice status` and `sluice metrics` show it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sluice.pipelines.errors import BatchRefused, SluiceError
from sluice.pipelines.model.kafka import (
    BrokerConfig,
    Key,
    OpenTransaction,
    PartitionState,
    Range,
    TopicPartition,
    subtract,
)
from sluice.pipelines.model.receipts import EngineUse, Met, Verdict
from sluice.pipelines.status.window_state import WindowStanding
from sluice.pipelines.util.documents import Derived, Flat, Internal
from sluice.pipelines.util.units import show_duration

if TYPE_CHECKING:
    from sluice.pipelines.batch.survey import Survey
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import WindowSettings
    from sluice.pipelines.ledger import Batch, Ledger, State
    from sluice.pipelines.maintenance.expiry import Hold
    from sluice.pipelines.operating.findings import Finding
    from sluice.pipelines.planning.held_back import HeldBack
    from sluice.pipelines.ports import Lake, Ports
    from sluice.pipelines.status.outlook import Outlook


OpenPorts = Callable[["Feed"], AbstractContextManager["Ports"]]


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition: `frontier` is None before its first plan, `last_stable_offset` when Kafka did not
    answer.

    `age` (ms) is that of the oldest pending record, None if unknown. `unstable` counts the offsets above the last
    stable offset, which open transactions hold.
    """

    key: Flat[Key]
    origin: int | None
    frontier: int | None
    committed: int | None
    last_stable_offset: int | None
    landed_above_frontier: tuple[Range, ...]
    age: Internal[int | None] = None
    unstable: int = 0

    @property
    def lag_seconds(self) -> Derived[float | None]:
        """The age of the oldest pending record; 0 if none is pending."""
        return 0.0 if self.lag == 0 else None if self.age is None else self.age / 1000

    @property
    def lag(self) -> Derived[int | None]:
        """Stable offsets that are not accounted for."""
        if self.last_stable_offset is None or self.frontier is None:
            return None
        stable = Range(self.frontier, max(self.frontier, self.last_stable_offset))
        return sum(r.span for r in subtract(stable, self.landed_above_frontier))


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """A live batch, the time since its owner's last sign, and the verdict on its run.

    `refused` is the reason why a dead run did not publish it; `ways` are commands and their effects on the batch.
    """

    batch: Flat[Batch]
    heartbeat_seconds: float | None
    refused: BatchRefused | None
    verdict: Verdict
    ways: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One feed. `error` is the reason why Kafka's side is missing or refused; then there is no `outlook`.

    `settings` cut its `windows`. `losses` are pending offsets that are gone from Kafka, `held_back` are those that open
    transactions hold back. By live batch, `met` has the state of its run, `heartbeats` the time (ms) since its
    owner's last sign, and `refused` the reason why a dead run did not publish it. `start_not_used` is the reason why
    the first run will not begin as `start` says. `engine` runs the tasks of the next batch. `findings` are all of
    these problems and more, with remedies.
    """

    feed: str
    partitions: tuple[PartitionStatus, ...]
    live: Internal[tuple[Batch, ...]]
    last_batch: Batch | None
    error: SluiceError | None
    settings: Internal[WindowSettings]
    windows: tuple[WindowStanding, ...]
    outlook: Outlook | None = None
    losses: tuple[SluiceError, ...] = ()
    held_back: tuple[HeldBack, ...] = ()
    heartbeats: Internal[Mapping[int, int]] = field(default_factory=dict)
    met: Internal[Mapping[int, Met]] = field(default_factory=dict)
    refused: Internal[Mapping[int, BatchRefused]] = field(default_factory=dict)
    start_not_used: str = ""
    engine: EngineUse | None = None
    findings: tuple[Finding, ...] = ()
    holds: tuple[Hold, ...] = ()

    @property
    def window(self) -> Derived[str]:
        return show_duration(self.settings.length)

    @property
    def timezone(self) -> Derived[str | None]:
        return self.settings.timezone

    @property
    def live_batches(self) -> Derived[tuple[LiveBatch, ...]]:
        return tuple(
            LiveBatch(
                b,
                self.heartbeats[b.id] / 1000 if b.id in self.heartbeats else None,
                self.refused.get(b.id),
                self.met[b.id].verdict,
                self.met[b.id].ways,
            )
            for b in self.live
        )

    @property
    def lag(self) -> Derived[int | None]:
        lags = [p.lag for p in self.partitions]
        return None if None in lags or self.error else sum(lag or 0 for lag in lags)

    @property
    def uncommitted(self) -> Derived[int]:
        """Offsets below the frontier that the group has not committed."""
        return sum(max(0, p.frontier - (p.committed or p.origin or 0)) for p in self.partitions if p.frontier)


def try_read_status(open_ports: OpenPorts, feed: Feed, last: int) -> FeedStatus:
    """As `read_status`, but an error that keeps it from the feed (a missing extra) is the status's, and not raised."""
    try:
        return read_status(open_ports, feed, last)
    except SluiceError as error:
        from sluice.pipelines.operating.findings import explain_error

        findings = tuple(explain_error(error))
        return FeedStatus(feed.name, (), (), None, error, feed.window, (), findings=findings)


def read_status(open_ports: OpenPorts, feed: Feed, last: int) -> FeedStatus:
    """Returns the feed's status with its `last` windows. An error of Kafka is part of it, and not raised."""
    from sluice.pipelines.ledger import Ledger

    with open_ports(feed) as ports:
        return read_status_through(ports, feed, Ledger(ports.lake, feed.stored, ports.clock), last)


def read_status_through(ports: Ports, feed: Feed, ledger: Ledger, chosen: int | Sequence[int]) -> FeedStatus:
    """As `read_status`, through open ports, with this number of newest windows or these windows (their starts, ms)."""
    from sluice.pipelines.batch.survey import start_not_used, take_survey
    from sluice.pipelines.ledger import State
    from sluice.pipelines.operating.findings import explain_error, list_findings
    from sluice.pipelines.planning.held_back import find_unstable
    from sluice.pipelines.planning.origins import check_cluster
    from sluice.pipelines.publishing.lost_entries import check_near
    from sluice.pipelines.status.outlook import look_ahead

    # An error ends the reading; the status shows all that was read up to it.
    reading = _FeedReading(State())
    try:
        reading.state = ledger.read()
        reading.committed = dict(reading.state.commits)
        check_cluster(reading.state, ports.cluster.cluster_id(), feed.name)
        check_near(ledger, ports.lake, feed)
        result = take_survey(feed, ports, ledger)
        reading.survey = result
        reading.state, reading.error = result.state, result.refusals[0].error if result.refusals else None
        reading.start_not_used = start_not_used(feed, result)
        reading.committed = {k: c.offset for k in result.partitions if (c := result.committed.get(k.tp))}
        reading.partitions = result.partitions
        # Open transactions keep partitions unstable; Kafka names their producers.
        waiting = [p.tp for p in find_unstable(result.partitions.values())]
        reading.holders = ports.cluster.open_transactions(waiting) if waiting else {}
        reading.outlook = look_ahead(feed, ledger, result.state, ports.cluster, result.partitions, ports.clock())
    except SluiceError as error:
        reading.error, reading.survey = error, None
    status = _status(feed, ports, ledger, reading, chosen)
    try:
        # Findings read more than the status, and their error must not hide it.
        findings = list_findings(feed, ports, ledger, reading.state, reading.survey, status)
    except SluiceError as error:
        findings = (*explain_error(error), *explain_error(status.error))
        return replace(status, error=status.error or error, findings=findings)
    return replace(status, findings=findings)


def read_standing(
    feed: Feed, ports: Ports, window: int, held_at: Mapping[TopicPartition, int | None]
) -> WindowStanding:
    """Returns the state of a window (its start, ms) by the ledger alone. `held_at`: where open transactions hold it."""
    from sluice.pipelines.ledger import Ledger
    from sluice.pipelines.status.strip import OutsideFacts, standing

    state = Ledger(ports.lake, feed.stored, ports.clock).read()
    ends = {k: at for k in state.current.values() if (at := held_at.get(k.tp)) is not None}
    return standing(state, feed.window, window, ports.clock(), OutsideFacts(last_stable_offsets=ends))


def list_ledgers_without_files(
    open_lake: Callable[[Feed], Lake], feeds: Iterable[Feed], names: Collection[str]
) -> dict[str, list[str]]:
    """Returns by lake of the feeds its ledgers that are not among `names`. A lake that does not answer has none."""
    from sluice.pipelines.ledger.log import list_feeds_without_files

    out = dict[str, list[str]]()
    for feed in {f.lake: f for f in feeds}.values():
        with suppress(SluiceError):
            out[str(feed.lake)] = list_feeds_without_files(open_lake(feed), names)
    return {lake: others for lake, others in out.items() if others}


@dataclass(frozen=True, slots=True)
class WatchResult:
    """One feed's findings, severe ones first, its outlook (None: it is unknown), and its status with the newest
    windows, if requested."""

    findings: tuple[Finding, ...]
    outlook: Outlook | None = None
    status: FeedStatus | None = None


def watch(ports: Ports, feed: Feed, ledger: Ledger, last: int = 0) -> WatchResult:
    """Returns the findings about a feed. Raises the error that passes by itself, such as KafkaUnavailable."""
    from sluice.pipelines.errors import is_transient

    status = read_status_through(ports, feed, ledger, last or ())
    if status.error and is_transient(status.error):
        raise status.error
    return WatchResult(status.findings, status.outlook, status)


def build_failed_status(feed: Feed, ledger: Ledger, now: int, last: int, error: SluiceError) -> FeedStatus:
    """Returns the status after a failed run, from the ledger alone: Kafka may be unreachable."""
    from sluice.pipelines.operating.findings import Finding
    from sluice.pipelines.status import strip

    state = ledger.read()
    outside = strip.outside_facts(ledger, state, {}, {}, ())
    windows = strip.standings(state, feed.window, strip.last_windows(state, feed.window, now, last), now, outside)
    finding = Finding("failed", error.message, error.remedy, severe=True)
    return FeedStatus(feed.name, (), (), None, error, feed.window, windows, findings=(finding,))


@dataclass(slots=True)
class _FeedReading:
    """The values of a feed that were read before an error."""

    state: State
    committed: Mapping[Key, int] = field(default_factory=dict)
    partitions: Mapping[Key, PartitionState] = field(default_factory=dict)
    holders: Mapping[TopicPartition, OpenTransaction] = field(default_factory=dict)
    outlook: Outlook | None = None
    error: SluiceError | None = None
    start_not_used: str = ""
    survey: Survey | None = None


def _status(feed: Feed, ports: Ports, ledger: Ledger, reading: _FeedReading, chosen: int | Sequence[int]) -> FeedStatus:
    from sluice.pipelines.maintenance.expiry import list_holds
    from sluice.pipelines.publishing import publish

    state = reading.state
    keys = sorted({*reading.partitions, *state.known()})
    heartbeats = {
        b.id: ports.clock() - at for b in state.live() if (at := ports.liveness.last_heartbeat(b.owner)) is not None
    }
    verdicts = publish.judge_batches(ports.liveness, state.live(), watch=False)
    dead = [b for b in state.live() if verdicts[b.id].dead]
    refused = _refused_batches(feed, ports, ledger, reading, dead)
    return FeedStatus(
        feed=feed.name,
        partitions=tuple(_partition(reading, k) for k in keys),
        live=state.live(),
        last_batch=next((ledger.recall(b) for b in state.batches.newest_first() if not b.merges), None),
        error=reading.error,
        settings=feed.window,
        windows=_windows(feed, ports, ledger, reading, chosen, dead),
        outlook=reading.outlook,
        losses=_losses(feed, reading.outlook),
        held_back=_held_back(feed, reading, ports.clock()),
        heartbeats=heartbeats,
        met={b.id: publish.report_met(feed.name, b, verdicts[b.id]) for b in state.live()},
        refused=refused,
        start_not_used=reading.start_not_used,
        engine=ports.engine.describe(),
        holds=list_holds(ledger, state, feed.window),
    )


def _refused_batches(
    feed: Feed, ports: Ports, ledger: Ledger, reading: _FeedReading, dead: Sequence[Batch]
) -> Mapping[int, BatchRefused]:
    """The refused batches, judged as the next run would judge them. If the lake fails, its error is kept."""
    if not dead:
        return {}
    from sluice.pipelines.quarantine.listing import refusals_of_staged  # late: it needs Arrow

    try:
        return refusals_of_staged(feed, ledger, reading.state, ports.lake, {b.id for b in dead})
    except SluiceError as error:
        reading.error = reading.error or error
        return {}


def _windows(
    feed: Feed, ports: Ports, ledger: Ledger, reading: _FeedReading, chosen: int | Sequence[int], dead: Sequence[Batch]
) -> tuple[WindowStanding, ...]:
    from sluice.pipelines.status import strip

    state, now = reading.state, ports.clock()
    windows = strip.last_windows(state, feed.window, now, chosen) if isinstance(chosen, int) else chosen
    ends = {k: p.last_stable_offset for k, p in reading.partitions.items()}
    return strip.standings(
        state, feed.window, windows, now, strip.outside_facts(ledger, state, ends, reading.holders, dead)
    )


def _losses(feed: Feed, outlook: Outlook | None) -> tuple[SluiceError, ...]:
    """Returns the errors of pending offsets that are gone: a run would refuse them."""
    from sluice.pipelines.planning.origins import explain_out_of_range

    lost = outlook.lost if outlook else ()
    return tuple(e for o in lost if (e := explain_out_of_range(o.lost[0].start, o.key, o.partition, feed.name)))


def _held_back(feed: Feed, reading: _FeedReading, now: int) -> tuple[HeldBack, ...]:
    from sluice.pipelines.planning.held_back import list_held_back

    broker = reading.outlook.broker if reading.outlook else BrokerConfig()
    return list_held_back(feed, reading.partitions.values(), reading.holders, broker, now)


def _partition(reading: _FeedReading, key: Key) -> PartitionStatus:
    state, p, committed = reading.state, reading.partitions.get(key), reading.committed.get(key)
    end = p.last_stable_offset if p else None
    unstable = p.high_watermark - p.last_stable_offset if p else 0
    if key not in state.origins:
        return PartitionStatus(key, None, None, committed, end, (), unstable=unstable)
    frontier = state.frontier(key)
    above = tuple(r for r in state.list_accounted(key) if r.start > frontier)
    age = reading.outlook.ages().get(key) if reading.outlook else None
    return PartitionStatus(key, state.origins[key].offset, frontier, committed, end, above, age, unstable)
