"""How many rows are to be expected after the batches before: Great Expectations' `windows`, answered by the ledger.

    {"type": "expect_table_row_count_to_be_between",
     "kwargs": {"min_value": {"$PARAMETER": "least"},
                "windows": [{"constraint_fn": "mean", "parameter_name": "least", "range": 5, "strict": false,
                             "offset": {"positive": 0.5, "negative": 0.5}}]}}

A parameter is what `constraint_fn` makes of the rows of the last `range` batches of the same kind, less `negative` of
it for a lower bound, and more by `positive` of it for an upper one. While there are fewer such batches it has no value:
what needs it passes and says so, or, where the window is `strict`, fails, as in Great Expectations does whatever needs
a parameter without a value.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sluice.pipelines.contract.expectation import Expectation
from sluice.pipelines.ledger import State
from sluice.pipelines.vocabulary.plans import Request

PARAMETER = "$PARAMETER"
FUNCTIONS: Mapping[str, Callable[[Sequence[int]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}
"""What `constraint_fn` may say."""


class NoHistoryError(Exception):
    """A parameter has no value yet. `strict`: what needs it fails; `needed` and `there` are batches."""

    def __init__(self, strict: bool, needed: int, there: int) -> None:
        super().__init__(f"no history yet: {there} of {needed} batches")
        self.strict = strict


def bounds(e: Expectation, earlier: Sequence[int]) -> tuple[float | None, float | None]:
    """The least and the most rows, None where there is no bound. `earlier`: rows of the batches before, the newest
    first. Raises NoHistoryError."""
    least = _bound(e, "min_value", earlier, lambda w: 1 - float(w["offset"]["negative"]))
    most = _bound(e, "max_value", earlier, lambda w: 1 + float(w["offset"]["positive"]))
    return least, most


def _bound(
    e: Expectation, name: str, earlier: Sequence[int], factor: Callable[[Mapping[str, Any]], float]
) -> float | None:
    said = e.kwargs.get(name)
    if not isinstance(said, Mapping):
        return said
    window = next(w for w in e.kwargs.get("windows") or () if w["parameter_name"] == said[PARAMETER])
    rows = earlier[: window["range"]]
    if len(rows) < window["range"]:
        raise NoHistoryError(bool(window.get("strict")), window["range"], len(rows))
    return FUNCTIONS[window["constraint_fn"]](rows) * factor(window)


def earlier_rows(state: State, request: Request, before: int) -> list[int]:
    """Rows that the batches planned before ledger number `before` landed, the newest first: those of the same kind of
    request, for the same partitions, that landed whole."""
    earlier = (b for b in reversed(state.batches.values()) if b.id < before)
    like = (b for b in earlier if _kind(b.request) == _kind(request))
    return [b.rows for b in like if b.published is not None and not b.failed]


def _kind(request: Request) -> tuple[object, ...]:
    """One window is not compared with several, nor some partitions with all."""
    return request.kind, request.until is None, request.only
