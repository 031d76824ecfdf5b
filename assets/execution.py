"""A run from the command line: a Dagster job of the feed, executed in this process on the project's instance.

Dagster records the same events as for this job started from its UI. The result comes back as values,
and an error of ours as itself. An interrupt cancels the Spark job and the run, and is then raised.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import dagster as dg

from sluice.assets.factory import FeedTopics, feed_definitions
from sluice.assets.instance.instance import bury_dead_runs, holding, open_instance, prepare_home
from sluice.assets.instance.internals import execute_job
from sluice.assets.instance.storage import kept_open
from sluice.assets.jobs.catch_up_job import catch_up_job
from sluice.assets.jobs.fleet_job import Fleet, many_job
from sluice.assets.jobs.report_assets import report_definitions, report_key
from sluice.assets.runs.run_config import catch_up_config, fleet_config
from sluice.assets.runs.run_session import FEED_TAG, RunSession, open_real_ports
from sluice.assets.specs.asset_specs import AssetSpecs, now, partitions_of
from sluice.assets.specs.feed_files import read_feeds, recall, topics_of
from sluice.pipelines.batch.result import Skip
from sluice.pipelines.errors import Failed, SluiceError
from sluice.pipelines.feed.feed import SHARED, Feed
from sluice.pipelines.feed.sql_report import load_report
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.model.receipts import Reporter
from sluice.pipelines.operating.feed_status import OpenPorts
from sluice.resources.project import Project
from sluice.running import RunResult

_SILENT = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""The event log keeps every line; the terminal belongs to the caller of the run."""


def run_feeds(
    project: Project,
    requests: Mapping[str, Request],
    report_of: Callable[[str], Reporter],
    open_ports: OpenPorts = open_real_ports,
    skip: Skip | None = None,
) -> Mapping[str, RunResult]:
    """Land and commit the request of each feed. Returns the result of each, by its name.

    A window of one feed is a run of its assets, everything else one of the job `catch_up`. Several feeds run side by
    side, in one run of Dagster for all with the same Spark; any error of one is its own. `skip` needs one feed.

    Raises FeedError for a missing feed before anything runs, KeyboardInterrupt, and, for one feed, errors that are not
    Sluice's. During the run of one feed, descriptors 1 and 2 belong to the run's log in Dagster: a reporter that draws
    on the terminal needs its own duplicate, taken before.
    """
    if len(requests) == 1:
        ((name, request),) = requests.items()
        return {name: _run_one(project, name, request, report_of(name), open_ports, skip)}
    return _run_many(project, requests, report_of, open_ports)


def _run_one(
    project: Project, name: str, request: Request, report: Reporter, open_ports: OpenPorts, skip: Skip | None
) -> RunResult:
    run_id = str(uuid.uuid4())
    feed, result = RunSession(project).feed(name), RunResult(name, run_id)
    with _hold_instance(project, run_id) as (instance, cancel):
        session = RunSession(project, open_ports, report=report, on_interrupt=cancel, result=result)
        job, config, tags = _build_job(feed, session, request, skip)
        with _cancel_on_interrupt(instance, run_id):
            events = execute_job(project, instance, job, run_id, config | _SILENT, tags)
            result.error = _get_error(run_id, result, events)
    return result


def _run_many(
    project: Project, requests: Mapping[str, Request], report_of: Callable[[str], Reporter], open_ports: OpenPorts
) -> Mapping[str, RunResult]:
    run_id, files = str(uuid.uuid4()), read_feeds(project, project.environ())
    for name in requests:
        files.feed(name)
    with _hold_instance(project, run_id) as (instance, cancel):
        fleet = Fleet(RunSession(project, open_ports, on_interrupt=cancel, files=files), report_of=report_of)
        with _cancel_on_interrupt(instance, run_id):
            job, config = many_job(fleet), fleet_config(SHARED, requests) | _SILENT
            events = execute_job(project, instance, job, run_id, config, {})
            if fleet.result.interrupted or _is_interrupted(events):
                raise KeyboardInterrupt
    # The error of a run that broke is that of feeds that it did not finish, or of all if no feed's error explains it.
    other = None if _is_success(events) else fleet.result.error or _build_unexplained(run_id, events)
    is_explained = any(r.error for r in fleet.results.values())
    results = {name: fleet.results.get(name) or RunResult(name) for name in requests}
    return {
        name: replace(r, run_id=run_id, error=r.error or (None if is_explained and r.committed else other))
        for name, r in results.items()
    }


@contextmanager
def _hold_instance(project: Project, run_id: str) -> Iterator[tuple[dg.DagsterInstance, Callable[[str], None]]]:
    """Opens the project's instance while this process holds the run's lock, with its signal of cancellation.
    Dead runs are reported first."""
    home = prepare_home(project)
    with open_instance(project) as instance, holding(home, run_id), kept_open(instance, run_id):
        bury_dead_runs(instance, home)

        def cancel(run: str) -> None:
            if (standing := instance.get_run_by_id(run)) is not None:
                instance.report_run_canceling(standing)

        yield instance, cancel


@contextmanager
def _cancel_on_interrupt(instance: dg.DagsterInstance, run_id: str) -> Iterator[None]:
    """A run that an interrupt ended outside its steps, where nothing could cancel it, is canceled, not failed."""
    try:
        yield
    except KeyboardInterrupt:
        run = instance.get_run_by_id(run_id)
        if run is not None and run.status not in (dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.SUCCESS):
            instance.report_run_canceled(run, "interrupted")
            instance.event_log_storage.free_concurrency_slots_for_run(run_id)
        raise


def run_report(project: Project, name: str, window: int, open_ports: OpenPorts = open_real_ports) -> str:
    """Run a report over a complete window (its start, ms), as its asset does. Returns the result's place in the lake.

    Raises FeedError, WindowIncomplete, Failed.
    """
    run_id, home = str(uuid.uuid4()), prepare_home(project)
    outcome = RunResult(run_id=run_id)
    report = load_report(project.root / "reports" / f"{name}.sql")
    feed = RunSession(project).feed(report.feed)
    session = RunSession(project, open_ports, result=outcome)
    windows = {feed.name: partitions_of(feed, recall(feed, session.open_lake(feed)).first_window, now())}
    own = dg.Definitions(
        executor=dg.in_process_executor,
        jobs=[dg.define_asset_job(f"report_{name}", [report_key(name)])],
    )
    with open_instance(project) as instance, holding(home, run_id):
        job = dg.Definitions.merge(report_definitions([report], windows, session), own).resolve_job_def(
            f"report_{name}"
        )
        tags = job.get_tags_for_partition_key(feed.window.name(window), None)
        events = execute_job(project, instance, job, run_id, _SILENT, tags)
    if (error := _get_error(run_id, outcome, events)) is not None:
        raise error
    landed = (e for e in events if e.event_type is dg.DagsterEventType.ASSET_MATERIALIZATION)
    materializations = (e.step_materialization_data.materialization for e in landed)
    return next(str(m.metadata["dagster/uri"].value) for m in materializations)


def _build_job(
    feed: Feed, session: RunSession, request: Request, skip: Skip | None
) -> tuple[dg.JobDefinition, dict[str, Any], dict[str, str]]:
    """The job as the code location has it, with this run's session; its configuration and tags for the request.

    A window that is not a partition of the feed goes to the job that lands anything, which reports the problem.
    """
    tags = {FEED_TAG: feed.name}
    if request.window is not None and request == Request(RequestKind.WINDOW, window=request.window):
        recalled, specs = recall(feed, session.open_lake(feed)), AssetSpecs.of(feed)
        windows, window = partitions_of(feed, recalled.first_window, now()), feed.window.name(request.window)
        if windows.has_partition_key(window):
            definitions = feed_definitions(feed, specs, FeedTopics(topics_of(feed, recalled)), windows, session)
            alone = dg.Definitions(definitions.assets, executor=dg.in_process_executor)
            every = alone.resolve_implicit_global_asset_job_def()
            job = every.get_subset(asset_selection={specs.landed.key, specs.committed.key})
            return job, {}, tags | {**job.get_tags_for_partition_key(window, job.asset_selection)}
    return catch_up_job(session), catch_up_config(feed.name, request, skip), tags


def _get_error(run_id: str, result: RunResult, events: Sequence[dg.DagsterEvent]) -> SluiceError | None:
    """The error that ended the run. Raises KeyboardInterrupt, and any error that is not Sluice's."""
    if result.interrupted or _is_interrupted(events):
        raise KeyboardInterrupt
    if result.crash is not None:
        raise result.crash
    return _build_unexplained(run_id, events) if result.error is None and not _is_success(events) else result.error


def _is_success(events: Sequence[dg.DagsterEvent]) -> bool:
    return any(e.event_type is dg.DagsterEventType.RUN_SUCCESS for e in events)


def _is_interrupted(events: Sequence[dg.DagsterEvent]) -> bool:
    """Returns true if Dagster was interrupted between the steps' bodies, which only events show."""
    data = (e.event_specific_data for e in events if e.is_failure)
    errors = (getattr(d, "error", None) or getattr(d, "error_info", None) for d in data)
    return any(dg.DagsterExecutionInterruptedError.__name__ in _list_class_names(e) for e in errors)


def _list_class_names(error: Any) -> Iterator[str]:
    """The classes of an error and of what caused it."""
    while error is not None:
        yield error.cls_name or ""
        error = error.cause


def _build_unexplained(run_id: str, events: Sequence[dg.DagsterEvent]) -> Failed:
    messages = [e.message for e in events if e.is_failure and e.message]
    return Failed(
        f"Dagster run {run_id} failed outside its steps: {messages[-1] if messages else 'it does not say why'}",
        remedy="the run's page in `sluice ui` shows its events; published rows stay published",
    )
