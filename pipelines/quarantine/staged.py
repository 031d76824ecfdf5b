"""Staged, unpublished receipts of live batches, and the reasons why a run would not publish them.

Promise: a refusal is decided here by the same functions, on the same receipts, as by the run that takes the batch over,
with the feed's current files. It is not stored, so fixing a file fixes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from sluice.pipelines.errors import BatchRefused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.proof import receipts_at
from sluice.pipelines.ledger import Batch, Ledger, State
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.receipts import Receipt, sharing
from sluice.pipelines.planning.shapes import effective_shape
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.limit import check_quarantine
from sluice.pipelines.util.parallel import each
from sluice.pipelines.validation.drift import check_drift
from sluice.pipelines.validation.whole import check_contract


def receipts_in_staging(lake: Lake, plan: Plan, batch: int) -> tuple[Receipt, ...]:
    """One receipt for each slice that has any: the first by attempt, those of a shared file together, as the proof
    chooses."""
    staged = [p for p in lake.list(paths.staging_folder(plan.feed, batch)) if paths.receipt_slice(p)]
    receipts = [r for there in each(lambda p: receipts_at(p, lake), staged) for r in there]
    first: dict[str, Receipt] = {}
    for together in sharing(sorted(receipts, key=lambda r: r.attempt)):
        names = {paths.slice_name(r.slice): r for r in together}
        if first.keys().isdisjoint(names) and _are_all(together):
            first |= names
    return tuple(first[name] for s in plan.slices if (name := paths.slice_name(s)) in first)


def _are_all(together: Sequence[Receipt]) -> bool:
    """Returns whether the receipts of a shared file are all there: its attempt may have died while it wrote them."""
    rows: dict[str, int] = {}
    for p in (p for r in together for p in r.parts if p.shared):
        rows[p.staged] = rows.get(p.staged, p.shared.rows if p.shared else 0) - p.rows
    return not any(rows.values())


def staged_batches(feed: Feed, ledger: Ledger, state: State, lake: Lake) -> Iterator[tuple[Batch, tuple[Receipt, ...]]]:
    """The live landing batches, with the receipts that today's feed files would produce. A slice of another shape does
    not count: it will be read again."""
    shape = effective_shape(feed, state).name
    for batch in state.live():
        if not batch.rewrites:
            receipts = receipts_in_staging(lake, batch.plan or ledger.plan(batch.id), batch.id)
            yield batch, tuple(r for r in receipts if r.format == shape)


def refusals_of_staged(
    feed: Feed, ledger: Ledger, state: State, lake: Lake, dead: Collection[int]
) -> dict[int, BatchRefused]:
    """By number, why those of the `dead` live batches that are completely read would not be published."""
    complete = [
        (batch, receipts)
        for batch, receipts in (staged_batches(feed, ledger, state, lake) if dead else ())
        if batch.id in dead and len(receipts) == len((batch.plan or ledger.plan(batch.id)).slices)
    ]
    reasons = ((batch.id, _why(feed, ledger, state, batch, receipts, lake)) for batch, receipts in complete)
    return {batch: why for batch, why in reasons if why}


def _why(
    feed: Feed, ledger: Ledger, state: State, batch: Batch, receipts: tuple[Receipt, ...], lake: Lake
) -> BatchRefused | None:
    try:
        check_quarantine(receipts, feed.policies, lake)
        check_drift(receipts, feed.policies)
        check_contract(effective_shape(feed, state), ledger, batch, receipts, lake)
    except BatchRefused as why:
        return why
    return None
