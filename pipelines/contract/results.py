"""The result of each expectation: for the decision to publish, the ledger, checks and reports. Light.

Row expectations get their outcome from the tallies in receipts, whole-batch expectations from the results in the
batch's publish entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.pipelines.contract.catalogue import Scope, entry, get_argument
from sluice.pipelines.contract.expectation import Contract, Expectation, Severity
from sluice.pipelines.model.receipts import EXAMPLES

if TYPE_CHECKING:
    from sluice.pipelines.model.receipts import Receipt


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one expectation for a batch as a whole, by its position in the contract.

    `observed` is the value that was compared, as text; empty if there was none. Where the expectation is about rows,
    `unexpected` of `checked` rows broke it, and `first` names some of these as `topic:partition:offset`.
    """

    expectation: int
    passed: bool
    observed: str = ""
    checked: int = 0
    unexpected: int = 0
    first: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpectationOutcome:
    """The outcome of one expectation for a batch or a window. The other fields are those of `Result`."""

    expectation: Expectation
    passed: bool
    observed: str = ""
    checked: int = 0
    unexpected: int = 0
    first: tuple[str, ...] = ()

    @property
    def severity(self) -> Severity:
        return self.expectation.severity

    @property
    def share(self) -> float:
        """The share of checked rows that broke it, from 0 to 1."""
        return self.unexpected / self.checked if self.checked else 0.0

    @property
    def quarantines(self) -> bool:
        """Returns whether rows that break it go into quarantine one by one, so that it never holds a batch back."""
        return self.severity is Severity.CRITICAL and by_row(self.expectation)

    @property
    def refuses(self) -> bool:
        """Returns whether a batch with this outcome must not be published."""
        return not self.passed and self.severity is Severity.CRITICAL and not self.quarantines


def by_row(e: Expectation) -> bool:
    """Returns whether each row meets it or breaks it alone, and no row may break it."""
    return entry(e).scope is Scope.ROW and get_argument(e, "mostly") == 1


def enough(checked: int, unexpected: int, mostly: float) -> bool:
    """Great Expectations' rule for `mostly`: zero rows are enough, and shares are compared as floats, unrounded."""
    return not checked or (checked - unexpected) / checked >= mostly


def contract_results(
    contract: Contract, receipts: Iterable[Receipt], results: Iterable[Result] = ()
) -> list[ExpectationOutcome]:
    """The outcome of each expectation, in the contract's order, over one batch or several.

    Only receipts whose rows were checked against this contract count. `results` come from these receipts' publish
    entries, the oldest first. Of several batches each must pass; the observed value is that of the newest failed one,
    or else of the newest. An expectation about whole batches without any result is left out.
    """
    condition = f"contract {contract.hash}"
    mine = [r for r in receipts if condition in r.format]
    by_place: dict[int, list[Result]] = {}
    for result in results:
        by_place.setdefault(result.expectation, []).append(result)
    outcomes = []
    for e in contract.expectations:
        if entry(e).scope is Scope.ROW:
            outcomes.append(_of_rows(e, mine))
        elif e.place in by_place:
            outcomes.append(_of_batches(e, by_place[e.place]))
    return outcomes


def _of_rows(e: Expectation, receipts: Sequence[Receipt]) -> ExpectationOutcome:
    tallies = [(r, t) for r in receipts for t in r.tallies if t.expectation == e.place]
    checked, unexpected = sum(t.checked for _, t in tallies), sum(t.unexpected for _, t in tallies)
    first = (f"{r.offset_range.tp}:{offset}" for r, t in tallies for offset in t.first)
    return ExpectationOutcome(
        e, enough(checked, unexpected, get_argument(e, "mostly")), "", checked, unexpected, _few(first)
    )


def _of_batches(e: Expectation, results: Sequence[Result]) -> ExpectationOutcome:
    failed = [r for r in results if not r.passed]
    latest = (failed or results)[-1]
    checked, unexpected = sum(r.checked for r in results), sum(r.unexpected for r in results)
    return ExpectationOutcome(
        e, not failed, latest.observed, checked, unexpected, _few(f for r in results for f in r.first)
    )


def _few(first: Iterator[str]) -> tuple[str, ...]:
    return tuple(f for f, _ in zip(first, range(EXAMPLES), strict=False))
