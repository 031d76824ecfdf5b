"""The project in Dagster's web server: its code location, and the GraphQL queries of the UI's pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget, WorkspaceFileTarget
from dagster_graphql.test.utils import execute_dagster_graphql

from sluice.assets.instance.internals import LOCATION
from sluice.resources.project import Project

WORKSPACE = Path(__file__).parents[2] / "workspace.yaml"
NODES = """
query ($keys: [AssetKeyInput!]) {
  assetNodes(assetKeys: $keys) {
    partitionStats { numMaterialized numMaterializing numPartitions numFailed }
    assetChecksOrError { ... on AssetChecks { checks {
      name
      description
      executionForLatestMaterialization { status evaluation { severity description } }
      partitionStatuses { ... on AssetCheckTimePartitionStatuses { ranges { startKey endKey status } } }
    } } }
  }
}"""


class Pages:
    """The content of the UI's pages, fetched by their queries."""

    def __init__(self, process: WorkspaceProcessContext) -> None:
        self.process = process

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        context = self.process.create_request_context()
        return dict(execute_dagster_graphql(context, query, variables).data)

    def fetch_node(self, key: dg.AssetKey) -> dict[str, Any]:
        """Returns an asset's node in the lineage."""
        (node,) = self.ask(NODES, keys=[{"path": list(key.path)}])["assetNodes"]
        return dict(node)

    def count_failed_partitions(self, key: dg.AssetKey) -> int:
        """Returns the number of its failed partitions, which the UI paints red."""
        return int(self.fetch_node(key)["partitionStats"]["numFailed"])

    def read_check_statuses(self, key: dg.AssetKey) -> dict[str, str]:
        """Returns each check's status as in the lineage: its partitions' worst, or else its last execution's."""
        return {c["name"]: _find_status(c) for c in self.fetch_node(key)["assetChecksOrError"]["checks"]}

    def list_descriptions(self, key: dg.AssetKey) -> dict[str, str]:
        """Returns the description that the UI shows with each check."""
        return {c["name"]: c["description"] or "" for c in self.fetch_node(key)["assetChecksOrError"]["checks"]}


def _find_status(check: Mapping[str, Any]) -> str:
    ranges = [r["status"] for r in (check["partitionStatuses"] or {}).get("ranges", [])]
    worst = next((s for s in ("EXECUTION_FAILED", "FAILED", "IN_PROGRESS", "SKIPPED") if s in ranges), None)
    last = check["executionForLatestMaterialization"]
    return worst or ("SUCCEEDED" if ranges else last["status"] if last else "NOT_EVALUATED")


@contextmanager
def open_pages(instance: dg.DagsterInstance, project: Project, environ: pytest.MonkeyPatch) -> Iterator[Pages]:
    """Run Dagster's servers over the project with the `workspace.yaml` that `sluice init` writes.

    The location gets its own process, which takes four CPU seconds to start.
    """
    environ.setenv("SLUICE_PROJECT", str(project.root))
    workspace = project.root / "workspace.yaml"
    workspace.write_bytes(WORKSPACE.read_bytes())
    with WorkspaceProcessContext(instance, WorkspaceFileTarget([str(workspace)])) as process:
        yield Pages(process)


_LOCATION = """from pathlib import Path
from sluice.assets.factory import build
from sluice.resources.project import Project
defs = build(Project(Path(__file__).parent))
"""


@contextmanager
def open_in_process(instance: dg.DagsterInstance, project: Project) -> Iterator[Pages]:
    """Open the same pages with the location in this process, for tests that launch no runs from them."""
    path = project.root / "location.py"
    path.write_text(_LOCATION)
    location = LoadableTargetOrigin(python_file=str(path), working_directory=str(project.root))
    origin = InProcessCodeLocationOrigin(location, location_name=LOCATION)
    with WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget(origin)) as process:
        yield Pages(process)
