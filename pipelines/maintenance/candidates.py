"""Which receipts hold the quarantined records that were asked for, and how trying these records turns out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from sluice.pipelines.errors import LakeUnavailable, PartUnreadable, ProofFailed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet
from sluice.pipelines.landing.landed_rows import check_source, read_part_at
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.maintenance.fixers import Fixer
from sluice.pipelines.maintenance.sorter import Sorter, Trial
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Part, PartKind, Progress, Receipt, Reporter, group_by_sharing
from sluice.pipelines.planning.schema_changes import find_shape
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.quarantine.listing import Filter
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.schema.arrays import unfit

OFFSET_WEIGHT = 8 << 10
"""How many bytes of files a re-landed record counts for: in batches of 2 GiB, an entry names some 250,000."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A receipt with quarantined records that were asked for, and the outcome of trying them."""

    receipt: Receipt
    trial: Trial

    @property
    def offset_range(self) -> OffsetRange:
        return self.receipt.offset_range

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.receipt.parts

    @property
    def bytes(self) -> int:
        """The size that bounds a batch: its files, and the offsets of re-landed records in its ledger entry."""
        return sum(p.bytes for p in self.parts) + OFFSET_WEIGHT * self.trial.fit.total()


@dataclass(frozen=True, slots=True)
class ReplayCandidates:
    """The candidates of a replay in order, by the state below entry `number`. `unfit` are offset ranges whose
    landed rows would lose something in today's types, each with the loss. `sharers` are ranges that share a file with
    a candidate: whole files are written again."""

    number: int
    shape: Shape
    candidates: tuple[Candidate, ...]
    unfit: tuple[tuple[OffsetRange, str], ...] = ()
    sharers: tuple[Candidate, ...] = ()

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """The candidates of which a record fits, and those that share a file with one."""
        lost = {s for s, _ in self.unfit}
        groups = group_by_sharing([*self.candidates, *self.sharers])
        chosen = (
            g for g in groups if any(c.trial.fit.total() for c in g) and lost.isdisjoint(c.offset_range for c in g)
        )
        return tuple(c for g in chosen for c in g)


def find(
    feed: Feed, edges: Ports, ledger: Ledger, wanted: Filter, fixer: Fixer | None, report: Reporter = lambda p: None
) -> ReplayCandidates:
    """Try the quarantined records that were asked for. Writes nothing. Raises ProofFailed for a part that is not what
    the ledger says, LakeUnavailable for one that another batch has replaced."""
    state, lake = ledger.read(), edges.lake
    shape = find_shape(feed, state)
    receipts = [r for r in wanted.receipts(ledger, state, feed.window) if r.counts.quarantined]
    total, done = sum(r.counts.quarantined for r in receipts), 0
    candidates: list[Candidate] = []
    for r in receipts:
        with _still_there(ledger, r):
            for part in r.of(PartKind.QUARANTINED):
                check_source(lake, feed.name, part)
            trial = _try_records(edges, r, wanted, shape, fixer)
        done += r.counts.quarantined
        report(Progress("try", done, total))
        if trial.tried:
            candidates.append(Candidate(r, trial))
    reasons = []
    for c in (c for c in candidates if c.trial.fit):
        with _still_there(ledger, c.receipt):
            reasons.append((c.offset_range, _unfit(lake, c.receipt, shape.landed)))
    chosen_ranges = {c.offset_range for c in candidates}
    sharers = manifest.with_sharers(ledger, state, [c.receipt for c in candidates if c.trial.fit])
    companions = tuple(Candidate(r, Trial()) for r in sharers if r.offset_range not in chosen_ranges)
    unfit_ranges = tuple((s, why) for s, why in reasons if why)
    return ReplayCandidates(state.number, shape, tuple(candidates), unfit_ranges, companions)


@contextmanager
def _still_there(ledger: Ledger, r: Receipt) -> Iterator[None]:
    """Raises LakeUnavailable, not damage, when a file cannot be read because its receipt has since been replaced."""
    try:
        yield
    except (PartUnreadable, ProofFailed):
        if not ledger.list_replaced([p.path for p in r.parts]):
            raise
        raise _replaced_meanwhile(r) from None


def _replaced_meanwhile(r: Receipt) -> LakeUnavailable:
    return LakeUnavailable(
        f"{r.offset_range}: its files were merged, replayed or landed again while its records were checked",
        remedy="nothing was changed; run it again",
    )


def _try_records(edges: Ports, r: Receipt, wanted: Filter, shape: Shape, fixer: Fixer | None) -> Trial:
    sorter = Sorter(r.offset_range, shape, fixer, edges.writers)
    for part in r.of(PartKind.QUARANTINED):
        for rows in read_part_at(edges.lake, part, part.path):
            chosen, _ = wanted.split(rows, r.offset_range.tp)
            if chosen.num_rows:
                sorter.sort_out(chosen)
    return sorter.trial


def _unfit(lake: Lake, r: Receipt, schema: pa.Schema) -> str:
    """Why the offset range's landed rows do not fit today's types; empty when they do."""
    for part in r.parts:
        if part.kind is PartKind.LANDED:
            with parquet.open_parquet(lake, part.path) as file:
                landed = file.schema_arrow
            if why := unfit(landed, schema):
                return why
    return ""
