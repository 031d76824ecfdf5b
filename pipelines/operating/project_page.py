"""The page of all feeds: a heat map of their newest windows, worst feeds first, in one HTML file of the lake.

Each feed has a row, which its runs write; the page is made of the rows. A row says nothing of windows after it: they
are drawn as unknown, so that a feed without runs never looks complete.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten

from pydantic import TypeAdapter, ValidationError

from sluice.pipelines.batch_report.markup import Html, details, number, page, render_tiles, section, tag
from sluice.pipelines.batch_report.report_page import put_page
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.operating.feed_status import FeedStatus, OpenPorts, try_read_status
from sluice.pipelines.ports import Lake
from sluice.pipelines.status.window_state import Standing
from sluice.pipelines.util.documents import Instant, Internal
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import HOUR, MINUTE, many, show_about, show_instant, show_window

WINDOWS = 24
"""The windows of each feed."""
UNKNOWN = "unknown"
LOSSES = "landed, with losses"
_REMEDIES = 3
"""The findings of a feed that the page has in full."""
_WORST = 3
"""The findings of several feeds that are not folded: the windows begin on the first screen of a phone."""
_FINE_FEEDS = 25
"""If more feeds have no findings, they are folded: the others then fit on a screen."""
_NOTE = "Written by each run and by sluice report --all. It needs no network."


@dataclass(frozen=True, slots=True)
class Cell:
    """A window by its start (ms). `is_linked`: it has a page."""

    start: Internal[int]
    name: str
    state: str
    is_linked: bool = False


@dataclass(frozen=True, slots=True)
class FeedRow:
    """A feed at a time (ms): its windows of this `length` (ms), oldest first, and its findings as (severe, text,
    remedy). `stored` is the name of its folders."""

    feed: str
    at: Instant
    length: Internal[int]
    words: str
    findings: tuple[tuple[bool, str, str], ...]
    cells: tuple[Cell, ...]
    stored: Internal[str] = ""

    @property
    def is_fine(self) -> bool:
        return not self.findings and bool(self.cells) and all(c.state in _FINE for c in self.cells)

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """The order of `sluice status`, then by windows that lack something."""
        lacking = sum(c.state not in _FINE for c in self.cells)
        return -sum(severe for severe, _, _ in self.findings), -len(self.findings), -lacking, self.feed


_FINE = (Standing.LANDED, Standing.RETIRED, Standing.OPEN)
_ADAPTER: TypeAdapter[FeedRow] = TypeAdapter(FeedRow)


@dataclass(frozen=True, slots=True)
class ProjectPage:
    """The page of a project's feeds. `addresses` are those in their lakes; none where it may not be written."""

    feeds: tuple[FeedRow, ...]
    data: Internal[bytes]
    addresses: tuple[str, ...]


def make_project_page(open_ports: OpenPorts, feeds: Sequence[Feed]) -> ProjectPage:
    """Write the rows of all feeds, and the page of each of their lakes. Kafka is asked."""

    lakes, of_stored = dict[str, Lake](), dict[str, Lake]()

    def read(feed: Feed) -> FeedRow:
        status = try_read_status(open_ports, feed, WINDOWS)
        try:
            with open_ports(feed) as ports:
                lakes[feed.name] = of_stored[feed.stored] = ports.lake
                return store_row(ports.lake, feed.stored, status, ports.clock())
        except SluiceError:
            return build_row(status, (), int(time.time() * 1000))

    rows = map_parallel(read, feeds)
    now = max((row.at for row in rows), default=0)
    of_each_lake = {str(feed.lake): lakes[feed.name] for feed in feeds if feed.name in lakes}
    addresses = [refresh(lake, now, anew=True) for lake in of_each_lake.values()]
    data = render(rows, now, lambda feed, window: of_stored[feed].locate(paths.get_hour_page_path(feed, window)))
    return ProjectPage(tuple(sorted(rows, key=lambda row: row.rank)), data, tuple(filter(None, addresses)))


def store_row(lake: Lake, stored: str, status: FeedStatus, now: int) -> FeedRow:
    """Write the row of a feed, where the lake may be written, and return it."""
    pages = {w for p in lake.list(f"{paths.batch_page_folder(stored)}/hours") if (w := paths.parse_page_window(p))}
    row = replace(build_row(status, pages, now), stored=stored)
    put_page(lake, paths.get_feed_row_path(stored), _ADAPTER.dump_json(row))
    return row


def build_row(status: FeedStatus, pages: Collection[int], now: int) -> FeedRow:
    """Returns the row of a feed. `pages`: its windows (their starts, ms) with a page."""
    lag, age = status.lag, status.outlook.age if status.outlook else None
    oldest = f", the oldest {show_about(age)} old" if age and lag else ""
    words = f"{many(lag, 'offset')} behind{oldest}" if lag else "caught up" if lag == 0 else "lag unknown"
    words = words if status.windows else "nothing landed yet"
    return FeedRow(
        status.feed,
        now,
        status.settings.length,
        words,
        tuple((f.severe, f.text, f.remedy) for f in status.findings),
        tuple(
            Cell(w.start, w.window, LOSSES if w.state == "landed" and str(w.losses) else w.state, w.start in pages)
            for w in status.windows[-WINDOWS:]
        ),
    )


def refresh(lake: Lake, now: int, *, anew: bool = False) -> str | None:
    """Make the page of the lake from all rows. Returns its address, or None if there is no page.

    Unless `anew`, only a page that `sluice report --all` made before is made again.
    """
    if not anew and lake.size(paths.PROJECT_PAGE) is None:
        return None
    data = map_parallel(lake.get, [paths.get_feed_row_path(feed) for feed in lake.folders(paths.SLUICE)])
    rows = [_parse_row(row) for row in data if row]
    content = render([row for row in rows if row], now)
    return lake.locate(paths.PROJECT_PAGE) if put_page(lake, paths.PROJECT_PAGE, content) else None


def _parse_row(data: bytes) -> FeedRow | None:
    """Returns None for the row of another version."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError:
        return None


def render(rows: Iterable[FeedRow], now: int, link: Callable[[str, int], str] = paths.link_hour_page) -> bytes:
    """Returns the page. `link` is the address of the page of a feed's window."""
    ranked = sorted((_extend(row, now) for row in rows), key=lambda row: row.rank)
    states = Counter(cell.state for row in ranked for cell in row.cells)
    troubled = sum(bool(row.findings) for row in ranked)
    # Open windows are no failure: they are left out of the figures.
    closed = sum(n for state, n in states.items() if state != Standing.OPEN)
    lacking = sum(n for state, n in states.items() if state not in _FINE)
    figures = [
        many(len(ranked), "feed"),
        (number(troubled), "with findings"),
        (number(closed - lacking), f"of {many(closed, 'window')} landed"),
        (number(states[Standing.FAILED] + states[LOSSES]), "failed or with losses"),
        (number(states[UNKNOWN]), "unknown: no run since"),
    ]
    legend = (
        tag("span", tag("i", class_=_name_class(state)), f"{states[state]:,} {state}")
        for state in (*Standing, LOSSES, UNKNOWN)
        if states[state]
    )
    head = tag(
        "header",
        tag("div", f"Sluice · all feeds · as of {show_instant(now // 1000 * 1000)}", class_="brand"),
        tag("h1", "Feeds, worst first"),
        render_tiles(figures),
        tag("div", *legend, class_="legend"),
    )
    hours = [show_window(now - HOUR * back)[:13] for back in (WINDOWS - 1, 0)]
    ends = tag("div", *(tag("span", f"{hour}:00") for hour in hours), class_="axis cells")
    axis = (
        tag("div", tag("b"), ends, class_="feed", aria_hidden="true") if any(r.length == HOUR for r in ranked) else ""
    )
    fine = [row for row in ranked if row.is_fine]
    folded = len(fine) if len(fine) > _FINE_FEEDS else 0
    lines = [_render_row(row, link) for row in ranked if not (folded and row.is_fine)]
    if folded:
        lines.append(details(f"{folded} feeds without findings", *(_render_row(row, link) for row in fine)))
    note = f"The newest {WINDOWS} windows of each feed. A window links to its page, if it has one."
    sections = [*_render_findings(ranked), section("feeds", "Windows", axis, *lines, note=note)]
    return page("Sluice: feeds", head, sections, _NOTE).encode()


def _render_findings(ranked: Sequence[FeedRow]) -> Iterator[Html]:
    """Yields the findings of all feeds, if several feeds have the same: the worst, and the others folded.

    Findings are the same if they differ in numbers and in the feed's name alone.
    """
    groups: dict[tuple[bool, str], dict[str, tuple[str, str]]] = {}
    for row in ranked:
        own = re.compile(rf"\b{re.escape(row.feed)}\b")
        for severe, text, remedy in row.findings:
            shape = re.sub(r"\d+", "0", own.sub("", text.splitlines()[0] + remedy))
            groups.setdefault((severe, shape), {}).setdefault(row.feed, (text, remedy))
    if all(len(feeds) == 1 for feeds in groups.values()):
        return
    worst = sorted(groups.items(), key=lambda group: (not group[0][0], -len(group[1])))
    lines = [_render_group("bad" if severe else "warn", feeds) for (severe, _), feeds in worst]
    rest = [details(many(len(lines) - _WORST, "more finding"), *lines[_WORST:])] if lines[_WORST:] else []
    yield section("findings", "Findings", *lines[:_WORST], *rest)


def _render_group(kind: str, feeds: Mapping[str, tuple[str, str]]) -> Html:
    first, (text, remedy) = next(iter(feeds.items()))
    subject = f"{many(len(feeds), 'feed')}, such as {first}: " if len(feeds) > 1 else f"{first}: "
    links = (piece for name in feeds for piece in (tag("a", tag("bdi", name), href=f"#feed-{name}"), " "))
    inside = tag("p", tag("b", text), tag("br"), "→ ", tag("code", remedy)), tag("p", *links)
    return tag("details", tag("summary", tag("b", subject, class_=kind), text.splitlines()[0]), *inside, class_="line")


def _extend(row: FeedRow, now: int) -> FeedRow:
    """Returns the row with the windows since it was written, as unknown, and a finding if a run is overdue."""
    open_ = {c.start for c in row.cells if c.state in (Standing.OPEN, Standing.RUNNING) and c.start + row.length <= now}
    cells = [replace(c, state=UNKNOWN) if c.start in open_ and row.at < now - _GRACE else c for c in row.cells]
    newest = cells[-1].start + row.length if cells else now
    for start in range(newest, now, row.length)[-WINDOWS:]:
        is_due = start + row.length <= now - _GRACE
        cells.append(Cell(start, show_window(start), UNKNOWN if is_due else Standing.OPEN))
    overdue = now - row.at > 2 * row.length + _GRACE
    text = f"no run and no status since {show_instant(row.at // 1000 * 1000)}"
    late = ((False, text, f"see that its schedule is on: sluice status {row.feed}"),) if overdue else ()
    return replace(row, findings=(*row.findings, *late), cells=tuple(cells[-WINDOWS:]))


_GRACE = 10 * MINUTE


def _render_row(row: FeedRow, link: Callable[[str, int], str]) -> Html:
    before = (tag("i", class_="c") for _ in range(WINDOWS - len(row.cells)))
    cells = (
        tag(
            "a",
            class_=_name_class(c.state),
            href=link(row.stored or row.feed, c.start) if c.is_linked else None,
            title=f"{row.feed} {c.name}: {c.state}",
        )
        for c in row.cells
    )
    kind = "bad" if any(severe for severe, _, _ in row.findings) else "warn" if row.findings else "soft"
    words = row.findings[0][1].splitlines()[0] if row.findings else row.words
    more = [
        tag("p", tag("b", text), tag("br"), "→ ", tag("code", remedy)) for _, text, remedy in row.findings[:_REMEDIES]
    ]
    detail = tag("summary", tag("span", shorten(words, 110, placeholder=" …"), class_=kind))
    state = tag("details", detail, *more) if more else tag("div", tag("span", words, class_=kind))
    name = tag("b", tag("bdi", row.feed))
    return tag("div", name, tag("div", *before, *cells, class_="cells"), state, class_="feed", id=f"feed-{row.feed}")


def _name_class(state: str) -> str:
    return f"c {state.replace(',', '').replace(' ', '-')}"
