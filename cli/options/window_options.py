"""Windows on the command line: options.

A window is named by its start, in UTC: `2026-11-20T14`, or with more or fewer fields if windows are shorter or longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from sluice.cli.app import completers
from sluice.cli.app.parameters import option
from sluice.cli.options import parsing
from sluice.cli.terminal.output import warn
from sluice.pipelines.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sluice.cli.app.invocation import Session
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import WindowSettings
    from sluice.pipelines.planning.windows import OpenWindows

Window = Annotated[
    list[str] | None,
    option(
        "--window",
        "START",
        "The window that starts at this time (UTC), such as 2026-11-20T14, or all of a day; repeatable.",
        autocompletion=completers.complete_windows,
    ),
]
OneWindow = Annotated[
    str,
    option(
        "--window",
        "START",
        "The window that starts at this time (UTC), such as 2026-11-20T14, or all of a day.",
        autocompletion=completers.complete_windows,
    ),
]
From = Annotated[
    str | None,
    option(
        "--from",
        "START",
        "All windows from this one on, such as 2026-11-20.",
        autocompletion=completers.complete_windows,
    ),
]
To = Annotated[
    str | None,
    option(
        "--to",
        "END",
        "With --from: the end, exclusive.",
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
