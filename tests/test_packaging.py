"""The wheel holds exactly one package, and the lock satisfies the project's requirements."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sluice import testing as sluice_testing
from sluice.pipelines.model.receipts import ENGINE
from sluice.pipelines.util import extras
from sluice.pipelines.util.extras import DISTRIBUTION, install
from sluice.resources.local.local_kafka import LocalKafka
from tests.environments import create_environment, list_distributions, normalize
from tests.resources.kafka.tools import produce

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = ("pipelines", "resources", "assets", "cli")
LINKED = (*SHIPPED, "docs")
OWN = ROOT / "src/sluice"
CONTRACT = """{"name": "orders", "expectations": [
    {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 1}}]}"""

EXIT_CODES = {
    **dict.fromkeys(("--help", "init --help", "docs feeds", "docs developers/design/ledger"), 0),
    **dict.fromkeys(("feeds check", "audit orders", "doctor orders"), 0),
    **dict.fromkeys(("compact orders --dry-run", "quarantine list orders"), 0),
    **dict.fromkeys(("status orders", "peek orders:0:1", "audit orders --rescan"), 2),
    **dict.fromkeys(("run orders", "run --all", "ui", "demo", "repair", "prune", "metrics", "audit cloud"), 2),
    **dict.fromkeys(("contract init orders", "contract check orders"), 2),
    "files orders --window 2026-11-20T14": 75,
}
"""Commands run by an install without extras, and their exit codes: 2 if an extra is missing."""


def list_modules() -> set[str]:
    """Returns the path in the wheel of every file that it should contain."""
    paths = {f"sluice/{path.name}" for path in OWN.glob("*.py")} | {"sluice/py.typed"}
    paths |= {f"sluice/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "docs").rglob("*.md")}
    for own in ("airflow", "dagster", "testing"):
        paths |= {f"sluice/{path.relative_to(OWN).as_posix()}" for path in (OWN / own).rglob("*.py")}
    for folder in SHIPPED:
        files = (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.json"))
        paths |= {f"sluice/{path.relative_to(ROOT).as_posix()}" for path in files}
    compiled = Path("pipelines/records/compiled/loops")
    paths |= {f"sluice/{compiled.as_posix()}/{path.name}" for path in (ROOT / compiled).glob("*.so")}
    return paths


def test_package_folders_are_links_to_root_folders() -> None:
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "src/sluice").iterdir() if path.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in LINKED}
    assert all((ROOT / folder).is_dir() and not (ROOT / folder).is_symlink() for folder in LINKED)


def test_checkout_without_links_is_a_clear_error(tmp_path: Path) -> None:
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


def build_wheel(folder: Path) -> Path:
    """Build a wheel of this checkout in the folder, and return its path."""
    source = folder / "source"
    for source_folder in ("src", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / source_folder, source / source_folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_wheel_contains_every_module_once_and_nothing_else(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    assert set(names) == list_modules()
    _run_without_extras(wheel, tmp_path / "installed")


def _run_without_extras(wheel: Path, folder: Path) -> None:
    """Run the wheel's files in a process that cannot import packages missing from an install without extras."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    script = f"""import sys
sys.modules |= dict.fromkeys({list_missing_modules()!r})
from sluice.cli.main import main
import sluice.cli.main
assert sluice.cli.main.__file__.startswith({str(folder)!r})
for asked in sys.argv[1:]:
    print(asked, main(asked.split()))"""
    done = subprocess.run(
        [sys.executable, "-c", script, *EXIT_CODES],
        cwd=_create_project(folder),
        env={k: v for k, v in os.environ.items() if k != ENGINE} | {"PYTHONPATH": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    )
    codes = dict(
        line.rpartition(" ")[::2] for line in done.stdout.splitlines() if line.rpartition(" ")[0] in EXIT_CODES
    )
    assert {command: int(code) for command, code in codes.items()} == EXIT_CODES, done.stderr
    _check_errors(done.stderr)


def _create_project(folder: Path) -> Path:
    project = folder / "project"
    (project / "feeds").mkdir(parents=True)
    feed = "topics: a\nstart: earliest\nkafka: {bootstrap: '127.0.0.1:9'}\n"
    (project / "feeds" / "orders.yaml").write_text(feed)
    (project / "feeds" / "orders.contract.json").write_text(CONTRACT)
    (project / "feeds" / "cloud.yaml").write_text(f"{feed}lake: s3://bucket/prefix\n")
    return project


def _check_errors(errors: str) -> None:
    for extra in ("kafka", "kafka,dagster", "kafka,duckdb,dagster,spark", "s3", "contracts", "metrics"):
        assert install(extra) in errors
    assert "unforeseen" not in errors, errors
    assert "Traceback" not in errors, errors


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.parametrize("brought", ["kafka", "kafka,duckdb", "kafka,duckdb,dagster"])
def test_installs_without_spark_land_by_processes(
    brought: str, wheel: Path, kafka: LocalKafka, fresh_topic: Callable[..., str], tmp_path: Path
) -> None:
    """The packages are those of the running environment that pyproject.toml names; pip checks their versions."""
    environment, project = tmp_path / "environment", tmp_path / "project"
    create_environment(environment, list_distributions(*brought.split(",")))
    topic = fresh_topic(partitions=2)
    produce(kafka, topic, 10)
    (project / "feeds").mkdir(parents=True)
    feed = f"topics: {topic}\nstart: earliest\nkafka: {{bootstrap: '{kafka.bootstrap}'}}\n"
    (project / "feeds" / "orders.yaml").write_text(feed)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", ENGINE)}
    env["PATH"] = f"{environment / 'bin'}:/usr/bin:/bin"

    def call(command: str, code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=project, env=env, check=False, capture_output=True, text=True
        )
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    call(f"pip install --no-index '{wheel}[{brought}]' && pip check")
    run = "sluice run orders --engine processes"
    assert "10 records" in call(run if "dagster" in brought else f"{run} --no-dagster")
    assert "reconciled" in call("sluice audit orders --rescan")
    assert "No module named 'pyspark'" in call("python -c 'import pyspark'", code=1)


@pytest.mark.soak
def test_plain_install_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Install the wheel with the locked versions of its requirements, then an extra that an error named."""
    fresh = tmp_path / "fresh"
    locked = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?(==[^\\\n]+)", (ROOT / "requirements.lock").read_text(), re.M)
    (tmp_path / "constraints.txt").write_text("".join(f"{name}{version}\n" for name, version in locked))
    venv.create(fresh, with_pip=True)
    pip = [fresh / "bin/pip", "install", "-q", "--no-compile", "-c", tmp_path / "constraints.txt"]
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", ENGINE)}
    subprocess.run([*pip, wheel], check=True, env=own)
    project = _create_project(tmp_path)

    def ask(command: str) -> subprocess.CompletedProcess[str]:
        command_line = [fresh / "bin/sluice", *command.split()]
        return subprocess.run(command_line, cwd=project, env=own, check=False, capture_output=True, text=True)

    processes = {command_text: ask(command_text) for command_text in EXIT_CODES}
    errors = "".join(d.stderr for d in processes.values())
    assert {command_text: d.returncode for command_text, d in processes.items()} == EXIT_CODES, errors
    _check_errors(errors)
    subprocess.run([*pip, "kafka-sluice[metrics]"], check=True, cwd=project, env=own)
    assert 'sluice_up{feed="orders"} 0' in ask("metrics").stdout


def test_reading_needs_no_compiled_loops(tmp_path: Path) -> None:
    """As on a processor or a system for which nobody compiled them."""
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    feed = "kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\nformat: json\nschema: {id: int64}\n"
    path.write_text(f"{feed}lake: {tmp_path}/lake\n")
    sluice_testing.land(path, [sluice_testing.Message(b'{"id": 7}')], lake=tmp_path / "lake", environ={})
    script = f"""import sys
sys.modules |= dict.fromkeys({list_missing_modules()!r})
import sluice
from sluice.cli.main import main
hour = sluice.read("orders", "2026-01-01T00")
assert (hour.rows, hour.arrow().column("id").to_pylist()) == (1, [7])
for words in ("files orders --window 2026-01-01T00", "audit orders", "quarantine list orders", "feeds list"):
    assert main(words.split()) == 0, words
assert main(["check", "orders", "2026-01-01T00"]) == 2"""
    (tmp_path / "no loops").mkdir()
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "no loops")}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no compiled loops for its sources and this processor" in done.stderr


def test_missing_distutils_error_names_setuptools() -> None:
    """PySpark 3.5 imports it, and Python 3.12 has none."""
    error = extras.explain_import_error(ModuleNotFoundError("No module named 'distutils'", name="distutils"))
    assert error is not None
    assert "pip install setuptools" in error.remedy


def list_missing_modules() -> list[str]:
    """Returns the modules of this environment that an install without extras lacks."""
    plain = {DISTRIBUTION, *list_distributions()}
    owners = metadata.packages_distributions()
    foreign = {module for module, of in owners.items() if not plain & set(map(normalize, of))}
    return sorted(foreign - {"setuptools", "pip", "_distutils_hack"} | set(extras.BRINGS))


DECODE = (
    *("audit.rescan", "landing.sample", "landing.task", "records.*"),
    *("operating.acceptance", "operating.feed_text", "operating.peek", "operating.propose_feed"),
    "operating.trace_record",
    *("maintenance.candidates", "maintenance.replay", "maintenance.sorter", "republishing.*"),
)
"""Modules of the pipelines that decode or encode Kafka records and may need the extra `kafka`."""


def test_modules_without_decoding_import_without_extras() -> None:
    script = f"""import importlib, pkgutil, sys
from fnmatch import fnmatch
sys.modules |= dict.fromkeys({list_missing_modules()!r})
import sluice.cli, sluice.pipelines
for package in (sluice.cli, sluice.pipelines):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            module = found.name.removeprefix("sluice.pipelines.")
            allowed = ("numba", "llvmlite.binding", "cramjam", "cryptography.exceptions")
            if error.name not in allowed or not any(fnmatch(module, part) for part in {DECODE!r}):
                raise
for name in ("reading", "resources.open_ports", "resources.lake"):
    importlib.import_module("sluice." + name)"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_plain_install_has_neither_numba_nor_kafka_client() -> None:
    assert {"numba", "llvmlite", "kafka", "cramjam", "crc32c", "cryptography"} <= set(list_missing_modules())


SHARED = ("kafka", "llvmlite", "py4j", "botocore", "opentelemetry", "openlineage", "google", "grpc_tools", "airflow")
"""Packages that come with another, are namespaces of several distributions, or have another name on PyPI."""


def test_extras_bring_the_packages_that_errors_name() -> None:
    wishes = PROJECT["project"]["optional-dependencies"]
    brought = {normalize(Requirement(w).name): extra for extra in wishes if extra != "dev" for w in wishes[extra]}
    for package, extra in extras.BRINGS.items():
        if package not in SHARED:
            assert brought[normalize(package)] == extra
    # Airflow is installed with its own constraints, Kerberos' package is compiled, and `land` is the sum of four.
    assert set(extras.BRINGS.values()) - {"airflow", "kerberos"} == set(Requirement(wishes["all"][0]).extras)


def test_lock_satisfies_requirements_and_names_no_machine() -> None:
    text = (ROOT / "requirements.lock").read_text()
    locked: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", text, re.MULTILINE):
        locked.setdefault(normalize(name), []).append(version)
    wishes = [*PROJECT["project"]["dependencies"]]
    # Airflow has environments of its own (tests/airflow), and infra/kerberos.sh compiles gssapi.
    unlocked = ("airflow", "kerberos")
    locked_extras = {k: v for k, v in PROJECT["project"]["optional-dependencies"].items() if k not in unlocked}
    for extra in locked_extras.values():
        wishes += [wish for wish in extra if Requirement(wish).name != DISTRIBUTION]
    for wish in map(Requirement, wishes):
        versions = locked.get(normalize(wish.name), [])
        assert versions, f"{wish.name} is not locked: make lock"
        assert all(version in wish.specifier for version in versions), f"{wish}: make lock"
    assert not re.search(r"https?://|file:|^-|/home|/opt", text, re.MULTILINE)
