"""States of windows for a terminal: in words, and as a strip of signs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from sluice.cli.terminal.output import bad, good, warn, work
from sluice.pipelines.status.window_state import Standing, WindowStanding, describe_complete, describe_pending
from sluice.pipelines.util.units import DAY, HOUR, many, show_window

if TYPE_CHECKING:
    from sluice.pipelines.feed.sections import WindowSettings


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
