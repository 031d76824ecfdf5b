"""One schedule for many feeds: a tick finds what each of them owes, by its ledger alone, and requests one run.

A tick is cheap: it reads the ledgers into which something came since the last one, several at once, and never talks to
Kafka. Where nothing came, this is two requests to the lake. A feed whose file is wrong, or whose lake does not answer,
is named and stops no other. Feeds that a run is working on are left alone. The feed comes first whose oldest owed
records Kafka deletes first: the oldest window, where topics keep records equally long. A window that failed three
times, for reasons that another try does not fix, waits for somebody to look. Feeds that were at work when a run was
killed come last in the next one: if one of them was why, the others have landed before it begins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile

import dagster as dg

from sluice.assets.instance import internals
from sluice.assets.instance.sqlite_cache import kept_open
from sluice.assets.runs.fleet_runs import (
    DONE_TAG,
    FAILED_TAG,
    FLEET_TAG,
    LEFT_TAG,
    PASSES_TAG,
    asked_of,
    at_work_at_the_end,
    fleet_config,
    fleet_job,
    named_in,
)
from sluice.assets.runs.run_session import FEED_TAG, RunSession
from sluice.assets.runs.tick_policy import MORE_TAG, TickPolicy
from sluice.assets.schedules.feed_schedule import ATTEMPTS, UNDER_WAY, look_at_windows, schedule_name
from sluice.assets.specs.feed_files import FeedFiles, read_feeds
from sluice.assets.specs.last_seen import recall
from sluice.assets.specs.partitions_def import REACH
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.pipelines.feed.sections import SparkSettings
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.util.units import many, show_window

SECONDS = 30
"""Seconds that a tick spends on feeds; Dagster ends ticks that take longer than a minute."""
_AT_ONCE = 8
_RUNS = 30
"""Number of earlier runs whose failures count."""
_SHOWN = 10

Windows = Mapping[str, dg.TimeWindowPartitionsDefinition]


def fleet_schedule(
    schedule: str, feeds: Sequence[Feed], windows: Windows, session: RunSession
) -> dg.ScheduleDefinition:
    """Requests a run over the feeds whenever windows have closed. Off until somebody switches it on."""
    job = fleet_job(schedule)
    looks = TickPolicy(job, (f.window for f in feeds))
    which = "feeds that name no other schedule" if schedule == SHARED else f"feeds with `schedule: {schedule}`"

    @dg.schedule(
        name=schedule_name(job),
        job_name=job,
        cron_schedule=looks.crons,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=f"Lands in one run the closed windows that the {which} owe, whenever windows have closed."
        " Those come first that Kafka deletes first. While more is owed, it goes on a few minutes after each run.",
    )
    def owed_by_feeds(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        if not looks.is_due(context.instance, context.scheduled_execution_time):
            return looks.quiet
        tick = Tick(session, schedule, windows)
        asked = tick.run(context.instance)
        for line in tick.news:
            context.log.warning(line)
        now = context.scheduled_execution_time.isoformat()  # a repeated tick requests nothing twice
        return [
            dg.RunRequest(
                f"{number} at {now}",
                run_config=fleet_config(schedule, each),
                tags={MORE_TAG: "1"} if tick.more & each.keys() else {},
            )
            for number, each in enumerate(asked)
        ] or dg.SkipReason(tick.summary)

    return owed_by_feeds


@dataclass
class Tick:
    """One look at all feeds of a schedule. `news`: what people should know, a line each. `more`: the feeds that owe
    more than is asked of them."""

    session: RunSession
    schedule: str
    windows: Windows
    news: list[str] = field(default_factory=list)
    more: set[str] = field(default_factory=set)
    looked: int = 0

    def run(self, instance: dg.DagsterInstance) -> list[dict[str, Request]]:
        """What to ask of which feed: a mapping for each run, first the feeds whose oldest records Kafka deletes first.
        Feeds with another Spark get another run."""
        with kept_open(instance):
            return self._runs(instance)

    def _runs(self, instance: dg.DagsterInstance) -> list[dict[str, Request]]:
        files, settings = read_feeds(self.session.project, self.session.project.environ()), self.session.project.fleet()
        self.news += [f"not loaded: {path.name}: {e.message}" for path, e in files.broken.items()]
        mine = [f for f in self._mine(instance, files) if self._is_known(f)]
        past = _Past.of(instance, fleet_job(self.schedule))
        owed = ((f.name, self._picked(f, w, past, settings.windows)) for f, w in self._owed(instance, mine))
        asked = {name: picked for name, picked in owed if picked is not None}
        runs: list[tuple[SparkSettings, dict[str, Request]]] = []
        lasts = {name: self._lasts(name, request) for name, request in asked.items()}
        for name in sorted(asked, key=lambda name: (name in past.suspects, lasts[name], name)):
            spark = files.feeds[name].spark
            alike = next((run for settings, run in runs if settings == spark), None)
            if alike is None:
                runs.append((spark, alike := {}))
            alike[name] = asked[name]
        return [run for _, run in runs]

    def _mine(self, instance: dg.DagsterInstance, files: FeedFiles) -> Iterator[Feed]:
        """The schedule's feeds, without those that a run is working on, or whose own schedule is switched on."""
        feeds = [f for f in files.feeds.values() if f.schedule == self.schedule]
        busy = _busy(instance, feeds, self.session)
        own = internals.running_schedules(instance)
        for feed in feeds:
            if feed.name in busy:
                self.news.append(f"{feed.name} is left alone: a run is working on it")
            elif schedule_name(f"land_{feed.name}") not in own:
                yield feed

    def _lasts(self, feed: str, asked: Request) -> int:
        """Returns until when (ms) Kafka retains the oldest requested records, by the topics' last-seen state."""
        kept = recall(self.session.project, feed).kept
        return (asked.window or 0) + (REACH if kept is None else kept)

    def _is_known(self, feed: Feed) -> bool:
        if feed.name not in self.windows:
            self.news.append(f"{feed.name} is not shown here yet: reload the code location")
        return feed.name in self.windows

    def _owed(self, instance: dg.DagsterInstance, feeds: Sequence[Feed]) -> Iterator[tuple[Feed, list[int]]]:
        """Yields each feed's pending windows. Several lakes are read at once. Rotated by the clock, so that ticks that
        run out of time skip different feeds."""
        first = int(time.time() // 60) % len(feeds) if feeds else 0
        pool = ThreadPoolExecutor(_AT_ONCE, "sluice-tick")
        asked = [(f, pool.submit(look_at_windows, instance, self.session, f)) for f in (*feeds[first:], *feeds[:first])]
        wait([future for _, future in asked], SECONDS)
        pool.shutdown(wait=False, cancel_futures=True)
        for feed, future in asked:
            if not future.done() or future.cancelled():
                self.news.append(f"{feed.name}: its ledger was not read in time; the next tick looks again")
            elif isinstance(error := future.exception(), SluiceError):
                self.news.append(f"{feed.name} could not be looked at: {error.message}")
            elif error is not None:
                self.news.append(f"{feed.name} could not be looked at: {type(error).__name__}: {error}")
            else:
                self.looked += 1
                known = self.windows[feed.name]
                yield feed, [w for w in future.result() if known.has_partition_key(show_window(w))]

    def _picked(self, feed: Feed, owed: Sequence[int], past: _Past, at_most: int) -> Request | None:
        """The oldest windows in a row that have not failed too often; one that has failed, by itself."""
        free = [w for w in owed if past.failed[feed.name, show_window(w)] < ATTEMPTS]
        if len(free) < len(owed):
            gone = len(owed) - len(free)
            self.news.append(f"{feed.name}: {many(gone, 'window')} failed {ATTEMPTS} times: sluice run {feed.name}")
        if not free:
            return None
        failed = past.failed[feed.name, show_window(free[0])]
        row = list(_in_a_row(owed, free))[: 1 if failed else at_most]
        if len(row) < len(free) and not failed:
            self.more.add(feed.name)
        until = row[-1] + feed.window.length if len(row) > 1 else None
        return Request(RequestKind.WINDOW, window=row[0], until=until)

    @property
    def summary(self) -> str:
        """Why nothing is requested."""
        head = f"{many(self.looked, 'feed')} looked at: no closed window is owed that nobody is working on"
        more = [f"… {len(self.news) - _SHOWN} more in the log"] if len(self.news) > _SHOWN else []
        return "\n".join([head, *self.news[:_SHOWN], *more])


def _in_a_row(owed: Sequence[int], free: Sequence[int]) -> Iterator[int]:
    """The first free windows with no other owed one in between."""
    from_first = owed[owed.index(free[0]) :]
    return (w for w, _ in takewhile(lambda pair: pair[0] == pair[1], zip(from_first, free, strict=False)))


def _busy(instance: dg.DagsterInstance, feeds: Iterable[Feed], session: RunSession) -> set[str]:
    """The feeds that a run is working on, or is to work on."""
    schedules = {f.name: f.schedule for f in feeds}
    landed = {session.keys(name).landed: name for name in schedules}
    found: set[str] = set()
    for run in instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY)):
        asked = asked_of(run)
        if asked is not None:
            found |= {n for n in schedules if n in asked or (not asked and run.tags.get(FLEET_TAG) == schedules[n])}
        elif FEED_TAG in run.tags:
            found.add(run.tags[FEED_TAG])
        else:
            found |= {landed[key] for key in run.asset_selection or () if key in landed}
    return found


@dataclass
class _Past:
    """What earlier runs tell: how often a feed failed that was asked for a window first (as it is written), since it
    last succeeded; and the feeds that were at work when a run was killed, and have not succeeded since."""

    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    suspects: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, instance: dg.DagsterInstance, job: str) -> _Past:
        past, good, well = cls(), set[tuple[str, str]](), set[str]()
        for run in instance.get_runs(dg.RunsFilter(job_name=job), limit=_RUNS):  # newest first
            failed = _failed_in(instance, run) if run.is_finished else None
            for feed, asked in (asked_of(run) or {}).items():
                window = feed, str(asked.get("window", ""))
                if failed is None or window in good or feed in failed.unknown:
                    continue
                if feed in failed.feeds:
                    past.failed[window] += 1
                    past.suspects |= {feed} - well if failed.killed else set()
                else:
                    good.add(window)
                    well.add(feed)
        return past


@dataclass(frozen=True)
class _FailedIn:
    """What became of a run's feeds: those that failed, and those of which nothing is known. The others succeeded."""

    feeds: set[str]
    unknown: set[str]
    killed: bool = False


def _failed_in(instance: dg.DagsterInstance, run: dg.DagsterRun) -> _FailedIn:
    if DONE_TAG in run.tags:
        passing = named_in(run, PASSES_TAG)
        return _FailedIn(named_in(run, FAILED_TAG) - passing, passing | named_in(run, LEFT_TAG))
    everyone = set(asked_of(run) or ())
    if run.status is not dg.DagsterRunStatus.FAILURE:
        return _FailedIn(set(), everyone)
    at_work = at_work_at_the_end(instance, run)
    return _FailedIn(at_work, everyone - at_work, killed=True)
