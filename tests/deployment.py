"""Dagster's processes and `sluice metrics` as infra/systemd starts them: the units' own commands and environment.

What differs is where things lie: the tests' virtual environment for /opt/sluice, a project and a home of the test's own
for /srv, this user's caches, and an address of loopback's own for 127.0.0.1. So the ports are those that infra/ names,
and two deployments on one machine do not meet.
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
from typing import Any

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from sluice.assets.instance.internals import LOCATION
from tests.resources.kafka.tools import until

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


def command(name: str) -> str:
    """The command line of a unit, without the folder of its program."""
    (line,) = re.findall(rf"^ExecStart={_PROGRAMS}(.*)$", UNITS[name], re.M)
    return str(line)


def environment(name: str) -> dict[str, str]:
    """What a unit says of its process's environment."""
    (line,) = re.findall(r"^Environment=(.*)$", UNITS[name], re.M)
    return dict(word.split("=", 1) for word in shlex.split(line))


@dataclass
class Deployment:
    """The processes over a project, each of which may be ended and started again by itself. `more`: what secrets.env
    and the machine say beside the units."""

    project: Path
    home: Path
    more: Mapping[str, str]
    address: str = field(default_factory=lambda: _own_address())
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home.mkdir(exist_ok=True)
        for name in CONFIGURATION:
            shutil.copy(INFRA / name, self.home)

    def environment(self, name: str = "code") -> dict[str, str]:
        said = {key: self._here(value) for key, value in environment(name).items() if not value.startswith(_CACHE)}
        return {**os.environ, **said, **self.more}

    def start(self, name: str) -> None:
        program, *arguments = shlex.split(self._here(command(name)))
        if name == "metrics":
            arguments += ["--host", self.address]  # without it, the address that all others have
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [Path(sys.executable).with_name(program), *arguments],
                env=self.environment(name),
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

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.home.glob("*.log"))

    def launch(self, job: str) -> str:
        """The id of a run of the job, asked for as the pages do."""
        params = {"selector": self._named("jobName", job), "runConfigData": {}, "executionMetadata": {"tags": []}}
        launched = self._loaded("PipelineNotFoundError", _LAUNCH, params=params)
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def switch_on(self, schedule: str) -> None:
        """As the switch of the pages does."""
        done = self._loaded("ScheduleNotFoundError", _SWITCH_ON, schedule=self._named("scheduleName", schedule))
        assert done["__typename"] == "ScheduleStateResult", done

    def switch_off(self, schedule: str) -> None:
        """As the switch of the pages does."""
        state = self._loaded("ScheduleNotFoundError", _STATE, schedule=self._named("scheduleName", schedule))
        done = self.ask(_SWITCH_OFF, id=state["scheduleState"]["id"])
        assert done["__typename"] == "ScheduleStateResult", done

    def start_sensor(self, sensor: str) -> None:
        """As the switch of the pages does."""
        done = self._loaded("SensorNotFoundError", _START_SENSOR, sensor=self._named("sensorName", sensor))
        assert done["__typename"] == "Sensor", done

    def _loaded(self, unknown: str, query: str, **variables: Any) -> dict[str, Any]:
        """The answer, once the web server has loaded what the code server holds."""
        found: dict[str, Any] = {}

        def known() -> bool:
            found.update(self.ask(query, **variables))
            return self.all_live() and found["__typename"] != unknown

        until(known, 300)
        return found

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """The one thing that the query asks the web server for."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        asked = urllib.request.Request(self._page("graphql"), body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            said = json.load(answer)
        assert "errors" not in said, said
        (found,) = said["data"].values()
        return dict(found)

    def answers(self) -> bool:
        assert self.all_live()
        try:
            with urllib.request.urlopen(self._page("server_info"), timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def all_live(self) -> bool:
        """AssertionError with what they wrote, if one has ended by itself."""
        assert all(p.poll() is None for p in self.processes.values()), self.logs()
        return True

    def _page(self, path: str) -> str:
        return f"http://{self.address}:{WEB_PORT}/{path}"

    @staticmethod
    def _named(kind: str, name: str) -> dict[str, str]:
        return {"repositoryLocationName": LOCATION, "repositoryName": "__repository__", kind: name}

    def _here(self, text: str) -> str:
        places = {_HOME: str(self.home), _PROJECT: str(self.project), _ADDRESS: self.address}
        for there, here in places.items():
            text = text.replace(there, here)
        return text


@contextmanager
def served(deployment: Deployment, *names: str) -> Iterator[Deployment]:
    """With these processes, until the block ends; the web server answers."""
    with ExitStack() as stack:
        stack.callback(deployment.end_all)
        for name in names:
            deployment.start(name)
        until(deployment.answers, 300)
        yield deployment


def worker(instance: dg.DagsterInstance, run: str) -> int:
    """The pid of the run's process, once it has begun a step."""

    def found() -> int | None:
        told = instance.all_logs(run)
        begun = any("STEP_START" in str(e.dagster_event_type) for e in told)
        pids = (re.search(r"Started process for run \(pid: (\d+)\)", e.user_message or e.message) for e in told)
        return next((int(pid[1]) for pid in pids if pid), None) if begun else None

    return int(until(found, 300))


def ended(instance: dg.DagsterInstance, run: str, seconds: float = 300) -> dg.DagsterRunStatus:
    """Wait until Dagster knows that the run has ended: how."""

    def status() -> dg.DagsterRunStatus:
        found = instance.get_run_by_id(run)
        assert found is not None
        return found.status

    until(lambda: status() in FINISHED_STATUSES, seconds)
    return status()


def _own_address() -> str:
    """An address of loopback on which nothing uses the units' ports. Linux has sixteen million of them."""
    ports = {int(p) for name in UNITS for p in re.findall(r"(?:-p|--port) (\d+)", command(name))}
    while sys.platform == "linux":
        address = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(2, 254)}"
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server((address, port)))
            return address
    return _ADDRESS
