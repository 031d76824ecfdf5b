"""What is installed is what was meant: one package in the wheel, and a lock that fits the project's own wishes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sluice.pipelines.vocabulary import extras

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = ("pipelines", "resources", "assets", "cli")
LINKED = (*SHIPPED, "bench", "docs")
OWN = ROOT / "src/sluice"
CONTRACT = """{"name": "orders", "expectations": [
    {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 1}}]}"""


def modules_at_the_root() -> set[str]:
    """Every file that a wheel should hold, as it should be named there."""
    found = {"sluice/__init__.py", "sluice/py.typed"}
    found |= {f"sluice/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    for own in ("dagster", "testing"):
        found |= {f"sluice/{path.relative_to(OWN).as_posix()}" for path in (OWN / own).rglob("*.py")}
    for folder in SHIPPED:
        paths = (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.json"))
        found |= {f"sluice/{path.relative_to(ROOT).as_posix()}" for path in paths}
    return found


def test_every_folder_of_the_package_is_a_link_to_the_one_at_the_root() -> None:
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "src/sluice").iterdir() if path.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in LINKED}
    assert all((ROOT / folder).is_dir() and not (ROOT / folder).is_symlink() for folder in LINKED)


def test_a_checkout_without_links_says_so(tmp_path: Path) -> None:
    package = tmp_path / "sluice"
    package.mkdir()
    shutil.copy(ROOT / "src/sluice/__init__.py", package)
    (package / "pipelines").write_text("../../pipelines")
    done = subprocess.run(
        [sys.executable, "-c", "import sluice"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "symbolic link" in done.stderr
    assert "core.symlinks=true" in done.stderr


def built(folder: Path) -> Path:
    """A wheel of this checkout, built in the folder."""
    source = folder / "source"
    for each in ("src", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / each, source / each, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_wheel_holds_every_module_once_and_nothing_else(tmp_path: Path) -> None:
    wheel = built(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    assert set(names) == modules_at_the_root()
    _works_without_extras(wheel, tmp_path / "installed")


def _works_without_extras(wheel: Path, place: Path) -> None:
    """The wheel's own files, in a process in which nothing can be imported that an extra brings."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    script = f"""import sys
sys.modules |= dict.fromkeys({sorted(extras.BRINGS)!r})
from sluice.cli.main import main
import sluice.cli.main
assert sluice.cli.main.__file__.startswith({str(place)!r})
for asked in sys.argv[1:]:
    print(asked, main(asked.split()))"""
    asked = ["init --help", "docs feeds", "status orders", "run orders", "contract check orders", "audit cloud"]
    project = place / "project"
    (project / "feeds").mkdir(parents=True)
    (project / "feeds" / "orders.yaml").write_text("topics: a\nstart: earliest\nkafka: {bootstrap: '127.0.0.1:9'}\n")
    (project / "feeds" / "orders.contract.json").write_text(CONTRACT)
    (project / "feeds" / "cloud.yaml").write_text(
        "topics: a\nstart: earliest\nkafka: {bootstrap: '127.0.0.1:9'}\nlake: s3://bucket/prefix\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *asked],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(place)},
        check=True,
        capture_output=True,
        text=True,
    )
    codes = dict(line.rpartition(" ")[::2] for line in done.stdout.splitlines() if line.rpartition(" ")[0] in asked)
    assert codes == dict.fromkeys(asked, "2") | {"init --help": "0", "docs feeds": "0", "status orders": "1"}, (
        done.stderr
    )
    for extra in ("land", "s3", "contracts"):
        assert f"pip install 'sluice[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_everything_that_looks_is_imported_without_any_extra() -> None:
    script = f"""import importlib, pkgutil, sys
sys.modules |= dict.fromkeys({sorted(extras.BRINGS)!r})
import sluice.cli, sluice.pipelines
for package in (sluice.cli, sluice.pipelines):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
for name in ("reading", "stream", "edges", "lakes"):
    importlib.import_module("sluice.resources." + name)"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_extra_brings_what_errors_say() -> None:
    wishes = PROJECT["project"]["optional-dependencies"]
    brought = {_plain(Requirement(w).name): extra for extra in wishes if extra != "dev" for w in wishes[extra]}
    for package, extra in extras.BRINGS.items():
        # They come with pyspark and boto3; or are the top of what several packages share, or that is named otherwise.
        if package not in ("py4j", "botocore", "opentelemetry", "openlineage", "google", "grpc_tools"):
            assert brought[_plain(package)] == extra
    assert set(extras.BRINGS.values()) == set(Requirement(wishes["all"][0]).extras)


def test_the_lock_has_each_requirement_in_a_version_that_fits_and_nothing_of_this_machine() -> None:
    text = (ROOT / "requirements.lock").read_text()
    locked: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", text, re.MULTILINE):
        locked.setdefault(_plain(name), []).append(version)
    wishes = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wishes += [wish for wish in extra if Requirement(wish).name != "sluice"]
    for wish in map(Requirement, wishes):
        versions = locked.get(_plain(wish.name), [])
        assert versions, f"{wish.name} is not locked: make lock"
        assert all(version in wish.specifier for version in versions), f"{wish}: make lock"
    assert not re.search(r"https?://|file:|^-|/home|/opt", text, re.MULTILINE)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
