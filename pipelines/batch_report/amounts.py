"""Sections of the page about amounts and times: rows, lag, time, brokers, history, offset ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice.pipelines.batch_report.batch_account import BatchAccount, PartitionLag, PastBatch
from sluice.pipelines.batch_report.markup import (
    Bar,
    Html,
    cut,
    details,
    join_html,
    lying,
    number,
    section,
    share,
    size,
    table,
    tag,
    upright,
)
from sluice.pipelines.model.receipts import Counts, Receipt
from sluice.pipelines.model.traffic import SHARES, BrokerTraffic, sum_brokers
from sluice.pipelines.status.batch_facts import ACTIVITIES
from sluice.pipelines.status.broker_traffic import TopicTraffic
from sluice.pipelines.util.units import many, show_about, show_instant, show_window

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


def render_rows(a: BatchAccount) -> Html:
    """Rows by partition and by window."""
    if not a.facts.receipts:
        return section("rows", "Rows", note="No offset range was finished: nothing landed.")
    partitions, windows = a.facts.group(lambda r: r.offset_range.tp), a.facts.group(_name_window)
    by_partition = {str(tp): partitions[tp].counts for tp in sorted(partitions)}
    by_window = {name: windows[name].counts for name in sorted(windows, key=lambda name: (name == NO_WINDOW, name))}
    spans = many(a.plan.span, "offset")
    note = f"{spans} in {many(len(by_partition), 'partition')} and {many(len(by_window), 'window')}."
    return section(
        "rows",
        "Rows",
        render_legend(LEGEND),
        tag("h3", "By partition"),
        _render_counts("Rows by partition", "partition", by_partition, PARTITIONS),
        tag("h3", "By window"),
        _plot(by_window) if len(by_window) > 5 else "",
        _render_counts("Rows by window", "window", by_window, WINDOWS // 5 if len(by_window) > WINDOWS else WINDOWS),
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
    highest = number(max(c.landed for _, c in shown_windows))
    left_out = f"; the last {WINDOWS} of {len(by_window)}" if len(by_window) > WINDOWS else ""
    return upright(
        "Rows landed by window",
        bars,
        [shown_windows[0][0], shown_windows[-1][0]],
        f"up to {highest} rows landed{left_out}",
    )


def _render_counts(caption: str, name: str, counts: Mapping[str, Counts], limit: int) -> Html:
    items = list(counts.items())
    longest = max((c.total for c in counts.values()), default=0)
    table_rows = [_render_row(n, c, longest) for n, c in items[:limit]]
    if rest := items[limit:]:
        table_rows.append(_render_row(f"{len(rest):,} more", sum((c for _, c in rest), Counts()), 0))
    columns = [name, "", "landed", "quarantined", "share", "no record"]
    return table(caption, columns, table_rows, right=columns[2:])


def _render_row(name: str, c: Counts, longest: int) -> list[str]:
    pieces = [(c.landed, ""), (c.quarantined, "reject"), (c.no_record + c.dropped, "hidden")]
    bar = tag("div", lying(pieces, longest), class_="w1") if longest else ""
    return [
        tag("span", name, class_="p"),
        bar,
        number(c.landed),
        number(c.quarantined),
        share(c.quarantined, c.records),
        number(c.no_record + c.dropped),
    ]


# -- lag


def render_lag(behind: Sequence[PartitionLag] | None) -> Html:
    """The pending offsets at the end of the batch."""
    if behind is None:
        return section("lag", "Lag", note="Not known: this report was made without asking Kafka.")
    if not behind:
        return section(
            "lag", "Lag", tag("p", tag("span", "✓ ", class_="good"), "Nothing was pending when the batch was done.")
        )
    ranked = sorted(behind, key=lambda b: (-b.offsets, b.key))
    largest, all_ = ranked[0].offsets, sum(b.offsets for b in ranked)
    table_rows = [
        [str(b.key), lying([(b.offsets, "")], largest), number(b.offsets), _show_age(b.age)] for b in ranked[:LAGGING]
    ]
    if rest := ranked[LAGGING:]:
        table_rows.append([f"{len(rest):,} more", "", number(sum(b.offsets for b in rest)), ""])
    columns = ["partition", "", "offsets behind", "oldest pending record"]
    note = f"Pending at the end of the batch: {many(all_, 'offset')} in {many(len(ranked), 'partition')}."
    return section("lag", "Lag", table("Lag by partition", columns, table_rows, right=columns[2:]), note=note)


def _show_age(ms: int | None) -> str:
    return "not known" if ms is None else f"{show_about(ms)} old"


# -- time


def render_timings(a: BatchAccount) -> Html:
    """Task time by activity."""
    work = a.facts.task_time
    spent = dict(sorted(((name, ns) for name, ns in work.ns.items() if ns), key=lambda item: (-item[1], item[0])))
    all_ = work.total
    if not all_:
        return section("time", "Time", note="Nothing is known: no task of this batch read anything.")
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
    read = [[t.topic, number(t.records), size(t.bytes), _show_behind(t)] for t in a.facts.topics[:BROKERS]]
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


def _show_behind(t: TopicTraffic) -> str:
    return "not known" if t.behind is None else number(t.behind)


# -- history


def render_history(a: BatchAccount) -> Html:
    """The batches up to this one."""
    past = a.past
    if len(past) == 1:
        return section("history", "History", note="This is the feed's first batch.")
    ends = [_show_time(past[0]), _show_time(past[-1])]
    landed = [
        Bar(f"batch {p.batch}", p.landed, _kind(p, a, ""), f"{number(p.landed)} rows, {_show_time(p)}") for p in past
    ]
    shares = [Bar(f"batch {p.batch}", p.share, "reject", f"{_share(p)} quarantined, {_show_time(p)}") for p in past]
    worst = max(p.share for p in past)
    plots = tag(
        "div",
        tag(
            "div",
            tag("h3", "Rows landed"),
            upright("Rows landed by batch", landed, ends, f"up to {number(max(p.landed for p in past))}"),
        ),
        tag(
            "div",
            tag("h3", "Share quarantined"),
            upright("Share quarantined by batch", shares, ends, f"up to {worst:.2%}" if worst else "none"),
        ),
        class_="two",
    )
    rows_ = [[str(p.batch), _show_time(p), number(p.landed), number(p.quarantined), _share(p)] for p in reversed(past)]
    columns = ["batch", "published", "landed", "quarantined", "share"]
    note = "This batch is the one on the right."
    every = details("As a table", table("Batches", columns, rows_, right=columns[2:]))
    return section("history", f"The last {many(len(past), 'batch', 'batches')}", plots, every, note=note)


def _kind(p: PastBatch, a: BatchAccount, usual: str) -> str:
    return "now" if p.batch == a.batch.id else usual


def _share(p: PastBatch) -> str:
    return share(p.quarantined, p.landed + p.quarantined)


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
        f" The first {RANGES} are shown; the others hold {number(sum(r.counts.landed for r in rest))} rows."
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
