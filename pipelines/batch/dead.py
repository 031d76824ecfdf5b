"""Batches of dead runs: a run finishes them, gives them up, or leaves them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial

from sluice.pipelines.batch.call import Call, LandingRun
from sluice.pipelines.batch.carry_out import carry_out, take_over
from sluice.pipelines.batch.result import BatchResult, first_failure
from sluice.pipelines.errors import BatchRefused, SluiceError
from sluice.pipelines.lake import standing
from sluice.pipelines.ledger import Batch, BatchStatus
from sluice.pipelines.model.plans import RequestKind
from sluice.pipelines.model.receipts import Fate, Verdict
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import owners
from sluice.pipelines.records.shape import Shape


def fate_of(call: Call, batch: Batch, in_the_way: Container[int] = ()) -> tuple[Fate, str]:
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
    if _was_refused(call.feed.name, call.edges, batch):
        return Fate.LEFT, "its run ended and reported why it is not published"
    return Fate.TAKEN_OVER, ""


def _was_refused(feed: str, edges: Ports, batch: Batch) -> bool:
    """Returns whether the run ended by itself and reported why it could not publish the batch."""
    if edges.liveness.last_beat(batch.owner) is not None:
        return False
    return standing.batch_page(edges.lake, feed, batch.id, batch.owner.token) is not None


def finish_others(run: LandingRun, shape: Shape) -> list[BatchResult]:
    """Deal with batches of dead runs that do not conflict. A failure among them does not fail this run."""
    done: list[BatchResult] = []
    live = [b for b in run.ledger.read().live() if b.owner.token != run.owner.token]
    verdicts = owners.judge_batches(run.edges.liveness, live)
    for batch in (b for b in live if verdicts[b.id].dead):
        fate, why = fate_of(run, batch)
        if fate is Fate.GIVEN_UP:
            owners.give_up(run.ledger, [batch], verdicts, run.report)
        elif fate is Fate.LEFT:
            owners.tell(run.report, owners.met(run.feed.name, batch, verdicts[batch.id], fate, why))
        else:
            done += _finish(run, shape, batch, verdicts[batch.id])
    return done


def _finish(run: LandingRun, shape: Shape, batch: Batch, verdict: Verdict) -> list[BatchResult]:
    """Take over a dead run's batch and carry it out; no result if another run was faster."""
    tell = partial(owners.met, run.feed.name, batch, verdict)
    if not take_over(run, batch):
        return []
    owners.tell(run.report, tell(Fate.TAKEN_OVER))
    try:
        result = carry_out(run, shape, batch)
    except SluiceError as error:
        owners.tell(run.report, tell(Fate.LEFT, error.message))
        plan = batch.plan or run.ledger.plan(batch.id)
        refused = isinstance(error, BatchRefused)
        return [BatchResult(batch.id, plan, (), (), None, foreign=True, refused=error.message)] if refused else []
    if result.failures:
        fate = _BECAME[run.ledger.read().batches[batch.id].status]
        owners.tell(run.report, tell(fate, first_failure(result.failures)))
    return [replace(result, foreign=True)]


_BECAME = {
    BatchStatus.PUBLISHED: Fate.TAKEN_OVER,
    BatchStatus.ABANDONED: Fate.GIVEN_UP,
    BatchStatus.PLANNED: Fate.LEFT,
}
