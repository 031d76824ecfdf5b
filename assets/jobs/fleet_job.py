"""The job of a run over many feeds, with steps that are found when it runs, and the outcome of each feed.

    pending_feeds ─┬─► land_pending[orders] ──► commit_pending[orders]
                └─► land_pending[clicks] ──► commit_pending[clicks]

The run's configuration lists the feeds with their requests, from a tick or from a user. Each feed has a session of its
own, with its error, stop signal and results. Feeds that do not begin are skipped and reported; they stay pending.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of configuration themselves, not as text.

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from sluice.assets.instance.instance import holding, home_of
from sluice.assets.instance.storage import kept_open
from sluice.assets.jobs import thread_executor
from sluice.assets.jobs.thread_executor import RunningFeed
from sluice.assets.runs.run_config import (
    COMMIT,
    DONE_TAG,
    ERRORS_TAG,
    FAILED_TAG,
    FLEET_TAG,
    LAND,
    LEFT_TAG,
    MORE_TAG,
    PASSES_TAG,
    PENDING,
    LandConfig,
    asked_of_feed,
    build_tags,
    feed_at_work,
    fleet_job,
    fleet_pool,
    op_name,
)
from sluice.assets.runs.run_session import OpenPorts, RunSession, as_failure
from sluice.assets.specs.feed_files import FeedFiles, read_feeds
from sluice.assets.steps.commit_step import commit_step
from sluice.assets.steps.land_step import land_step
from sluice.pipelines.errors import NotReached, UsageError, is_transient
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.pipelines.feed.project_files import FleetSettings
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.ports import Ports
from sluice.pipelines.util.units import many
from sluice.running import NOT_REACHED, RunResult

_ABOUT = (
    "Land the pending offsets of each feed, then commit, in one process with one Spark, several feeds in parallel."
    " A feed that fails stops no other."
)


class FeedConfig(LandConfig):
    """One feed with its request."""

    feed: str


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
    """The feeds of one run: `thread_executor.Work`."""

    def __init__(
        self, session: RunSession, schedule: str = SHARED, report_of: Callable[[str], Reporter] | None = None
    ) -> None:
        """`session` is copied for each feed, with a report, a result and a stop signal of its own."""
        self._plain, self._schedule, self._report_of = session, schedule, report_of
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._sessions: dict[str, RunSession] = {}
        self._shared = self._plain
        self._files, self._limits = self._plain.files, FleetSettings()
        self._failed: set[str] = set()
        self._left: list[str] = []

    @property
    def limits(self) -> FleetSettings:
        return self._limits

    @property
    def files(self) -> FeedFiles:
        """The feed files, read once for the run."""
        with self._lock:
            if self._files is None:
                self._files = read_feeds(self._plain.project, self._plain.project.environ())
            return self._files

    @contextmanager
    def attend(self, instance: dg.DagsterInstance, run: str) -> Iterator[None]:
        """Prepare a run, and drop the results of an earlier one of this process.

        Raises FeedError for an invalid `fleet.yaml`.
        """
        self._reset()
        self._limits = self._plain.project.fleet()
        with (
            holding(home_of(self._plain.project, instance), run),
            kept_open(instance, run),
            self._plain.sharing(self.files.feeds.values()) as self._shared,
        ):
            yield

    def session(self, feed: str) -> RunSession:
        files = self.files
        with self._lock:
            if feed not in self._sessions:
                report = self._report_of(feed) if self._report_of else self._plain.report
                feeds_at_once = min(self._limits.feeds_at_once, len(files.feeds))
                ports = _divide_parallelism(self._shared.open_ports, feeds_at_once)
                own = replace(self._shared.apart(), open_ports=ports, report=report, files=files, alone=False)
                self._sessions[feed] = replace(own, catch_up=self._limits.catch_up)
            return self._sessions[feed]

    def lane(self, step: str) -> RunningFeed | None:
        op, feed = step.partition("[")[0], feed_at_work(step)
        if not feed:
            return None
        definition = self.files.feeds.get(feed)
        kafka = definition.kafka.bootstrap if definition else ""
        return RunningFeed(feed, kafka, self.session(feed).stop, op == op_name(LAND, self._schedule))

    def leave(self, feed: str) -> None:
        self._left.append(feed)

    def fail(self, feed: str) -> None:
        self._failed.add(feed)
        self.session(feed).ledgers.forget()

    def done(self, feed: str) -> None:
        """Record that the feed has landed and committed; results are kept only for a caller in this process."""
        self.session(feed).ledgers.forget()
        if self._report_of is None:
            self.result(feed).landed = None

    @property
    def failed_feeds(self) -> Collection[str]:
        """The feeds that failed."""
        return self._failed

    def error(self, feed: str) -> BaseException | None:
        """Returns the error of a failed feed, or the reason why it was left out."""
        if feed in self._left:
            return NotReached("not reached in this run", remedy=NOT_REACHED)
        return self.result(feed).failure or (self.session(feed).stop.why if feed in self._failed else None)

    @property
    def left(self) -> Sequence[str]:
        """The feeds that did not begin."""
        return self._left

    def result(self, feed: str) -> RunResult:
        return self.session(feed).result

    def choose(self, config: FleetConfig, log: Callable[[str], object]) -> Iterator[str]:
        """Yields the feeds to land, once each. Feeds with another Spark are left out: a process has one."""
        feeds = self.files.feeds
        names = dict.fromkeys(f.feed for f in config.feeds) or self._list_feeds(log)
        spark = next((feeds[n].spark for n in names if n in feeds), None)
        for name in names:
            if name in feeds and feeds[name].spark != spark:
                log(f"{name} has other `spark` settings than earlier feeds and needs a run of its own")
                self.leave(name)
            else:
                yield name

    def _list_feeds(self, log: Callable[[str], object]) -> Collection[str]:
        for path, error in self.files.broken.items():
            log(f"not loaded: {path.name}: {error.message}")
        return [n for n, feed in self.files.feeds.items() if feed.schedule == self._schedule]

    def summary(self, instance: dg.DagsterInstance, run: str) -> tuple[str, Mapping[str, Any]]:
        failed = sorted(self._failed)
        errors = {n: self.error(n) for n in failed}
        passing = [n for n, error in errors.items() if is_transient(error)]
        classes = [f"{n}={type(error).__name__}" for n, error in errors.items() if error]
        names_by_tag = {FAILED_TAG: failed, ERRORS_TAG: classes, PASSES_TAG: passing, LEFT_TAG: self._left}
        done = len(self._sessions.keys() - self._failed - {*self._left})
        more = {MORE_TAG: "1"} if any(s.result.stopped for s in self._sessions.values()) else {}
        standing = instance.get_run_by_id(run)
        inherited = standing.tags if standing else {}  # of the run that this one executes again
        tags = {DONE_TAG: str(done)} | more
        for tag, names in names_by_tag.items():
            tags |= build_tags(tag, names, inherited)
        instance.add_run_tags(run, tags)
        parts = [f"{many(done, 'feed')} done"]
        if failed:
            parts.append(f"{len(failed)} failed: {', '.join(failed)}")
        if self._left:
            parts.append(f"{len(self._left)} left to the next run: {', '.join(self._left)}")
        # Spaces: no feed has such a name.
        metadata = {"feeds done": done, "feeds failed": len(failed), "feeds left": len(self._left)}
        return "; ".join(parts), metadata | {n: f"{type(e).__name__}: {e}"[:500] for n, e in errors.items() if e}


def _divide_parallelism(open_ports: OpenPorts, feeds_at_once: int) -> OpenPorts:
    """Returns the ports of one of several feeds in parallel, with its share of the engine's parallelism."""

    @contextmanager
    def open_share(feed: Feed) -> Iterator[Ports]:
        with open_ports(feed) as ports:
            yield replace(ports, parallelism=max(1, ports.parallelism // feeds_at_once))

    return open_share


def many_job(fleet: Fleet, schedule: str = SHARED) -> dg.JobDefinition:
    """Returns the job over the feeds of a schedule. Within a code location, each of its ops has one definition."""
    pending_op, op = op_name(PENDING, schedule), partial(op_name, schedule=schedule)

    # Each feed is an output of this op, so that Dagster shows its steps and reruns them alone.
    @dg.op(
        name=pending_op,
        config_schema=FleetConfig.to_config_schema().as_field(),
        out=dg.DynamicOut(dg.Nothing),
        pool=fleet_pool(schedule),
        description="Finds the feeds.",
    )
    def pending(context: dg.OpExecutionContext) -> Iterator[Any]:
        config = FleetConfig(**context.op_config)
        config.check()
        for name in fleet.choose(config, context.log.warning):
            yield dg.DynamicOutput(None, mapping_key=name)

    @dg.op(name=op(LAND), ins={"pending": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing), description="Lands one feed.")
    def land(context: dg.OpExecutionContext) -> Iterator[Any]:
        name = context.get_mapping_key() or ""
        config = LandConfig(**asked_of_feed(context.run, name))
        session = fleet.session(name)
        yield from session.steps.execute(context, land_step(context, session, name, config))

    @dg.op(name=op(COMMIT), ins={"landed": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing), description="Commits it.")
    def commit(context: dg.OpExecutionContext) -> Iterator[Any]:
        name = context.get_mapping_key() or ""
        yield from commit_step(context, fleet.session(name), name)
        fleet.done(name)

    @dg.job(
        name=fleet_job(schedule),
        description=_ABOUT,
        executor_def=thread_executor.executor(fleet),
        tags={FLEET_TAG: schedule},
    )
    def landed_by_many() -> None:
        pending().map(lambda feed: commit(land(feed)))

    return landed_by_many
