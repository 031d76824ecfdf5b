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
    tables = MODEL.read_text().partition("## Attacks")[2].partition("## Not protected")[0]
    rows = [
        line for line in tables.splitlines() if line.startswith("| ") and not line.startswith(("| attack", "| where"))
    ]
    assert [row for row in rows if not REFERENCE.search(row)] == []


def _has(file: Path, test: str) -> bool:
    return file.is_file() and f"def {test}(" in file.read_text()
