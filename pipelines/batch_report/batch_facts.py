"""The facts of one batch: its plan, receipts, contract, and earlier batches.

They come from the ledger and, for an unpublished batch, from the receipts in staging. The feed's file is not used: the
ledger has the contract that the batch was checked with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.contract.results import ExpectationOutcome, Result, contract_results
from sluice.pipelines.errors import UsageError
from sluice.pipelines.ledger import Batch, BatchStatus, Ledger, State
from sluice.pipelines.ledger.batches import oldest_first
from sluice.pipelines.model.kafka import Key
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt, SliceFailure, count_files
from sluice.pipelines.model.traffic import NO_TRAFFIC, Traffic
from sluice.pipelines.planning.shapes import shape_named
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.held import receipts_in_staging
from sluice.pipelines.records.shape import RAW, Shape
from sluice.pipelines.status.outlook import Outlook
from sluice.pipelines.status.timings import sum_times
from sluice.pipelines.util.parallel import each
from sluice.pipelines.validation.volume import earlier_rows
from sluice.pipelines.validation.whole import hold_whole

PAST = 30
"""Batches of the history, this one included."""


@dataclass(frozen=True, slots=True)
class Past:
    """One batch of the history; `at` is when it was published (ms), None when it is not."""

    batch: int
    at: int | None
    landed: int
    quarantined: int

    @property
    def share(self) -> float:
        """The share of refused records among all that landed or were refused."""
        fitting = self.landed + self.quarantined
        return self.quarantined / fitting if fitting else 0.0


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a partition is behind: the owed offsets, and the age (ms) of the oldest, if known."""

    key: Key
    offsets: int
    age: int | None


@dataclass(frozen=True)
class BatchAccount:
    """One batch. `at` is when its publish entry was written (ms), None without one; `why` says why there is none."""

    feed: str
    ledger_id: str
    batch: Batch
    plan: Plan
    at: int | None
    receipts: tuple[Receipt, ...]
    failures: tuple[SliceFailure, ...]
    results: tuple[Result, ...]
    contract: Contract | None
    types: dict[str, str]
    past: tuple[Past, ...]
    why: str = ""
    traffic: Traffic = NO_TRAFFIC

    @property
    def published(self) -> bool:
        return self.batch.status is BatchStatus.PUBLISHED

    @cached_property
    def counts(self) -> Counts:
        return sum((r.counts for r in self.receipts), Counts())

    @cached_property
    def outcomes(self) -> list[ExpectationOutcome]:
        """The result of each expectation that is decided."""
        return contract_results(self.contract, self.receipts, self.results) if self.contract else []

    def parts(self, kind: PartKind) -> list[tuple[Receipt, Part]]:
        """The batch's files of a kind, in log order."""
        ordered = sorted(self.receipts, key=lambda r: (r.slice.key, r.slice.start))
        return [(r, p) for r in ordered for p in r.of(kind)]

    @cached_property
    def bytes(self) -> int:
        return sum(p.bytes for r in self.receipts for p in r.parts)

    @cached_property
    def files(self) -> int:
        return count_files(self.receipts)

    @property
    def took(self) -> int | None:
        """Milliseconds from the plan to its publish entry."""
        return None if self.at is None else max(self.at - self.batch.planned_at, 1)

    @cached_property
    def timings(self) -> dict[str, int]:
        """Nanoseconds of all tasks by activity, longest first, without adopted slices."""
        ns = sum_times(self.receipts).ns
        return dict(sorted(((a, n) for a, n in ns.items() if n), key=lambda item: (-item[1], item[0])))


def account(
    ledger: Ledger, lake: Lake, number: int, why: str = "", failures: Sequence[SliceFailure] = ()
) -> BatchAccount:
    """The batch with that number. `why` and `failures` add what else is known of one that was not published.

    Raises UsageError if the batch does not exist, LedgerCorrupt, LakeUnavailable.
    """
    state = ledger.read()
    batch = _batch(ledger, state, number)
    plan = ledger.plan(number)
    entry = None if batch.published is None else ledger.publication(batch)
    receipts = entry.receipts if entry else receipts_in_staging(lake, plan, number)
    shape = _shape(ledger, state, receipts)
    earlier = earlier_rows(state, batch.request, number)
    results = entry.results if entry else hold_whole(shape, receipts, lake, earlier) if receipts else ()
    return BatchAccount(
        feed=ledger.feed,
        ledger_id=state.ledger_id,
        batch=batch,
        plan=plan,
        at=entry.at if entry else None,
        receipts=receipts,
        failures=entry.failures if entry else tuple(failures),
        results=results,
        contract=shape.contract,
        types=shape.columns.texts() if shape.columns else {},
        past=(*_before(ledger, state, batch), _past(batch, entry.at if entry else None, receipts)),
        why=why,
        traffic=entry.traffic if entry else NO_TRAFFIC,
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
    return tuple(PartitionLag(o.key, sum(r.end - r.start for r in o.ranges), ages.get(o.key)) for o in outlook.owed)


def _batch(ledger: Ledger, state: State, number: int) -> Batch:
    if (batch := state.batches.get(number)) is not None:
        return ledger.recall(batch)
    recent = ", ".join(str(b.id) for b in oldest_first(islice(state.batches.newest_first(), 5))) or "none"
    raise UsageError(f"feed {ledger.feed} has no batch {number}", remedy=f"its newest: {recent}")


def _shape(ledger: Ledger, state: State, receipts: Sequence[Receipt]) -> Shape:
    """The shape of the newest slice, as far as the ledger knows it."""
    return (shape_named(ledger, state, receipts[-1].format) if receipts else None) or RAW


def _before(ledger: Ledger, state: State, batch: Batch) -> Sequence[Past]:
    """The batches that landed something before this one, oldest first."""
    before = (b for b in state.batches.newest_first(batch.id) if b.published is not None and not b.merges)
    recent = sorted(islice(before, PAST - 1), key=lambda b: b.published or 0)
    entries = each(ledger.publication, recent)
    return [_past(b, e.at, e.receipts) for b, e in zip(recent, entries, strict=True)]


def _past(batch: Batch, at: int | None, receipts: Sequence[Receipt]) -> Past:
    counts = sum((r.counts for r in receipts), Counts())
    return Past(batch.id, at, counts.landed, counts.quarantined)


def windows(receipts: Sequence[Receipt]) -> Iterator[int]:
    """The windows (their starts, ms) that receipts lie in, in order."""
    return iter(sorted({r.slice.window for r in receipts if r.slice.window is not None}))
