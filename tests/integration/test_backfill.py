"""Backfills on a real Kafka, as an operator meets them: killed and brought home, from two machines at once, and mended.

The command line runs in processes of its own, with a Dagster instance each; tasks run in those processes (`Inline`).
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
from kafka import KafkaConsumer, KafkaProducer
from kafka.structs import TopicPartition as KafkaTopicPartition

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
from tests.integration.support import Place, commit_feed, consumed, edges, rows, run

MINUTE = 60_000
WINDOWS = 24
EACH = 20
"""Records in each window, over two partitions."""


@dataclass
class Machine(Place):
    """A project with a Dagster instance of its own; several may have one lake and one group."""

    def feed(self, name: str = "orders", **settings: Any) -> Feed:
        own = {} if self.lake else {"lake": str(self.shared)}
        return super().feed(name, window="{length: 1m, grace: 0s}", **own, **settings)

    @property
    def named(self) -> tuple[str, str]:
        return "--project", str(self.root)

    @property
    def shared(self) -> Path:
        """The lake's folder, where it is in one."""
        return self.root.parent / "lake"

    def opened(self) -> Lake:
        return open_lake(load_feed(self.root / "feeds" / "orders.yaml", {}))

    def state(self) -> State:
        return self.ledger().read()

    def ledger(self) -> Ledger:
        return Ledger(self.opened(), "orders", lambda: 0)


@dataclass(frozen=True)
class Ran:
    code: int
    document: Mapping[str, Any]


class Shell:
    """A process on the machine that runs one `sluice` command after another. `told` are words to `SHELL`."""

    def __init__(self, machine: Machine, **told: str) -> None:
        self._machine, self.said = machine, machine.root / "stderr"
        env = {k: v for k, v in os.environ.items() if k not in ("DAGSTER_HOME", "SLUICE_PROJECT")}
        with self.said.open("w") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SHELL],
                cwd=Path(__file__).parents[2],
                env=env | {"PYTHONPATH": "."} | told,
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
        self._process.stdin.write(json.dumps([*arguments, *self._machine.named, "--json"]) + "\n")
        self._process.stdin.flush()

    def ended(self) -> Ran:
        """What became of the command; the process's own code when it died of it."""
        assert self._process.stdout
        document = self._process.stdout.readline()
        code = self._process.stdout.readline()
        return Ran(int(code), json.loads(document)) if code else Ran(self._process.wait(60), {})

    def run(self, *arguments: str) -> Ran:
        self.begin(*arguments)
        return self.ended()


SHELL = """
import json, os, signal, sys, time
from unittest.mock import patch
import sluice.resources.open_ports as real
from sluice.pipelines.landing.task import PartWriter
from tests.integration import support

left, write, run = int(os.environ.get("DIE_AT", 0)), PartWriter.write, support.Inline.run

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

with patch.object(PartWriter, "write", counted), patch.object(support.Inline, "run", held):
    real.open_ports = support.edges
    from sluice.cli.main import main
    for line in sys.stdin:
        print(main(json.loads(line)), flush=True)
"""


@pytest.fixture
def begin() -> int:
    """The first window's start: the last of them closed a little while ago."""
    return (int(time.time()) * 1000 // MINUTE - WINDOWS - 2) * MINUTE


@pytest.fixture
def topic(kafka: LocalKafka, fresh_topic: Callable[..., str], begin: int) -> str:
    """All windows filled."""
    topic = fresh_topic(partitions=2)
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=5)
    for i in range(WINDOWS * EACH):
        stamp = begin + i // EACH * MINUTE + i % EACH
        producer.send(topic, f"value {i}".encode(), partition=i % 2, timestamp_ms=stamp)
    producer.close()
    return topic


@pytest.fixture
def machine(tmp_path: Path, kafka: LocalKafka, topic: str, lake: Lines) -> Machine:
    return placed(tmp_path / "one", kafka, topic, lake())


def placed(root: Path, kafka: LocalKafka, topic: str, lake: Mapping[str, str]) -> Machine:
    root.mkdir()
    machine = Machine(root, kafka, topic, lake)
    machine.feed(group=f"g-{topic}")
    return machine


def between(begin: int, first: int = 0, last: int = WINDOWS) -> tuple[str, ...]:
    return "--from", show_window(begin + first * MINUTE), "--to", show_window(begin + last * MINUTE)


def receipts(machine: Machine) -> dict[str, Receipt]:
    """The counting receipts, by offset range."""
    published = (e for _, e in machine.ledger().entries() if isinstance(e, PublishEntry))
    return {str(r.offset_range): r for e in published for r in e.receipts}


def staged_receipts(machine: Machine) -> dict[str, str]:
    """What a batch that is not published has finished: offset range and attempt."""
    lake = machine.opened()
    found = (p for p in lake.list("_sluice/orders/staging") if p.endswith(".receipt.json"))
    said = [json.loads(lake.get(p) or b"") for p in found]
    return {"{topic}:{partition}:{start}-{end}".format(**s["slice"]): s["attempt"] for s in said}


def committed(machine: Machine) -> list[int | None]:
    consumer = KafkaConsumer(bootstrap_servers=machine.kafka.bootstrap, group_id=f"g-{machine.topic}")
    try:
        return [consumer.committed(KafkaTopicPartition(machine.topic, p)) for p in range(2)]
    finally:
        consumer.close()


def check_whole(machine: Machine, told: Tell) -> None:
    """All of it landed, once, and the audit reconciles against Kafka itself."""
    code, report = told("audit", "orders", "--rescan", *machine.named)
    assert code == 0, report["problems"]
    assert report["compared"] == WINDOWS * EACH
    assert rows(machine.feed(group=f"g-{machine.topic}")) == consumed(machine.kafka, machine.topic)
    assert committed(machine) == [WINDOWS * EACH // 2] * 2


def windows(begin: int) -> set[str]:
    return {show_window(begin + n * MINUTE) for n in range(WINDOWS)}


def shown(machine: Machine, key: dg.AssetKey) -> set[str]:
    """The partitions that are green in the machine's Dagster."""
    with open_instance(Project(machine.root)) as instance:
        return set(instance.get_materialized_partitions(key))


def runs(machine: Machine) -> dict[str, str]:
    """Dagster's runs and their states."""
    with open_instance(Project(machine.root)) as instance:
        return {r.run_id: r.status.value for r in instance.get_runs()}


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLUICE_PROJECT", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)


Tell = Callable[..., tuple[int, Any]]


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tell:
    """A command in this process: its exit code and its document."""
    monkeypatch.setattr(resources, "open_ports", edges)

    def call(*arguments: str) -> tuple[int, Any]:
        capfd.readouterr()
        code = main([*arguments, "--json"])
        return code, json.loads(capfd.readouterr().out)

    return call


# -- killed in the middle


@pytest.mark.faults
def test_a_backfill_killed_in_the_middle_is_brought_home_by_the_same_command(
    machine: Machine, begin: int, told: Tell
) -> None:
    asked = "run", "orders", *between(begin), "--windows-per-run", "4"
    with Shell(machine, DIE_AT="28") as victim:
        assert victim.run(*asked).code == -signal.SIGKILL, victim.said.read_text()

    finished = {name: r.attempt for name, r in receipts(machine).items()}
    half = staged_receipts(machine)
    (left,) = machine.state().live()
    assert (len(finished), len(half)) == (24, 3), "twelve windows are published, of the next four some is finished"
    (dead,) = (run for run, status in runs(machine).items() if status == "STARTED")

    code, unstuck = told("unstick", *machine.named)
    (ended_run,) = unstuck["ended"]
    assert (code, ended_run["run"], ended_run["pools"]) == (0, dead, ["sluice_orders"])
    (batch,) = ended_run["batches"]
    assert (batch["batch"], batch["kept"]) == (left.id, "3 of 8 offset ranges are finished")
    first, last = (show_window(begin + n * MINUTE) for n in (12, 16))
    assert batch["remedy"][0].startswith(f"sluice run orders --from {first} --to {last}")
    assert runs(machine)[dead] == "FAILURE"

    code, home = told(*asked, *machine.named)
    assert code == 0, home
    batches = [[(b["batch"], b["adopted_offset_ranges"]) for b in run["batches"]] for run in home["feeds"][0]["runs"]]
    assert batches[:4] == [[], [], [], [(left.id, 3)]], "what landed is not planned again, what was finished stays"
    assert [[adopted for _, adopted in each] for each in batches[4:]] == [[0], [0]]
    whole = receipts(machine)
    assert {name: whole[name].attempt for name in finished | half} == finished | half
    assert machine.state().live() == ()
    check_whole(machine, told)
    for key in (landed_key("orders"), committed_key("orders")):
        assert windows(begin) <= shown(machine, key)


# -- two machines


@pytest.mark.faults
def test_two_machines_on_one_lake_end_as_one_after_another(machine: Machine, begin: int, told: Tell) -> None:
    other = placed(machine.root.parent / "two", machine.kafka, machine.topic, machine.lake)
    gate = machine.root / "gate"
    with Shell(machine, GATE=str(gate)) as here, Shell(other) as there:
        here.begin("run", "orders", *between(begin, 0, 2))
        held = first_batch(machine, here)
        second = there.run("run", "orders", *between(begin, 0, 2))
        refused, landed = second.document["feeds"][0]["runs"]
        assert (second.code, refused["error"]) == (75, "PlanBusy")
        assert f"batch {held}" in refused["message"]
        assert len(landed["batches"]) == 1, "another's window keeps nobody from the rest"

        gate.touch()
        assert here.ended().code == 0
        for shell in (here, there):
            shell.begin("run", "orders", *between(begin), "--windows-per-run", "12")
        codes = {here.ended().code, there.ended().code}
    assert codes <= {0, 1, 3, 75}, "one waits for the other or is fenced; nothing lands twice"
    assert told("run", "orders", *machine.named)[0] == 0
    ranges = sorted(
        (r.offset_range.partition, r.offset_range.start, r.offset_range.end) for r in receipts(machine).values()
    )
    assert all(a[0] != b[0] or a[2] == b[1] for a, b in pairwise(ranges))
    assert {b.status for b in machine.state().batches.values()} == {BatchStatus.PUBLISHED}
    check_whole(machine, told)
    assert told("repair", *other.named)[0] == 0
    for each in (machine, other):
        assert windows(begin) <= shown(each, landed_key("orders")), "each instance was told of all of it"


def first_batch(machine: Machine, shell: Shell) -> int:
    """The batch that the shell's run is at, once it is."""
    give_up = time.monotonic() + 120
    while not (live := machine.state().live()):
        assert time.monotonic() < give_up, shell.said.read_text()
        time.sleep(0.01)
    return live[0].id


# -- debris


def test_repair_fixes_what_is_broken_and_only_that(
    tmp_path: Path, kafka: LocalKafka, topic: str, begin: int, told: Tell
) -> None:
    machine = placed(tmp_path / "one", kafka, topic, {})
    feed, folder = machine.feed(group=f"g-{machine.topic}"), machine.shared / "_sluice/orders"
    run(feed)
    commit_feed(feed)
    debris(machine, begin, folder)
    before = sorted(p for p in machine.shared.rglob("*"))

    code, dry = told("repair", "orders", "--dry-run", *machine.named)
    assert code == 0
    assert sorted(p for p in machine.shared.rglob("*")) == before
    code, said = told("repair", *machine.named)
    assert code == 0
    assert [f["found"] for f in said["feeds"]] == [f["found"] for f in dry["feeds"]]
    found = said["feeds"][0]["found"]
    assert [f["what"] for f in found] == [
        "shown", "staging", "manifest", "staging", "unfinished", "heartbeat", "untold",
    ]  # fmt: skip
    code, again = told("repair", *machine.named)
    del again["temporary"]  # what other processes of this machine left
    assert (code, again) == (0, {"dry_run": False, "feeds": [{"feed": "orders", "found": []}], "broken": []})
    assert not list(folder.glob("staging/*"))
    assert not list(folder.glob("owners/*"))
    check_whole(machine, told)


def debris(machine: Machine, begin: int, folder: Path) -> None:
    """A published part back in staging only, a manifest gone, staging of no batch, a write that never ended, the
    heartbeat of a process that is gone; and a Dagster instance that knows nothing.
    """
    part = next(p for r in receipts(machine).values() for p in r.parts)
    staged = machine.shared / part.staged
    staged.parent.mkdir(parents=True)
    (machine.shared / part.path).rename(staged)
    (machine.shared / paths.window_path("orders", begin, MINUTE)).unlink()
    orphan = folder / "staging/0/a"
    orphan.mkdir(parents=True)
    (orphan / "x.receipt.json").write_text("{}")
    begun = folder / "log/.tmp-0123456789abcdef"
    begun.write_bytes(b"half an ent")
    os.utime(begun, (0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", HEARTBEAT, str(machine.shared)], cwd=Path(__file__).parents[2]
    ) as gone:
        assert gone.wait() == -signal.SIGKILL


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
