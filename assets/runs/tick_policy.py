"""When a schedule checks pending windows: after windows have closed, and soon after a run that left some behind.

Between closings a tick costs one question to Dagster. So a catch-up goes on within minutes, one run after the other,
however many windows it has; and after a run that failed, the next closing is soon enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import dagster as dg

from sluice.assets.runs.run_config import DONE_TAG, LEFT_TAG
from sluice.assets.specs.partitions_def import closing_cron, closings_until
from sluice.pipelines.feed.sections import WindowSettings

MORE_TAG = "sluice/more"
"""Tag of a run after which more is pending: it was asked for a part, or left the rest when its time was up."""

UNTIL_TAG = "sluice/until"
"""Tag of a run over several windows: its partition is the first of them, and this is where they end."""

OPEN_WINDOWS_TAG = "sluice/open_windows"
"""Tag of a run: the first window of its request that was still open."""

BETWEEN = "*/5 * * * *"
"""When the schedule ticks besides, to go on with a catch-up."""


class TickPolicy:
    """When the schedule of a job looks. `windows`: those of its feeds."""

    def __init__(self, job: str, windows: Iterable[WindowSettings]) -> None:
        self._job, self._windows = job, [*dict.fromkeys(windows)]
        self._last: int | None = None
        self._newest: dg.DagsterRun | None = None

    @property
    def crons(self) -> list[str]:
        return [*dict.fromkeys((*sorted(map(closing_cron, self._windows)), BETWEEN))]

    def is_due(self, instance: dg.DagsterInstance, at: datetime) -> bool:
        """Whether windows have closed since the last look of this process, or the job's last run left something."""
        now = int(at.timestamp() * 1000)
        last, self._last = self._last, now
        closed = last is None or any(closings_until(w, last) < closings_until(w, now) for w in self._windows)
        self._newest = None if closed else _read_newest_run(instance, self._job)
        return closed or _is_unfinished(self._newest)

    @property
    def skip_reason(self) -> dg.SkipReason:
        """Why a tick does not look."""
        return dg.SkipReason(f"no window has closed since the last look{_describe(self._newest)}")


def _read_newest_run(instance: dg.DagsterInstance, job: str) -> dg.DagsterRun | None:
    return next(iter(instance.get_runs(dg.RunsFilter(job_name=job), limit=1)), None)


def _is_unfinished(run: dg.DagsterRun | None) -> bool:
    if run is None:
        return False
    well = run.status is dg.DagsterRunStatus.SUCCESS or run.tags.get(DONE_TAG, "0") != "0"
    return run.is_finished and well and bool(run.tags.get(MORE_TAG) or run.tags.get(LEFT_TAG))


def _describe(run: dg.DagsterRun | None) -> str:
    """Describes the newest run. It does not read the ledger, so it never reports that nothing is pending."""
    if run is None:
        return ""
    name = f"run {run.run_id[:8]}"
    if not run.is_finished:
        return f"; {name} has not ended (`sluice unstick` ends it if its process was killed)"
    if run.status is dg.DagsterRunStatus.SUCCESS:
        return f"; {name} completed its request"
    return f"; {name} did not succeed: the next look, when a window closes, requests the remaining windows again"
