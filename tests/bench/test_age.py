"""The cost of an hour on an old feed: the measured feed is complete, and its history is not scanned."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from bench import age
from sluice.pipelines.batch import carry_out


def test_age_benchmark_lists_few_names_in_next_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(age, "MONTH", 60)
    # Progress lists staging once a second while tasks work: how often depends on the machine.
    monkeypatch.setattr(carry_out, "report_progress", lambda *_: nullcontext())
    report = age.run(tmp_path, lambda text: None, [1])
    plain, merged = report.aged
    assert plain.entries >= 60 * 5
    assert merged.entries > plain.entries
    for aged in report.aged:
        hour = aged.asked["next hour"]
        assert hour.requests["LIST"] == 4, "checkpoints, staging twice, and data from the oldest frontier on"
        assert hour.names < 100
        assert aged.asked["compact --dry-run"].requests["GET"] < 40
    assert not list(tmp_path.iterdir()), "nothing stays"
    out = io.StringIO()
    Console(file=out, width=120).print(*age.age_view(report))
    assert "1 month, merged" in out.getvalue()
