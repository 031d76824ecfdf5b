"""docs/developers/kafka-concepts.md: every concept has its place, and every file that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/developers/kafka-concepts.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]


def test_no_cell_is_empty() -> None:
    assert len(ROWS) > 60
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in ROWS)


def test_every_named_file_exists() -> None:
    paths = re.findall(r"`((?:pipelines|resources|assets|cli|tests)/[\w/]+\.py)`", PAGE)
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_each_shown_concept_names_a_test_file() -> None:
    proofs = [row[2] for row in ROWS if row[2] not in ("shown by", "not yet")]
    assert [cell for cell in proofs if not cell.startswith("`tests/")] == []
