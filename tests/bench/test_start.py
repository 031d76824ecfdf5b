"""Measuring a start, without Kafka: the time spent in a port, medians, and the report."""

from __future__ import annotations

import pytest

from bench.start import Cold, PlanTiming, StartReport, Timed, Warm, start_view
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
    cold = tuple(Cold(s, s / 2, {"start": 1.0, "exit": s - 1}) for s in (30.0, 10.0, 12.0))
    plain = (Cold(2.0, 1.0, {"connect": 0.5, "exit": 1.5}),)
    report = StartReport(cold, plain, (Warm(1.2, 0.4), Warm(1.0, 0.4)), (PlanTiming(2.0, 0.5, 0.4),))
    text = print_view(start_view(report), 100)
    assert "all 11.00 2.00 30.00" in text
    assert "connect 0.00 0.50 0.00" in text
    assert "besides 0.70 s" in text
    assert report.document()["cold"][0]["stages"]["start"] == 1.0


def test_peers_appear_next_to_sluice() -> None:
    cold = (Cold(9.0, 9.0, {}), Cold(4.0, 5.0, {}))
    report = StartReport(cold, (Cold(2.0, 3.0, {}),), (), (), {"Rust": (Cold(0.5, 0.0625, {}),)})
    text = print_view(start_view(report), 100)
    assert "through Dagster 4.00 5.00" in text
    assert "without Dagster 2.00 3.00" in text
    assert "Rust 0.50 0.06" in text
