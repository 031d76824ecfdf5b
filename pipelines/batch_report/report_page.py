"""The report of a batch: its facts, its refused records and column profiles, in one HTML file next to the ledger.

`html` is pure: values in, text out. Every table is bounded and reports its omissions. A report can be made again while
the batch's files exist; only the run that lands the batch adds the lag from Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sluice.pipelines.batch_report import markup, quality
from sluice.pipelines.batch_report.batch_account import (
    BatchAccount,
    PartitionLag,
    PastBatch,
    newest,
    read_account,
    windows,
)
from sluice.pipelines.batch_report.column_profiles import Profiles, profiles
from sluice.pipelines.batch_report.markup import (
    CSS,
    VALUES,
    Bar,
    Html,
    cut,
    details,
    join_html,
    lying,
    number,
    plain,
    render_tiles,
    section,
    share,
    size,
    table,
    tag,
    upright,
)
from sluice.pipelines.batch_report.quality import Rejects, rejects
from sluice.pipelines.contract import catalogue
from sluice.pipelines.errors import BatchRefused, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import Policies
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import BatchStatus, Ledger
from sluice.pipelines.model.receipts import SHARES, BrokerTraffic, Counts, PartKind, Receipt, sum_brokers
from sluice.pipelines.ports import Lake, Ports
from sluice.pipelines.quarantine.limit import check_quarantine
from sluice.pipelines.status.batch_facts import ACTIVITIES
from sluice.pipelines.util.units import many, show_about, show_instant, show_window
from sluice.pipelines.validation.drift import check_drift

FAILURES = 40
LARGEST = 290_000
"""Bytes of the whole file."""


class HourFigures(NamedTuple):
    """A window as its check has it, after all of its batches: its state, late records, copies."""

    state: str
    late: int | None
    copies: int | None


@dataclass(frozen=True, slots=True)
class Page:
    """Everything a page shows. `behind`: the pending offsets of each partition when the batch was done; None: not
    asked. `hours`: by name, the windows of the batch that were checked."""

    account: BatchAccount
    rejects: Rejects
    profiles: Profiles
    behind: tuple[PartitionLag, ...] | None = None
    hours: Mapping[str, HourFigures] = field(default_factory=dict)


def html(page: Page) -> str:
    """The file."""
    a = page.account
    sections = _within_size_limit(_sections(page))
    header = _header(a, [name for name, _ in sections], page.behind)
    return markup.page(f"{a.feed}: batch {a.batch.id}", header, (s for _, s in sections), VALUES)


def _sections(page: Page) -> list[tuple[tuple[str, str], Html]]:
    a = page.account
    built = {
        ("rows", "Rows"): render_rows(a, page.hours),
        ("quarantine", "Quarantine"): quality.quarantine(a.facts.counts, page.rejects),
        ("contract", "Contract"): quality.contract(a, page.profiles),
        ("columns", "Columns"): quality.columns(a, page.profiles),
        ("drift", "Drift"): quality.drift(a),
        ("failures", "Failures"): _failures(a),
        ("lag", "Lag"): render_lag(page.behind),
        ("time", "Time"): render_timings(a),
        ("brokers", "Brokers"): render_brokers(a),
        ("history", "History"): render_history(a),
        ("offset-ranges", "Offset ranges"): render_ranges(a),
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


def _header(a: BatchAccount, names: Sequence[tuple[str, str]], behind: Sequence[PartitionLag] | None) -> Html:
    word, kind, sentence = verdict(a)
    return tag(
        "header",
        tag("div", "Sluice · a batch's report", class_="brand"),
        tag("h1", tag("bdi", a.feed), f" · batch {a.batch.id}"),
        tag("div", tag("span", word, class_=f"pill {kind}"), " ", sentence, class_="verdict"),
        _why(a),
        _tiles(a, behind),
        tag("nav", *(tag("a", title, href=f"#{name}") for name, title in names), aria_label="Sections"),
    )


def verdict(a: BatchAccount) -> tuple[str, str, str]:
    """The outcome of the batch: a word, its colour, and a sentence."""
    request = str(a.plan.request)
    published = "" if a.at is None else f", published {show_instant(a.at - a.at % 1000)}"
    when = request[:1].upper() + request[1:] + published
    if a.batch.status is BatchStatus.ABANDONED:
        return "given up", "bad", f"{when}. Nothing of it is published; its ranges are pending again."
    if not a.is_published:
        word = "refused" if a.why or any(o.refuses for o in a.facts.outcomes) else "not published"
        return word, "bad", f"{when}. Nothing of it is visible; it stays staged, and its ranges are pending."
    if a.failures:
        return "published in part", "warn", f"{when}. {many(len(a.failures), 'offset range')} failed and stay pending."
    warned = [o for o in a.facts.outcomes if not o.passed and not o.quarantines]
    if warned:
        broken = f"{many(len(warned), 'expectation')} of its contract not met"
        return "published", "warn", f"{when}, with {broken}."
    return "published", "good", f"{when}."


def _why(a: BatchAccount) -> Html:
    if a.is_published:
        return Html("")
    broken = [o for o in a.facts.outcomes if o.refuses]
    why = a.why or (f"Not met: {many(len(broken), 'critical expectation')} about the whole batch." if broken else "")
    return tag("div", why, class_="why", role="note") if why else Html("")


def _tiles(a: BatchAccount, behind: Sequence[PartitionLag] | None) -> Html:
    facts, counts = a.facts, a.facts.counts
    rate, ms = number(facts.per_second(counts.landed)), facts.took or 0
    landed = "landed" if a.is_published else "would land"
    took = f"{ms / 1000:.1f} s" if ms < 120_000 else f"{ms // 60_000} min {ms // 1000 % 60} s"
    figures = [
        many(counts.landed, f"row {landed}", f"rows {landed}"),
        (number(counts.quarantined), f"quarantined, {share(counts.quarantined, counts.records)}"),
        many(counts.no_record, "offset without a record", "offsets without a record"),
        *([(number(counts.dropped), "dropped by policy")] if counts.dropped else []),
        (size(facts.bytes), f"in {many(facts.files, 'file')}"),
        *([(took, "from plan to publish"), (rate, "rows a second")] if facts.took else []),
        *_contract_tile(a),
        *([(number(sum(b.offsets for b in behind)), "offsets pending then")] if behind is not None else []),
    ]
    return render_tiles(figures)


def _contract_tile(a: BatchAccount) -> list[tuple[str, str]]:
    if not a.facts.outcomes:
        return []
    met = sum(o.passed and not o.unexpected for o in a.facts.outcomes)
    return [(f"{met} / {len(a.facts.outcomes)}", "expectations without exception")]


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
        *([("against stamps", f"boundaries {', '.join(map(show_window, a.against))}")] if a.against else []),
        ("isolation", str(a.plan.isolation)),
        ("planned", show_instant(a.batch.planned_at)),
        ("published", "not published" if a.at is None else f"{show_instant(a.at)}, ledger entry {a.batch.published}"),
        ("run", a.batch.owner.run or "none"),
        ("engine", "; ".join(map(str, a.facts.traffic.engines)) or "–"),
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


TIMES = ("kafka_timestamp", "timestamp")
"""The column of the records' times, in typed feeds and in raw ones."""


def make(
    a: BatchAccount,
    lake: Lake,
    behind: Sequence[PartitionLag] | None = None,
    hours: Mapping[str, HourFigures] | None = None,
) -> bytes:
    """The report of a batch, from its own files. Raises LakeUnavailable."""
    refused = rejects(a.facts.parts(PartKind.QUARANTINED), lake, published=a.is_published)
    positions = [p for o in a.facts.outcomes if not o.quarantines for p in o.first]
    landed = a.facts.parts(PartKind.LANDED)
    spread = profiles(landed, lake, columns_to_profile(a), positions, published=a.is_published)
    return html(Page(a, refused, spread, None if behind is None else tuple(behind), hours or {})).encode()


def columns_to_profile(a: BatchAccount) -> list[str]:
    """The columns whose values are shown: the records' times, and the contract's columns in its order."""
    checked = (c for e in (a.facts.contract.expectations if a.facts.contract else ()) for c in catalogue.columns(e))
    is_raw = all(r.format.startswith("raw") for r in a.facts.receipts)
    return list(dict.fromkeys([TIMES[is_raw], *checked]))


def _with_reason(a: BatchAccount, policies: Policies, lake: Lake) -> BatchAccount:
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


def _attempt(a: BatchAccount) -> str:
    return "" if a.is_published else a.batch.owner.token


def keep(
    a: BatchAccount,
    lake: Lake,
    behind: Sequence[PartitionLag] | None = None,
    hours: Mapping[str, HourFigures] | None = None,
) -> str:
    """Make a batch's report, put it into the lake and return its path. Raises as `make` does."""
    lake.put(path := path_of(a), make(a, lake, behind, hours))
    return path


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The report of a batch. `rebuilt`: it was missing in the lake and has been made again. `address` is empty if the
    lake does not have it because this process may not write there."""

    account: BatchAccount
    address: str
    data: bytes
    rebuilt: bool


def read_report(
    feed: Feed, ports: Ports, batch: int | None, check_hours: Callable[[Sequence[int]], Mapping[str, HourFigures]]
) -> BatchReport:
    """Returns the report of a batch (None: the newest one). A missing one is made, and stored if the lake may be
    written. Raises UsageError.
    """
    lake, ledger = ports.lake, Ledger(ports.lake, feed.stored, ports.clock)
    a = read_account(ledger, lake, newest(ledger.read(), feed.name) if batch is None else batch)
    path = receipt_files.find_batch_page(lake, feed.stored, a.batch.id, _attempt(a))
    if path is not None and (data := lake.get(path)) is not None:
        return BatchReport(a, lake.locate(path), data, False)
    path = path_of(a)
    data = make(_with_reason(a, feed.policies, lake), lake, hours=check_hours([*windows(a.facts.receipts)]))
    stored = put_page(lake, path, data)
    return BatchReport(a, lake.locate(path) if stored else "", data, True)


def put_page(lake: Lake, path: str, data: bytes) -> bool:
    """Store a page. Returns False if it cannot be written: readers may lack the right."""
    try:
        lake.put(path, data)
    except SluiceError:
        return False
    return True


PARTITIONS = 40
WINDOWS = 60
RANGES = 60
LAGGING = 40
BROKERS = 40
NO_WINDOW = "outside windows"
LEGEND = (("landed", ""), ("quarantined", "reject"), ("no record or dropped", "hidden"))


def render_legend(pairs: Sequence[tuple[str, str]]) -> Html:
    """The meaning of the colours."""
    marks = (tag("span", lying([(1, kind)], 1), name) for name, kind in pairs)
    return tag("div", *(Html(m.replace(' class="bar"', "")) for m in marks), class_="legend")


# -- rows


def render_rows(a: BatchAccount, hours: Mapping[str, HourFigures]) -> Html:
    """Rows by partition and by window."""
    if not a.facts.receipts:
        return section("rows", "Rows", note="No offset range was finished: nothing landed.")
    partitions, windows = a.facts.group(lambda r: r.offset_range.tp), a.facts.group(_name_window)
    by_partition = {str(tp): partitions[tp].counts for tp in sorted(partitions)}
    by_window = {name: windows[name].counts for name in sorted(windows, key=lambda name: (name == NO_WINDOW, name))}
    spans = many(a.plan.offsets, "offset")
    note = f"{spans} in {many(len(by_partition), 'partition')} and {many(len(by_window), 'window')}."
    return section(
        "rows",
        "Rows",
        render_legend(LEGEND),
        tag("h3", "By partition"),
        _render_counts("Rows by partition", "partition", by_partition, PARTITIONS),
        tag("h3", "By window"),
        _plot(by_window) if len(by_window) > 5 else "",
        _render_counts(
            "Rows by window", "window", by_window, WINDOWS // 5 if len(by_window) > WINDOWS else WINDOWS, hours
        ),
        note=note,
    )


def _name_window(r: Receipt) -> str:
    return NO_WINDOW if r.offset_range.window is None else show_window(r.offset_range.window)


def _plot(by_window: Mapping[str, Counts]) -> Html:
    shown_windows = list(by_window.items())[-WINDOWS:]
    bars = [
        Bar(name, c.landed, text=f"{number(c.landed)} landed, {number(c.quarantined)} quarantined")
        for name, c in shown_windows
    ]
    highest = many(max(c.landed for _, c in shown_windows), "row")
    left_out = f"; the last {WINDOWS} of {len(by_window)}" if len(by_window) > WINDOWS else ""
    return upright(
        "Rows landed by window",
        bars,
        [shown_windows[0][0], shown_windows[-1][0]],
        f"up to {highest} landed{left_out}",
    )


def _render_counts(
    caption: str, name: str, counts: Mapping[str, Counts], limit: int, hours: Mapping[str, HourFigures] | None = None
) -> Html:
    items = list(counts.items())
    longest = max((c.total for c in counts.values()), default=0)
    unchecked = HourFigures("not checked", None, None)
    figures = {n: (hours or {}).get(n, unchecked) for n, _ in items} if hours else {}
    erased = any(c.erased for _, c in items)
    table_rows = [_render_row(n, c, longest, erased, figures.get(n)) for n, c in items[:limit]]
    if rest := items[limit:]:
        table_rows.append(_render_row(f"{len(rest):,} more", sum((c for _, c in rest), Counts()), 0, erased))
    columns = [name, "", "landed", "quarantined", "share", "no record", *(["erased"] if erased else [])]
    numbers, now = [*columns[2:], "late", "copies"], ["now"] if figures else []
    columns += ["late", "copies", "now"] if figures else []
    return table(caption, columns, table_rows, right=numbers, cards=now or None)


def _render_row(name: str, c: Counts, longest: int, erased: bool, hour: HourFigures | None = None) -> list[str]:
    pieces = [(c.landed, ""), (c.quarantined, "reject"), (c.no_record + c.dropped + c.erased, "hidden")]
    bar = tag("div", lying(pieces, longest), class_="w1") if longest else ""
    return [
        tag("span", name, class_="p"),
        bar,
        number(c.landed),
        number(c.quarantined),
        share(c.quarantined, c.records),
        number(c.no_record + c.dropped),
        *([number(c.erased)] if erased else []),
        *([number(hour.late), number(hour.copies), hour.state] if hour else []),
    ]


# -- lag


def render_lag(behind: Sequence[PartitionLag] | None) -> Html | None:
    """The pending offsets at the end of the batch."""
    if not behind:
        return None
    ranked = sorted(behind, key=lambda b: (-b.offsets, b.key))
    largest, all_ = ranked[0].offsets, sum(b.offsets for b in ranked)
    table_rows = [
        [
            str(b.key),
            lying([(b.offsets, "")], largest),
            number(b.offsets),
            "not known" if b.age is None else f"{show_about(b.age)} old",
        ]
        for b in ranked[:LAGGING]
    ]
    if rest := ranked[LAGGING:]:
        table_rows.append([f"{len(rest):,} more", "", number(sum(b.offsets for b in rest)), ""])
    columns = ["partition", "", "offsets behind", "oldest pending record"]
    note = f"Pending at the end of the batch: {many(all_, 'offset')} in {many(len(ranked), 'partition')}."
    return section("lag", "Lag", table("Lag by partition", columns, table_rows, right=columns[2:]), note=note)


# -- time


def render_timings(a: BatchAccount) -> Html | None:
    """Task time by activity."""
    work = a.facts.task_time
    spent = dict(sorted(((name, ns) for name, ns in work.ns.items() if ns), key=lambda item: (-item[1], item[0])))
    all_ = work.total
    if not all_:
        return None
    kinds = {name: f"t{i % 8}" for i, name in enumerate([*ACTIVITIES, *sorted(spent.keys() - ACTIVITIES.keys())])}
    total_bar = tag("div", lying([(ns, kinds[name]) for name, ns in spent.items()], all_), class_="thick")
    table_rows = [
        [
            cut(ACTIVITIES.get(name, name), 40),
            lying([(ns, kinds[name])], max(spent.values())),
            _show_seconds(ns),
            share(ns, all_),
        ]
        for name, ns in list(spent.items())[:20]
    ]
    columns = ["activity", "", "time", "share"]
    note = f"{_show_seconds(all_)} of all tasks together, for {size(a.facts.input_bytes)} read from Kafka."
    if adopted := a.facts.adopted_receipts:
        note += f" An earlier attempt finished {many(len(adopted), 'offset range')}."
    return section(
        "time",
        "Where task time went",
        total_bar,
        table("Task time by activity", columns, table_rows, right=columns[2:]),
        note=note,
    )


def _show_seconds(ns: int) -> str:
    """A duration in words."""
    if ns < 1e9:
        return f"{ns / 1e6:,.0f} ms"
    return f"{ns / 1e9:,.2f} s" if ns < 100e9 else f"{ns / 1e9:,.0f} s"


# -- brokers


def render_brokers(a: BatchAccount) -> Html | None:
    """Fetch requests by broker, and data read by topic."""
    traffic = a.facts.traffic.brokers
    if not traffic:
        return None
    broker_rows = [_render_broker(f"{b.node} {b.address}", b) for b in traffic[:BROKERS]]
    if rest := traffic[BROKERS:]:
        broker_rows.append(_render_broker(f"{len(rest):,} more", sum_brokers(rest)))
    columns = ["broker", "fetches", "size", *SHARES, "waiting", "held", "throttled", "moved", "errors"]
    fetching = table("Fetching by broker", columns, broker_rows, right=columns[2:-1])
    read = [
        [t.topic, number(t.records), size(t.bytes), "not known" if t.behind is None else number(t.behind)]
        for t in a.facts.topics[:BROKERS]
    ]
    topic_columns = ["topic", "records", "size", "behind"]
    notes = (tag("p", line, class_="note") for line in a.facts.broker_notes)
    note = (
        "How long answers took (half, 95 % and 99 % of them), waited for in all; how long requests were held because"
        " this side had no room, and how long the broker had us pause. Behind: offsets to the end of the log."
    )
    inside = (*notes, fetching, table("Reading by topic", topic_columns, read, right=topic_columns[1:]))
    return section("brokers", "Requests to brokers", *inside, note=note)


def _render_broker(name: str, b: BrokerTraffic) -> list[str | Html]:
    return [
        name.strip(),
        number(b.requests),
        size(b.bytes),
        *(f"{b.latency.percentile_ms(share):,.1f} ms" for share in SHARES.values()),
        *(_show_seconds(ns) for ns in (b.latency.total_us * 1000, b.held_us * 1000, b.throttle_ms * 1_000_000)),
        number(b.moved),
        cut(", ".join(f"{name} {n:,}" for name, n in sorted(b.errors.items())) or "–", 80),
    ]


# -- history


def render_history(a: BatchAccount) -> Html | None:
    """The batches up to this one."""
    past = a.past
    if len(past) == 1:
        return None
    landed, shares, rows = list[Bar](), list[Bar](), list[list[str]]()
    for p in past:
        name, c, when = f"batch {p.batch}", p.counts, _show_time(p)
        refused = share(c.quarantined, c.records)
        landed.append(Bar(name, c.landed, "now" if p.batch == a.batch.id else "", f"{many(c.landed, 'row')}, {when}"))
        shares.append(Bar(name, c.quarantined_share, "reject", f"{refused} quarantined, {when}"))
        rows.append([str(p.batch), when, number(c.landed), number(c.quarantined), refused])
    ends = [_show_time(past[0]), _show_time(past[-1])]
    worst = max(p.counts.quarantined_share for p in past)
    plots = tag(
        "div",
        tag(
            "div",
            tag("h3", "Rows landed"),
            upright("Rows landed by batch", landed, ends, f"up to {number(max(p.counts.landed for p in past))}"),
        ),
        tag(
            "div",
            tag("h3", "Share quarantined"),
            upright("Share quarantined by batch", shares, ends, f"up to {worst:.2%}" if worst else "none"),
        ),
        class_="two",
    )
    columns = ["batch", "published", "landed", "quarantined", "share"]
    note = "This batch is the one on the right."
    every = details("As a table", table("Batches", columns, rows[::-1], right=columns[2:]))
    return section("history", f"The last {many(len(past), 'batch', 'batches')}", plots, every, note=note)


def _show_time(p: PastBatch) -> str:
    return "not published" if p.at is None else show_instant(p.at - p.at % 1000)


# -- offset ranges


def render_ranges(a: BatchAccount) -> Html | None:
    """The offset ranges of the batch, each with its files."""
    if not a.facts.receipts:
        return None
    ordered = a.facts.ordered_receipts
    table_rows = [_build_row(r, published=a.is_published) for r in ordered[:RANGES]]
    rest = ordered[RANGES:]
    columns = ["partition", "offsets", "window", "landed", "quarantined", "files"]
    note = f"{many(len(ordered), 'offset range')} in {many(a.facts.files, 'file')}." + (
        f" The first {RANGES} are shown; the others hold {many(sum(r.counts.landed for r in rest), 'row')}."
        if rest
        else ""
    )
    inside = table("Offset ranges", columns, table_rows, right=["landed", "quarantined"], cards=["window"])
    return section(
        "offset-ranges",
        "Offset ranges",
        inside if len(table_rows) <= 8 else details(f"All {len(table_rows)}", inside),
        note=note,
    )


def _build_row(r: Receipt, *, published: bool) -> list[str]:
    s = r.offset_range
    files = [tag("code", p.path if published else p.staged) for p in r.parts[:2]]
    more = [tag("span", f"and {len(r.parts) - 2} more", class_="soft")] if len(r.parts) > 2 else []
    every = join_html(tag("div", f) for f in (*files, *more))
    return [
        str(s.tp),
        tag("span", f"{s.start:,} – {s.end:,}", class_="p"),
        _name_window(r),
        number(r.counts.landed),
        number(r.counts.quarantined),
        every,
    ]
