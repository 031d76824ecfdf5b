"""When a schedule looks at what is owed: whenever windows have closed, and soon after a run that left something behind.

Between closings a tick costs one question to Dagster. So a catch-up goes on within minutes, one run after the other,
however many windows it has; and after a run that failed, the next closing is soon enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import dagster as dg

from sluice.assets.fleet_runs import DONE_TAG, LEFT_TAG
from sluice.assets.windows import closing_cron, closings_until
from sluice.pipelines.feed.sections import WindowSettings

MORE_TAG = "sluice/more"
"""Tag of a run after which more is owed: it was asked for a part, or left the rest when its time was up."""

UNTIL_TAG = "sluice/until"
"""Tag of a run over several windows: its partition is the first of them, and this is where they end."""

PENDING_TAG = "sluice/pending"
"""Tag of a run: the first window of its request that had not settled, and was left to a later run."""

BETWEEN = "*/5 * * * *"
"""When the schedule ticks besides, to go on with a catch-up."""


class Looks:
    """When the schedule of a job looks. `windows`: those of its feeds."""

    def __init__(self, job: str, windows: Iterable[WindowSettings]) -> None:
        self._job, self._windows = job, [*dict.fromkeys(windows)]
        self._last: int | None = None

    @property
    def crons(self) -> list[str]:
        return [*dict.fromkeys((*sorted(map(closing_cron, self._windows)), BETWEEN))]

    def is_due(self, instance: dg.DagsterInstance, at: datetime) -> bool:
        """Whether windows have closed since the last look of this process, or the job's last run left something."""
        now = int(at.timestamp() * 1000)
        last, self._last = self._last, now
        closed = last is None or any(closings_until(w, last) < closings_until(w, now) for w in self._windows)
        return closed or _goes_on(instance, self._job)

    @property
    def quiet(self) -> dg.SkipReason:
        """Why a tick does not look."""
        return dg.SkipReason("no window has closed since the last look, and the last run left nothing behind")


def _goes_on(instance: dg.DagsterInstance, job: str) -> bool:
    for run in instance.get_runs(dg.RunsFilter(job_name=job), limit=1):
        well = run.status is dg.DagsterRunStatus.SUCCESS or run.tags.get(DONE_TAG, "0") != "0"
        return run.is_finished and well and bool(run.tags.get(MORE_TAG) or run.tags.get(LEFT_TAG))
    return False
