"""The JSON of commands: its keys stay those of the golden file, and real documents have its shape."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

from tests.cli.documents import DOCUMENTS, GOLDEN, RECORD_GOLDEN, Shapes, build_golden

CLI = Path(__file__).parents[2] / "cli"


def test_keys_are_those_of_the_golden_file() -> None:
    """A key that is gone, or has another type, breaks programs: see "What stays stable" in docs/operating.md.

    For a new key: `SLUICE_RECORD_DOCUMENTS=1 pytest tests/cli/test_documents.py`.
    """
    golden = build_golden(Shapes())
    if RECORD_GOLDEN in os.environ:
        GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
    assert json.loads(GOLDEN.read_text()) == golden


def test_every_printed_document_is_pinned() -> None:
    """Compares the keys that commands add to results, in code, with those that are pinned."""
    pinned = {frozenset(d.keys) for d in DOCUMENTS if d.keys}
    for path in CLI.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "print_document":
                keys = {k.arg.removesuffix("_") for k in node.keywords if k.arg}
                has_more = len(keys) < len(node.keywords)
                assert not keys or keys in pinned or (has_more and any(keys < p for p in pinned)), f"{path}: {keys}"
