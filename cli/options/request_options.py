"""Options of several commands that say what to land, and the requests that they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session
from sluice.cli.options import parsing
from sluice.cli.options import window_options as windows
from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.planning.windows import OpenWindows

Offsets = Annotated[
    list[str] | None,
    typer.Option(
        "--offsets",
        metavar="T:P:START-END",
        help="Exactly these offsets, without END; repeatable.",
        show_default=False,
    ),
]

Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="T:P",
        help="These partitions only; repeatable.",
        show_default=False,
        autocompletion=completers.complete_partitions,
    ),
]

Replace = Annotated[
    bool,
    typer.Option("--replace", metavar=" ", help="Land the range again; new files replace the old ones in one step."),
]

DryRun = Annotated[bool, typer.Option("--dry-run", metavar=" ", help="Show what would change, and change nothing.")]

Yes = Annotated[bool, typer.Option("--yes", metavar=" ", help="Do not ask for confirmation.")]

PerRun = Annotated[
    int,
    typer.Option("--windows-per-run", metavar="N", min=1, help="With --from: how many windows one run lands."),
]


@dataclass(frozen=True, slots=True)
class RequestedWork:
    """The requests that options make, and the windows of theirs that are still open."""

    requests: tuple[Request, ...]
    open_windows: OpenWindows | None = None


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """The request, as typed."""

    offsets: Sequence[str] | None = None
    only: Sequence[str] | None = None
    window: Sequence[str] | None = None
    start: str | None = None
    end: str | None = None
    replace: bool = False
    per_run: int = 1

    @property
    def windows(self) -> bool:
        return bool(self.window or self.start or self.end)

    def requests(self, session: Session, feed: Feed) -> RequestedWork:
        """Returns offsets, a request for each window or group of windows past the grace period, or a catch-up.

        Raises UsageError, and WindowOpen if there is none.
        """
        if self.offsets and (self.only or self.windows):
            raise UsageError(
                f"--offsets and {'--only' if self.only else 'windows'} together",
                remedy="--offsets names exactly what to land: leave the others out",
            )
        if self.offsets:
            ranges = tuple(parsing.parse_offset_range(text) for text in self.offsets)
            return RequestedWork((Request(RequestKind.OFFSETS, ranges, replace=self.replace),))
        only = tuple(parsing.parse_partition(text) for text in self.only or ())
        if not self.windows:
            return RequestedWork((self._catch_up(only),))
        chosen = windows.choose_windows(session, feed, self.window, self.start, self.end)
        return RequestedWork(tuple(self._of_windows(chosen.settled, feed.window.length, only)), chosen.open_windows)

    def _of_windows(self, settled: Sequence[int], length: int, only: tuple[TopicPartition, ...]) -> Iterator[Request]:
        if self.per_run == 1:
            yield from (Request(RequestKind.WINDOW, (), w, only, replace=self.replace) for w in settled)
            return
        groups = (settled[at : at + self.per_run] for at in range(0, len(settled), self.per_run))
        yield from (Request(RequestKind.WINDOW, (), g[0], only, g[-1] + length, self.replace) for g in groups)

    def _catch_up(self, only: tuple[TopicPartition, ...]) -> Request:
        if self.replace:
            raise UsageError("--replace needs a range", remedy="name windows, times or offsets with --replace")
        return Request(RequestKind.CATCH_UP, only=only)
