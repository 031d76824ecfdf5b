"""The sensor that watches every feed without running it, and the check `watch` in which its findings show.

There is one sensor for each project. A tick opens each Kafka once and reads each feed's ledger once, however many feeds
there are. It reports a finding when it comes and when it has passed, not at every tick. If a tick runs out of time, the
next one goes on where it stopped. Off until somebody switches it on.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of `context` themselves, not as text.

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import dagster as dg

from sluice.assets.checks import feed_checks, re_report
from sluice.assets.checks.feed_checks import WATCH
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.instance.sqlite_cache import kept_open
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.feed_files import read_feeds
from sluice.assets.specs.markdown import plain
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.optional import NotifySettings
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ports import Cluster
from sluice.pipelines.status.watch import View, WatchResult, view, watch
from sluice.resources.observe.notifications import notify

SENSOR = "watch_feeds"
EVERY_SECONDS = 300
SECONDS = 20
"""Seconds after which a tick stops between two feeds; Dagster ends ticks that take longer than a minute."""
UNSENT = 50
"""How many lines wait at most for somebody who takes them."""
SHOWN = 10
"""How many lines a tick's summary has at most; its log has all."""


# -- the check


def watch_check(feed: Feed, session: RunSession) -> dg.AssetChecksDefinition:
    """The check on `<feed>/landed` that the sensor evaluates. If executed by hand, it looks at once."""

    landed = session.keys(feed.name).landed

    @dg.asset_check(
        asset=landed,
        name=WATCH,
        description=f"Whether anything needs attention. The sensor `{SENSOR}` evaluates it, or execute this check.",
    )
    def watched(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        landing = internals.executes(context.op_execution_context, landed)
        return dg.AssetCheckResult(**_looked_at(session, feed.name, landing=landing))

    return watched


def _looked_at(session: RunSession, name: str, *, landing: bool) -> dict[str, Any]:
    """The check's result now; `landing`: in a run that lands. If nothing can be seen, it says so and fails no run."""
    try:
        feed = session.feed(name)
        with session.open_ports(feed) as edges:
            ledger = Ledger(edges.lake, feed.name, edges.clock)
            watched = watch(feed, ledger, edges.cluster, view(edges.cluster, [feed]), edges.clock())
            return feed_checks.watch_check(feed_checks.by_the_way(watched) if landing else watched)
    except SluiceError as error:
        said = plain(f"could not look: {error.message}")
        return {"passed": False, "severity": dg.AssetCheckSeverity.WARN, "description": said}


# -- the sensor


def watch_sensor(session: RunSession, name: str = SENSOR) -> dg.SensorDefinition:
    """Checks every feed of the project every few minutes, and evaluates its check if something changed."""

    @dg.sensor(
        name=name,
        minimum_interval_seconds=EVERY_SECONDS,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Checks every feed: lag, retention, topics that are new or recreated, transactions that hang, "
        f"windows that stay partial. What it finds shows as the check `{WATCH}` on each feed's `landed`.",
    )
    def watch_feeds(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        tick = Tick(session, Cursor.read(context.cursor))
        tick.run(context.instance, time.monotonic)
        tick.send()
        for line in tick.news:
            context.log.warning(line)
        return dg.SensorResult(skip_reason=tick.summary, cursor=tick.cursor.dump(), asset_events=tick.events)

    return watch_feeds


@dataclass
class Cursor:
    """What was reported before: for each feed, its newest materialization then (a storage id), and the findings.

    `last` is the feed that the last look ended with. `said` is the news of that look,
    `unsent` what nobody has taken yet.
    """

    told: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    last: str = ""
    said: tuple[str, ...] = ()
    unsent: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str | None) -> Self:
        """An unreadable cursor counts as none: everything is reported once more."""
        try:
            kept = json.loads(text or "{}")
            told = {str(f): (int(at), tuple(map(str, about))) for f, (at, about) in kept.get("told", {}).items()}
            lines = (tuple(map(str, kept.get(name, ()))) for name in ("said", "unsent"))
            return cls(told, str(kept.get("last", "")), *lines)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return cls()

    def dump(self) -> str:
        kept = {"told": self.told, "last": self.last, "said": self.said, "unsent": self.unsent}
        return json.dumps(kept, sort_keys=True)

    def ordered(self, feeds: Iterable[str]) -> list[str]:
        """The feeds by name, beginning after the one that the last look ended with."""
        names = sorted(feeds)
        return [*(n for n in names if n > self.last), *(n for n in names if n <= self.last)]


@dataclass
class Tick:
    """The result of one tick over all feeds: `events` to store, `news` for people, and the new cursor."""

    session: RunSession
    cursor: Cursor
    events: list[dg.AssetCheckEvaluation] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    looked: int = 0
    _kafkas: dict[KafkaSettings, tuple[Cluster, View] | SluiceError] = field(default_factory=dict)

    def run(self, instance: dg.DagsterInstance, clock: Callable[[], float]) -> None:
        """Evaluate the feeds until all are done or time is up, by `clock` in seconds."""
        until = clock() + SECONDS
        files = read_feeds(self.session.project, self.session.project.environ())
        self.news += [f"not loaded: {e.message}" for e in files.broken.values()]
        self.cursor.told = {n: told for n, told in self.cursor.told.items() if n in files.feeds}
        with kept_open(instance), ExitStack() as opened:
            newest = _newest(instance, {self.session.keys(f).landed: f for f in files.feeds})
            self.session = opened.enter_context(self.session.sharing(files.feeds.values()))
            for name in self.cursor.ordered(files.feeds):
                if clock() > until:
                    self.news.append(f"out of time before {name}: the next tick begins there")
                    break
                self._look(instance, files.feeds[name], files.feeds.values(), newest.get(name, 0), opened)
                self.cursor.last = name

    def send(self) -> None:
        """Send what came and what passed to whom `notify.yaml` names, with what could not be sent before. What the last
        look said in the same words is not sent again."""
        said = tuple(" ".join(line.split()) for line in self.news)
        fresh = (*self.cursor.unsent, *(line for line in said if line not in self.cursor.said))[-UNSENT:]
        self.cursor.said, self.cursor.unsent = said[-UNSENT:], ()
        try:
            settings = self.session.project.notify()
            if fresh and settings != NotifySettings():
                notify(settings, f"Sluice, {self.session.project.root.name}:", fresh)
        except SluiceError as error:
            self.cursor.unsent = fresh
            self.news.append(f"not sent: {error.message}")

    def _look(
        self, instance: dg.DagsterInstance, feed: Feed, feeds: Iterable[Feed], newest: int, opened: ExitStack
    ) -> None:
        try:
            with self.session.open_ports(feed) as edges:
                ledger = Ledger(edges.lake, feed.name, edges.clock)
                keys = self.session.keys(feed.name)
                unseen = internals.planned_evaluations(instance, [dg.AssetCheckKey(keys.landed, WATCH)], ())
                re_report.settle(instance, feed, keys, partial(LedgerView.open, feed, ledger, edges, keys))
                cluster, seen = self._kafka(feed, feeds, opened)
                watched = watch(feed, ledger, cluster, seen, edges.clock())
        except SluiceError as error:
            self.news.append(f"{feed.name} could not be looked at: {error.message}")
            return
        self.looked += 1
        self._tell(instance, feed.name, watched, newest, unseen=bool(unseen))

    def _kafka(self, feed: Feed, feeds: Iterable[Feed], opened: ExitStack) -> tuple[Cluster, View]:
        """The feed's Kafka, opened and asked once for all feeds that read it. If it fails, it fails for all of them."""
        if feed.kafka not in self._kafkas:
            cluster = opened.enter_context(self.session.open_ports(feed)).cluster
            try:
                self._kafkas[feed.kafka] = cluster, view(cluster, [f for f in feeds if f.kafka == feed.kafka])
            except SluiceError as error:
                self._kafkas[feed.kafka] = error
        known = self._kafkas[feed.kafka]
        if isinstance(known, SluiceError):
            raise known
        return known

    def _tell(self, instance: dg.DagsterInstance, name: str, seen: WatchResult, newest: int, *, unseen: bool) -> None:
        """Findings that came or passed are news. The check is evaluated for these, and again after each
        materialization: Dagster shows a check that is older than that as not evaluated. `unseen`: a run ended before it
        evaluated the check.
        """
        before, after = self.cursor.told.get(name), (newest, tuple(sorted(f.about for f in seen.findings)))
        known = before[1] if before else ()
        self.news += [f"{name}: {f}" for f in seen.findings if f.about not in known]
        self.news += [f"{name}: passed: {about}" for about in known if about not in after[1]]
        if before != after or unseen:
            # About the newest event: one reported in this tick is newer than `newest`.
            self.events.append(
                feed_checks.feed_evaluation(
                    instance, self.session.keys(name).landed, WATCH, feed_checks.watch_check(seen)
                )
            )
            self.cursor.told[name] = after

    @property
    def summary(self) -> str:
        """Lists remaining findings, then new ones."""
        standing = {n: len(about) for n, (_, about) in sorted(self.cursor.told.items()) if about}
        feeds = ", ".join(f"{n} ({count})" for n, count in [*standing.items()][:SHOWN])
        rest = f" and {len(standing) - SHOWN} more" if len(standing) > SHOWN else ""
        looked = f"{self.looked} feed{'' if self.looked == 1 else 's'} looked at"
        head = f"{looked}; findings in {feeds}{rest}" if standing else f"{looked}; no findings"
        more = [f"… {len(self.news) - SHOWN} more in the log"] if len(self.news) > SHOWN else []
        return "\n".join([head, *self.news[:SHOWN], *more])


def _newest(instance: dg.DagsterInstance, keys: Mapping[dg.AssetKey, str]) -> dict[str, int]:
    """The storage id of each feed's newest materialization of `landed`. `keys`: the feeds by that asset."""
    entries = (r.asset_entry for r in instance.get_asset_records([*keys]))
    return {keys[e.asset_key]: e.last_materialization_storage_id or 0 for e in entries}
