"""Checks of a window's rows against the feed's contract and schema, on `<feed>/landed`, or on `<feed>/<output>`.

There is one check for each group of expectations, and `schema_drift` for typed feeds. Results come from the ledger
alone: each receipt counts with the contract of its batch, not with today's file. Checks show coordinates of records,
never values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import dagster as dg

from sluice.assets.events.landed_metadata import build_column_schema, count_breaches
from sluice.assets.events.ledger_view import Judged, LedgerView
from sluice.assets.specs.asset_specs import Metadata, plain, table
from sluice.pipelines.contract.catalogue import RULES, ExpectationOutcome, Issue, text
from sluice.pipelines.contract.expectation import Expectation, Severity
from sluice.pipelines.errors import BatchRefused, Breach
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.receipts import EXAMPLES, Drift, DriftKind, Receipt
from sluice.pipelines.util.units import many
from sluice.pipelines.validation.drift import describe_drift, sum_drift

SCHEMA_DRIFT = "schema_drift"
MAX_LISTED = 50
"""Maximum number of expectations in a check's description."""
_SHOWN = 3

CheckResult = dict[str, Any]
"""A check's result: passed, severity, description, metadata."""


def find_check(e: Expectation) -> str:
    """Returns the name of the expectation's check: one for each data quality issue."""
    return _name_check(RULES[e.type].issue)


def _name_check(issue: Issue) -> str:
    return f"contract_{issue.lower()}"


def list_checks(feed: Feed) -> dict[str, str]:
    """Returns the descriptions of the contract and schema checks of a feed or an output, by name."""
    if feed.split:
        return {SCHEMA_DRIFT: _SPLIT}
    texts: dict[str, list[str]] = {}
    for e in feed.contract.expectations if feed.contract else ():
        texts.setdefault(find_check(e), []).append(f"{text(e)} ({e.severity})")
    checks = {name: _describe_expectations(texts[name]) for name in map(_name_check, Issue) if name in texts}
    return checks | ({SCHEMA_DRIFT: _SCHEMA} if feed.columns is not None else {})


def describe_check(feed: Feed, name: str) -> str:
    """Returns the description of a check, which the feed may no longer have."""
    return list_checks(feed).get(name) or f"{_GONE}: {RELOAD}."


_GONE = "The feed no longer has an expectation for this check"
RELOAD = "choose Reload definitions on the page Deployment"
"""What to do after the contract has changed."""

GONE: CheckResult = {"passed": True, "description": f"{_GONE}: {RELOAD}"}
"""The result of a check that the code location has loaded and the feed no longer has."""

_SCHEMA = (
    "Passes when all records match the feed's schema. Warns about fields that are new, missing, or of another type:"
    " `sluice schema diff FEED` compares the schema with the registry's."
)


_SPLIT = (
    "Passes when each record has an output. Warns about values by which `split` finds none: add them to an output's"
    " `values`, or leave them to `otherwise`."
)


def _describe_expectations(expectations: Sequence[str]) -> str:
    lines = [f"- {plain(e)}" for e in expectations[:MAX_LISTED]]
    more = [f"- … and {len(expectations) - MAX_LISTED} more"] if len(expectations) > MAX_LISTED else []
    return "\n".join(
        [
            "Passes when the rows meet these expectations of the contract. `show_rows` lists quarantined rows.",
            "",
            *lines,
            *more,
        ]
    )


def evaluate(view: LedgerView, window: int) -> Iterator[tuple[str, CheckResult]]:
    """Yields the result of each of the view's checks for the landed part of a window."""
    names = list_checks(view.feed)
    groups = [name for name in names if name != SCHEMA_DRIFT]
    judged = view.read_judged(window) if groups else ()
    for name in groups:
        yield name, _evaluate_group(view, window, [j for j in judged if find_check(j.outcome.expectation) == name])
    if SCHEMA_DRIFT in names:
        yield SCHEMA_DRIFT, _evaluate_drift(view, window)


def evaluate_refused(feed: Feed, refused: BatchRefused, page: str | None) -> Iterator[tuple[str, CheckResult]]:
    """Yields the results of the broken checks, for a window whose batch is refused. `page`: the path of its report."""
    for name in list_checks(feed):
        breaches = [b for b in refused.breaches if _find_breached(b) == name]
        if breaches:
            yield name, _evaluate_breaches(breaches, refused, page)


def _find_breached(breach: Breach) -> str:
    issue = RULES[breach.expectation].issue if breach.expectation in RULES else None
    return _name_check(issue) if issue else SCHEMA_DRIFT


def _evaluate_breaches(breaches: Sequence[Breach], refused: BatchRefused, page: str | None) -> CheckResult:
    columns = dict.fromkeys(("reason", "stage", "unexpected", "rows", "examples"), "string")
    counts = [(f"{n:,}" if n else "" for n in (b.records, b.checked)) for b in breaches]  # a batch's mean has none
    cells = [(b.said, b.stage, *c, ", ".join(b.first)) for b, c in zip(breaches, counts, strict=True)]
    rows = [dict(zip(columns, c, strict=True)) for c in cells]
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.ERROR,
        "description": plain(f"nothing was published: {_join(b.said for b in breaches)}"),
        "metadata": {"breaches": table(rows, columns), "remedy": refused.remedy} | _link_report(page),
    }


# -- the contract


def _is_failed(o: ExpectationOutcome) -> bool:
    return not o.passed and o.severity is not Severity.INFO


def _describe_outcome(o: ExpectationOutcome) -> str:
    words = text(o.expectation)
    if not o.unexpected:
        return f"{words}: {f'observed {o.observed}' if o.observed else 'not met'}"
    quarantined = ", quarantined" if o.quarantines else ""
    return f"{words}: broken by {o.unexpected:,} of {many(o.checked, 'row')} ({o.share:.2%}){quarantined}"


def _describe_fate(o: ExpectationOutcome) -> str:
    """Returns the outcome for the rows, in words."""
    if o.passed:
        return "met"
    if o.severity is Severity.INFO:
        return "broken: recorded"
    return "broken: quarantined" if o.quarantines else "broken: published"


def _evaluate_group(view: LedgerView, window: int, judged: Sequence[Judged]) -> CheckResult:
    failing = [j.outcome for j in judged if _is_failed(j.outcome)]
    severe = any(o.refuses for o in failing)
    return {
        "passed": not failing,
        "severity": dg.AssetCheckSeverity.ERROR if severe else dg.AssetCheckSeverity.WARN,
        "description": plain(
            _join(map(_describe_outcome, failing)) if failing else _describe_success(view, window, judged)
        ),
        "metadata": _build_metadata(view, window, judged),
    }


def _join(texts: Iterable[str]) -> str:
    lines = [*texts]
    more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "; ".join([*lines[:_SHOWN], *more])


def _describe_success(view: LedgerView, window: int, judged: Sequence[Judged]) -> str:
    rows = sum(r.counts.landed + r.counts.quarantined for r in view.list_receipts(window))
    if not judged:
        return "no expectation of this group applied to these rows" if rows else "nothing landed"
    recorded = [j.outcome for j in judged if not j.outcome.passed]
    message = f"{many(len(judged) - len(recorded), 'expectation')} met by {many(rows, 'row')}"
    return f"{message}; recorded: {_join(map(_describe_outcome, recorded))}" if recorded else message


def _build_metadata(view: LedgerView, window: int, judged: Sequence[Judged]) -> Metadata:
    quarantined = any(j.outcome.unexpected and j.outcome.quarantines for j in judged)
    ordered = sorted([j.outcome for j in judged], key=lambda o: (o.passed, not _is_failed(o)))
    return {
        "expectations": table([_build_row(o) for o in ordered], _COLUMNS),
        **count_breaches(judged),
        "contract": ", ".join(dict.fromkeys(j.contract for j in judged)) or "none",
        **(
            {"show_rows": f"sluice quarantine show {view.feed.name} --window {view.feed.window.name(window)}"}
            if quarantined
            else {}
        ),
        **_link_report(view.find_page(window)),
    }


def _link_report(page: str | None) -> Metadata:
    return {"report": dg.MetadataValue.path(page)} if page else {}


_COLUMNS = {
    "expectation": "string",
    "severity": "string",
    "result": "string",
    "observed": "string",
    "unexpected": "int",
    "share": "string",
    "examples": "string",
}


def _build_row(o: ExpectationOutcome) -> dict[str, str | int]:
    return {
        "expectation": text(o.expectation),
        "severity": str(o.severity),
        "result": _describe_fate(o),
        "observed": o.observed or (many(o.checked, "row") if o.checked else ""),
        "unexpected": o.unexpected,
        "share": f"{o.share:.2%}",
        "examples": ", ".join(o.first),
    }


# -- the schema


def _evaluate_drift(view: LedgerView, window: int) -> CheckResult:
    receipts = view.list_receipts(window)
    drifts = sum_drift(receipts)
    if view.feed.split:  # those of fields are drift of the outputs
        drifts = tuple(d for d in drifts if d.kind is DriftKind.UNROUTED)
    return {
        "passed": not drifts,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": plain(_join(map(describe_drift, drifts)))
        if drifts
        else "all records have an output"
        if view.feed.split
        else "all records match the schema",
        "metadata": build_drift_metadata(drifts, receipts) | build_column_schema(view, receipts),
    }


def build_drift_metadata(drifts: Sequence[Drift], receipts: Sequence[Receipt]) -> Metadata:
    """Returns the number of drifting fields by kind, and a table of them."""
    rows: list[dict[str, str | int]] = [
        {
            "field": d.field,
            "is": str(d.kind),
            "type": d.type,
            "records": d.records,
            "first": ", ".join(_list_coordinates(d, receipts)),
        }
        for d in drifts
    ]
    columns = {"field": "string", "is": "string", "type": "string", "records": "int", "first": "string"}
    counts = {f"{kind}_fields": sum(d.kind is kind for d in drifts) for kind in DriftKind}
    return counts | ({"drift": table(rows, columns)} if rows else {})


def _list_coordinates(drift: Drift, receipts: Sequence[Receipt]) -> list[str]:
    at = (
        f"{r.offset_range.tp}:{d.first}"
        for r in receipts
        for d in r.drift
        if (d.kind, d.field) == (drift.kind, drift.field)
    )
    return [first for first, _ in zip(at, range(EXAMPLES), strict=False)]
