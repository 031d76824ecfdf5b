"""The dry run: the plan that `land` would make now, and its decisions on dead runs' batches. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.pipelines.batch.carry_out import decide_fate
from sluice.pipelines.batch.result import Call
from sluice.pipelines.batch.survey import (
    Survey,
    build_sizing,
    check_sound,
    find_boundaries_due,
    find_held_back,
    find_receipts_replaced,
    open_ledger,
    plan_for,
    read_tasks_before,
    refuse_losses,
    start_not_used,
    take_survey,
    with_holders,
)
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import (
    OriginEntry,
)
from sluice.pipelines.model.kafka import Key, PartitionState, Range
from sluice.pipelines.model.plans import Plan, Request, Task
from sluice.pipelines.model.receipts import Fate, Met
from sluice.pipelines.planning import assignment, schema_changes, windows
from sluice.pipelines.planning import plan as planning
from sluice.pipelines.planning.assignment import Comparison
from sluice.pipelines.planning.held_back import HeldBack
from sluice.pipelines.planning.origins import Refusal
from sluice.pipelines.planning.plan import PendingRanges
from sluice.pipelines.planning.windows import OpenWindows
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import lost_entries, publish
from sluice.pipelines.util.documents import Derived, Flat, Internal


@dataclass(frozen=True, slots=True)
class PreviewedOrigin:
    """The origin of a partition; a `new` one would be pinned by the run."""

    offset: int
    why: str
    new: bool


@dataclass(frozen=True, slots=True)
class PreviewedPartition:
    """One partition. `position` is the next offset to read; `pending` can be read, `lost` is gone from Kafka."""

    state: Flat[PartitionState]
    position: int | None
    origin: PreviewedOrigin | None
    committed: int | None
    pending: tuple[Range, ...]
    lost: tuple[Range, ...]
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class Preview:
    """The effect of a run. `plan` is None if nothing is pending. `other_batches` are those of dead runs with their
    fates."""

    survey: Internal[Survey]
    pending: Internal[tuple[PendingRanges, ...]]
    refusals: tuple[Refusal, ...]
    plan: Flat[Plan | None]
    blocked: SluiceError | None = None
    """The error for a conflicting batch that is alive, if there is one."""
    other_batches: tuple[Met, ...] = ()
    held_back: tuple[HeldBack, ...] = ()
    open_windows: Internal[OpenWindows | None] = None
    start_not_used: str = ""
    """The reason why a run would ignore the feed's `start`; empty if it would not, or if the feed has begun."""
    boundary_reads: int = 0
    """Reads of the logs that decided the boundaries that a run would pin."""
    protection: str = ""
    """How the run would protect rows in another way than those that landed last; empty if it would not."""

    @property
    def cluster(self) -> Derived[str]:
        return self.survey.cluster_id

    @property
    def offsets(self) -> Derived[int]:
        return self.plan.offsets if self.plan else 0

    @property
    def estimated_bytes(self) -> Derived[int]:
        return self.plan.estimated_bytes if self.plan else 0

    @property
    def replaces(self) -> Derived[tuple[str, ...]]:
        return self.plan.replaces if self.plan else ()

    @property
    def tasks(self) -> Derived[tuple[Task, ...]]:
        return self.plan.tasks if self.plan else ()

    @property
    def partitions(self) -> Derived[tuple[PreviewedPartition, ...]]:
        pending = {o.key: o for o in self.pending}
        states = sorted(self.survey.partitions.items())
        return tuple(_preview_partition(self.survey, key, p, pending.get(key)) for key, p in states)


def _preview_partition(
    survey: Survey, key: Key, state: PartitionState, pending: PendingRanges | None
) -> PreviewedPartition:
    pinned, new = survey.state.origins.get(key), survey.find_new_origin(key)
    position = new.offset if new else survey.state.frontier(key) if pinned else None
    first, committed = new or pinned, survey.committed.get(key.tp)
    origin = PreviewedOrigin(first.offset, first.why, new is not None) if first else None
    at, ranges = committed.offset if committed else None, (pending.ranges, pending.lost) if pending else ((), ())
    return PreviewedPartition(state, position, origin, at, *ranges, pending.estimated_bytes if pending else 0)


def preview(feed: Feed, ports: Ports, request: Request) -> Preview:
    """Returns the plan that `land` would make now. Writes nothing, anywhere."""
    request, open_windows = windows.split_settled(request, feed.window, ports.clock())
    ledger = open_ledger(feed, ports)
    call = Call(feed, ports, ledger, request)
    # The checks of a run: a preview fails where it would.
    lost_entries.check_near(ledger, ports.lake, feed)
    snapshot = take_survey(feed, ports, ledger)
    lost_entries.check_names(ledger, snapshot.state, ports.lake.list(paths.staging_root(feed.stored)))
    check_sound(snapshot, request)
    schema_changes.find_corrected_table(feed, schema_changes.find_shape(feed, snapshot.state), ledger, snapshot.state)
    # New origins and boundaries are folded into the state in memory only.
    origins = [OriginEntry(items=snapshot.new_origins)] if snapshot.new_origins else []
    state, reads = _with_boundaries(call, snapshot.state.extend(origins), snapshot)
    replaced = find_receipts_replaced(call, snapshot, state)
    pending, refused = planning.find_pending_ranges(
        request, state, snapshot.partitions, feed.window, replaced, feed.name
    )
    plan = plan_for(call, snapshot.cluster_id, pending, state, replaced, build_sizing(feed, ports))
    losses = refuse_losses(feed, pending)
    # Conflicts are those over offsets that a run would land.
    free = [o for o in pending if o.key.tp not in {r.tp for r in losses}]
    blocked, met = _find_conflicts(call, state, free)
    # A dead run's batch with this request is finished as it was planned: nothing is refused for it.
    goes_on = request.replace and any(m.request == request and m.fate is Fate.TAKEN_OVER for m in met)
    refusals = with_holders(call, snapshot.refusals + (() if goes_on else refused + losses), snapshot)
    return Preview(
        snapshot,
        pending,
        refusals,
        plan,
        blocked,
        met,
        find_held_back(call, snapshot),
        open_windows,
        start_not_used=start_not_used(feed, snapshot),
        boundary_reads=reads,
        protection=schema_changes.preview_protection(feed, ledger, snapshot.state),
    )


def compare(feed: Feed, ports: Ports, planned: Preview) -> tuple[Comparison, ...]:
    """Compare the assignors on the offset ranges that a run would read; empty if it would read none."""
    if planned.plan is None:
        return ()
    ledger = Ledger.offline(ports.lake, feed.stored, ports.clock)
    leaders = {key.tp: p.leader for key, p in planned.survey.partitions.items()}
    sizes = replace(build_sizing(feed, ports), before=read_tasks_before(ledger, planned.survey.state))
    return assignment.compare([(leaders[s.tp], s) for s in planned.plan.offset_ranges], sizes)


def _with_boundaries(call: Call, state: State, snapshot: Survey) -> tuple[State, int]:
    """Returns the state with the boundaries that a run would pin, in memory only, and the reads that decided them.

    Raises UsageError.
    """
    entries = find_boundaries_due(call, state, snapshot)
    for entry in entries:
        pinned = windows.clamp_boundaries(state, entry)
        state = state.extend([pinned]) if pinned else state
    return state, sum(e.reads for e in entries)


def _find_conflicts(
    call: Call, state: State, pending: Sequence[PendingRanges]
) -> tuple[SluiceError | None, tuple[Met, ...]]:
    """Returns the error for a conflicting batch that is alive, and the fates of dead runs' batches."""
    feed = call.feed.name
    verdicts = publish.judge_batches(call.ports.liveness, state.live())
    dead = {i for i, verdict in verdicts.items() if verdict.dead}
    conflicts = list(planning.find_overlapping(state, call.request, pending))
    blocked = next((x for x in conflicts if x[0].id not in dead), None)
    in_the_way = {batch.id for batch, _ in conflicts}
    fates = ((b, decide_fate(call, b, in_the_way)) for b in state.live() if b.id in dead)
    met = tuple(publish.report_met(feed, b, verdicts[b.id], *fate) for b, fate in fates)
    return (publish.build_busy_error(feed, *blocked, verdicts[blocked[0].id]) if blocked else None), met
