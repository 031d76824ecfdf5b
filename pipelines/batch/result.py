"""One call of `land` or `preview`: its context, its results batch by batch, and the error if it landed only a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.pipelines.contract.catalogue import Result
from sluice.pipelines.errors import (
    BatchIncomplete,
    BatchRefused,
    CorruptBatch,
    OffsetsLost,
    OversizedBatch,
    Refused,
    RegistryForbidden,
    RegistryUnavailable,
    UnsupportedBatch,
    UsageError,
    WindowHeld,
    is_transient,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import OnLoss
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import (
    KeyRange,
)
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.plans import Plan, Request
from sluice.pipelines.model.receipts import (
    NO_TRAFFIC,
    Counts,
    EngineUse,
    Owner,
    RangeFailure,
    Receipt,
    Reporter,
    Traffic,
    sum_counts,
)
from sluice.pipelines.planning import origins
from sluice.pipelines.planning.held_back import HeldBack
from sluice.pipelines.planning.origins import Refusal
from sluice.pipelines.planning.windows import OpenWindows
from sluice.pipelines.ports import Ports
from sluice.pipelines.status.batch_facts import BatchFacts
from sluice.pipelines.util.documents import AsText, Derived, Flat, Internal
from sluice.pipelines.util.grouping import group_by
from sluice.pipelines.util.units import parse_instant


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a feed, with the ports and the ledger."""

    feed: Feed
    ports: Ports
    ledger: Ledger
    request: Request


@dataclass(frozen=True, slots=True)
class LandingRun(Call):
    """A call that writes: `owner` signs its entries, `report` hears of its progress."""

    owner: Owner
    report: Reporter


@dataclass(frozen=True, slots=True)
class Skip:
    """A request to skip pending offsets up to a time (ms; None: the last stable offset), with the reason."""

    to: int | None
    reason: str

    @classmethod
    def parse(cls, to: str, reason: str) -> Skip | None:
        """Returns the skip to `latest` or to an ISO time with zone; None if `to` is empty. Raises UsageError."""
        if not to:
            return None
        if not reason.strip():
            raise UsageError("skipping records needs a reason", remedy="say why; the ledger keeps the reason")
        try:
            return cls(None if to == "latest" else parse_instant(to), reason)
        except ValueError as error:
            raise UsageError(f"{to!r} {error}", remedy="skip to `latest`, or to such a time") from None


@dataclass(frozen=True, slots=True)
class LandedPartition:
    """The landed ranges of one partition. `files` counts parts."""

    key: Flat[Key]
    ranges: tuple[Range, ...]
    files: int
    bytes: int
    counts: Flat[Counts]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch carried out. `failures` are offset ranges that stay pending, `number` is its publish entry, if any,
    `results` are the contract's for the complete batch, and `traffic` is its tasks' traffic with brokers in this run.

    `foreign`: this run finished or gave up another run's batch. Its failures are reported, but do not fail this run.
    `refused` is the reason why nothing of a foreign batch was published. `refused_windows` is the number of its
    windows that were left out because they are refused.
    """

    batch: int
    plan: Internal[Plan]
    receipts: Internal[tuple[Receipt, ...]]
    failures: tuple[RangeFailure, ...]
    number: Internal[int | None]
    results: Internal[tuple[Result, ...]] = ()
    foreign: bool = False
    refused: str = ""
    refused_windows: int = 0
    traffic: Internal[Traffic] = NO_TRAFFIC

    @property
    def request(self) -> Derived[AsText[Request]]:
        return self.plan.request

    @property
    def hash(self) -> Derived[str]:
        return self.plan.hash

    @property
    def published(self) -> Derived[int | None]:
        return self.number

    @property
    def engines(self) -> Derived[tuple[EngineUse, ...]]:
        return self.traffic.engines

    @property
    def replaced_files(self) -> Derived[int]:
        return len(self.plan.replaces) if self.number is not None else 0

    @property
    def partitions(self) -> Derived[tuple[LandedPartition, ...]]:
        groups = BatchFacts(self.receipts).by_partition.items()
        return tuple(LandedPartition(k, f.ranges, f.part_count, f.bytes, f.counts) for k, f in groups)

    @property
    def counts(self) -> Derived[Flat[Counts]]:
        return sum_counts(self.receipts)

    @property
    def bytes(self) -> Derived[int]:
        return sum(p.bytes for r in self.receipts for p in r.parts)

    @property
    def adopted_offset_ranges(self) -> Derived[int]:
        """The number of offset ranges that an earlier attempt had finished."""
        return sum(r.adopted for r in self.receipts)


@dataclass(frozen=True, slots=True)
class Landed:
    """The result of one call. Without batches, nothing was pending."""

    batches: tuple[BatchResult, ...]
    refusals: tuple[Refusal, ...]
    losses: tuple[KeyRange, ...]
    windows: Internal[tuple[int, ...]] = ()
    """The windows (their starts, ms) that this call made complete."""
    frontiers: Mapping[Key, int] = field(default_factory=dict)
    left: int = 0
    """Requested offsets still pending because the feed's limits ended the run, or because it was `stopped`."""
    skipped: tuple[KeyRange, ...] = ()
    held_back: tuple[HeldBack, ...] = ()
    """Offsets that open transactions hold back."""
    stopped: Internal[bool] = False
    """Whether the caller ended the run between two batches: the rest is left to another run."""
    open_windows: Internal[OpenWindows | None] = None
    """The requested windows within their grace period: nothing of them was landed."""
    overridden: str = ""
    """The columns that readers of the folder override, and the remedy; empty if none."""
    refused: Internal[BatchRefused | None] = None
    """The error of the first batch of this request that was refused; everything else has landed."""
    start_not_used: str = ""
    """The reason why the feed's `start` was ignored; empty if it was not, or if the feed had begun before."""
    boundary_reads: int = 0
    """Reads of the logs that decided the boundaries of windows."""

    @property
    def failures(self) -> tuple[RangeFailure, ...]:
        """The offset ranges that failed, except those whose records Kafka deleted if this call accepted the loss."""
        return tuple(f for b in self.batches if not b.foreign for f in b.failures if not self._is_accepted(f))

    def _is_accepted(self, f: RangeFailure) -> bool:
        lost = (x.range for x in self.losses if x.key == f.offset_range.key)
        return f.error == OffsetsLost.__name__ and any(r.meets(f.offset_range.range) for r in lost)

    def check(self) -> None:
        """Raises BatchIncomplete if anything requested was not landed; if that is one refusal, raises its error."""
        if self.refused:
            raise self.refused
        if self.failures:
            raise _build_incomplete_error(self)
        if len(self.refusals) == 1:
            raise self.refusals[0].error
        if self.refusals:
            refusals = self.refusals
            kind = WindowHeld if all(isinstance(r.error, WindowHeld) for r in refusals) else Refused
            lines = "\n    ".join(r.error.message for r in refusals[:10])
            others = "the others are landed" if self.batches else "the others have nothing pending"
            raise kind(
                f"{len(refusals)} partitions were refused, {others}:\n    {lines}",
                remedy=refusals[0].error.remedy,
            )


def has_registry_failure(result: BatchResult) -> bool:
    """Returns whether offset ranges failed because the schema registry did: others would fail, too."""
    return any(f.error in _OF_REGISTRY for f in result.failures)


def describe_first_failure(failures: Sequence[RangeFailure]) -> str:
    more = f" (and {len(failures) - 1} more offset ranges)" if len(failures) > 1 else ""
    return f"{failures[0].offset_range}: {failures[0].message}{more}" if failures else ""


def was_lost_since_plan(feed: Feed, result: BatchResult) -> bool:
    """Returns whether Kafka deleted records since the plan and the feed accepts that: a new plan names the loss."""
    lost = any(f.error == OffsetsLost.__name__ for f in result.failures)
    return lost and feed.policies.on_loss is OnLoss.ACCEPT


def _build_incomplete_error(landed: Landed) -> BatchIncomplete:
    failures, refusals = landed.failures, landed.refusals
    alike = list(group_by(failures, lambda f: f.message).items())[:5]
    lines = [f"{describe_first(of)}: {message}" for message, of in alike]
    lines += [f"{r.tp}: {r.error.message}" for r in refusals[:5]]
    more = len(failures) - sum(len(of) for _, of in alike) + max(len(refusals) - 5, 0)
    published = any(b.number is not None for b in landed.batches)
    head = f"{len(failures)} offset ranges failed; " + (
        "the others are published" if published else "nothing was published"
    )
    remedies = sorted({r for f in failures if (r := find_remedy(landed.batches[0].plan.feed, f))})
    return BatchIncomplete(
        head + ":\n    " + "\n    ".join(lines) + (f"\n    … and {more} more" if more > 0 else ""),
        remedy="; ".join(remedies[:5]) or "run again: finished offset ranges are adopted, only the others are read",
        transient=all(is_transient(f.error) for f in failures) and all(is_transient(r.error) for r in refusals),
    )


def describe_first(alike: Sequence[RangeFailure]) -> str:
    """Returns the first offset range of failures and the number of others."""
    return f"{alike[0].offset_range} and {len(alike) - 1:,} more" if alike[1:] else str(alike[0].offset_range)


_OF_REGISTRY = {RegistryUnavailable.__name__, RegistryForbidden.__name__}
_UNREADABLE = {kind.__name__ for kind in (CorruptBatch, UnsupportedBatch, OversizedBatch)}


def find_remedy(feed: str, f: RangeFailure) -> str:
    """Returns the remedy for a failed offset range, with the command that accepts it if it cannot be read."""
    accept = origins.format_accept(feed, "corrupt", f" --offsets {f.offset_range}") if f.error in _UNREADABLE else ""
    return f"{f.remedy}: {accept}" if accept else f.remedy
