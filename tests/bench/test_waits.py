"""What people wait for as a table: ratios, goals, and its place on the page."""

from __future__ import annotations

from bench import waits
from bench.render import to_waits
from bench.results import BenchReport, Provenance, WaitTimes
from tests.bench.printing import print_view

REPORT = waits.WaitReport((waits.Wait("check", 2.0, 0.5, "≤ 2.5×"), waits.Wait("--help", 0.1, None, "≤ 0.15 s")))


def test_waits_are_shown_next_to_plain_scripts_and_their_goals() -> None:
    text = print_view(waits.wait_view(REPORT), 120)
    assert "check 2.00 s 0.50 s 4.0 ≤ 2.5×" in text
    assert "--help 0.10 s ≤ 0.15 s" in text


def test_the_page_keeps_the_newest_table_of_waits() -> None:
    run = Provenance("python -m bench waits", "2026-11-30T05:00:00", {"cpu": "a processor", "cores": 2}, {})
    newer = BenchReport((), waits=WaitTimes([w.row for w in REPORT.waits], run))
    again = BenchReport(()).over(BenchReport.from_document(newer.document()), [])
    assert "| check | 2.00 s | 0.50 s | 4.0 | ≤ 2.5× |" in to_waits(again)
    assert to_waits(BenchReport(())) == ""
