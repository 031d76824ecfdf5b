"""The project's Dagster instance: a local folder, unless DAGSTER_HOME names another.

Promises: telemetry is off; what stands in the folder is never overwritten; runs whose process died without a word
are found by the lock that it held, and marked as failed by whoever comes next.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from dagster._core.execution.compute_logs import redirect_to_file
from dagster._core.instance.ref import InstanceRef
from dagster._core.storage.compute_log_manager import CapturedLogContext, ComputeIOType
from dagster._core.storage.local_compute_log_manager import (
    IO_TYPE_EXTENSION,
    LocalComputeLogManager,
)
from dagster._serdes import ConfigurableClassData
from dagster._utils import ensure_file, touch_file

from sluice.resources.project import Project

DAGSTER_YAML = """\
# Dagster's instance for this project: runs, events and logs in SQLite and files, in this folder.
# Yours to change: Sluice writes it once.
telemetry:
  enabled: false
nux:
  enabled: false
concurrency:
  pools:
    # A run from the UI, a backfill or a schedule waits for the other run of its feed (pool `sluice_<feed>`), a report
    # for the other report (`sluice_reports`). What keeps two runs apart that do not wait is the ledger.
    granularity: run
    default_limit: 1
"""


def prepare_home(project: Project) -> Path:
    """The instance's folder; the project's own is made, with its dagster.yaml, when it is missing."""
    home = project.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if home.is_relative_to(project.state) and not config.exists():
        config.write_text(DAGSTER_YAML)
    return home


@contextmanager
def open_instance(project: Project) -> Iterator[dg.DagsterInstance]:
    """The project's instance, for runs in this process: their output goes to the run's log and not to our terminal."""
    ref = InstanceRef.from_dir(str(prepare_home(project)))
    if ref.compute_logs_data.class_name == LocalComputeLogManager.__name__:
        quiet = ConfigurableClassData(__name__, QuietLogs.__name__, ref.compute_logs_data.config_yaml)
        ref = ref._replace(compute_logs_data=quiet)
    with dg.DagsterInstance.from_ref(ref) as instance:
        yield instance


def limit_pools(instance: dg.DagsterInstance, pools: Iterable[str]) -> None:
    """Give new pools the instance's default limit now: Dagster does so only once it has let their first runs go."""
    if instance.global_op_concurrency_default_limit and instance.event_log_storage.supports_global_concurrency_limits:
        known = instance.event_log_storage.get_concurrency_keys()
        for pool in sorted(set(pools) - known):
            instance.event_log_storage.initialize_concurrency_limit_to_default(pool)


class QuietLogs(LocalComputeLogManager):
    """Dagster's local logs of stdout and stderr, without repeating every line on the terminal."""

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Iterator[CapturedLogContext]:
        out, err = (
            self.get_captured_local_path(log_key, IO_TYPE_EXTENSION[kind])
            for kind in (ComputeIOType.STDOUT, ComputeIOType.STDERR)
        )
        ensure_file(out)
        ensure_file(err)
        with redirect_to_file(sys.stdout, out), redirect_to_file(sys.stderr, err):
            yield CapturedLogContext(log_key)
        touch_file(str(self.get_captured_local_path(log_key, "complete")))


@contextmanager
def holding(home: Path, run: str) -> Iterator[None]:
    """Hold the run's lock while the block runs; the system lets go of it however this process ends."""
    path = _locks(home) / run
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def bury_dead_runs(instance: dg.DagsterInstance, home: Path) -> list[str]:
    """Mark as failed the runs whose lock nobody holds any more; their ids."""
    return [path.name for path in sorted(_locks(home).iterdir()) if _bury(instance, path)]


def _bury(instance: dg.DagsterInstance, path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        run = instance.get_run_by_id(path.name)
        dead = run is not None and not run.is_finished
        if run is not None and dead:
            instance.report_run_failed(run, "the process of this run ended without a word; the next run goes on")
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
        path.unlink(missing_ok=True)
        return dead


def _locks(home: Path) -> Path:
    folder = home / "attended"
    folder.mkdir(exist_ok=True)
    return folder
