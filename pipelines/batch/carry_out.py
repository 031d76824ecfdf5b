"""Carries out one plan, of this run or of a dead one: tasks, proof, limits and contract, publishing.

Progress of running tasks is read from the lake: a batch's receipts in staging.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from time import monotonic

from sluice.pipelines.batch.result import BatchResult, Call, LandingRun, describe_first_failure
from sluice.pipelines.contract.catalogue import Result
from sluice.pipelines.errors import BatchRefused, LogTruncated, OffsetsLost, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import OnLoss, PublishPolicy
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import Batch, BatchStatus, State
from sluice.pipelines.ledger.entries import (
    OwnEntry,
)
from sluice.pipelines.model.plans import Plan, Request, RequestKind
from sluice.pipelines.model.receipts import (
    Fate,
    Progress,
    RangeFailure,
    Receipt,
    Reporter,
    TaskTraffic,
    Verdict,
)
from sluice.pipelines.planning import schema_changes
from sluice.pipelines.ports import Job, Lake, Ports
from sluice.pipelines.publishing import publish as owners
from sluice.pipelines.publishing.manifest import read_receipts_meeting
from sluice.pipelines.publishing.publish import abandon, check_owner, publish, roll_forward, roll_forward_own
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.status.batch_facts import traffic_of
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.validation.drift import check_drift


def take_over(run: LandingRun, batch: Batch) -> bool:
    """Take ownership of a dead run's batch. Returns False if another run was faster.

    Removes nothing: finished offset ranges are adopted.
    """

    def decide(state: State) -> OwnEntry | None:
        current = state.batches[batch.id]
        same = current.status is BatchStatus.PLANNED and current.owner.token == batch.owner.token
        return OwnEntry(batch=batch.id, owner=run.owner) if same else None

    return run.ledger.append(decide) is not None


def carry_out(run: LandingRun, shape: Shape, batch: Batch) -> BatchResult:
    """Run the batch's tasks, prove their receipts, and publish the batch if limits and contract allow.

    If they refuse a batch of several windows, the windows that they allow by themselves are published, and the others
    stay pending: each is then a batch of its own.
    """
    # Late: they need Arrow, and a run with nothing pending does not.
    from sluice.pipelines.landing.proof import find_lost_rows, prove
    from sluice.pipelines.quarantine.limit import check_quarantine
    from sluice.pipelines.validation.batch_expectations import check_contract

    feed, ports, ledger, owner, report = run.feed, run.ports, run.ledger, run.owner, run.report
    plan, fresh = batch.plan or ledger.plan(batch.id), batch.owner.token == owner.token
    report(Progress("start workers", note=f"({ports.engine.describe()})"))
    ports.engine.start()
    with report_progress(ports.lake, feed.stored, batch.id, owner.token, plan, report):
        state = ledger.read()
        erased = {s: ranges for s in plan.offset_ranges if (ranges := state.list_erased(s))}
        job = Job(plan, batch.id, owner.token, ports.wiring, shape, fresh=fresh, erased=erased)
        sent = ports.engine.run(job, [t.index for t in plan.tasks])
    # Another run may have taken the batch over while tasks ran: then its proof counts, not ours.
    check_owner(ledger, batch.id, owner)
    report(Progress("prove", plan.offsets, plan.offsets))
    outcomes = [s for s in sent if not isinstance(s, TaskTraffic)]
    # What tasks report is not believed: the driver reads the files' footers and compares them with the plan.
    planned = set(plan.offset_ranges)
    planned_outcomes = [o for o in outcomes if o.offset_range in planned]
    silent = planned - {o.offset_range for o in planned_outcomes}
    missing = (RangeFailure(s, "Failed", "its task ended without an outcome") for s in sorted(silent, key=str))
    receipts, failures = prove(plan, batch.id, [*planned_outcomes, *missing], ports.lake)
    if plan.request.replace and not failures:
        # Kafka may have lost or compacted records since they landed: a replacement must not have fewer rows.
        landed = read_receipts_meeting(ledger, ledger.read(), ((s.key, s.range) for s in plan.offset_ranges))
        failures = find_lost_rows(feed.name, landed, receipts)
    traffic = traffic_of((s for s in sent if isinstance(s, TaskTraffic)), receipts, ports.engine.describe())
    all_or_nothing = feed.publish is PublishPolicy.ALL_OR_NOTHING or plan.request.replace

    # Limits are judged over the batch first; only where that fails, window by window.
    def judge(chosen: Sequence[Receipt]) -> tuple[Result, ...]:
        check_quarantine(chosen, feed.policies, ports.lake)
        for output in shape.split.shapes if shape.split else ():
            check_quarantine([r.of_output(output) for r in chosen], feed.policies, ports.lake)
        check_drift(chosen, feed.policies)
        if failures and all_or_nothing:
            return ()
        return check_contract(shape, ledger, batch, chosen, ports.lake, len(failures))

    # Rows of refused windows stay staged under this batch and are read again by the next one.
    refused: list[RangeFailure] = []
    try:
        results = judge(receipts)
    except BatchRefused:
        sound = [] if all_or_nothing else _find_sound(receipts, judge)
        if not sound:
            raise
        results = judge(sound)
        others = {r.offset_range for r in receipts} - {r.offset_range for r in sound}
        refused = [RangeFailure(s, BatchRefused.__name__, _HELD) for s in sorted(others, key=str)]
        receipts = sound
    if not receipts or (failures and all_or_nothing):
        # A plan that can never finish would block its offsets for all later runs.
        if why := explain_impossible(feed, plan.request, failures):
            abandon(ledger, batch.id, why, owner)
        return BatchResult(batch.id, plan, tuple(receipts), tuple(failures), None, traffic=traffic)
    report(Progress("publish", plan.offsets, plan.offsets))
    publish(ledger, batch.id, owner, [*receipts, *failures, *refused], results, traffic)
    schema_changes.evolve(feed, ledger, receipts)
    number = ledger.read().batches[batch.id].published
    # Nothing was replaced, adopted or left behind: only the new files may be hidden. Else folders are listed.
    if fresh and not (plan.replaces or failures or refused or any(r.adopted for r in receipts)):
        roll_forward_own(ledger, ports.lake, feed.stored, batch.id)
    else:
        roll_forward(ledger, ports.lake, feed.stored)
    windows = len({f.offset_range.window for f in refused})
    result = BatchResult(batch.id, plan, tuple(receipts), tuple(failures), number, results, traffic=traffic)
    return replace(result, refused_windows=windows)


_HELD = "its window is refused, and becomes a batch of its own"


def _find_sound(receipts: Sequence[Receipt], judge: Callable[[Sequence[Receipt]], object]) -> list[Receipt]:
    """Returns the receipts of the windows that are not refused by themselves, and share no file with one that is."""
    by_window = group_by(receipts, lambda r: r.offset_range.window)
    refused = set[int | None]()
    for window, own in by_window.items():
        try:
            judge(own)
        except BatchRefused:
            refused.add(window)
    files = {p.path for window in refused for r in by_window[window] for p in r.parts}
    refused |= {w for w, own in by_window.items() if any(p.path in files for r in own for p in r.parts)}
    return [r for r in receipts if r.offset_range.window not in refused]


def explain_impossible(feed: Feed, request: Request, failures: Sequence[RangeFailure]) -> str:
    """Returns the reason why an unpublished plan can never be carried out; empty if it can.

    Otherwise runs would take it over indefinitely. Lost offsets stay reserved until the loss is accepted, unless the
    feed accepts losses.
    """
    errors = {f.error for f in failures}
    if LogTruncated.__name__ in errors:
        return "the log was truncated: the planned records are gone"
    if OffsetsLost.__name__ in errors and (request.replace or feed.policies.on_loss is OnLoss.ACCEPT):
        return "Kafka has deleted the planned records"
    return ""


def report_progress(
    lake: Lake, feed: str, batch: int, token: str, plan: Plan, report: Reporter
) -> AbstractContextManager[None]:
    """Report a batch's progress, from receipts and notes in staging, until the block ends. `token`: its owner's."""
    spans = {paths.name_range(s): s.span for s in plan.offset_ranges}
    names_by_path: dict[str, frozenset[str]] = {}

    total = sum(spans.values())

    def read_progress() -> Progress:
        finished = receipt_files.read_finished(lake, feed, batch, names_by_path)
        partial = receipt_files.read_partial(lake, feed, batch, token)
        begun = sum(min(done, spans.get(name, 0)) for name, done in partial.items() if name not in finished)
        return Progress("land", begun + sum(spans.get(name, 0) for name in finished), total)

    return report_while_running(Progress("land", 0, total), read_progress, report)


@contextmanager
def report_while_running(first: Progress, read_progress: Callable[[], Progress], report: Reporter) -> Iterator[None]:
    """Report `first`, then the progress that is read, about once a second until the block ends.

    Reads less often if reading takes long, and again later if the lake does not answer. An error of `report` ends
    the reports; it is raised at the end of a block without an error of its own.
    """
    stop, raised = Event(), list[BaseException]()

    def look() -> None:
        report(first)
        pause = 1.0
        while not stop.wait(pause):
            began, progress = monotonic(), None
            with suppress(SluiceError):
                progress = read_progress()
            if progress is not None:
                report(progress)
            # Reading progress from a slow lake takes about a tenth of the time at most.
            pause = max(1.0, 10 * (monotonic() - began))

    def keep_looking() -> None:
        try:
            look()
        except BaseException as error:  # noqa: BLE001 - reporters end a run by an interrupt, too
            raised.append(error)

    thread = Thread(target=keep_looking, name="sluice-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if raised:
        raise raised[0]


_REFUSED = "its run ended and reported why it is not published"


def decide_fate(call: Call, batch: Batch, in_the_way: Container[int] = ()) -> tuple[Fate, str]:
    """Decide on a batch whose run is dead. Returns its fate and the reason.

    A landing batch is finished by any run that needs its ranges, and by the next catch-up, because Kafka may delete
    its records. The exception is a batch whose run ended and reported why it is not published: it waits for a person.
    """
    if batch.rewrites:
        return Fate.GIVEN_UP, owners.AS_THEY_WERE
    if batch.id in in_the_way:
        return Fate.TAKEN_OVER, ""
    if call.request.kind is not RequestKind.CATCH_UP or call.request.only:
        return Fate.LEFT, "this run has another request; a catch-up finishes it"
    if _was_refused(call.feed.stored, call.ports, batch):
        return Fate.LEFT, _REFUSED
    return Fate.TAKEN_OVER, ""


def _was_refused(feed: str, ports: Ports, batch: Batch) -> bool:
    """Returns whether the run ended by itself and reported why it could not publish the batch."""
    if ports.liveness.last_heartbeat(batch.owner) is not None:
        return False
    return receipt_files.find_batch_page(ports.lake, feed, batch.id, batch.owner.token) is not None


def finish_others(run: LandingRun, shape: Shape) -> list[BatchResult]:
    """Deal with batches of dead runs that do not conflict. A failure among them does not fail this run."""
    done: list[BatchResult] = []
    live = [b for b in run.ledger.read().live() if b.owner.token != run.owner.token]
    verdicts = owners.judge_batches(run.ports.liveness, live)
    for batch in (b for b in live if verdicts[b.id].dead):
        fate, why = decide_fate(run, batch)
        if fate is Fate.GIVEN_UP:
            owners.give_up(run.ledger, [batch], verdicts, run.report)
        elif fate is Fate.LEFT:
            met = owners.report_met(run.feed.name, batch, verdicts[batch.id], fate, why, refused=why == _REFUSED)
            owners.tell(run.report, met)
        else:
            done += _finish(run, shape, batch, verdicts[batch.id])
    return done


def _finish(run: LandingRun, shape: Shape, batch: Batch, verdict: Verdict) -> list[BatchResult]:
    """Take over a dead run's batch and carry it out; no result if another run was faster."""
    tell = partial(owners.report_met, run.feed.name, batch, verdict)
    if not take_over(run, batch):
        return []
    owners.tell(run.report, tell(Fate.TAKEN_OVER))
    try:
        result = carry_out(run, shape, batch)
    except SluiceError as error:
        refused = isinstance(error, BatchRefused)
        owners.tell(run.report, tell(Fate.LEFT, error.message, refused=refused))
        plan = batch.plan or run.ledger.plan(batch.id)
        return [BatchResult(batch.id, plan, (), (), None, foreign=True, refused=error.message)] if refused else []
    if result.failures:
        fate = _BECAME[run.ledger.read().batches[batch.id].status]
        owners.tell(run.report, tell(fate, describe_first_failure(result.failures)))
    return [replace(result, foreign=True)]


_BECAME = {
    BatchStatus.PUBLISHED: Fate.TAKEN_OVER,
    BatchStatus.ABANDONED: Fate.GIVEN_UP,
    BatchStatus.PLANNED: Fate.LEFT,
}
