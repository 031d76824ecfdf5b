"""What is installed is what was meant: one package in the wheel, and a lock that fits the project's own wishes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sluice.pipelines.util import extras
from sluice.pipelines.util.extras import DISTRIBUTION, install

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = ("pipelines", "resources", "assets", "cli")
LINKED = (*SHIPPED, "docs")
OWN = ROOT / "src/sluice"
CONTRACT = """{"name": "orders", "expectations": [
    {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 1}}]}"""

ASKED = {
    **dict.fromkeys(("--help", "init --help", "docs feeds", "docs developers/design/ledger"), 0),
    **dict.fromkeys(("feeds check", "audit orders", "doctor orders"), 0),
    **dict.fromkeys(("compact orders --dry-run", "quarantine list orders"), 0),
    **dict.fromkeys(("status orders", "peek orders:0:1", "audit orders --rescan"), 2),
    **dict.fromkeys(("run orders", "run --all", "ui", "demo", "repair", "prune", "metrics", "audit cloud"), 2),
    **dict.fromkeys(("contract init orders", "contract check orders"), 2),
    "files orders --window 2026-11-20T14": 75,
}
"""What is asked of a plain install, and how each ends: 2 where an extra is missing."""


def modules_at_the_root() -> set[str]:
    """Every file that a wheel should hold, as it should be named there."""
    found = {f"sluice/{path.name}" for path in OWN.glob("*.py")} | {"sluice/py.typed"}
    found |= {f"sluice/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "docs").rglob("*.md")}
    for own in ("airflow", "dagster", "testing"):
        found |= {f"sluice/{path.relative_to(OWN).as_posix()}" for path in (OWN / own).rglob("*.py")}
    for folder in SHIPPED:
        paths = (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.json"))
        found |= {f"sluice/{path.relative_to(ROOT).as_posix()}" for path in paths}
    compiled = Path("pipelines/records/compiled/loops")
    found |= {f"sluice/{compiled.as_posix()}/{path.name}" for path in (ROOT / compiled).glob("*.so")}
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
    """The wheel's own files, in a process in which nothing can be imported that a plain install lacks."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    script = f"""import sys
sys.modules |= dict.fromkeys({not_brought()!r})
from sluice.cli.main import main
import sluice.cli.main
assert sluice.cli.main.__file__.startswith({str(place)!r})
for asked in sys.argv[1:]:
    print(asked, main(asked.split()))"""
    done = subprocess.run(
        [sys.executable, "-c", script, *ASKED],
        cwd=_plain_project(place),
        env=os.environ | {"PYTHONPATH": str(place)},
        check=True,
        capture_output=True,
        text=True,
    )
    codes = dict(line.rpartition(" ")[::2] for line in done.stdout.splitlines() if line.rpartition(" ")[0] in ASKED)
    assert {asked: int(code) for asked, code in codes.items()} == ASKED, done.stderr
    _names_what_is_missing(done.stderr)


def _plain_project(place: Path) -> Path:
    project = place / "project"
    (project / "feeds").mkdir(parents=True)
    feed = "topics: a\nstart: earliest\nkafka: {bootstrap: '127.0.0.1:9'}\n"
    (project / "feeds" / "orders.yaml").write_text(feed)
    (project / "feeds" / "orders.contract.json").write_text(CONTRACT)
    (project / "feeds" / "cloud.yaml").write_text(f"{feed}lake: s3://bucket/prefix\n")
    return project


def _names_what_is_missing(said: str) -> None:
    for extra in ("kafka", "land", "s3", "contracts", "metrics"):
        assert install(extra) in said
    assert "unforeseen" not in said, said
    assert "Traceback" not in said, said


@pytest.mark.soak
def test_a_plain_install_into_a_fresh_environment(tmp_path: Path) -> None:
    """The wheel with the locked versions of what it requires, and then an extra that an error named."""
    wheel, fresh = built(tmp_path), tmp_path / "fresh"
    locked = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?(==[^\\\n]+)", (ROOT / "requirements.lock").read_text(), re.M)
    (tmp_path / "constraints.txt").write_text("".join(f"{name}{version}\n" for name, version in locked))
    venv.create(fresh, with_pip=True)
    pip = [fresh / "bin/pip", "install", "-q", "--no-compile", "-c", tmp_path / "constraints.txt"]
    subprocess.run([*pip, wheel], check=True)
    project = _plain_project(tmp_path)
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def ask(command: str) -> subprocess.CompletedProcess[str]:
        given = [fresh / "bin/sluice", *command.split()]
        return subprocess.run(given, cwd=project, env=own, check=False, capture_output=True, text=True)

    done = {asked: ask(asked) for asked in ASKED}
    said = "".join(d.stderr for d in done.values())
    assert {asked: d.returncode for asked, d in done.items()} == ASKED, said
    _names_what_is_missing(said)
    subprocess.run([*pip, "kafka-sluice[metrics]"], check=True, cwd=project, env=own)
    assert 'sluice_up{feed="orders"} 0' in ask("metrics").stdout


def test_a_missing_distutils_names_setuptools() -> None:
    """PySpark 3.5 imports it, and Python 3.12 has none."""
    error = extras.explain_import_error(ModuleNotFoundError("No module named 'distutils'", name="distutils"))
    assert error is not None
    assert "pip install setuptools" in error.remedy


def not_brought() -> list[str]:
    """The modules of this environment that a plain install would not have."""
    brought, left = {DISTRIBUTION}, [_plain(Requirement(w).name) for w in PROJECT["project"]["dependencies"]]
    while left:
        if (name := left.pop()) not in brought:
            brought.add(name)
            needed = (Requirement(r) for r in metadata.requires(name) or ())
            left += [_plain(n.name) for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})]
    owners = metadata.packages_distributions()
    foreign = {module for module, of in owners.items() if not brought & set(map(_plain, of))}
    return sorted(foreign - {"setuptools", "pip", "_distutils_hack"} | set(extras.BRINGS))


DECODE = (
    *("audit.rescan", "landing.sample", "landing.task", "operating.acceptance", "records.*"),
    *("maintenance.candidates", "maintenance.replay", "maintenance.sorter", "republishing.*"),
)
"""Modules of the pipelines that decode or write records of Kafka: those that may need the extra `kafka`."""


def test_everything_that_looks_is_imported_without_any_extra() -> None:
    script = f"""import importlib, pkgutil, sys
from fnmatch import fnmatch
sys.modules |= dict.fromkeys({not_brought()!r})
import sluice.cli, sluice.pipelines
for package in (sluice.cli, sluice.pipelines):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            module = found.name.removeprefix("sluice.pipelines.")
            allowed = ("numba", "llvmlite.binding", "cramjam")
            if error.name not in allowed or not any(fnmatch(module, part) for part in {DECODE!r}):
                raise
for name in ("reading", "resources.open_ports", "resources.lake"):
    importlib.import_module("sluice." + name)"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_plain_install_has_neither_numba_nor_a_client_of_kafka() -> None:
    assert {"numba", "llvmlite", "kafka", "cramjam", "crc32c", "cryptography"} <= set(not_brought())


SHARED = ("kafka", "llvmlite", "py4j", "botocore", "opentelemetry", "openlineage", "google", "grpc_tools", "airflow")
"""Packages that come with another, are the top of what several distributions share, or are named otherwise."""


def test_every_extra_brings_what_errors_say() -> None:
    wishes = PROJECT["project"]["optional-dependencies"]
    brought = {_plain(Requirement(w).name): extra for extra in wishes if extra != "dev" for w in wishes[extra]}
    for package, extra in extras.BRINGS.items():
        if package not in SHARED:
            assert brought[_plain(package)] == extra
    # Airflow is installed with its own constraints, and the wheel has the compiled loops.
    assert set(extras.BRINGS.values()) - {"airflow", "compile"} == set(Requirement(wishes["all"][0]).extras)


def test_the_lock_has_each_requirement_in_a_version_that_fits_and_nothing_of_this_machine() -> None:
    text = (ROOT / "requirements.lock").read_text()
    locked: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", text, re.MULTILINE):
        locked.setdefault(_plain(name), []).append(version)
    wishes = [*PROJECT["project"]["dependencies"]]
    locked_extras = {k: v for k, v in PROJECT["project"]["optional-dependencies"].items() if k != "airflow"}
    for extra in locked_extras.values():  # Airflow has environments of its own: tests/airflow
        wishes += [wish for wish in extra if Requirement(wish).name != DISTRIBUTION]
    for wish in map(Requirement, wishes):
        versions = locked.get(_plain(wish.name), [])
        assert versions, f"{wish.name} is not locked: make lock"
        assert all(version in wish.specifier for version in versions), f"{wish}: make lock"
    assert not re.search(r"https?://|file:|^-|/home|/opt", text, re.MULTILINE)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
