"""Options that several commands share: what to land, preview and confirmation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session
from sluice.cli.app.parameters import flag, option
from sluice.cli.options import parsing
from sluice.cli.options.window_options import WindowOptions
from sluice.cli.terminal.output import good
from sluice.pipelines.errors import Failed, UsageError
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.sections import WindowSettings
    from sluice.pipelines.planning.windows import OpenWindows

Offsets = Annotated[
    list[str] | None, option("--offsets", "T:P:START-END", "Exactly these offsets, END exclusive; repeatable.")
]

MissingFiles = Annotated[
    bool, flag("--missing-files", "Land the offsets of missing and changed files again, and no others.")
]

Only = Annotated[
    list[str] | None,
    option("--only", "T:P", "Only this partition; repeatable.", autocompletion=completers.complete_partitions),
]

Replace = Annotated[bool, flag("--replace", "Land the range again. New files replace the old ones in one step.")]

DryRun = Annotated[bool, flag("--dry-run", "Preview the changes without making them.")]

Yes = Annotated[bool, flag("--yes", "Do not ask for confirmation.")]


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """Preview and confirmation of a change, as typed."""

    dry_run: DryRun = False
    yes: Yes = False


PerRun = Annotated[
    int, option("--windows-per-run", "N", "With --from: number of windows per run.", min=1, show_default=True)
]


@dataclass(frozen=True, slots=True)
class RequestedWork:
    """The requests that options make, and the windows of theirs that are still open."""

    requests: tuple[Request, ...]
    open_windows: OpenWindows | None = None


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """The offsets or windows to land, as typed."""

    offsets: Offsets = None
    missing_files: MissingFiles = False
    only: Only = None
    windows: WindowOptions = field(default_factory=WindowOptions)
    replace: Replace = False
    per_run: PerRun = 1

    def requests(self, session: Session, feed: Feed) -> RequestedWork:
        """Returns offset ranges, a request for each closed window or group of windows, or a catch-up.

        Raises UsageError, and WindowOpen if all windows are still open.
        """
        if self.offsets and (self.only or self.windows.any):
            raise UsageError(
                f"--offsets together with {'--only' if self.only else 'windows'}",
                remedy="leave one out: --offsets alone selects the records",
            )
        if self.missing_files:
            return self._request_missing(session, feed)
        if self.offsets:
            ranges = tuple(parsing.parse_offset_range(text) for text in self.offsets)
            return RequestedWork((Request(RequestKind.OFFSETS, ranges, replace=self.replace),))
        only = tuple(parsing.parse_partition(text) for text in self.only or ())
        if not self.windows.any:
            if self.replace:
                raise UsageError("--replace without a range", remedy="add --window, --from and --to, or --offsets")
            return RequestedWork((Request(RequestKind.CATCH_UP, only=only),))
        chosen = self.windows.choose(session, feed)
        return RequestedWork(tuple(self._of_windows(chosen.settled, feed.window, only)), chosen.open_windows)

    def _request_missing(self, session: Session, feed: Feed) -> RequestedWork:
        """Returns the requests for missing files that Kafka can replace; none if no file is missing."""
        from sluice.pipelines.operating.repairs import find_missing_files

        if self.offsets or self.only or self.windows.any:
            raise UsageError("--missing-files together with offsets or windows", remedy="leave the others out")
        with session.open_ports(feed) as ports:
            missing, lost = find_missing_files(feed, ports)
        if lost:
            first = f"{lost[0].topic}:{lost[0].partition}:{lost[0].start}-{lost[0].end}"
            text = f"{many(len(lost), 'offset range')} of missing files cannot land again: Kafka no longer has {first}"
            remedy = f"bring the files back from a backup, or give their rows up: see sluice audit {feed.name} --all"
            error = Failed(text, remedy=remedy)
            if not missing:
                raise error
            session.terminal.fail(error)
        if not missing:
            session.terminal.show(good(f"{feed.name}: no file is missing"))
            return RequestedWork(())
        return RequestedWork(tuple(Request(RequestKind.OFFSETS, tuple(run), replace=True) for run in missing))

    def _of_windows(
        self, settled: Sequence[int], settings: WindowSettings, only: tuple[TopicPartition, ...]
    ) -> Iterator[Request]:
        if self.per_run == 1:
            yield from (Request(RequestKind.WINDOW, (), w, only, replace=self.replace) for w in settled)
            return
        groups = (settled[at : at + self.per_run] for at in range(0, len(settled), self.per_run))
        yield from (Request(RequestKind.WINDOW, (), g[0], only, settings.end_of(g[-1]), self.replace) for g in groups)
