"""Many feeds in one command: which are meant, and a line for each of what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from sluice.cli.numbers import seconds
from sluice.cli.terminal import bad, good, heading, table
from sluice.pipelines.vocabulary.errors import FeedError, SluiceError, UsageError
from sluice.pipelines.vocabulary.units import many

if TYPE_CHECKING:
    from sluice.assets.execution import RunOutcome
    from sluice.assets.feeds import FeedFiles


@dataclass(frozen=True, slots=True)
class Line:
    """One feed of several: its outcome, and in a few words what landed."""

    feed: str
    outcome: RunOutcome
    landed: str


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
            raise FeedError(f"no feed is called like {name}", remedy=f"feeds here: {', '.join(sorted(files.feeds))}")
        found |= matching
    if not found:
        raise FeedError("no feed can be loaded", remedy="sluice feeds check")
    return sorted(found)


def view(lines: Sequence[Line], took: float) -> list[RenderableType]:
    rows: list[Sequence[str | Text]] = [
        (line.feed, bad(_word(line.outcome.error)) if line.outcome.error else good("done"), line.landed)
        for line in lines
    ]
    failing = failed(lines)
    said = f"{many(len(lines), 'feed')} in {seconds(took)}"
    end = bad(f"{said}, {len(failing)} of them failed: {', '.join(failing)}") if failing else good(said)
    return [heading("Run of many feeds"), table(("feed", "outcome", "landed"), rows, least="landed"), end]


def failed(lines: Sequence[Line]) -> list[str]:
    return [line.feed for line in lines if line.outcome.error]


def named(lines: Sequence[Line]) -> Iterator[SluiceError]:
    """The errors, each with its feed in front."""
    for line in lines:
        if error := line.outcome.error:
            told = copy(error)
            told.message = f"{line.feed}: {error.message}"
            yield told


def _word(error: SluiceError) -> str:
    return type(error).__name__
