"""Windows on the command line: options, and formats as text and as a strip of signs.

A window is named by its start, in UTC: `2026-11-20T14`, or with more or fewer fields if windows are shorter or longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.options import parsing
from sluice.cli.terminal.output import bad, good, warn, work
from sluice.pipelines.errors import UsageError
from sluice.pipelines.status.window_state import Standing, WindowStanding, describe_complete, describe_pending
from sluice.pipelines.util.units import DAY, HOUR, many, show_window

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sluice.cli.app.invocation import Session
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import WindowSettings
    from sluice.pipelines.planning.windows import OpenWindows

Window = Annotated[
    list[str] | None,
    typer.Option(
        "--window",
        metavar="START",
        help="The window that starts at this time (UTC), such as 2026-11-20T14, or all of a day; repeatable.",
        show_default=False,
        autocompletion=completers.complete_windows,
    ),
]
OneWindow = Annotated[
    str,
    typer.Option(
        "--window",
        metavar="START",
        help="The window that starts at this time (UTC), such as 2026-11-20T14, or all of a day.",
        show_default=False,
        autocompletion=completers.complete_windows,
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="START",
        help="All windows from this one on, such as 2026-11-20.",
        show_default=False,
        autocompletion=completers.complete_windows,
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="END",
        help="With --from: the end, exclusive.",
        show_default="after the newest closed window",
        autocompletion=completers.complete_windows,
    ),
]


# -- requested windows


@dataclass(frozen=True, slots=True)
class Chosen:
    """The closed windows of a request, and those that are still open."""

    settled: Sequence[int] = ()
    open_windows: OpenWindows | None = None


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """Windows as typed: `--window`, or `--from` and `--to`."""

    window: Window = None
    start: From = None
    end: To = None

    @property
    def any(self) -> bool:
        return bool(self.window or self.start or self.end)

    def choose(self, session: Session, feed: Feed) -> Chosen:
        """Returns the requested windows; none without options.

        Raises UsageError, and WindowOpen if all of them are still open.
        """
        from sluice.pipelines.planning import windows

        if not self.any:
            return Chosen()
        with session.open_ports(feed) as ports:
            now = ports.clock()
        requested = self.parse(feed.window, now)
        for window_start in requested if self.window else requested[:1]:
            windows.check_aligned(window_start, feed.window)
        settled = _keep_settled(requested, feed.window, now)
        if not settled:
            windows.check_window(min(requested), feed.window, now)
        return Chosen(settled, _open_windows(requested, settled, feed.window))

    def parse(self, settings: WindowSettings, now: int) -> Sequence[int]:
        """Returns the start (ms) of each window once: as typed, or oldest first. Raises UsageError."""
        if self.window and (self.start or self.end):
            raise UsageError("--window together with --from or --to", remedy="use either --window or --from and --to")
        if self.window:
            return tuple(dict.fromkeys(w for text in self.window for w in parsing.windows(text, settings)))
        if self.start is None:
            raise UsageError("--to without --from", remedy="add the first window: --from 2026-11-20T00")
        end = parsing.window(self.end, settings) if self.end else settings.last_boundary(now)
        return _list_between(settings, parsing.window(self.start, settings), end, self.end)


def _keep_settled(requested: Sequence[int], settings: WindowSettings, now: int) -> Sequence[int]:
    last = settings.last_boundary(now)
    if isinstance(requested, range):  # it may end in a far future
        return requested[: bisect_left(requested, last)]
    return tuple(w for w in requested if w < last)


def _open_windows(requested: Sequence[int], settled: Sequence[int], settings: WindowSettings) -> OpenWindows | None:
    from sluice.pipelines.planning.windows import OpenWindows

    number = len(requested) - len(settled)
    if not number:
        return None
    first = requested[len(settled)] if isinstance(requested, range) else min({*requested} - {*settled})
    return OpenWindows.of(first, number, settings)


def open_window_lines(feed: str, open_windows: OpenWindows | None, *, where: str = "") -> list[RenderableType]:
    """The windows of a request that are still open, and how to land them."""
    if open_windows is None:
        return []
    return [warn(where + open_windows.text), Text(f"  → {open_windows.remedy(feed)}", style="dim")]


def _list_between(settings: WindowSettings, start: int, end: int, text: str | None) -> Sequence[int]:
    from sluice.pipelines.planning import windows

    for bound in (start, end):
        windows.check_aligned(bound, settings)
    if text is None:
        end = max(end, settings.end_of(start))
    if start >= end:
        raise UsageError(
            f"no window between {settings.name(start)} and {settings.name(end)}",
            remedy="--to is exclusive and must be later than --from",
        )
    return settings.list_starts(start, end)


# -- in words


def verdict(s: WindowStanding) -> Text:
    """One line: the window's state, and its pending parts."""
    name = f"window {s.window}"
    match s.state:
        case Standing.LANDED:
            return (warn if str(s.losses) else good)(describe_complete(s))
        case Standing.FROM_ORIGIN:
            return warn(f"{name} has landed {s.state}: earlier records of it have not")
        case Standing.RETIRED:
            return warn(f"{name} is retired: its rows were removed; sluice explain shows by whom and why")
        case Standing.OPEN:
            return warn(f"{name} is not closed yet")
        case Standing.HELD | Standing.PARTIAL | Standing.PENDING:
            return warn(f"{name} is {s.state}: {describe_pending(s.pending)}")
        case Standing.RUNNING:
            return work(f"{name}: batch {s.batch} is active; {describe_pending(s.pending)}")
        case _:
            return bad(f"{name}: batch {s.batch} failed or never finished; {describe_pending(s.pending)}")


# -- as a strip


_SIGNS = {
    Standing.LANDED: ("■", "#", "green"),
    Standing.FROM_ORIGIN: ("◨", "^", "yellow"),
    Standing.RETIRED: ("▫", "-", "dim"),
    Standing.PARTIAL: ("◧", "+", "yellow"),
    Standing.HELD: ("◆", "H", "magenta"),
    Standing.PENDING: ("□", "o", "default"),
    Standing.FAILED: ("✗", "x", "bold red"),
    Standing.RUNNING: ("▶", ">", "cyan"),
    Standing.OPEN: ("·", ".", "dim"),
}


def strip(standings: Sequence[WindowStanding], *, fancy: bool) -> Text:
    """A sign for each window, oldest first; plain ASCII unless `fancy`."""
    return Text("").join(_sign(s.state, fancy) for s in standings)


def _sign(standing: Standing, fancy: bool) -> Text:
    sign, plain, style = _SIGNS[standing]
    return Text(sign if fancy else plain, style=style if fancy else "")


def calendar(
    standings: Sequence[WindowStanding], settings: WindowSettings, *, fancy: bool, width: int
) -> Iterator[Text]:
    """The windows in rows of a day, or of a span that fits; and the legend."""
    length = settings.length
    span = next((s for s in _SPANS if s // length <= _count_columns(s, width)), _SPANS[-1])
    rows: dict[int, dict[int, WindowStanding]] = {}
    for s in standings:
        at = settings.local(s.start)
        rows.setdefault(at - at % span, {})[at % span // length] = s
    if span == DAY:
        yield Text(" " * 14 + "".join(_format_hour(i * length) for i in range(span // length)).rstrip(), style="dim")
    for start, row in rows.items():
        day, _, time = show_window(start).partition("T")
        label = day if span >= DAY else f"{day} {time}"
        signs = (_sign(row[i].state, fancy) if i in row else Text(" ") for i in range(max(row) + 1))
        yield Text.assemble((f"  {label}  ", "dim"), Text(" ").join(signs))
    yield legend(standings, fancy=fancy)


_SPANS = (*(d * DAY for d in (28, 14, 7, 1)), *(h * HOUR for h in (12, 8, 6, 4, 3, 2, 1)), HOUR // 2, HOUR // 4)
_COLUMNS = 30
"""Windows in a row at most: `_SPANS` are the rows that there are, the longest that fits is taken."""


def _count_columns(span: int, width: int) -> int:
    """Returns the number of windows that fit into a row of that span, after its label."""
    label = len("  2026-11-20  ") if span >= DAY else len("  2026-11-20 12:00  ")
    return min(_COLUMNS, (width - label + 1) // 2)


def _format_hour(at: int) -> str:
    """Two characters of the line above the rows of days."""
    return f"{at // HOUR:02}" if at % (6 * HOUR) == 0 else "  "


def legend(standings: Sequence[WindowStanding], *, fancy: bool) -> Text:
    """The meaning of the signs that occur, with the number of windows each."""
    empty = sum(s.empty for s in standings)
    notes = {Standing.LANDED: f" ({empty} empty)"} if empty else {}
    counted = [(s, sum(f.state is s for f in standings)) for s in Standing]
    signs = [_sign(s, fancy).append(f" {n} {s}{notes.get(s, '')}", style="not bold default") for s, n in counted if n]
    return Text("  ") + Text("   ").join(signs)


def title(settings: WindowSettings, standings: Sequence[WindowStanding]) -> str:
    """The title of a strip."""
    zone = "" if settings.timezone else ", times in UTC"
    return f"the last {many(len(standings), 'window')} of {settings.words}{zone}"
