"""Windows on the command line: how one asks for them, and how they are shown, in words and as a strip.

A window is written by its start, in UTC: `2026-11-20T14`, or as finely as the feed's windows are long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from sluice.cli import parse
from sluice.cli.terminal import bad, count, good, many, warn
from sluice.pipelines.errors import UsageError
from sluice.pipelines.standing import Owes, Standing, WindowStanding
from sluice.pipelines.units import show_duration, show_window

if TYPE_CHECKING:
    from sluice.cli.session import Session
    from sluice.pipelines.feed import Feed, WindowSettings
    from sluice.pipelines.ledger import State

Window = Annotated[
    list[str] | None,
    typer.Option(
        "--window",
        metavar="START",
        help="The window that starts then, in UTC, such as 2026-11-20T14; repeatable.",
        show_default=False,
    ),
]
OneWindow = Annotated[
    str, typer.Option("--window", metavar="START", help="The window that starts then, in UTC.", show_default=False)
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="START", help="All windows from this one on.", show_default=False),
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="END",
        help="With --from: up to, not including, this one.",
        show_default="up to the newest closed one",
    ),
]


# -- asked for


def chosen(
    session: Session, feed: Feed, window: Sequence[str] | None, start: str | None, end: str | None
) -> tuple[int, ...]:
    """The windows that `--window`, or `--from` and `--to`, ask for; none without them. Raises UsageError.

    They can be landed: aligned, closed, not before the feed's first.
    """
    from sluice.pipelines import windows

    if not (window or start or end):
        return ()
    state, now = ledger_state(session, feed)
    asked = named(feed.window, now, window, start, end)
    for each in asked if window else (asked[0], asked[-1]):
        windows.check_window(each, feed.window, state, now)
    return asked


def ledger_state(session: Session, feed: Feed) -> tuple[State, int]:
    """The feed's folded ledger, and the time (ms). Kafka is not asked."""
    from sluice.pipelines.ledger import Ledger

    with session.open_edges(feed) as edges:
        return Ledger(edges.lake, feed.name, edges.clock).read(), edges.clock()


def named(
    settings: WindowSettings, now: int, window: Sequence[str] | None, start: str | None, end: str | None
) -> tuple[int, ...]:
    """The windows' starts, each once, as given or oldest first. Raises UsageError for what names no windows."""
    if window and (start or end):
        raise UsageError("--window together with --from or --to", remedy="give one of them")
    if window:
        return tuple(dict.fromkeys(map(parse.window, window)))
    if start is None:
        raise UsageError("--to without --from", remedy="say where to begin: --from 2026-11-20T00")
    return _between(settings, parse.window(start), parse.window(end) if end else settings.last_boundary(now), end)


def _between(settings: WindowSettings, start: int, end: int, told: str | None) -> tuple[int, ...]:
    from sluice.pipelines import windows

    for bound in (start, end):
        windows.check_aligned(bound, settings)
    if told is None:
        end = max(end, start + settings.length)
    if start >= end:
        raise UsageError(
            f"no window lies between {show_window(start)} and {show_window(end)}",
            remedy="--to names the first window that is left out: it must be later than --from",
        )
    return tuple(range(start, end, settings.length))


# -- in words


def verdict(s: WindowStanding) -> Text:
    """One line: how the window stands, and who owes what."""
    name = f"window {show_window(s.window)}"
    match s.standing:
        case Standing.LANDED:
            return good(f"{name} is complete, {many(s.span or 0, 'offset')}")
        case Standing.OPEN:
            return warn(f"{name} is not closed yet")
        case Standing.HELD | Standing.PARTIAL | Standing.OWED:
            return warn(f"{name} is {s.standing}: {owing(s.owes)}")
        case _:
            return bad(f"{name}: batch {s.batch} {_AT[s.standing]}; {owing(s.owes)}")


_AT = {Standing.RUNNING: "is at work on it", Standing.FAILED: "failed or never finished"}


def owing(owes: Sequence[Owes], shown: int = 4) -> str:
    """`orders:1 owes 30 of its offsets, …`, the first few partitions."""
    if not owes:
        return "nothing is known of it yet"
    if all(o.ranges is None for o in owes):
        return f"where it ends is not resolved in {many(len(owes), 'partition')}"
    told = [_owes(o) for o in owes[:shown]]
    return ", ".join(told) + (f" … and {len(owes) - shown} more partitions" if len(owes) > shown else "")


def _owes(o: Owes) -> str:
    if o.ranges is None:
        return f"{o.key} where it ends is not resolved"
    first = f"{o.key} owes {o.ranges[0]}" + (f" … {len(o.ranges) - 1} ranges more" if len(o.ranges) > 1 else "")
    return first if o.held_at is None else f"{first}, held at {count(o.held_at)} by an open transaction"


# -- as a strip


_SIGNS = {
    Standing.LANDED: ("■", "#", "green"),
    Standing.PARTIAL: ("◧", "+", "yellow"),
    Standing.HELD: ("◆", "H", "magenta"),
    Standing.OWED: ("□", "o", "default"),
    Standing.FAILED: ("✗", "x", "bold red"),
    Standing.RUNNING: ("▶", ">", "cyan"),
    Standing.OPEN: ("·", ".", "dim"),
}
MARK_EVERY = 6
"""Windows between two times under a strip."""


def strip(found: Sequence[WindowStanding], *, fancy: bool) -> Text:
    """A sign for each window, oldest first; plain ASCII unless `fancy`."""
    return Text("").join(_sign(s.standing, fancy) for s in found)


def _sign(standing: Standing, fancy: bool) -> Text:
    sign, plain, style = _SIGNS[standing]
    return Text(sign if fancy else plain, style=style if fancy else "")


def spaced(found: Sequence[WindowStanding], width: int, *, fancy: bool) -> Iterator[Text]:
    """The strip in lines of at most `width`, each with times above it, and its legend."""
    per_line = max(MARK_EVERY, (width - 4) // 2 // MARK_EVERY * MARK_EVERY)
    for at in range(0, len(found), per_line):
        line = found[at : at + per_line]
        yield Text(f"  {_marks(line)}", style="dim")
        yield Text("  ") + Text(" ").join(_sign(s.standing, fancy) for s in line)
    yield legend(found, fancy=fancy)


def _marks(line: Sequence[WindowStanding]) -> str:
    """`2026-11-20T14:00` over the first sign, shorter where only the time of day changes."""
    out, day = "", ""
    for at in range(0, len(line), MARK_EVERY):
        date, _, time = show_window(line[at].window).partition("T")
        label = time if date == day else (date if time == "00:00" or day else f"{date} {time}")
        if at and len(out) >= at * 2:
            continue
        out, day = out.ljust(at * 2) + label, date
    return out


def legend(found: Sequence[WindowStanding], *, fancy: bool) -> Text:
    """What the signs that occur mean, with how many windows each."""
    counted = [(s, sum(f.standing is s for f in found)) for s in Standing]
    shown = [_sign(s, fancy).append(f" {n} {s}", style="not bold default") for s, n in counted if n]
    return Text("  ") + Text("   ").join(shown)


def title(length: int, found: Sequence[WindowStanding]) -> str:
    """What a strip shows: windows that last `length` ms."""
    return f"the last {many(len(found), 'window')} of {show_duration(length)}, times in UTC"


# -- for programs


def document(s: WindowStanding) -> dict[str, Any]:
    return {
        "window": show_window(s.window),
        "state": str(s.standing),
        "offsets": s.span,
        "accounted": s.done,
        "batch": s.batch,
        "owed": [_owes_document(o) for o in s.owes],
    }


def _owes_document(o: Owes) -> dict[str, Any]:
    return {
        "topic": o.key.topic,
        "partition": o.key.partition,
        "ranges": None if o.ranges is None else [list(r) for r in o.ranges],
        "held_at": o.held_at,
    }
