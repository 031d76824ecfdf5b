"""Dagster's internals without a public API: the parent of a run, its steps, and its planned partitions.

`PRIVATE` lists the private names that Sluice imports, with their reasons; `storage` uses private methods besides. If a
version lacks one, its pages show less, and runs continue. `tests/test_internals.py` derives all names from the
source. Tests ask the instance, and GraphQL as the UI does, whether all of this still works.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import dagster as dg

from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.util import logs
from sluice.resources.project import Project

PRIVATE = {
    # the checks that a location loaded, for its runs; without them, a new check needs a reload before a run
    "DefinitionsLoadContext": "_core.definitions.definitions_load_context",
    # a run with the code location to which it belongs; without these two, the UI does not offer to repeat runs of
    # the command line
    "InMemoryJob": "_core.definitions.job_base",
    "execute_run_iterator": "_core.execution.api",
    # migrations that a process reads once; without it, a run starts later
    "ScriptDirectory": "_core.storage.sql",
}
"""Dagster's private names here, by module, with their use and the loss without them."""


def find_private(name: str) -> Any:
    """Returns a private name of Dagster; None where the installed Dagster lacks it."""
    try:
        return getattr(importlib.import_module(f"dagster.{PRIVATE[name]}"), name, None)
    except ImportError:
        return None


def build_stored(kind: str, **fields: object) -> Any:
    """Returns a value of Dagster by the form in which its database has it; None where Dagster lacks it.

    Releases of Dagster read each other's databases, so these names outlast those of its modules.
    """
    with suppress(Exception):  # a class that is gone, fields that it refuses
        return dg.deserialize_value(json.dumps({"__class__": kind} | fields))
    return None


Target = Any
"""The materialization that an evaluation of a check is about."""

_OBSERVATION = "__source_asset_observation__"
"""Metadata by which Dagster stores a result of an asset as no materialization."""
_REPOSITORY = "__repository__"
"""The name of the repository of definitions."""

LOCATION, MODULE, CODE_SERVER = "sluice", "sluice.assets.definitions", "sluice.assets.instance.code_server"
"""The code location's name, the module it loads, as in the `workspace.yaml` for Dagster's own commands, and the module
that serves it."""

TEMPORARY = ".tmp_dagster_home_"
"""The name of the temporary home that Dagster's commands make, and remove, if DAGSTER_HOME is not set."""

ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
"""The final statuses of a run."""

PARTITION_TAG = "dagster/partition"
"""The tag with a run's partition."""

RANGE_TAGS = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
"""The tags with the first and the last partition of a run over a range, as a backfill makes it."""

SCHEDULE_TAG = "dagster/schedule_name"
"""The tag with the schedule that asked for a run."""

RUN_KEY_TAG = "dagster/run_key"
"""The tag with the key of the request that a run was made of."""

BACKFILL_TAG = "dagster/backfill"
"""The tag with the backfill that a run belongs to."""

_DEV = "DAGSTER_verbose"  # `dagster dev` alone sets it; `dg` and `dagster definitions validate` need no home


# -- calls that a storage may refuse

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(f"{logs.OURS}.dagster")


@contextmanager
def optional() -> Iterator[None]:
    """Log errors of Dagster's storage in the block, so that they cost no result.

    The block must only serve what Dagster's pages show. The storage of Dagster+ refuses some calls to user code.
    """
    try:
        yield
    except NotImplementedError as never:
        log.debug("a storage that does not serve what Dagster's pages show: %s", never)
    except Exception as refused:  # noqa: BLE001 - a storage may raise anything, and its message could contain a password
        log.warning("Dagster's pages may lack something: %s", type(refused).__name__)


def _answer_if_refused(otherwise: Callable[[], Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function about what Dagster's pages show answer `otherwise` where the storage refuses."""

    def decorate(ask: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(ask)
        def answer(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = otherwise()
            with optional():
                result = ask(*args, **kwargs)
            return result

        return answer

    return decorate


# -- where a run belongs


def workspace(code: Path) -> str:
    """The text of a `workspace.yaml` for Dagster's servers: the project is loaded by the code server at that socket."""
    server = {"socket": str(code), "host": "localhost", "location_name": LOCATION}
    return json.dumps({"load_from": [{"grpc_server": server}]}, indent=2) + "\n"


ASSET_JOB = "__ASSET_JOB"
"""Dagster's job over all assets of a code location. Its runs select some."""


def name_job(run: dg.DagsterRun) -> str:
    """Returns the run's job or, of a run of assets without one, the assets, as Dagster lists the run."""
    return " ".join(sorted(key.to_user_string() for key in run.asset_selection or ())) or run.job_name


def execute_job(
    project: Project,
    instance: dg.DagsterInstance,
    job: dg.JobDefinition,
    run_id: str,
    config: Mapping[str, Any],
    tags: Mapping[str, str],
) -> Sequence[dg.DagsterEvent]:
    """Run the job in this process, by its own executor. Returns the events.

    The run belongs to the project's code location, which is not loaded for it: Dagster's UI lists it there, and finds
    the job for a re-execution.
    """
    # A run created here belongs to the project's job in the UI; Dagster's public way makes an ephemeral job.
    execute, in_memory = find_private("execute_run_iterator"), find_private("InMemoryJob")
    if execute is None or in_memory is None:
        return job.execute_in_process(
            run_config=dict(config),
            instance=instance,
            raise_on_error=False,
            run_id=run_id,
            tags=dict(tags),
        ).all_events
    run = instance.create_run_for_job(
        job_def=job,
        run_id=run_id,
        run_config=config,
        tags={**job.run_tags, **tags},
        asset_selection=job.asset_selection,
        remote_job_origin=job_origin(project, job.name),
    )
    # Events come while the job runs: taking all of them is what carries it out.
    return [*execute(in_memory(job), run, instance)]


def job_origin(project: Project, job: str) -> Any:
    """The origin that Dagster's servers give a job that they loaded from the project's `workspace.yaml`. They find the
    job by the names in it, also where a code server loads the project. None where Dagster has other origins."""
    target = {"executable_path": sys.executable, "module_name": MODULE, "working_directory": str(project.root)}
    location = {
        "__class__": "ManagedGrpcPythonEnvRepositoryLocationOrigin",
        "loadable_target_origin": {"__class__": "LoadableTargetOrigin"} | target,
        "location_name": LOCATION,
    }
    repository = {
        "__class__": "ExternalRepositoryOrigin",
        "repository_location_origin": location,
        "repository_name": _REPOSITORY,
    }
    return build_stored("ExternalPipelineOrigin", external_repository_origin=repository, pipeline_name=job)


def shows_nothing(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Returns true if a process with these arguments belongs to `dagster dev`, in a temporary home."""
    return _DEV in environ and any(TEMPORARY in argument for argument in arguments)


# -- the code of a run


def executes(context: dg.OpExecutionContext | dg.AssetExecutionContext, key: dg.AssetKey) -> bool:
    """Returns true if this run materializes the asset in a separate step."""
    steps, step = context.run.step_keys_to_execute, key.to_python_identifier()
    return key in context.job_def.asset_layer.executable_asset_keys and (steps is None or step in steps)


def report_without_results(context: dg.AssetExecutionContext, key: dg.AssetKey) -> Iterator[object]:
    """The results of a step over a range of partitions that reports each of them and its checks itself. Dagster would
    otherwise materialize all of them, with one metadata and one data version, those that are not complete as well."""
    yield dg.MaterializeResult(asset_key=key, metadata={_OBSERVATION: True})
    yield from no_results(context, key)


def no_results(context: dg.AssetExecutionContext, key: dg.AssetKey) -> Iterator[dg.Output[None]]:
    """The results of a step that skips its asset: its checks are skipped with it, and no step after it runs."""
    for check in context.selected_asset_check_keys:
        if check.asset_key == key and (name := context.job_def.asset_layer.get_op_output_name(check)):
            yield dg.Output(None, output_name=name)


def to_yield(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, event: dg.AssetMaterialization
) -> Iterator[dg.AssetMaterialization]:
    """The event, for a step to yield. If the run is a backfill's and the event has no partition, it is stored at once,
    as one of no run: Dagster's daemon would end the whole backfill over it, and cancel its runs."""
    if event.partition is None and BACKFILL_TAG in context.run.tags:
        context.instance.report_runless_asset_event(event)
    else:
        yield event


_CHECKS = "sluice/checks"
"""The key under which a code location hands the names of its checks to the processes of its runs."""


def list_loaded_checks(checks: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Returns the names of the checks of each asset as the code location loaded them, by the asset's key.

    A run loads the definitions again and must build the same checks: Dagster refuses a selection that lacks a check.
    Outside a run, `checks` itself, which later runs of the location receive.
    """
    if (loads := find_private("DefinitionsLoadContext")) is None:
        return checks
    context = loads.get()
    if context.load_type.name == "RECONSTRUCTION":
        loaded = context.reconstruction_metadata.get(_CHECKS)
        return checks if loaded is None else {key: json.loads(loaded).get(key, ()) for key in checks}
    earlier = json.loads(context.get_pending_reconstruction_metadata().get(_CHECKS, "{}"))
    merged = {key: [*names] for key, names in (earlier | checks).items() if names}
    context.add_to_pending_reconstruction_metadata(_CHECKS, json.dumps(merged, sort_keys=True))
    return checks


# -- which schedules are on


def running_schedules(instance: dg.DagsterInstance) -> set[str]:
    """The names of the schedules that somebody switched on, of whatever code location."""
    states = instance.all_instigator_state()
    return {s.name for s in states if s.instigator_type.name == "SCHEDULE" and s.status.name == "RUNNING"}


# -- where runs are kept


def keeps_runs_here(instance: dg.DagsterInstance) -> bool:
    """Returns true if the instance stores its runs in a file of this machine."""
    return _is_a(instance.run_storage, "SqliteRunStorage")


def keeps_events_here(instance: dg.DagsterInstance) -> bool:
    """Returns true if the instance stores the events of each run in a file of this machine."""
    return _is_a(instance.event_log_storage, "SqliteEventLogStorage")


def _is_a(storage: object, name: str) -> bool:
    return any(c.__name__ == name for c in type(storage).__mro__)


def run_logs(instance: dg.DagsterInstance) -> list[str]:
    """The runs that have a file of events, if the instance keeps them here."""
    log: Any = instance.event_log_storage
    return sorted(set(log.get_all_run_ids()) - {"index"}) if keeps_events_here(instance) else []


def files_of_run(instance: dg.DagsterInstance, run: str) -> list[Path]:
    """Returns a run's file of events, with those that SQLite adds to it.

    Dagster stores events of assets and checks, and outcomes of runs, in one more file for all runs.
    """
    log: Any = instance.event_log_storage
    if not keeps_events_here(instance):
        return []
    path = Path(log.path_for_shard(run))
    return [p for p in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))) if p.exists()]


# -- materializations


@_answer_if_refused(lambda: None)
def list_materialized(instance: dg.DagsterInstance, key: dg.AssetKey) -> set[str] | None:
    """The asset's partitions that are green; None where the storage does not tell."""
    return set(instance.get_materialized_partitions(key))


def find_first_partitions(keys: Mapping[str, tuple[dg.AssetKey, WindowSettings]]) -> dict[str, int]:
    """Returns the start (ms) of the earliest materialized window of each asset, by Dagster's storage; none without it.

    For definitions that load while the lake is away.
    """
    firsts: dict[str, int] = {}
    if "DAGSTER_HOME" not in os.environ:
        return firsts
    with optional(), dg.DagsterInstance.get() as instance:
        for name, (key, settings) in keys.items():
            if starts := [*parse_windows(list_materialized(instance, key) or (), settings)]:
                firsts[name] = min(starts)
    return firsts


def parse_windows(partitions: Iterable[str], settings: WindowSettings) -> Iterator[int]:
    """Yields the partitions that are windows: the feed may have had windows of another length."""
    for text in partitions:
        with suppress(ValueError):
            yield settings.parse_name(text)


# -- planned materializations


@dataclass(frozen=True, slots=True)
class PlannedEvaluation:
    """An evaluation of a check, for one partition or none, that an ended run had planned and did not make."""

    check: dg.AssetCheckKey
    partition: str | None
    run: str


@_answer_if_refused(set)
def unmaterialized_partitions(instance: dg.DagsterInstance, key: dg.AssetKey) -> set[str]:
    """The asset's partitions whose last run had planned to materialize them and ended without doing so."""
    log = instance.event_log_storage
    if log.get_latest_planned_materialization_info(key) is None:  # the usual answer, and cheaper
        return set()
    planned = log.get_latest_asset_partition_materialization_attempts_without_materializations(key)
    ended = _filter_ended(instance, {run for run, _ in planned.values()})
    return {partition for partition, (run, _) in planned.items() if run in ended}


@_answer_if_refused(list)
def planned_evaluations(
    instance: dg.DagsterInstance, checks: Sequence[dg.AssetCheckKey], partitions: Sequence[str]
) -> list[PlannedEvaluation]:
    """Evaluations that the last runs had planned and did not make: of these partitions, or of checks without any."""
    log = instance.event_log_storage
    if partitions:
        infos = log.get_asset_check_partition_info(checks, partition_keys=partitions)
        latest_statuses = [
            (PlannedEvaluation(i.check_key, i.partition_key, i.latest_planned_run_id), i.latest_execution_status)
            for i in infos
        ]
    else:
        latest = log.get_latest_asset_check_execution_by_key(checks).values()
        latest_statuses = [(PlannedEvaluation(r.key, r.partition, r.run_id), r.status) for r in latest]
    planned = [p for p, status in latest_statuses if status and status.name == "PLANNED"]
    ended = _filter_ended(instance, {p.run for p in planned})
    return [p for p in planned if p.run in ended]


@_answer_if_refused(lambda: None)
def plan_partitions(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, keys: Iterable[dg.AssetKey], partitions: Sequence[str]
) -> None:
    """Note that the step is to materialize these partitions. Dagster does so for a run of assets with one
    partition: after a failed run, it shows the missing ones as red."""
    run, step = context.run, context.get_step_execution_context().step.key
    for key in keys:
        for partition in partitions:
            asset = json.loads(dg.serialize_value(key))
            planned = build_stored("AssetMaterializationPlannedData", asset_key=asset, partition=partition)
            if planned is None:
                return
            event = dg.DagsterEvent.build_asset_materialization_planned_event(run.job_name, step, planned)
            context.instance.report_dagster_event(event, run.run_id)


@_answer_if_refused(lambda: None)
def evaluate(instance: dg.DagsterInstance, run: str, evaluation: dg.AssetCheckEvaluation) -> None:
    """Store an evaluation under the run that had planned it: an evaluation without a run can be stored only once."""
    planned_by = instance.get_run_by_id(run)
    event = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_CHECK_EVALUATION.value,
        job_name=planned_by.job_name if planned_by else "",
        message=f"The check {evaluation.check_name} was evaluated after the run had ended, by the ledger.",
        event_specific_data=evaluation,
    )
    instance.report_dagster_event(event, run)


@_answer_if_refused(lambda: None)
def newest(instance: dg.DagsterInstance, key: dg.AssetKey) -> Target | None:
    """The asset's newest materialization, of any partition: a check without partitions is about this one."""
    if (own := _get_stored(instance).get((key, None))) is not None:
        return _build_target(own)
    records = instance.fetch_materializations(key, limit=1).records
    return _build_target(records[0]) if records else None


class _Stored(NamedTuple):
    """A materialization that this process stored; the same fields of a record of Dagster's."""

    storage_id: int
    run_id: str
    timestamp: float


def _build_target(record: dg.EventLogRecord | _Stored) -> Target:
    return build_stored(
        "AssetCheckEvaluationTargetMaterializationData",
        storage_id=record.storage_id,
        run_id=record.run_id,
        timestamp=record.timestamp,
    )


StoredHere = dict[tuple[dg.AssetKey, str | None], _Stored]
"""The newest materialization of each asset and partition, and of each asset with None."""
_stored_here: weakref.WeakKeyDictionary[object, StoredHere] = weakref.WeakKeyDictionary()
_MOST_STORED = 10_000


def _get_stored(instance: dg.DagsterInstance) -> StoredHere:
    return _stored_here.get(instance.event_log_storage, {})


@contextmanager
def remember_stored(storage: object) -> Iterator[Callable[[dg.EventLogEntry, int], None]]:
    """Until the block ends, the materializations that this process stores need not be read back from the storage.

    Yields the function that gets each stored event with its storage id.
    """
    stored = _stored_here[storage] = StoredHere()

    def note(event: dg.EventLogEntry, storage_id: int) -> None:
        stored_event = event.dagster_event
        if stored_event is None or not stored_event.is_step_materialization or stored_event.asset_key is None:
            return
        if len(stored) >= _MOST_STORED:
            stored.clear()
        for partition in {stored_event.partition, None}:
            stored[stored_event.asset_key, partition] = _Stored(storage_id, event.run_id, event.timestamp)

    try:
        yield note
    finally:
        del _stored_here[storage]


_CHUNK = 100


@_answer_if_refused(dict)
def targets(instance: dg.DagsterInstance, key: dg.AssetKey, partitions: Iterable[str]) -> dict[str, Target]:
    """The newest materialization of each partition, in the form in which an evaluation names it."""
    stored, by_partition, wanted = _get_stored(instance), dict[str, Target](), list[str]()
    for partition in partitions:
        if (own := stored.get((key, partition))) is not None:
            by_partition[partition] = _build_target(own)
        else:
            wanted.append(partition)
    for at in range(0, len(wanted), _CHUNK):
        by_partition |= _read_targets(instance, key, wanted[at : at + _CHUNK])
    return by_partition


def _read_targets(instance: dg.DagsterInstance, key: dg.AssetKey, partitions: Collection[str]) -> dict[str, Target]:
    by_partition: dict[str, Target] = {}
    cursor, of = None, dg.AssetRecordsFilter(key, asset_partitions=[*partitions])
    while len(by_partition) < len(partitions):
        page = instance.fetch_materializations(of, limit=2 * _CHUNK, cursor=cursor)
        for r in page.records:  # the newest first
            if r.partition_key is not None:
                by_partition.setdefault(r.partition_key, _build_target(r))
        if not page.has_more:
            break
        cursor = page.cursor
    return by_partition


def _filter_ended(instance: dg.DagsterInstance, runs: Collection[str]) -> set[str]:
    """The runs that have ended."""
    ended = instance.get_runs(dg.RunsFilter(run_ids=[*runs], statuses=[*ENDED])) if runs else ()
    return {r.run_id for r in ended}
