"""The session of a run: its feeds, ports and clock. Definitions hold it, so it is no resource whose name could clash.

Each run has its own session: progress and results go to the caller that made it, never through a global. A run that
Dagster launched reports to its own log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from logging import Logger
from typing import TYPE_CHECKING, Any

import dagster as dg

from sluice.assets.instance import internals
from sluice.assets.instance.instance import holding, home_of
from sluice.assets.specs.asset_specs import Keys
from sluice.assets.specs.feed_files import FeedFiles, OpenLake, open_real_lake, read_feeds
from sluice.pipelines.batch.survey import open_ledger
from sluice.pipelines.errors import Retryable, SluiceError, is_transient
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.feed.sql_report import Report
from sluice.pipelines.feed.stores import StoreSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.tip import Tip
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.planning.origins import check_cluster
from sluice.pipelines.planning.windows import list_pending_windows
from sluice.pipelines.ports import Ports
from sluice.pipelines.util import logs
from sluice.pipelines.util.units import MINUTE
from sluice.resources.observe import tracing
from sluice.resources.project import Project
from sluice.running import RunResult, observe

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.operating.feed_status import OpenPorts
    from sluice.reading import Windows


class RunLedgers:
    """The ledgers that steps write to, by feed and run: a later step reads on where an earlier one was."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str], Ledger] = {}

    def of(self, feed: Feed, ports: Ports, run: str) -> Ledger:
        """The ledger, opened for the run. Raises ClusterChanged when it was begun with another cluster."""
        ledger = self._opened.get((feed.name, run))
        if ledger is None:
            ledger = self._opened[feed.name, run] = open_ledger(feed, ports, run)
        else:
            check_cluster(ledger.read(), ports.cluster.cluster_id(), feed.name)
        return ledger

    def forget(self) -> None:
        """Drop ledgers that the run no longer needs."""
        self._opened.clear()


@dataclass(frozen=True, slots=True)
class _Cached:
    """The pending windows of a ledger with `number` entries, of windows that closed before `until` (ms)."""

    location: tuple[str, StoreSettings | None, WindowSettings]
    ledger: str
    number: int
    pending: list[int]
    until: int
    retention: int | None


class PendingWindowCache:
    """Caches the pending windows of feeds by their ledgers. Thread-safe.

    Where nothing came into a ledger since the last look, its pending windows are the same, and those that closed
    since: this takes two requests to the lake, and little is kept. Otherwise the ledger is read again, with all that
    this checks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cache: dict[str, _Cached] = {}

    def of(self, feed: Feed, ports: Ports) -> list[int]:
        """The closed windows (their starts, ms) of the feed that are pending, oldest first."""
        location, until = (feed.lake, feed.store, feed.window), feed.window.last_boundary(ports.clock())
        with self._lock:
            cached = self._cache.pop(feed.name, None)  # what fails below is read again the next time
        if cached is not None and cached.location == location and not _is_newer(cached, feed, ports):
            closed = feed.window.list_starts(cached.until, until)
            fresh = _Cached(
                location,
                cached.ledger,
                cached.number,
                [*cached.pending, *closed],
                max(until, cached.until),
                cached.retention,
            )
        else:
            ledger = Ledger(ports.lake, feed.stored, ports.clock)
            state, now = ledger.read(), ports.clock()
            pending = list_pending_windows(state, feed.window, now)
            until, retention = feed.window.last_boundary(now), ledger.facts.retention
            fresh = _Cached(location, state.ledger_id, state.number, pending, until, retention)
            if not state.known():
                return pending  # nothing has begun: only the newest window is pending
        with self._lock:
            self._cache[feed.name] = fresh
        return fresh.pending

    def find_retention(self, feed: str) -> int | None:
        """How long (ms) Kafka keeps the feed's records, as far as its ledger knew at the last look."""
        with self._lock:
            cached = self._cache.get(feed)
        return cached.retention if cached else None


def _is_newer(cached: _Cached, feed: Feed, ports: Ports) -> bool:
    """Returns true if the lake's ledger has a newer entry, or is another one, by its tip."""
    tip = Tip.parse(ports.lake.get(paths.tip_path(feed.stored)))
    if tip is None or (tip.ledger, tip.number) != (cached.ledger, cached.number - 1):
        return True
    return ports.lake.size(paths.log_path(feed.stored, cached.number)) is not None


FEED_TAG = "sluice/feed"
AGAIN_TAG = "sluice/again"
"""Tag of a run that failed for a reason that passes by itself: the schedule tries again any number of times."""

ERROR_TAG = "sluice/error"
"""Tag of a run that failed: the class of the error that ended it."""

Ask = Callable[[Report, "Windows"], "pa.Table"]


def pool(feed: str) -> str:
    """The Dagster pool of the feed's steps."""
    return f"sluice_{feed}"


def open_real_ports(feed: Feed) -> AbstractContextManager[Ports]:
    """The feed's ports. Imported late: loading definitions needs neither Spark nor a Kafka client."""
    from sluice.resources.open_ports import open_ports

    return open_ports(feed)


def ask_spark(report: Report, rows: Windows) -> pa.Table:
    """Returns the report's result, by Spark."""
    from sluice.reading import run_report

    return run_report(report, rows)


Execute = Callable[[dg.AssetExecutionContext | dg.OpExecutionContext, Iterator[Any]], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of the steps that land. `pool` replaces the feed's own; `execute` passes on the step's events.

    `lone`: each feed has jobs of its own, not only one with `schedule: own`.
    """

    tags: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    execute: Execute = lambda context, events: events
    lone: bool = True


@dataclass(frozen=True)
class RunSession:
    """How a run finds its feed, opens its ports, and reports progress.

    `on_interrupt` gets the run's id: only the caller that started the run recognizes a requested interrupt. `keys`
    returns Dagster's asset keys of a feed, by its name. `files` are the feed files if the caller read them; otherwise
    each step reads them. `alone` is true for a run of this feed only.
    `ledgers` are those of its steps, `pending` the results of earlier ticks of this process. `catch_up` limits the time
    (ms) in which a step starts batches, if a schedule requested several windows.
    """

    project: Project
    open_ports: OpenPorts = open_real_ports
    open_lake: OpenLake = open_real_lake
    ask: Ask = ask_spark
    report: Reporter | None = None
    on_interrupt: Callable[[str], None] = lambda run: None
    result: RunResult = field(default_factory=RunResult)
    keys: Callable[[str], Keys] = Keys.of
    files: FeedFiles | None = None
    alone: bool = True
    ledgers: RunLedgers = field(default_factory=RunLedgers)
    pending: PendingWindowCache = field(default_factory=PendingWindowCache)
    catch_up: int = 30 * MINUTE
    steps: StepSettings = StepSettings()

    def get_pool(self, feed: str) -> str:
        """Returns the Dagster pool of the feed's steps."""
        return self.steps.pool or pool(feed)

    @contextmanager
    def sharing(self, feeds: Iterable[Feed]) -> Iterator[RunSession]:
        """This session while it works for many feeds: until the block ends, those that reach one Kafka by the same
        settings share connections and answers. A caller's own way to open ports stays."""
        if self.open_ports is not open_real_ports:
            yield self
            return
        from sluice.resources.open_ports import share_ports

        with share_ports(feeds) as open_ports:
            yield replace(self, open_ports=open_ports)

    def apart(self) -> RunSession:
        """The session for one feed of several in a run: what one landed and committed is not another's."""
        return replace(self, result=RunResult(), ledgers=RunLedgers())

    def feed(self, name: str) -> Feed:
        """The feed as its file says now, with the run's environment. Raises FeedError."""
        return (self.files or read_feeds(self.project, self.project.environ())).feed(name)

    def find_dataset(self, name: str) -> Feed:
        """Returns one feed, or one output of a split feed by `feed.output`. Raises FeedError as `feed`."""
        return (self.files or read_feeds(self.project, self.project.environ())).find_dataset(name)

    def readable_feed(self, name: str) -> Feed:
        """Returns the feed for reading landed rows; the address of Kafka may be unknown. Raises FeedError."""
        return self.project.readable_feed(name)

    def reporter(self, log: Logger) -> Reporter:
        """Where progress goes: to the caller that started the run, otherwise a line in its log for each stage."""
        return observe(self.report, log)

    @contextmanager
    def step(self, context: dg.AssetExecutionContext | dg.OpExecutionContext, feed: str = "") -> Iterator[None]:
        """Run a step's body. Its error is kept in the session's result and reported to Dagster with the remedy.

        Where logs are JSON, its log also goes to the run's stderr, which Dagster stores. The run's lock is held.
        """
        if self.alone and (inherited := {t: "" for t in (ERROR_TAG, AGAIN_TAG) if context.run.tags.get(t)}):
            with internals.optional():  # Dagster copies a parent's tags: this run may succeed, or be killed
                context.instance.add_run_tags(context.run.run_id, inherited)
        try:
            with (
                logs.log_context(run=context.run.run_id, feed=feed or None, window=_get_window(context)),
                logs.restore_handlers(context.log),
                tracing.step(context.op_def.name, context.run.run_id, feed=feed or None, window=_get_window(context)),
                self.hold_lock(context),
            ):
                yield
        except SluiceError as error:
            self.result.error = error
            self._tag(context, error)
            raise as_failure(error) from error
        except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
            self.result.interrupted = True
            self.on_interrupt(context.run.run_id)
            raise
        except Exception as error:
            self.result.crash = error
            self._tag(context, error)
            raise

    def hold_lock(self, context: dg.AssetExecutionContext | dg.OpExecutionContext) -> AbstractContextManager[None]:
        """Hold the run's lock until the block ends: a process that finds it free knows that this one was killed."""
        return holding(home_of(self.project, context.instance), context.run.run_id)

    def tag_feed(self, context: dg.OpExecutionContext, feed: str) -> None:
        """Tag the run of a job over several feeds with the feed that its configuration names."""
        with internals.optional():
            if context.run.tags.get(FEED_TAG) != feed:
                context.instance.add_run_tags(context.run.run_id, {FEED_TAG: feed})

    def _tag(self, context: dg.AssetExecutionContext | dg.OpExecutionContext, error: Exception) -> None:
        """Tag the run with its error, and whether it is transient."""
        name = type(error).__name__
        tags = {ERROR_TAG: name} | ({AGAIN_TAG: name} if is_transient(error) else {})
        if self.alone:
            with internals.optional():  # else the refusal would stand in the error's place
                context.instance.add_run_tags(context.run.run_id, tags)


def _get_window(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> str | None:
    return context.partition_key if context.has_partition_key else None


def as_failure(error: SluiceError) -> dg.Failure:
    """The error as Dagster shows it: message, remedy and coordinates."""
    fields = {k: v for k, v in error.fields().items() if k != "message"}
    return dg.Failure(error.message, metadata=fields, allow_retries=isinstance(error, Retryable))
