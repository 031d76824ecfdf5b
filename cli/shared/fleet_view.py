"""Many feeds in one command: which are meant, and a line for each of what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from threading import Lock
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.terminal.number_format import seconds
from sluice.cli.terminal.output import bad, good, heading, remedy, table, warn
from sluice.pipelines.errors import FeedError, NotReached, SluiceError, UsageError
from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.assets.specs.feed_files import FeedFiles

LAST_STAGE = "finish"
"""The stage that a feed's run reports when it has committed."""
SHOWN = 4
"""How many feeds a meter, or an error of several, names."""


@dataclass(frozen=True, slots=True)
class Line:
    """One feed of several: what went wrong in its runs, in a few words what landed, and why its table is not up to
    date; whether open transactions hold something back; `beside`: what else somebody should know."""

    feed: str
    errors: tuple[SluiceError, ...]
    landed: str
    table: SluiceError | None = None
    held: bool = False
    beside: tuple[RenderableType, ...] = ()


class Together:
    """The progress of many feeds as one: how many have come to their end, and which are at work."""

    def __init__(self, report: Reporter, feeds: int) -> None:
        self._report, self._total, self._lock = report, feeds, Lock()
        self._stages: dict[str, str] = {}

    def of(self, feed: str) -> Reporter:
        """Takes the progress of one feed. Feeds report from threads of their own."""

        def report(progress: Progress) -> None:
            with self._lock:
                self._stages.pop(feed, None)
                self._stages[feed] = progress.stage  # the last to be heard of stands last
                done = sum(stage == LAST_STAGE for stage in self._stages.values())
                at_work = [name for name, stage in self._stages.items() if stage != LAST_STAGE]
                note = ", ".join(at_work[-SHOWN:])
                self._report(Progress("feeds", done, self._total, note, progress.met))

        return report


def is_pattern(*names: str) -> bool:
    return any(c in name for name in names for c in "*?[")


def chosen(files: FeedFiles, names: Sequence[str], *, everything: bool) -> list[str]:
    """The feeds that are meant, each once, in the order of their names; with `everything` those whose files are sound.

    Raises UsageError for no feed, or both; FeedError for a name that is no feed, or whose file is wrong.
    """
    if everything and names:
        raise UsageError("--all together with names of feeds", remedy="give one of them")
    if not everything and not names:
        raise UsageError("no feed", remedy="name one or several, or all: sluice run --all")
    found = set(files.feeds) if everything else set[str]()
    for name in names:
        matching = {n for n in files.feeds if fnmatchcase(n, name)} if is_pattern(name) else {files.feed(name).name}
        if not matching:
            raise FeedError(f"no feed is called like {name}", remedy=files.instead_of(name))
        found |= matching
    if not found:
        raise FeedError("no feed can be loaded", remedy="sluice feeds check")
    return sorted(found)


def view(lines: Sequence[Line], took: float) -> list[RenderableType]:
    rows: list[Sequence[str | Text]] = [(line.feed, _outcome(line), line.landed) for line in lines]
    said = f"{many(len(lines), 'feed')} in {seconds(took)}"
    wrong = [(failed(lines), "failed"), (left(lines), "not reached")]
    parts = [f"{len(names)} {what}: {', '.join(names)}" for names, what in wrong if names]
    end = bad("; ".join([said, *parts])) if parts else good(said)
    beside = [shown for line in lines for shown in line.beside]
    beside += [shown for line in lines if line.table for shown in table_behind(line.table, f"{line.feed}: ")]
    return [heading("Run of many feeds"), table(("feed", "outcome", "landed"), rows, optional="landed"), *beside, end]


def _outcome(line: Line) -> Text:
    if _is_left(line):
        return warn("not reached")
    if line.errors:
        return bad(_words(line.errors))
    if line.table:
        return warn("done, its table is not up to date")
    return warn("done, some is held back") if line.held else good("done")


def table_behind(error: SluiceError, of: str = "") -> list[RenderableType]:
    """Why a feed's table is not up to date, and what to do."""
    return [warn(f"{of}the table is not up to date: {error.message}"), remedy(error)]


def failed(lines: Sequence[Line]) -> list[str]:
    return [line.feed for line in lines if line.errors and not _is_left(line)]


def left(lines: Sequence[Line]) -> list[str]:
    """The feeds that were not reached, and of which nothing else is wrong."""
    return [line.feed for line in lines if _is_left(line)]


def _is_left(line: Line) -> bool:
    return bool(line.errors) and all(isinstance(e, NotReached) for e in line.errors)


def named(lines: Sequence[Line]) -> Iterator[SluiceError]:
    """The errors, each with its feed in front; one that several feeds have is there once."""
    found = dict[tuple[str, str, str], tuple[SluiceError, dict[str, None]]]()
    for line in lines:
        for error in line.errors:
            like = type(error).__name__, error.message, error.remedy
            found.setdefault(like, (error, {}))[1][line.feed] = None
    for error, feeds in found.values():
        told = copy(error)
        told.message = f"{_some(list(feeds))}: {error.message}"
        yield told


def _some(feeds: Sequence[str]) -> str:
    more = len(feeds) - SHOWN
    return ", ".join(feeds) if more <= 1 else f"{', '.join(feeds[:SHOWN])} and {more} more"


def _words(errors: Sequence[SluiceError]) -> str:
    return ", ".join(dict.fromkeys(type(e).__name__ for e in errors))
