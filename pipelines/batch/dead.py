"""What a run does about batches that dead runs left: finishes them, gives them up, or leaves them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial

from sluice.pipelines.batch.carry_out import carry_out, take_over
from sluice.pipelines.batch.result import BatchResult, first_failure
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger
from sluice.pipelines.ports import Edges
from sluice.pipelines.publishing import owners
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.vocabulary.errors import BatchRefused, SluiceError
from sluice.pipelines.vocabulary.plans import Request, RequestKind
from sluice.pipelines.vocabulary.progress import Reporter
from sluice.pipelines.vocabulary.receipts import Fate, Owner, Verdict


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
    page = paths.batch_page_path(feed.name, batch.id, batch.owner.token)
    return edges.liveness.last_beat(batch.owner) is None and edges.lake.size(page) is not None


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
