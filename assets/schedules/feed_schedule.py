"""Which windows the schedule requests: closed, owed, oldest first, windows in a row by one run.

It reads the feed's ledger, where something came since the last tick, and never talks to Kafka. It leaves alone windows
that are queued or running, and asks for nothing while a run over several windows is at work. A window that failed is
asked for by itself. One that failed three times, for reasons that another try does not fix, waits for
somebody to look: a run by hand that succeeds clears it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import dagster as dg

from sluice.assets.checks.re_report import settle
from sluice.assets.events.ledger_view import LedgerView
from sluice.assets.instance.internals import ENDED, PARTITION_TAG, RANGE_TAGS
from sluice.assets.runs.fleet_runs import asked_of
from sluice.assets.runs.run_session import AGAIN_TAG, FEED_TAG, RunSession
from sluice.assets.runs.tick_policy import MORE_TAG, UNTIL_TAG, TickPolicy
from sluice.assets.specs.asset_specs import Keys
from sluice.assets.specs.partitions_def import closing_words
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.util.units import parse_window, show_window

RUNS = 6
"""How many runs one tick requests at most."""
WINDOWS = 1000
"""How many windows one tick asks for at most."""

ATTEMPTS = 3
"""How many runs of one window the schedule requests at most."""

_SHOWN = 6
_CHUNK = 100  # windows whose runs are looked up at once
UNDER_WAY = [s for s in dg.DagsterRunStatus if s not in ENDED]


def schedule_of(
    feed: Feed, job: str, windows: dg.TimeWindowPartitionsDefinition, session: RunSession
) -> dg.ScheduleDefinition:
    """Requests runs of `job` for the feed's owed windows whenever one has closed. Off until somebody switches it on."""

    shown, looks = session.keys(feed.name), TickPolicy(job, [feed.window])

    @dg.schedule(
        name=schedule_name(job),
        job_name=job,
        cron_schedule=looks.crons,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=f"Lands the closed windows of {feed.name} that are owed, {closing_words(feed.window)}."
        " Oldest first; a run for those in a row. While more are owed, it goes on a few minutes after each run.",
    )
    def windows_owed(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        if not looks.is_due(context.instance, context.scheduled_execution_time):
            return looks.quiet
        owed = look_at_windows(context.instance, session, session.feed(feed.name))
        keys = [key for w in owed if windows.has_partition_key(key := show_window(w))]
        if at_work := _catching_up(context.instance, feed.name, shown):
            return dg.SkipReason(f"a run is at work on the windows of {feed.name} from {at_work} on")
        rows = _rows(context.instance, feed.name, shown, job, keys[:WINDOWS])
        now = context.scheduled_execution_time.isoformat()  # a repeated tick requests nothing twice
        more = len(keys) > WINDOWS or len(rows) > RUNS
        return [_asked(feed, shown, row, now, more) for row in rows[:RUNS]] or _nothing(feed.name, keys)

    return windows_owed


def _asked(feed: Feed, shown: Keys, row: Sequence[str], now: str, more: bool) -> dg.RunRequest:
    """A run of the first window, which lands those after it as well."""
    tags = {MORE_TAG: "1"} if more else {}
    if len(row) == 1:
        return dg.RunRequest(f"{row[0]} at {now}", partition_key=row[0], tags=tags)
    until = show_window(parse_window(row[-1]) + feed.window.length)
    config = {"ops": {shown.landed.to_python_identifier(): {"config": {"until": until}}}}
    return dg.RunRequest(f"{row[0]} at {now}", partition_key=row[0], run_config=config, tags=tags | {UNTIL_TAG: until})


def schedule_name(job: str) -> str:
    """The name of the schedule that requests runs of a job for windows."""
    return f"{job}_windows"


def look_at_windows(instance: dg.DagsterInstance, session: RunSession, feed: Feed) -> list[int]:
    """The owed windows, oldest first, by the ledger alone. Also reports windows that killed runs left unreported."""
    with session.open_ports(feed) as edges:
        keys = session.keys(feed.name)
        ledger = Ledger(edges.lake, feed.name, edges.clock)
        settle(instance, feed, keys, lambda: LedgerView.open(feed, ledger, edges, keys))
        return session.owed.of(feed, edges)


def _catching_up(instance: dg.DagsterInstance, feed: str, shown: Keys) -> str:
    """The first window of a run over several windows of the feed that is queued or at work; empty if there is none."""
    runs = instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY))
    return next((first for r in runs if is_of(r, feed, shown) and (first := _first_of_several(r))), "")


def _first_of_several(run: dg.DagsterRun) -> str:
    """The first window of a run over several, the schedule's or a backfill's; empty for another run."""
    return run.tags.get(PARTITION_TAG if UNTIL_TAG in run.tags else RANGE_TAGS[0], "")


def _rows(instance: dg.DagsterInstance, feed: str, shown: Keys, job: str, keys: Sequence[str]) -> list[Sequence[str]]:
    """The windows that no run is working on and that have not failed too often, in rows with none of the others in
    between. One that has failed is a row by itself."""
    rows: list[list[str]] = [[]]
    for at in range(0, len(keys), _CHUNK):
        chunk = keys[at : at + _CHUNK]
        busy, failed = _busy(instance, feed, shown, chunk), _failure_counts(instance, job, chunk)
        for key in chunk:
            free = key not in busy and failed[key] < ATTEMPTS
            if free and not failed[key]:
                rows[-1].append(key)
            else:
                rows += [[key], []] if free else [[]]
    return [row for row in rows if row]


def _busy(instance: dg.DagsterInstance, feed: str, shown: Keys, keys: Sequence[str]) -> set[str]:
    """Windows with a run under way or queued, from any job or backfill."""
    runs = instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY, tags={PARTITION_TAG: keys}))
    return {r.tags[PARTITION_TAG] for r in runs if is_of(r, feed, shown)}


def is_of(run: dg.DagsterRun, feed: str, shown: Keys) -> bool:
    """Whether the run is one of the feed's, which is shown under these keys, from any job or backfill."""
    asked = asked_of(run)
    if asked is not None:
        return feed in asked or not asked
    return run.tags.get(FEED_TAG) == feed or shown.landed in (run.asset_selection or ())


def _failure_counts(instance: dg.DagsterInstance, job: str, keys: Sequence[str]) -> Counter[str]:
    """How often each window failed since it last succeeded. Failures that another try may fix do not count."""
    failed: Counter[str] = Counter()
    succeeded: set[str] = set()
    for run in instance.get_runs(dg.RunsFilter(job_name=job, tags={PARTITION_TAG: keys})):  # newest first
        key = run.tags[PARTITION_TAG]
        if run.status is dg.DagsterRunStatus.SUCCESS:
            succeeded.add(key)
        elif run.is_finished and key not in succeeded and not run.tags.get(AGAIN_TAG):
            failed[key] += 1
    return failed


def _nothing(feed: str, keys: Sequence[str]) -> dg.SkipReason:
    if not keys:
        return dg.SkipReason(f"no closed window of {feed} is owed")
    shown = ", ".join(keys[:_SHOWN]) + (f" … {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
    return dg.SkipReason(f"{len(keys)} windows are owed, all under way or failed {ATTEMPTS} times: {shown}")
