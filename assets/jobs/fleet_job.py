"""The job of a run over many feeds: one step that lands and commits them side by side, and reports each as it ends.

The run's configuration lists the feeds with their requests, from a tick or from a user. `running.run_feeds` runs them,
as without Dagster; here a feed's run is its two steps, whose events are stored at once. Errors of feeds fail the step
at its end. Feeds that do not begin stay pending.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of configuration themselves, not as text.

import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import dagster as dg
from pydantic import Field

from sluice.assets.instance import internals
from sluice.assets.instance.storage import kept_open
from sluice.assets.runs.run_config import (
    AT_WORK_TAG,
    DONE_TAG,
    ERRORS_TAG,
    FAILED_TAG,
    FLEET_TAG,
    LEFT_TAG,
    MORE_TAG,
    PASSES_TAG,
    PENDING,
    FeedConfig,
    LandConfig,
    asked_of_feed,
    build_tags,
    find_retried,
    fleet_job,
    fleet_pool,
    op_name,
    reset_outcome,
)
from sluice.assets.runs.run_session import RunLedgers, RunSession, as_failure
from sluice.assets.specs.feed_files import FeedFiles, read_feeds
from sluice.assets.steps.commit_step import commit_step
from sluice.assets.steps.land_step import land_step
from sluice.pipelines.errors import NotReached, SluiceError, UsageError, WindowOpen, is_transient
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.pipelines.model.plans import Request
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.operating.feed_status import OpenPorts
from sluice.pipelines.util import logs
from sluice.pipelines.util.units import many
from sluice.running import RunResult, SideBySide, build_unforeseen, log_stages, run_feeds

_ABOUT = (
    "Land the pending offsets of each feed, then commit, in one process with one Spark, several feeds in parallel."
    " A feed that fails stops no other."
)


class FleetConfig(dg.Config):
    feeds: list[FeedConfig] = Field(
        default=[], description="The feeds, in this order. By default: every feed of this schedule."
    )
    window: str = Field(
        default="",
        description="Land this window, such as 2026-11-20T14:00, of each feed without a request of its own.",
    )
    until: str = Field(default="", description="With `window`: land all windows from it up to this one (exclusive).")

    def check(self) -> None:
        """Raise dagster.Failure for an invalid window."""
        try:
            LandConfig(window=self.window, until=self.until).request()
        except UsageError as error:
            raise as_failure(error) from error


class Fleet:
    """The feeds of one run: a step of Dagster's. `results` and `result`, of each feed and of the step itself, are those
    of this process's last run."""

    def __init__(
        self, session: RunSession, schedule: str = SHARED, report_of: Callable[[str], Reporter] | None = None
    ) -> None:
        """`session` is copied for each feed, with a report and a result of its own."""
        self._session, self._schedule, self._report_of = replace(session, alone=False), schedule, report_of
        self.result, self.results = RunResult(), dict[str, RunResult]()

    def run(self, context: dg.OpExecutionContext, config: FleetConfig) -> None:
        """Land and commit the feeds. Raises dagster.Failure with the errors of those that failed, or an interrupt."""
        self.result, self.results = RunResult(), {}
        project, session = self._session.project, replace(self._session, result=self.result)
        reset_outcome(context.instance, context.run)
        with _name_feeds(context.log), session.step(context), kept_open(context.instance, context.run.run_id):
            files, limits = session.files or read_feeds(project, project.environ()), project.fleet()
            configs, feeds, requests = dict[str, LandConfig](), dict[str, Feed](), dict[str, Request]()
            for name in self._list_names(context, config, files):
                try:
                    feed, configs[name] = files.feed(name), LandConfig(**asked_of_feed(context.run, name))
                    requests[name] = configs[name].request(feed.window)
                    feeds[name] = feed
                except SluiceError as error:
                    self.results[name] = RunResult(name, error=error)
                    context.log.error("%s: %s", name, error)
            with session.sharing(feeds.values()) as shared:
                own = replace(shared, files=files, catch_up=limits.catch_up)
                steps = _Steps(context, own, configs, self.results, keep_landed=self._report_of is not None)
                side_by_side = SideBySide(limits, steps.run_feed, steps.note_at_work)
                report_of = self._report_of or (lambda name: _build_reporter(context.log))
                self.results |= run_feeds(feeds, requests, report_of, shared.open_ports, side_by_side=side_by_side)
                _refresh_pages(context.log, feeds.values(), shared.open_ports)
        self._end(context)

    def _list_names(self, context: dg.OpExecutionContext, config: FleetConfig, files: FeedFiles) -> Collection[str]:
        """Returns the feeds of the run. One that repeats another from its failure has those that did not succeed."""
        names = dict.fromkeys(f.feed for f in config.feeds)
        if not names:
            for path, error in files.broken.items():
                context.log.warning("not loaded: %s: %s", path.name, error.message)
            names = dict.fromkeys(n for n, feed in files.feeds.items() if feed.schedule == self._schedule)
        retried = find_retried(context.instance, context.run)
        return [name for name in names if not retried or name in retried]

    def _end(self, context: dg.OpExecutionContext) -> None:
        """Tag the run with the outcome of its feeds. Raises dagster.Failure with the errors of failed ones."""
        results = sorted(self.results.items())
        errors = {name: r.error for name, r in results if r.error and not isinstance(r.error, WindowOpen)}
        not_reached = [name for name, error in errors.items() if isinstance(error, NotReached)]
        failed = {name: error for name, error in errors.items() if name not in not_reached}
        done = len(self.results) - len(errors)
        classes = [f"{name}={type(self.results[name].crash or error).__name__}" for name, error in failed.items()]
        passing = [name for name, error in failed.items() if is_transient(error)]
        names_by_tag = {FAILED_TAG: failed, ERRORS_TAG: classes, PASSES_TAG: passing}
        names_by_tag |= {LEFT_TAG: not_reached, AT_WORK_TAG: ()}
        standing = context.instance.get_run_by_id(context.run.run_id)
        tags = {DONE_TAG: str(done)} | ({MORE_TAG: "1"} if any(r.stopped for r in self.results.values()) else {})
        for tag, names in names_by_tag.items():
            tags |= build_tags(tag, names, standing.tags if standing else {})
        context.instance.add_run_tags(context.run.run_id, tags)
        parts = [f"{many(done, 'feed')} done"]
        if failed:
            parts.append(f"{len(failed)} failed: {', '.join(failed)}")
        if not_reached:
            parts.append(f"{len(not_reached)} left to the next run: {', '.join(not_reached)}")
        if not failed:
            context.log.info("; ".join(parts))
            return
        # Spaces: no feed has such a name.
        counts = {"feeds done": done, "feeds failed": len(failed), "feeds left": len(not_reached)}
        raise dg.Failure(
            f"{'; '.join(parts)}. Re-execute from failure runs these only",
            metadata=counts | {name: f"{type(error).__name__}: {error}"[:500] for name, error in failed.items()},
        )


def _refresh_pages(log: logging.Logger, feeds: Iterable[Feed], open_ports: OpenPorts) -> None:
    """Make the page of all feeds again, in each lake that has one. Errors are only logged."""
    from sluice.pipelines.operating.project_page import refresh

    for feed in {str(feed.lake): feed for feed in feeds}.values():
        try:
            with open_ports(feed) as ports:
                refresh(ports.lake, ports.clock())
        except Exception as error:  # noqa: BLE001 - the rows have landed, and the page is optional
            log.warning("the page of all feeds was not written: %s: %s", type(error).__name__, error)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of the feeds of a run, in threads, within the one step that Dagster sees.

    `configs` and `results`: by feed, those of feeds at work included. `keep_landed`: a caller in this process wants the
    landed batches."""

    context: dg.OpExecutionContext
    session: RunSession
    configs: Mapping[str, LandConfig]
    results: dict[str, RunResult]
    keep_landed: bool

    def run_feed(self, feed: Feed, request: Request, open_ports: OpenPorts, report: Reporter) -> RunResult:
        """Land and commit a feed. Each event is stored before the feed goes on."""
        context, name = self.context, feed.name
        result = self.results[name] = RunResult(name, context.run.run_id)
        own = replace(self.session, open_ports=open_ports, report=report, result=result, ledgers=RunLedgers())
        with logs.log_context(feed=name):
            try:
                landing = own.steps.execute(context, land_step(context, own, name, self.configs[name]))
                for event in chain(landing, commit_step(context, own, name)):
                    context.log_event(event)
            except Exception as error:
                if result.failure is None:
                    raise
                if result.crash is not None:
                    result.error = build_unforeseen(name, result.crash)
                    context.log.error("%s", "".join(traceback.format_exception(error)))
                context.log.error("%s", result.error)
        if not self.keep_landed:
            result.landed = None
        return result

    def note_at_work(self, at_work: Collection[str]) -> None:
        with internals.optional():
            self.context.instance.add_run_tags(self.context.run.run_id, build_tags(AT_WORK_TAG, sorted(at_work), {}))
        for _ in self.context.consume_events():  # they are stored; a step over many feeds would keep them in memory
            pass


def _build_reporter(log: logging.Logger) -> Reporter:
    """Returns the reporter of a feed without a caller: a line for each stage. Where logs are JSON, its session logs."""
    return (lambda progress: None) if logs.as_json() else log_stages(log)


@contextmanager
def _name_feeds(log: logging.Logger) -> Iterator[None]:
    """Begin each line of a feed with its name until the block ends: all feeds share the step and its log."""

    class NameFeed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if feed := logs.get_context().get("feed"):
                record.msg = f"{feed}: {record.msg}"

    handler = NameFeed()
    log.handlers.insert(0, handler)  # before Dagster's
    try:
        yield
    finally:
        log.removeHandler(handler)


def many_job(fleet: Fleet, schedule: str = SHARED) -> dg.JobDefinition:
    """Returns the job over the feeds of a schedule. Within a code location, each of its ops has one definition."""

    @dg.op(
        name=op_name(PENDING, schedule),
        config_schema=FleetConfig.to_config_schema().as_field(),
        out=dg.Out(dg.Nothing),
        pool=fleet_pool(schedule),
        description="Lands and commits the feeds.",
    )
    def pending(context: dg.OpExecutionContext) -> None:
        config = FleetConfig(**context.op_config)
        config.check()
        fleet.run(context, config)

    @dg.job(
        name=fleet_job(schedule),
        description=_ABOUT,
        executor_def=dg.in_process_executor,
        tags={FLEET_TAG: schedule},
    )
    def landed_by_many() -> None:
        pending()

    return landed_by_many
