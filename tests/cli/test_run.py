"""The report of `sluice run`: landed, committed, refused and held-back offsets."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sluice.cli.daily import run, run_view
from sluice.cli.inspect import plan
from sluice.cli.maintain import accept
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.model.kafka import CommittedOffset, OpenTransaction
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.ports import Member
from sluice.pipelines.util.documents import to_document
from tests.assets.world import CATCH_UP, P0, P1, World, at_hour
from tests.cli.conftest import Invoke, WorldSession

OTHERS = [Member("m", "console", "/10.0.0.1")]
Once = Callable[..., tuple[str, dict[str, Any]]]


def test_run_within_another_command_counts_only_its_own_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo spends a minute on a Kafka and events before its run."""
    monkeypatch.setattr(run.process, "age", lambda: 60.0)
    monkeypatch.delitem(sys.modules, "sluice.assets.execution")
    session = WorldSession(CommandOutput(io.StringIO()), world.project.root, False, world)
    (timed,) = run.execute(session, {"orders": CATCH_UP})
    assert sum(timed.seconds.values()) < 60
    (timed,) = run.execute(session, {"orders": CATCH_UP}, waited=60.0)
    assert timed.seconds["start"] == 60


@pytest.fixture
def once(world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Once:
    """Return a function that runs the feed once, and returns the text without line breaks, and the document."""
    monkeypatch.setenv("COLUMNS", "140")

    def call(request: Request = CATCH_UP) -> tuple[str, dict[str, Any]]:
        timed = run_view.TimedRun("orders", request, world.run(request), {})
        capfd.readouterr()
        CommandOutput().show(*run_view.view(timed))
        return " ".join(capfd.readouterr().out.split()), to_document(timed)

    return call


def test_refused_partition_does_not_hide_the_commit(world: World, once: Once) -> None:
    world.group.others = OTHERS
    world.run(Request(RequestKind.CATCH_UP, only=(P0,)))
    world.group.others = []
    world.cluster.states[P1] = replace(world.cluster.states[P1], log_start=40)
    text, document = once()
    assert "orders:1: offsets [0, 40) are gone from Kafka" in text
    assert "committed orders:0 → 100" in text
    assert "nothing is pending" not in text
    assert document["error"] == "OffsetsLost"
    first = document["committed"]["offsets"][0]
    assert (first["partition"], first["before"], first["after"]) == (0, None, 100)


def test_refused_run_does_not_report_that_nothing_is_pending(world: World, once: Once) -> None:
    world.engine.failing = {P0, P1}
    text, document = once()
    assert document["error"] == "BatchIncomplete"
    assert "nothing is pending" not in text


def test_failed_commit_is_reported_along_with_failed_ranges(world: World, once: Once) -> None:
    world.engine.failing = {P1}
    world.group.others = OTHERS
    text, document = once()
    assert (document["error"], document["uncommitted"]["error"]) == ("BatchIncomplete", "GroupHeld")
    assert "✗ landed offsets are not committed: held" in text


def test_run_that_lands_nothing_reports_its_commit(world: World, once: Once, invoke: Invoke) -> None:
    world.run()
    world.group.offsets[P0] = CommittedOffset(40)
    invoke(accept.accept, "orders", event="moved", reason="tried", text=False)
    text, _ = once()
    assert "nothing is pending" in text
    assert "committed orders:0 → 100" in text
    text, _ = once()
    assert "committed" not in text


def test_run_and_plan_report_offsets_blocked_by_an_open_transaction(world: World, once: Once, invoke: Invoke) -> None:
    world.cluster.hold(P1, 60)
    world.cluster.open[P1] = OpenTransaction(60, 77, 3, last_written=at_hour(6), name="billing-7")
    for first in (True, False):
        text, document = once()
        assert ("nothing stable is pending" in text) is not first
        assert "! orders:1 is held at offset 60 by transaction 'billing-7' of producer 77" in text
        assert "40 offsets cannot land yet" in text
        assert "abort --topic orders --partition 1 --start-offset 60" in text
        (held_back,) = document["held_back"]
        assert "error" not in document
        assert (held_back["offsets"], held_back["transaction"]["producer_id"]) == (40, 77)
        assert held_back["partitions"] == [
            {"topic": "orders", "partition": 1, "last_stable_offset": 60, "high_watermark": 100, "offsets": 40}
        ]
    result = invoke(plan.plan, "orders")
    assert result.code == 0
    assert result.document["held_back"][0]["offsets"] == 40
    assert "nothing stable is pending" in result.text
    assert "abort --topic orders --partition 1 --start-offset 60" in " ".join(result.text.split())
    world.cluster.hold(P1, 100)
    text, document = once()
    assert document["held_back"] == []
    assert "held" not in text
    assert "nothing is pending" in once()[0]
