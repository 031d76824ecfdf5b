"""What a fault did, when, and what the checker saw: told while it happens, and kept as a JSON line for each fault."""

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
KEPT = Path(os.environ.get("SLUICE_FAULTS_KEPT") or ".sluice/faults")
"""The folder that gets `seed-<n>.jsonl`."""


@dataclass
class Account:
    """Of one fault. `tell` shows a line to whoever watches."""

    fault: str
    tell: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def did(self, what: str) -> None:
        line = f"{self.elapsed:6.1f} s  {what}"
        self.lines.append(line)
        self.tell(line)

    def count(self, what: str, by: int = 1) -> None:
        self.numbers[what] = self.numbers.get(what, 0) + by

    def measured(self, what: str, seconds: float) -> None:
        """Kept and shown, never asserted."""
        self.numbers[what] = round(seconds, 1)

    def checked(self, verdict: Verdict) -> None:
        saw = ", ".join(f"{n:,} {what}" for what, n in verdict.counts.items() if n)
        self.did(f"checker: {'all hold' if verdict.holds else 'BROKEN'}; {saw}")
        for number, why in verdict.undecided.items():
            self.did(f"checker: I{number} not decided for {'; '.join(why)}")
        self.numbers["checked"] = dict(verdict.counts)
        self.numbers["decided"] = sorted(verdict.decided)
        self.numbers["broken"] = {str(n): b.text for n, b in verdict.first.items()}

    def keep(self, outcome: str) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        line = {"fault": self.fault, "seed": SEED, "outcome": outcome, "lines": self.lines, **self.numbers}
        with (KEPT / f"seed-{SEED}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
