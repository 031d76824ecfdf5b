"""How the runs of feeds ended lately, as Dagster knows it. Makes no instance where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg

from sluice.assets.health import Home
from sluice.assets.instance import open_instance
from sluice.assets.session import ERROR_TAG, FEED_TAG
from sluice.resources.project import Project

LATELY = timedelta(days=1)
MOST = 10_000
"""The newest runs that are counted."""


def recent_runs(project: Project, feeds: Sequence[str]) -> Counter[tuple[str, str, str]]:
    """(feed, status in Dagster's words, the error's class or nothing) of each run of the last day, counted.

    Raises DagsterUnavailable, SetupError.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    if not feeds or not Home(project.dagster_home).used:
        return found
    lately = dg.RunsFilter(tags={FEED_TAG: list(feeds)}, created_after=datetime.now(UTC) - LATELY)
    with open_instance(project) as instance:
        for run in instance.get_runs(lately, limit=MOST):
            failed = run.status is dg.DagsterRunStatus.FAILURE
            error = run.tags.get(ERROR_TAG, "") if failed else ""
            found[run.tags[FEED_TAG], run.status.value.lower(), error] += 1
    return found
