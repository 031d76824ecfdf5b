"""Carries out one plan: runs its tasks, proves them, checks limits and contract, and publishes."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.pipelines.batch.call import LandingRun
from sluice.pipelines.batch.result import BatchResult
from sluice.pipelines.batch.task_progress import report_progress
from sluice.pipelines.errors import LogTruncated, OffsetsLost
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import OnLoss, PublishPolicy
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.ledger import Batch, BatchStatus, State
from sluice.pipelines.ledger.entries import (
    OwnEntry,
)
from sluice.pipelines.model.plans import Plan, Request
from sluice.pipelines.model.progress import Progress
from sluice.pipelines.model.receipts import Outcome, SliceFailure
from sluice.pipelines.model.traffic import TaskTraffic
from sluice.pipelines.planning import shapes
from sluice.pipelines.ports import Job
from sluice.pipelines.publishing.publish import abandon, check_owner, publish, roll_forward, roll_forward_own
from sluice.pipelines.quarantine.limit import check_quarantine
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.status.broker_traffic import traffic_of
from sluice.pipelines.validation.decision import check_contract
from sluice.pipelines.validation.drift import check_drift


def take_over(run: LandingRun, batch: Batch) -> bool:
    """Take ownership of a dead run's batch. Returns False if another run was faster.

    Removes nothing: finished slices are adopted.
    """

    def decide(state: State) -> OwnEntry | None:
        current = state.batches[batch.id]
        same = current.status is BatchStatus.PLANNED and current.owner.token == batch.owner.token
        return OwnEntry(batch=batch.id, owner=run.owner) if same else None

    return run.ledger.append(decide) is not None


def carry_out(run: LandingRun, shape: Shape, batch: Batch) -> BatchResult:
    """Run the batch's tasks, prove their receipts, and publish the batch if limits and contract allow."""
    feed, edges, ledger, owner, report = run.feed, run.edges, run.ledger, run.owner, run.report
    plan, fresh = batch.plan or ledger.plan(batch.id), batch.owner.token == owner.token
    report(Progress("start Spark"))
    edges.engine.start()
    with report_progress(edges.lake, feed.name, batch.id, plan, report):
        job = Job(plan, batch.id, owner.token, edges.wiring, shape, fresh=fresh)
        sent = edges.engine.run(job, [t.index for t in plan.tasks])
    check_owner(ledger, batch.id, owner)
    report(Progress("prove", plan.span, plan.span))
    outcomes = [s for s in sent if not isinstance(s, TaskTraffic)]
    receipts, failures = prove(plan, batch.id, _outcome_per_slice(plan, outcomes), edges.lake)
    traffic = traffic_of((s for s in sent if isinstance(s, TaskTraffic)), receipts)
    check_quarantine(receipts, feed.policies, edges.lake)
    check_drift(receipts, feed.policies)
    all_or_nothing = feed.publish is PublishPolicy.ALL_OR_NOTHING or plan.request.replace
    if not receipts or (failures and all_or_nothing):
        if why := never_possible(feed, plan.request, failures):
            abandon(ledger, batch.id, why, owner)
        return BatchResult(batch.id, plan, tuple(receipts), tuple(failures), None, traffic=traffic)
    results = check_contract(shape, ledger, batch, receipts, edges.lake, len(failures))
    report(Progress("publish", plan.span, plan.span))
    publish(ledger, batch.id, owner, receipts, failures, results, traffic)
    shapes.evolve(feed, ledger, receipts)
    number = ledger.read().batches[batch.id].published
    if fresh and not (plan.replaces or failures or any(r.adopted for r in receipts)):
        roll_forward_own(ledger, edges.lake, feed.name, batch.id, receipts)
    else:
        roll_forward(ledger, edges.lake, feed.name)
    return BatchResult(batch.id, plan, tuple(receipts), tuple(failures), number, results, traffic=traffic)


def _outcome_per_slice(plan: Plan, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns one outcome for each slice of the plan: a slice without one has failed."""
    planned = set(plan.slices)
    planned_outcomes = [o for o in outcomes if o.slice in planned]
    silent = planned - {o.slice for o in planned_outcomes}
    missing = (SliceFailure(s, "Failed", "its task ended without an outcome") for s in sorted(silent, key=str))
    return [*planned_outcomes, *missing]


def never_possible(feed: Feed, request: Request, failures: Sequence[SliceFailure]) -> str:
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
