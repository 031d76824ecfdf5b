"""What came of an expectation, for whoever asks: the ledger, checks, reports."""

from __future__ import annotations

from dataclasses import dataclass


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
