"""The project and its Dagster, for `sluice doctor`: files that load, the instance's storage, whether its daemon lives.

Promises: nothing is written; looking at an instance does not create it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

import dagster as dg

from sluice.assets.instance.instance import open_instance
from sluice.assets.instance.internals import keeps_runs_here
from sluice.assets.instance.storage import open_quietly
from sluice.assets.jobs.report_assets import read_reports
from sluice.assets.operations.dead_runs import under_way
from sluice.assets.runs.run_config import (
    AT_WORK_TAG,
    DONE_TAG,
    FAILED_TAG,
    FLEET_TAG,
    LEFT_TAG,
    asked_of,
    errors_in,
    find_retried,
    named_in,
)
from sluice.assets.runs.run_session import ERROR_TAG, FEED_TAG, pool
from sluice.assets.specs.feed_files import FeedFiles
from sluice.pipelines.errors import docs_command
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.pipelines.model.health import Diagnosis, of_error, report_failure, report_ok, report_skipped, report_warning
from sluice.pipelines.util.units import join_first, many, show_about
from sluice.resources.health import Check, examine
from sluice.resources.project import Project

_DATABASES = ("history/runs.db", "history/runs/index.db", "schedules/schedules.db")
POOLS = "sluice_"
"""How the pools begin that runs of feeds and reports wait in."""
_POOLS_NAMED = 3
_ON = {"RUNNING", "AUTOMATICALLY_RUNNING"}


def examine_project(project: Project, files: FeedFiles) -> list[Diagnosis]:
    """Returns the checks of the project's files and its Dagster."""
    diagnoses = examine((project, files), FILES)
    home = Home(project.dagster_home)
    if not home.is_used:
        return [*diagnoses, report_skipped("Dagster", f"{home.folder} is not in use yet; the first run makes it")]
    try:
        with open_quietly(home.folder) as instance:
            kind = type(instance.run_storage).__name__.removesuffix("RunStorage")
            storage = "SQLite in files of this machine" if keeps_runs_here(instance) else f"storage {kind}"
            used = Used(project, instance, tuple(sorted(files.feeds)))
            return [
                *diagnoses,
                report_ok("Dagster", f"home {home.folder}, {storage}"),
                *examine(used, INSTANCE),
            ]
    except Exception as error:  # noqa: BLE001 - a configuration or a database: whatever Dagster raises, it may hold secrets
        what = f"the instance in {home.folder} does not open ({type(error).__name__})"
        return [
            *diagnoses,
            report_failure("Dagster", what, f"DAGSTER_HOME={home.folder} dagster instance info says why"),
        ]


# -- files

Files = tuple[Project, FeedFiles]


def feeds(of: Files) -> Iterator[Diagnosis]:
    project, files = of
    if files.feeds:
        yield report_ok(
            "feeds", f"{many(len(files.feeds), 'feed')} in {project.feeds_folder}: {', '.join(sorted(files.feeds))}"
        )
    elif not files.broken:
        yield report_warning(
            "feeds",
            f"no feed in {project.feeds_folder}",
            f"sluice init writes one; {docs_command('feeds')} has every key",
        )
    yield from (of_error("feeds", error) for error in files.broken.values())


def reports(of: Files) -> Iterator[Diagnosis]:
    files = read_reports(of[0], of[1].feeds)
    if files.reports:
        yield report_ok("reports", f"{many(len(files.reports), 'report')}: {', '.join(sorted(files.reports))}")
    yield from (of_error("reports", error) for error in files.broken.values())


def notify(of: Files) -> tuple[Diagnosis, ...]:
    """Raises FeedError for an invalid file."""
    of[0].notify()
    return ()


FILES: tuple[Check[Files], ...] = (
    Check("feeds", feeds),
    Check("reports", reports),
    Check("notify", notify),
)


# -- Dagster


@dataclass(frozen=True)
class Home:
    """Dagster's home folder."""

    folder: Path

    @cached_property
    def is_used(self) -> bool:
        """True if the instance exists: opening a missing one would create it."""
        config = self.folder / "dagster.yaml"
        with suppress(OSError):
            if config.is_file() and "\nstorage:" in f"\n{config.read_text()}":
                return True  # a database elsewhere
        return all((self.folder / name).is_file() for name in _DATABASES)


@dataclass(frozen=True)
class Used:
    """The project's instance, opened."""

    project: Project
    instance: dg.DagsterInstance
    feeds: tuple[str, ...] = ()


def schema(of: Used) -> Iterator[Diagnosis]:
    """Check that the databases have the schema of this version of Dagster."""
    instance = of.instance
    stores = {
        "runs": instance.run_storage,
        "events": instance.event_log_storage,
        "schedules": instance.schedule_storage,
    }
    old = [name for name, store in stores.items() if store and (at := store.alembic_version()) and at[0] != at[1]]
    if old:
        yield report_failure(
            "schema", f"the tables of {', '.join(old)} are of another Dagster", "dagster instance migrate"
        )
    else:
        yield report_ok("schema", f"as Dagster {dg.__version__} wants it")


def daemon(of: Used) -> Iterator[Diagnosis]:
    """Check the heartbeats of the daemon. Only schedules, sensors and queued runs need it."""
    instance = of.instance
    heartbeats = [s.last_heartbeat.timestamp for s in instance.get_daemon_statuses().values() if s.last_heartbeat]
    dead = sorted(n for n, s in instance.get_daemon_statuses().items() if not s.healthy)
    on = sorted({s.instigator_name for s in instance.all_instigator_state() if s.status.value in _ON})
    queued = instance.get_runs_count(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]))
    wait = [f"{', '.join(on)} {'is' if len(on) == 1 else 'are'} on"] if on else []
    wait += [f"{many(queued, 'run')} {'is' if queued == 1 else 'are'} queued"] if queued else []
    last = (
        f"its last heartbeat is {show_about(int((time.time() - max(heartbeats)) * 1000))} old"
        if heartbeats
        else "it never ran"
    )
    remedy = "sluice ui; as a service: dagster-daemon run, with this DAGSTER_HOME"
    if not dead:
        yield report_ok("daemon", f"it lives: {last}")
    elif wait:
        yield report_failure("daemon", f"{last}, and {' and '.join(wait)}", remedy)
    else:
        yield report_skipped("daemon", f"{last}; no schedule or sensor is on, and no run waits for it", remedy)


def runs(of: Used) -> Iterator[Diagnosis]:
    """Check for killed runs that still count as active: the next run of their feed waits for them."""
    active = under_way(of.instance, of.project, lambda runs: {})
    dead = [run for run in active if run.is_dead]
    if dead:
        which = f"{many(len(dead), 'run')} of {len(active)} under way {'is' if len(dead) == 1 else 'are'} dead"
        yield report_warning("runs", which, "sluice unstick")
    else:
        yield report_ok(
            "runs", f"{many(len(active), 'run')} under way, none known to be dead" if active else "none under way"
        )


def concurrency(of: Used) -> Iterator[Diagnosis]:
    """Check that runs of one feed are serialized: a limit of one on its pool, for whole runs. The limit may be the
    pool's own, so that pools of others stay as they are."""
    config = of.instance.get_concurrency_config()
    log = of.instance.event_log_storage
    limits = log.get_pool_limits() if log.supports_global_concurrency_limits else ()
    if shut := [p.name for p in limits if p.name.startswith(POOLS) and p.limit == 0]:
        what = f"{', '.join(shut)} let{'s' if len(shut) == 1 else ''} no run go: the limit is 0"
        yield report_failure("concurrency", what, f"dagster instance concurrency set {shut[0]} 1")
    pools = config.pool_config
    granularity = pools.pool_granularity.value if pools.pool_granularity else "op"
    queue = config.run_queue_config
    maximum = f"at most {queue.max_concurrent_runs} runs at once" if queue and queue.max_concurrent_runs > 0 else ""
    settings = ", ".join(filter(None, (f"pools for each {granularity}, limit {pools.default_pool_limit}", maximum)))
    own = {p.name: p.limit for p in limits if not p.from_default}
    free = [name for name in map(pool, of.feeds) if own.get(name, pools.default_pool_limit) not in (0, 1)]
    if free:
        names = join_first(free, _POOLS_NAMED)
        what = (
            f"{settings}; no limit of 1 on {names}: two runs of a feed do not wait for each other, the later is refused"
        )
        yield report_warning("concurrency", what, f"dagster instance concurrency set {free[0]} 1, and so for each feed")
    elif granularity != "run":
        what = f"{settings}: a run that was killed keeps its slot, and later ones wait for it"
        remedy = "in dagster.yaml: run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 300}; or"
        yield report_warning("concurrency", what, f"{remedy} concurrency: {{pools: {{granularity: run}}}}")
    else:
        yield report_ok("concurrency", settings)


INSTANCE: tuple[Check[Used], ...] = (
    Check("schema", schema),
    Check("runs", runs),
    Check("daemon", daemon),
    Check("concurrency", concurrency),
)


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
    counts: Counter[Ended] = Counter()
    if not feeds or not Home(project.dagster_home).is_used:
        return counts
    lately = datetime.now(UTC) - LATELY
    own = {FEED_TAG: [f.name for f in feeds]}
    of_many = {FLEET_TAG: sorted({SHARED, *(f.schedule for f in feeds)})}
    by_name = {f.name: f for f in feeds}
    with open_instance(project) as instance:
        for run in instance.get_runs(dg.RunsFilter(tags=own, created_after=lately), limit=MOST):
            failed = run.status is dg.DagsterRunStatus.FAILURE
            counts[run.tags[FEED_TAG], run.status.value.lower(), run.tags.get(ERROR_TAG, "") if failed else ""] += 1
        for run in instance.get_runs(dg.RunsFilter(tags=of_many, created_after=lately), limit=MOST):
            counts.update(ended for ended in _list_outcomes(instance, run, by_name) if ended[0] in by_name)
    return counts


def _list_outcomes(instance: dg.DagsterInstance, run: dg.DagsterRun, feeds: Mapping[str, Feed]) -> Iterator[Ended]:
    """Yields the outcome of each feed in a run over many."""
    names = find_retried(instance, run) & feeds.keys() or set(asked_of(run) or ())
    names = names or {f.name for f in feeds.values() if f.schedule == run.tags[FLEET_TAG]}
    status = run.status.value.lower()
    if not run.is_finished:
        yield from ((name, status, "") for name in names)
    elif run.tags.get(DONE_TAG):
        failed, errors = named_in(run, FAILED_TAG), errors_in(run)
        well = status if run.status is dg.DagsterRunStatus.CANCELED else SUCCEEDED
        yield from ((name, FAILED, errors.get(name, "")) for name in failed)
        yield from ((name, well, "") for name in names - failed - named_in(run, LEFT_TAG))
    else:  # its process died, or it was canceled
        yield from ((name, status, "") for name in named_in(run, AT_WORK_TAG))
