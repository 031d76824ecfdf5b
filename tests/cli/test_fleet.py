"""What a person sees of many feeds in one command."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.text import Text

from sluice.cli.shared import fleet_view
from sluice.cli.shared.fleet_view import Line
from sluice.cli.terminal.output import Terminal
from sluice.pipelines.errors import GroupMoved, KafkaUnavailable, NotReached
from tests.cli.conftest import FEED, Sluice

AWAY = "no broker answers; 127.0.0.1:9: connection refused"


def test_what_is_held_back_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    said = Text("orders:0 is held at offset 3")
    Terminal().show(*fleet_view.view([Line("a", (), "", held=True, beside=(said,)), Line("b", (), "")], 2.0))
    out = capfd.readouterr().out
    assert "! done, some is held back" in out
    assert "orders:0 is held at offset 3" in out


def test_an_error_of_many_feeds_is_told_once_and_names_them() -> None:
    lines = [Line(f"f{n:02}", (KafkaUnavailable(AWAY, remedy="start it"),), "") for n in range(20)]
    lines += [Line("moved", (GroupMoved("its offsets moved"), KafkaUnavailable(AWAY, remedy="start it")), "")]
    said = [(type(e).__name__, e.message) for e in fleet_view.named(lines)]
    assert said == [
        ("KafkaUnavailable", f"f00, f01, f02, f03 and 17 more: {AWAY}"),
        ("GroupMoved", "moved: its offsets moved"),
    ]
    assert [e.message for e in fleet_view.named(lines[:5])] == [f"f00, f01, f02, f03, f04: {AWAY}"]


def test_a_feed_that_was_not_reached_has_not_failed(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [Line("a", (), "5 records"), Line("b", (GroupMoved("moved"),), ""), Line("c", (NotReached("no"),), "")]
    Terminal().show(*fleet_view.view(lines, 2.0))
    said = capfd.readouterr().out
    assert "✗ GroupMoved" in said
    assert "! not reached" in said
    assert "✗ 3 feeds in 2.0 s; 1 failed: b; 1 not reached: c" in said
    assert (fleet_view.failed(lines), fleet_view.left(lines)) == (["b"], ["c"])


@pytest.mark.parametrize("command", [("run", "--all"), ("run", "orders", "copy"), ("feeds", "check")])
def test_a_wrong_fleet_file_is_one_error(project: Path, sluice: Sluice, command: tuple[str, ...]) -> None:
    (project / "feeds" / "copy.yaml").write_text(FEED)
    (project / "fleet.yaml").write_text("feeds_at_once: 0\ndeadline: 0s\nper_kafak: 2\n")
    said = sluice(*command, "--json")
    assert (said.code, said.document["error"]) == (2, "FeedError")
    assert said.err.count("error:") == 1
    for wrong in ("feeds_at_once: should be", "deadline: should be a second or more", "did you mean `per_kafka`?"):
        assert wrong in said.document["message"]
