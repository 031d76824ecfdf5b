"""What came of expectations, for whoever asks: the decision to publish, the ledger, checks, reports. Light.

Row expectations are told by the tallies in receipts, those about a whole batch by the results in its publish entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.pipelines.contract.catalogue import Scope, argument, entry
from sluice.pipelines.contract.expectation import Contract, Expectation, Severity
from sluice.pipelines.vocabulary.receipts import EXAMPLES

if TYPE_CHECKING:
    from sluice.pipelines.vocabulary.receipts import Receipt


@dataclass(frozen=True, slots=True)
class Result:
    """What a batch as a whole said to one expectation: its place in the contract, and whether it holds.

    `observed` is the value that was compared, as text (empty: none); `checked` and `unexpected` count rows where the
    expectation is about rows, and `first` are `topic:partition:offset` of some that broke it.
    """

    expectation: int
    passed: bool
    observed: str = ""
    checked: int = 0
    unexpected: int = 0
    first: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpectationOutcome:
    """What a batch, or a window, said to one expectation; the fields are those of `Result`."""

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
        """Of the rows that it was about, those that broke it."""
        return self.unexpected / self.checked if self.checked else 0.0

    @property
    def quarantines(self) -> bool:
        """Rows that break it go into quarantine, each for itself: it never holds a batch back."""
        return self.severity is Severity.CRITICAL and by_row(self.expectation)

    @property
    def refuses(self) -> bool:
        """A batch that says this must not be published."""
        return not self.passed and self.severity is Severity.CRITICAL and not self.quarantines


def by_row(e: Expectation) -> bool:
    """Whether each row is right or wrong by itself: not what some rows may break, nor what is about all of them."""
    return entry(e).scope is Scope.ROW and argument(e, "mostly") == 1


def enough(checked: int, unexpected: int, mostly: float) -> bool:
    """Great Expectations' rule: no rows are always enough, and shares are compared as floats, without rounding."""
    return not checked or (checked - unexpected) / checked >= mostly


def contract_results(
    contract: Contract, receipts: Iterable[Receipt], results: Iterable[Result] = ()
) -> list[ExpectationOutcome]:
    """What came of each expectation, in the contract's order, over one batch or several.

    Of receipts those count whose rows were held against this contract. `results` are those of these receipts' publish
    entries, the oldest first: of several batches each must pass, and what is observed is the newest's, or the newest
    one's that did not. An expectation about whole batches of which no result speaks is left out.
    """
    held = f"contract {contract.hash}"
    mine = [r for r in receipts if held in r.format]
    by_place: dict[int, list[Result]] = {}
    for result in results:
        by_place.setdefault(result.expectation, []).append(result)
    found = []
    for e in contract.expectations:
        if entry(e).scope is Scope.ROW:
            found.append(_of_rows(e, mine))
        elif e.place in by_place:
            found.append(_of_batches(e, by_place[e.place]))
    return found


def _of_rows(e: Expectation, receipts: Sequence[Receipt]) -> ExpectationOutcome:
    tallies = [(r, t) for r in receipts for t in r.tallies if t.expectation == e.place]
    checked, unexpected = sum(t.checked for _, t in tallies), sum(t.unexpected for _, t in tallies)
    first = (f"{r.slice.tp}:{offset}" for r, t in tallies for offset in t.first)
    return ExpectationOutcome(
        e, enough(checked, unexpected, argument(e, "mostly")), "", checked, unexpected, _few(first)
    )


def _of_batches(e: Expectation, results: Sequence[Result]) -> ExpectationOutcome:
    failed = [r for r in results if not r.passed]
    shown = (failed or results)[-1]
    checked, unexpected = sum(r.checked for r in results), sum(r.unexpected for r in results)
    return ExpectationOutcome(
        e, not failed, shown.observed, checked, unexpected, _few(f for r in results for f in r.first)
    )


def _few(first: Iterator[str]) -> tuple[str, ...]:
    return tuple(f for f, _ in zip(first, range(EXAMPLES), strict=False))
