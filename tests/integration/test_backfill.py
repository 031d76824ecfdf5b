"""Backfills on a real Kafka, as an operator meets them: killed and resumed, from two machines at once, and repaired.

Commands run in separate processes, each with its own Dagster instance; tasks run in those processes (`InlineEngine`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from kafka import KafkaProducer

from sluice.assets.instance.instance import open_instance
from sluice.assets.specs.asset_specs import committed_key, landed_key
from sluice.cli.main import main
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import BatchStatus, Ledger, State
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.model.receipts import Receipt
from sluice.pipelines.ports import Lake
from sluice.pipelines.util.units import show_window
from sluice.resources import open_ports as resources
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.integration.conftest import Lines
from tests.integration.support import (
    FeedProject,
    commit_feed,
    consume_topic,
    fetch_committed,
    open_inline_ports,
    read_rows,
    run,
)

MINUTE = 60_000
WINDOWS = 24
RECORDS_PER_WINDOW = 20
"""Records in each window, over two partitions."""


@dataclass
class Machine(FeedProject):
    """A project with its own Dagster instance; several machines may share a lake and a consumer group."""

    def write_feed(self, name: str = "orders", **settings: Any) -> Feed:
        lake_line = {} if self.lake else {"lake": str(self.shared)}
        return super().write_feed(name, window="{length: 1m, grace: 0s}", **lake_line, **settings)

    @property
    def project_options(self) -> tuple[str, str]:
        return "--project", str(self.root)

    @property
    def shared(self) -> Path:
        """The folder of a local lake."""
        return self.root.parent / "lake"

    def open_lake(self) -> Lake:
        return open_lake(load_feed(self.root / "feeds" / "orders.yaml", {}))

    def state(self) -> State:
        return self.open_ledger().read()

    def open_ledger(self) -> Ledger:
        return Ledger(self.open_lake(), "orders", lambda: 0)


@dataclass(frozen=True)
class CommandResult:
    code: int
    document: Mapping[str, Any]


class Shell:
    """A process on the machine that runs `sluice` commands one after another; `SHELL` reads `environment`."""

    def __init__(self, machine: Machine, **environment: str) -> None:
        self._machine, self.stderr = machine, machine.root / "stderr"
        inherited = {k: v for k, v in os.environ.items() if k not in ("DAGSTER_HOME", "SLUICE_PROJECT")}
        with self.stderr.open("w") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SHELL],
                cwd=Path(__file__).parents[2],
                env=inherited | {"PYTHONPATH": "."} | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, *arguments: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([*arguments, *self._machine.project_options, "--json"]) + "\n")
        self._process.stdin.flush()

    def wait(self) -> CommandResult:
        """Wait for the command. Returns its exit code and document, or the process's exit code if it died."""
        assert self._process.stdout
        document = self._process.stdout.readline()
        code = self._process.stdout.readline()
        return CommandResult(int(code), json.loads(document)) if code else CommandResult(self._process.wait(60), {})

    def run(self, *arguments: str) -> CommandResult:
        self.begin(*arguments)
        return self.wait()


SHELL = """
import json, os, signal, sys, time
from unittest.mock import patch
import sluice.resources.open_ports as real
from sluice.pipelines.landing.task import PartWriter
from tests.integration import support

left, write, run = int(os.environ.get("DIE_AT", 0)), PartWriter.write, support.InlineEngine.run

def counted(self, rows):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, rows)

def held(self, job, tasks):
    while (gate := os.environ.get("GATE")) and not os.path.exists(gate):
        time.sleep(0.01)
    return run(self, job, tasks)

with patch.object(PartWriter, "write", counted), patch.object(support.InlineEngine, "run", held):
    real.open_ports = support.open_inline_ports
    from sluice.cli.main import main
    for line in sys.stdin:
        print(main(json.loads(line)), flush=True)
"""


@pytest.fixture
def begin() -> int:
    """The start of the first window, chosen so that the last window has just closed."""
    return (int(time.time()) * 1000 // MINUTE - WINDOWS - 2) * MINUTE


@pytest.fixture
def topic(kafka: LocalKafka, fresh_topic: Callable[..., str], begin: int) -> str:
    """A topic with records in all windows."""
    topic = fresh_topic(partitions=2)
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=5)
    for i in range(WINDOWS * RECORDS_PER_WINDOW):
        stamp = begin + i // RECORDS_PER_WINDOW * MINUTE + i % RECORDS_PER_WINDOW
        producer.send(topic, f"value {i}".encode(), partition=i % 2, timestamp_ms=stamp)
    producer.close()
    return topic


@pytest.fixture
def machine(tmp_path: Path, kafka: LocalKafka, topic: str, lake: Lines) -> Machine:
    return create_machine(tmp_path / "one", kafka, topic, lake())


def create_machine(root: Path, kafka: LocalKafka, topic: str, lake: Mapping[str, str]) -> Machine:
    root.mkdir()
    machine = Machine(root, kafka, topic, lake)
    machine.write_feed(group=f"g-{topic}")
    return machine


def build_range_options(begin: int, first: int = 0, last: int = WINDOWS) -> tuple[str, ...]:
    return "--from", show_window(begin + first * MINUTE), "--to", show_window(begin + last * MINUTE)


def read_receipts(machine: Machine) -> dict[str, Receipt]:
    """Read the published receipts, by offset range; the last one of a range counts."""
    published = (e for _, e in machine.open_ledger().entries() if isinstance(e, PublishEntry))
    return {str(r.offset_range): r for e in published for r in e.receipts}


def read_staged_receipts(machine: Machine) -> dict[str, str]:
    """Read the attempts that an unpublished batch has finished, by offset range."""
    lake = machine.open_lake()
    receipt_paths = (p for p in lake.list("_sluice/orders/staging") if p.endswith(".receipt.json"))
    staged = [json.loads(lake.get(p) or b"") for p in receipt_paths]
    return {"{topic}:{partition}:{start}-{end}".format(**s["slice"]): s["attempt"] for s in staged}


def check_everything_landed(machine: Machine, invoke: Invoke) -> None:
    """Check that every record landed once, and that the audit reconciles with Kafka."""
    code, report = invoke("audit", "orders", "--rescan", *machine.project_options)
    assert code == 0, report["problems"]
    assert report["compared"] == WINDOWS * RECORDS_PER_WINDOW
    assert read_rows(machine.write_feed(group=f"g-{machine.topic}")) == consume_topic(machine.kafka, machine.topic)
    assert (
        fetch_committed(machine.kafka, f"g-{machine.topic}", machine.topic) == [WINDOWS * RECORDS_PER_WINDOW // 2] * 2
    )


def name_windows(begin: int) -> set[str]:
    return {show_window(begin + n * MINUTE) for n in range(WINDOWS)}


def read_materialized(machine: Machine, key: dg.AssetKey) -> set[str]:
    """Read the materialized partitions of an asset from the machine's Dagster."""
    with open_instance(Project(machine.root)) as instance:
        return set(instance.get_materialized_partitions(key))


def read_runs(machine: Machine) -> dict[str, str]:
    """Read the states of Dagster's runs, by run id."""
    with open_instance(Project(machine.root)) as instance:
        return {r.run_id: r.status.value for r in instance.get_runs()}


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLUICE_PROJECT", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)


Invoke = Callable[..., tuple[int, Any]]


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command in this process, and returns its exit code and document."""
    monkeypatch.setattr(resources, "open_ports", open_inline_ports)

    def call(*arguments: str) -> tuple[int, Any]:
        capfd.readouterr()
        code = main([*arguments, "--json"])
        return code, json.loads(capfd.readouterr().out)

    return call


# -- killed in the middle


@pytest.mark.faults
def test_killed_backfill_is_completed_by_the_same_command(machine: Machine, begin: int, invoke: Invoke) -> None:
    command = "run", "orders", *build_range_options(begin), "--windows-per-run", "4"
    with Shell(machine, DIE_AT="28") as victim:
        assert victim.run(*command).code == -signal.SIGKILL, victim.stderr.read_text()

    finished = {name: r.attempt for name, r in read_receipts(machine).items()}
    staged = read_staged_receipts(machine)
    (interrupted,) = machine.state().live()
    assert (len(finished), len(staged)) == (24, 3), (
        "twelve windows are published, and part of the next four is finished"
    )
    (dead,) = (run for run, status in read_runs(machine).items() if status == "STARTED")

    code, unstuck = invoke("unstick", *machine.project_options)
    (ended_run,) = unstuck["ended"]
    assert (code, ended_run["id"], ended_run["pools"]) == (0, dead, []), "only runs of a feed's assets are in its pool"
    (batch,) = ended_run["batches"]
    assert (batch["batch"], batch["progress"]) == (interrupted.id, "3 of 8 offset ranges are finished")
    first, last = (show_window(begin + n * MINUTE) for n in (12, 16))
    assert batch["remedy"][0].startswith(f"sluice run orders --from {first} --to {last}")
    assert read_runs(machine)[dead] == "FAILURE"

    code, resumed = invoke(*command, *machine.project_options)
    assert code == 0, resumed
    batches = [
        [(b["batch"], b["adopted_offset_ranges"]) for b in run["batches"]] for run in resumed["feeds"][0]["runs"]
    ]
    assert batches[:4] == [[], [], [], [(interrupted.id, 3)]], (
        "landed windows are not planned again, finished ranges are adopted"
    )
    assert [[adopted for _, adopted in run_batches] for run_batches in batches[4:]] == [[0], [0]]
    receipts = read_receipts(machine)
    assert {name: receipts[name].attempt for name in finished | staged} == finished | staged
    assert machine.state().live() == ()
    check_everything_landed(machine, invoke)
    for key in (landed_key("orders"), committed_key("orders")):
        assert name_windows(begin) <= read_materialized(machine, key)


# -- two machines


@pytest.mark.faults
def test_two_machines_on_one_lake_land_each_offset_once(machine: Machine, begin: int, invoke: Invoke) -> None:
    other = create_machine(machine.root.parent / "two", machine.kafka, machine.topic, machine.lake)
    gate = machine.root / "gate"
    with Shell(machine, GATE=str(gate)) as first_shell, Shell(other) as second_shell:
        first_shell.begin("run", "orders", *build_range_options(begin, 0, 2))
        running_batch = wait_for_batch(machine, first_shell)
        rival = second_shell.run("run", "orders", *build_range_options(begin, 0, 2))
        refused, landed = rival.document["feeds"][0]["runs"]
        assert (rival.code, refused["error"]) == (75, "PlanBusy")
        assert f"batch {running_batch}" in refused["message"]
        assert len(landed["batches"]) == 1, "a window of another run does not block the rest"

        gate.touch()
        assert first_shell.wait().code == 0
        for shell in (first_shell, second_shell):
            shell.begin("run", "orders", *build_range_options(begin), "--windows-per-run", "12")
        codes = {first_shell.wait().code, second_shell.wait().code}
    assert codes <= {0, 1, 3, 75}, "one waits for the other or is fenced; nothing lands twice"
    assert invoke("run", "orders", *machine.project_options)[0] == 0
    ranges = sorted(
        (r.offset_range.partition, r.offset_range.start, r.offset_range.end) for r in read_receipts(machine).values()
    )
    assert all(a[0] != b[0] or a[2] == b[1] for a, b in pairwise(ranges))
    assert {b.status for b in machine.state().batches.values()} == {BatchStatus.PUBLISHED}
    check_everything_landed(machine, invoke)
    assert invoke("repair", *other.project_options)[0] == 0
    for either in (machine, other):
        assert name_windows(begin) <= read_materialized(either, landed_key("orders")), "each instance shows all windows"


def wait_for_batch(machine: Machine, shell: Shell) -> int:
    """Wait until the shell's run has a live batch. Returns the batch's number."""
    deadline = time.monotonic() + 120
    while not (live := machine.state().live()):
        assert time.monotonic() < deadline, shell.stderr.read_text()
        time.sleep(0.01)
    return live[0].id


# -- debris


def test_repair_fixes_planted_faults_and_nothing_else(
    tmp_path: Path, kafka: LocalKafka, topic: str, begin: int, invoke: Invoke
) -> None:
    machine = create_machine(tmp_path / "one", kafka, topic, {})
    feed, folder = machine.write_feed(group=f"g-{machine.topic}"), machine.shared / "_sluice/orders"
    run(feed)
    commit_feed(feed)
    plant_debris(machine, begin, folder)
    before = sorted(p for p in machine.shared.rglob("*"))

    code, dry_run = invoke("repair", "orders", "--dry-run", *machine.project_options)
    assert code == 0
    assert sorted(p for p in machine.shared.rglob("*")) == before
    code, report = invoke("repair", *machine.project_options)
    assert code == 0
    assert [f["findings"] for f in report["feeds"]] == [f["findings"] for f in dry_run["feeds"]]
    findings = report["feeds"][0]["findings"]
    assert [f["what"] for f in findings] == [
        "shown", "staging", "manifest", "staging", "unfinished", "heartbeat", "untold",
    ]  # fmt: skip
    code, second_report = invoke("repair", *machine.project_options)
    del second_report["temporary"]  # left by other processes on this host
    assert (code, second_report) == (0, {"dry_run": False, "feeds": [{"feed": "orders", "findings": []}], "broken": []})
    assert not list(folder.glob("staging/*"))
    assert not list(folder.glob("owners/*"))
    check_everything_landed(machine, invoke)


def plant_debris(machine: Machine, begin: int, folder: Path) -> None:
    """Plant one instance of each defect that repair fixes.

    A published part is in staging only, a manifest is missing, a staging folder belongs to no batch, a write never
    ended, and a heartbeat's process is dead. The Dagster instance has no events.
    """
    part = next(p for r in read_receipts(machine).values() for p in r.parts)
    staged = machine.shared / part.staged
    staged.parent.mkdir(parents=True)
    (machine.shared / part.path).rename(staged)
    (machine.shared / paths.window_path("orders", begin, MINUTE)).unlink()
    orphan = folder / "staging/0/a"
    orphan.mkdir(parents=True)
    (orphan / "x.receipt.json").write_text("{}")
    unfinished = folder / "log/.tmp-0123456789abcdef"
    unfinished.write_bytes(b"half an ent")
    os.utime(unfinished, (0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", HEARTBEAT, str(machine.shared)], cwd=Path(__file__).parents[2]
    ) as process:
        assert process.wait() == -signal.SIGKILL


HEARTBEAT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, ".")
from sluice.resources import open_ports as resources
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.liveness import LakeLiveness, new_owner
lake = LocalLake(Path(sys.argv[1]))
with LakeLiveness(lake, "orders", lambda: time.time_ns() // 1_000_000).send_heartbeats(new_owner("gone")):
    os.kill(os.getpid(), signal.SIGKILL)
"""
