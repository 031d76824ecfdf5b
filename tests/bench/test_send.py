"""What is pure of measuring senders: a record more, told apart from what starting costs, and how it is shown."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from bench.send import PeerSends, SendReport, Sends, send_view
from bench.whole_republish import Whole


def peer(name: str, many: list[float], few: list[float], records: int = 1_100_000) -> PeerSends:
    """Runs that took so many seconds, and as many of CPU."""
    runs = [tuple(Sends(n, s, s, 50 << 20) for s in took) for n, took in ((records, many), (100_000, few))]
    return PeerSends(name, name, *runs)


WHOLE = Whole(2_000_000, 16, 4, 20.0, {"driver": 200 << 20, "jvm": 300 << 20, "worker": 250 << 20})


def shown(*peers: PeerSends) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120)
    for part in send_view(SendReport(peers, WHOLE, {"cpu": "some", "cores": 2})):
        console.print(part)
    return out.getvalue()


def test_figures_are_those_of_a_record_more() -> None:
    ours, theirs = peer("ours", [2.1, 2.0, 2.0], [1.0, 1.0, 1.1]), peer("theirs", [4.0], [1.0])
    assert ours.cpu == pytest.approx(1.0)
    assert ours.rate == pytest.approx(1_000_000)
    said = shown(ours, theirs)
    assert [line.split()[1:6] for line in said.splitlines() if line.split()[:1] == ["theirs"]] == [
        ["3.00", "333,333", "3.0", "3.0", "52.4"]
    ]
    assert "of a task 262 MB, in 4 lanes; the command 210 MB" in " ".join(said.split())


@pytest.mark.parametrize(
    ("many", "few"),
    [
        ([1.2], [1.0]),  # a start may differ by that much
        ([0.9], [1.0]),
        ([1.0], [1.0]),
        ([1.5, 1.9, 1.4], [1.0, 1.0, 1.6]),  # starts did differ by more
        ([2.9, 1.4, 1.4], [1.0, 1.0, 1.0]),
    ],
)
def test_what_is_lost_in_the_start_is_no_figure(many: list[float], few: list[float]) -> None:
    untold, told = peer("untold", many, few), peer("told", [3.0], [1.0])
    assert (untold.cpu, untold.rate) == (None, None)
    said = shown(told, untold)
    assert "lost in what starts differ by: untold;" in " ".join(said.split())
    assert [line.split()[1:5] for line in said.splitlines() if line.split()[:2] == ["untold", "–"]] == [["–"] * 4]
    assert all(
        isinstance(p["cpu_us_per_record"], float) and math.isfinite(p["records_per_second"])
        for p in SendReport((told,), WHOLE, {}).document()["peers"]
    )
    assert SendReport((untold,), WHOLE, {}).document()["peers"][0]["cpu_us_per_record"] is None
