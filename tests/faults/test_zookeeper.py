"""Offsets in ZooKeeper, or in both stores (`dual_commit`): runs are killed around each step of a commit, ZooKeeper is
away, sessions of sleeping runs end. Then the checker's verdict on each store: by Kafka's log of committed offsets, and
by ZooKeeper's transaction log.
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
from tests.faults.kinds import Kind, apply_kind, draw_kinds, produce_history
from tests.faults.runner import BOUND_MS, SESSION
from tests.faults.test_kills import kill_at_point
from tests.faults.test_zombies import BOUND, stop_at, take_over
from tests.resources.kafka.tools import wait_until
from tests.zookeepers import LocalZooKeeper

pytestmark = pytest.mark.faults
BROKERS = 1

RATE = 40
SESSION_SECONDS = 2
_, RAW, PLAIN = draw_kinds()
BOTH, ALONE = "both stores", "ZooKeeper"
LOSERS = (Retryable, Unknown, GroupHeld, OwnershipLost, PlanBusy)
"""The errors of a run that lost ZooKeeper or its session."""


@dataclass
class Tied(Field):
    """A field whose group's offsets are in ZooKeeper, alone or in addition to Kafka."""

    zookeeper: LocalZooKeeper = field(kw_only=True)

    def configure(self, kind: Kind, store: str) -> None:
        apply_kind(self, kind)
        store_setting = {"dual_commit": True} if store == BOTH else {"store": "zookeeper"}
        self.settings["offsets"] = json.dumps({"connect": self.zookeeper.connect, **store_setting})
        self.account.log(f"its offsets are in {store}")

    def check_zookeeper(self, *, healed: bool = False) -> Verdict:
        """Check ZooKeeper's log: no committed offset was ahead of the published records or went back."""
        offsets = zookeeper.read_offsets(self.zookeeper.root / "data", self.group)
        verdict = check(self.folder, Evidence(offsets=offsets), Settings(group=self.group, healed=healed))
        assert verdict.holds, f"in ZooKeeper: {verdict}"
        return verdict

    def verify(self, settings: Settings = HEALED, *args: Any, **kwargs: Any) -> Verdict:
        alone = "store" in json.loads(self.settings.get("offsets", "{}"))
        verdict = super().verify(replace(settings, elsewhere=alone), *args, **kwargs)
        zookeeper_verdict = self.check_zookeeper(healed=True)
        assert zookeeper_verdict.counts["committed offsets"] > self.partitions
        self.account.log(
            f"checker: ZooKeeper's {zookeeper_verdict.counts['committed offsets']} committed offsets hold, too"
        )
        return verdict

    def list_registered(self) -> list[str]:
        return self.zookeeper.list_children(f"/consumers/{self.group}/ids")

    def kill_zookeeper(self) -> None:
        assert self.zookeeper.process
        self.zookeeper.process.send(signal.SIGKILL)
        self.zookeeper.process.wait(10)


@pytest.fixture
def tied(arena: Arena, account: Account, tmp_path: Path) -> Iterator[Tied]:
    """A feed over an empty topic. A ZooKeeper session without heartbeats ends after two seconds."""
    server = LocalZooKeeper(tmp_path / "zookeeper").start()
    field = Tied.create(arena, tmp_path, account, zookeeper=server)
    field.environment |= {SESSION: str(SESSION_SECONDS), BOUND_MS: str(BOUND)}
    yield field
    server.stop()


# -- kills


@pytest.mark.parametrize(
    ("store", "kind"), [(BOTH, RAW), (BOTH, PLAIN), (ALONE, PLAIN)], ids=["both-transactional", "both-plain", "alone"]
)
def test_killed_between_the_stores(tied: Tied, store: str, kind: Kind) -> None:
    tied.configure(kind, store)
    produce_history(tied)
    in_kafka = () if store == ALONE else ("end",) if kind.commit == "transactional" else ("plain",)
    with tied.run_producers(RATE):
        tied.run_baseline(1)
        for point in points.list_points("register", "intent", *in_kafka, "nodes", "record"):
            kill_at_point(tied, point)
            tied.check_zookeeper()
        tied.run_until_clean()
    tied.verify()


# -- ZooKeeper is away


@contextmanager
def stop_zookeeper(field: Tied) -> Iterator[None]:
    """Kill ZooKeeper, and restart it with its data at the end of the block."""
    field.kill_zookeeper()
    field.account.log("ZooKeeper is gone")
    try:
        yield
    finally:
        field.zookeeper.start()
        field.account.log("ZooKeeper is back")


@pytest.mark.parametrize("store", [BOTH, ALONE])
def test_zookeeper_becomes_unreachable_during_a_run(tied: Tied, store: str) -> None:
    tied.configure(RAW if store == BOTH else PLAIN, store)
    point_names = ["before register", "after end", "before nodes"] if store == BOTH else ["before stage", "after nodes"]
    with tied.run_producers(RATE):
        tied.run_baseline(1)
        for point in point_names:
            with stop_at(tied, point) as sleeper, stop_zookeeper(tied):
                sleeper.process.send_signal(signal.SIGCONT)
                run = tied.wait_for_run(sleeper, about=f"the run that slept {point}")
                if not run.clean:
                    run.expect_error(*LOSERS)
            tied.check_zookeeper()
            tied.run_until_clean()
        with stop_zookeeper(tied):
            tied.run().expect_error(Retryable, mentions="ZooKeeper")
        tied.run_until_clean()
    tied.verify()


# -- ended sessions


@pytest.mark.parametrize("store", [BOTH, ALONE])
def test_session_ends_while_its_run_is_stopped(tied: Tied, store: str) -> None:
    """The run loses ownership, others land and commit. When it wakes, it commits nothing."""
    tied.configure(RAW if store == BOTH else PLAIN, store)
    committing = ["before end", "after end", "before nodes"] if store == BOTH else ["before intent", "before nodes"]
    with tied.run_producers(RATE):
        tied.run_baseline(1)
        for point in ["before publish", *committing]:
            with stop_at(tied, point) as sleeper:
                wait_until(lambda: not tied.list_registered(), 60)
                tied.account.log("its session has ended")
                take_over(tied, {})
                before = tied.zookeeper.read_offsets(tied.group, tied.topic)
                sleeper.process.send_signal(signal.SIGCONT)
                run = tied.wait_for_run(sleeper, about="the one that slept")
                if not run.clean:
                    run.expect_error(*LOSERS)
                if point in committing:
                    assert tied.zookeeper.read_offsets(tied.group, tied.topic) == before, "it has no say there any more"
            tied.check_zookeeper()
        tied.run_until_clean()
    tied.verify()
