"""The examples of docs/testing.md run as printed, in a project with the feed and the report that they name."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()
ON_SPARK = {"test_revenue"}


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def load_example(name: str) -> Callable[..., None]:
    names: dict[str, Any] = {}
    exec(compile("\n".join(find_blocks("python")), "docs/testing.md", "exec"), names)
    return names[name]  # type: ignore[no-any-return]


NAMES = re.findall(r"^def (test_\w+)", "\n".join(find_blocks("python")), re.MULTILINE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    for folder in ("feeds", "reports"):
        shutil.copytree(ROOT / folder, root / folder)
    (contract,) = find_blocks("json")
    (root / "feeds" / "orders.contract.json").write_text(contract)
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.spark] if n in ON_SPARK else []) for n in NAMES])
def test_examples_of_the_page_run(name: str, project: Path, tmp_path: Path) -> None:
    run = load_example(name)
    run(**{"tmp_path": tmp_path / "lake"} if inspect.signature(run).parameters else {})


def test_every_part_of_the_page_has_an_example() -> None:
    assert len(NAMES) == 6
    assert set(NAMES) >= ON_SPARK
