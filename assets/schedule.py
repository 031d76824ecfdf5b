"""Which windows the schedule requests: closed, owed, oldest first, a few at a time.

It reads the feed's ledger, where something came since the last tick, and never talks to Kafka. It leaves alone windows
that are queued or running. A window that failed three times, for reasons that another try does not mend, waits for
somebody to look: a run by hand that succeeds clears it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import dagster as dg

from sluice.assets.books import Books
from sluice.assets.fleet_runs import asked_of
from sluice.assets.internals import ENDED, PARTITION_TAG
from sluice.assets.session import AGAIN_TAG, FEED_TAG, RunSession
from sluice.assets.settling import settle
from sluice.assets.shown import Keys
from sluice.assets.windows import closing_cron, closing_words
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.vocabulary.units import show_window

AT_ONCE = 6
"""How many windows one tick requests at most."""

ATTEMPTS = 3
"""How many runs of one window the schedule requests at most."""

_CHUNK = 100  # windows whose runs are looked up at once
UNDER_WAY = [s for s in dg.DagsterRunStatus if s not in ENDED]


def schedule_of(
    feed: Feed, job: str, windows: dg.TimeWindowPartitionsDefinition, session: RunSession
) -> dg.ScheduleDefinition:
    """Requests runs of `job` for the feed's owed windows whenever one has closed. Off until somebody switches it on."""

    shown = session.keys(feed.name)

    @dg.schedule(
        name=schedule_name(job),
        job_name=job,
        cron_schedule=closing_cron(feed.window),
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=f"Lands the closed windows of {feed.name} that are owed, {closing_words(feed.window)}."
        f" Oldest first, {AT_ONCE} at a time.",
    )
    def windows_owed(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        owed = look_at_windows(context.instance, session, session.feed(feed.name))
        keys = [key for w in owed if windows.has_partition_key(key := show_window(w))]
        asked = list(islice(_free(context.instance, feed.name, shown, job, keys), AT_ONCE))
        now = context.scheduled_execution_time.isoformat()  # a repeated tick requests nothing twice
        return [dg.RunRequest(f"{key} at {now}", partition_key=key) for key in asked] or _nothing(feed.name, keys)

    return windows_owed


def schedule_name(job: str) -> str:
    """The name of the schedule that requests runs of a job for windows."""
    return f"{job}_windows"


def look_at_windows(instance: dg.DagsterInstance, session: RunSession, feed: Feed) -> list[int]:
    """The owed windows, oldest first, by the ledger alone. Also reports windows that killed runs left unreported."""
    with session.open_edges(feed) as edges:
        keys = session.keys(feed.name)
        ledger = Ledger(edges.lake, feed.name, edges.clock)
        settle(instance, feed, keys, lambda: Books.open(feed, ledger, edges, keys))
        return session.owed.of(feed, edges)


def _free(instance: dg.DagsterInstance, feed: str, shown: Keys, job: str, keys: Sequence[str]) -> Iterator[str]:
    """The windows that no run is working on, and that have not failed too often."""
    for at in range(0, len(keys), _CHUNK):
        chunk = keys[at : at + _CHUNK]
        busy, failed = _busy(instance, feed, shown, chunk), _failure_counts(instance, job, chunk)
        yield from (k for k in chunk if k not in busy and failed[k] < ATTEMPTS)


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
    """How often each window failed since it last succeeded. Failures that another try may mend do not count."""
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
    shown = ", ".join(keys[:AT_ONCE]) + (f" … {len(keys) - AT_ONCE} more" if len(keys) > AT_ONCE else "")
    return dg.SkipReason(f"{len(keys)} windows are owed, all under way or failed {ATTEMPTS} times: {shown}")
