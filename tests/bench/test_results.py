"""Medians, spreads, ratios, and the page that they are written into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from sluice.bench.measure import Cost
from sluice.bench.render import markdown, shown, write
from sluice.bench.results import Landing, PeerResult, RaceResult, Report
from sluice.pipelines.errors import UsageError


def result(name: str, seconds: list[float], cpu: float | None) -> PeerResult:
    costs = (Cost(s, cpu, s * 2 if cpu else None, 0.1 if cpu else None, {"worker": 300_000_000}) for s in seconds)
    return PeerResult(
        name, f"{name}'s title", {name: "1.0"}, 1_000_000, tuple(Landing(c, 4, 30_000_000) for c in costs)
    )


def report(cpu: float | None = 1.0) -> Report:
    ours, theirs = result("ours", [1.0, 4.0, 2.0], cpu), result("theirs", [10.0, 7.0, 8.0], cpu and cpu * 9)
    race = RaceResult("raw", "everything: orders", 1_000_000, 4, "lz4", 2, (ours, theirs))
    machine = {"cpu": "A | CPU", "cores": 2, "memory_bytes": 8_000_000_000, "system": "Linux"}
    return Report("sluice bench", "2026-01-01T00:00:00+00:00", machine, {"python": "3.11"}, (race,))


def test_medians_spread_and_ratios() -> None:
    race = report().races[0]
    ours, theirs = race.results
    assert (ours.seconds, ours.rate, ours.spread) == (2.0, 500_000, (250_000, 1_000_000))
    assert ours.cpu_ns == pytest.approx(1000)
    assert race.ratio(theirs) == pytest.approx(4)
    assert race.cpu_ratio(theirs) == pytest.approx(9)
    assert ours.beside == pytest.approx(1 - 1.1 / 4)
    assert ours.peak("worker") == 300_000_000
    assert ours.peak("jvm") is None


def test_the_document_is_json_and_has_raw_figures_beside_derived_ones() -> None:
    document = json.loads(json.dumps(report().document()))
    race = document["benchmarks"][0]
    assert race["ratios"] == {"theirs": 4.0}
    assert race["cpu_ratios"] == {"theirs": 9.0}
    assert [x["cost"]["seconds"] for x in race["peers"][0]["landings"]] == [1.0, 4.0, 2.0]


def test_a_machine_that_tells_no_cpu_time_still_gives_rates() -> None:
    race = report(cpu=None).races[0]
    assert race.results[0].cpu_ns is None
    assert race.cpu_ratio(race.results[1]) is None
    assert "500,000" in markdown(report(cpu=None))


def test_terminal_and_markdown_say_the_same() -> None:
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in shown(report()):
        console.print(part)
    for text in (console.export_text(), markdown(report())):
        assert all(part in text for part in ("ours's title", "500,000", "4.0×", "9.0×", "Python worker 300 MB"))


def test_results_go_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    for _ in range(2):
        write(report(), tmp_path)
    text = page.read_text()
    assert text.startswith("before\n<!-- results -->\n### raw")
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text
    assert json.loads((tmp_path / "performance.json").read_text()) == json.loads(json.dumps(report().document()))


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "performance.md").write_text("mine")
    with pytest.raises(UsageError):
        write(report(), tmp_path)
    assert (tmp_path / "performance.md").read_text() == "mine"
