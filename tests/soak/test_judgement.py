"""The judgement of a soak: a leak is noticed, noise and restarts are not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.soak import judgement
from tests.soak.judgement import LIMIT_OF_RUN, WARM_UP, compute_run_size, judge

MINUTES = 90


def make_lines(leak: float = 0.0, *, restarted: int = MINUTES) -> list[dict[str, Any]]:
    """Measurements of each minute: a process of 150 MiB with a leak (MiB an hour), and that was restarted once."""
    draw, lines = random.Random(1), []
    for minute in range(MINUTES):
        age = minute if minute < restarted else minute - restarted
        warm = min(age, WARM_UP) * 4 + leak * age / 60 + draw.uniform(-3, 3)
        folder = {"entries": draw.randint(10, 40), "mib": draw.uniform(1, 5)}
        process = {"pid": 1 + (minute >= restarted), "memory": 150 + warm, "threads": 12, "files": 30, "sockets": 4}
        lines.append(
            {"minute": minute, "processes": {"daemon": process}, "count": draw.randint(6, 12), "temporary": folder}
            | {"home": folder, "project": folder, "caches": folder, "lag": {}, "ledger": {"orders": minute * 30}}
            | {"database": 20 + minute * 0.5, "runs": minute, "connections": 9}
        )
    return lines


def list_steep(lines: list[dict[str, Any]]) -> list[str]:
    return [s.name for s in judge(lines) if not s.is_flat]


def test_noise_and_a_warm_up_are_flat() -> None:
    assert list_steep(make_lines()) == []


def test_leak_of_a_process_is_detected() -> None:
    assert list_steep(make_lines(leak=60)) == ["daemon memory"]


def test_restart_is_not_a_leak_and_does_not_hide_a_leak() -> None:
    assert list_steep(make_lines(restarted=45)) == []
    assert list_steep(make_lines(leak=60, restarted=45)) == ["daemon memory"]


def test_short_soak_is_not_judged() -> None:
    slopes = judge(make_lines(leak=600)[:20])
    assert {s.per_hour for s in slopes} == {None}


def test_ledger_may_grow_and_other_folders_may_not() -> None:
    lines = make_lines()
    for n, line in enumerate(lines):
        line["temporary"] = {"entries": 10 + n, "mib": 1}
    assert list_steep(lines) == ["temporary entries"]


def test_database_size_is_judged_per_run() -> None:
    size = compute_run_size(make_lines())
    assert size is not None
    assert 0.49 < size < 0.51 < LIMIT_OF_RUN


def test_a_running_soak_can_be_judged_from_its_folder(tmp_path: Path) -> None:
    """Also while a line is being written."""
    text = "".join(json.dumps(line) + "\n" for line in make_lines())
    (tmp_path / "metrics.jsonl").write_text(text + '{"minute": 3')
    assert judgement.judge_folder(tmp_path) == []
    assert "daemon memory" in (tmp_path / "plot.svg").read_text()
