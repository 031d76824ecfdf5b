"""Describes batches of other runs: whether the runs are alive, the action taken, and the remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.text import Text

from sluice.cli.terminal.output import safe, warn
from sluice.pipelines.model.receipts import Fate, Life, Met, Progress, Reporter


class MetRecorder:
    """Passes progress on, and keeps its last report on each batch of another run."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._met: dict[int, Met] = {}

    def __call__(self, progress: Progress) -> None:
        if progress.met is not None:
            self._met[progress.met.batch] = progress.met
        self._report(progress)

    @property
    def met(self) -> tuple[Met, ...]:
        return tuple(self._met.values())


# -- for people


def view(batches: Iterable[Met], *, dry_run: bool = False) -> Iterator[Text]:
    """A line for each batch, with the evidence and the ways out below it."""
    for met in batches:
        evidence = "" if met.refused else met.verdict.why
        yield beneath(warn(f"{met.text}{_format_fate(met, dry_run)}"), evidence, lines(met.ways))


def _format_fate(met: Met, dry_run: bool) -> str:
    why = f": {met.why}" if met.why else ""
    if met.fate is Fate.LEFT:
        return why if met.verdict.life is Life.DEAD else ""
    return f"; {'to be ' if dry_run else ''}{met.fate}{why}"


def lines(ways: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns a line for each command and its effect."""
    return tuple(f"{command}   {what}" for command, what in ways)


def beneath(line: Text, why: str, ways: Iterable[str]) -> Text:
    """The line, with the evidence and the ways out below it."""
    if why:
        line.append(f"\n    {safe(why)}", style="dim")
    for way in ways:
        line.append("\n  → ", style="bold").append(safe(way), style="not bold default")
    return line


def standing(busy: Mapping[int | None, int], batches: Iterable[Met], name: Any) -> Iterator[Text]:
    """Lists positions left alone because of other runs' batches, then these batches."""
    for window, batch in busy.items():
        yield warn(f"{name(window)} was skipped: batch {batch} reserves it")
    yield from view(batches)
