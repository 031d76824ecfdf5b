"""What is installed is what was meant: one package in the wheel, and a lock that fits the project's own wishes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("sluice", "pipelines", "resources", "assets", "cli", "bench")


def modules_at_the_root() -> set[str]:
    """Every module of ours, and the schemas of messages, as a wheel should name them."""
    found = set()
    for folder in FOLDERS:
        for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.json")):
            inside = path.relative_to(ROOT).as_posix()
            found.add(inside if folder == "sluice" else f"sluice/{inside}")
    return found


@pytest.mark.slow
def test_a_wheel_holds_every_module_as_sluice_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules_at_the_root()


def test_the_lock_has_each_requirement_in_a_version_that_fits_and_nothing_of_this_machine() -> None:
    text = (ROOT / "requirements.lock").read_text()
    locked: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", text, re.MULTILINE):
        locked.setdefault(_plain(name), []).append(version)
    wishes = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    for wish in map(Requirement, wishes):
        versions = locked.get(_plain(wish.name), [])
        assert versions, f"{wish.name} is not locked: make lock"
        assert all(version in wish.specifier for version in versions), f"{wish}: make lock"
    assert not re.search(r"https?://|file:|^-|/home|/opt", text, re.MULTILINE)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
