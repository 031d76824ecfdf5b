"""Offsets in ZooKeeper, or in both stores (`dual_commit`): runs are killed around each step of a commit, ZooKeeper is
away, sessions end under runs that sleep. Then the checker's verdict, on each store by itself: by Kafka's log of
committed offsets, and by ZooKeeper's own log of transactions.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import GroupHeld, OwnershipLost, PlanBusy, Retryable, Unknown
from tests.checker import zookeeper
from tests.checker.facts import Evidence
from tests.checker.invariants import Settings, Verdict, check
from tests.faults import points
from tests.faults.account import Account
from tests.faults.arena import Arena
from tests.faults.field import HEALED, Field
from tests.faults.kinds import Kind, become, history, kinds
from tests.faults.runner import BOUND_MS, SESSION
from tests.faults.test_kills import killed
from tests.faults.test_zombies import BOUND, overtaken, stopped
from tests.resources.kafka.tools import until
from tests.zookeepers import LocalZooKeeper

pytestmark = pytest.mark.faults
BROKERS = 1

RATE = 40
SESSION_SECONDS = 2
_, RAW, PLAIN = kinds()
BOTH, ALONE = "both stores", "ZooKeeper"
LOSERS = (Retryable, Unknown, GroupHeld, OwnershipLost, PlanBusy)
"""What a run may say that lost its ZooKeeper or its session."""


@dataclass
class Tied(Field):
    """A field whose group's offsets are in ZooKeeper, or there too."""

    zookeeper: LocalZooKeeper = field(kw_only=True)

    def become(self, kind: Kind, store: str) -> None:
        become(self, kind)
        where = {"dual_commit": True} if store == BOTH else {"store": "zookeeper"}
        self.settings["offsets"] = json.dumps({"connect": self.zookeeper.connect, **where})
        self.account.did(f"its offsets are in {store}")

    def accounted(self, *, healed: bool = False) -> Verdict:
        """ZooKeeper's side: nothing that was ever committed there was ahead of what was published, or went back."""
        found = zookeeper.offsets(self.zookeeper.root / "data", self.group)
        verdict = check(self.folder, Evidence(offsets=found), Settings(group=self.group, healed=healed))
        assert verdict.holds, f"in ZooKeeper: {verdict}"
        return verdict

    def proven(self, settings: Settings = HEALED, *given: Any, **more: Any) -> Verdict:
        alone = "store" in json.loads(self.settings.get("offsets", "{}"))
        verdict = super().proven(replace(settings, elsewhere=alone), *given, **more)
        there = self.accounted(healed=True)
        assert there.counts["committed offsets"] > self.partitions
        self.account.did(f"checker: ZooKeeper's {there.counts['committed offsets']} committed offsets hold, too")
        return verdict

    def registered(self) -> list[str]:
        return self.zookeeper.names(f"/consumers/{self.group}/ids")

    def kill_zookeeper(self) -> None:
        assert self.zookeeper.process
        self.zookeeper.process.send(signal.SIGKILL)
        self.zookeeper.process.wait(10)


@pytest.fixture
def tied(arena: Arena, account: Account, tmp_path: Path) -> Iterator[Tied]:
    """Nothing produced yet; a session without a word ends after two seconds."""
    server = LocalZooKeeper(tmp_path / "zookeeper").start()
    made = Tied.fresh(arena, tmp_path, account, zookeeper=server)
    made.environment |= {SESSION: str(SESSION_SECONDS), BOUND_MS: str(BOUND)}
    yield made
    server.stop()


# -- kills


@pytest.mark.parametrize(
    ("store", "kind"), [(BOTH, RAW), (BOTH, PLAIN), (ALONE, PLAIN)], ids=["both-transactional", "both-plain", "alone"]
)
def test_killed_between_the_stores(tied: Tied, store: str, kind: Kind) -> None:
    tied.become(kind, store)
    history(tied)
    in_kafka = () if store == ALONE else ("end",) if kind.commit == "transactional" else ("plain",)
    with tied.producing(RATE):
        tied.normal(1)
        for point in points.both("register", "intent", *in_kafka, "nodes", "record"):
            killed(tied, point)
            tied.accounted()
        tied.recovered()
    tied.proven()


# -- ZooKeeper is away


@contextmanager
def away(field: Tied) -> Iterator[None]:
    """ZooKeeper is killed, and there again afterwards, with what it had written."""
    field.kill_zookeeper()
    field.account.did("ZooKeeper is gone")
    try:
        yield
    finally:
        field.zookeeper.start()
        field.account.did("ZooKeeper is back")


@pytest.mark.parametrize("store", [BOTH, ALONE])
def test_zookeeper_goes_away_under_a_run(tied: Tied, store: str) -> None:
    tied.become(RAW if store == BOTH else PLAIN, store)
    there = ["before register", "after end", "before nodes"] if store == BOTH else ["before stage", "after nodes"]
    with tied.producing(RATE):
        tied.normal(1)
        for point in there:
            with stopped(tied, point) as sleeper, away(tied):
                sleeper.process.send_signal(signal.SIGCONT)
                ran = tied.ended(sleeper, about=f"the run that slept {point}")
                if not ran.clean:
                    ran.stopped_by(*LOSERS)
            tied.accounted()
            tied.recovered()
        with away(tied):
            tied.run().stopped_by(Retryable, says="ZooKeeper")
        tied.recovered()
    tied.proven()


# -- sessions end


@pytest.mark.parametrize("store", [BOTH, ALONE])
def test_a_session_ends_under_a_run_that_sleeps(tied: Tied, store: str) -> None:
    """Others see its ownership go, land and commit; when it wakes, it commits nothing any more."""
    tied.become(RAW if store == BOTH else PLAIN, store)
    committing = ["before end", "after end", "before nodes"] if store == BOTH else ["before intent", "before nodes"]
    with tied.producing(RATE):
        tied.normal(1)
        for point in ["before publish", *committing]:
            with stopped(tied, point) as sleeper:
                until(lambda: not tied.registered(), 60)
                tied.account.did("its session has ended")
                overtaken(tied, {})
                before = tied.zookeeper.held(tied.group, tied.topic)
                sleeper.process.send_signal(signal.SIGCONT)
                ran = tied.ended(sleeper, about="the one that slept")
                if not ran.clean:
                    ran.stopped_by(*LOSERS)
                if point in committing:
                    assert tied.zookeeper.held(tied.group, tied.topic) == before, "it has no say there any more"
            tied.accounted()
        tied.recovered()
    tied.proven()
