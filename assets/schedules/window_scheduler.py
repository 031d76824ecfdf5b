"""Schedules that request runs for pending windows: one for a feed of its own, or one for all feeds that share it.

A tick reads the ledgers with new entries, several at once, and never talks to Kafka; a ledger without new entries costs
two requests to the lake. Windows are requested oldest first, consecutive ones by one run, and a window that failed by
itself. After three failures, transient ones not counted, a window waits until a run by hand lands it.

A tick first marks runs as failed whose process died, as when the code server was killed with its runs, or that Dagster
never launched: it retries them, and their pools are free.

The schedule of one feed leaves out windows that are queued or running, and requests nothing while a run over several
windows is active. A schedule over many feeds leaves out every feed with an active run, because its runs wait for no
pool. It requests first the feeds whose oldest pending records Kafka deletes first, and last those that were active
when a run was killed. A feed with a broken file or an unreachable lake is reported and stops no other.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from sluice.assets.checks.re_report import settle
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.instance.instance import bury_dead_runs, end_unlaunched_runs, home_of, limit_pools
from sluice.assets.instance.internals import ENDED, PARTITION_TAG, RANGE_TAGS
from sluice.assets.instance.storage import kept_open
from sluice.assets.runs.run_config import (
    AT_WORK_TAG,
    DONE_TAG,
    FAILED_TAG,
    LEFT_TAG,
    MORE_TAG,
    PASSES_TAG,
    UNTIL_TAG,
    TickPolicy,
    asked_of,
    find_feeds,
    fleet_config,
    fleet_job,
    fleet_pool,
    named_in,
)
from sluice.assets.runs.run_session import AGAIN_TAG, FEED_TAG, RunSession, pool
from sluice.assets.specs.asset_specs import REACH, closing_words
from sluice.assets.specs.feed_files import FeedFiles, read_feeds
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import join_first, many, show_window

RUNS = 6
"""The maximum number of runs that a tick requests for one feed's schedule."""
WINDOWS = 1000
"""The maximum number of windows that a tick requests for one feed's schedule."""
ATTEMPTS = 3
"""The number of runs after whose failure a window is no longer requested."""
SECONDS = 30
"""Seconds that a tick spends on many feeds; Dagster ends ticks that take longer than a minute."""
ACTIVE = [s for s in dg.DagsterRunStatus if s not in ENDED]
"""The statuses of runs that are queued or running."""
_FLEET_RUNS = 30
"""Number of earlier runs over many feeds whose failures count."""
_THREADS = 8
_CHUNK = 100  # windows whose runs are queried at once
_SHOWN_WINDOWS = 6
_SHOWN_NEWS = 10

FeedPartitions = Mapping[str, dg.TimeWindowPartitionsDefinition]
RunRequests = list[dg.RunRequest]


def feed_schedule(
    feed: Feed,
    job: str,
    partitions: dg.TimeWindowPartitionsDefinition,
    session: RunSession,
    assets: Sequence[dg.AssetsDefinition] = (),
) -> dg.ScheduleDefinition:
    """Returns the schedule of one feed, off by default. It requests runs of `job`, or only of these assets in it."""
    return _build_schedule(
        session,
        f"land_{feed.name}",
        TickPolicy(job, [feed.window], tags={FEED_TAG: feed.name}),
        f"Lands the closed windows of {feed.name} that are pending, {closing_words(feed.window)}."
        " Oldest first; a run for those in a row. While more are pending, the next run follows within minutes.",
        lambda _: FeedScheduler(session, {feed.name: partitions}, feed.name, job, assets),
    )


def fleet_schedule(
    schedule: str, feeds: Sequence[Feed], partitions: FeedPartitions, session: RunSession
) -> dg.ScheduleDefinition:
    """Returns the schedule over many feeds, which requests one run for all of them. It is off by default."""
    which = "feeds that name no other schedule" if schedule == SHARED else f"feeds with `schedule: {schedule}`"
    return _build_schedule(
        session,
        fleet_job(schedule),
        TickPolicy(fleet_job(schedule), (f.window for f in feeds)),
        f"Lands in one run the pending closed windows of {which}, whenever windows have closed."
        " Those come first that Kafka deletes first. While more is pending, the next run follows within minutes.",
        lambda only: FleetScheduler(session, partitions, schedule, only),
    )


def schedule_name(work: str) -> str:
    """Returns the name of the schedule that requests runs for windows, by their work."""
    return f"{work}_windows"


def _build_schedule(
    session: RunSession,
    work: str,
    policy: TickPolicy,
    description: str,
    scheduler: Callable[[Collection[str]], WindowScheduler],
) -> dg.ScheduleDefinition:
    @dg.schedule(
        name=schedule_name(work),
        job_name=policy.runs.job_name,
        cron_schedule=policy.crons,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=description,
    )
    def request_windows(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | RunRequests:
        # Their windows are requested by the next tick, when Dagster knows that the runs ended.
        if dead := _end_dead_runs(session, context.instance, policy.runs):
            runs = ", ".join(run[:8] for run in dead)
            return dg.SkipReason(f"marked as failed, since its process died or never began: run {runs}")
        if not policy.is_due(context.instance, context.scheduled_execution_time):
            return policy.skip_reason
        tick = scheduler(policy.unread)
        now = context.scheduled_execution_time.isoformat()  # in the run keys: a repeated tick requests nothing twice
        try:
            requests = tick.request_runs(context.instance, now)
        except Exception:
            # The next tick must look again at the feeds of this one.
            policy.forget_look()
            raise
        policy.unread = frozenset(tick.unread)
        policy.requested = (requests[-1].run_key or "") if requests else ""
        for line in tick.news:
            context.log.warning(line)
        if requests:
            with internals.optional():
                limit_pools(context.instance, tick.pools)
        return requests or dg.SkipReason(tick.skip_reason)

    return request_windows


def _end_dead_runs(session: RunSession, instance: dg.DagsterInstance, runs: dg.RunsFilter) -> list[str]:
    """Mark runs as failed that were killed together with the code server, and the schedule's that were never launched:
    nothing else would report their end, and their feeds would wait for them.

    Returns their ids. Dagster retries them before the next tick.
    """
    dead: list[str] = []
    with internals.optional():
        dead = bury_dead_runs(instance, home_of(session.project, instance))
        dead += end_unlaunched_runs(instance, runs)
    return dead


class WindowScheduler(ABC):
    """One tick of a schedule. `news`: lines for the tick's log. `unread`: feeds whose ledgers could not be read."""

    def __init__(self, session: RunSession, partitions: FeedPartitions) -> None:
        self.session, self.partitions = session, partitions
        self.news: list[str] = []
        self.unread: set[str] = set()

    @abstractmethod
    def request_runs(self, instance: dg.DagsterInstance, now: str) -> RunRequests:
        """Returns the tick's requests, with run keys that contain `now`; empty: see `skip_reason`."""

    @property
    @abstractmethod
    def pools(self) -> list[str]:
        """The schedule's pools that get a limit; not those that a project chose for the steps."""

    @property
    @abstractmethod
    def skip_reason(self) -> str:
        """The reason why the last `request_runs` requested nothing."""

    def read_pending(self, instance: dg.DagsterInstance, feed: Feed) -> list[int]:
        """Returns the feed's pending windows, oldest first, by the ledger alone.

        Also reports windows that killed runs left unreported.
        """
        with self.session.open_ports(feed) as ports:
            keys = self.session.keys(feed.name)
            settle(instance, feed, keys, lambda: LedgerView.open(feed, ports, keys))
            pending = self.session.pending.of(feed, ports)
        if any(not self.is_shown(feed, w) for w in pending):
            self.news.append(f"{feed.name}: its ledger begins earlier than the windows here: reload the code location")
        return pending

    def is_shown(self, feed: Feed, window: int) -> bool:
        """Returns true if the window is a loaded partition. Earlier ones of the first run need another load."""
        return self.partitions[feed.name].has_partition_key(feed.window.name(window))

    def find_active(self, instance: dg.DagsterInstance, feeds: Iterable[Feed]) -> dict[str, list[dg.DagsterRun]]:
        """Returns the queued and running runs of feeds, by feed, from any job or backfill."""
        schedules = {f.name: f.schedule for f in feeds}
        landed = {self.session.keys(name).landed: name for name in schedules}
        active: dict[str, list[dg.DagsterRun]] = {}
        for run in instance.get_runs(dg.RunsFilter(statuses=ACTIVE)):
            for name in find_feeds(run, schedules, landed):
                active.setdefault(name, []).append(run)
        return active


def group_windows(
    feed: str,
    pending: Iterable[int],
    failures: Mapping[tuple[str, str], int],
    active: Container[str] = (),
    name: Callable[[int], str] = show_window,
) -> list[list[int]]:
    """Returns the windows of each run, oldest first: consecutive pending ones, or one that has failed.

    Active windows, and those that failed too often, are left out. Both are known by `name`.
    """
    groups: list[list[int]] = [[]]
    for window in pending:
        failed = failures[feed, key := name(window)]
        if key in active or failed >= ATTEMPTS:
            groups.append([])
        elif failed:
            groups += [[window], []]
        else:
            groups[-1].append(window)
    return [group for group in groups if group]


class FeedScheduler(WindowScheduler):
    """One tick of one feed's schedule: up to `RUNS` runs of the feed's job."""

    def __init__(
        self,
        session: RunSession,
        partitions: FeedPartitions,
        feed: str,
        job: str,
        assets: Sequence[dg.AssetsDefinition],
    ) -> None:
        super().__init__(session, partitions)
        self._feed, self._job, self._assets, self._reason = feed, job, assets, ""

    @property
    def pools(self) -> list[str]:
        return [] if self.session.steps.pool else [pool(self._feed)]

    @property
    def skip_reason(self) -> str:
        return self._reason

    def request_runs(self, instance: dg.DagsterInstance, now: str) -> RunRequests:
        feed = self.session.feed(self._feed)
        pending = self.read_pending(instance, feed)
        active = self.find_active(instance, [feed]).get(feed.name, ())
        if first := next(filter(None, map(_find_first_of_several, active)), ""):
            self._reason = f"a run is at work on the windows of {feed.name} from {first} on"
            return []
        attempts = Attempts.read(instance, self._list_runs(instance, feed, pending[:WINDOWS]))
        busy = {run.tags.get(PARTITION_TAG, "") for run in active}
        groups = group_windows(feed.name, pending[:WINDOWS], attempts.failures, busy, feed.window.name)
        more = {MORE_TAG: "1"} if len(pending) > WINDOWS or len(groups) > RUNS else {}
        self._reason = _describe_pending(feed, pending)
        return [self._build_request(feed, group, now, more) for group in groups[:RUNS]]

    def _list_runs(self, instance: dg.DagsterInstance, feed: Feed, pending: Sequence[int]) -> Iterator[dg.DagsterRun]:
        """Returns the job's runs of these windows, for each window the newest first."""
        for at in range(0, len(pending), _CHUNK):
            keys = [feed.window.name(w) for w in pending[at : at + _CHUNK]]
            tags = {FEED_TAG: feed.name, PARTITION_TAG: keys}
            yield from instance.get_runs(dg.RunsFilter(job_name=self._job, tags=tags))

    def _build_request(self, feed: Feed, group: Sequence[int], now: str, tags: Mapping[str, str]) -> dg.RunRequest:
        """Returns a run of the first window, which also lands the others."""
        first, config = feed.window.name(group[0]), dict[str, Any]()
        tags = {FEED_TAG: feed.name, **tags}
        if not self.is_shown(feed, group[0]):  # Dagster would refuse the key, but a run knows the ledger's windows
            tags[PARTITION_TAG] = first
        if len(group) > 1:
            tags[UNTIL_TAG] = feed.window.name(feed.window.end_of(group[-1]))
            landed = self.session.keys(feed.name).landed.to_python_identifier()
            config = {"ops": {landed: {"config": {"until": tags[UNTIL_TAG]}}}}
        return dg.RunRequest(
            f"{first} at {now}",
            run_config=config,
            tags=tags,
            partition_key=None if PARTITION_TAG in tags else first,
            asset_selection=[asset.key for asset in self._assets] or None,
            asset_check_keys=[key for asset in self._assets for key in asset.check_keys] or None,
        )


def _find_first_of_several(run: dg.DagsterRun) -> str:
    """Returns the first window of a run over several, of a schedule or a backfill; empty for another run."""
    return run.tags.get(PARTITION_TAG if UNTIL_TAG in run.tags else RANGE_TAGS[0], "")


def _describe_pending(feed: Feed, pending: Sequence[int]) -> str:
    if not pending:
        return f"no closed window of {feed.name} is pending"
    windows = join_first(map(feed.window.name, pending), _SHOWN_WINDOWS, " … {:,} more")
    return f"{len(pending)} windows are pending, all under way or failed {ATTEMPTS} times: {windows}"


class FleetScheduler(WindowScheduler):
    """One tick over all feeds of a schedule, or over `only` some: one run of all that are pending."""

    def __init__(
        self, session: RunSession, partitions: FeedPartitions, schedule: str, only: Collection[str] = ()
    ) -> None:
        super().__init__(session, partitions)
        self._schedule, self._job, self._only = schedule, fleet_job(schedule), only
        self._more: set[str] = set()
        self.checked = 0

    @property
    def pools(self) -> list[str]:
        feeds = [] if self.session.steps.pool else self.partitions
        return [fleet_pool(self._schedule), *map(pool, feeds)]

    @property
    def skip_reason(self) -> str:
        head = f"{many(self.checked, 'feed')} checked: no closed window is pending without an active run"
        more = [f"… {len(self.news) - _SHOWN_NEWS} more in the log"] if len(self.news) > _SHOWN_NEWS else []
        return "\n".join([head, *self.news[:_SHOWN_NEWS], *more])

    def request_runs(self, instance: dg.DagsterInstance, now: str) -> RunRequests:
        requests = self.list_requests(instance)
        config, tags = fleet_config(self._schedule, requests), {MORE_TAG: "1"} if self._more & requests.keys() else {}
        return [dg.RunRequest(f"0 at {now}", run_config=config, tags=tags)] if requests else []

    def list_requests(self, instance: dg.DagsterInstance) -> dict[str, Request]:
        """Returns the request of each feed, in the order in which the feeds are to land."""
        project = self.session.project
        files, at_most = read_feeds(project, project.environ()), project.fleet().windows
        self.news += [f"not loaded: {path.name}: {e.message}" for path, e in files.broken.items()]
        with kept_open(instance):
            feeds = [*self._list_feeds(instance, files)]
            attempts = Attempts.read(instance, instance.get_runs(dg.RunsFilter(job_name=self._job), limit=_FLEET_RUNS))
            requests = {
                feed.name: request
                for feed, pending in self._read_all(instance, feeds)
                if (request := self._build_request(feed, pending, attempts, at_most))
            }
        order = {
            name: (name in attempts.suspects, self._estimate_expiry(name, r), name) for name, r in requests.items()
        }
        return {name: requests[name] for name in sorted(requests, key=order.__getitem__)}

    def _list_feeds(self, instance: dg.DagsterInstance, files: FeedFiles) -> Iterator[Feed]:
        """Yields the schedule's feeds without an active run and without a running schedule of their own."""
        of_schedule = (f for f in files.feeds.values() if f.schedule == self._schedule)
        feeds = [f for f in of_schedule if not self._only or f.name in self._only]
        active, own = self.find_active(instance, feeds), internals.running_schedules(instance)
        for feed in feeds:
            if feed.name in active:
                self.news.append(f"{feed.name} is left alone: a run is working on it")
            elif schedule_name(f"land_{feed.name}") in own:
                continue
            elif feed.name not in self.partitions:
                self.news.append(f"{feed.name} is not shown here yet: reload the code location")
            else:
                yield feed

    def _read_all(self, instance: dg.DagsterInstance, feeds: Sequence[Feed]) -> Iterator[tuple[Feed, list[int]]]:
        """Yields each feed's pending windows. Several lakes are read at once. Rotated by the clock, so that ticks
        that run out of time skip different feeds."""
        first = int(time.time() // 60) % len(feeds) if feeds else 0
        pool = ThreadPoolExecutor(_THREADS, "sluice-tick")
        reads = [(f, pool.submit(self.read_pending, instance, f)) for f in (*feeds[first:], *feeds[:first])]
        wait([future for _, future in reads], SECONDS)
        pool.shutdown(wait=False, cancel_futures=True)
        for feed, future in reads:
            if not future.done() or future.cancelled():
                self.unread.add(feed.name)
                self.news.append(f"{feed.name}: its ledger was not read in time; the next tick reads it again")
            elif error := future.exception():
                self.unread.add(feed.name)
                text = error.message if isinstance(error, SluiceError) else f"{type(error).__name__}: {error}"
                self.news.append(f"{feed.name} could not be checked: {text}")
            else:
                self.checked += 1
                yield feed, future.result()

    def _build_request(self, feed: Feed, pending: Sequence[int], attempts: Attempts, at_most: int) -> Request | None:
        """Returns a request for the feed's first windows."""
        groups = group_windows(feed.name, pending, attempts.failures)
        if blocked := len(pending) - sum(map(len, groups)):
            self.news.append(f"{feed.name}: {many(blocked, 'window')} failed {ATTEMPTS} times: sluice run {feed.name}")
        if not groups:
            return None
        windows = groups[0][:at_most]
        if len(windows) + blocked < len(pending) and not attempts.failures[feed.name, show_window(windows[0])]:
            self._more.add(feed.name)
        until = feed.window.end_of(windows[-1]) if len(windows) > 1 else None
        return Request(RequestKind.WINDOW, window=windows[0], until=until)

    def _estimate_expiry(self, feed: str, request: Request) -> int:
        """Returns when (ms) Kafka deletes the oldest requested records, by the topics' last-seen retention."""
        retention = self.session.pending.find_retention(feed)
        return (request.window or 0) + (REACH if retention is None else retention)


@dataclass
class Attempts:
    """Results of earlier runs. `failures`: by feed and first window, since the last success. `suspects`: feeds that
    were active when a run was killed, and have not succeeded since."""

    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    suspects: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, instance: dg.DagsterInstance, runs: Iterable[dg.DagsterRun]) -> Attempts:
        """Reads the results of runs, of each window the newest first."""
        attempts, landed, recovered = cls(), set[tuple[str, str]](), set[str]()
        for run in runs:
            for window, failed, killed in _read_results(instance, run) if run.is_finished else ():
                if failed and window not in landed:
                    attempts.failures[window] += 1
                    attempts.suspects |= {window[0]} - recovered if killed else set()
                elif window not in landed:
                    landed.add(window)
                    recovered.add(window[0])
        return attempts


def _read_results(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Iterator[tuple[tuple[str, str], bool, bool]]:
    """Yields the feeds of a finished run with their first window, and whether they failed, and because of a kill.

    Feeds that failed for a transient reason, or did not begin, are left out: a busy code server may start no run.
    """
    requests, killed = asked_of(run), False
    if requests is None:  # a run of one feed's job
        feeds = {run.tags.get(FEED_TAG, ""): run.tags[PARTITION_TAG]}
        failed = set() if run.status is dg.DagsterRunStatus.SUCCESS else {*feeds}
        record = instance.get_run_record_by_id(run.run_id) if failed else None  # None: pruned
        begun = record is not None and record.start_time is not None
        unknown = failed if run.tags.get(AGAIN_TAG) or not begun else set()
    else:
        feeds = {feed: str(request.get("window", "")) for feed, request in requests.items()}
        if run.tags.get(DONE_TAG):
            failed, unknown = named_in(run, FAILED_TAG), named_in(run, PASSES_TAG) | named_in(run, LEFT_TAG)
        else:
            killed = run.status is dg.DagsterRunStatus.FAILURE
            failed = named_in(run, AT_WORK_TAG) if killed else set()
            unknown = feeds.keys() - failed
    yield from (((feed, window), feed in failed, killed) for feed, window in feeds.items() if feed not in unknown)
