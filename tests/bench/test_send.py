"""Measuring senders, without Kafka: the cost of one more record, apart from the cost of a start, and the report."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from bench.send import PeerSends, SendReport, Sends, send_view
from bench.whole_republish import Whole


def make_peer(name: str, many: list[float], few: list[float], records: int = 1_100_000) -> PeerSends:
    """Return a peer whose runs took these seconds, of wall time and of CPU."""
    runs = [tuple(Sends(n, s, s, 50 << 20) for s in took) for n, took in ((records, many), (100_000, few))]
    return PeerSends(name, name, *runs)


WHOLE = Whole(2_000_000, 16, 4, 20.0, {"driver": 200 << 20, "jvm": 300 << 20, "worker": 250 << 20})


def print_report(*peers: PeerSends) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120)
    for part in send_view(SendReport(peers, WHOLE, {"cpu": "some", "cores": 2})):
        console.print(part)
    return out.getvalue()


def test_figures_are_marginal_costs_of_a_record() -> None:
    ours, theirs = make_peer("ours", [2.1, 2.0, 2.0], [1.0, 1.0, 1.1]), make_peer("theirs", [4.0], [1.0])
    assert ours.cpu == pytest.approx(1.0)
    assert ours.rate == pytest.approx(1_000_000)
    text = print_report(ours, theirs)
    assert [line.split()[1:6] for line in text.splitlines() if line.split()[:1] == ["theirs"]] == [
        ["3.00", "333,333", "3.0", "3.0", "52.4"]
    ]
    assert "of a task 262 MB, in 4 lanes; the command 210 MB" in " ".join(text.split())


@pytest.mark.parametrize(
    ("many", "few"),
    [
        ([1.2], [1.0]),  # within the variation of starts
        ([0.9], [1.0]),
        ([1.0], [1.0]),
        ([1.5, 1.9, 1.4], [1.0, 1.0, 1.6]),  # the starts vary by more
        ([2.9, 1.4, 1.4], [1.0, 1.0, 1.0]),
    ],
)
def test_difference_within_start_variation_gives_no_figure(many: list[float], few: list[float]) -> None:
    unmeasured, measured = make_peer("untold", many, few), make_peer("told", [3.0], [1.0])
    assert (unmeasured.cpu, unmeasured.rate) == (None, None)
    text = print_report(measured, unmeasured)
    assert "lost in what starts differ by: untold;" in " ".join(text.split())
    assert [line.split()[1:5] for line in text.splitlines() if line.split()[:2] == ["untold", "–"]] == [["–"] * 4]
    assert all(
        isinstance(p["cpu_us_per_record"], float) and math.isfinite(p["records_per_second"])
        for p in SendReport((measured,), WHOLE, {}).document()["peers"]
    )
    assert SendReport((unmeasured,), WHOLE, {}).document()["peers"][0]["cpu_us_per_record"] is None
