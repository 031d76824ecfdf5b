"""The stages in sequence: one request, from the feed's topics to visible Parquet files.

    survey (topics, positions) → plan → pin → execute → prove → publish → roll forward

Guarantees: a plan is pinned in the ledger before anything is read. One live owner works on it. Proven ranges are
published even if other partitions fail; those stay pending and are reported. `commit` moves the offsets.

A long catch-up is a sequence of batches, the oldest windows first: readers see its first windows soon, and ledger
entries stay of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sluice.pipelines.batch.carry_out import carry_out, explain_impossible, finish_others, take_over
from sluice.pipelines.batch.result import (
    BatchResult,
    Landed,
    LandingRun,
    Skip,
    describe_first_failure,
    has_registry_failure,
    was_lost_since_plan,
)
from sluice.pipelines.batch.survey import (
    Survey,
    build_sizing,
    check_sound,
    find_boundaries_due,
    find_held_back,
    find_receipts_replaced,
    list_partitions,
    open_ledger,
    plan_for,
    refuse_losses,
    start_not_used,
    take_survey,
    with_holders,
)
from sluice.pipelines.errors import BatchRefused, Failed, IncarnationChanged, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import CommitMode, OnLoss
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.ledger.entries import (
    KeyRange,
    LossEntry,
    OriginEntry,
    PlanEntry,
)
from sluice.pipelines.ledger.marks import check_marks, check_owner
from sluice.pipelines.model.kafka import Key, Range, subtract, union
from sluice.pipelines.model.plans import OffsetRange, Plan, Request
from sluice.pipelines.model.receipts import Fate, Owner, Progress, Reporter, Verdict
from sluice.pipelines.planning import origins, schema_changes, windows
from sluice.pipelines.planning import plan as planning
from sluice.pipelines.planning.assignment import Sizing
from sluice.pipelines.planning.origins import Refusal
from sluice.pipelines.planning.plan import PendingRanges
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import lost_entries, publish
from sluice.pipelines.publishing.manifest import write_manifests
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.util.units import many

MAX_ROUNDS = 6
"""How often one call plans again after taking over a dead run's batch or losing records to Kafka's retention."""


@dataclass(frozen=True)
class LandingOptions:
    """Options of a call. `ledger` is the feed's, if the caller has opened it for the owner's run. `skip` skips offsets
    first. `enough` is called after each batch: True leaves the rest to another run."""

    ledger: Ledger | None = None
    skip: Skip | None = None
    enough: Callable[[], bool] = lambda: False


def land(
    feed: Feed,
    ports: Ports,
    request: Request,
    owner: Owner,
    report: Reporter,
    options: LandingOptions = LandingOptions(),
) -> Landed:
    """Land the request's pending offsets. A partial result is returned, not raised: see `Landed.check`.

    Takes over and finishes a conflicting batch if its run is known to be dead; a
    catch-up of the whole feed finishes every such batch. Each is reported. Of several requested windows, those within
    their grace period are not landed. Raises WindowOpen if all are, PlanBusy if the conflicting batch is alive,
    UsageError for a retired feed, and any error that prevents planning.
    """
    if feed.retired:
        remedy = f"let it land again: sluice feeds retire {feed.name} --undo --yes"
        raise UsageError(f"feed {feed.name} is retired, and lands nothing", remedy=remedy)
    request, open_windows = windows.split_settled(request, feed.window, ports.clock())
    with ports.liveness.send_heartbeats(owner):
        ledger = options.ledger or open_ledger(feed, ports, owner.run)
        run = LandingRun(feed, ports, ledger, request, owner, report)
        _check_whole(run)
        report(Progress("roll forward"))
        roll_forward(ledger, ports.lake, feed.stored)
        skipped = _skip(run, options.skip) if options.skip else ()
        return replace(_land(run, options.enough), skipped=skipped, open_windows=open_windows)


def _check_whole(run: LandingRun) -> None:
    """Compare the ledger with committed offsets and visible parts, before any write.

    Raises EntriesLost if they name lost entries, and ForeignMarks if committed offsets name another ledger.
    """
    feed, ports, ledger = run.feed, run.ports, run.ledger
    committed = ports.group.fetch_committed([k.tp for k in ledger.read().known()])
    state = check_marks(ledger, ledger.read(), committed)
    check_owner(ledger, state, committed, commits=feed.commit is not CommitMode.NONE)
    lost_entries.check_near(ledger, ports.lake, feed)


def _land(run: LandingRun, enough: Callable[[], bool]) -> Landed:
    feed, ports, ledger, request = run.feed, run.ports, run.ledger, run.request
    done: list[BatchResult] = []
    losses: list[KeyRange] = []
    complete: list[int] = []
    refusals: tuple[Refusal, ...] = ()
    ends: dict[Key, int] = {}
    rounds = Rounds(feed, ports)
    for_others, reads, stopped, begins = 0, 0, False, ""
    refusal: BatchRefused | None = None
    while for_others < MAX_ROUNDS:
        run.report(Progress("plan", note=rounds.note))
        ports.group.own(lambda: list_partitions(feed, ports.cluster), ports.engine.cancel)
        # A catch-up ends where the log ended when it began: else it would chase producers.
        snapshot = _limit_to_first_ends(take_survey(feed, ports, ledger), ends)
        check_sound(snapshot, request)
        shape = schema_changes.declare(feed, ledger)
        begins = begins or start_not_used(feed, snapshot)
        _pin_origins(ledger, snapshot)
        reads += _pin_boundaries(run, snapshot)
        losses += _accept_losses(run, snapshot)
        # The plan is in the ledger before a record is read, so that two runs never read the same offsets.
        batch, dead, refusals = _pin_plan(run, snapshot, rounds)
        if batch is None:
            break
        try:
            result = _carry_out_as_owner(replace(run, report=rounds.telling(run.report)), shape, batch)
        except BatchRefused as error:
            if request.replace:
                raise
            refusal = refusal or error
            if dead:
                publish.tell(run.report, publish.report_met(feed.name, batch, dead, refused=True))
            rounds.leave(batch.plan or ledger.plan(batch.id))  # it reserves its own windows; the others land
            ports.cluster.forget()
            continue
        done.append(_conclude_take_over(run, batch, dead, result) if dead else result)
        # Offsets of a dead run's batch were finished first; this run's own request is still to be planned.
        if _must_plan_again(run, result, taken_over=dead is not None):
            for_others += 1
            rounds.give_back(result)
        elif dead or not rounds.goes_on(result) or (stopped := enough()):
            break
        # After each batch, not only at the end: readers of complete windows need not wait for a long catch-up.
        complete += write_manifests(ledger, ports.lake, feed.stored, feed.window)
        ports.cluster.forget()
    # Batches of dead runs that reserve other offsets were in no way here; left alone, they would keep windows partial.
    done += finish_others(run, shape)
    state = ledger.read()
    complete += write_manifests(ledger, ports.lake, feed.stored, feed.window)
    refused, on_hold = with_holders(run, refusals, snapshot), find_held_back(run, snapshot)
    results = tuple(done), refused, tuple(losses), tuple(complete), state.frontiers()
    landed = Landed(*results, held_back=on_hold, stopped=stopped, start_not_used=begins, boundary_reads=reads)
    landed = replace(landed, refused=refusal, overridden=schema_changes.describe_overridden(feed, state))
    return landed if landed.failures else replace(landed, left=_count_offsets_left(run, state, snapshot, stopped))


def _carry_out_as_owner(run: LandingRun, shape: Shape, batch: Batch) -> BatchResult:
    """Carry out the batch. Raises CommitFenced if tasks were cancelled because others may own the partitions."""
    try:
        return carry_out(run, shape, batch)
    except Failed:
        run.ports.group.own(tuple, lambda: None)
        raise


def _must_plan_again(run: LandingRun, result: BatchResult, *, taken_over: bool) -> bool:
    """Returns whether to plan again: a batch of another request was finished first, or Kafka changed in between."""
    if has_registry_failure(result):
        return False
    mine = run.request.replace and result.plan.request == run.request
    if result.number is None:
        return not mine and bool(explain_impossible(run.feed, result.plan.request, result.failures))
    return (taken_over and not mine) or was_lost_since_plan(run.feed, result)


def _conclude_take_over(run: LandingRun, batch: Batch, dead: Verdict, result: BatchResult) -> BatchResult:
    """Returns the result of a dead run's conflicting batch.

    If it could never be carried out, it is reported as given up, and its failures count for this run only if this run
    requested the same replacement.
    """
    if run.ledger.read().batches[batch.id].status is not BatchStatus.ABANDONED:
        return result
    publish.tell(
        run.report,
        publish.report_met(run.feed.name, batch, dead, Fate.GIVEN_UP, describe_first_failure(result.failures)),
    )
    return result if run.request.replace and result.plan.request == run.request else replace(result, foreign=True)


def _count_pending_windows(run: LandingRun, state: State) -> int:
    """Returns the number of closed windows that the request has pending."""
    request = run.request
    pending = windows.list_pending_windows(state, run.feed.window, run.ports.clock())
    return sum((request.window or 0) <= w and (request.until is None or w < request.until) for w in pending)


def _count_offsets_left(run: LandingRun, state: State, snapshot: Survey, stopped: bool) -> int:
    """Returns the offsets still pending because the feed's limits or the caller ended the run."""
    feed, request = run.feed, run.request
    if request.replace or ((feed.limits.records, feed.limits.bytes) == (None, None) and not stopped):
        return 0
    pending, _ = planning.find_pending_ranges(request, state, snapshot.partitions, feed.window)
    return sum(o.span for o in pending)


def _limit_to_first_ends(snapshot: Survey, ends: dict[Key, int]) -> Survey:
    """Limit later rounds to the ends of the first one: a busy topic must not prolong a run indefinitely."""
    for key, p in snapshot.partitions.items():
        ends.setdefault(key, p.last_stable_offset)
    partitions = {
        k: replace(p, last_stable_offset=min(p.last_stable_offset, ends[k])) for k, p in snapshot.partitions.items()
    }
    return replace(snapshot, partitions=partitions)


def _on_newer_state(snapshot: Survey, state: State, request: Request) -> Survey:
    """Returns the survey on a newer state, without partitions whose incarnation has been replaced since.

    Raises as `check_sound` does.
    """
    partitions = {k: p for k, p in snapshot.partitions.items() if state.current.get(k.tp) == k}
    left_behind = tuple(Refusal(k.tp, _build_incarnation_error(k)) for k in snapshot.partitions if k not in partitions)
    still = replace(snapshot, partitions=partitions, refusals=snapshot.refusals + left_behind)
    check_sound(still, request)
    return still


def _build_incarnation_error(key: Key) -> IncarnationChanged:
    return IncarnationChanged(
        f"{key}: another life of this log was accepted during planning",
        remedy="nothing of it was landed; the next run continues in the new one",
        topic=key.topic,
        partition=key.partition,
    )


def _pin_origins(ledger: Ledger, snapshot: Survey) -> None:
    def decide(state: State) -> OriginEntry | None:
        items = tuple(i for i in snapshot.new_origins if i.key.tp not in state.current)
        return OriginEntry(items=items) if items else None

    ledger.append(decide)


def _pin_boundaries(run: LandingRun, snapshot: Survey) -> int:
    """Pin every boundary that has passed, each clamped again on the state just below its entry. Returns the reads of
    the logs that decided them."""
    entries = find_boundaries_due(run, run.ledger.read(), snapshot)
    for entry in entries:
        run.ledger.append(partial(windows.clamp_boundaries, entry=entry))
    return sum(e.reads for e in entries)


def _skip(run: LandingRun, skip: Skip) -> tuple[KeyRange, ...]:
    """Skip offsets from the frontiers to the given time, except landed ones and those of live plans."""
    ports, ledger, only = run.ports, run.ledger, run.request.only
    snapshot = take_survey(run.feed, ports, ledger)
    _pin_origins(ledger, snapshot)
    planning.check_only(only, {k.tp: k for k in snapshot.partitions})
    partitions = {k: p for k, p in snapshot.partitions.items() if not only or k.tp in only}
    ends = {k: p.last_stable_offset for k, p in partitions.items()}
    if skip.to is not None:
        hits = ports.cluster.offsets_at({k.tp: skip.to for k in partitions}, run.feed.window.max_skew)
        ends = {k: min(end, hit.offset) if (hit := hits.get(k.tp)) else end for k, end in ends.items()}
    return origins.skip_to(ledger, ends, skip.reason)


def _accept_losses(run: LandingRun, snapshot: Survey) -> tuple[KeyRange, ...]:
    """With `on_loss: accept`, record offsets below the log start as lost if they are neither landed nor reserved."""
    feed, request = run.feed, run.request
    if feed.policies.on_loss is not OnLoss.ACCEPT:
        return ()

    def decide(state: State) -> LossEntry | None:
        pending, _ = planning.find_pending_ranges(
            request, state, _on_newer_state(snapshot, state, request).partitions, feed.window
        )
        lost_ranges = [
            KeyRange(key=o.key, range=r)
            for o in pending
            for lost in o.lost
            for r in subtract(lost, state.list_reserved(o.key))
        ]
        return (
            LossEntry(ranges=tuple(lost_ranges), reason="below the log start (on_loss: accept)")
            if lost_ranges
            else None
        )

    appended = run.ledger.append(decide)
    return appended.entry.ranges if appended and isinstance(appended.entry, LossEntry) else ()


def _pin_plan(
    run: LandingRun, snapshot: Survey, rounds: Rounds
) -> tuple[Batch | None, Verdict | None, tuple[Refusal, ...]]:
    """Returns the batch to carry out and the refusals.

    The batch is a new plan in the ledger, or a conflicting batch that was taken over, with the verdict that its run is
    dead.
    """
    feed, ledger, request = run.feed, run.ledger, run.request
    refusals: tuple[Refusal, ...] = ()
    in_the_way: tuple[Batch, OffsetRange] | None = None
    free: Sequence[PendingRanges] = ()
    sizes = rounds.sizes

    def decide(state: State) -> PlanEntry | None:
        nonlocal refusals, in_the_way, free
        # Called again on each newer fold, until the entry is the next one: all answers are of that fold.
        current = _on_newer_state(snapshot, state, request)
        replaced = find_receipts_replaced(run, current, state)
        pending, refused = planning.find_pending_ranges(
            request, state, current.partitions, feed.window, replaced, feed.name
        )
        losses = refuse_losses(feed, pending)
        refusals = current.refusals + refused + losses
        lost = {r.tp for r in losses}
        free = rounds.exclude_tried([o for o in pending if o.key.tp not in lost])
        in_the_way = next(planning.find_overlapping(state, request, free), None)
        if in_the_way and request.replace and in_the_way[0].request == request:
            refusals = current.refusals  # its own plan exists and will report lost ranges itself
        if in_the_way:
            return None
        plan = plan_for(run, snapshot.cluster_id, free, state, replaced, sizes)
        return PlanEntry(plan=plan, hash=plan.hash, owner=run.owner) if plan else None

    # From here on the ranges are reserved. A crash leaves a live batch without parts, which a later run takes over.
    appended = ledger.append(decide)
    if appended is not None and isinstance(appended.entry, PlanEntry):
        rounds.record_plan(appended.entry.plan, free, sizes, _count_pending_windows(run, appended.state))
        return appended.state.batches[appended.number], None, refusals
    if in_the_way is None:
        return None, None, refusals
    batch, s = in_the_way
    run.report(Progress("wait", note=f"for {batch.owner.describe()}, which holds batch {batch.id}"))
    # The batch that reserves these offsets is left alone while its run may live; a dead run's is taken over.
    verdicts = publish.judge_batches(run.ports.liveness, [batch])
    if not verdicts[batch.id].dead:
        raise publish.build_busy_error(feed.name, batch, s, verdicts[batch.id])
    # A rewrite only moves rows that are safe in the old files: it is given up; records come first.
    if batch.rewrites:
        publish.give_up(ledger, [batch], verdicts, run.report)
        return _pin_plan(run, snapshot, rounds)
    if not take_over(run, batch):
        raise publish.build_busy_error(feed.name, ledger.read().batches[batch.id], s, publish.NEW)
    publish.tell(run.report, publish.report_met(feed.name, batch, verdicts[batch.id], Fate.TAKEN_OVER))
    return batch, verdicts[batch.id], refusals


BATCH_RANGES, RANGES_PER_CORE = 500, 4
"""The usual number of offset ranges in a batch: a publish entry of half a megabyte. A batch has more if one window or
RANGES_PER_CORE per core of the engine need them."""


@dataclass
class Rounds:
    """The progress of one call: the part of the run's limits that its batches used, and offset ranges not to retry."""

    feed: Feed
    ports: Ports
    taken: list[Plan] = field(default_factory=list)
    failed: dict[Key, tuple[Range, ...]] = field(default_factory=dict)
    total: int = 0
    """The pending offsets at the first plan."""
    rest: bool = False
    """Whether the last plan left a rest to the next."""
    windows: int = 0
    """The number of pending windows without those of the last plan."""
    refused_windows: int = 0
    """The number of refused windows, the oldest pending ones, that the next batches hold one by one."""

    @property
    def sizes(self) -> Sizing:
        """The sizes of the next plan, within the rest of the run's limits."""
        sizes = build_sizing(self.feed, self.ports)
        return replace(
            sizes,
            max_records=sizes.max_records and max(sizes.max_records - sum(p.offsets for p in self.taken), 1),
            max_bytes=sizes.max_bytes and max(sizes.max_bytes - sum(p.estimated_bytes for p in self.taken), 1),
            max_ranges=1 if self.refused_windows else max(BATCH_RANGES, RANGES_PER_CORE * sizes.parallelism),
        )

    def exclude_tried(self, pending: Iterable[PendingRanges]) -> list[PendingRanges]:
        """Returns the pending ranges without the offset ranges that failed in this call: none is read twice."""
        remaining = (
            replace(o, ranges=tuple(x for r in o.ranges for x in subtract(r, self.failed.get(o.key, ()))))
            for o in pending
        )
        return [o for o in remaining if o.ranges or o.lost]

    def record_plan(self, plan: Plan, pending: Sequence[PendingRanges], sizes: Sizing, windows: int) -> None:
        """Record the plan of the next batch, cut from `pending` by `sizes`, of `windows` pending windows."""
        self.taken.append(plan)
        self.refused_windows = max(self.refused_windows - 1, 0)
        span, share = sum(o.span for o in pending), planning.share_within(pending, sizes)
        self.total = self.total or int(span * share)
        self.windows = windows - len({s.window for s in plan.offset_ranges} - {None})
        self.rest = plan.offsets < (span if share == 1.0 else int(span * share) - len(pending))  # limits round down

    def goes_on(self, result: BatchResult) -> bool:
        """Record the result. Returns whether another batch follows."""
        for f in result.failures:
            self.failed[f.offset_range.key] = union((*self.failed.get(f.offset_range.key, ()), f.offset_range.range))
        if result.refused_windows:
            self.refused_windows = result.refused_windows
            self.taken = [p for p in self.taken if p != result.plan]  # its refused windows are planned again
        more = self.rest or self.refused_windows > 0
        return more and result.number is not None and not has_registry_failure(result)

    def leave(self, plan: Plan) -> None:
        """Leave the ranges of a refused batch to it."""
        for s in plan.offset_ranges:
            self.failed[s.key] = union((*self.failed.get(s.key, ()), s.range))

    def give_back(self, result: BatchResult) -> None:
        """Do not count a batch of which nothing landed: another plan takes its place."""
        if result.number is None:
            self.taken = [p for p in self.taken if p != result.plan]

    @property
    def note(self) -> str:
        return f"batch {len(self.taken) + 1}, {many(self.windows, 'window')} to go" if self.taken else ""

    def telling(self, report: Reporter) -> Reporter:
        """Returns a reporter of the progress of all batches, if there are several."""
        before = sum(p.offsets for p in self.taken[:-1])
        if not before and not self.rest:
            return report
        return lambda p: report(replace(p, done=before + p.done, total=max(self.total, p.total)) if p.total else p)
