"""Dagster as `sluice ui` starts it: web server, daemon, code servers. Runs are launched and terminated by GraphQL."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from sluice.assets.instance.instance import open_instance, prepare_home
from sluice.assets.instance.internals import LOCATION
from sluice.resources.project import Project
from tests.faults.arena import read_json_lines
from tests.faults.field import REPOSITORY, Running
from tests.faults.nemeses.engines import Process, Processes
from tests.integration.support import SLUICE
from tests.resources.kafka.tools import free_port, wait_until

_LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_TERMINATE = """mutation($run: String!) { terminateRun(runId: $run) {
    __typename ... on TerminateRunFailure { message } ... on PythonError { message } } }"""
_RETRY = """mutation($run: String!) {
    launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: FROM_FAILURE}) {
    __typename ... on LaunchRunSuccess { run { runId stepKeysToExecute } } ... on PythonError { message } } }"""
_BACKFILL = """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""


@dataclass(frozen=True)
class Desk:
    """An operator's access to Dagster. `stop_file` has the point where a run waits; see `stops.sitecustomize`."""

    processes: Processes
    instance: dg.DagsterInstance
    address: str
    pids: Mapping[str, int]
    ui: Running
    stop_file: Path

    def launch(self, job: str, config: Mapping[str, Any] = MappingProxyType({}), **tags: str) -> str:
        """Launch a run of the job. Returns its id."""
        selector = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__", "jobName": job}
        metadata = {"tags": [{"key": k, "value": v} for k, v in tags.items()]}
        params = {"selector": selector, "runConfigData": dict(config), "executionMetadata": metadata}
        run: str = self._ask(_LAUNCH, params=params)["run"]["runId"]
        return run

    def terminate(self, run: str) -> None:
        self._ask(_TERMINATE, run=run)

    def retry(self, run: str) -> tuple[str, list[str]]:
        """Re-execute a run from its failure. Returns the new run's id and steps."""
        launched = self._ask(_RETRY, run=run)["run"]
        return launched["runId"], launched["stepKeysToExecute"]

    def launch_backfill(self, feeds: Sequence[str], windows: Sequence[str]) -> str:
        """Launch a backfill of the windows of these feeds. Returns its id."""
        assets = [{"path": [feed, asset]} for feed in feeds for asset in ("landed", "committed")]
        params = {"assetSelection": assets, "partitionNames": list(windows)}
        backfill_id: str = self._ask(_BACKFILL, params=params)["backfillId"]
        return backfill_id

    def _ask(self, query: str, **variables: Any) -> Any:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.address}/graphql", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            reply = json.load(answer)
        assert "errors" not in reply, reply
        (payload,) = reply["data"].values()
        assert payload["__typename"].endswith("Success"), payload
        return payload

    def get_status(self, run: str) -> dg.DagsterRunStatus:
        dagster_run = self.instance.get_run_by_id(run)
        assert dagster_run is not None
        return dagster_run.status

    def wait_for_run(self, run: str) -> dg.DagsterRunStatus:
        """Wait until Dagster sees the run's end. Returns the status."""
        wait_until(lambda: self.get_status(run) in FINISHED_STATUSES, 300)
        return self.get_status(run)

    def wait_for_backfill(self, backfill: str) -> list[Any]:
        """Wait until the backfill has ended. Returns its runs, of any status."""

        def read_status() -> str:
            backfill_record = self.instance.get_backfill(backfill)
            return backfill_record.status.value if backfill_record else ""

        wait_until(lambda: read_status() not in ("", "REQUESTED"), 600)
        runs = [*self.instance.get_run_records(dg.RunsFilter(tags={"dagster/backfill": backfill}))]
        logs = [self.read_log(r.dagster_run.run_id) for r in runs]
        assert read_status().startswith("COMPLETED"), (self.instance.get_backfill(backfill), logs)
        return runs

    def read_log(self, run: str) -> str:
        return "\n".join(e.user_message or e.message for e in self.instance.all_logs(run))

    def find_worker(self, run: str) -> Process:
        """Wait for the run's process and return it."""

        def find_process() -> Process | None:
            pid = re.search(r"Started process for run \(pid: (\d+)\)", self.read_log(run))
            return next((p for p in self.processes.list_alive() if pid and p.pid == int(pid[1])), None)

        process: Process = wait_until(find_process, 300)
        return process

    def is_waiting(self, worker: Process) -> bool:
        """Returns true if the run waits at its point."""
        return self.stop_file.with_suffix(f".{worker.pid}").exists()

    def list_remaining(self, worker: Process) -> list[Process]:
        """Returns the live processes of the run: the worker and the engine's processes."""
        return [p for p in self.processes.list_alive() if p.pid == worker.pid or p.is_engine]


@contextmanager
def run_desk(root: Path) -> Iterator[Desk]:
    """Run `sluice ui` over the project in the folder, ended as by Ctrl-C. AssertionError if a process remains.

    Dagster retries runs as often as their tag `dagster/max_retries` says.
    """
    processes, stop_file, project = Processes(), root / "stop", Project(root)
    with (prepare_home(project) / "dagster.yaml").open("a") as config:
        config.write("run_retries: {enabled: true, max_retries: 0}\n")
    paths = f"{Path(__file__).parents[1] / 'stops'}:{REPOSITORY}"
    environment = processes.environment | {"PYTHONPATH": paths, "SLUICE_FAULTS_STOP": str(stop_file)}
    command, out = [*SLUICE, "ui", "--project", str(root), "--port", str(free_port()), "--json"], root / "ui.out"
    with processes.kill_at_exit(), open_instance(project) as instance:
        ui = Running.spawn(command, out, environment)
        addresses = wait_until(lambda: next(read_json_lines(out), None) or ui.process.poll(), 300)
        assert isinstance(addresses, dict), out.with_suffix(".err").read_text()
        yield Desk(processes, instance, addresses["address"], addresses["pids"], ui, stop_file)
        ui.process.send_signal(signal.SIGINT)
        ui.process.wait(120)
        processes.wait_until_gone()
