"""Dagster as `sluice ui` starts it: web server, daemon, code servers; runs are launched and ended through GraphQL."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from sluice.assets.instance.instance import open_instance, prepare_home
from sluice.assets.instance.internals import LOCATION
from sluice.resources.project import Project
from tests.faults.arena import words
from tests.faults.field import REPOSITORY, SLUICE, Running
from tests.faults.nemeses.engines import Process, Processes
from tests.resources.kafka.tools import free_port, until

_LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_TERMINATE = """mutation($run: String!) { terminateRun(runId: $run) {
    __typename ... on TerminateRunFailure { message } ... on PythonError { message } } }"""
_AGAIN = """mutation($run: String!) {
    launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: FROM_FAILURE}) {
    __typename ... on LaunchRunSuccess { run { runId stepKeysToExecute } } ... on PythonError { message } } }"""
_BACKFILL = """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""


@dataclass(frozen=True)
class Desk:
    """What an operator has of it. `stop` is the file that says where a run waits; see `stops.sitecustomize`."""

    processes: Processes
    instance: dg.DagsterInstance
    address: str
    pids: Mapping[str, int]
    ui: Running
    stop: Path

    def launch(self, job: str, **tags: str) -> str:
        """The id of a run of the job."""
        selector = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__", "jobName": job}
        said = {"tags": [{"key": k, "value": v} for k, v in tags.items()]}
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": said}
        run: str = self._ask(_LAUNCH, params=params)["run"]["runId"]
        return run

    def terminate(self, run: str) -> None:
        self._ask(_TERMINATE, run=run)

    def again(self, run: str) -> tuple[str, list[str]]:
        """Execute a run again from where it failed: the new run's id and steps."""
        made = self._ask(_AGAIN, run=run)["run"]
        return made["runId"], made["stepKeysToExecute"]

    def backfill(self, feeds: Sequence[str], windows: Sequence[str]) -> str:
        """The id of a backfill of the windows of these feeds."""
        assets = [{"path": [feed, asset]} for feed in feeds for asset in ("landed", "committed")]
        params = {"assetSelection": assets, "partitionNames": list(windows)}
        made: str = self._ask(_BACKFILL, params=params)["backfillId"]
        return made

    def _ask(self, query: str, **variables: Any) -> Any:
        body = json.dumps({"query": query, "variables": variables}).encode()
        asked = urllib.request.Request(f"{self.address}/graphql", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            said = json.load(answer)
        assert "errors" not in said, said
        (found,) = said["data"].values()
        assert found["__typename"].endswith("Success"), found
        return found

    def status(self, run: str) -> dg.DagsterRunStatus:
        found = self.instance.get_run_by_id(run)
        assert found is not None
        return found.status

    def ended(self, run: str) -> dg.DagsterRunStatus:
        """Wait until Dagster knows that the run has ended: how."""
        until(lambda: self.status(run) in FINISHED_STATUSES, 300)
        return self.status(run)

    def backfilled(self, backfill: str) -> list[Any]:
        """Wait until it has come to its end, whatever became of its runs: these."""

        def status() -> str:
            found = self.instance.get_backfill(backfill)
            return found.status.value if found else ""

        until(lambda: status() not in ("", "REQUESTED"), 600)
        runs = [*self.instance.get_run_records(dg.RunsFilter(tags={"dagster/backfill": backfill}))]
        logs = [self.log(r.dagster_run.run_id) for r in runs]
        assert status().startswith("COMPLETED"), (self.instance.get_backfill(backfill), logs)
        return runs

    def log(self, run: str) -> str:
        return "\n".join(e.user_message or e.message for e in self.instance.all_logs(run))

    def worker(self, run: str) -> Process:
        """The process that the run is in, once it is there."""

        def found() -> Process | None:
            pid = re.search(r"Started process for run \(pid: (\d+)\)", self.log(run))
            return next((p for p in self.processes.alive() if pid and p.pid == int(pid[1])), None)

        process: Process = until(found, 300)
        return process

    def waits(self, worker: Process) -> bool:
        """Whether the run got to where it waits."""
        return self.stop.with_suffix(f".{worker.pid}").exists()

    def left_by(self, worker: Process) -> list[Process]:
        """What lives of its run: the process itself, and whatever of Spark."""
        return [p for p in self.processes.alive() if p.pid == worker.pid or p.is_engine]


@contextmanager
def opened(root: Path) -> Iterator[Desk]:
    """`sluice ui` over the project in the folder, ended as by Ctrl-C; AssertionError when something is left then.

    Its runs are tried again as often as their tag `dagster/max_retries` says.
    """
    processes, stop, project = Processes(), root / "stop", Project(root)
    with (prepare_home(project) / "dagster.yaml").open("a") as config:
        config.write("run_retries: {enabled: true, max_retries: 0}\n")
    paths = f"{Path(__file__).parents[1] / 'stops'}:{REPOSITORY}"
    environment = processes.environment | {"PYTHONPATH": paths, "SLUICE_FAULTS_STOP": str(stop)}
    command, out = [*SLUICE, "ui", "--project", str(root), "--port", str(free_port()), "--json"], root / "ui.out"
    with processes.killed(), open_instance(project) as instance:
        ui = Running.alone(command, out, environment)
        said = until(lambda: next(words(out), None) or ui.process.poll(), 300)
        assert isinstance(said, dict), out.with_suffix(".err").read_text()
        yield Desk(processes, instance, said["address"], said["pids"], ui, stop)
        ui.process.send_signal(signal.SIGINT)
        ui.process.wait(120)
        processes.gone()
