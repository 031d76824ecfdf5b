"""The stages in sequence: one request, from the feed's topics to visible Parquet. It alone knows two stages.

    survey (topics, positions) → plan → pin → execute → prove → publish → roll forward

Guarantee: a plan is pinned in the ledger before anything is read; one live owner works on it; what is proven is
published even when other partitions fail, and those stay owed and are named. Committing is `commit`'s business.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Thread
from time import monotonic

from sluice.pipelines import evolution, held_back, layout, lost, owners, windows
from sluice.pipelines import plan as planning
from sluice.pipelines import positions as pos
from sluice.pipelines.commit import check_marks
from sluice.pipelines.contract.decision import check_contract
from sluice.pipelines.contract.results import Result
from sluice.pipelines.drift import check_drift
from sluice.pipelines.errors import (
    BatchIncomplete,
    BatchRefused,
    CorruptBatch,
    IncarnationChanged,
    KafkaUnavailable,
    LogTruncated,
    OffsetsLost,
    Refused,
    SluiceError,
    UnsupportedBatch,
    UsageError,
    WindowHeld,
)
from sluice.pipelines.feed import Feed, Layout, OnLoss, PublishPolicy
from sluice.pipelines.held_back import HeldBack
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.ledger.entries import (
    BoundaryEntry,
    KeyRange,
    LossEntry,
    OriginEntry,
    OriginItem,
    OwnEntry,
    PlanEntry,
)
from sluice.pipelines.manifest import receipts_meeting, write_manifests
from sluice.pipelines.plan import Owed, Sizing
from sluice.pipelines.ports import Clock, Cluster, Engine, Group, Job, Lake, Liveness, Progress, Reporter
from sluice.pipelines.positions import Committed, Refusal
from sluice.pipelines.proof import prove
from sluice.pipelines.publish import abandon, check_owner, publish, roll_forward
from sluice.pipelines.quarantine import check_quarantine
from sluice.pipelines.ranges import subtract
from sluice.pipelines.shape import Shape
from sluice.pipelines.topics import match
from sluice.pipelines.values import (
    Counts,
    Fate,
    Key,
    Met,
    Outcome,
    Owner,
    PartitionState,
    Plan,
    Receipt,
    Request,
    RequestKind,
    Slice,
    SliceFailure,
    TopicPartition,
    Verdict,
)

MAX_ROUNDS = 6
"""Plans that one call carries out at most: batches of dead runs taken over, and its own."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The outside of one feed."""

    cluster: Cluster
    group: Group
    lake: Lake
    engine: Engine
    liveness: Liveness
    clock: Clock
    wiring: object
    """What executors build their own edges from."""
    parallelism: int = 2


@dataclass(frozen=True, slots=True)
class Skip:
    """What is owed up to a time (ms; None: up to the stable end) is to be passed over, and why."""

    to: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """Kafka and the ledger side by side, at one moment."""

    cluster_id: str
    state: State
    partitions: Mapping[Key, PartitionState]
    committed: Committed
    new_began: tuple[OriginItem, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """What a run would do, with nothing touched. `plan` is None when nothing is owed; `met` are the batches of dead
    runs that it would come upon, and what it would do about each."""

    survey: Survey
    owed: tuple[Owed, ...]
    refusals: tuple[Refusal, ...]
    plan: Plan | None
    blocked: SluiceError | None = None
    """The batch in the way that is at work, if there is one."""
    met: tuple[Met, ...] = ()
    held: tuple[HeldBack, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch carried out. `failures` are slices that stay owed; `number` is its publish entry, if any; `results` are
    what it said as a whole to its contract.

    `foreign`: another run's, that was finished for its own sake, or given up: its failures are told and are not this
    run's. `refused`: why nothing of such a one was published.
    """

    batch: int
    plan: Plan
    receipts: tuple[Receipt, ...]
    failures: tuple[SliceFailure, ...]
    number: int | None
    results: tuple[Result, ...] = ()
    foreign: bool = False
    refused: str = ""

    @property
    def counts(self) -> Counts:
        return sum((r.counts for r in self.receipts), Counts())

    @property
    def bytes(self) -> int:
        return sum(p.bytes for r in self.receipts for p in r.parts)

    @property
    def adopted(self) -> int:
        """Slices that an earlier attempt had finished."""
        return sum(r.adopted for r in self.receipts)


@dataclass(frozen=True, slots=True)
class Landed:
    """What one call landed; no batches: nothing was owed."""

    batches: tuple[BatchResult, ...]
    refusals: tuple[Refusal, ...]
    losses: tuple[KeyRange, ...]
    windows: tuple[int, ...] = ()
    """Windows (their starts, ms) that are complete since this call."""
    frontiers: Mapping[Key, int] = field(default_factory=dict)
    left: int = 0
    """Offsets that were asked for and are still owed because the feed's limits end a run before."""
    skipped: tuple[KeyRange, ...] = ()
    held: tuple[HeldBack, ...] = ()
    """What open transactions keep from being landed."""

    @property
    def failures(self) -> tuple[SliceFailure, ...]:
        """The slices that failed; not those of which Kafka lost records on the way, where this call accepted that."""
        return tuple(f for b in self.batches if not b.foreign for f in b.failures if not self._accepted(f))

    def _accepted(self, f: SliceFailure) -> bool:
        lost = (x.range for x in self.losses if x.key == f.slice.key)
        return f.error == OffsetsLost.__name__ and any(r.meets(f.slice.range) for r in lost)

    def check(self) -> None:
        """Raises BatchIncomplete (or the refusal, when there is only that) if anything asked for was not landed."""
        if self.failures:
            raise _incomplete(self)
        if len(self.refusals) == 1:
            raise self.refusals[0].error
        if self.refusals:
            raise _refused(self)


def open_ledger(feed: Feed, edges: Edges, run: str = "") -> Ledger:
    """The feed's ledger; refuses another cluster than the one it was begun with."""
    ledger = Ledger(edges.lake, feed.name, edges.clock, run, edges.cluster.cluster_id())
    pos.check_cluster(ledger.read(), edges.cluster.cluster_id(), feed.name)
    return ledger


def survey(feed: Feed, edges: Edges, ledger: Ledger) -> Survey:
    """Ask Kafka for everything that a plan rests on, and set aside the partitions that changed under the ledger.

    Raises EntriesLost when committed offsets know of entries that the ledger does not have.
    """
    topics = match(feed.topics, edges.cluster.topics())
    found = edges.cluster.partitions(topics, feed.isolation)
    committed = edges.group.committed([p.tp for p in found])
    state = check_marks(ledger, ledger.read(), committed)
    if refusals := changed(feed.name, state, found, edges.cluster):
        # Others may have landed more between the look at Kafka and that at the ledger: Kafka is asked once more.
        found = edges.cluster.partitions(topics, feed.isolation)
        refusals = changed(feed.name, state, found, edges.cluster)
    sound = [p for p in found if p.tp not in {r.tp for r in refusals}]
    keyed = {pos.key_of(state, p): p for p in sound}
    began = pos.resolve_origins(state, sound, committed, feed.start, edges.cluster, edges.clock)
    began = opened(feed, edges, state, keyed, began)
    return Survey(edges.cluster.cluster_id(), state, keyed, committed, began, refusals)


def opened(
    feed: Feed, edges: Edges, state: State, partitions: Mapping[Key, PartitionState], began: tuple[OriginItem, ...]
) -> tuple[OriginItem, ...]:
    """The new origins with their first windows; a partition that comes later opens at the newest boundary."""
    if state.boundary_times:
        return tuple(o.model_copy(update={"opens": state.boundary_times[-1]}) for o in began)
    return windows.opening(edges.cluster, partitions, began, feed.window, edges.clock()) if began else ()


def changed(feed: str, state: State, found: Sequence[PartitionState], cluster: Cluster) -> tuple[Refusal, ...]:
    """The partitions that are not the logs that the ledger knows any more."""
    known = {p.tp: state.epochs[k][1] for p in found if (k := state.current.get(p.tp)) in state.epochs}
    ends = cluster.epoch_ends({tp: epoch for tp, epoch in known.items() if epoch >= 0})
    return tuple(r for p in found if (r := pos.changed(state, p, ends, feed)))


def unlike(feed: Feed, edges: Edges, state: State) -> frozenset[TopicPartition]:
    """The feed's partitions that are not the logs that the ledger knows any more, as Kafka is now."""
    found = edges.cluster.partitions(match(feed.topics, edges.cluster.topics()), feed.isolation)
    return frozenset(r.tp for r in changed(feed.name, state, found, edges.cluster))


def preview(feed: Feed, edges: Edges, request: Request) -> Preview:
    """The dry run: what `land` would plan now. Writes nothing, anywhere."""
    ledger = open_ledger(feed, edges)
    lost.check_near(ledger, edges.lake, feed)
    found = survey(feed, edges, ledger)
    lost.check_names(ledger, found.state, edges.lake.list(layout.staging_root(feed.name)))
    check_sound(found, request)
    evolution.check_one_table(feed, evolution.effective_shape(feed, found.state), found.state)
    state = _with_origins(found)
    state = _with_boundaries(feed, edges, state, found.partitions, request)
    replaced = receipts_replaced(feed, ledger, found, request, state)
    owed, refused = planning.owed(request, state, found.partitions, feed.window, replaced)
    plan = plan_for(feed, edges, found, request, owed, state, replaced)
    losses = losses_refused(feed, owed)
    free = [o for o in owed if o.key.tp not in {r.tp for r in losses}]
    blocked, met = _company(feed, edges, state, request, free)
    goes_on = request.replace and any(m.request == request and m.fate is Fate.TAKEN_OVER for m in met)
    refusals = with_holders(feed, edges, found.refusals + (() if goes_on else refused + losses), found)
    return Preview(found, owed, refusals, plan, blocked, met, held_of(feed, edges, found, request))


def _with_origins(found: Survey) -> State:
    return found.state.extended([OriginEntry(items=found.new_origins)]) if found.new_origins else found.state


def _with_boundaries(
    feed: Feed, edges: Edges, state: State, partitions: Mapping[Key, PartitionState], request: Request
) -> State:
    """The state with the boundaries that a run would pin, in memory alone. Raises UsageError."""
    for entry in unpinned(feed, edges, state, partitions, request):
        pinned = windows.clamped(state, entry)
        state = state.extended([pinned]) if pinned else state
    return state


def unpinned(
    feed: Feed, edges: Edges, state: State, partitions: Mapping[Key, PartitionState], request: Request
) -> list[BoundaryEntry]:
    """The boundaries that have passed, and those of a window asked for before the first one. Raises UsageError."""
    if request.replace and request.kind is RequestKind.CATCH_UP:
        raise UsageError("what is to be landed anew?", remedy="name windows, times or offsets beside --replace")
    due = windows.due(state, edges.cluster, edges.clock, partitions, feed.window)
    if request.window is None:
        return due
    last = (request.until or request.window + feed.window.length) - feed.window.length
    if last < request.window:
        raise UsageError("the windows end before they begin", remedy="the end is the first window that is left out")
    for window in (request.window, last):
        windows.check_window(window, feed.window, edges.clock())
    before = windows.before(state, edges.cluster, edges.clock, partitions, feed.window, request.window)
    return [*before, *due]


def receipts_replaced(feed: Feed, ledger: Ledger, found: Survey, request: Request, state: State) -> Sequence[Receipt]:
    """What a request that replaces would replace: the receipts that count of what it asks for."""
    if not request.replace:
        return ()
    named = planning.asked(request, state, found.partitions, feed.window)
    return receipts_meeting(ledger, state, list(named))


def _company(
    feed: Feed, edges: Edges, state: State, request: Request, owed: Sequence[Owed]
) -> tuple[SluiceError | None, tuple[Met, ...]]:
    """The batch in the way that is at work, and what a run would do about those of dead runs."""
    verdicts = owners.judged(edges.liveness, state.live())
    dead = {i for i, verdict in verdicts.items() if verdict.dead}
    found = list(planning.overlapping(state, request, owed))
    blocked = next((x for x in found if x[0].id not in dead), None)
    in_the_way = {batch.id for batch, _ in found}
    fates = ((b, fate_of(feed, edges, b, request, in_the_way)) for b in state.live() if b.id in dead)
    met = tuple(owners.met(feed.name, b, verdicts[b.id], *fate) for b, fate in fates)
    return (owners.busy(feed.name, *blocked, verdicts[blocked[0].id]) if blocked else None), met


def fate_of(
    feed: Feed, edges: Edges, batch: Batch, request: Request, in_the_way: Container[int] = ()
) -> tuple[Fate, str]:
    """What a run does about a batch whose run is dead, and why.

    One that lands is finished by whoever needs its ranges, and by the next catch-up, since what it reads may go from
    Kafka; but for one that ended with a word why it is not published: that waits for somebody.
    """
    if batch.rewrites:
        return Fate.GIVEN_UP, owners.AS_THEY_WERE
    if batch.id in in_the_way:
        return Fate.TAKEN_OVER, ""
    if request.kind is not RequestKind.CATCH_UP or request.only:
        return Fate.LEFT, "this run was asked for other things; a catch-up finishes it"
    if _was_refused(feed, edges, batch):
        return Fate.LEFT, "its run ended, and said in the batch's report why it is not published"
    return Fate.TAKEN_OVER, ""


def _was_refused(feed: Feed, edges: Edges, batch: Batch) -> bool:
    """Whether the run was not killed, but ended with a report on a batch that it could not publish."""
    page = layout.batch_page_path(feed.name, batch.id, batch.owner.token)
    return edges.liveness.last_beat(batch.owner) is None and edges.lake.size(page) is not None


def plan_for(
    feed: Feed,
    edges: Edges,
    found: Survey,
    request: Request,
    owed: Sequence[Owed],
    state: State,
    replaced: Sequence[Receipt],
) -> Plan | None:
    sizes, cluster = sizing(feed, edges), found.cluster_id
    return planning.build(feed.name, cluster, request, feed.isolation, owed, sizes, state, feed.window, replaced)


def sizing(feed: Feed, edges: Edges) -> Sizing:
    """How this feed's plans are cut."""
    return Sizing(
        slice_bytes=feed.limits.slice_bytes,
        task_bytes=feed.limits.task_bytes,
        parallelism=edges.parallelism,
        max_tasks=feed.limits.max_tasks,
        max_records=feed.limits.records,
        max_bytes=feed.limits.bytes,
        by_time=feed.window.length if feed.landing.layout is Layout.RECORD_TIME else 0,
    )


def land(
    feed: Feed, edges: Edges, request: Request, owner: Owner, report: Reporter, skip: Skip | None = None
) -> Landed:
    """Land what the request still owes. Partial results are returned, not raised: see `Landed.check`.

    Takes over and finishes a batch in the way whose run is known dead; a catch-up of the whole feed finishes every
    such batch, and each is told to `report`. Raises PlanBusy for one in the way that is at work, and whatever keeps a
    plan from being made at all.
    """
    with edges.liveness.beat(owner):
        ledger = open_ledger(feed, edges, owner.run)
        _check_whole(feed, edges, ledger)
        report(Progress("roll forward"))
        roll_forward(ledger, edges.lake, feed.name)
        skipped = _skip(feed, edges, ledger, skip, request.only) if skip else ()
        return replace(_land(feed, edges, ledger, request, owner, report), skipped=skipped)


def _check_whole(feed: Feed, edges: Edges, ledger: Ledger) -> None:
    """Raises EntriesLost before anything is written, where committed offsets or visible parts know of more entries."""
    committed = edges.group.committed([k.tp for k in ledger.read().known()])
    check_marks(ledger, ledger.read(), committed)
    lost.check_near(ledger, edges.lake, feed)


def _land(feed: Feed, edges: Edges, ledger: Ledger, request: Request, owner: Owner, report: Reporter) -> Landed:
    done: list[BatchResult] = []
    losses: list[KeyRange] = []
    refusals: tuple[Refusal, ...] = ()
    ends: dict[Key, int] = {}
    for _ in range(MAX_ROUNDS):
        report(Progress("plan"))
        found = _bounded(survey(feed, edges, ledger), ends)
        check_sound(found, request)
        shape = evolution.declare(feed, ledger)
        _pin_origins(ledger, found)
        _pin_boundaries(feed, edges, ledger, found, request)
        losses += _accept_losses(feed, ledger, found, request)
        batch, dead, refusals = _pinned(feed, edges, ledger, found, request, owner, report)
        if batch is None:
            break
        result = carry_out(feed, shape, edges, ledger, batch, owner, report)
        done.append(_taken_over(ledger, batch, dead, result, request, report) if dead else result)
        if not _goes_on(feed, result, request, taken_over=dead is not None):
            break
    done += finish_others(feed, shape, edges, ledger, request, owner, report)
    state = ledger.read()
    complete = write_manifests(ledger, edges.lake, feed.name, feed.window)
    refused, held = with_holders(feed, edges, refusals, found), held_of(feed, edges, found, request)
    landed = Landed(tuple(done), refused, tuple(losses), complete, state.frontiers(), held=held)
    return landed if landed.failures else replace(landed, left=_left(feed, state, found, request))


def _goes_on(feed: Feed, result: BatchResult, request: Request, *, taken_over: bool) -> bool:
    """Whether another plan may be due: a batch of another request was finished first, or Kafka changed on the way."""
    mine = request.replace and result.plan.request == request
    if result.number is None:
        return not mine and bool(never_possible(feed, result.plan.request, result.failures))
    return (taken_over and not mine) or lost_on_the_way(feed, result)


def _taken_over(
    ledger: Ledger, batch: Batch, dead: Verdict, result: BatchResult, request: Request, report: Reporter
) -> BatchResult:
    """What came of a dead run's batch that was in the way. One that could never be carried out is told as given up;
    what failed of it is planned anew, or refused, unless this very replacing was asked for."""
    if ledger.read().batches[batch.id].status is not BatchStatus.ABANDONED:
        return result
    owners.tell(report, owners.met(ledger.feed, batch, dead, Fate.GIVEN_UP, first_failure(result.failures)))
    return result if request.replace and result.plan.request == request else replace(result, foreign=True)


def first_failure(failures: Sequence[SliceFailure]) -> str:
    more = f" (and {len(failures) - 1} more slices)" if len(failures) > 1 else ""
    return f"{failures[0].slice}: {failures[0].message}{more}" if failures else ""


def finish_others(
    feed: Feed, shape: Shape, edges: Edges, ledger: Ledger, request: Request, owner: Owner, report: Reporter
) -> list[BatchResult]:
    """What is done about batches of dead runs that were not in the way. What fails of it does not fail this run."""
    done: list[BatchResult] = []
    live = [b for b in ledger.read().live() if b.owner.token != owner.token]
    verdicts = owners.judged(edges.liveness, live)
    for batch in (b for b in live if verdicts[b.id].dead):
        fate, why = fate_of(feed, edges, batch, request)
        if fate is Fate.GIVEN_UP:
            owners.give_up(ledger, [batch], verdicts, report)
        elif fate is Fate.LEFT:
            owners.tell(report, owners.met(feed.name, batch, verdicts[batch.id], fate, why))
        else:
            done += _finish(feed, shape, edges, ledger, batch, verdicts[batch.id], owner, report)
    return done


def _finish(
    feed: Feed,
    shape: Shape,
    edges: Edges,
    ledger: Ledger,
    batch: Batch,
    verdict: Verdict,
    owner: Owner,
    report: Reporter,
) -> list[BatchResult]:
    """Take a dead run's batch over and carry it out; none when another has it by now."""
    tell = partial(owners.met, feed.name, batch, verdict)
    if not take_over(ledger, batch, owner):
        return []
    owners.tell(report, tell(Fate.TAKEN_OVER))
    try:
        result = carry_out(feed, shape, edges, ledger, batch, owner, report)
    except SluiceError as error:
        owners.tell(report, tell(Fate.LEFT, error.message))
        plan = batch.plan or ledger.plan(batch.id)
        refused = isinstance(error, BatchRefused)
        return [BatchResult(batch.id, plan, (), (), None, foreign=True, refused=error.message)] if refused else []
    if result.failures:
        fate = _BECAME[ledger.read().batches[batch.id].status]
        owners.tell(report, tell(fate, first_failure(result.failures)))
    return [replace(result, foreign=True)]


_BECAME = {
    BatchStatus.PUBLISHED: Fate.TAKEN_OVER,
    BatchStatus.ABANDONED: Fate.GIVEN_UP,
    BatchStatus.PLANNED: Fate.LEFT,
}


def _left(feed: Feed, state: State, found: Survey, request: Request) -> int:
    if request.replace or (feed.limits.records, feed.limits.bytes) == (None, None):
        return 0
    owed, _ = planning.owed(request, state, found.partitions, feed.window)
    return sum(o.span for o in owed)


def check_sound(found: Survey, request: Request) -> None:
    """Raises the refusal of a partition that is asked for by name."""
    named = {*request.only, *(TopicPartition(r.topic, r.partition) for r in request.ranges)}
    for refusal in found.refusals:
        if refusal.tp in named:
            raise refusal.error


def _bounded(found: Survey, ends: dict[Key, int]) -> Survey:
    """Later rounds reach no further than the first one saw, so that a busy topic does not keep a run for ever."""
    for key, p in found.partitions.items():
        ends.setdefault(key, p.stable_end)
    partitions = {k: replace(p, stable_end=min(p.stable_end, ends[k])) for k, p in found.partitions.items()}
    return replace(found, partitions=partitions)


def _still(found: Survey, state: State, request: Request) -> Survey:
    """The survey on a newer state: a partition whose life was left meanwhile takes no part. Raises what `check_sound`
    does."""
    partitions = {k: p for k, p in found.partitions.items() if state.current.get(k.tp) == k}
    left = tuple(Refusal(k.tp, _left_behind(k)) for k in found.partitions if k not in partitions)
    still = replace(found, partitions=partitions, refusals=found.refusals + left)
    check_sound(still, request)
    return still


def _left_behind(key: Key) -> IncarnationChanged:
    return IncarnationChanged(
        f"{key}: somebody accepted another life of this log while it was planned",
        remedy="nothing of it was landed; the next run goes on in the new one",
        topic=key.topic,
        partition=key.partition,
    )


def _pin_origins(ledger: Ledger, found: Survey) -> None:
    def decide(state: State) -> OriginEntry | None:
        items = tuple(i for i in found.new_origins if i.key.tp not in state.current)
        return OriginEntry(items=items) if items else None

    ledger.append(decide)


def _pin_boundaries(feed: Feed, edges: Edges, ledger: Ledger, found: Survey, request: Request) -> None:
    """Pin every boundary that has passed; each is clamped again on the very state that it is put on."""
    for entry in unpinned(feed, edges, ledger.read(), found.partitions, request):
        ledger.append(partial(windows.clamped, entry=entry))


def losses_refused(feed: Feed, owed: Sequence[Owed]) -> tuple[Refusal, ...]:
    if feed.policies.on_loss is OnLoss.ACCEPT:
        return ()
    errors = [(o.key.tp, pos.out_of_range(r.start, o.key, o.partition, feed.name)) for o in owed for r in o.lost[:1]]
    return tuple(Refusal(tp, error) for tp, error in errors if error)


def with_holders(feed: Feed, edges: Edges, refusals: Sequence[Refusal], found: Survey) -> tuple[Refusal, ...]:
    """The refusals; those of held windows name the transaction, as far as the cluster tells, and the way out."""
    held = {r.tp: r.error for r in refusals if isinstance(r.error, WindowHeld)}
    partitions = (p for p in found.partitions.values() if p.tp in held)
    holders = held_back.by_partition(held_back.look(feed, edges.cluster, partitions, edges.clock()))
    named = {tp: planning.held(tp, e.end or 0, e.start or 0, holders[tp]) for tp, e in held.items() if tp in holders}
    return tuple(Refusal(r.tp, named.get(r.tp, r.error)) for r in refusals)


def held_of(feed: Feed, edges: Edges, found: Survey, request: Request) -> tuple[HeldBack, ...]:
    """What open transactions hold of the partitions that are asked for. What was held is looked at again, for a run may
    have taken long. It only explains: where Kafka does not answer by now, there is none."""
    meant = {*request.only, *(TopicPartition(r.topic, r.partition) for r in request.ranges)}
    tps = {p.tp for p in held_back.held(found.partitions.values()) if not meant or p.tp in meant}
    with suppress(KafkaUnavailable):
        now = edges.cluster.partitions({tp.topic for tp in tps}, feed.isolation) if tps else ()
        return held_back.look(feed, edges.cluster, [p for p in now if p.tp in tps], edges.clock())
    return ()


def _skip(feed: Feed, edges: Edges, ledger: Ledger, skip: Skip, only: Sequence[TopicPartition]) -> tuple[KeyRange, ...]:
    """Pass over what lies between the frontiers and there, but for what has landed or a live plan holds."""
    found = survey(feed, edges, ledger)
    _pin_origins(ledger, found)
    planning.check_only(only, {k.tp: k for k in found.partitions})
    partitions = {k: p for k, p in found.partitions.items() if not only or k.tp in only}
    ends = {k: p.stable_end for k, p in partitions.items()}
    if skip.to is not None:
        hits = edges.cluster.offsets_at({k.tp: skip.to for k in partitions})
        ends = {k: min(end, hit.offset) if (hit := hits.get(k.tp)) else end for k, end in ends.items()}
    return pos.skip_to(ledger, ends, skip.reason)


def _accept_losses(feed: Feed, ledger: Ledger, found: Survey, request: Request) -> tuple[KeyRange, ...]:
    """Under `on_loss: accept`, what fell below the log start, neither landed nor reserved, becomes a loss."""
    if feed.policies.on_loss is not OnLoss.ACCEPT:
        return ()

    def decide(state: State) -> LossEntry | None:
        owed, _ = planning.owed(request, state, _still(found, state, request).partitions, feed.window)
        gone = [
            KeyRange(key=o.key, range=r) for o in owed for lost in o.lost for r in subtract(lost, state.reserved(o.key))
        ]
        return LossEntry(ranges=tuple(gone), reason="below the log start (on_loss: accept)") if gone else None

    appended = ledger.append(decide)
    return appended.entry.ranges if appended and isinstance(appended.entry, LossEntry) else ()


def _pinned(
    feed: Feed, edges: Edges, ledger: Ledger, found: Survey, request: Request, owner: Owner, report: Reporter
) -> tuple[Batch | None, Verdict | None, tuple[Refusal, ...]]:
    """The batch to carry out: a new plan in the ledger, or one in the way that was taken over, with the evidence that
    its run is dead."""
    refusals: tuple[Refusal, ...] = ()
    in_the_way: tuple[Batch, Slice] | None = None

    def decide(state: State) -> PlanEntry | None:
        nonlocal refusals, in_the_way
        known = _still(found, state, request)
        replaced = receipts_replaced(feed, ledger, known, request, state)
        owed, refused = planning.owed(request, state, known.partitions, feed.window, replaced)
        losses = losses_refused(feed, owed)
        refusals = known.refusals + refused + losses
        lost = {r.tp for r in losses}
        free = [o for o in owed if o.key.tp not in lost]
        in_the_way = next(planning.overlapping(state, request, free), None)
        if in_the_way and request.replace and in_the_way[0].request == request:
            refusals = known.refusals  # it was planned, and says itself what it cannot read any more
        if in_the_way:
            return None
        plan = plan_for(feed, edges, found, request, free, state, replaced)
        return PlanEntry(plan=plan, hash=plan.hash, owner=owner) if plan else None

    appended = ledger.append(decide)
    if appended is not None:
        return appended.state.batches[appended.number], None, refusals
    if in_the_way is None:
        return None, None, refusals
    batch, s = in_the_way
    report(Progress("wait", note=f"is {batch.owner.describe()}, which holds batch {batch.id}, still at work?"))
    verdicts = owners.judged(edges.liveness, [batch])
    if not verdicts[batch.id].dead:
        raise owners.busy(feed.name, batch, s, verdicts[batch.id])
    if batch.rewrites:
        owners.give_up(ledger, [batch], verdicts, report)
        return _pinned(feed, edges, ledger, found, request, owner, report)
    if not take_over(ledger, batch, owner):
        raise owners.busy(feed.name, ledger.read().batches[batch.id], s, owners.NEW)
    owners.tell(report, owners.met(feed.name, batch, verdicts[batch.id], Fate.TAKEN_OVER))
    return batch, verdicts[batch.id], refusals


def take_over(ledger: Ledger, batch: Batch, owner: Owner) -> bool:
    """Whether the batch is ours now, whose run is known dead. Cleans nothing: finished slices are adopted."""

    def decide(state: State) -> OwnEntry | None:
        held = state.batches[batch.id]
        same = held.status is BatchStatus.PLANNED and held.owner.token == batch.owner.token
        return OwnEntry(batch=batch.id, owner=owner) if same else None

    return ledger.append(decide) is not None


def carry_out(
    feed: Feed, shape: Shape, edges: Edges, ledger: Ledger, batch: Batch, owner: Owner, report: Reporter
) -> BatchResult:
    plan = batch.plan or ledger.plan(batch.id)
    report(Progress("start Spark"))
    edges.engine.start()
    with watched(edges.lake, feed.name, batch.id, plan, report):
        job = Job(plan, batch.id, owner.token, edges.wiring, shape)
        outcomes = edges.engine.run(job, [t.index for t in plan.tasks])
    check_owner(ledger, batch.id, owner)
    report(Progress("prove", plan.span, plan.span))
    receipts, failures = prove(plan, batch.id, _known(plan, outcomes), edges.lake)
    check_quarantine(receipts, feed.policies, edges.lake)
    check_drift(receipts, feed.policies)
    whole = feed.publish is PublishPolicy.ALL_OR_NOTHING or plan.request.replace
    if not receipts or (failures and whole):
        if why := never_possible(feed, plan.request, failures):
            abandon(ledger, batch.id, why, owner)
        return BatchResult(batch.id, plan, tuple(receipts), tuple(failures), None)
    results = check_contract(shape, ledger, batch, receipts, edges.lake, len(failures))
    report(Progress("publish", plan.span, plan.span))
    publish(ledger, batch.id, owner, receipts, failures, results)
    evolution.evolve(feed, ledger, receipts)
    number = ledger.read().batches[batch.id].published
    roll_forward(ledger, edges.lake, feed.name)
    return BatchResult(batch.id, plan, tuple(receipts), tuple(failures), number, results)


def _known(plan: Plan, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of this plan's slices only, and a failure for each slice that no task spoke of."""
    planned = set(plan.slices)
    known = [o for o in outcomes if o.slice in planned]
    silent = planned - {o.slice for o in known}
    missing = (SliceFailure(s, "Failed", "its task ended without an outcome") for s in sorted(silent, key=str))
    return [*known, *missing]


@contextmanager
def watched(lake: Lake, feed: str, batch: int, plan: Plan, report: Reporter) -> Iterator[None]:
    """Report progress from the receipts that tasks leave in staging: about once a second, less often where there are so
    many that looking takes its time."""
    spans = {layout.slice_name(s): s.span for s in plan.slices}
    total, stop = sum(spans.values()), Event()

    def look() -> None:
        report(Progress("land", 0, total))
        pause = 1.0
        while not stop.wait(pause):
            began = monotonic()
            report(Progress("land", _finished(lake, feed, batch, spans), total))
            pause = max(1.0, 10 * (monotonic() - began))

    thread = Thread(target=look, name="sluice-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _finished(lake: Lake, feed: str, batch: int, spans: Mapping[str, int]) -> int:
    names = {layout.receipt_slice(p) for p in lake.list(layout.staging_folder(feed, batch))}
    return sum(spans.get(n, 0) for n in names if n)


def never_possible(feed: Feed, request: Request, failures: Sequence[SliceFailure]) -> str:
    """Why a plan of which nothing was published can never be carried out, if so: else it would be taken over for ever.

    What is lost waits, reserved, until somebody accepts it, unless the feed does.
    """
    errors = {f.error for f in failures}
    if LogTruncated.__name__ in errors:
        return "the log does not hold any more what was to be landed: it was truncated since"
    if OffsetsLost.__name__ in errors and (request.replace or feed.policies.on_loss is OnLoss.ACCEPT):
        return "Kafka does not hold any more what was to be landed"
    return ""


def lost_on_the_way(feed: Feed, result: BatchResult) -> bool:
    """Retention overtook us between plan and fetch, and the feed accepts that: plan again with the loss named."""
    lost = any(f.error == OffsetsLost.__name__ for f in result.failures)
    return lost and feed.policies.on_loss is OnLoss.ACCEPT


def _incomplete(landed: Landed) -> BatchIncomplete:
    failures, refusals = landed.failures, landed.refusals
    lines = [f"{f.slice}: {f.message}" for f in failures[:5]] + [f"{r.tp}: {r.error.message}" for r in refusals[:5]]
    more = len(failures) + len(refusals) - len(lines)
    published = any(b.number is not None for b in landed.batches)
    head = f"{len(failures)} slices failed; " + ("the others are published" if published else "nothing was published")
    remedies = sorted({r for f in failures if (r := _remedy(landed.batches[0].plan.feed, f))})
    return BatchIncomplete(
        head + ":\n    " + "\n    ".join(lines) + (f"\n    … and {more} more" if more > 0 else ""),
        remedy="; ".join(remedies[:5]) or "run again: finished slices are adopted, only what is owed is read",
    )


_UNREADABLE = {CorruptBatch.__name__, UnsupportedBatch.__name__}


def _remedy(feed: str, f: SliceFailure) -> str:
    accept = pos.accepting(feed, "corrupt", f" --offsets {f.slice}") if f.error in _UNREADABLE else ""
    return f"{f.remedy}: {accept}" if accept else f.remedy


def _refused(landed: Landed) -> Refused:
    refusals = landed.refusals
    lines = "\n    ".join(r.error.message for r in refusals[:10])
    others = "the others are landed" if landed.batches else "of others nothing is owed"
    return Refused(
        f"{len(refusals)} partitions were refused, {others}:\n    {lines}",
        remedy=refusals[0].error.remedy,
    )
