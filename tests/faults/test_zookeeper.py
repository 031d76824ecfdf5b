"""Offsets in ZooKeeper: runs are killed around each step of a commit. Then the checker's verdict on what was ever
committed there, by ZooKeeper's own log of transactions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checker import zookeeper
from tests.checker.facts import Evidence
from tests.checker.invariants import Settings, Verdict, check
from tests.faults import points
from tests.faults.account import Account
from tests.faults.arena import Arena
from tests.faults.field import Field
from tests.faults.kinds import become, history, kinds
from tests.faults.runner import SESSION
from tests.faults.test_kills import killed
from tests.zookeepers import LocalZooKeeper

pytestmark = pytest.mark.faults

RATE = 40
SESSION_SECONDS = 2
_, _, PLAIN = kinds()


@dataclass
class Tied(Field):
    """A field whose group's offsets are in ZooKeeper."""

    zookeeper: LocalZooKeeper = field(kw_only=True)

    def accounted(self, *, healed: bool = False) -> Verdict:
        """ZooKeeper's side: nothing that was ever committed there was ahead of what was published, or went back."""
        found = zookeeper.offsets(self.zookeeper.root / "data", self.group)
        verdict = check(self.folder, Evidence(offsets=found), Settings(group=self.group, healed=healed))
        assert verdict.holds, f"in ZooKeeper: {verdict}"
        return verdict

    def proven(self, *given: Any, **more: Any) -> Verdict:
        verdict = super().proven(*given, **more)
        there = self.accounted(healed=True)
        assert there.counts["committed offsets"] > self.partitions
        self.account.did(f"checker: ZooKeeper's {there.counts['committed offsets']} committed offsets hold, too")
        return verdict


@pytest.fixture
def tied(arena: Arena, account: Account, tmp_path: Path) -> Iterator[Tied]:
    """Nothing produced yet; a session without a word ends after two seconds."""
    server = LocalZooKeeper(tmp_path / "zookeeper").start()
    made = Tied.fresh(arena, tmp_path, account, zookeeper=server)
    made.environment |= {SESSION: str(SESSION_SECONDS)}
    yield made
    server.stop()


def test_killed_around_each_step_of_a_commit_in_zookeeper(tied: Tied) -> None:
    become(tied, PLAIN)
    tied.settings["offsets"] = json.dumps({"store": "zookeeper", "connect": tied.zookeeper.connect})
    history(tied)
    with tied.producing(RATE):
        tied.normal(1)
        for point in points.both("register", "intent", "nodes", "record"):
            killed(tied, point)
            tied.accounted()
        tied.recovered()
    tied.proven()
