"""`sluice run`: lands and commits pending offsets of feeds, through Dagster or without, and reports the outcome."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from threading import Lock
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app.feed_choice import All, FeedNames, choose_feeds
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import flag, option
from sluice.cli.daily import run_view
from sluice.cli.daily.run_view import FeedRuns, TimedRun
from sluice.cli.options import window_options
from sluice.cli.options.request_options import WorkOptions
from sluice.cli.shared import run_profile
from sluice.cli.shared.other_batches import MetRecorder
from sluice.cli.terminal.output import heading
from sluice.cli.terminal.process import fast_imports
from sluice.pipelines.errors import SluiceError, UsageError, WindowHeld, WindowOpen, choose_exit_code
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import ENGINE, EngineKind, Progress, Reporter, Scheduler
from sluice.pipelines.util import extras
from sluice.pipelines.util.units import many
from sluice.resources.local import process

if TYPE_CHECKING:
    from sluice.pipelines.batch.result import Skip
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.status.window_state import WindowStanding
    from sluice.running import RunResult

_CATCH_UP = Request(RequestKind.CATCH_UP)
_EXECUTION = "sluice.running"
"""The module that the first run of a process loads."""
_LAST_STAGE = "finish"
"""The stage that a feed's run reports when it has committed."""
_FEEDS_SHOWN = 4
"""Maximum number of feeds that the progress meter names."""

Profile = Annotated[
    bool, typer.Option("--profile", help="Show the time spent: by stage, by activity of tasks, by broker.")
]
SkipTo = Annotated[
    str | None,
    option(
        "--skip-to", "latest|TIME", "Skip pending offsets, to the end or up to an ISO time with zone; needs --reason."
    ),
]
Dagster = Annotated[
    bool | None,
    flag(
        "--dagster/--no-dagster",
        "Run the feed's Dagster job, or run without Dagster.",
        show_default="`scheduler` in fleet.yaml, or with Dagster",
    ),
]
Engine = Annotated[
    EngineKind | None,
    typer.Option(
        "--engine",
        help="Run the tasks of all feeds on Spark, or in processes of this machine.",
        show_default="`engine` of the feed, or in fleet.yaml, or spark",
    ),
]
Reason = Annotated[str | None, option("--reason", "TEXT", "The reason; the ledger keeps it.")]


@dataclass(frozen=True, slots=True)
class SkipOptions:
    """Pending offsets to skip, as typed."""

    skip_to: SkipTo = None
    reason: Reason = None


@dataclass(frozen=True, slots=True)
class HowOptions:
    """How to run, as typed."""

    profile: Profile = False
    dagster: Dagster = None
    engine: Engine = None


def register(app: typer.Typer) -> None:
    command(app)(run)


def run(
    session: Session,
    feeds: FeedNames = None,
    everything: All = False,
    *,
    options: WorkOptions,
    skip: SkipOptions,
    how: HowOptions,
) -> int:
    """Land pending offsets, publish them, and commit.

    Without options it catches up. It runs the feed's Dagster job on the project's instance, so the UI shows it.
    Each window, or group of windows, is a run of its own; a failure does not stop the others.

    Several feeds (--all, a list, or a quoted pattern) land in one process and one Dagster run, a few at a time. A
    failing feed does not stop the others; the exit code is the highest. fleet.yaml limits concurrency (sluice docs
    many-feeds).

    After a crash, the next run finishes the batch: no record is read twice, and no row is visible twice. Windows and
    offsets may lie below the origin. If the feed's limits end a run, the next run continues.

    With --no-dagster, the same run lands and commits without loading Dagster, for cron, systemd timers and other
    schedulers. `scheduler: none` in fleet.yaml makes that the default.

    Spark runs the tasks: a local one, or that of `spark.master`. With --engine processes, processes of this machine do,
    without Java; `engine: processes` in a feed or in fleet.yaml makes that the default.

    $ sluice run orders
    $ sluice run orders --window 2026-11-20T14
    $ sluice run orders --from 2026-11-20 --to 2026-11-21 --windows-per-run 6
    $ sluice run orders --window 2026-11-20T14 --only orders:3
    $ sluice run orders --window 2026-11-20T14 --replace
    $ sluice run orders --offsets orders:0:100-200 --offsets orders:1:0-50
    $ sluice run orders --skip-to 2026-11-20T00:00:00Z --reason "test data"
    $ sluice run orders --profile
    $ sluice run --all
    $ sluice run orders 'clicks_*'
    $ sluice run --all --from 2026-11-20 --to 2026-11-21
    $ sluice run --all --no-dagster
    $ sluice run orders --engine processes
    """
    began = time.monotonic() - _measure_wait()
    if how.engine is not None:
        os.environ[ENGINE] = how.engine  # Dagster's part of this process reads the feeds again
    if how.dagster is None:
        session = replace(session, dagster=session.project.fleet().scheduler is Scheduler.DAGSTER)
    else:
        session = replace(session, dagster=how.dagster)
    names = choose_feeds(session.files, feeds or (), everything=everything)
    if len(names) > 1 and (options.offsets or options.only or skip.skip_to or skip.reason or how.profile):
        raise UsageError(
            "options for a single feed, with several feeds",
            remedy="run one feed, or use only --window, --from, --to and --replace",
        )
    # Options are checked for all feeds before any of them runs.
    of_feeds = _make_requests(session, names, options)
    skipped = _build_skip(options, skip.skip_to, skip.reason)
    # A feed file that cannot be read does not stop the others, but fails the command.
    broken = list(session.files.broken.values()) if everything else []
    view = _RunView(session, of_feeds, in_lines=options.windows.start is not None, profile=how.profile)
    _run_all(session, of_feeds, skipped, view)
    took = time.monotonic() - began
    view.finish(took)
    for error in broken:
        session.terminal.fail(error)
    code = choose_exit_code((*broken, *(e for f in of_feeds for e in f.errors)))
    if how.profile:
        for feed in of_feeds:
            feed.runs = [replace(r, profile=run_profile.build_profile(r.batches)) for r in feed.runs]
    failed, unreached = run_view.list_failed(of_feeds), run_view.list_unreached(of_feeds)
    session.terminal.print_document(
        feeds=of_feeds, failed=failed, left=unreached, broken=broken, took=round(took, 3), exit_code=code
    )
    # After the output: the next local Spark starts faster, and this run has ended for its caller.
    archive_classes()
    return code


def _make_requests(session: Session, names: Sequence[str], options: WorkOptions) -> list[FeedRuns]:
    """Returns each feed with its requests, or with the error of its options. Raises the first if all have one."""
    if len(names) > 1:
        session.project.fleet()  # raise its error once, not for each feed
    feeds = list[FeedRuns]()
    for name in names:
        try:
            requested = options.requests(session, session.feed(name))
            feeds.append(FeedRuns(name, requested.requests, requested.open_windows))
        except SluiceError as error:
            feeds.append(FeedRuns(name, error=error))
    if all(f.error for f in feeds) and feeds[0].error:
        raise feeds[0].error
    return feeds


def _build_skip(options: WorkOptions, to: str | None, reason: str | None) -> Skip | None:
    if to is None:
        if reason is not None:
            raise UsageError("--reason without --skip-to", remedy="add --skip-to, or leave out --reason")
        return None
    if options.offsets or options.windows.any:
        raise UsageError(
            "--skip-to together with windows or offsets",
            remedy="skip first (with --only for some partitions), then land the range",
        )
    from sluice.pipelines.batch.result import Skip

    return Skip.parse(to, reason or "")


def _run_all(session: Session, feeds: Sequence[FeedRuns], skip: Skip | None, view: _RunView) -> None:
    """Run the first request of each feed together, then the second ones.

    A request that the feed's limits cut is run again until it is complete. A wrong request ends its feed's runs.
    """
    by_name = {f.feed: f for f in feeds}
    for number, turn in enumerate(zip_longest(*(f.requests for f in feeds)), 1):
        requests = {f.feed: r for f, r in zip(feeds, turn, strict=True) if r is not None and not f.has_wrong_request}
        while requests:
            for run in execute(session, requests, skip, _measure_wait()):
                by_name[run.feed].runs.append(run)
                view.show(run, number)
            requests = {n: r for n, r in requests.items() if by_name[n].runs[-1].is_cut}


class _RunView:
    """Shows runs as they end. One run is shown in full, several of a feed in a line each, several feeds in a table."""

    def __init__(self, session: Session, feeds: Sequence[FeedRuns], *, in_lines: bool, profile: bool) -> None:
        self._terminal, self._feeds, self._profile = session.terminal, feeds, profile
        self._began, self._one = time.monotonic(), feeds[0] if len(feeds) == 1 else None
        self._in_lines = False
        if self._one:
            limits = session.feed(self._one.feed).limits
            is_cut = (limits.records or limits.bytes) and self._one.requests[0].kind is not RequestKind.CATCH_UP
            self._in_lines = in_lines or len(self._one.requests) > 1 or bool(is_cut)
        if self._one and self._in_lines:
            self._terminal.show(heading(f"Run of {self._one.feed}", many(len(self._one.requests), "request")))

    def show(self, run: TimedRun, number: int) -> None:
        """Show a run for the request with this number (from 1)."""
        if not self._one:
            return
        self._terminal.show(*(run_view.line(run) if self._in_lines else run_view.view(run)))
        if self._profile:
            self._terminal.show(*run_profile.view(run.batches, run.seconds))
        if self._in_lines:
            took = time.monotonic() - self._began
            self._terminal.show(*run_view.remaining(run, number, len(self._one.requests), took))
        if run.result.error and not run.is_cut:
            self._terminal.fail(run.result.error)

    def finish(self, took: float) -> None:
        if not self._one:
            self._terminal.show(*run_view.feeds_view(self._feeds, took))
        elif self._in_lines:
            self._terminal.show(run_view.totals(self._one))
        for feed in self._feeds:
            where = "" if self._one else f"{feed.feed}: "
            self._terminal.show(*window_options.open_window_lines(feed.feed, feed.open_windows, where=where))
        for error in () if self._one else run_view.errors_with_feeds(self._feeds):
            self._terminal.fail(error)


def archive_classes() -> None:
    """Archive the classes of Spark's JVM in the background if this process started one without an archive."""
    if "sluice.resources.spark.engine" in sys.modules:
        from sluice.resources.spark import engine, jvm

        if engine.has_slow_start():
            jvm.prepare_in_background()


def _measure_wait() -> float:
    """Returns the seconds that the command's first run has waited for; 0 for later runs."""
    return 0.0 if _EXECUTION in sys.modules else process.age() or 0.0


def execute(
    session: Session, requests: Mapping[str, Request], skip: Skip | None = None, waited: float = 0.0
) -> list[TimedRun]:
    """Run one request of each feed together, through Dagster or without, with a progress meter.

    `waited` are the seconds that the run has waited for. Raises as `run_feeds`.
    """
    feeds, began = [session.feed(name) for name in requests], time.monotonic()
    _check_packages(session, feeds[0])
    first = "wait" if len(feeds) > 1 else "start Dagster" if session.dagster else "connect"
    opening = session.share_ports(feeds) if len(feeds) > 1 else nullcontext(session.open_ports)
    catching_up = skip is None and all(r == _CATCH_UP for r in requests.values())
    with opening as open_ports:
        session.begin_engine(feeds[0], feeds if catching_up else (), open_ports)  # before a first thread
        with session.terminal.progress() as meter:
            also = " and start Spark" if feeds[0].engine is EngineKind.SPARK else ""
            meter(Progress(f"{'start Dagster' if session.dagster else 'connect to Kafka'}{also}"))
            progress = _FeedsProgress(meter, len(feeds))
            reports = {f.name: meter if len(feeds) == 1 else progress.report_of(f.name) for f in feeds}
            recorders = {n: _RunRecorder(r, {"start": waited}, first, began) for n, r in reports.items()}
            run_feeds = _load_engine(session, feeds)
            results = run_feeds(requests, recorders.__getitem__, open_ports, skip)
    runs = [
        TimedRun(f.name, requests[f.name], results[f.name], r.stop(), f.contract, r.met, skip=skip)
        for f, r in ((f, recorders[f.name]) for f in feeds)
    ]
    if len(runs) > 1:
        return runs
    return [replace(runs[0], window=_find_window(session, feeds[0], runs[0]))]


def _load_engine(session: Session, feeds: Sequence[Feed]) -> Callable[..., Mapping[str, RunResult]]:
    with fast_imports():
        if session.dagster:
            from sluice.assets import execution

            return partial(execution.run_feeds, session.project)
        from sluice import running

        side_by_side = running.SideBySide(session.project.fleet()) if len(feeds) > 1 else None
        return partial(running.run_feeds, {f.name: f for f in feeds}, side_by_side=side_by_side)


def _find_window(session: Session, feed: Feed, run: TimedRun) -> WindowStanding | None:
    """Returns the state of the requested window; None for other requests, and without such a window."""
    from sluice.pipelines.operating.feed_status import read_standing

    has_no_window = isinstance(run.result.error, UsageError | WindowOpen)
    if run.request.window is None or run.request.until is not None or has_no_window:
        return None
    refusals = run.result.landed.refusals if run.result.landed else ()
    held_at = {r.tp: r.error.start for r in refusals if isinstance(r.error, WindowHeld)}
    with session.open_ports(feed) as ports:
        return read_standing(feed, ports, run.request.window, held_at)


def _check_packages(session: Session, feed: Feed) -> None:
    """Raises SetupError if this environment lacks a package of the run or its engine."""
    from sluice.resources.spark import executors

    extras.require("kafka", *(["dagster"] if session.dagster else []))
    if feed.engine is EngineKind.SPARK:
        executors.check_installed(feed.spark)


class _RunRecorder(MetRecorder):
    """Passes a run's progress on, and records its stages and its reports on batches of other runs.

    `before` are the seconds of earlier stages; the stage `first` began at `since`, of the monotonic clock.
    """

    def __init__(self, report: Reporter, before: Mapping[str, float], first: str, since: float) -> None:
        super().__init__(report)
        self._stage, self._since = first, since
        self._seconds = {stage: s for stage, s in before.items() if s}

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._close(progress.stage)
        super().__call__(progress)

    def stop(self) -> Mapping[str, float]:
        """End the last stage. Returns seconds by stage."""
        self._close("")
        return self._seconds

    def _close(self, following: str) -> None:
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = following, now


class _FeedsProgress:
    """The progress of several feeds as one: the number of finished feeds, and the names of those at work."""

    def __init__(self, report: Reporter, feeds: int) -> None:
        self._report, self._total, self._lock = report, feeds, Lock()
        self._stages: dict[str, str] = {}

    def report_of(self, feed: str) -> Reporter:
        """Returns the reporter of one feed. Feeds report from threads of their own."""

        def report(progress: Progress) -> None:
            with self._lock:
                self._stages.pop(feed, None)
                self._stages[feed] = progress.stage  # the newest report stands last
                done = sum(stage == _LAST_STAGE for stage in self._stages.values())
                at_work = [name for name, stage in self._stages.items() if stage != _LAST_STAGE]
                self._report(Progress("feeds", done, self._total, ", ".join(at_work[-_FEEDS_SHOWN:]), progress.met))

        return report
