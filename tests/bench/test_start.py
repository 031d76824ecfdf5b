"""Measuring a start, without Kafka: the time spent in a port, medians, and the report."""

from __future__ import annotations

import pytest

from bench.start import Cold, PlanTiming, StartReport, Timed, Warm, start_view
from sluice.pipelines.model.receipts import EngineKind
from tests.bench.printing import print_view


class Port:
    def answer(self, question: int) -> int:
        return question + 1

    def refuse(self) -> None:
        raise ValueError("no")


def test_timed_port_forwards_calls_and_sums_time() -> None:
    timed = Timed(Port())
    assert timed.answer(question=1) == 2
    once = timed.seconds
    with pytest.raises(ValueError, match="no"):
        timed.refuse()
    assert 0 < once < timed.seconds


def test_medians_are_shown_next_to_first_run_of_project() -> None:
    first, *cold = (Cold(s, s / 2, {"start": 1.0, "exit": s - 1}) for s in (30.0, 10.0, 12.0))
    runs = {"through Dagster": tuple(cold), "without Dagster": (Cold(2.0, 1.0, {"connect": 0.5, "exit": 1.5}),)}
    warm = {EngineKind.SPARK: (Warm(1.2, 0.4), Warm(1.0, 0.4)), EngineKind.PROCESSES: (Warm(0.9, 0.0),)}
    report = StartReport(first, runs, warm, (PlanTiming(2.0, 0.5, 0.4),))
    text = print_view(start_view(report), 100)
    assert "through Dagster 11.00 5.50 1.00 10.00 0.00" in text
    assert "without Dagster 2.00 1.00 0.00 1.50 0.50" in text
    assert "first 30.00" in text
    assert "on Spark 1.10 s" in text
    assert "in processes 0.90 s" in text
    assert report.document()["cold"]["through Dagster"][0]["stages"]["start"] == 1.0


def test_peers_appear_next_to_sluice() -> None:
    runs = {"through Dagster": (Cold(4.0, 5.0, {}),), "Rust": (Cold(0.5, 0.0625, {}),)}
    text = print_view(start_view(StartReport(Cold(9.0, 9.0, {}), runs)), 100)
    assert "through Dagster 4.00 5.00" in text
    assert "Rust 0.50 0.06" in text
