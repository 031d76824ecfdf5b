"""What Dagster has no public door for: where a run belongs, what it executes, and what it planned and left untold.

Nothing else of ours leans on these. Dagster's version is pinned, and the tests ask the instance, and GraphQL as the UI
does, whether it still holds.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence

import dagster as dg
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from sluice.resources.project import Project

LOCATION, MODULE = "sluice", "sluice.assets.definitions"
"""The code location's name, and what it loads: as in the `workspace.yaml` of whoever starts Dagster's own commands."""

TEMPORARY = ".tmp_dagster_home_"
"""How the home is called that Dagster's commands make, and remove, where DAGSTER_HOME is not set."""

_DEV = "DAGSTER_verbose"  # `dagster dev` alone sets it; `dg` and `dagster definitions validate` need no home


# -- where a run belongs


def workspace(project: Project) -> str:
    """The text of a `workspace.yaml` that loads the project from anywhere."""
    module = {"module_name": MODULE, "working_directory": str(project.root), "location_name": LOCATION}
    return json.dumps({"load_from": [{"python_module": module}]}, indent=2) + "\n"


def belong(instance: dg.DagsterInstance, project: Project) -> None:
    """From now on, runs that this process creates on the instance belong to the project's code location.

    That is what Dagster's UI lists runs by, and finds the job by that it executes again. No location is loaded for it.
    """
    create = instance.create_run_for_job

    @functools.wraps(create)
    def created(job_def: dg.JobDefinition, **how: object) -> dg.DagsterRun:
        how["asset_selection"] = how.get("asset_selection") or None  # as the UI says `all of the job's`
        return create(job_def=job_def, remote_job_origin=job_origin(project, job_def.name), **how)  # type: ignore[arg-type]

    instance.create_run_for_job = created  # type: ignore[method-assign, assignment]


def job_origin(project: Project, job: str) -> RemoteJobOrigin:
    """What Dagster's servers say of a job that they loaded from the workspace."""
    target = LoadableTargetOrigin(
        executable_path=sys.executable, module_name=MODULE, working_directory=str(project.root)
    )
    location = ManagedGrpcPythonEnvCodeLocationOrigin(target, LOCATION)
    return RemoteRepositoryOrigin(location, SINGLETON_REPOSITORY_NAME).get_job_origin(job)


def shows_nothing(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a process with these arguments is `dagster dev`'s, in a home that it made for a moment."""
    return _DEV in environ and any(TEMPORARY in argument for argument in arguments)
