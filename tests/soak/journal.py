"""The folder of a soak: events and findings as JSON lines, and a line a minute for the terminal."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_FINDINGS = 60
"""The soak ends early at this number of findings: more add no information."""


@dataclass
class Journal:
    """`events.jsonl` and `metrics.jsonl` of a soak. A finding fails it at its end. Safe to use from several threads."""

    folder: Path
    print_line: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    findings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def minutes(self) -> float:
        """Minutes since the soak began."""
        return (time.monotonic() - self.began) / 60

    def note(self, kind: str, text: str, **more: Any) -> None:
        """Add an event to `events.jsonl`, and count its kind."""
        self._append("events.jsonl", {"kind": kind, "text": text, **more})
        with self._lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def fail(self, text: str, **more: Any) -> None:
        """Add a finding: something that must not be. It is printed at once."""
        self.note("finding", text, **more)
        with self._lock:
            self.findings.append(text)
        self.print_line(f"  ✗ {self.minutes:6.1f} min  {text[:1000]}")

    def sample(self, line: dict[str, Any]) -> None:
        """Add a line to `metrics.jsonl`."""
        self._append("metrics.jsonl", line)

    def count(self, kind: str) -> int:
        """Returns the number of events of a kind."""
        with self._lock:
            return self.counts.get(kind, 0)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        text = json.dumps({"at": round(time.time(), 1), "minute": round(self.minutes, 2), **line}, default=str)
        with self._lock, (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
