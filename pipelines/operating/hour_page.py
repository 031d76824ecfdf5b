"""The page of an hour: the check of a window as one HTML file that opens offline.

Figures are those of `WindowCheck` and its sentences; nothing is read in addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.batch_report import quality
from sluice.pipelines.batch_report.markup import (
    VALUES,
    Html,
    cut,
    details,
    join_html,
    lying,
    number,
    page,
    render_tiles,
    section,
    share,
    size,
    table,
    tag,
    value,
)
from sluice.pipelines.batch_report.report_page import BatchReport, HourFigures, put_page, read_report, render_legend
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.receipts import PartKind, sum_counts
from sluice.pipelines.operating.check_text import describe_verdict, list_figures, list_reasons
from sluice.pipelines.operating.check_window import CheckedPartition, WindowCheck, check_window
from sluice.pipelines.ports import Ports
from sluice.pipelines.publishing import manifest
from sluice.pipelines.status import strip
from sluice.pipelines.status.repeats import Repeats
from sluice.pipelines.status.window_rows import Outside
from sluice.pipelines.status.window_state import Standing
from sluice.pipelines.util.documents import Internal
from sluice.pipelines.util.units import many, show_instant, show_window

_WORDS = {"good": "complete", "warn": "complete, with losses", "bad": "rows twice"}
_PARTITIONS = _FILES = _COLUMNS = 200
_HOURS = 48
_MOST_HOURS, _MOST_ROWS = 24, 1_000_000
"""The windows and rows that a run reads again for pages. `sluice report` makes the pages of others."""


def render(c: WindowCheck, now: int) -> bytes:
    """Returns the page of a window."""
    files = {p.path for r in c.receipts for p in r.of(PartKind.QUARANTINED)}
    unread = 0 if c.reasons_of_quarantine else c.counts.quarantined
    refused = quality.Rejects(c.reasons_of_quarantine, unread, len(files))
    sections = {
        "Records": _render_partitions(c),
        "Late": _render_outside(c, c.rows.late, "late", "Late") if c.rows else None,
        "Early": _render_outside(c, c.rows.early, "early", "Early") if c.rows else None,
        "Copies": _render_copies(c, c.rows.repeats) if c.rows else None,
        "Quarantine": quality.quarantine(c.counts, refused),
        "Files": _render_files(c),
        "Batches": _render_batches(c),
        "Columns": _render_columns(c.columns),
    }
    drawn = {name: s for name, s in sections.items() if s}
    title = f"{c.feed} {c.standing.window}"
    return page(title, _render_header(c, drawn, now), drawn.values(), VALUES).encode()


def _render_header(c: WindowCheck, sections: Iterable[str], now: int) -> Html:
    kind, text = describe_verdict(c)
    sentence, word = text[:1].upper() + text[1:], _name_state(c)
    reasons = (
        tag("div", tag("b", r.text), tag("div", "→ ", tag("code", r.remedy)), class_=f"why {kind}", role="note")
        for r in list_reasons(c)
    )
    unchecked = (tag("p", f"Not checked in Kafka: {text}", class_="note") for text in c.unchecked)
    facts = (
        piece
        for name, text in list_figures(c)
        for piece in (tag("dt", name), tag("dd", *(tag("div", line) for line in text.splitlines())))
    )
    end = c.settings.name(c.settings.end_of(c.standing.start))
    return tag(
        "header",
        tag(
            "div",
            f"Sluice · a window, in arrival order to {end} · as of {show_instant(now - now % 1000)}",
            class_="brand",
        ),
        tag("h1", tag("bdi", c.feed), f" · {c.standing.window}"),
        tag("div", tag("span", word, class_=f"pill {kind}"), " ", sentence, class_="verdict"),
        *reasons,
        *unchecked,
        _render_tiles(c),
        tag("section", tag("dl", *facts), id="account"),
        tag("nav", *(tag("a", name, href=f"#{name.lower()}") for name in sections), aria_label="Sections"),
    )


def _name_state(c: WindowCheck) -> str:
    return _WORDS[describe_verdict(c)[0]] if c.complete else str(c.standing.state)


def _render_tiles(c: WindowCheck) -> Html:
    counts, pending = c.counts, [p.pending for p in c.partitions]
    without = c.account.total - counts.landed - counts.quarantined
    landed, copied = [f for f in c.files if f.kind is PartKind.LANDED], c.rows.repeats.copied if c.rows else None
    figures = [
        many(counts.landed, "record landed", "records landed"),
        (number(counts.quarantined), f"quarantined, {share(counts.quarantined, counts.records)}"),
        (number(c.rows.late.records if c.rows else None), "late: stamped in an earlier window"),
        (number(copied), "copy of an earlier record" if copied == 1 else "copies of an earlier record"),
        many(without, "offset without a row", "offsets without a row"),
        *([(number(None if None in pending else sum(p or 0 for p in pending)), "pending")] if any(pending) else []),
        (size(sum(f.bytes for f in landed)), f"landed in {many(len({f.path for f in landed}), 'file')}"),
    ]
    return render_tiles(figures)


_LEGEND = (("landed", ""), ("quarantined", "reject"), ("no row", "hidden"), ("pending", "t2"))


def _render_partitions(c: WindowCheck) -> Html | None:
    if not c.partitions:
        return None
    classes = [name for name in _list_classes(c.partitions[0]) if any(_list_classes(p)[name] for p in c.partitions)]
    longest = max(p.account.total + (p.pending or 0) for p in c.partitions)
    columns = ["partition", "", "from", "to", "landed", "quarantined", *classes, "pending"]
    rows = [_render_partition(p, classes, longest) for p in c.partitions[:_PARTITIONS]]
    note = f"{many(len(c.partitions) - _PARTITIONS, 'more partition')} not shown." if c.partitions[_PARTITIONS:] else ""
    inside = table(
        "Records by partition", columns, rows, right=columns[2:], cards=["from"] if len(columns) > 9 else None
    )
    return section("records", "Records", render_legend(_LEGEND), inside, note=note)


def _list_classes(p: CheckedPartition) -> Mapping[str, int]:
    counts, a = p.account.counts, p.account
    read = {"control": counts.control, "aborted": counts.aborted, "compacted": counts.compacted}
    decided = {"dropped": counts.dropped, "erased": counts.erased}
    return read | decided | {"lost": a.lost, "skipped": a.skipped, "retired": a.retired}


def _render_partition(p: CheckedPartition, classes: Sequence[str], longest: int) -> list[str]:
    counts, others = p.account.counts, _list_classes(p)
    pieces = [
        (counts.landed, ""),
        (counts.quarantined, "reject"),
        (sum(others.values()), "hidden"),
        (p.pending or 0, "t2"),
    ]
    figures = (p.start, p.end, counts.landed, counts.quarantined, *(others[n] for n in classes), p.pending)
    return [tag("span", str(p.key), class_="p"), lying(pieces, longest), *map(number, figures)]


def _render_outside(c: WindowCheck, o: Outside, name: str, title: str) -> Html | None:
    """Records by the window of their timestamp, in the order of time."""
    if not o.records:
        return None
    windows = sorted([*o.windows.items()][:_HOURS])
    largest = max(n for _, n in windows)
    rows = [[w, lying([(n, "other")], largest), number(n), share(n, c.counts.landed)] for w, n in windows]
    if rest := o.records - sum(n for _, n in windows):
        rows.append(["other windows", "", number(rest), share(rest, c.counts.landed)])
    note = dict(list_figures(c))[name].replace("\n", ": ")
    columns = ["stamped in", "", "records", "share"]
    return section(name, title, table(f"{title} records", columns, rows, right=columns[2:]), note=note)


def _render_copies(c: WindowCheck, r: Repeats) -> Html | None:
    if not r.copied:
        return None
    largest = max(copies.records for copies in r.copies)
    rows = [
        [
            join_html([tag("b", str(copies.cause)), tag("div", copies.cause.text, class_="soft")]),
            lying([(copies.records, "other")], largest),
            number(copies.records),
            share(copies.records, c.counts.landed),
            join_html(tag("div", tag("code", f"{a} = {b}")) for a, b in copies.examples),
        ]
        for copies in r.copies
    ]
    first, second = r.copies[0].examples[0]
    command = tag("p", "→ ", tag("code", f"sluice peek {first} -n 1; sluice peek {second} -n 1"))
    columns = ["likely cause", "", "records", "share", "examples"]
    inside = table("Copies by cause", columns, rows, right=["records", "share"], cards=["examples"])
    return section("copies", "Copies", inside, command, note=dict(list_figures(c))["copies"])


def _render_files(c: WindowCheck) -> Html | None:
    if not c.files:
        return None
    rows = [
        [
            str(f.kind),
            f"{f.topic}:{f.partition}",
            f"{f.start:,} – {f.end:,}",
            number(f.rows),
            size(f.bytes),
            tag("code", f.path),
        ]
        for f in c.files[:_FILES]
    ]
    note = f"{many(len(c.files) - _FILES, 'more part')}: sluice files {c.feed} --window {c.standing.window}"
    columns = ["kind", "partition", "offsets", "rows", "size", "file"]
    inside = table("Files", columns, rows, right=["rows", "size"], cards=["file"])
    return section("files", "Files", details(f"All {len(rows)}", inside), note=note if c.files[_FILES:] else "")


def _render_batches(c: WindowCheck) -> Html | None:
    if not c.batches:
        return None
    rows = [
        [str(b.batch), show_instant(b.published - b.published % 1000), number(b.records), b.request, b.run, b.engine]
        for b in c.batches
    ]
    columns = ["batch", "published", "records", "request", "run", "engine"]
    inside = table("Batches of the window", columns, rows, right=["records"], cards=columns)
    report = f"Their reports: sluice report {c.feed_name} --batch {c.batches[-1].batch}"
    return section("batches", "Batches", inside, note=report)


def _render_columns(columns: Mapping[str, str]) -> Html | None:
    if not columns:
        return None
    rows = [[value(name), cut(type_, 200)] for name, type_ in [*columns.items()][:_COLUMNS]]
    return section(
        "columns", "Columns", details(many(len(columns), "column"), table("Columns", ["name", "type"], rows))
    )


# -- in the lake


def check_hours(
    feed: Feed, ports: Ports, ledger: Ledger, windows: Iterable[int], *, complete_only: bool = False
) -> dict[int, WindowCheck]:
    """Check the newest of these windows (starts, ms), up to `_MOST_ROWS` rows.

    `complete_only`: Kafka, which explains other windows, may be unreachable.
    """
    checks, rows, state, now = dict[int, WindowCheck](), 0, ledger.read(), ports.clock()
    for start in sorted({feed.window.start_of(w) for w in windows}, reverse=True)[:_MOST_HOURS]:
        rows += sum_counts(manifest.group_receipts(ledger, state, (start,), feed.window)[start]).landed
        if rows > _MOST_ROWS:
            break
        if not complete_only or strip.standing(state, feed.window, start, now).state is Standing.LANDED:
            checks[start] = check_window(feed, ports, start, (), lambda progress: None)
    return checks


@dataclass(frozen=True, slots=True)
class HourPage:
    """The page of a window. `address` is empty if the lake may not be written."""

    check: WindowCheck
    data: Internal[bytes]
    address: str


def build_page(feed: Feed, ports: Ports, check: WindowCheck) -> HourPage:
    """Make the page of a check, and store it if the lake may be written."""
    path = paths.get_hour_page_path(feed.stored, check.standing.start, feed.output)
    data = render(check, ports.clock())
    return HourPage(check, data, ports.lake.locate(path) if put_page(ports.lake, path, data) else "")


def read_batch_report(feed: Feed, ports: Ports, batch: int | None) -> BatchReport:
    """Returns the report of a batch (None: the newest one), with the checks of its windows if it has to be made."""
    ledger = Ledger(ports.lake, feed.stored, ports.clock)
    return read_report(feed, ports, batch, lambda starts: list_hour_figures(check_hours(feed, ports, ledger, starts)))


def list_hour_figures(checks: Mapping[int, WindowCheck]) -> Mapping[str, HourFigures]:
    """Returns the figures of windows for a batch's report, by name."""
    return {
        show_window(start): HourFigures(
            _name_state(c),
            c.rows.late.records if c.rows else None,
            c.rows.repeats.copied if c.rows else None,
        )
        for start, c in checks.items()
    }
