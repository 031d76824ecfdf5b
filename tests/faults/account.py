"""The report of a fault test: events with their times and the checker's verdict, printed live and saved as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checker.invariants import Verdict

SEED = int(os.environ.get("SLUICE_FAULTS_SEED") or 1)
RESULTS = Path(os.environ.get("SLUICE_FAULTS_KEPT") or ".sluice/faults")
"""The folder that gets `seed-<n>.jsonl`."""


@dataclass
class Account:
    """The report of one fault test. `write_line` prints a line to the terminal."""

    fault: str
    write_line: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def log(self, message: str) -> None:
        line = f"{self.elapsed:6.1f} s  {message}"
        self.lines.append(line)
        self.write_line(line)

    def count(self, name: str, by: int = 1) -> None:
        self.numbers[name] = self.numbers.get(name, 0) + by

    def record_duration(self, name: str, seconds: float) -> None:
        """Record a duration for the report. It is never asserted."""
        self.numbers[name] = round(seconds, 1)

    def record_verdict(self, verdict: Verdict) -> None:
        counts = ", ".join(f"{n:,} {name}" for name, n in verdict.counts.items() if n)
        self.log(f"checker: {'all hold' if verdict.holds else 'BROKEN'}; {counts}")
        for number, reasons in verdict.undecided.items():
            self.log(f"checker: I{number} not decided for {'; '.join(reasons)}")
        self.numbers["checked"] = dict(verdict.counts)
        self.numbers["decided"] = sorted(verdict.decided)
        self.numbers["broken"] = {str(n): b.text for n, b in verdict.first.items()}

    def save(self, outcome: str) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        line = {"fault": self.fault, "seed": SEED, "outcome": outcome, "lines": self.lines, **self.numbers}
        with (RESULTS / f"seed-{SEED}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
