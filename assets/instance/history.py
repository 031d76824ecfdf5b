"""What Dagster keeps of runs that ended long ago, on files of this machine, and how to remove it.

On SQLite, Dagster keeps a file of events for each run, and a folder with what its steps printed: most of a home's size.
Materializations, checks and the run itself stand in other files as well. So a run's own log can go, and its windows
stay green, as its entry stays in the list of runs. Dagster's own `delete_run` would take the materializations along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import dagster as dg

from sluice.assets.instance import internals
from sluice.pipelines.errors import SetupError
from sluice.resources.project import Project

_CHUNK = 100


@dataclass(frozen=True, slots=True)
class RunLog:
    """The log of a run that has ended: its files, and their size in bytes."""

    run: str
    job: str
    files: tuple[Path, ...]
    bytes: int


def old_logs(instance: dg.DagsterInstance, project: Project, before: datetime) -> Iterator[RunLog]:
    """The logs of runs that ended before that time. Raises SetupError if the instance keeps its history elsewhere."""
    if not internals.keeps_events_here(instance):
        raise SetupError(
            "Dagster keeps its history in a database here, not in files of each run",
            remedy="its rows are removed there: sluice docs dagster",
        )
    kept = internals.run_logs(instance)
    for at in range(0, len(kept), _CHUNK):
        of = dg.RunsFilter(run_ids=kept[at : at + _CHUNK], statuses=[*internals.ENDED], updated_before=before)
        for run in instance.get_runs(of):
            files = (*internals.files_of_run(instance, run.run_id), *_printed(project, run.run_id))
            yield RunLog(run.run_id, run.job_name, files, sum(_size(f) for f in files))


def remove(instance: dg.DagsterInstance, log: RunLog) -> None:
    """Remove the log. Idempotent."""
    for path in log.files:
        path.unlink(missing_ok=True)
    instance.compute_log_manager.delete_logs(prefix=[log.run])


def _printed(project: Project, run: str) -> Iterator[Path]:
    """Returns the files with the output of the run's steps, at Dagster's default location."""
    folder = project.dagster_home / "storage" / run
    yield from (path for path in folder.rglob("*") if path.is_file())


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
