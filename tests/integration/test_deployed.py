"""Dagster as a service: infra/dagster.yaml on a real PostgreSQL; code server, web server and daemon apart."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from sluice.assets.instance import open_instance
from sluice.resources.local.kafka import LocalKafka
from sluice.resources.project import Project
from tests import postgres as servers
from tests.resources.kafka.tools import free_port, produce, until

pytestmark = [pytest.mark.soak, pytest.mark.spark]
REPOSITORY = Path(__file__).parents[2]
LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""


class Service:
    """The three processes over a project, each of which may be ended and started again by itself."""

    def __init__(self, project: Project, environment: dict[str, str], folder: Path) -> None:
        self.project, self.environment, self.folder = project, environment, folder
        self.code, self.web = free_port(), free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "workspace.yaml").write_text(
            f"load_from: [{{grpc_server: {{host: 127.0.0.1, port: {self.code}, location_name: sluice}}}}]\n"
        )

    def start(self, name: str) -> None:
        workspace = ["-w", str(self.folder / "workspace.yaml")]
        code = ["code-server", "start", "-m", "sluice.assets.definitions", "-h", "127.0.0.1", "-p", str(self.code)]
        arguments = {
            "code": ["dagster", *code],
            "web": ["dagster_webserver", "-h", "127.0.0.1", "-p", str(self.web), *workspace],
            "daemon": ["dagster._daemon", "run", *workspace],
        }[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments], env=self.environment, cwd=self.folder, stdout=log, stderr=log
            )

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(60)

    def launch(self, job: str) -> str:
        selector = {"repositoryLocationName": "sluice", "repositoryName": "__repository__", "jobName": job}
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": []}}
        found: dict[str, Any] = {}

        def launched() -> bool:
            found.update(self._ask({"query": LAUNCH, "variables": {"params": params}})["launchRun"])
            return found["__typename"] != "PipelineNotFoundError"  # the location is not loaded yet

        until(launched, 180)
        assert found["__typename"] == "LaunchRunSuccess", found
        return str(found["run"]["runId"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(question).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.web}/graphql", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return dict(json.load(answer)["data"])

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.web}/server_info", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ended(self) -> bool:
        assert all(p.poll() is None for p in self.processes.values()), self.logs()
        return False

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.folder.glob("*.log"))


@contextmanager
def served(service: Service) -> Iterator[Service]:
    with ExitStack() as stack:
        for name in ("code", "web", "daemon"):
            service.start(name)
        stack.callback(lambda: [service.end(name) for name in list(service.processes)])
        until(lambda: service.answers() or service.ended(), 180)
        yield service


def test_a_run_is_queued_killed_tried_again_and_the_account_closes(
    kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The web server goes away in between; the daemon alone sees to the run's second try."""
    programs = servers.programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
    topic = fresh_topic(partitions=3)
    for partition in range(3):
        produce(kafka, topic, 500, partition)
    root, home = tmp_path / "project", tmp_path / "dagster"
    (root / "feeds").mkdir(parents=True)
    feed = f"kafka: {{bootstrap: '{kafka.bootstrap}'}}\ntopics: {topic}\nstart: earliest\n"
    (root / "feeds" / "orders.yaml").write_text(feed)
    home.mkdir()
    shutil.copy(REPOSITORY / "infra" / "dagster.yaml", home / "dagster.yaml")
    with servers.started(programs) as postgres:
        address = f"postgresql:///{postgres.database()}?host={postgres.folder}&user={postgres.user}"
        for name, value in {
            "SLUICE_DAGSTER_DATABASE": address,
            "DAGSTER_HOME": str(home),
            "SLUICE_PROJECT": str(root),
        }.items():
            monkeypatch.setenv(name, value)
        project = Project(root)
        with served(Service(project, dict(os.environ), tmp_path)) as service, open_instance(project) as instance:
            run = service.launch("catch_up_orders")
            os.kill(worker(instance, run), signal.SIGKILL)
            service.end("web")
            assert ended(instance, run) is dg.DagsterRunStatus.FAILURE, service.logs()
            of_it = dg.RunsFilter(tags={"dagster/parent_run_id": run})
            (again,) = until(lambda: instance.get_runs(of_it), 180)
            assert ended(instance, again.run_id) is dg.DagsterRunStatus.SUCCESS, service.logs()
            service.start("web")
            until(service.answers, 180)
            last = service.launch("catch_up_orders")
            assert ended(instance, last) is dg.DagsterRunStatus.SUCCESS, service.logs()
        account = subprocess.run(
            [Path(sys.executable).with_name("sluice"), "audit", "orders", "--strict", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert account.returncode == 0, account.stdout + account.stderr
        assert json.loads(account.stdout), "it said something"


def worker(instance: dg.DagsterInstance, run: str) -> int:
    """The pid of the run's process, once it has begun to land."""

    def found() -> int | None:
        told = [e.user_message or e.message for e in instance.all_logs(run)]
        pid = next((int(m[1]) for t in told if (m := re.search(r"Started process for run \(pid: (\d+)\)", t))), None)
        return pid if any("STEP_START" in str(e.dagster_event_type) for e in instance.all_logs(run)) else None

    return int(until(found, 300))


def ended(instance: dg.DagsterInstance, run: str) -> dg.DagsterRunStatus:
    def status() -> dg.DagsterRunStatus:
        found = instance.get_run_by_id(run)
        assert found is not None
        return found.status

    until(lambda: status() in FINISHED_STATUSES, 300)
    return status()
