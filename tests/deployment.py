"""Dagster's processes and `sluice metrics` as infra/systemd starts them: the units' own commands and environment.

Only locations differ: the tests' virtual environment replaces /opt/sluice, a project and a home of the test replace
/srv, this user's caches replace /var/cache, and a random address of loopback replaces 127.0.0.1. So the ports are those
that infra/ names, and two deployments on one machine do not collide.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from sluice.assets.instance.internals import LOCATION
from tests.resources.kafka.tools import wait_until

INFRA = Path(__file__).parents[1] / "infra"
UNITS = {p.stem.removeprefix("sluice-"): p.read_text() for p in sorted((INFRA / "systemd").glob("*.service"))}
CONFIGURATION = ("dagster.yaml", "workspace.yaml")
WEB_PORT = 3000
_PROGRAMS, _PROJECT, _HOME, _CACHE, _ADDRESS = (
    "/opt/sluice/bin/",
    "/srv/sluice",
    "/srv/dagster",
    "/var/cache",
    "127.0.0.1",
)
_LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_STATE = """query($schedule: ScheduleSelector!) { scheduleOrError(scheduleSelector: $schedule) {
    __typename ... on Schedule { scheduleState { id } } } }"""
_SWITCH_OFF = """mutation($id: String!) { stopRunningSchedule(id: $id) {
    __typename ... on PythonError { message } } }"""
_START_SENSOR = """mutation($sensor: SensorSelector!) { startSensor(sensorSelector: $sensor) {
    __typename ... on PythonError { message } } }"""
_SWITCH_ON = """mutation($schedule: ScheduleSelector!) { startSchedule(scheduleSelector: $schedule) {
    __typename ... on PythonError { message } } }"""


def read_command(name: str) -> str:
    """Returns the command line of a unit, without the folder of its program."""
    (line,) = re.findall(rf"^ExecStart={_PROGRAMS}(.*)$", UNITS[name], re.M)
    return str(line)


def read_environment(name: str) -> dict[str, str]:
    """Returns the environment that a unit sets for its process."""
    (line,) = re.findall(r"^Environment=(.*)$", UNITS[name], re.M)
    return dict(word.split("=", 1) for word in shlex.split(line))


@dataclass
class Deployment:
    """The processes of a project, each of which can be ended and started again alone. `more`: the variables of
    secrets.env and of the machine, which override those of the units."""

    project: Path
    home: Path
    more: Mapping[str, str]
    address: str = field(default_factory=lambda: _find_free_address())
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home.mkdir(exist_ok=True)
        for name in CONFIGURATION:
            shutil.copy(INFRA / name, self.home)

    def build_environment(self, name: str = "code") -> dict[str, str]:
        unit = {
            key: self._translate(value) for key, value in read_environment(name).items() if not value.startswith(_CACHE)
        }
        return {**os.environ, **unit, **self.more}

    def start(self, name: str) -> None:
        program, *arguments = shlex.split(self._translate(read_command(name)))
        if name == "metrics":
            arguments += ["--host", self.address]  # without it, the address that all others have
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [Path(sys.executable).with_name(program), *arguments],
                env=self.build_environment(name),
                cwd=self.project,
                stdout=log,
                stderr=log,
            )

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(60)

    def end_all(self) -> None:
        for name in list(self.processes):
            self.end(name)

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def read_logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.home.glob("*.log"))

    def launch(self, job: str, config: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Launch a run of the job as Dagster's pages do, and return its id."""
        params = {
            "selector": self._build_selector("jobName", job),
            "runConfigData": dict(config),
            "executionMetadata": {"tags": []},
        }
        launched = self._ask_when_loaded("PipelineNotFoundError", _LAUNCH, params=params)
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def switch_on(self, schedule: str) -> None:
        """Start a schedule as the switch in Dagster's pages does."""
        done = self._ask_when_loaded(
            "ScheduleNotFoundError", _SWITCH_ON, schedule=self._build_selector("scheduleName", schedule)
        )
        assert done["__typename"] == "ScheduleStateResult", done

    def switch_off(self, schedule: str) -> None:
        """Stop a schedule as the switch in Dagster's pages does."""
        state = self._ask_when_loaded(
            "ScheduleNotFoundError", _STATE, schedule=self._build_selector("scheduleName", schedule)
        )
        done = self.ask(_SWITCH_OFF, id=state["scheduleState"]["id"])
        assert done["__typename"] == "ScheduleStateResult", done

    def start_sensor(self, sensor: str) -> None:
        """Start a sensor as the switch in Dagster's pages does."""
        done = self._ask_when_loaded(
            "SensorNotFoundError", _START_SENSOR, sensor=self._build_selector("sensorName", sensor)
        )
        assert done["__typename"] == "Sensor", done

    def _ask_when_loaded(self, unknown: str, query: str, **variables: Any) -> dict[str, Any]:
        """Repeat the query until the web server has loaded the code location, and return the answer."""
        answer: dict[str, Any] = {}

        def is_known() -> bool:
            answer.update(self.ask(query, **variables))
            return self.check_alive() and answer["__typename"] != unknown

        wait_until(is_known, 300)
        return answer

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Returns the value of the query's only field from the web server."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(self._page("graphql"), body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            reply = json.load(answer)
        assert "errors" not in reply, reply
        (value,) = reply["data"].values()
        return dict(value)

    def is_answering(self) -> bool:
        assert self.check_alive()
        try:
            with urllib.request.urlopen(self._page("server_info"), timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def check_alive(self) -> bool:
        """Raises AssertionError with the logs when a process has ended by itself."""
        assert all(p.poll() is None for p in self.processes.values()), self.read_logs()
        return True

    def _page(self, path: str) -> str:
        return f"http://{self.address}:{WEB_PORT}/{path}"

    @staticmethod
    def _build_selector(kind: str, name: str) -> dict[str, str]:
        return {"repositoryLocationName": LOCATION, "repositoryName": "__repository__", kind: name}

    def _translate(self, text: str) -> str:
        replacements = {_HOME: str(self.home), _PROJECT: str(self.project), _ADDRESS: self.address}
        for old, new in replacements.items():
            text = text.replace(old, new)
        return text


@contextmanager
def run_deployment(deployment: Deployment, *names: str) -> Iterator[Deployment]:
    """Run these processes until the block ends; yields once the web server answers."""
    with ExitStack() as stack:
        stack.callback(deployment.end_all)
        for name in names:
            deployment.start(name)
        wait_until(deployment.is_answering, 300)
        yield deployment


def wait_for_worker(instance: dg.DagsterInstance, run: str) -> int:
    """Wait until the run's process has begun a step, and return its pid."""

    def find_pid() -> int | None:
        events = instance.all_logs(run)
        begun = any("STEP_START" in str(e.dagster_event_type) for e in events)
        pids = (re.search(r"Started process for run \(pid: (\d+)\)", e.user_message or e.message) for e in events)
        return next((int(pid[1]) for pid in pids if pid), None) if begun else None

    return int(wait_until(find_pid, 300))


def wait_for_end(instance: dg.DagsterInstance, run: str, seconds: float = 300) -> dg.DagsterRunStatus:
    """Wait until Dagster knows that the run has ended, and return its status."""

    def fetch_status() -> dg.DagsterRunStatus:
        record = instance.get_run_by_id(run)
        assert record is not None
        return record.status

    wait_until(lambda: fetch_status() in FINISHED_STATUSES, seconds)
    return fetch_status()


def _find_free_address() -> str:
    """Returns a loopback address on which the units' ports are free. Linux has sixteen million of them."""
    ports = {int(p) for name in UNITS for p in re.findall(r"(?:-p|--port) (\d+)", read_command(name))}
    while sys.platform == "linux":
        address = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(2, 254)}"
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server((address, port)))
            return address
    return _ADDRESS
