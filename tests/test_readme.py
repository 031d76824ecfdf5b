"""README and the tutorial: their commands run as printed, on a Kafka of their own, and print the output shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import sluice
from bench import render
from bench.plot import plot
from bench.results import BenchReport
from sluice.assets.jobs.report_assets import read_reports
from sluice.cli.main import main
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.receipts import ENGINE
from sluice.pipelines.records.compiled import library
from sluice.resources.project import Project
from tests.environments import create_environment

ROOT = Path(__file__).parents[1]
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
SHELL_ONLY = ("make ", "pip ", "mkdir ")
HOUR = "2026-11-20T14"


def find_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def find_commands(page: Path, skipped: tuple[str, ...] = SHELL_ONLY) -> list[tuple[str, list[str]]]:
    """Returns each command of the page with the lines of its output that the page shows."""
    out: list[tuple[str, list[str]]] = []
    for line in "".join(find_blocks(page, "console")).splitlines():
        if line.startswith("$ "):
            out.append((line[2:], []))
        else:
            out[-1][1].append(line)
    return [entry for entry in out if not entry[0].startswith(skipped)]


@dataclass
class Newcomer:
    """A user in an empty folder who types the commands of a page, each only once.

    `SLUICE_TEST_COMMAND` is the command of another environment to type it into (`make release-check`).
    """

    capture: pytest.CaptureFixture[str]
    output: dict[str, str] = field(default_factory=dict)

    def follow(self, page: Path) -> None:
        for command, lines in find_commands(page):
            if command not in self.output:
                self.output[command] = self._run(command)
            check_output(command, lines, self.output[command])

    def _run(self, command: str) -> str:
        name, *arguments = command.split()
        assert name == "sluice"
        if installed := os.environ.get("SLUICE_TEST_COMMAND"):
            done = subprocess.run([installed, *arguments], capture_output=True, text=True, check=False)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            self.capture.readouterr()
            code = main(arguments)
            out, err = self.capture.readouterr()
        assert code == 0, f"{command}: {out}{err}"
        return re.sub(r"\s+", " ", out)


def check_output(command: str, lines: list[str], output: str) -> None:
    for line in lines:
        assert _compile(line).search(output), f"{command}: {line!r} not in {output}"


def _compile(line: str) -> re.Pattern[str]:
    """Returns a pattern for a line of output: … matches any text, and a space any white space."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in line.split("…"))
    return re.compile(".*".join(parts))


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Newcomer]:
    for name in ("SLUICE_PROJECT", "KAFKA_BOOTSTRAP", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield Newcomer(capfd)
    main(["kafka", "stop"])


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.slow
def test_readme_and_tutorial_run_as_typed(newcomer: Newcomer, capfd: pytest.CaptureFixture[str]) -> None:
    newcomer.follow(README)
    newcomer.follow(TUTORIAL)
    capfd.readouterr()
    main(["status", "orders", "--json"])  # exit 1: the page has stopped its Kafka; the landed windows are there
    windows = json.loads(capfd.readouterr().out)["feeds"][0]["windows"]
    landed = [w["window"] for w in windows if w["state"] == "landed"][-1]
    for page in (README, TUTORIAL):
        for block in find_blocks(page, "python"):
            exec(compile(block.replace(HOUR, landed[:13]), str(page), "exec"), {})
    out, _ = capfd.readouterr()
    assert "revenue" in out
    assert sluice.read("orders", landed[:13]).rows > 1000


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.slow
def test_readme_runs_as_typed_in_a_bare_clone(tmp_path: Path) -> None:
    """Type README's commands into a shell, in the files that git tracks, without `.venv`.

    To save minutes, the slow objects of the loops come from this checkout, and the active environment has this
    checkout's packages other than Sluice. `make release-check` installs the wheel into an empty environment.
    """
    clone, environment, outputs = tmp_path / "clone", tmp_path / "environment", tmp_path / "outputs"
    copy_tracked_files(clone)
    loops = clone / library.LOOPS.resolve().relative_to(ROOT.resolve())
    loops.mkdir()
    for path in library.LOOPS.glob("*.o"):
        if not path.name.startswith(COMPILED_ANEW):
            shutil.copy(path, loops)
    create_environment(environment)
    outputs.mkdir()
    commands = find_commands(README, skipped=())
    script = "\n".join(f"{{ {command}\n}} >{outputs}/{i} 2>&1" for i, (command, _) in enumerate(commands))
    unset = {"SLUICE_PROJECT", "KAFKA_BOOTSTRAP", "DAGSTER_HOME", "PYTHONPATH", "VIRTUAL_ENV", "PYTHON", ENGINE}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env["PATH"] = f"{environment / 'bin'}:{env['PATH']}"
    try:
        done = subprocess.run(["bash", "-euc", script], cwd=clone, env=env, check=False)
        printed = [re.sub(r"\s+", " ", (outputs / str(i)).read_text()) for i in range(len(list(outputs.iterdir())))]
        assert done.returncode == 0, f"{commands[len(printed) - 1][0]}: {printed[-1]}"
        for (command, lines), output in zip(commands, printed, strict=True):
            check_output(command, lines, output)
    finally:
        if (project := tmp_path / "shop").exists():
            subprocess.run([environment / "bin/sluice", "kafka", "stop"], cwd=project, env=env, check=False)


COMPILED_ANEW = ("kafka_batches.encode.loops-", "json.counting-")
"""Objects of the loops that take seconds. The first imports the most packages."""


def copy_tracked_files(folder: Path) -> None:
    """Copy the files of this checkout that a commit would have: a clone with the changes of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (source := ROOT / name).is_symlink() or source.exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name, follow_symlinks=False)


@pytest.mark.parametrize("page", [README, TUTORIAL], ids=["README", "tutorial"])
def test_feeds_in_readme_and_tutorial_are_valid(page: Path, tmp_path: Path) -> None:
    (block,) = find_blocks(page, "yaml")
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text(block)
    assert load_feed(path, {"KAFKA_BOOTSTRAP": "127.0.0.1:9"}).columns is not None


def test_report_of_the_tutorial_is_valid(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "revenue.sql").write_text(find_blocks(TUTORIAL, "sql")[0])
    reports = read_reports(Project(tmp_path), {"orders"})
    assert (list(reports.reports), dict(reports.broken)) == (["revenue"], {})


def test_figures_and_plot_are_those_of_the_results() -> None:
    docs = ROOT / "docs" / "developers"
    report = BenchReport.from_document(json.loads((docs / render.DATA).read_text()))
    for page in (render.PAGE, render.README):
        text = (docs / page).read_text()
        assert render.fill(text, page, report) == text, f"{page}: `python -m bench … --write` fills it"
    assert (docs / render.PLOT).read_text() == plot(report.races)
    assert len(render.to_summary(report).splitlines()) > 5


def test_badges_match_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, last = re.findall(r"3\.(\d+)", project["requires-python"])
    badges = {p.stem: p.read_text() for p in (ROOT / "docs/images").glob("badge-*.svg")}
    assert f">3.{first} – 3.{int(last) - 1}<" in badges["badge-python"]
    assert ">Apache 2.0<" in badges["badge-license"]
    assert project["license"] == "Apache-2.0"


def test_readme_links_resolve() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)|src=\"([^\"]+)\"", README.read_text())
    assert links
    assert not [path for pair in links for path in pair if path and not (ROOT / path).exists()]
