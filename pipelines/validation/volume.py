"""How many rows to expect after the earlier batches: Great Expectations' `windows`, answered from the ledger.

    {"type": "expect_table_row_count_to_be_between",
     "kwargs": {"min_value": {"$PARAMETER": "least"},
                "windows": [{"constraint_fn": "mean", "parameter_name": "least", "range": 5, "strict": false,
                             "offset": {"positive": 0.5, "negative": 0.5}}]}}

A parameter's value is `constraint_fn` of the row counts of the last `range` batches of the same kind. A lower bound is
that value less the share `negative`, an upper bound that value plus the share `positive`. With fewer such batches there
is no value. What needs it then passes and says so, or fails if the window is `strict`. (In Great Expectations, anything
that needs a parameter without a value fails.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.ledger import State
from sluice.pipelines.model.plans import Request

PARAMETER = "$PARAMETER"
FUNCTIONS: Mapping[str, Callable[[Sequence[int]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}
"""The values of `constraint_fn`, and their functions."""


class NoHistoryError(Exception):
    """A parameter has no value yet: it needs `needed` batches, and there are `there`. `strict`: what needs it fails."""

    def __init__(self, strict: bool, needed: int, there: int) -> None:
        super().__init__(f"no history yet: {there} of {needed} batches")
        self.strict = strict


def find_bounds(e: Expectation, earlier: Sequence[int]) -> tuple[float | None, float | None]:
    """The least and the most rows that the expectation allows; None where there is no bound.

    `earlier` are the row counts of earlier batches, the newest first. Raises NoHistoryError when there are too few.
    """
    minimum = _compute_bound(e, "min_value", earlier, lambda w: 1 - float(w["offset"]["negative"]))
    maximum = _compute_bound(e, "max_value", earlier, lambda w: 1 + float(w["offset"]["positive"]))
    return minimum, maximum


def _compute_bound(
    e: Expectation, name: str, earlier: Sequence[int], factor: Callable[[Mapping[str, Any]], float]
) -> float | None:
    value = e.kwargs.get(name)
    if not isinstance(value, Mapping):
        return value
    window = next(w for w in e.kwargs.get("windows") or () if w["parameter_name"] == value[PARAMETER])
    rows = earlier[: window["range"]]
    if len(rows) < window["range"]:
        raise NoHistoryError(bool(window.get("strict")), window["range"], len(rows))
    return FUNCTIONS[window["constraint_fn"]](rows) * factor(window)


def count_earlier_rows(state: State, request: Request, before: int) -> list[int]:
    """How many rows each earlier batch landed, the newest first.

    Counts batches that were planned before ledger number `before`, for the same kind of request and the same
    partitions, and that landed as a whole.
    """
    like = (b for b in state.batches.newest_first(before) if _get_kind(b.request) == _get_kind(request))
    return [b.rows for b in like if b.published is not None and not b.failed]


def _get_kind(request: Request) -> tuple[object, ...]:
    """What requests must have in common to be compared: one window or several, and the same partitions."""
    return request.kind, request.until is None, request.only
