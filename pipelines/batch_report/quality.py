"""Sections of the page about the records: quarantine, contract, columns, drift.

Raw records in quarantine are read only for the few that are shown. Memory is bounded by one row group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.pipelines.batch_report.batch_account import BatchAccount
from sluice.pipelines.batch_report.column_profiles import Profile, Profiles
from sluice.pipelines.batch_report.markup import (
    Bar,
    Html,
    cut,
    details,
    harmless,
    join_html,
    lying,
    number,
    plain,
    readable,
    section,
    share,
    size,
    table,
    tag,
    upright,
    value,
)
from sluice.pipelines.contract import catalogue
from sluice.pipelines.contract.catalogue import ExpectationOutcome
from sluice.pipelines.contract.expectation import Contract, Expectation, Severity
from sluice.pipelines.errors import PartUnreadable
from sluice.pipelines.model.receipts import Counts, DriftKind, Part, Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.limit import Fault, QuarantineKind, faults_of, rank_faults
from sluice.pipelines.quarantine.listing import QuarantineGroup, RejectedRecord, SampledGroup, sample_groups
from sluice.pipelines.util.units import many, show_instant
from sluice.pipelines.validation.drift import OTHERS

MOST_FILES = 200
"""Files in quarantine that are read; of the others only the number of rows is known."""


@dataclass(frozen=True, slots=True)
class Rejects:
    """The most frequent first. `unread`: rows in files that were not read, `files` of them."""

    groups: tuple[SampledGroup, ...] = ()
    unread: int = 0
    files: int = 0


Placed = tuple[Receipt, Part]


def rejects(parts: Sequence[Placed], lake: Lake, *, published: bool) -> Rejects:
    """Returns the rejects in the quarantined parts. Missing (replaced, retired) or damaged files count as unread."""
    faults: list[Fault] = []
    files: dict[str, int] = {}
    for _, part in parts:
        files[_path(part, published)] = files.get(_path(part, published), 0) + part.rows
    unread = [*files][MOST_FILES:]
    for path in [*files][:MOST_FILES]:
        try:
            faults += faults_of([path], lake)
        except PartUnreadable:
            unread.append(path)
    ranked = sorted(rank_faults(faults), key=lambda f: (-f.records, f.first))
    groups = (QuarantineGroup(None, None, f.kind, f.records, f.first) for f in ranked)
    samples = sample_groups(groups, lake, [(r.offset_range, _path(part, published)) for r, part in parts])
    return Rejects(samples, sum(files[path] for path in unread), len(unread))


def _path(part: Part, published: bool) -> str:
    return part.path if published else part.staged


REASONS = 40
EXPECTATIONS = 100
DRIFTS = 60
NAME = 80
"""Characters of a name from outside."""

# -- quarantine


def quarantine(counts: Counts, refused_records: Rejects) -> Html | None:
    """Refused records, most frequent first, with a few samples of each kind. Shares are of all records."""
    refused, total = counts.quarantined, counts.records
    if not refused:
        return None
    note = f"{many(refused, 'record')} of {number(total)} ({share(refused, total)}) did not fit; quarantine keeps them."
    if refused_records.unread:
        unread_files = many(refused_records.files, "file")
        note += f" {number(refused_records.unread)} of them are in {unread_files} that were not read."
    with_samples = [g for g in refused_records.groups if g.samples]
    samples = details("Samples", *map(_samples, with_samples)) if with_samples else Html("")
    opened = Html(samples.replace("<details>", "<details open>", 1))
    return section("quarantine", "Quarantine", _ranked_faults(refused_records, total), opened, note=note)


def _ranked_faults(refused_records: Rejects, all_: int) -> Html:
    faults = [g.group for g in refused_records.groups]
    largest = faults[0].records if faults else 0
    rows = [
        [
            *_kind_lines(f.kind),
            lying([(f.records, "reject")], largest),
            number(f.records),
            share(f.records, all_),
            tag("code", f.first),
        ]
        for f in faults[:REASONS]
    ]
    if rest := faults[REASONS:]:
        remaining = sum(f.records for f in rest)
        rows.append(["", f"{len(rest):,} more reasons", "", "", number(remaining), share(remaining, all_), ""])
    columns = ["stage", "reason", "where", "", "records", "share", "the first"]
    return table("Quarantined records by reason", columns, rows, right=["records", "share"], cards=["the first"])


def _kind_lines(kind: QuarantineKind) -> list[str]:
    where = [value(kind.field, NAME)] if kind.field else []
    expectation = [tag("div", cut(kind.expectation, NAME), class_="soft")] if kind.expectation else []
    why = join_html([tag("b", cut(kind.reason, NAME)), tag("div", cut(kind.detail, 160), class_="soft any")])
    return [cut(kind.stage, NAME), why, join_html([*where, *expectation])]


def _samples(g: SampledGroup) -> Html:
    kind = g.group.kind
    where = [" · ", value(kind.field, NAME)] if kind.field else []
    head = tag("h3", cut(kind.reason, NAME), *where)
    return tag("div", head, *(_sample(s) for s in g.samples), class_="kind")


def _sample(s: RejectedRecord) -> Html:
    stamp = "" if s.timestamp is None else f" · {show_instant(s.timestamp)}"
    key = [] if s.key is None else [" · key ", tag("code", value(readable(s.key, 80)))]
    line = tag("div", tag("code", s.position), stamp, *key, f" · {size(s.size)}", class_="soft any")
    if s.value is None:
        return join_html([line, tag("div", s.absence, class_="sample soft")])
    before, wrong, after = s.pieces
    marked = (value(before), *([tag("mark", wrong)] if wrong else []), value(after))
    return join_html([line, tag("code", *marked, class_="sample")])


# -- the contract

_MARKS = {"good": "✓", "warn": "!", "bad": "✗", "info": "·"}


def contract(a: BatchAccount, profiles: Profiles) -> Html | None:
    """Every expectation in words, broken ones first, with examples."""
    if a.facts.contract is None:
        note = "Each output has a contract of its own: Dagster's checks have the results."
        return section("contract", "Contract", note=note) if a.is_split else None
    decided = {o.expectation.place: o for o in a.facts.outcomes}
    ranked = sorted(a.facts.contract.expectations, key=lambda e: (_rank(decided.get(e.place)), e.place))
    expectation_rows = [_expectation(e, decided.get(e.place), profiles) for e in ranked[:EXPECTATIONS]]
    columns = ["holds", "expectation", "severity", "observed", "rows", "unexpected", "share"]
    inside = table("Expectations", columns, expectation_rows, right=["rows", "unexpected", "share"], cards=["observed"])
    return section(
        "contract", "Contract", inside, note=_summary(a.facts.contract, decided, len(ranked) - len(expectation_rows))
    )


def _summary(suite: Contract, decided: dict[int, ExpectationOutcome], left_out: int) -> str:
    broken = sum(not o.passed for o in decided.values())
    rows = sum(o.passed and o.unexpected > 0 for o in decided.values())
    undecided = len(suite.expectations) - len(decided)
    parts = [f"{many(len(suite.expectations), 'expectation')}: {len(decided) - broken - rows} hold without exception"]
    parts += [f"{broken} broken"] if broken else []
    parts += [f"{rows} hold with exceptions"] if rows else []
    parts += [f"{undecided} not decided"] if undecided else []
    return ", ".join(parts) + "." + (f" {left_out} that hold are not shown." if left_out else "")


def _state(o: ExpectationOutcome | None) -> str:
    """The colour of the result."""
    if o is None:
        return "info"
    if o.passed and not o.unexpected:
        return "good"
    if o.refuses or (o.quarantines and o.unexpected):
        return "bad"
    return "info" if o.severity is Severity.INFO else "good" if o.passed else "warn"


_WORDS = {"good": "holds", "warn": "broken", "bad": "broken", "info": "recorded"}


def _rank(o: ExpectationOutcome | None) -> int:
    return ["bad", "warn", "info", "good"].index(_state(o)) if o else 2


def _expectation(e: Expectation, o: ExpectationOutcome | None, profiles: Profiles) -> list[str]:
    state = _state(o)
    word = "not decided" if o is None else _WORDS[state]
    mark = tag("span", _MARKS[state], class_=state, title=word, role="img", aria_label=word)
    description = join_html(
        [tag("div", catalogue.text(e), class_="any"), tag("div", e.type, class_="soft"), *_examples(o, profiles)]
    )
    pill = tag(
        "span",
        str(e.severity),
        class_=f"pill {state if state in ('bad', 'warn') else 'info'}",
    )
    if o is None:
        return [mark, description, pill, tag("span", "not decided", class_="soft"), "", "", ""]
    figures = [number(o.checked), number(o.unexpected), share(o.unexpected, o.checked)] if o.checked else ["", "", ""]
    return [mark, description, pill, tag("span", cut(o.observed, 160), class_="any") if o.observed else "", *figures]


def _examples(o: ExpectationOutcome | None, profiles: Profiles) -> list[Html]:
    """Where the first rows are that broke it, and the values of its columns there, if known."""
    if o is None or not o.first:
        return []
    lines = []
    for position in o.first:
        row = profiles.examples.get(position, {})
        cells = [(c, row[c]) for c in dict.fromkeys(catalogue.columns(o.expectation)) if c in row][:4]
        values = (tag("span", "  ", cut(c, NAME), " = ", value(v, 60)) for c, v in cells)
        lines.append(tag("div", tag("code", position), *values))
    return [tag("div", *lines, class_="soft any")]


# -- columns


def columns(a: BatchAccount, profiles: Profiles) -> Html | None:
    """How the values are spread."""
    if not profiles.columns and not profiles.missing:
        return None
    note = "Of the records' times, and of the columns that the contract is about."
    if profiles.is_sampled:
        note += f" Of a sample of {number(profiles.rows)} of {number(profiles.all_)} rows."
    if profiles.missing:
        note += f" {many(profiles.missing, 'file')} of it are not there any more (landed again, merged or retired)."
    if profiles.left_out:
        note += f" {many(len(profiles.left_out), 'column')} more are not shown."
    drawn = sorted(profiles.columns, key=lambda p: (not p.bins, not _repeats(p), -len(p.top)))
    cards = (_card(p) for p in drawn)
    return section("columns", "Columns", tag("div", *cards, class_="cards"), note=note)


def _card(p: Profile) -> Html:
    nulls = f"{share(p.nulls, p.rows)} null" if p.nulls else "no nulls"
    stats = " · ".join([f"{name} {figure}" for name, figure in p.stats] + [nulls])
    head = [
        tag("h3", value(p.name, NAME), " ", tag("span", cut(p.type, 40), class_="soft")),
        tag("div", stats, class_="stats"),
    ]
    if p.bins:
        return tag("div", *head, *_histogram(p), class_="card")
    if _repeats(p):
        return tag("div", *head, _most_frequent(p), class_="card")
    return tag("div", *head, class_="card")


def _repeats(p: Profile) -> bool:
    """Returns whether some values occur more than once: otherwise a list is not worth it."""
    return bool(p.top) and p.top[0][1] > 1


def _histogram(p: Profile) -> list[Html]:
    largest = max(b.rows for b in p.bins)
    bars = [Bar(b.label, b.rows, "other" if b.edge else "") for b in p.bins]
    name = harmless(cut(p.name, NAME))
    beyond = "; grey: values outside the range shown" if any(b.edge for b in p.bins) else ""
    plot = upright(f"Histogram of {name}", bars, p.ends, f"{p.of}, up to {many(largest, 'row')} a bar{beyond}")
    rows = [[b.label, number(b.rows)] for b in p.bins if b.rows]
    return [plot, details("As a table", table(f"Histogram of {name}", [p.of, "rows"], rows, right=["rows"]))]


def _most_frequent(p: Profile) -> Html:
    largest = p.top[0][1]
    rows = [
        [
            tag("span", "empty text", class_="soft") if not v else value(v, 60),
            lying([(n, "")], largest),
            number(n),
            share(n, p.rows),
        ]
        for v, n in p.top
    ]
    return table(
        f"Most frequent values of {cut(p.name, NAME)}", ["value", "", "rows", "share"], rows, right=["rows", "share"]
    )


# -- drift

_DRIFTS = {
    DriftKind.NEW: "a field that the schema does not name",
    DriftKind.MISSING: "a field that no record has",
    DriftKind.WIDENED: "values of a larger type",
    DriftKind.WRONG: "values of another type",
    DriftKind.OUT_OF_RANGE: "values out of range",
    DriftKind.INEXACT: "numbers with more digits than the type holds",
    DriftKind.MALFORMED: "texts that are not written as the type has it",
    DriftKind.UNLISTED: "values that the enum does not have",
    DriftKind.UNROUTED: "a value that leads to no output",
}


def drift(a: BatchAccount) -> Html | None:
    """How records differ from the schema."""
    drifts = sorted(a.facts.drift, key=lambda d: (-d.records, d.kind, d.field))
    if not drifts:
        return None
    largest = drifts[0].records
    rows = [
        [
            str(d.kind),
            tag("span", "further fields", class_="soft") if d.field == OTHERS else value(d.field, NAME),
            plain(a.types.get(d.field, "–"), 60),
            plain(d.type or "–", 60),
            lying([(d.records, "other")], largest),
            number(d.records),
            f"{d.first:,}",
        ]
        for d in drifts[:DRIFTS]
    ]
    if rest := drifts[DRIFTS:]:
        rows.append([f"{len(rest):,} more", "", "", "", "", number(sum(d.records for d in rest)), ""])
    columns_ = ["kind", "field", "schema", "would hold it", "", "records", "first offset"]
    kinds = dict.fromkeys(d.kind for d in drifts)
    note = "Records that differ from the feed's schema. " + "; ".join(f"{k}: {_DRIFTS[k]}" for k in kinds) + "."
    return section(
        "drift",
        "Drift",
        table("Drift by field", columns_, rows, right=columns_[5:], cards=["schema", "would hold it"]),
        note=note,
    )
