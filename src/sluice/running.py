"""Runs feeds: plans, lands, proves, publishes and commits. Knows no orchestrator.

    results = run({"orders": Request(RequestKind.CATCH_UP)}, project, on_progress)

`FeedRun` has landing and committing as separate steps, so that an orchestrator can store its record of the landed rows
in between. Guarantee: offsets are committed only after the rows below them are published.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from sluice.pipelines.batch.land import LandingOptions, land
from sluice.pipelines.batch.result import BatchResult, Landed, Skip
from sluice.pipelines.batch.survey import find_changed_partitions, open_ledger
from sluice.pipelines.committing.commit import CommitResult, CommitSettings, CommitStatus, commit
from sluice.pipelines.errors import (
    BatchRefused,
    Failed,
    NotReached,
    SluiceError,
    UsageError,
    WindowIncomplete,
    WindowOpen,
)
from sluice.pipelines.feed.feed import Feed, group_feeds
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Progress, Reporter, Scheduler, find_scheduler
from sluice.pipelines.planning.origins import advise_absent
from sluice.pipelines.planning.windows import OpenWindows, complete_of, describe_unpinned, split_settled, windows_of
from sluice.pipelines.ports import Ports
from sluice.pipelines.util import logs
from sluice.pipelines.util.units import show_duration
from sluice.resources.liveness import new_owner
from sluice.resources.observe import lineage, tracing
from sluice.resources.project import Project
from sluice.resources.spark import executors

if TYPE_CHECKING:
    from sluice.pipelines.feed.project_files import FleetSettings
    from sluice.pipelines.operating.feed_status import OpenPorts
    from sluice.reading import When

log = logging.getLogger(logs.OURS)

OnProgress = Callable[[str, Progress], None]
"""Called with the feed and its progress."""
Feeds = str | Iterable[str] | Mapping[str, Request]


@dataclass(frozen=True)
class RunOptions:
    """Options of the run of one feed. `run_id` names it in the ledger (default: a new id of `Scheduler.NONE`)."""

    skip: Skip | None = None
    run_id: str = ""
    commit: bool = True
    """False: the rows are published, and `commit_feed` commits them."""


@dataclass
class RunResult:
    """The result of a run of one feed. After an error, `landed` and `committed` are the results before it.

    `error.remedy` is the next thing to do. `uncommitted` is the reason why landed rows are not committed, if `error` is
    another one; `table` the reason why the feed's table is not up to date, which fails no run. `open_windows` are
    requested windows whose grace period has not ended. `stopped`: the rest is left to another run.
    """

    feed: str = ""
    run_id: str = ""
    landed: Landed | None = None
    committed: CommitResult | None = None
    error: SluiceError | None = None
    uncommitted: SluiceError | None = None
    table: SluiceError | None = None
    open_windows: OpenWindows | None = None
    crash: Exception | None = None
    """An error that is not one of Sluice's."""
    interrupted: bool = False
    stopped: bool = False

    @property
    def batches(self) -> tuple[BatchResult, ...]:
        return self.landed.batches if self.landed else ()

    @property
    def failure(self) -> Exception | None:
        """The error that ended the run, of any kind."""
        return self.error or self.crash

    def can_commit_after(self, error: SluiceError) -> bool:
        """Returns whether rows can be committed although landing ended with this error.

        False if landing failed before it reached anything: the same error would keep the commit from succeeding.
        """
        return self.landed is not None or isinstance(error, BatchRefused)

    @property
    def exit_code(self) -> int:
        return self.error.exit_code if self.error else 0

    def add_table_error(self, error: SluiceError) -> None:
        """Add the reason why a table is not up to date: outputs may have one each."""
        if self.table is None:
            self.table = error
        else:
            self.table.message += f"; {error.message}"
            self.table.remedy += f"; {error.remedy}" if error.remedy != self.table.remedy else ""


@dataclass(frozen=True)
class FeedRun:
    """The landing step and the committing step of a run of one feed. `result` keeps their results."""

    feed: Feed
    ports: Ports
    ledger: Ledger
    run_id: str
    report: Reporter
    result: RunResult

    def land(self, request: Request, skip: Skip | None = None, enough: Callable[[], bool] = lambda: False) -> Landed:
        """Land and publish the pending part of a request. An interrupt cancels the engine's work.

        Raises as `land` of the batch; failures of offset ranges are returned, not raised: see `check`.
        """
        feed, ports, result = self.feed, self.ports, self.result
        with _cancel_on_interrupt(ports):
            executors.prepare(feed, self.report)
            owner = new_owner(self.run_id)
            landed = land(feed, ports, request, owner, self.report, LandingOptions(self.ledger, skip, enough))
        result.landed, result.stopped, result.open_windows = landed, landed.stopped, landed.open_windows
        return landed

    def find_incomplete(self, windows: Sequence[int]) -> list[int]:
        """The windows among these (starts, ms) that are not complete."""
        complete = complete_of(self.ledger.read(), windows, self.feed.window)
        return [w for w in windows if w not in complete]

    def check(self, windows: Sequence[int]) -> None:
        """Raise the error of missing offset ranges, or WindowIncomplete.

        The latter if the feed's limits ended the run before a window, or if Kafka no longer has one of its partitions.
        """
        if self.result.landed:
            self.result.landed.check()
        if missing := self.find_incomplete(windows):
            window = self.feed.window.name(missing[0])
            if unpinned := describe_unpinned(self.ledger.read(), missing[0], self.feed.window):
                raise WindowIncomplete(unpinned, remedy=advise_absent(self.feed.name))
            raise WindowIncomplete(
                f"window {window} landed in part: the feed's limits end a run before",
                remedy=f"run it again: sluice run {self.feed.name} --window {window}; or raise `limits`",
            )

    def commit(self, changed: Collection[TopicPartition] = ()) -> CommitResult:
        """Commit the frontier, without partitions whose log has `changed`. Raises as `commit` of committing."""
        feed, result = self.feed, self.result
        settings = CommitSettings(feed.commit, feed.transactional_id, feed.policies.on_group_moved)
        outlet = None
        if feed.dead_letters:
            from sluice.pipelines.quarantine.dead_letters import Outlet  # late: it needs Arrow

            outlet = Outlet.of(feed, self.ports.lake)
        answer = commit(self.ledger, self.ports.group, settings, outlet, self.ports.cluster, changed)
        if answer.status is CommitStatus.UNCHANGED and result.committed is not None:
            answer = result.committed  # an earlier step of this run has committed
        result.committed = answer
        return answer

    def find_changed(self) -> frozenset[TopicPartition]:
        """The partitions whose log in Kafka is no longer the one that the ledger knows."""
        return find_changed_partitions(self.feed, self.ports, self.ledger.read())


def find_open_error(feed: Feed, ports: Ports, request: Request) -> WindowOpen | None:
    """Returns the error of a request whose windows are all open; nothing of it can land yet."""
    try:
        split_settled(request, feed.window, ports.clock())
    except WindowOpen as open_windows:
        return open_windows
    except UsageError:
        pass  # landing raises it
    return None


def list_requested(feed: Feed, request: Request) -> Sequence[int]:
    """The whole windows (their starts, ms) that a request names."""
    if request.window is None or request.only:
        return ()
    return windows_of(request, feed.window)


def list_settled(feed: Feed, request: Request, landed: Landed) -> Sequence[int]:
    """The windows of a request without the open ones."""
    windows, first = list_requested(feed, request), landed.open_windows.first if landed.open_windows else None
    return windows if first is None else [w for w in windows if w < first]


def run(requests: Mapping[str, Request], project: Project, on_progress: OnProgress) -> dict[str, RunResult]:
    """Run feeds one after the other. Returns the result of each, in order; one feed's error stops no other.

    Raises FeedError before anything runs, KeyboardInterrupt, and for one feed errors that are not Sluice's.
    """
    from sluice.resources.open_ports import share_ports

    feeds = {name: project.feed(name) for name in requests}
    with share_ports(feeds.values()) as open_ports:
        return run_feeds(feeds, requests, lambda name: partial(on_progress, name), open_ports)


@dataclass(frozen=True)
class SideBySide:
    """How several feeds run at once. `run_one` runs a feed, whose error is in its result (default: `run_feed`).
    `on_change` is called with the feeds at work whenever one begins or ends."""

    limits: FleetSettings
    run_one: Callable[[Feed, Request, OpenPorts, Reporter], RunResult] | None = None
    on_change: Callable[[Collection[str]], None] = lambda at_work: None


def run_feeds(
    feeds: Mapping[str, Feed],
    requests: Mapping[str, Request],
    report_of: Callable[[str], Reporter],
    open_ports: OpenPorts,
    skip: Skip | None = None,
    side_by_side: SideBySide | None = None,
) -> dict[str, RunResult]:
    """As `run`, with open ports. `skip` needs a single feed. With `side_by_side`, feeds run at once and all errors are
    in results. Feeds with another Spark come after the others: a process has one.
    """
    results, began = dict[str, RunResult](), time.monotonic()
    for group in group_feeds((feeds[name] for name in requests), lambda feed: feed.spark):
        names = [feed.name for feed in group]
        if results:
            from sluice.resources.spark import engine

            engine.end()
        if side_by_side:
            crew = _Crew(feeds, requests, report_of, open_ports, side_by_side)
            results |= crew.run(names, began + side_by_side.limits.deadline / 1000)
            continue
        for name in names:
            try:
                results[name] = run_feed(feeds[name], requests[name], open_ports, report_of(name), RunOptions(skip))
            except Exception as error:
                if len(requests) == 1:
                    raise
                results[name] = RunResult(name, error=build_unforeseen(name, error))
    return {name: results[name] for name in requests}


FINISH = "finish"
"""The last stage of a feed's run."""
_WAIT_SECONDS = 0.25
STOP_SECONDS = 15.0
"""How long a feed may take to stop when it is asked to."""
NOT_REACHED = "it stays pending: run it again; `deadline` and others in fleet.yaml limit a run"


@dataclass
class _Member:
    """A feed at work in a thread, since when (seconds), and since when it is overdue.

    Once asked to stop, it ends with the error `why`: at its next stage, or at once where it waits for the engine."""

    since: float = field(default_factory=time.monotonic)
    overdue_since: float | None = None
    why: BaseException | None = None
    cancels: list[Callable[[], None]] = field(default_factory=list)

    def stop(self, why: BaseException) -> None:
        """Ask the feed to stop, from another thread; the first error holds."""
        self.why = self.why or why
        for cancel in [*self.cancels]:
            cancel()

    def check(self) -> None:
        if self.why is not None:
            raise self.why

    @contextmanager
    def cancel_on_stop(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Call `cancel` if the feed is asked to stop while the block runs."""
        self.cancels.append(cancel)  # before the check: `stop` sets the error before it reads this list
        try:
            self.check()
            yield
        finally:
            self.cancels.remove(cancel)


@dataclass
class _Crew:
    """Runs feeds side by side, in a daemon thread each: one that hangs delays neither the others nor the exit."""

    feeds: Mapping[str, Feed]
    requests: Mapping[str, Request]
    report_of: Callable[[str], Reporter]
    open_ports: OpenPorts
    how: SideBySide
    running: dict[str, _Member] = field(default_factory=dict)
    ended: SimpleQueue[tuple[_Member, RunResult]] = field(default_factory=SimpleQueue)
    given_up: int = 0

    def run(self, names: Sequence[str], deadline: float) -> dict[str, RunResult]:
        """Returns the result of each feed. Feeds that have not begun at `deadline` (seconds) are left out, and all once
        as many were given up as may be at work."""
        results, waiting = dict[str, RunResult](), [*names]
        at_work = frozenset[str]()
        try:
            while waiting or self.running:
                if time.monotonic() > deadline or self.given_up >= self.how.limits.feeds_at_once:
                    error = NotReached("not reached in this run", remedy=NOT_REACHED)
                    results |= {name: RunResult(name, error=error) for name in waiting}
                    waiting = []
                for name in [n for n in waiting if self._has_room(n)]:
                    if self._has_room(name):
                        waiting.remove(name)
                        member = self.running[name] = _Member()
                        share = min(self.how.limits.feeds_at_once, len(names))
                        body = partial(contextvars.copy_context().run, self._run_member, name, member, share)
                        threading.Thread(target=body, name=f"sluice-{name}", daemon=True).start()
                if self.running.keys() != at_work:
                    at_work = frozenset(self.running)
                    self.how.on_change(at_work)
                results |= self._collect()
                results |= self._stop_overdue()
        except BaseException as error:  # a scheduler's interrupt is none of Python's; shared ports outlast no feed
            self._stop_all(error)
            raise
        return results

    def _has_room(self, name: str) -> bool:
        kafka = self.feeds[name].kafka.bootstrap
        with_it = sum(self.feeds[other].kafka.bootstrap == kafka for other in self.running)
        return len(self.running) < self.how.limits.feeds_at_once and with_it < self.how.limits.per_kafka

    def _run_member(self, name: str, member: _Member, share: int) -> None:
        @contextmanager
        def open_share(feed: Feed) -> Iterator[Ports]:
            with self.open_ports(feed) as ports, member.cancel_on_stop(ports.engine.cancel):
                yield replace(ports, parallelism=max(1, ports.parallelism // share))

        try:
            report = self.report_of(name)

            def pass_on(progress: Progress) -> None:
                if progress.stage != FINISH:  # the result is there
                    member.check()
                report(progress)

            run_one = self.how.run_one or run_feed
            result = run_one(self.feeds[name], self.requests[name], open_share, pass_on)
        except BaseException as error:  # noqa: BLE001 - one feed's error stops no other
            crash = error if isinstance(error, Exception) else None
            result = RunResult(name, error=build_unforeseen(name, error), crash=crash)
        if member.overdue_since is not None and result.error:
            result.error, result.crash = self._build_timeout(name), None
        self.ended.put((member, result))

    def _collect(self) -> dict[str, RunResult]:
        """Returns the result of the next feed that ends within a moment, if it was not given up."""
        with suppress(Empty):
            member, result = self.ended.get(timeout=_WAIT_SECONDS)
            if self.running.get(result.feed) is member:
                del self.running[result.feed]
                return {result.feed: result}
        return {}

    def _stop_overdue(self) -> dict[str, RunResult]:
        """Ask feeds to stop after `feed_time`. Returns those that do not stop, as failed."""
        now, given_up = time.monotonic(), dict[str, RunResult]()
        for name, member in [*self.running.items()]:
            if member.overdue_since is None and now - member.since > self.how.limits.feed_time / 1000:
                member.overdue_since = now
                member.stop(self._build_timeout(name))
            if member.overdue_since is not None and now - member.overdue_since > STOP_SECONDS:
                del self.running[name]
                given_up[name] = RunResult(name, error=self._build_timeout(name))
        self.given_up += len(given_up)
        return given_up

    def _stop_all(self, interrupt: BaseException) -> None:
        until = time.monotonic() + STOP_SECONDS
        for member in self.running.values():
            member.stop(interrupt)
        while self.running and time.monotonic() < until:
            self._collect()

    def _build_timeout(self, name: str) -> Failed:
        after = f"after {show_duration(self.how.limits.feed_time)}, the `feed_time` of a run over many feeds"
        how = "the next run goes on and adopts the finished offset ranges. A run of one feed has no limit: sluice run"
        return Failed(f"{name} was ended {after}", remedy=f"{how} {name}")


def build_unforeseen(feed: str, error: BaseException) -> Failed:
    """Returns the result of one of several feeds for an error that is not one of Sluice's."""
    return Failed(
        f"unforeseen {type(error).__name__}: {error}",
        remedy=f"run it by itself, with the traceback: sluice run {feed} --debug",
    )


def run_feed(
    feed: Feed,
    request: Request,
    open_ports: OpenPorts,
    report: Reporter,
    options: RunOptions = RunOptions(),
) -> RunResult:
    """Land, commit and bring up the table of one feed. Its error is in the result."""
    result = RunResult(feed.name, options.run_id or f"{Scheduler.NONE}:{uuid.uuid4()}")
    about = {"run": result.run_id, "feed": feed.name}
    try:
        with logs.log_context(**about), tracing.step("run", **about), open_ports(feed) as ports:
            if open_windows := find_open_error(feed, ports, request):
                result.open_windows = OpenWindows.of_request(request, feed.window)
                raise open_windows
            ledger = open_ledger(feed, ports, result.run_id)
            of_feed = FeedRun(feed, ports, ledger, result.run_id, observe(report), result)
            with _report_lineage(of_feed, request):
                _land_and_commit(of_feed, request, options)
            if options.commit:
                _sync_table(of_feed)
    except SluiceError as error:
        result.error = error
    report(Progress(FINISH))
    return result


def observe(report: Reporter | None, log: logging.Logger = log) -> Reporter:
    """Returns a reporter that passes progress on, and to the step's trace. `log`: if it is JSON, and without another
    reporter, it gets a line for each stage."""
    reports, step, about = [report] if report else [], tracing.current_step(), logs.get_context()
    if step:
        reports.append(step.progress)
    if report is None or logs.as_json():
        reports.append(log_stages(log))

    def report_to_all(progress: Progress) -> None:
        with logs.log_context(**about):  # batches report from threads of their own
            for reporter in reports:
                reporter(progress)

    return report_to_all


def log_stages(log: logging.Logger) -> Reporter:
    """Returns a reporter that logs a line for each stage, and for each batch of another run."""
    last = ""

    def report(progress: Progress) -> None:
        nonlocal last
        if met := progress.met:
            log.info("%s: %s%s", met.fate, met, f"; {met.why}" if met.why else "")
        elif progress.stage != last:
            last = progress.stage
            log.info(f"{progress.stage} {progress.note}".strip())

    return report


def _report_lineage(of_feed: FeedRun, request: Request) -> AbstractContextManager[None]:
    """Report the rows that the block lands to OpenLineage, if configured. Airflow reports those of its runs."""
    run, feed = of_feed.run_id, of_feed.feed
    if find_scheduler(run) is Scheduler.AIRFLOW or not lineage.is_configured(os.environ):
        return nullcontext()
    windows = list_requested(feed, request)
    window = (windows[0], feed.window.end_of(windows[-1])) if windows else None
    landing = lineage.Landing(feed, run.rpartition(":")[2], window)
    return lineage.report_landing(landing, lambda: of_feed.result.landed)


def _land_and_commit(of_feed: FeedRun, request: Request, options: RunOptions) -> None:
    report, result = of_feed.report, of_feed.result
    try:
        landed = of_feed.land(request, options.skip)
        of_feed.check(list_settled(of_feed.feed, request, landed))
    except SluiceError as error:
        if options.commit and result.can_commit_after(error):
            try:
                report(Progress("commit"))
                of_feed.commit(of_feed.find_changed())
            except SluiceError as reason:
                result.uncommitted = reason
        raise
    if options.commit:
        report(Progress("commit"))
        of_feed.commit()


def commit_feed(feed: Feed, open_ports: OpenPorts, report: Reporter, run_id: str) -> CommitResult:
    """Commit the frontier of one feed, and bring up its table. Raises as `commit` of committing."""
    result = RunResult(feed.name, run_id)
    with open_ports(feed) as ports:
        of_feed = FeedRun(feed, ports, open_ledger(feed, ports, run_id), run_id, report, result)
        report(Progress("commit"))
        committed = of_feed.commit(of_feed.find_changed())
        _sync_table(of_feed)
    if result.table:
        raise result.table
    return committed


def _sync_table(of_feed: FeedRun) -> None:
    """Bring the tables of the feed, or of its outputs, up to the ledger, if it has any."""
    if not of_feed.feed.table_feeds:
        return  # the import takes pyarrow
    from sluice.pipelines.tables.sync import sync
    from sluice.resources.open_ports import open_tables

    ports, report = of_feed.ports, of_feed.report
    for dataset in of_feed.feed.table_feeds:
        report(Progress("table"))
        try:
            with open_tables(dataset, ports.lake) as tables:
                before = ports.clock() - dataset.table.keep_snapshots if dataset.table else None
                sync(of_feed.ledger, ports.lake, tables, report, expire_before=before)
        except SluiceError as error:
            of_feed.result.add_table_error(error)


@contextmanager
def _cancel_on_interrupt(ports: Ports) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            ports.engine.cancel()
        raise


def make_requests(feeds: Feeds, windows: When | None, to: When | None, project: Project) -> Mapping[str, Request]:
    """The request of each feed. Raises FeedError, UsageError."""
    if isinstance(feeds, Mapping):
        if windows is not None or to is not None:
            raise UsageError("requests together with windows", remedy="give one of them")
        if name := next((n for n, request in feeds.items() if not isinstance(request, Request)), None):
            raise UsageError(
                f"{feeds[name]!r} of {name} is no request", remedy='windows are named so: sluice.run("orders", WINDOW)'
            )
        return feeds
    if windows is None and to is not None:
        raise UsageError("`to` without `windows`", remedy="name the first window, too")
    names = [feeds] if isinstance(feeds, str) else list(feeds)
    if windows is None:
        return dict.fromkeys(names, Request(RequestKind.CATCH_UP))
    from sluice.reading import list_windows

    settings = {name: project.feed(name).window for name in names}
    return {name: request_windows(list_windows(s, windows, to), s) for name, s in settings.items()}


def request_windows(windows: Sequence[int], settings: WindowSettings, *, replace: bool = False) -> Request:
    """Returns the request for windows (their starts, ms) in a row."""
    until = settings.end_of(windows[-1]) if len(windows) > 1 else None
    return Request(RequestKind.WINDOW, window=windows[0], until=until, replace=replace)


def find_project(project: str | os.PathLike[str] | None) -> Project:
    return Project.find(Path(project) if project else None)
