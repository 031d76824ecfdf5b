"""Medians, spreads and ratios, and the page into which they are written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bench import command
from bench.__main__ import app
from bench.budget import share_cpu
from bench.command import Keep
from bench.measure import Cost
from bench.plot import plot
from bench.render import PLOT, race_view, to_markdown, write
from bench.results import BenchReport, CheckedLanding, PartTimes, PeerResult, Provenance, RaceResult, StartTimes
from sluice.cli.main import run_app
from sluice.pipelines.errors import Failed, UsageError


def make_result(name: str, seconds: list[float], cpu: float | None) -> PeerResult:
    costs = (Cost(s, *make_clocks(s, cpu), {"driver": 100_000_000, "worker": 300_000_000}) for s in seconds)
    return PeerResult(
        name, f"{name}'s title", {name: "1.0"}, 1_000_000, tuple(CheckedLanding(c, 4, 30_000_000) for c in costs)
    )


def make_clocks(seconds: float, cpu: float | None) -> tuple[dict[str, float] | None, float | None, float | None]:
    return ({"driver": cpu / 4, "worker": cpu * 3 / 4}, seconds * 2, 0.1) if cpu else (None, None, None)


def make_race(name: str = "raw", cpu: float | None = 1.0, when: str = "2026-01-01T00:00:00+00:00") -> RaceResult:
    ours, theirs = make_result("sluice", [1.0, 4.0, 2.0], cpu), make_result("spark", [10.0, 7.0, 8.0], cpu and cpu * 9)
    machine = {"cpu": "A | CPU", "cores": 2, "memory_bytes": 8_000_000_000, "system": "Linux"}
    run = Provenance("bench raw", when, machine, {"python": "3.11"})
    budget = PartTimes((make_parts(100), make_parts(300), make_parts(400)))
    return RaceResult(name, "everything: orders", 1_000_000, 4, "lz4", 2, (ours, theirs), budget, run)


def make_parts(encode: float) -> dict[str, float]:
    return {"crc": 20.0, "decompress": 80.0, "decode": 100.0, "encode": encode}


def make_report(cpu: float | None = 1.0) -> BenchReport:
    return BenchReport((make_race(cpu=cpu),))


def test_medians_spread_and_ratios_are_computed() -> None:
    ours, theirs = make_race().results
    assert (ours.seconds, ours.rate, ours.spread) == (2.0, 500_000, (250_000, 1_000_000))
    assert ours.cpu_ns == pytest.approx(1000)
    assert (ours.cpu_ns_of("driver"), ours.cpu_ns_of("worker")) == (pytest.approx(250), pytest.approx(750))
    assert ours.cpu_ns_of("jvm") is None
    assert make_race().ratio(theirs) == pytest.approx(4)
    assert make_race().cpu_ratio(theirs) == pytest.approx(9)
    assert ours.elsewhere == pytest.approx(1 - 1.1 / 4)
    assert ours.peak("worker") == 300_000_000
    assert ours.peak("jvm") is None


def test_ratio_to_sum_of_parts_is_computed() -> None:
    assert (budget := make_race().budget)
    assert (budget.parts, budget.sum) == (make_parts(300), 500)
    # 1,000 ns of CPU each; 1, 4 and 2 s of two cores for a million records; the parts after them 300, 500 and 600 ns.
    assert make_race().over_budget == (pytest.approx(2.0), pytest.approx(4000 / 600))
    assert make_race(cpu=None).over_budget == (None, pytest.approx(4000 / 600))
    assert replace(make_race(), budget=None).over_budget is None


def test_cpu_time_is_split_in_proportion_to_wall_time() -> None:
    assert share_cpu(900, {"crc": 1, "decode": 2}) == {"crc": 300, "decode": 600}
    assert share_cpu(900, {"crc": 0}) == {"crc": 0}


def test_document_is_json_with_raw_and_derived_figures() -> None:
    document = json.loads(json.dumps(make_report().document()))
    benchmark = document["benchmarks"][0]
    assert benchmark["ratios"] == {"spark": 4.0}
    assert benchmark["cpu_ratios"] == {"spark": 9.0}
    assert benchmark["budget"]["sum"] == 500.0
    assert benchmark["peers"][0]["cpu_ns_per_record_by_process"] == {"driver": 250, "worker": 750}
    assert [x["cost"]["seconds"] for x in benchmark["peers"][0]["landings"]] == [1.0, 4.0, 2.0]


@pytest.mark.parametrize("cpu", [1.0, None])
def test_report_is_restored_from_its_document(cpu: float | None) -> None:
    document = json.loads(json.dumps(make_report(cpu).document()))
    assert BenchReport.from_document(document) == make_report(cpu)
    assert BenchReport.from_document(document | {"format": 1}) == BenchReport(())


def test_rates_are_reported_without_cpu_time() -> None:
    assert make_race(cpu=None).results[0].cpu_ns is None
    assert make_race(cpu=None).cpu_ratio(make_race(cpu=None).results[1]) is None
    assert "500,000" in to_markdown(make_report(cpu=None))


def print_race(report: BenchReport, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for renderable in race_view(report):
        console.print(renderable)
    return console.export_text()


def test_terminal_and_markdown_show_same_figures() -> None:
    facts = ("500,000", "4.0×", "9.0×")
    expected = {print_race(make_report(), 250): ("checksums 20 + codec 80", "= 500 ns", "(2.0× the sum)", "(6.7×)")}
    expected[to_markdown(make_report())] = set()
    for text, budget in expected.items():
        assert all(fact in text for fact in (*facts, *budget))


@pytest.mark.parametrize("width", [110, 120])
def test_nothing_is_truncated_at_usual_terminal_width(width: int) -> None:
    ours, theirs = make_result("sluice", [2.7, 3.4, 2.9], 4.1), make_result("spark", [24.0, 30.0, 27.0], 33.0)
    peers = tuple(replace(r, title="Spark's Kafka connector", records=3_000_000) for r in (ours, theirs))
    grown = replace(make_flat_race(50_000_000, 200), results=(replace(ours, records=50_000_000),))
    every = BenchReport((replace(make_race(), results=peers), grown))
    assert {*print_race(every, width).split()} == {*print_race(every, 300).split()}
    assert print_race(every, width).count("Spark's Kafka connector") == 4


def make_flat_race(records: int, partitions: int) -> RaceResult:
    (ours, _), name = make_race().results, f"flat {records:,} x {partitions}"
    return replace(make_race(name), records=records, partitions=partitions, results=(replace(ours, records=records),))


def test_sizes_of_flat_are_shown_in_one_table() -> None:
    both = BenchReport((make_race(), make_flat_race(1_000_000, 4), make_flat_race(10_000_000, 4)))
    for text in (print_race(both, 120), to_markdown(both)):
        assert text.count("partitions", text.index("flat")) <= 2
        assert "10,000,000" in text


def make_docs(folder: Path) -> Path:
    """Create empty pages below the folder, and return that of performance.md."""
    docs = folder / "docs" / "developers"
    docs.mkdir(parents=True)
    marks = ("headline", "tools", "waits", "results")
    (docs / "performance.md").write_text("".join(f"<!-- {m} -->\nold\n<!-- /{m} -->\n" for m in marks) + "after\n")
    (folder / "README.md").write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\n")
    return docs


def test_results_are_written_between_page_markers(tmp_path: Path) -> None:
    docs = make_docs(tmp_path)
    for _ in range(2):
        write(make_report(), docs)
    text = (docs / "performance.md").read_text()
    assert text.startswith(
        "<!-- headline -->\nOn 2 quiet cores, sluice's title lands 0.5 million raw records a second: 4 times"
    )
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text
    assert json.loads((docs / "performance.json").read_text()) == json.loads(json.dumps(make_report().document()))
    assert f"({PLOT})" in text
    ElementTree.fromstring((docs / PLOT).read_text())


def test_readme_shows_typed_next_to_times_of_starts(tmp_path: Path) -> None:
    docs, race = make_docs(tmp_path), make_race("typed")
    ours, spark = (replace(r, title=title) for r, title in zip(race.results, ("Sluice", "Spark"), strict=True))
    processes = replace(ours, peer="sluice-processes", title="Sluice, processes")
    write(BenchReport((replace(race, results=(ours, processes, spark)),)), docs)
    seconds = {"Sluice through Dagster": (2.42, 2.8), "Spark": (13.8, 22.6)}
    assert race.run
    write(BenchReport((), StartTimes(20_000, seconds, race.run)), docs)
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert lines[-6:-1] == [
        "| --- | --: | --: | --: | --: |",
        "| **Sluice** | **500,000** | **1,000** |  |  |",
        "| **Sluice, processes** | **500,000** | **1,000** |  |  |",
        "| Sluice through Dagster |  |  | 2.4 | 2.8 |",
        "| Spark | 125,000 | 9,000 | 13.8 | 22.6 |",
    ]
    tools = (docs / "performance.md").read_text()
    assert "| Sluice, processes | 500,000 | 1,000 |\n| Spark | 125,000 | 9,000 |\n" in tools
    assert "| Sluice, records/s | Sluice, processes, records/s | Spark, records/s |" in tools
    assert "| Spark | 13.80 | 22.60 |" in tools
    split = replace(ours, peer="sluice-split", title="split in three")
    write(BenchReport((replace(race, name="rows", results=(ours, split)),)), docs)
    text = (docs / "performance.md").read_text()
    assert "split in three, records/s" not in text
    assert "| rows | Sluice | 500,000 | 1,000 |\n| rows | split in three | 500,000 | 1,000 |\n" in text


def test_earlier_results_stay_until_measured_again(tmp_path: Path) -> None:
    docs = make_docs(tmp_path)
    write(BenchReport((make_flat_race(1_000_000, 4), make_race("typed"))), docs)
    write(BenchReport((make_race("raw", when="2026-02-02T00:00:00+00:00"), make_race("gzip"))), docs)
    write(BenchReport((make_race("typed", when="2026-03-03T00:00:00+00:00"),)), docs)
    saved = BenchReport.from_document(json.loads((docs / "performance.json").read_text()))
    assert [r.name for r in saved.races] == ["raw", "typed", "gzip", "flat 1,000,000 x 4"]
    assert [r.run.when[:10] for r in saved.races if r.run] == ["2026-02-02", "2026-03-03", "2026-01-01", "2026-01-01"]
    text = (docs / "performance.md").read_text()
    assert {n: text.count(f"\n| {n} | ") for n in ("raw", "typed", "gzip")} == {"raw": 2, "typed": 2, "gzip": 1}
    assert "### flat\n" in text
    assert "\n| gzip, flat | 2026-01-01 | " in text


def test_plot_has_a_bar_for_each_peer_and_no_external_references() -> None:
    race = make_race("raw")
    rust, processes = make_result("rust", [4.0], 1.0), make_result("sluice-processes", [1.0], 1.0)
    image = plot((replace(race, results=(*race.results, processes, rust)), make_race("a < b")))
    root = ElementTree.fromstring(image)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("x") == "120"]
    assert [(b.get("class"), round(float(b.get("width", "0")))) for b in bars] == [
        ("ours", 210),
        ("ours-too", 420),
        ("others", 105),
        ("ours", 210),
    ]
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text") if e.text]
    assert len(texts) == len({*texts, "4.0× 500,000/s"}) + 1, "only figures are there twice"
    assert {"sluice's title", "sluice-processes's title", "1× = Spark's Kafka connector"} < {*texts}
    assert {"4.0× 500,000/s", "8.0× 1,000,000/s", "2.0× rust's title, 250,000/s"} < {*texts}
    assert not re.search(r"<script|href|url\(", image)


@pytest.mark.parametrize(("ends", "code"), [(KeyboardInterrupt(), 130), (Failed("spark ended"), 1)])
def test_earlier_results_are_printed_when_later_benchmark_aborts(
    ends: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(request: object, words: object, note: object, keep: Keep) -> BenchReport:
        keep(make_report())
        raise ends

    monkeypatch.setattr(command, "run", run)
    assert run_app(app, "bench", ["raw", "typed", "--json"]) == code
    first, *others = capfd.readouterr().out.splitlines()
    assert BenchReport.from_document(json.loads(first)) == make_report()
    assert [json.loads(line)["exit_code"] for line in others] == ([code] if code == 1 else [])


@pytest.mark.parametrize("page", ["docs/developers/performance.md", "README.md"])
def test_page_without_markers_is_unchanged(page: str, tmp_path: Path) -> None:
    docs = make_docs(tmp_path)
    (tmp_path / page).write_text("mine")
    with pytest.raises(UsageError):
        write(make_report(), docs)
    assert (tmp_path / page).read_text() == "mine"
    assert not (docs / "performance.json").exists()
