"""`sluice ui`: Dagster's servers over this project, on loopback, until Ctrl-C.

    code server  ←  web server      one process loads the project's code for both, and its children are the runs
                 ←  daemon

Dagster shows a new feed, contract or report within seconds: when a file that shapes its definitions changes, and then
stays the same for a moment, the code server loads the project again and the other two follow. Active runs go on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sluice.cli.app.invocation import Session, command
from sluice.cli.terminal.output import CommandOutput, good, warn
from sluice.pipelines.errors import Failed, UsageError
from sluice.pipelines.util import extras, scratch
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.resources.project import Project

HOST = "127.0.0.1"
PORTS = range(3000, 3020)
START_SECONDS = 300.0
STOP_SECONDS = 15.0
_POLL = 0.2  # seconds between checks of servers that are starting or running
_LEDGER_SECONDS = 15.0  # between readings of ledgers, and how long one may take
_LOOK = 1.0  # seconds between checks of the project's files
_SOCKET = 100  # bytes of a longest path of a socket, on every system


def register(app: typer.Typer) -> None:
    command(app)(ui)


def ui(
    session: Session,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            "-p",
            metavar="PORT",
            min=1,
            max=65535,
            help="Port on loopback.",
            show_default="3000, or the next free",
        ),
    ] = None,
) -> None:
    """Open Dagster's UI on this project, until Ctrl-C.

    It starts Dagster's web server and daemon on loopback: lineage, runs, checks, schedules. New feeds, contracts and
    reports appear within seconds. A feed with an invalid file is reported, and appears once it is fixed.

    $ sluice ui
    $ sluice ui --project .sluice/demo --port 3100
    """
    project = session.project
    # On the terminal, not only in a server's log.
    broken = list(session.files.broken.values())
    if broken and not session.files.feeds:
        raise broken[0]
    address = f"http://{HOST}:{_free_port(port)}"
    with _ending_servers() as servers:
        # Stamps from before the start: a file that changes during it is loaded again.
        changes = Changes(project, read_stamps(project))
        with session.terminal.working("starting Dagster"):
            _start(project, address, servers)
        with session.terminal.working("waiting for Dagster's web server"):
            _await(lambda: _is_answering(address), "webserver", servers)
        session.terminal.show(
            good(f"Dagster is at {address}"),
            "  Ctrl-C stops it, and the runs started from it",
            *(warn(f"not shown: {e.message}\n  → {e.remedy}") for e in broken),
        )
        pids = {n: s.process.pid for n, s in servers.items()}
        session.terminal.print_document(address=address, pids=pids, broken=broken)
        # Until Ctrl-C, or the end of a server. Changed files are loaded again by the code server.
        _watch(servers, changes, address, session.terminal)


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
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        return Failed("\n    ".join([f"Dagster's {self.name} {what}:", *lines]), remedy=f"read {self.log}")

    def end(self, is_urgent: Callable[[], bool]) -> None:
        """End the server, its code servers, and runs launched from the UI: by force after a while, or if urgent."""
        self.process.terminate()
        self._wait(lambda: self.process.poll() is not None, is_urgent)
        self._signal(signal.SIGTERM)
        self._wait(lambda: not self._signal(0), is_urgent)
        self._signal(signal.SIGKILL)
        self.process.wait()

    @staticmethod
    def _wait(has_ended: Callable[[], bool], is_urgent: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while not has_ended() and not is_urgent() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _signal(self, number: int) -> bool:
        """Signal its whole session; False if nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
            return True
        return False


Servers = dict[str, _Server]


def _start(project: Project, address: str, servers: Servers) -> None:
    """Start the servers, into `servers`: the code server first, since the others ask it for the code."""
    from sluice.assets.instance.instance import bury_dead_runs, limit_pools, open_instance, prepare_home
    from sluice.assets.instance.internals import CODE_SERVER, LOCATION, MODULE, workspace
    from sluice.assets.jobs import compaction_job, report_assets
    from sluice.assets.runs.run_config import fleet_pool
    from sluice.assets.runs.run_session import pool
    from sluice.assets.specs.feed_files import read_shapes

    if importlib.util.find_spec("dagster_webserver") is None:
        raise extras.build_missing_error("dagster_webserver")
    home = prepare_home(project)
    with open_instance(project) as instance:
        feeds = read_shapes(project).feeds  # a wrong file is shown there and does not stop the UI
        fleets = {fleet_pool(feed.schedule) for feed in feeds.values()}
        limit_pools(instance, [report_assets.POOL, compaction_job.POOL, *map(pool, feeds), *fleets])
        bury_dead_runs(instance, home)  # otherwise runs that wait for their pools would wait indefinitely
    env = {**os.environ, "DAGSTER_HOME": str(home), "SLUICE_PROJECT": str(project.root)}
    meeting = scratch.get_root() / "code.sock"
    if len(os.fsencode(meeting)) > _SOCKET:
        meeting = Path(tempfile.mkdtemp(dir="/tmp")) / "code.sock"
    code = ("--socket", str(meeting), "-m", MODULE, "-d", str(project.root), "--location-name", LOCATION)
    own = ("--use-python-environment-entry-point", "--inject-env-vars-from-instance")
    servers["code server"] = _Server("code-server", [CODE_SERVER, *code, *own], env, home)
    _await(lambda: _is_listening(meeting), "code server", servers)
    at = meeting.with_name("workspace.yaml")
    at.write_text(workspace(meeting))
    port = address.rpartition(":")[2]
    for name, arguments in {
        "webserver": ["dagster_webserver", "-h", HOST, "-p", port, "-w", str(at)],
        "daemon": ["dagster._daemon", "run", "-w", str(at)],
    }.items():
        servers[name] = _Server(name, arguments, env, home)


def _is_listening(at: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(at))
        return True
    return False


@contextlib.contextmanager
def _ending_servers() -> Iterator[Servers]:
    """The servers that the block starts. Ctrl-C is its usual end; they end with it, however it ends.

    A second signal ends them by force.
    """
    servers: Servers = {}
    try:
        yield servers
    except KeyboardInterrupt:
        return
    finally:
        signals = list[int]()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: signals.append(number))
        for server in reversed(servers.values()):
            server.end(lambda: bool(signals))


def _await(ready: Callable[[], bool], name: str, servers: Servers) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        _check(servers)
        if time.monotonic() > deadline:
            raise servers[name].failure(f"did not answer within {START_SECONDS:.0f} s")
        time.sleep(_POLL)


def _watch(servers: Servers, changes: Changes, address: str, terminal: CommandOutput) -> None:
    """Until a server ends: have the project loaded again whenever files of it have changed."""
    looked = time.monotonic()
    while True:
        _check(servers)
        time.sleep(_POLL)
        if time.monotonic() - looked >= _LOOK:
            looked = time.monotonic()
            if changed := changes.take():
                terminal.show(_reload(address, changed))


def _reload(address: str, changed: Sequence[str]) -> Text:
    from sluice.assets.instance.internals import LOCATION

    what = f"{changed[0]} and {many(len(changed) - 1, 'other')}" if len(changed) > 1 else changed[0]
    try:
        wrong = reload_location(address, LOCATION)
    except OSError as error:
        wrong = str(error)
    return warn(f"not reloaded after a change of {what}: {wrong}") if wrong else good(f"reloaded: {what}")


def _check(servers: Servers) -> None:
    for server in servers.values():
        if (code := server.process.poll()) is not None:
            raise server.failure(f"ended with {code}")


def _is_answering(address: str) -> bool:
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
    with socket.create_server((HOST, 0)) as free:
        raise UsageError(f"{which} taken", remedy=f"choose a free port: sluice ui --port {free.getsockname()[1]}")


# -- reload after changes of the project


Stamps = Mapping[str, object]
"""Modification time in ns and length in bytes of each file, by its path in the project; facts of each ledger."""

_ENDINGS = {".yaml", ".yml", ".json", ".sql"}
_RELOAD_SECONDS = 120.0
"""How long a location may take to load."""
_RELOAD = """
mutation ($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) {
    __typename
    ... on WorkspaceLocationEntry { locationOrLoadError { __typename ... on PythonError { message } } }
    ... on PythonError { message }
    ... on UnauthorizedError { message }
  }
}"""


def read_stamps(project: Project) -> Stamps:
    """A digest of the files that shape Dagster's definitions: feeds, contracts and reports."""
    times: dict[str, object] = {}
    for folder in (project.feeds_folder, project.root / "reports"):
        for path in folder.rglob("*"):
            if path.suffix in _ENDINGS and not path.name.startswith("."):
                with suppress(OSError):  # gone since
                    stat = path.stat()
                    times[str(path.relative_to(project.root))] = (stat.st_mtime_ns, stat.st_size)
    return times


def read_ledgers(project: Project) -> Stamps:
    """Returns the facts in ledgers that shape the definitions; nothing of a lake that does not answer."""
    from sluice.assets.specs.feed_files import read_shapes, recall_feeds

    recalled, _ = recall_feeds(read_shapes(project), seconds=_LEDGER_SECONDS)
    return {f"the ledger of {name}": facts for name, facts in recalled.items()}


@dataclass
class Changes:
    """Lists changes since Dagster's servers loaded the project; `loaded` is the state of its files and ledgers then."""

    project: Project
    loaded: Stamps
    clock: Callable[[], float] = time.monotonic
    _ledgers: Stamps = field(default_factory=dict)
    _read_at: float | None = None
    _seen: Stamps | None = None

    def take(self) -> list[str]:
        """The files and ledgers that were made, changed or removed, if none of them has changed since the last look.
        They count as loaded from then on. Ledgers are read from time to time."""
        if self._read_at is None or self.clock() - self._read_at > _LEDGER_SECONDS:
            self._ledgers = {**self._ledgers, **read_ledgers(self.project)}
            if self._read_at is None:
                self.loaded = {**self.loaded, **self._ledgers}
            self._read_at = self.clock()
        now = {**read_stamps(self.project), **self._ledgers}
        before, self._seen = self._seen, now
        if now == self.loaded or now != before:
            return []
        changed = sorted(p for p in {*now, *self.loaded} if now.get(p) != self.loaded.get(p))
        self.loaded = now
        return changed


def reload_location(address: str, location: str) -> str | None:
    """Have Dagster's web server there load the location again. Returns its error, or None.

    Raises OSError if the server does not answer.
    """
    from urllib.request import Request, urlopen

    body = json.dumps({"query": _RELOAD, "variables": {"name": location}}).encode()
    request = Request(f"{address}/graphql", body, {"content-type": "application/json"})
    with urlopen(request, timeout=_RELOAD_SECONDS) as answer:
        result = json.load(answer)
    entry = (result.get("data") or {}).get("reloadRepositoryLocation") or {"message": str(result.get("errors"))}
    location_state = entry.get("locationOrLoadError") or entry
    return (
        (location_state.get("message") or location_state["__typename"])
        if location_state.get("__typename") != "RepositoryLocation"
        else None
    )
