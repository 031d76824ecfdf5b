"""The threat model names a test for each attack that it declares stopped: each of these tests exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
MODEL = TESTS.parent / "docs/developers/threat-model.md"
REFERENCE = re.compile(r"`([a-z0-9_/]+\.py)::(\w+)`")


def test_every_named_test_exists() -> None:
    references = REFERENCE.findall(MODEL.read_text())
    assert len(references) > 70
    missing = [f"{file}::{test}" for file, test in references if not _has(TESTS / file, test)]
    assert missing == []


def test_every_threat_names_a_test() -> None:
    tables = MODEL.read_text().partition("## Attacks")[2].partition("## Rare places")[0]
    rows = [
        line for line in tables.splitlines() if line.startswith("| ") and not line.startswith(("| attack", "| where"))
    ]
    assert [row for row in rows if not REFERENCE.search(row)] == []


def test_every_rare_place_has_a_test_or_a_trial() -> None:
    section = MODEL.read_text().partition("## Rare places")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| place")]
    assert len(rows) > 20
    ways = ("not tried", "tried on", "see below")
    assert [row for row in rows if not REFERENCE.search(row) and not any(way in row for way in ways)] == []


def _has(file: Path, test: str) -> bool:
    return file.is_file() and f"def {test}(" in file.read_text()
