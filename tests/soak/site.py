"""The systems of the scene: brokers, store and registry behind proxies, PostgreSQL, and Dagster by infra/systemd."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from sluice.assets.schedules.window_scheduler import ACTIVE
from sluice.resources.local.local_registry import LocalRegistry
from tests import postgres as servers
from tests.deployment import INFRA, UNITS, Deployment, run_deployment
from tests.faults.arena import Arena, run_arena
from tests.faults.nemeses.engines import Process, Processes
from tests.postgres import Postgres
from tests.resources.kafka.tools import wait_until
from tests.resources.lake import s3_faults
from tests.soak.feeds import FEEDS, SCHEDULES, Addresses, SoakFeed
from tests.soak.journal import Journal
from tests.stores import Store

PROGRAM = str(Path(sys.executable).with_name("sluice"))
RESTART_SECONDS = 3
SETTLE_SECONDS = 900
_KEPT_MS = str(4 * 3_600_000)
_RUNS = """query($filter: RunsFilter!, $limit: Int) { runsOrError(filter: $filter, limit: $limit) {
    __typename ... on Runs { results { runId jobName status startTime endTime } } } }"""
_ERRORS = """query($run: ID!, $after: String) { runOrError(runId: $run) { ... on Run {
    eventConnection(limit: 1000, afterCursor: $after) { cursor hasMore events {
        ... on LogMessageEvent { level message }
        ... on ExecutionStepFailureEvent { error { message causes { message } } } } } } } }"""

_SEVERAL = re.compile(r"Failure: \d+ feeds? done; \d+ failed: ")


@dataclass
class Site:
    """All systems. `store` and `registry` are proxies; tests and producers bypass them."""

    arena: Arena
    backend: Store
    store: s3_faults.Proxy
    registry_address: str
    registry: s3_faults.Proxy
    postgres: tuple[Postgres, str] | None
    deployment: Deployment
    processes: Processes
    project: Path
    temporary: Path
    addresses: Addresses
    journal: Journal
    numbers: dict[str, int] = field(default_factory=dict)
    """The number of the schema that writers use now, by feed."""
    starts: dict[str, float] = field(default_factory=dict)
    """Minute of the soak at which a unit was started again after a kill."""

    @property
    def lake(self) -> str:
        return self.addresses.lake

    # -- Dagster

    def switch_on(self) -> None:
        """Switch on the schedules, as the pages do."""
        for schedule in SCHEDULES:
            self.deployment.switch_on(schedule)

    def switch_off(self) -> None:
        """Switch off the schedules, and wait until no run is queued or at work."""
        for schedule in SCHEDULES:
            self.deployment.switch_off(schedule)
        wait_until(self._is_quiet, SETTLE_SECONDS)

    def _is_quiet(self) -> bool:
        """Returns whether no run of Dagster is queued or at work. Asks at most every two seconds."""
        time.sleep(2)
        return not self.list_runs(*ACTIVE)

    def list_runs(self, *statuses: dg.DagsterRunStatus) -> list[dict[str, Any]]:
        """Returns Dagster's 50 newest runs with one of these statuses, newest first."""
        runs = self.deployment.ask(_RUNS, filter={"statuses": [s.value for s in statuses]}, limit=50)
        return list(runs["results"])

    def list_errors(self, run: str) -> list[str]:
        """Returns the first lines of the errors that failed a run's steps, with the class of each, sorted.

        A run of several feeds logs the error of each, behind its name; that of its step only names them.
        """
        events, page = list[dict[str, Any]](), {"hasMore": True, "cursor": None}
        while page["hasMore"]:
            page = self.deployment.ask(_ERRORS, run=run, after=page["cursor"])["eventConnection"]
            events += page["events"]
        errors = [event["error"] for event in events if event.get("error")]
        texts = [cause["message"] for error in errors for cause in error["causes"] or (error,)]
        if any(_SEVERAL.search(text) for text in texts):
            texts = [event["message"] for event in events if event.get("level") == "ERROR"]
        return sorted({text.split("\n")[0] for text in texts})

    # -- processes

    def list_tree(self, name: str) -> list[Process]:
        """Returns the process of a unit, and all that came of it."""
        alive = {p.pid: p for p in self.processes.list_alive()}
        tree, last = set[int](), {self.deployment.processes[name].pid} if name in self.deployment.processes else set()
        while last:
            tree |= last
            last = {p.pid for p in alive.values() if p.parent in last} - tree
        return [alive[pid] for pid in sorted(tree) if pid in alive]

    def list_workers(self) -> list[Process]:
        """Returns the processes of runs that Dagster launched."""
        return [p for p in self.list_tree("code") if b"spawn_main" in p.command]

    def kill(self, name: str, part: bytes = b"") -> None:
        """Kill a unit with its processes, as systemd does, and start it again. With `part`, only kill its processes
        that have it in their command.
        """
        for process in reversed(self.list_tree(name)):
            if part in process.command:
                process.send(signal.SIGKILL)
        if not part:
            self.deployment.processes.pop(name).wait(60)
            time.sleep(RESTART_SECONDS)
            self.deployment.start(name)
        self.starts[name] = self.journal.minutes

    def restart_ended(self) -> None:
        """Start each unit that has ended by itself, as systemd does; that is a finding."""
        for name in UNITS:
            process = self.deployment.processes.get(name)
            if process is not None and process.poll() is not None:
                last = self.deployment.log(name).read_text(errors="replace")[-600:]
                self.journal.fail(f"{name} ended by itself with {process.returncode}: {last}")
                self.deployment.start(name)

    # -- the registry

    def register(self, feed: SoakFeed, version: int) -> None:
        """Register another version of the writers' schema, and let the writers use it from now on."""
        url = f"{self.registry_address}/subjects/{feed.topic}-value/versions"
        body, kind = json.dumps(feed.build_schema(version)).encode(), "application/vnd.schemaregistry.v1+json"
        with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": kind}), timeout=60) as answer:
            self.numbers[feed.name] = int(json.load(answer)["id"])

    def heal(self) -> None:
        """Remove all faults and start ended units; wait until everything runs."""
        self.store.rules.clear()
        self.registry.rules.clear()
        self.arena.heal()
        for name in UNITS:
            if name not in self.deployment.processes:
                self.deployment.start(name)
        wait_until(self._is_up, 300)

    def _is_up(self) -> bool:
        self.restart_ended()
        with suppress(OSError):
            return self.deployment.is_answering()
        return False


@contextmanager
def open_site(folder: Path, store: Store, seed: int, journal: Journal) -> Iterator[Site]:
    """Start everything but the producers. The project is `folder`/project; nothing else of it outlives the block."""
    processes, project = Processes(), folder / "project"
    project.mkdir(parents=True)
    with ExitStack() as stack:
        temporary = Path(tempfile.mkdtemp(prefix="soak-"))
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        scratch = temporary / "tmp"
        scratch.mkdir()
        (temporary / "arena").mkdir()
        arena = stack.enter_context(run_arena(temporary / "arena" / "kafka"))
        proxy = stack.enter_context(s3_faults.run_proxy(store.settings.endpoint or ""))
        registry = stack.enter_context(LocalRegistry(temporary / "registry", keep=False))
        base, _, path = registry.url.removeprefix("http://").partition("/")
        registry_proxy = stack.enter_context(s3_faults.run_proxy(f"http://{base}"))
        postgres = _start_postgres(stack) if seed % 2 else None
        catalog = f"sqlite:///{project}/catalog.db"
        access = store.access | {"endpoint": proxy.endpoint}
        addresses = Addresses(
            arena.proxied_bootstrap, store.make_address(), access, f"{registry_proxy.endpoint}/{path}", catalog
        )
        more = {**processes.environment, "TMPDIR": str(scratch)}
        more |= {"SLUICE_DAGSTER_DATABASE": postgres[0].build_address(postgres[1]) if postgres else ""}
        deployment = Deployment(project, folder / "dagster-home", more)
        if postgres is None:
            _use_sqlite(deployment)
        stack.enter_context(processes.kill_at_exit())
        systems = (arena, store, proxy, registry.url, registry_proxy, postgres, deployment, processes)
        site = Site(*systems, project, scratch, addresses, journal)
        _create(site)
        stack.enter_context(run_deployment(deployment, *UNITS))
        yield site


def _start_postgres(stack: ExitStack) -> tuple[Postgres, str] | None:
    programs = servers.find_programs()
    if programs is None:
        return None
    server = stack.enter_context(servers.run_server(programs))
    return server, server.create_database()


def _use_sqlite(deployment: Deployment) -> None:
    """Take the storage out of infra/dagster.yaml: a home of SQLite files, which `sluice prune` works on. They are made
    here, because Dagster's processes would make them at once and break them.
    """
    text = (INFRA / "dagster.yaml").read_text()
    (deployment.home / "dagster.yaml").write_text(re.sub(r"^storage:\n(?:[ \t]+.*\n)+", "", text, flags=re.M))
    with dg.DagsterInstance.from_config(str(deployment.home)):
        pass


def _create(site: Site) -> None:
    """Create topics, schemas and feed files."""
    settings = {"retention.ms": _KEPT_MS, "segment.ms": str(3_600_000)}
    for number, feed in enumerate(FEEDS):
        site.arena.create(feed.topic, feed.partitions, settings, first=number)
        if feed.letters:
            site.arena.create(feed.letters_topic, 2, settings, first=number)
        if feed.registry:
            site.register(feed, 0)
        feed.write(site.project, site.addresses)


def list_environment(site: Site) -> dict[str, str]:
    """Returns the environment of commands that an operator types on the machine."""
    return site.deployment.build_environment("metrics") | {"SLUICE_LOG_FORMAT": "text"}


def check_feeds(site: Site) -> None:
    """Raises AssertionError with the output of `sluice feeds check` if a feed file of the scene is wrong."""
    command = [PROGRAM, "feeds", "check", "--project", str(site.project)]
    done = subprocess.run(command, capture_output=True, text=True, env=list_environment(site), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
