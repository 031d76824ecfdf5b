"""The inputs of a plan from Kafka and the ledger: partitions, committed offsets, origins, changed logs.

`has_pending` is a quick check whether a catch-up would read anything, before slow components start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from sluice.pipelines.batch.result import Call
from sluice.pipelines.errors import ClockAhead, KafkaUnavailable, SluiceError, UnknownTopic, UsageError, WindowHeld
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode, Layout, OnLoss, StartKind
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import (
    BoundaryEntry,
    OriginItem,
)
from sluice.pipelines.ledger.marks import Committed, check_marks, check_owner
from sluice.pipelines.model.kafka import Key, PartitionState, TopicPartition
from sluice.pipelines.model.plans import Assignor, Plan, Request, RequestKind
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.planning import held_back, origins, windows
from sluice.pipelines.planning import plan as planning
from sluice.pipelines.planning.assignment import Before, Sizing, map_tasks
from sluice.pipelines.planning.held_back import HeldBack
from sluice.pipelines.planning.origins import Refusal, find_key
from sluice.pipelines.planning.plan import PendingRanges
from sluice.pipelines.ports import Cluster, Ports
from sluice.pipelines.publishing.manifest import read_receipts_meeting, with_sharers
from sluice.pipelines.util.units import many, show_instant


@dataclass(frozen=True, slots=True)
class Survey:
    """Kafka and the ledger at one moment. Positions in Kafka were requested at `at` (ms) or later."""

    cluster_id: str
    state: State
    partitions: Mapping[Key, PartitionState]
    committed: Committed
    new_origins: tuple[OriginItem, ...]
    refusals: tuple[Refusal, ...]
    at: int

    def find_new_origin(self, key: Key) -> OriginItem | None:
        """Returns the origin that a run would pin; None if the partition has one, or gets none."""
        return next((i for i in self.new_origins if i.key == key), None)


def open_ledger(feed: Feed, ports: Ports, run: str = "") -> Ledger:
    """Open the feed's ledger. Raises ClusterChanged if it was begun with another cluster."""
    ledger = Ledger(ports.lake, feed.stored, ports.clock, run, ports.cluster.cluster_id())
    origins.check_cluster(ledger.read(), ports.cluster.cluster_id(), feed.name)
    return ledger


def take_survey(feed: Feed, ports: Ports, ledger: Ledger) -> Survey:
    """Request the inputs of a plan from Kafka, and refuse partitions whose log is not the one in the ledger.

    Raises EntriesLost if a committed offset names an entry that the ledger does not have, and ForeignMarks if it names
    another ledger.
    """
    topics = list_topics(feed, ports.cluster)
    now = ports.clock()
    at = now - ports.cluster.get_age()
    if feed.window.last_boundary(at) != feed.window.last_boundary(now):
        ports.cluster.forget()  # a window has closed since: its boundary may lie beyond those positions
        at = now
    partitions = ports.cluster.partitions(topics, feed.isolation)
    committed = ports.group.fetch_committed([p.tp for p in partitions])
    state = check_marks(ledger, ledger.read(), committed)
    check_owner(ledger, state, committed, commits=feed.commit is not CommitMode.NONE)
    if refusals := find_changed_logs(feed.name, state, partitions, ports.cluster):
        # Others may have landed more between our request to Kafka and the read of the ledger: ask Kafka again.
        ports.cluster.forget()
        surveyed = {p.tp for p in partitions}  # a newer one waits for the next survey: its committed offset is not here
        partitions = tuple(p for p in ports.cluster.partitions(topics, feed.isolation) if p.tp in surveyed)
        refusals = find_changed_logs(feed.name, state, partitions, ports.cluster)
    sound = [p for p in partitions if p.tp not in {r.tp for r in refusals}]
    keyed = {origins.find_key(state, p): p for p in sound}
    at = _check_clock(feed, ports.cluster, state, at)
    began = origins.resolve_origins(state, sound, committed, feed, ports.cluster, ports.clock)
    began = with_first_windows(feed, ports.cluster, state, keyed, began, at)
    began = windows.find_cuts(ports.cluster, keyed, began, feed.window.max_skew)
    return Survey(ports.cluster.cluster_id(), state, keyed, committed, began, refusals, at)


_LITTLE = 30_000
"""A lead of this machine's clock (ms) that only delays the end of a window."""


def _check_clock(feed: Feed, cluster: Cluster, state: State, at: int) -> int:
    """Returns the time (ms) up to which boundaries may be pinned: no later than by the brokers' clock, if it is known.

    Raises ClockAhead if this machine's clock would close a window that is open by theirs.
    """
    last = feed.window.last_boundary(at)
    if state.boundary_times and state.boundary_times[-1] >= last:
        return at
    lead = max(cluster.get_clock_lead() or 0, 0)
    if lead <= _LITTLE or feed.window.last_boundary(at - lead) == last:
        return at - lead
    raise ClockAhead(
        f"this machine's clock says {show_instant(at)}, the brokers' about {show_instant(at - lead)}: windows would end"
        f" before {show_instant(last)} that are still open",
        remedy="set this machine's clock (NTP), then run again; if the brokers' is wrong, set theirs. `sluice doctor`"
        " compares them",
    )


def start_not_used(feed: Feed, snapshot: Survey) -> str:
    """Returns a note that `start` is ignored, if the group has committed offsets at the first plan; else empty."""
    begun = [o for o in snapshot.new_origins if o.committed is not None]
    if snapshot.state.origins or not begun or feed.start.kind is StartKind.FAIL:
        return ""
    return (
        f"`start: {feed.start}` is not used in {len(begun)} of {many(len(snapshot.new_origins), 'partition')}: group"
        f" {feed.group} has offsets there from another committer, and feed {feed.name} begins at them\n"
        f"  → to begin at `start`, give the feed a group of its own: `group: NAME` in feeds/{feed.name}.yaml"
    )


def list_topics(feed: Feed, cluster: Cluster) -> tuple[str, ...]:
    """Returns the feed's current topics. Raises UnknownTopic, and NotAuthorized for a named but forbidden one.

    Kafka lists only permitted topics; a request by name tells the two cases apart.
    """
    try:
        return match(feed.topics, cluster.topics())
    except UnknownTopic:
        with suppress(UnknownTopic):
            cluster.partitions(feed.topics.names, feed.isolation)
        raise


def list_partitions(feed: Feed, cluster: Cluster) -> tuple[TopicPartition, ...]:
    """Returns the feed's current partitions. Raises UnknownTopic, NotAuthorized."""
    return tuple(p.tp for p in cluster.partitions(list_topics(feed, cluster), feed.isolation))


def with_first_windows(
    feed: Feed,
    cluster: Cluster,
    state: State,
    partitions: Mapping[Key, PartitionState],
    began: tuple[OriginItem, ...],
    now: int,
) -> tuple[OriginItem, ...]:
    """Returns the new origins with their first windows. A later partition opens at the newest boundary."""
    if state.boundary_times:
        return tuple(o.model_copy(update={"opens": state.boundary_times[-1]}) for o in began)
    return windows.find_opening(cluster, partitions, began, feed.window, now) if began else ()


def find_changed_logs(
    feed: str, state: State, partitions: Sequence[PartitionState], cluster: Cluster
) -> tuple[Refusal, ...]:
    """Returns a refusal for each partition whose log is no longer the one in the ledger."""
    epochs = {p.tp: state.epochs[k][1] for p in partitions if (k := state.current.get(p.tp)) in state.epochs}
    ends = cluster.epoch_ends({tp: epoch for tp, epoch in epochs.items() if epoch >= 0})
    refusals = {p.tp: r for p in partitions if (r := origins.check_incarnation(state, p, ends, feed))}
    others = {p.tp: p for p in partitions if p.tp not in refusals}
    return *refusals.values(), *_find_restored_logs(feed, state, others, cluster)


def _find_restored_logs(
    feed: str, state: State, partitions: Mapping[TopicPartition, PartitionState], cluster: Cluster
) -> list[Refusal]:
    """Returns a refusal for each log with unread records whose last landed batch is now another one.

    Its broker was restored from a copy, and the log has since grown beyond the landed offsets. Compaction changes
    batches, too, so topics with another policy than deletion, or an unknown one, are not compared.
    """
    tails = {
        tp: tail
        for tp, p in partitions.items()
        if (tail := state.tails.get(origins.find_key(state, p))) and p.log_start <= tail.offset < p.high_watermark - 1
    }
    changed = [tp for tp, now in cluster.read_checksums(tails).items() if now != tails[tp].checksum] if tails else []
    policies = cluster.configs({tp.topic for tp in changed}).topics if changed else {}
    unchanging = [tp for tp in changed if (policy := policies.get(tp.topic)) and policy.only_deletes]
    return [origins.refuse_restored_log(partitions[tp], tails[tp], feed) for tp in unchanging]


def find_changed_partitions(feed: Feed, ports: Ports, state: State) -> frozenset[TopicPartition]:
    """Returns the feed's partitions whose current log in Kafka is no longer the one in the ledger."""
    ports.cluster.forget()
    partitions = ports.cluster.partitions(list_topics(feed, ports.cluster), feed.isolation)
    return frozenset(r.tp for r in find_changed_logs(feed.name, state, partitions, ports.cluster))


def find_boundaries_due(call: Call, state: State, snapshot: Survey) -> list[BoundaryEntry]:
    """Returns the boundaries that had passed at the survey, and those of requested windows before the first one.

    One that passed since would be cut to an end of the log from before it, however long this process slept. The
    request's windows have passed their grace period: see `windows.split_settled`. Raises UsageError.
    """
    feed, cluster, request = call.feed, call.ports.cluster, call.request
    partitions = snapshot.partitions
    if request.replace and request.kind is RequestKind.CATCH_UP:
        raise UsageError("--replace without a range", remedy="add --window, --from and --to, or --offsets")
    due = windows.find_due(state, cluster, snapshot.at, partitions, feed.window)
    if request.window is None:
        return due
    windows.check_window(windows.windows_of(request, feed.window)[-1], feed.window, snapshot.at)
    before = windows.find_before(state, cluster, snapshot.at, partitions, feed.window, request.window)
    return [*before, *due]


def find_receipts_replaced(call: Call, snapshot: Survey, state: State) -> Sequence[Receipt]:
    """Returns the receipts that a replacing request replaces: live ones in its ranges, and sharers of their files."""
    if not call.request.replace:
        return ()
    wanted = planning.find_requested_ranges(call.request, state, snapshot.partitions, call.feed.window)
    return with_sharers(call.ledger, state, read_receipts_meeting(call.ledger, state, list(wanted)))


def plan_for(
    call: Call,
    cluster_id: str,
    pending: Sequence[PendingRanges],
    state: State,
    replaced: Sequence[Receipt],
    sizes: Sizing,
) -> Plan | None:
    """Returns the plan that lands `pending`, cut by `sizes`, and replaces `replaced`; None if there is nothing to
    do."""
    feed = call.feed
    if sizes.assignor is Assignor.STICKY:
        sizes = replace(sizes, before=read_tasks_before(call.ledger, state))
    blank = Plan(feed.stored, cluster_id, call.request, feed.isolation, ())
    return planning.build(blank, pending, sizes, state, feed.window, replaced)


def build_sizing(feed: Feed, ports: Ports) -> Sizing:
    """Returns the sizes by which this feed's plans are cut."""
    return Sizing(
        range_bytes=feed.limits.slice_bytes,
        task_bytes=feed.limits.task_bytes,
        parallelism=ports.parallelism,
        max_tasks=feed.limits.max_tasks,
        max_records=feed.limits.records,
        max_bytes=feed.limits.bytes,
        by_time=feed.window.length if feed.landing.layout is Layout.RECORD_TIME else 0,
        assignor=feed.fetch.assignor,
    )


def read_tasks_before(ledger: Ledger, state: State) -> Before:
    """Returns the task of each partition in the newest batch that read from Kafka; empty before the first one."""
    newest = next((b.id for b in state.batches.newest_first() if not b.rewrites), None)
    return {} if newest is None else map_tasks(ledger.plan(newest))


def check_sound(snapshot: Survey, request: Request) -> None:
    """Raises the refusal of a partition that the request names."""
    requested = {*request.only, *(TopicPartition(r.topic, r.partition) for r in request.ranges)}
    for refusal in snapshot.refusals:
        if refusal.tp in requested:
            raise refusal.error


def refuse_losses(feed: Feed, pending: Sequence[PendingRanges]) -> tuple[Refusal, ...]:
    if feed.policies.on_loss is OnLoss.ACCEPT:
        return ()
    errors = [
        (o.key.tp, origins.explain_out_of_range(r.start, o.key, o.partition, feed.name))
        for o in pending
        for r in o.lost[:1]
    ]
    return tuple(Refusal(tp, error) for tp, error in errors if error)


def with_holders(call: Call, refusals: Sequence[Refusal], snapshot: Survey) -> tuple[Refusal, ...]:
    """Returns the refusals. Those of held windows name the transaction, if known, and the remedy."""
    on_hold = {r.tp: r.error for r in refusals if isinstance(r.error, WindowHeld)}
    partitions = (p for p in snapshot.partitions.values() if p.tp in on_hold)
    ports = call.ports
    holders = held_back.by_partition(held_back.look(call.feed, ports.cluster, partitions, ports.clock()))
    explained = {
        tp: planning.build_window_held_error(tp, e.end or 0, e.start or 0, holders[tp])
        for tp, e in on_hold.items()
        if tp in holders
    }
    return tuple(Refusal(r.tp, explained.get(r.tp, r.error)) for r in refusals)


def find_held_back(call: Call, snapshot: Survey) -> tuple[HeldBack, ...]:
    """Returns the offsets that open transactions hold back in the requested partitions.

    Requests them again, because the run may have taken long. Empty if Kafka does not answer: this only explains.
    """
    feed, ports, request = call.feed, call.ports, call.request
    meant = {*request.only, *(TopicPartition(r.topic, r.partition) for r in request.ranges)}
    tps = {p.tp for p in held_back.find_unstable(snapshot.partitions.values()) if not meant or p.tp in meant}
    with suppress(KafkaUnavailable):
        now = ports.cluster.partitions({tp.topic for tp in tps}, feed.isolation) if tps else ()
        return held_back.look(feed, ports.cluster, [p for p in now if p.tp in tps], ports.clock())
    return ()


def has_pending(feed: Feed, ports: Ports) -> bool:
    """False if a catch-up of the feed would find nothing to land, or fails before it reads. Nothing is changed.

    It only helps: a run that turns out to need an engine starts it by itself.
    """
    try:
        state = Ledger(ports.lake, feed.stored, ports.clock).read()
        if state.live():
            return True
        partitions = ports.cluster.partitions(list_topics(feed, ports.cluster), feed.isolation)
    except SluiceError:
        return False
    keyed = {find_key(state, p): p for p in partitions}
    return any(k not in state.origins or state.frontier(k) < p.last_stable_offset for k, p in keyed.items())
