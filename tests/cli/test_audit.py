"""`sluice audit --strict`: what it prints, its document, its exit code."""

from __future__ import annotations

import pytest

from sluice.cli.daily import audit
from sluice.pipelines.model.kafka import CommittedOffset
from tests.assets.world import P0, World
from tests.cli.conftest import Tell


@pytest.fixture(autouse=True)
def no_rescan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rescan itself has its own tests, on a real Kafka."""
    monkeypatch.setattr(audit, "_rescan", lambda session, feed, edges, ledger, report: report)


def test_a_strict_audit_says_what_it_looked_at(world: World, tell: Tell) -> None:
    world.run()
    told = tell(audit.audit, "orders", strict=True)
    assert (told.code, told.document["reconciled"]) == (0, True)
    assert told.document["strict"] == {
        "committed_offsets": 2, "commit_entries": 1, "windows": 5, "unseen": [], "expired": [],
    }  # fmt: skip
    assert "Compared with the ledger: the committed offsets of 2 partitions and 5 windows" in told.text


def test_a_broken_file_is_told_with_what_fixes_it(world: World, tell: Tell) -> None:
    world.run()
    path = next(p for p in world.lake.list("data/orders") if p.endswith(".parquet"))
    world.lake.put(path, b"")
    told = tell(audit.audit, "orders", strict=True)
    (problem,) = told.document["problems"]
    assert (told.code, problem["file"]) == (1, path)
    assert "--replace; else bring the file back from a backup" in problem["remedy"]
    assert f"✗ I3: {path} has 0 bytes" in told.text
    assert "→ while Kafka still has its records: sluice run orders --offsets orders:" in told.text
    assert "not reconciled: 1 problem\n" in told.text


def test_offsets_that_do_not_agree_fail_a_strict_audit_alone(world: World, tell: Tell) -> None:
    world.run()
    world.group.offsets[P0] = CommittedOffset(500)
    told = tell(audit.audit, "orders", strict=True)
    assert (told.code, told.document["reconciled"]) == (1, False)
    (problem,) = told.document["problems"]
    assert problem["invariant"] == 7
    assert "orders:0: the group holds 500" in told.text
    assert tell(audit.audit, "orders").code == 0
