"""README and the tutorial: what a newcomer copies runs as it stands there, on a Kafka of its own, and prints that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import sluice
from sluice.assets.jobs.report_assets import read_reports
from sluice.cli.main import main
from sluice.pipelines.feed.load import load_feed
from sluice.resources.project import Project

ROOT = Path(__file__).parents[1]
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
SHELL_ONLY = ("pip ", "mkdir ")
HOUR = "2026-11-20T14"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Each command of the page, and the lines of its output that the page shows."""
    out: list[tuple[str, list[str]]] = []
    for line in "".join(blocks(page, "console")).splitlines():
        if line.startswith("$ "):
            out.append((line[2:], []))
        else:
            out[-1][1].append(line)
    return [each for each in out if not each[0].startswith(SHELL_ONLY)]


@dataclass
class Newcomer:
    """Somebody in an empty folder who types what the page says; what was typed before is not typed again.

    `SLUICE_TEST_COMMAND` is the command of another environment to type it into (`make release-check`).
    """

    capture: pytest.CaptureFixture[str]
    said: dict[str, str] = field(default_factory=dict)

    def follows(self, page: Path) -> None:
        for command, shown in commands(page):
            if command not in self.said:
                self.said[command] = self._type(command)
            for line in shown:
                assert _pattern(line).search(self.said[command]), f"{command}: {line!r} not in {self.said[command]}"

    def _type(self, command: str) -> str:
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


def _pattern(line: str) -> re.Pattern[str]:
    """A shown line, in which … stands for anything, and any space for some."""
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
def test_what_a_newcomer_types(newcomer: Newcomer, capfd: pytest.CaptureFixture[str]) -> None:
    newcomer.follows(README)
    newcomer.follows(TUTORIAL)
    capfd.readouterr()
    main(["status", "orders", "--json"])  # exit 1: the page has stopped its Kafka; what landed is there
    windows = json.loads(capfd.readouterr().out)["feeds"][0]["windows"]
    landed = [w["window"] for w in windows if w["state"] == "landed"][-1]
    for page in (README, TUTORIAL):
        for block in blocks(page, "python"):
            exec(compile(block.replace(HOUR, landed[:13]), str(page), "exec"), {})
    out, _ = capfd.readouterr()
    assert "revenue" in out
    assert sluice.read("orders", landed[:13]).rows > 1000


@pytest.mark.parametrize("page", [README, TUTORIAL], ids=["README", "tutorial"])
def test_the_feeds_shown_are_feeds(page: Path, tmp_path: Path) -> None:
    (block,) = blocks(page, "yaml")
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text(block)
    assert load_feed(path, {"KAFKA_BOOTSTRAP": "127.0.0.1:9"}).columns is not None


def test_the_report_of_the_tutorial_is_one(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "revenue.sql").write_text(blocks(TUTORIAL, "sql")[0])
    found = read_reports(Project(tmp_path), {"orders"})
    assert (list(found.reports), dict(found.broken)) == (["revenue"], {})


def test_figures_are_those_of_the_page_of_performance() -> None:
    page = (ROOT / "docs/developers/performance.md").read_text()
    rows = re.findall(r"^\| (.*?) \| ([\d,]+) \| ([\d,]+) \|", README.read_text().replace("*", ""), re.M)
    assert len(rows) == 7
    for name, rate, cpu in rows:
        assert f"| {rate} | {cpu} |" in page, name


def test_badges_say_what_is_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, last = re.findall(r"3\.(\d+)", project["requires-python"])
    badges = {p.stem: p.read_text() for p in (ROOT / "docs/images").glob("badge-*.svg")}
    assert f">3.{first} – 3.{int(last) - 1}<" in badges["badge-python"]
    assert ">Apache 2.0<" in badges["badge-license"]
    assert project["license"] == "Apache-2.0"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)|src=\"([^\"]+)\"", README.read_text())
    assert links
    assert not [path for pair in links for path in pair if path and not (ROOT / path).exists()]
