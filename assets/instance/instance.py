"""The project's Dagster instance: a local folder, unless DAGSTER_HOME names another.

Promises: telemetry is off. Existing files in the folder are never overwritten. If a run's process died without a word,
the next process of this machine finds the lock that it held free, and marks the run as failed. When Dagster knows that
a run has ended, this is evidence for a run that wants to take its batch over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO

import dagster as dg
from sqlalchemy.exc import OperationalError

from sluice.assets.instance.internals import shows_nothing
from sluice.assets.instance.storage import open_quietly, read_migrations_once
from sluice.pipelines.errors import DagsterUnavailable, SetupError, UsageError
from sluice.pipelines.ports import Ports
from sluice.pipelines.util import extras
from sluice.resources.liveness import Informed, machine, process_gone
from sluice.resources.project import Project

log = logging.getLogger("sluice.instance")
_LOCKS = "attended"
"""The folder of the runs' locks, in Dagster's home."""
_START_SECONDS = 180
"""Dagster's default time limit for the start of a run, where none is set."""
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
    # for the other report (`sluice_reports`). The ledger keeps runs apart that do not wait.
    granularity: run
    default_limit: 1
retention:
  # For how many days Dagster keeps the ticks of schedules and sensors. Of runs it keeps everything: `sluice prune`.
  schedule: {purge_after_days: {skipped: 2, started: 30, success: 30, failure: 30}}
  sensor: {purge_after_days: {skipped: 2, started: 30, success: 30, failure: 30}}
  auto_materialize: {purge_after_days: {skipped: 2, started: 30, success: 30, failure: 30}}
"""


def prepare_home(project: Project) -> Path:
    """The instance's folder. If the project's own is missing, it is made, with its dagster.yaml."""
    home = project.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if home.is_relative_to(project.state) and not config.exists():
        config.write_text(DAGSTER_YAML)
    return home


def home_of(project: Project, instance: dg.DagsterInstance) -> Path:
    """Where the instance's runs keep their locks: the project's home, or the instance's own folder where that home is
    not in use, as in a project of one's own whose Dagster found no DAGSTER_HOME."""
    home = project.dagster_home
    return home if home.is_dir() else Path(instance.root_directory)


def check_home(project: Project, arguments: Sequence[str]) -> None:
    """Raise UsageError if a process with these arguments shows a temporary home that `dagster dev` made: it would be
    empty and know nothing of the project's runs."""
    if shows_nothing(arguments, os.environ):
        raise UsageError(
            "Dagster was started without DAGSTER_HOME: this is an empty home, which goes away with it",
            remedy=f"sluice ui, or start Dagster with DAGSTER_HOME={prepare_home(project)}",
        )


@contextmanager
def open_instance(project: Project) -> Iterator[dg.DagsterInstance]:
    """The project's instance, for runs in this process: their output goes to the run's log, not to the terminal.

    Raises DagsterUnavailable if its storage does not answer, now or while the block runs; SetupError if the package for
    that storage is not installed.
    """
    read_migrations_once()
    home = prepare_home(project)
    with _translate_storage_errors(home), open_quietly(home) as instance:
        yield instance


@contextmanager
def _translate_storage_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        causes = list(_list_causes(error))
        if away := next((c for c in causes if isinstance(c, OperationalError)), None):
            message = str(away.orig or away).strip().splitlines()[0]
            way = f"start it, or fix `storage` in {home / 'dagster.yaml'}"
            if isinstance(away.orig, sqlite3.Error):
                way = f"check that {home} may be written to"
            raise DagsterUnavailable(
                f"Dagster's database does not answer: {message}",
                remedy=f"{way}, and run again: landed rows are safe",
            ) from error
        if any(isinstance(c, ModuleNotFoundError) and c.name == "dagster_postgres" for c in causes):
            raise extras.build_missing_error("dagster_postgres") from error
        if isinstance(error, dg.DagsterInvalidConfigError):  # its text may have the file's values, secrets included
            unset = re.findall(r'environment variable "(\w+)" which is not set', str(error))
            why = f"${', $'.join(dict.fromkeys(unset))} is not set" if unset else "its settings are invalid"
            command = f"DAGSTER_HOME={home} dagster instance info shows the reason"
            raise SetupError(
                f"{home / 'dagster.yaml'} cannot be used: {why}",
                remedy="set it for this process, as for Dagster's own: docs/deploying.md" if unset else command,
            ) from None
        raise


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def limit_pools(instance: dg.DagsterInstance, pools: Iterable[str]) -> None:
    """Give pools without a limit the instance's default now: Dagster does so only after their first runs have started.

    Without a default, the limit is one run, where pools count runs. Where they count steps, a killed run would keep the
    only slot.
    """
    log, default = instance.event_log_storage, instance.global_op_concurrency_default_limit
    granularity = instance.get_concurrency_config().pool_config.pool_granularity
    counts_runs = granularity is not None and granularity.value == "run"
    if not log.supports_global_concurrency_limits or not (default or counts_runs):
        return
    for pool in sorted(set(pools) - log.get_concurrency_keys()):
        if default:
            log.initialize_concurrency_limit_to_default(pool)
        else:
            log.set_concurrency_slots(pool, 1)


# -- whether a run's process lives


@contextmanager
def holding(home: Path, run: str) -> Iterator[None]:
    """Hold the run's lock while the block runs. The system releases it however this process ends.

    The run's process holds it, once for the whole run or step by step, also in several threads.
    """
    path = home / _LOCKS / run
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f".{run}.{os.getpid()}.{threading.get_ident()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{machine()} {_name_system()}".strip())
        file.flush()
        ours = _place_lock(home, run, fresh)
        try:
            yield
        finally:
            if ours:
                path.unlink(missing_ok=True)


def _place_lock(home: Path, run: str, fresh: Path) -> bool:
    """Make the lock visible when it is already held, so that it is never seen free. False if this run's process
    holds one already. A lock that a killed process of this run left is replaced."""
    path = fresh.with_name(run)
    try:
        path.hardlink_to(fresh)
    except FileExistsError:
        if is_held(home, run) is not False:
            return False
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return True


def is_held(home: Path, run: str) -> bool | None:
    """Returns true if a process holds the run's lock, false if that process died, and None if unknown.

    It is unknown without a lock file, or if another machine that shares the home made it: a shared folder may not
    report the other machine's locks. Containers of one machine share its kernel, and so their locks.
    """
    try:
        with (home / _LOCKS / run).open("r+") as file:
            return not _try_lock(file) if _is_of_this_machine(file.read()) else None
    except FileNotFoundError:
        return None


def _is_of_this_machine(lock: str) -> bool:
    """Returns whether this machine made the lock, since its last boot or, under the same name, before."""
    words = lock.split()  # none before locks said where they are held
    return not words or words[0] == machine().split()[0] or words[-1] == _name_system()


def _name_system() -> str:
    """Returns the name of this machine or container across boots; empty where others have the same."""
    name = socket.gethostname()
    if name.startswith("localhost"):
        return ""
    with suppress(OSError):
        return f"{name}/{Path('/etc/machine-id').read_text().strip()}"
    return name


def let_go(home: Path, run: str) -> None:
    """Forget the lock of a run that has ended."""
    (home / _LOCKS / run).unlink(missing_ok=True)


def bury_dead_runs(instance: dg.DagsterInstance, home: Path) -> list[str]:
    """Mark runs as failed whose lock is free. Returns their ids."""
    locks = home / _LOCKS  # a home that no run has used may be read-only
    run_ids = sorted(p.name for p in locks.iterdir() if not p.name.startswith(".")) if locks.is_dir() else ()
    return [run for run in run_ids if has_died(instance, home, run) and _bury(instance, home, run)]


def has_died(instance: dg.DagsterInstance, home: Path, run: str) -> bool | None:
    """Returns whether the run's process died with its lock; None as `is_held`.

    Dagster's multiprocess executor continues when the process of a step dies: the run dies only with its own process.
    """
    is_locked = is_held(home, run)
    return None if is_locked is None else not is_locked and not _has_process_here(instance, home, run)


def _has_process_here(instance: dg.DagsterInstance, home: Path, run: str) -> bool:
    """Returns whether the process that Dagster noted lives, if the run's lock was made among the same processes."""
    with suppress(FileNotFoundError):
        if f"{(home / _LOCKS / run).read_text()} ".startswith(f"{machine()} "):
            standing = instance.get_run_by_id(run)
            noted = next(list_processes(instance, run), None) if standing and not standing.is_finished else None
            return noted is not None and not process_gone(*noted)
    return False


def list_processes(instance: dg.DagsterInstance, run: str) -> Iterator[tuple[int, float]]:
    """The processes that Dagster noted for the run, the newest first, and when (s since the epoch)."""
    records = instance.get_records_for_run(run, of_type=dg.DagsterEventType.ENGINE_EVENT, ascending=False).records
    for entry in (r.event_log_entry for r in records):
        event = entry.dagster_event
        noted = event.engine_event_data.metadata.get("pid") if event else None
        if isinstance(noted, dg.TextMetadataValue) and (noted.text or "").isdigit():
            yield int(noted.text or ""), entry.timestamp


def _bury(instance: dg.DagsterInstance, home: Path, run: str) -> bool:
    ended = end_run(instance, run, "the process of this run ended without a word; the next run goes on")
    let_go(home, run)
    return ended


def end_unlaunched_runs(instance: dg.DagsterInstance, runs: dg.RunsFilter) -> list[str]:
    """Mark a schedule's runs as failed that Dagster made and never launched, as when its daemon was killed in between:
    nothing else would launch or end them. Returns their ids.

    Dagster's time limit for the start of a run applies.
    """
    before = datetime.now(UTC) - timedelta(seconds=instance.run_monitoring_start_timeout_seconds or _START_SECONDS)
    not_started = [dg.DagsterRunStatus.NOT_STARTED]
    unlaunched = dg.RunsFilter(job_name=runs.job_name, tags=runs.tags, statuses=not_started, created_before=before)
    run_ids = [run.run_id for run in instance.get_runs(unlaunched)]
    return [run for run in run_ids if end_run(instance, run, "this run was made and never launched")]


def end_run(instance: dg.DagsterInstance, run_id: str, why: str) -> bool:
    """Mark a run as failed, or as canceled if somebody asked for that, and free its slots. False if it has ended."""
    run = instance.get_run_by_id(run_id)
    if run is None or run.is_finished:
        return False
    if run.status is dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, why)
    else:
        instance.report_run_failed(run, why)
    instance.event_log_storage.free_concurrency_slots_for_run(run_id)
    return True


def _try_lock(file: IO[str]) -> bool:
    """Returns true if this process got the lock; closing the file releases it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- what Dagster knows


def with_dagster_liveness(ports: Ports, instance: dg.DagsterInstance) -> Ports:
    """Opens the ports, with Dagster as further evidence of dead runs."""
    heartbeats = ports.liveness.liveness if isinstance(ports.liveness, Informed) else ports.liveness
    return replace(ports, liveness=Informed(heartbeats, partial(_read_final_statuses, instance)))


def ended_runs(project: Project, runs: Iterable[str]) -> Mapping[str, str]:
    """The runs that the project's instance knows as ended (see `Informed`): none if it is missing or unreachable."""
    if not project.dagster_home.is_dir():
        return {}
    try:
        with open_instance(project) as instance:
            return _read_final_statuses(instance, runs)
    except Exception as error:  # noqa: BLE001 - whatever its storage raises: heartbeats report it, too
        log.warning("Dagster could not be asked which runs have ended: %s", error)
        return {}


def _read_final_statuses(instance: dg.DagsterInstance, runs: Iterable[str]) -> Mapping[str, str]:
    known_runs = (instance.get_run_by_id(run) for run in dict.fromkeys(runs) if run)
    return {run.run_id: run.status.value for run in known_runs if run and run.is_finished}
