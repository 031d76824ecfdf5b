"""The language check reports each rule's findings, and its ceilings never rise."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def language() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "infra"))
        return importlib.import_module("language")


MODULE = '''
"""Reads files."""

def total(value):
    """None where it is not there."""
    found = value
    return found

def parse_offset(text):
    """Returns the offset in the text, which must be a decimal number that is neither negative nor larger than the
    largest signed integer of 64 bits."""
    return int(text)

def moved(offset):
    """Compare the offset with the ledger."""  # so many of them

def test_what_is_lost_is_told():
    assert moved(0) is None

class Offsets:
    @property
    def newest(self):
        """The newest offset."""

    def __len__(self):
        return 0

    def is_empty(self):
        return not _count(self)

def _count(desk):
    return len(desk)
'''


def test_each_rule_reports_its_line(language: ModuleType) -> None:
    words, _ = language.load_settings(ROOT)
    findings = [(f.rule, f.line) for f in language.check_module(MODULE, "pipelines", "x.py", words)]
    assert sorted(findings) == [
        ("aliases", 31),
        ("docstrings", 5),
        ("docstrings", 10),
        ("fragments", 31),
        ("lines", 1),
        ("names", 6),
        ("participles", 14),
        ("phrases", 15),
        ("tests", 17),
        ("verbs", 4),
        ("verbs", 14),
    ]


def test_page_check_ignores_code_blocks(language: ModuleType) -> None:
    words, _ = language.load_settings(ROOT)
    page = "# Title\n\n```\nso many\n```\n\nIt says so.\n\n" + "word " * 151 + "\n"
    assert [(f.rule, f.line) for f in language.check_page(page, "x.md", words)] == [("phrases", 7), ("paragraphs", 9)]


def test_a_count_above_its_ceiling_fails_and_ceilings_never_rise(
    language: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ceilings = {("cli", "names"): 3, ("cli", "verbs"): 2}
    assert language.report(ceilings, Counter({("cli", "names"): 3})) == 0
    assert language.report(ceilings, Counter({("cli", "names"): 4})) == 1
    assert "cli: 4 names, ceiling 3: python infra/language.py --list names cli" in capsys.readouterr().out
    settings = tmp_path / "language.toml"
    settings.write_text("[words]\nvague = ''\n\n[ceilings.cli]\nnames = 3\nverbs = 2\n")
    language.lower_ceilings(settings, ceilings, Counter({("cli", "names"): 1, ("cli", "verbs"): 9}))
    assert settings.read_text() == "[words]\nvague = ''\n\n[ceilings.cli]\nnames = 1\nverbs = 2\n"
