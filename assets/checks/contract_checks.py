"""How a window's rows meet the feed's contract and its schema, as checks on `<feed>/landed`: one for each group of
expectations, and `schema` for typed feeds.

Everything comes from the ledger: receipts' tallies and drift, and the results in publish entries. Each receipt is
judged by the contract that it was checked against, whatever the feed's files have said since. Checks never show a
record's value, only where the record is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import dagster as dg

from sluice.assets.events.landed_metadata import breach_counts, column_schema
from sluice.assets.events.ledger_view import Judged, LedgerView
from sluice.assets.specs.markdown import plain
from sluice.assets.specs.metadata_tables import Metadata, table
from sluice.pipelines.contract.catalogue import ENTRIES, Issue, text
from sluice.pipelines.contract.expectation import Expectation, Severity
from sluice.pipelines.contract.results import ExpectationOutcome
from sluice.pipelines.errors import BatchRefused, Breach
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.receipts import EXAMPLES, Drift, DriftKind, Receipt
from sluice.pipelines.util.units import many, show_window
from sluice.pipelines.validation.drift import describe_drift, sum_drift

SCHEMA = "schema"
MOST_LISTED = 50
"""How many expectations a check's description names."""
_SAID = 3

CheckResult = dict[str, Any]
"""A check's result: passed, severity, description, metadata."""


def group_of(e: Expectation) -> str:
    """The check that the expectation belongs to: one for each data quality issue."""
    return _check(ENTRIES[e.type].issue)


def _check(issue: Issue) -> str:
    return f"contract_{issue.lower()}"


def described_checks(feed: Feed) -> dict[str, str]:
    """The feed's checks of contract and schema: their names, and the description of each."""
    found: dict[str, list[str]] = {}
    for e in feed.contract.expectations if feed.contract else ():
        found.setdefault(group_of(e), []).append(f"{text(e)} ({e.severity})")
    checks = {name: _expectation_list(found[name]) for name in map(_check, Issue) if name in found}
    return checks | ({SCHEMA: _SCHEMA} if feed.columns is not None else {})


_SCHEMA = "Whether the records match the schema, by the ledger: fields that are new, missing, or of another type."


def _expectation_list(expectations: Sequence[str]) -> str:
    shown = [f"- {plain(e)}" for e in expectations[:MOST_LISTED]]
    more = [f"- … and {len(expectations) - MOST_LISTED} more"] if len(expectations) > MOST_LISTED else []
    return "\n".join(["By the ledger, each window against the contract:", "", *shown, *more])


def verdicts(books: LedgerView, window: int) -> Iterator[tuple[str, CheckResult]]:
    """Returns the result of each of the feed's checks for the landed part of a window."""
    names = described_checks(books.feed)
    groups = [name for name in names if name != SCHEMA]
    found = books.judged(window) if groups else ()
    for name in groups:
        yield name, _of_group(books, window, [j for j in found if group_of(j.outcome.expectation) == name])
    if SCHEMA in names:
        yield SCHEMA, _of_schema(books, window)


def refusals(feed: Feed, refused: BatchRefused, page: str | None) -> Iterator[tuple[str, CheckResult]]:
    """The results of the checks concerned, for a window whose batch must not be published. `page`: where the batch's
    report lies."""
    for name in described_checks(feed):
        breaches = [b for b in refused.breaches if _check_of(b) == name]
        if breaches:
            yield name, _of_breaches(breaches, refused, page)


def _check_of(breach: Breach) -> str:
    issue = ENTRIES[breach.expectation].issue if breach.expectation in ENTRIES else None
    return _check(issue) if issue else SCHEMA


def _of_breaches(breaches: Sequence[Breach], refused: BatchRefused, page: str | None) -> CheckResult:
    rows: list[dict[str, str | int]] = [
        {"what": b.said, "stage": b.stage, "unexpected": b.records, "rows": b.checked, "examples": ", ".join(b.first)}
        for b in breaches
    ]
    columns = {"what": "string", "stage": "string", "unexpected": "int", "rows": "int", "examples": "string"}
    return {
        "passed": False,
        "severity": dg.AssetCheckSeverity.ERROR,
        "description": plain(f"nothing was published: {_lines(b.said for b in breaches)}"),
        "metadata": {"breaches": table(rows, columns), "way out": refused.remedy} | _report(page),
    }


# -- the contract


def _fails(o: ExpectationOutcome) -> bool:
    return not o.passed and o.severity is not Severity.INFO


def _line(o: ExpectationOutcome) -> str:
    words = text(o.expectation)
    if not o.unexpected:
        return f"{words}: {f'observed {o.observed}' if o.observed else 'it is not so'}"
    kept_out = ", kept out" if o.quarantines else ""
    return f"{words}: broken by {o.unexpected:,} of {many(o.checked, 'row')} ({o.share:.2%}){kept_out}"


def _fate(o: ExpectationOutcome) -> str:
    """What happened to the rows."""
    if o.passed:
        return "met"
    if o.severity is Severity.INFO:
        return "broken: recorded"
    return "broken: kept out" if o.quarantines else "broken: published"


def _of_group(books: LedgerView, window: int, found: Sequence[Judged]) -> CheckResult:
    failing = [j.outcome for j in found if _fails(j.outcome)]
    severe = any(o.refuses for o in failing)
    return {
        "passed": not failing,
        "severity": dg.AssetCheckSeverity.ERROR if severe else dg.AssetCheckSeverity.WARN,
        "description": plain(_lines(map(_line, failing)) if failing else _fine(books, window, found)),
        "metadata": _of_judged(books, window, found),
    }


def _lines(said: Iterable[str]) -> str:
    lines = [*said]
    more = [f"… and {len(lines) - _SAID} more"] if len(lines) > _SAID else []
    return "; ".join([*lines[:_SAID], *more])


def _fine(books: LedgerView, window: int, found: Sequence[Judged]) -> str:
    rows = sum(r.counts.records for r in books.receipts_in(window))
    if not found:
        return "these rows were held against no such expectations" if rows else "nothing landed"
    recorded = [j.outcome for j in found if not j.outcome.passed]
    said = f"{many(len(found) - len(recorded), 'expectation')} met by {many(rows, 'row')}"
    return f"{said}; recorded: {_lines(map(_line, recorded))}" if recorded else said


def _of_judged(books: LedgerView, window: int, found: Sequence[Judged]) -> Metadata:
    kept_out = any(j.outcome.unexpected and j.outcome.quarantines for j in found)
    return {
        "expectations": _table([j.outcome for j in found]),
        **breach_counts(found),
        "contract": ", ".join(dict.fromkeys(j.contract for j in found)) or "none",
        **({"look at them": _show(books.feed.name, window)} if kept_out else {}),
        **_report(books.page(window)),
    }


def _report(page: str | None) -> Metadata:
    return {"report": dg.MetadataValue.path(page)} if page else {}


def _show(feed: str, window: int) -> str:
    return f"sluice quarantine show {feed} --window {show_window(window)}"


def _table(found: Sequence[ExpectationOutcome]) -> dg.TableMetadataValue:
    """The results as a table, the broken ones first."""
    ordered = sorted(found, key=lambda o: (o.passed, not _fails(o)))
    return table([_row(o) for o in ordered], _COLUMNS)


_COLUMNS = {
    "expectation": "string",
    "severity": "string",
    "result": "string",
    "observed": "string",
    "unexpected": "int",
    "share": "string",
    "examples": "string",
}


def _row(o: ExpectationOutcome) -> dict[str, str | int]:
    return {
        "expectation": text(o.expectation),
        "severity": str(o.severity),
        "result": _fate(o),
        "observed": o.observed or (many(o.checked, "row") if o.checked else ""),
        "unexpected": o.unexpected,
        "share": f"{o.share:.2%}",
        "examples": ", ".join(o.first),
    }


# -- the schema


def _of_schema(books: LedgerView, window: int) -> CheckResult:
    receipts = books.receipts_in(window)
    found = sum_drift(receipts)
    return {
        "passed": not found,
        "severity": dg.AssetCheckSeverity.WARN,
        "description": plain(_lines(map(describe_drift, found))) if found else "as the schema says",
        "metadata": of_drift(found, receipts) | column_schema(books, receipts),
    }


def of_drift(found: Sequence[Drift], receipts: Sequence[Receipt]) -> Metadata:
    """How many fields drift in which way, and which fields."""
    rows: list[dict[str, str | int]] = [
        {
            "field": d.field,
            "is": str(d.kind),
            "type": d.type,
            "records": d.records,
            "first": ", ".join(_coordinates(d, receipts)),
        }
        for d in found
    ]
    columns = {"field": "string", "is": "string", "type": "string", "records": "int", "first": "string"}
    counts = {f"{kind}_fields": sum(d.kind is kind for d in found) for kind in DriftKind}
    return counts | ({"drift": table(rows, columns)} if rows else {})


def _coordinates(drift: Drift, receipts: Sequence[Receipt]) -> list[str]:
    at = (
        f"{r.slice.tp}:{d.first}" for r in receipts for d in r.drift if (d.kind, d.field) == (drift.kind, drift.field)
    )
    return [first for first, _ in zip(at, range(EXAMPLES), strict=False)]
