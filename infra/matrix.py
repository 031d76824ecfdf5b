"""Test each corner of the supported versions in an environment below build/matrix/: `make matrix`.

    python infra/matrix.py [CORNER…]        all corners without names

Installs the corner's versions, runs tests/matrix/test_corner.py with them, and writes a row into docs/installing.md.
A failed corner ends none of the others. Environments are kept until their versions change. Interpreters come from
pyenv's folder or PATH. Compiled loops are shared by corners with the same Python and numba.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "installing.md"
TOOLS = ("dagster-dg-cli>=1.12.13,<2", "databricks-sdk>=0.60", "pytest>=8", "pyspark[connect]")
"""Packages of the suite."""
PACKAGES = ("dagster", "pyspark", "pyarrow", "numba", "duckdb", "pandas")
MARKS = ("<!-- matrix -->\n", "<!-- end of matrix -->\n")
TITLES = ("corner", "Python", "Dagster", "PySpark", "pyarrow", "numba", "DuckDB", "pandas", "passed", "date")


@dataclass(frozen=True)
class Corner:
    """One environment: a Python, further requirements, the end of the ranges, and pytest's `-k`."""

    name: str
    python: str
    requirements: tuple[str, ...] = ()
    resolution: str = "highest"
    tests: str = "test"


CORNERS = (
    Corner("oldest", "3.11", resolution="lowest-direct"),
    Corner("newest", "3.13"),
    Corner("spark-3.5", "3.13", ("pyspark==3.5.*",), tests="not extra"),
    Corner("spark-4.0", "3.11", ("pyspark==4.0.*",), tests="not extra"),
    Corner("spark-4.1", "3.13", ("pyspark==4.1.*",), tests="not extra"),
    # Packages that companies install next to Sluice. dbt-core 1.12 downloads its parser from GitHub.
    Corner("neighbours", "3.11", ("apache-airflow", "dbt-core<1.12", "dlt", "pandas>=3")),
)


def main() -> None:
    names = sys.argv[1:] or [corner.name for corner in CORNERS]
    if unknown := {*names} - {corner.name for corner in CORNERS}:
        raise SystemExit(f"unknown corners: {', '.join(sorted(unknown))}")
    uv = shutil.which("uv", path=f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    if uv is None:
        raise SystemExit("uv is missing: make setup")
    began, wheel, results = time.monotonic(), build_wheel(), []
    for corner in (corner for corner in CORNERS if corner.name in names):
        print(f"== {corner.name}", flush=True)
        start = time.monotonic()
        try:
            cells, passed = run(corner, install(uv, corner, wheel))
        except subprocess.CalledProcessError as error:
            print(f"{corner.name} failed before its suite: {error}", flush=True)
            cells, passed = ("",) * len(PACKAGES) + ("failed before the suite",), False
        row = f"| {' | '.join((corner.name, corner.python, *cells, f'{datetime.now(UTC):%Y-%m-%d}'))} |"
        write(row)
        results.append(passed)
        verdict = "passed" if passed else "FAILED"
        print(f"{row}\n{corner.name}: {verdict} in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{sum(results)} of {len(results)} corners passed in {time.monotonic() - began:.0f} s")
    sys.exit(not all(results))


def build_wheel() -> Path:
    """Build the package as it is, without compiling its loops."""
    # setuptools packs all files of an earlier build.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    shutil.rmtree(BUILD / "wheel", ignore_errors=True)
    words = ("pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    command = (ROOT / ".venv" / "bin" / "python", "-m", *words, "--wheel-dir", BUILD / "wheel", ".")
    subprocess.run(command, cwd=ROOT, check=True)
    return next((BUILD / "wheel").glob("*.whl"))


def install(uv: str, corner: Corner, wheel: Path) -> Path:
    """Return the Python of the corner's environment. Raises CalledProcessError if packages do not fit together."""
    folder, locked, more = (BUILD / f"{corner.name}{end}" for end in ("", ".txt", ".in"))
    python = folder / "bin" / "python"
    BUILD.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", find_python(corner.python), folder], check=True)
    more.write_text("\n".join((*TOOLS, *corner.requirements)))
    resolved = ("--quiet", "--upgrade", "--python", python, "--resolution", corner.resolution, "-o", locked)
    subprocess.run(
        [uv, "pip", "compile", *resolved, "--extra", "all", "--extra", "compile", "pyproject.toml", more],
        cwd=ROOT,
        check=True,
    )
    subprocess.run([uv, "pip", "sync", "--quiet", "--python", python, locked], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "--no-deps", wheel], check=True)
    subprocess.run([uv, "pip", "check", "--python", python], check=True)
    return python


def find_python(version: str) -> str:
    """Return an interpreter of the version. Raises SystemExit if there is none."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [*map(str, sorted(root.glob(f"versions/{version}.*/bin/python"))), shutil.which(f"python{version}")]
    if python := next(filter(None, candidates), None):
        return python
    raise SystemExit(f"Python {version} is neither in pyenv nor on PATH")


def run(corner: Corner, python: Path) -> tuple[tuple[str, ...], bool]:
    """Run the suite. Return versions and counts, and whether all tests passed."""
    report = BUILD / f"{corner.name}.xml"
    report.unlink(missing_ok=True)
    words = ("-q", "--noconftest", "-m", "matrix", "-k", corner.tests, "-p", "no:cacheprovider", f"--junitxml={report}")
    options = ("-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=")
    # A setting of numba's own: the corner's numba compiles the loops, and the checkout's library is not used.
    environ = os.environ | {"NUMBA_CACHE_DIR": str(BUILD / "loops"), "NUMBA_OPT": "3"}
    # Minutes once: no test has to wait for it.
    subprocess.run([python, ROOT / "infra/loops.py"], cwd=BUILD, env=environ, check=True)
    command = (python, "-m", "pytest", *words, *options, "tests/matrix/test_corner.py")
    subprocess.run(command, cwd=ROOT, env=environ, check=False)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [name_test(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [name_test(case) for case in cases if case.find("skipped") is not None]
    passed = f"{len(cases) - len(failed) - len(skipped)} of {len(cases)}"
    notes = [f"{kind}: {', '.join(tests)}" for kind, tests in (("failed", failed), ("without", skipped)) if tests]
    code = f"from importlib.metadata import version; print(*map(version, {PACKAGES!r}))"
    versions = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return (*versions, "; ".join((passed, *notes))), bool(cases) and not failed


def name_test(case: ElementTree.Element) -> str:
    return str(case.get("name")).removeprefix("test_").replace("_", " ")


def write(row: str) -> None:
    """Write the row into the page; those of other corners stay, in the order of `CORNERS`."""
    text = PAGE.read_text()
    head, _, rest = text.partition(MARKS[0])
    table, _, tail = rest.partition(MARKS[1])
    rows = {match[1]: line for line in (*table.splitlines(), row) if (match := re.match(r"\| ([\w.-]+) \| \d", line))}
    ordered = [rows[corner.name] for corner in CORNERS if corner.name in rows]
    lines = (f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", *ordered)
    PAGE.write_text(head + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + tail)


if __name__ == "__main__":
    main()
