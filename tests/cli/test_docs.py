"""`sluice docs`: the pages of the installed release; errors name only pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Sluice

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix().removesuffix(".md").removesuffix("/README") for path in DOCS.rglob("*.md")}


def test_pages_are_listed_and_printed(sluice: Sluice) -> None:
    assert set(sluice("docs", "--json").document["pages"]) == PAGES
    written = (ROOT / "docs" / "feeds.md").read_text()
    assert sluice("docs", "feeds").out == written
    assert sluice("docs", "developers/design/ledger").out == (DOCS / "developers" / "design" / "ledger.md").read_text()
    assert (
        sluice("docs", "docs/developers/design/README.md").out
        == (DOCS / "developers" / "design" / "README.md").read_text()
    )
    assert sluice("docs", "docs/feeds.md", "--json").document == {"page": "feeds", "text": written}


def test_unknown_page_error_suggests_nearest_page(sluice: Sluice) -> None:
    result = sluice("docs", "fedes")
    assert result.code == 2
    assert "→ read sluice docs feeds" in result.err


@pytest.mark.parametrize("folder", ["pipelines", "resources", "assets", "cli"])
def test_pages_named_in_code_exist(folder: str) -> None:
    text = "\n".join(path.read_text() for path in (ROOT / folder).rglob("*.py"))
    pages = {*re.findall(r"sluice docs ([a-z/-]+)", text), *re.findall(r"\bpage\([\"']([A-Za-z-]+)[\"']\)", text)}
    assert pages <= PAGES
