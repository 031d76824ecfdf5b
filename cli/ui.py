"""`sluice ui`: Dagster's web server and daemon over this project, on loopback, until Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.session import Session, command
from sluice.cli.terminal import good
from sluice.pipelines.vocabulary import extras
from sluice.pipelines.vocabulary.errors import Failed, UsageError

if TYPE_CHECKING:
    from sluice.resources.project import Project

HOST = "127.0.0.1"
PORTS = range(3000, 3020)
START_SECONDS = 300.0
STOP_SECONDS = 15.0
_POLL = 0.2  # seconds between two looks at servers that are starting or running


def register(app: typer.Typer) -> None:
    command(app)(ui)


def ui(
    session: Session,
    port: Annotated[
        int | None, typer.Option("--port", "-p", min=1, max=65535, show_default="3000, or the next free")
    ] = None,
) -> None:
    """Open Dagster's UI on this project, until Ctrl-C.

    It starts Dagster's web server and daemon on loopback: lineage, runs, checks, schedules.

    $ sluice ui
    $ sluice ui --project .sluice/demo --port 3100
    """
    project = session.project
    project.feeds()  # report a wrong feed file here, not in the logs of a server
    address = f"http://{HOST}:{_free_port(port)}"
    with session.terminal.working("starting Dagster"):
        servers = _start(project, address)
    with _ending_servers(servers):
        with session.terminal.working("waiting for Dagster's web server"):
            _await(address, servers)
        session.terminal.show(good(f"Dagster is at {address}"), "  Ctrl-C ends it, and runs that were started from it")
        session.terminal.document({"address": address, "pids": {n: s.process.pid for n, s in servers.items()}})
        _watch(servers)


class _Server:
    """One of Dagster's processes, with its log in the project's Dagster home."""

    def __init__(self, name: str, arguments: list[str], env: Mapping[str, str], home: Path) -> None:
        self.name, self.log = name, home / f"{name}.log"
        with self.log.open("wb") as sink:
            # A session of its own: Ctrl-C reaches only this process, which ends the servers in order.
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=dict(env),
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def failure(self, what: str) -> Failed:
        said = self.log.read_text(errors="replace").splitlines()[-12:]
        return Failed("\n    ".join([f"Dagster's {self.name} {what}; it said:", *said]), remedy=f"read {self.log}")

    def end(self) -> None:
        """End the server and what it started: code servers, and runs that were launched from the UI."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._signal(0) and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> bool:
        """Signal its whole session; False if nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
            return True
        return False


Servers = Mapping[str, _Server]


def _start(project: Project, address: str) -> Servers:
    from sluice.assets import compaction, reports
    from sluice.assets.instance import bury_dead_runs, limit_pools, open_instance, prepare_home, prepare_workspace
    from sluice.assets.session import pool

    if importlib.util.find_spec("dagster_webserver") is None:
        raise extras.lacks("dagster_webserver")
    home = prepare_home(project)
    with open_instance(project) as instance:
        limit_pools(instance, [reports.POOL, compaction.POOL, *map(pool, project.feeds())])
        bury_dead_runs(instance, home)  # otherwise runs that wait for their pools would wait for ever
    env = {**os.environ, "DAGSTER_HOME": str(home), "SLUICE_PROJECT": str(project.root)}
    code = ["-w", str(prepare_workspace(project))]
    port = address.rpartition(":")[2]
    commands = {
        "webserver": ["dagster_webserver", "-h", HOST, "-p", port, *code],
        "daemon": ["dagster._daemon", "run", *code],
    }
    return {name: _Server(name, arguments, env, home) for name, arguments in commands.items()}


@contextlib.contextmanager
def _ending_servers(servers: Servers) -> Iterator[None]:
    """Ctrl-C is the usual end of the block; the servers end with it, however it ends."""
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        for server in servers.values():
            server.end()


def _await(address: str, servers: Servers) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers(address):
        _check(servers)
        if time.monotonic() > deadline:
            raise servers["webserver"].failure(f"did not answer within {START_SECONDS:.0f} s")
        time.sleep(_POLL)


def _watch(servers: Servers) -> None:
    while True:
        _check(servers)
        time.sleep(_POLL)


def _check(servers: Servers) -> None:
    for server in servers.values():
        if (code := server.process.poll()) is not None:
            raise server.failure(f"ended with {code}")


def _answers(address: str) -> bool:
    from urllib.request import urlopen

    try:
        with urlopen(f"{address}/server_info", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # URLError is one
        return False


def _free_port(wanted: int | None) -> int:
    for port in (wanted,) if wanted else PORTS:
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    which = f"port {wanted} is" if wanted else f"ports {PORTS.start} to {PORTS.stop - 1} are"
    raise UsageError(f"{which} taken", remedy="name a free one: sluice ui --port 3100")
