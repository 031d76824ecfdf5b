"""The sensor that checks every feed without a run, and the check `feed_health` with its findings.

There is one sensor for each project. A tick opens each Kafka once and reads each feed's ledger once. It reports a
finding when it appears and when it has passed, not at every tick. If a tick runs out of time, the next one continues
there. It is off by default.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of `context` themselves, not as text.

import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import dagster as dg

from sluice.assets.checks import feed_checks, re_report
from sluice.assets.checks.feed_checks import FEED_HEALTH
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance import internals
from sluice.assets.instance.storage import kept_open
from sluice.assets.runs.run_session import RunSession
from sluice.assets.specs.asset_specs import plain
from sluice.assets.specs.feed_files import read_feeds
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.project_files import NotifySettings
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.operating.feed_status import WatchResult, watch
from sluice.pipelines.util import logs
from sluice.pipelines.util.units import join_first
from sluice.resources.observe.notifications import Alert, notify

log = logging.getLogger(f"{logs.OURS}.sensor")
SENSOR = "watch_feeds"
EVERY_SECONDS = 300
SECONDS = 20
"""Seconds after which a tick stops between two feeds; Dagster ends ticks that take longer than a minute."""
UNSENT = 50
"""Maximum number of lines that wait for delivery."""
SHOWN = 10
"""Maximum number of lines in a tick's summary; its log has all."""


# -- the check


def watch_check(feed: Feed, session: RunSession) -> dg.AssetChecksDefinition:
    """Returns the check on `<feed>/landed` that the sensor evaluates, and that anybody may execute."""

    landed = session.keys(feed.name).landed

    @dg.asset_check(
        asset=landed,
        name=FEED_HEALTH,
        description="Passes when the feed needs no attention. Otherwise it lists each finding with its remedy. The"
        f" sensor `{SENSOR}` and every run evaluate it; or execute this check.",
    )
    def watched(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        landing = internals.executes(context.op_execution_context, landed)
        return dg.AssetCheckResult(**_evaluate_health(session, feed.name, landing=landing))

    return watched


def _evaluate_health(session: RunSession, name: str, *, landing: bool) -> dict[str, Any]:
    """Returns the check's result now; `landing`: in a run that lands. An error is a warning and fails no run."""
    try:
        feed = session.feed(name)
        with session.open_ports(feed) as ports:
            ledger = Ledger(ports.lake, feed.stored, ports.clock)
            watched = watch(ports, feed, ledger)
            return feed_checks.check_health(feed_checks.without_lag(watched) if landing else watched)
    except SluiceError as error:
        message = plain(f"not checked: {error.message}")
        return {"passed": False, "severity": dg.AssetCheckSeverity.WARN, "description": message}


# -- the sensor


def watch_sensor(session: RunSession, name: str = SENSOR) -> dg.SensorDefinition:
    """Checks every feed of the project every few minutes, and evaluates its check if something changed."""

    @dg.sensor(
        name=name,
        minimum_interval_seconds=EVERY_SECONDS,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Checks every feed: lag, retention, topics that are new or recreated, transactions that hang, "
        f"windows that stay partial. Findings appear as the check `{FEED_HEALTH}` on each feed's `landed`.",
    )
    def watch_feeds(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        tick = Tick(session, SensorCursor.read(context.cursor))
        tick.run(context.instance, time.monotonic)
        tick.send()
        for line in tick.news:
            context.log.warning(line)
        return dg.SensorResult(skip_reason=tick.summary, cursor=tick.cursor.dump(), asset_events=tick.events)

    return watch_feeds


@dataclass
class SensorCursor:
    """The state between ticks. `reported`: each feed's newest materialization (a storage id) and findings at its last
    report. `last`: the last checked feed. `lines`: news of the last tick. `unsent`: lines not delivered yet.
    """

    reported: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    last: str = ""
    lines: tuple[str, ...] = ()
    unsent: tuple[Alert, ...] = ()

    @classmethod
    def read(cls, text: str | None) -> Self:
        """Reads a cursor. An unreadable one counts as none, so that everything is reported again."""
        try:
            document = json.loads(text or "{}")
            reported = {
                str(f): (int(at), tuple(map(str, about))) for f, (at, about) in document.get("told", {}).items()
            }
            unsent = (Alert(*a) if isinstance(a, list) else Alert(str(a)) for a in document.get("unsent", ()))
            return cls(
                reported, str(document.get("last", "")), tuple(map(str, document.get("said", ()))), tuple(unsent)
            )
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()

    def dump(self) -> str:
        document = {"told": self.reported, "last": self.last, "said": self.lines, "unsent": self.unsent}
        return json.dumps(document, sort_keys=True)

    def order(self, feeds: Iterable[str]) -> list[str]:
        """Returns the feeds by name, beginning after the last checked one."""
        names = sorted(feeds)
        return [*(n for n in names if n > self.last), *(n for n in names if n <= self.last)]


@dataclass
class Tick:
    """The result of one tick over all feeds: `events` to store, `news` for operators, and the new cursor."""

    session: RunSession
    cursor: SensorCursor
    events: list[dg.AssetCheckEvaluation] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    alerts: dict[str, Alert] = field(default_factory=dict)
    looked: int = 0

    def run(self, instance: dg.DagsterInstance, clock: Callable[[], float]) -> None:
        """Evaluate the feeds until all are done or time is up, by `clock` in seconds."""
        until = clock() + SECONDS
        files = read_feeds(self.session.project, self.session.project.environ())
        self.news += [f"not loaded: {e.message}" for e in files.broken.values()]
        for name in files.retired.keys() & self.cursor.reported.keys():
            self._end(name, self.cursor.reported[name][1])
        self.cursor.reported = {n: state for n, state in self.cursor.reported.items() if n in files.feeds}
        with kept_open(instance), ExitStack() as opened:
            keys = {self.session.keys(f).landed: f for f in files.feeds}
            entries = (r.asset_entry for r in instance.get_asset_records([*keys]))
            newest = {keys[e.asset_key]: e.last_materialization_storage_id or 0 for e in entries}
            self.session = opened.enter_context(self.session.sharing(files.feeds.values()))
            for name in self.cursor.order(files.feeds):
                if clock() > until:
                    self.news.append(f"out of time before {name}: the next tick begins there")
                    break
                self._check(instance, files.feeds[name], newest.get(name, 0))
                self.cursor.last = name

    def send(self) -> None:
        """Send news, and lines that could not be sent before, to the receivers in `notify.yaml`.

        Lines equal to the last tick's are not sent again.
        """
        alerts = {" ".join(line.split()): self.alerts.get(line, Alert(line)) for line in self.news}
        lines = tuple(alerts)
        fresh = (*self.cursor.unsent, *(a for line, a in alerts.items() if line not in self.cursor.lines))[-UNSENT:]
        self.cursor.lines, self.cursor.unsent = lines[-UNSENT:], ()
        try:
            settings = self.session.project.notify()
            if fresh and settings != NotifySettings():
                notify(settings, f"Sluice, {self.session.project.root.name}:", fresh)
        except SluiceError as error:
            self.cursor.unsent = fresh
            self.news.append(f"not sent: {error.message}")

    def _check(self, instance: dg.DagsterInstance, feed: Feed, newest: int) -> None:
        try:
            with self.session.open_ports(feed) as ports:
                ledger = Ledger(ports.lake, feed.stored, ports.clock)
                keys = self.session.keys(feed.name)
                unseen = internals.planned_evaluations(instance, [dg.AssetCheckKey(keys.landed, FEED_HEALTH)], ())
                re_report.settle(instance, feed, keys, partial(LedgerView.open, feed, ports, keys, ledger))
                watched = watch(ports, feed, ledger)
        except SluiceError as error:
            self.news.append(f"{feed.name} could not be checked: {error.message}")
            return
        except Exception as error:  # a tick that fails keeps no cursor: the next one would end at this feed, too
            log.exception("%s could not be checked", feed.name)
            self.news.append(f"{feed.name} could not be checked: unforeseen {type(error).__name__}")
            return
        self.looked += 1
        self._report(instance, feed.name, watched, newest, unseen=bool(unseen))

    def _report(
        self, instance: dg.DagsterInstance, name: str, result: WatchResult, newest: int, *, unseen: bool
    ) -> None:
        """Report findings that appeared or passed, and evaluate the check for them and after each materialization.

        Dagster shows a check that is older than the materialization as not evaluated. `unseen`: a run ended before it
        evaluated the check.
        """
        before, after = self.cursor.reported.get(name), (newest, tuple(sorted(f.about for f in result.findings)))
        earlier = before[1] if before else ()
        new = {f"{name}: {f}": f for f in result.findings if f.about not in earlier}
        self.news += new
        self.alerts |= {n: Alert(f"{name}: {f.as_alert}", f"{name} {f.about}", f.severe) for n, f in new.items()}
        self._end(name, [about for about in earlier if about not in after[1]])
        if before != after or unseen:
            # About the newest event: one reported in this tick is newer than `newest`.
            self.events.append(
                feed_checks.evaluate_feed(
                    instance, self.session.keys(name).landed, FEED_HEALTH, feed_checks.check_health(result)
                )
            )
            self.cursor.reported[name] = after

    def _end(self, name: str, findings: Iterable[str]) -> None:
        """Report that findings of a feed have passed, or that it is retired."""
        ended = {f"{name}: passed: {about}": about for about in findings}
        self.news += ended
        self.alerts |= {n: Alert(n, f"{name} {about}", ended=True) for n, about in ended.items()}

    @property
    def summary(self) -> str:
        """The remaining findings, then new ones."""
        standing = {n: len(about) for n, (_, about) in sorted(self.cursor.reported.items()) if about}
        feeds = join_first((f"{n} ({count})" for n, count in standing.items()), SHOWN)
        looked = f"{self.looked} feed{'' if self.looked == 1 else 's'} checked"
        head = f"{looked}; findings in {feeds}" if standing else f"{looked}; no findings"
        more = [f"… {len(self.news) - SHOWN} more in the log"] if len(self.news) > SHOWN else []
        return "\n".join([head, *self.news[:SHOWN], *more])
