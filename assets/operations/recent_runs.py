"""How the runs of feeds ended lately, as Dagster knows it. Makes no instance where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg

from sluice.assets.instance.instance import open_instance
from sluice.assets.operations.dagster_health import Home
from sluice.assets.runs.fleet_runs import (
    DONE_TAG,
    FAILED_TAG,
    FLEET_TAG,
    LEFT_TAG,
    asked_of,
    at_work_at_the_end,
    errors_in,
    feed_at_work,
    named_in,
)
from sluice.assets.runs.run_session import ERROR_TAG, FEED_TAG
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.resources.project import Project

LATELY = timedelta(days=1)
MOST = 10_000
"""The newest runs that are counted."""
Ended = tuple[str, str, str]
"""A feed, the status of a run of it in Dagster's words, and the class of the error or nothing."""
FAILED, SUCCEEDED = (s.value.lower() for s in (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS))


def recent_runs(project: Project, feeds: Sequence[Feed]) -> Counter[Ended]:
    """The runs of the last day, counted. A run over many feeds is one of each feed that it began.

    Raises DagsterUnavailable, SetupError.
    """
    found: Counter[Ended] = Counter()
    if not feeds or not Home(project.dagster_home).used:
        return found
    lately = datetime.now(UTC) - LATELY
    own = {FEED_TAG: [f.name for f in feeds]}
    of_many = {FLEET_TAG: sorted({SHARED, *(f.schedule for f in feeds)})}
    by_name = {f.name: f for f in feeds}
    with open_instance(project) as instance:
        for run in instance.get_runs(dg.RunsFilter(tags=own, created_after=lately), limit=MOST):
            failed = run.status is dg.DagsterRunStatus.FAILURE
            found[run.tags[FEED_TAG], run.status.value.lower(), run.tags.get(ERROR_TAG, "") if failed else ""] += 1
        for run in instance.get_runs(dg.RunsFilter(tags=of_many, created_after=lately), limit=MOST):
            found.update(ended for ended in _of_each(instance, run, by_name) if ended[0] in by_name)
    return found


def _of_each(instance: dg.DagsterInstance, run: dg.DagsterRun, feeds: Mapping[str, Feed]) -> Iterator[Ended]:
    """What became of each feed in a run over many."""
    again = {feed_at_work(step) for step in run.step_keys_to_execute or ()}  # from where an earlier one failed
    named = again & feeds.keys() or set(asked_of(run) or ())
    named = named or {f.name for f in feeds.values() if f.schedule == run.tags[FLEET_TAG]}
    status = run.status.value.lower()
    if not run.is_finished:
        yield from ((name, status, "") for name in named)
    elif DONE_TAG in run.tags:
        failed, errors = named_in(run, FAILED_TAG), errors_in(run)
        well = status if run.status is dg.DagsterRunStatus.CANCELED else SUCCEEDED
        yield from ((name, FAILED, errors.get(name, "")) for name in failed)
        yield from ((name, well, "") for name in named - failed - named_in(run, LEFT_TAG))
    else:  # its process died
        yield from ((name, status, "") for name in at_work_at_the_end(instance, run))
