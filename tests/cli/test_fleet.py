"""The report of a run of several feeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.daily import run_view
from sluice.cli.daily.run_view import FeedRuns, TimedRun
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.batch.result import Landed
from sluice.pipelines.errors import GroupMoved, KafkaUnavailable, NotReached, SluiceError
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.planning.held_back import HeldBack, HeldRange
from sluice.running import RunResult
from tests.cli.conftest import FEED, Sluice

pytestmark = pytest.mark.usefixtures("default_engine")

AWAY = "no broker answers; 127.0.0.1:9: connection refused"


def make_feed_runs(name: str, *errors: SluiceError | None, landed: Landed | None = None) -> FeedRuns:
    """Return a feed with one run for each error; None is a run without an error."""
    catch_up = Request(RequestKind.CATCH_UP)
    runs = [TimedRun(name, catch_up, RunResult(name, error=error, landed=landed), {}) for error in errors]
    return FeedRuns(name, (catch_up,), runs=runs)


def test_blocked_offsets_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(FEED)
    held_back = HeldBack(load_feed(tmp_path / "a.yaml", {}), (HeldRange(TopicPartition("orders", 0), 3, 9),), None, 0)
    feeds = [make_feed_runs("a", None, landed=Landed((), (), (), held_back=(held_back,))), make_feed_runs("b", None)]
    CommandOutput().show(*run_view.feeds_view(feeds, 2.0))
    out = capfd.readouterr().out
    assert "! done, some on hold" in out
    assert "a: orders:0 is held at offset 3" in out


def test_an_error_of_many_feeds_is_reported_once_with_their_names() -> None:
    feeds = [make_feed_runs(f"f{n:02}", KafkaUnavailable(AWAY, remedy="start it")) for n in range(20)]
    feeds += [make_feed_runs("moved", GroupMoved("its offsets moved"), KafkaUnavailable(AWAY, remedy="start it"))]
    errors = [(type(e).__name__, e.message) for e in run_view.errors_with_feeds(feeds)]
    assert errors == [
        ("KafkaUnavailable", f"f00, f01, f02, f03 and 17 more: {AWAY}"),
        ("GroupMoved", "moved: its offsets moved"),
    ]
    assert [e.message for e in run_view.errors_with_feeds(feeds[:5])] == [f"f00, f01, f02, f03, f04: {AWAY}"]


def test_unreached_feed_is_not_counted_as_failed(capfd: pytest.CaptureFixture[str]) -> None:
    feeds = [make_feed_runs("a", None), make_feed_runs("b", GroupMoved("moved")), make_feed_runs("c", NotReached("no"))]
    CommandOutput().show(*run_view.feeds_view(feeds, 2.0))
    out = capfd.readouterr().out
    assert "✗ GroupMoved" in out
    assert "! not reached" in out
    assert "✗ 3 feeds in 2.0 s; 1 failed: b; 1 not reached: c" in out
    assert (run_view.list_failed(feeds), run_view.list_unreached(feeds)) == (["b"], ["c"])


@pytest.mark.parametrize("command", [("run", "--all"), ("run", "orders", "copy"), ("feeds", "check")])
def test_invalid_fleet_file_is_one_error(project: Path, sluice: Sluice, command: tuple[str, ...]) -> None:
    (project / "feeds" / "copy.yaml").write_text(FEED)
    (project / "fleet.yaml").write_text("feeds_at_once: 0\ndeadline: 0s\nper_kafak: 2\n")
    result = sluice(*command, "--json")
    assert (result.code, result.document["error"]) == (2, "FeedError")
    assert result.err.count("error:") == 1
    for wrong in ("feeds_at_once: should be", "deadline: should be a second or more", "did you mean `per_kafka`?"):
        assert wrong in result.document["message"]
