"""The report of a batch: its facts, its refused records and column profiles, in one HTML file next to the ledger.

`html` is pure: values in, text out. Every table is bounded and reports its omissions. A report can be made again while
the batch's files exist; only the run that lands the batch adds the lag from Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.pipelines.batch_report import amounts, quality
from sluice.pipelines.batch_report.batch_account import BatchAccount, PartitionLag, read_account, windows
from sluice.pipelines.batch_report.column_profiles import Profiles, profiles
from sluice.pipelines.batch_report.markup import CSS, Html, cut, number, plain, section, share, size, table, tag
from sluice.pipelines.batch_report.quality import Rejects, rejects
from sluice.pipelines.contract import catalogue
from sluice.pipelines.errors import BatchRefused
from sluice.pipelines.feed.sections import Policies
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import BatchStatus, Ledger
from sluice.pipelines.model.plans import Plan
from sluice.pipelines.model.receipts import PartKind, RangeFailure
from sluice.pipelines.ports import Lake
from sluice.pipelines.quarantine.limit import check_quarantine
from sluice.pipelines.util.units import many, show_instant, show_window
from sluice.pipelines.validation.drift import check_drift

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
FAILURES = 40
LARGEST = 290_000
"""Bytes of the whole file."""


@dataclass(frozen=True, slots=True)
class Page:
    """Everything a page shows. `behind`: the pending offsets of each partition when the batch was done; None: not
    asked."""

    account: BatchAccount
    rejects: Rejects
    profiles: Profiles
    behind: tuple[PartitionLag, ...] | None = None


def html(page: Page) -> str:
    """The file."""
    a = page.account
    sections = _within_size_limit(_sections(page))
    title = f"{a.feed}: batch {a.batch.id}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        Html(f"<style>{CSS}</style>"),
    )
    body = tag("body", _header(a, [name for name, _ in sections]), tag("main", *(s for _, s in sections)), _footer(a))
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _sections(page: Page) -> list[tuple[tuple[str, str], Html]]:
    a = page.account
    built = {
        ("rows", "Rows"): amounts.render_rows(a),
        ("quarantine", "Quarantine"): quality.quarantine(a, page.rejects),
        ("contract", "Contract"): quality.contract(a, page.profiles),
        ("columns", "Columns"): quality.columns(a, page.profiles),
        ("drift", "Drift"): quality.drift(a),
        ("failures", "Failures"): _failures(a),
        ("lag", "Lag"): amounts.render_lag(page.behind),
        ("time", "Time"): amounts.render_timings(a),
        ("brokers", "Brokers"): amounts.render_brokers(a),
        ("history", "History"): amounts.render_history(a),
        ("offset-ranges", "Offset ranges"): amounts.render_ranges(a),
        ("origin", "Provenance"): _provenance(a),
    }
    return [(name, content) for name, content in built.items() if content]


def _within_size_limit(sections: list[tuple[tuple[str, str], Html]]) -> list[tuple[tuple[str, str], Html]]:
    """The sections, without the largest ones if the page would be too large: even counts can have long names."""
    budget = LARGEST - len(CSS) - 20_000  # for the head
    while sum(len(s.encode()) for _, s in sections) > budget:
        i = max(range(len(sections)), key=lambda i: len(sections[i][1]))
        (name, title), _ = sections[i]
        sections[i] = (name, title), section(name, title, note="Left out: it is too large to be shown.")
    return sections


# -- the head


def _header(a: BatchAccount, names: Sequence[tuple[str, str]]) -> Html:
    word, kind, sentence = verdict(a)
    return tag(
        "header",
        tag("div", "Sluice · a batch's report", class_="brand"),
        tag("h1", tag("bdi", a.feed), f" · batch {a.batch.id}"),
        tag("div", tag("span", word, class_=f"pill {kind}"), " ", sentence, class_="verdict"),
        _why(a),
        _tiles(a),
        tag("nav", *(tag("a", title, href=f"#{name}") for name, title in names), aria_label="Sections"),
    )


def verdict(a: BatchAccount) -> tuple[str, str, str]:
    """The outcome of the batch: a word, its colour, and a sentence."""
    when = _request(a.plan) + ("" if a.at is None else f", published {show_instant(a.at - a.at % 1000)}")
    if a.batch.status is BatchStatus.ABANDONED:
        return "given up", "bad", f"{when}. Nothing of it is published; its ranges are pending again."
    if not a.is_published:
        word = "refused" if a.why or _refusing(a) else "not published"
        return word, "bad", f"{when}. Nothing of it is visible; it stays staged, and its ranges are pending."
    if a.failures:
        return "published in part", "warn", f"{when}. {many(len(a.failures), 'offset range')} failed and stay pending."
    warned = [o for o in a.facts.outcomes if not o.passed and not o.quarantines]
    if warned:
        broken = f"{many(len(warned), 'expectation')} of its contract not met"
        return "published", "warn", f"{when}, with {broken}."
    return "published", "good", f"{when}."


def _refusing(a: BatchAccount) -> bool:
    return any(o.refuses for o in a.facts.outcomes)


def _request(plan: Plan) -> str:
    text = str(plan.request)
    return text[:1].upper() + text[1:]


def _why(a: BatchAccount) -> Html:
    if a.is_published:
        return Html("")
    broken = [o for o in a.facts.outcomes if o.refuses]
    why = a.why or (f"Not met: {many(len(broken), 'critical expectation')} about the whole batch." if broken else "")
    return tag("div", why, class_="why", role="note") if why else Html("")


def _tiles(a: BatchAccount) -> Html:
    facts, counts = a.facts, a.facts.counts
    rate = number(facts.per_second(counts.landed))
    tiles = [
        (number(counts.landed), "rows landed" if a.is_published else "rows would land"),
        (number(counts.quarantined), f"quarantined, {share(counts.quarantined, counts.records)}"),
        (number(counts.no_record), "offsets without a record"),
        *([(number(counts.dropped), "dropped by policy")] if counts.dropped else []),
        (size(facts.bytes), f"in {many(facts.files, 'file')}"),
        *([(_took(facts.took), "from plan to publish"), (rate, "rows a second")] if facts.took else []),
        *_contract_tile(a),
    ]
    return tag(
        "div",
        *(tag("div", tag("b", figure), tag("span", label), class_="tile") for figure, label in tiles),
        class_="tiles",
    )


def _contract_tile(a: BatchAccount) -> list[tuple[str, str]]:
    if not a.facts.outcomes:
        return []
    met = sum(o.passed and not o.unexpected for o in a.facts.outcomes)
    return [(f"{met} / {len(a.facts.outcomes)}", "expectations without exception")]


def _took(ms: int) -> str:
    return f"{ms / 1000:.1f} s" if ms < 120_000 else f"{ms // 60_000} min {ms // 1000 % 60} s"


# -- the rest of the frame


def _failures(a: BatchAccount) -> Html | None:
    if not a.failures:
        return None
    rows = [
        [tag("code", str(f.offset_range)), plain(f.error), tag("span", cut(f.message, 300), class_="any")]
        for f in a.failures[:FAILURES]
    ]
    rest = len(a.failures) - len(rows)
    note = "Offset ranges that did not land; they stay pending." + (f" {rest:,} more are not shown." if rest else "")
    inside = table("Offset ranges that failed", ["offset range", "error", "what happened"], rows)
    return tag("section", tag("h2", "Failures"), tag("p", note, class_="note"), inside, id="failures")


def _provenance(a: BatchAccount) -> Html:
    facts = [
        ("request", str(a.plan.request)),
        ("windows", _windows(a)),
        ("isolation", str(a.plan.isolation)),
        ("planned", show_instant(a.batch.planned_at)),
        ("published", "not published" if a.at is None else f"{show_instant(a.at)}, ledger entry {a.batch.published}"),
        ("run", a.batch.owner.run or "none"),
        ("plan", a.batch.hash),
        ("contract", a.facts.contract.hash if a.facts.contract else "none"),
        ("rows are made by", ", ".join(sorted({r.format for r in a.facts.receipts})) or "–"),
        ("ledger", a.ledger_id),
        ("cluster", a.plan.cluster),
    ]
    pieces = (piece for name, text in facts for piece in (tag("dt", name), tag("dd", tag("code", text))))
    return tag("section", tag("h2", "Provenance"), tag("dl", *pieces), id="origin")


def _windows(a: BatchAccount) -> str:
    starts = list(windows(a.facts.receipts))
    if not starts:
        return "none: outside windows"
    first = show_window(starts[0])
    return first if len(starts) == 1 else f"{many(len(starts), 'window')}, {first} to {show_window(starts[-1])}"


def _footer(a: BatchAccount) -> Html:
    text = "This file holds values of records: share it as you would share the data. It needs no network."
    return tag("footer", text)


TIMES = ("kafka_timestamp", "timestamp")
"""The column of the records' times, in typed feeds and in raw ones."""


def make(a: BatchAccount, lake: Lake, behind: Sequence[PartitionLag] | None = None) -> bytes:
    """The report of a batch, from its own files. Raises LakeUnavailable."""
    refused = rejects(a.facts.parts(PartKind.QUARANTINED), lake, published=a.is_published)
    positions = [p for o in a.facts.outcomes if not o.quarantines for p in o.first]
    landed = a.facts.parts(PartKind.LANDED)
    spread = profiles(landed, lake, columns_to_profile(a), positions, published=a.is_published)
    return html(Page(a, refused, spread, None if behind is None else tuple(behind))).encode()


def columns_to_profile(a: BatchAccount) -> list[str]:
    """The columns whose values are shown: the records' times, and the contract's columns in its order."""
    checked = (c for e in (a.facts.contract.expectations if a.facts.contract else ()) for c in catalogue.columns(e))
    return list(dict.fromkeys([*_time(a), *checked]))


def _time(a: BatchAccount) -> list[str]:
    return [TIMES[1]] if all(r.format.startswith("raw") for r in a.facts.receipts) else [TIMES[0]]


def with_reason(a: BatchAccount, policies: Policies, lake: Lake) -> BatchAccount:
    """An unpublished batch, with the reason why the feed's policies of today keep it from being published."""
    if a.is_published or a.why:
        return a
    try:
        check_quarantine(a.facts.receipts, policies, lake)
        check_drift(a.facts.receipts, policies)
    except BatchRefused as refused:
        return replace(a, why=refused.message)
    return a


def path_of(a: BatchAccount) -> str:
    """The lake path of the report. Each attempt at an unpublished batch has its own."""
    return paths.batch_page_path(a.feed, a.batch.id, _attempt(a))


def standing_report(a: BatchAccount, lake: Lake) -> str | None:
    """Returns the lake path of an existing report; None if there is none."""
    return receipt_files.find_batch_page(lake, a.feed, a.batch.id, _attempt(a))


def _attempt(a: BatchAccount) -> str:
    return "" if a.is_published else a.batch.owner.token


def keep(
    ledger: Ledger,
    lake: Lake,
    batch: int,
    behind: Sequence[PartitionLag] | None = None,
    why: str = "",
    failures: Sequence[RangeFailure] = (),
) -> str:
    """Make a batch's report, put it into the lake and return its path. Raises as `account` and `make` do."""
    facts = read_account(ledger, lake, batch, why, failures)
    lake.put(path := path_of(facts), make(facts, lake, behind))
    return path
