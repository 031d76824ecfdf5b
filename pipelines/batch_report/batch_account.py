"""The facts of one batch: its plan, receipts, contract, and earlier batches.

They come from the ledger and, for an unpublished batch, from the receipts in staging. The feed's file is not used: the
ledger has the contract that the batch was checked with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from sluice.pipelines.errors import UsageError
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.ledger.batches import reverse_batches
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.receipts import NO_TRAFFIC, Counts, RangeFailure, Receipt, sum_counts
from sluice.pipelines.planning.schema_changes import shape_named
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.listing import receipts_in_staging
from sluice.pipelines.records.shape import RAW
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.validation.batch_expectations import count_earlier_rows, hold_whole

PAST = 30
"""Batches of the history, this one included."""


@dataclass(frozen=True, slots=True)
class PastBatch:
    """One batch of the history; `at` is when it was published (ms), None when it is not."""

    batch: int
    at: int | None
    counts: Counts


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a partition is behind: the pending offsets, and the age (ms) of the oldest, if known."""

    key: Key
    offsets: int
    age: int | None


@dataclass(frozen=True)
class BatchAccount:
    """One batch. `at` is when its publish entry was written (ms), None without one; `why` says why there is none.

    `against`: boundaries of its windows (ms) that were decided against a record's stamp."""

    feed: str
    ledger_id: str
    batch: Batch
    plan: Plan
    at: int | None
    facts: BatchFacts
    failures: tuple[RangeFailure, ...]
    types: dict[str, str]
    past: tuple[PastBatch, ...]
    why: str = ""
    against: tuple[int, ...] = ()
    is_split: bool = False

    @property
    def is_published(self) -> bool:
        return self.batch.status is BatchStatus.PUBLISHED


def read_account(
    ledger: Ledger, lake: Lake, number: int, why: str = "", failures: Sequence[RangeFailure] = ()
) -> BatchAccount:
    """The batch with that number. `why` and `failures` add what else is known of one that was not published.

    Raises UsageError if the batch does not exist, LedgerCorrupt, LakeUnavailable.
    """
    state = ledger.read()
    batch = _batch(ledger, state, number)
    plan = ledger.plan(number)
    entry = None if batch.published is None else ledger.publication(batch)
    # A batch that was not published has its receipts next to the staged files, and its contract is judged again.
    receipts = entry.receipts if entry else receipts_in_staging(lake, plan, number)
    shape = (shape_named(ledger, state, receipts[-1].format) if receipts else None) or RAW
    earlier = count_earlier_rows(state, batch.request, number)
    results = entry.results if entry else hold_whole(shape, receipts, lake, earlier) if receipts else ()
    starts, times = set(windows(receipts)), state.boundary_times
    return BatchAccount(
        feed=ledger.feed,
        ledger_id=state.ledger_id,
        batch=batch,
        plan=plan,
        at=entry.at if entry else None,
        facts=BatchFacts(
            receipts,
            entry.traffic if entry else NO_TRAFFIC,
            shape.contract,
            results,
            max(entry.at - batch.planned_at, 1) if entry else 0,
        ),
        failures=entry.failures if entry else tuple(failures),
        types=columns.texts() if (columns := shape.landed_columns) else {},
        past=(*_before(ledger, state, batch), PastBatch(batch.id, entry.at if entry else None, sum_counts(receipts))),
        why=why,
        against=tuple(t for t in sorted(state.against) if t in starts or times[bisect_left(times, t) - 1] in starts),
        is_split=shape.split is not None,
    )


def newest(state: State, feed: str) -> int:
    """The newest batch that was not given up. Raises UsageError when there is none."""
    there = (b.id for b in state.batches.newest_first() if b.status is not BatchStatus.ABANDONED)
    if (number := next(there, None)) is None:
        raise UsageError(f"feed {feed} has no batch yet", remedy=f"land one: sluice run {feed}")
    return number


def behind(outlook: Outlook) -> tuple[PartitionLag, ...]:
    """Returns the lag of each partition with pending offsets, from an outlook."""
    ages = outlook.ages()
    return tuple(PartitionLag(o.key, sum(r.end - r.start for r in o.ranges), ages.get(o.key)) for o in outlook.pending)


def _batch(ledger: Ledger, state: State, number: int) -> Batch:
    if (batch := state.batches.get(number)) is not None:
        return ledger.recall(batch)
    recent = ", ".join(str(b.id) for b in reverse_batches(islice(state.batches.newest_first(), 5))) or "none"
    raise UsageError(f"feed {ledger.feed} has no batch {number}", remedy=f"its newest: {recent}")


def _before(ledger: Ledger, state: State, batch: Batch) -> Sequence[PastBatch]:
    """The batches that landed something before this one, oldest first."""
    before = (b for b in state.batches.newest_first(batch.id) if b.published is not None and not b.merges)
    recent = sorted(islice(before, PAST - 1), key=lambda b: b.published or 0)
    entries = map_parallel(ledger.publication, recent)
    return [PastBatch(b.id, e.at, sum_counts(e.receipts)) for b, e in zip(recent, entries, strict=True)]


def windows(receipts: Sequence[Receipt]) -> Iterator[int]:
    """The windows (their starts, ms) that receipts lie in, in order."""
    return iter(sorted({r.offset_range.window for r in receipts if r.offset_range.window is not None}))
