"""Shell completion by the shells' protocol: words in environment variables, one candidate a line on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from sluice.assets.specs.feed_files import open_real_lake
from sluice.cli.app.menu import MENU, build_app
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.tip import Facts, Tip
from sluice.pipelines.util.units import HOUR, show_window
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.project import Project
from tests.cli.conftest import Sluice

HEAVY = "import sys; print(*{'dagster', 'pyspark', 'boto3', 'great_expectations', 'duckdb'} & {*sys.modules})"

Tab = Callable[..., list[str]]


@pytest.fixture
def tab(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tab:
    """Return a function that lists bash's completions of the last word."""
    from sluice.cli.main import main

    def complete(*words: str) -> list[str]:
        capfd.readouterr()
        monkeypatch.setenv("_SLUICE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["sluice", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as done:
            main([])
        assert done.value.code == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out.split()

    return complete


def test_commands_and_feeds_are_completed(tab: Tab, project: Path) -> None:
    (project / "feeds" / "other.yaml").write_text("feed: payments\n]broken")
    (project / "feeds" / ".git").mkdir()
    (project / "feeds" / ".git" / "hidden.yaml").write_text("feed: hidden")
    assert tab("ru") == ["run"]
    for line in (["run", ""], ["status", ""], ["repair", ""], ["peek", "--feed", ""], ["doctor", ""]):
        assert tab(*line) == ["orders", "payments"]
    assert tab("run", "pay") == ["payments"]
    (project / "feeds" / "github.yaml").write_text("split: {into: {push: {}, issues: {}}}\ntopics: ]broken")
    assert tab("table", "sync", "git") == ["github"]
    (project / "feeds" / "github.yaml").write_text("split: {into: {push: {}, issues: {}}}\n")
    assert tab("table", "sync", "github.") == ["github.push", "github.issues"]


def test_ended_windows_are_completed_newest_first(tab: Tab, project: Path) -> None:
    now = time.time_ns() // 1_000_000
    lake = open_real_lake(Project(project).readable_feed("orders"))
    lake.put(paths.tip_path("orders"), Tip("id", 3, Facts(now // HOUR * HOUR - 4 * HOUR, ("orders",))).dump())
    offered = tab("run", "orders", "--window", "")
    assert 3 <= len(offered) <= 4
    assert offered == sorted(offered, reverse=True)
    assert offered[-1] == show_window(now // HOUR * HOUR - 4 * HOUR)
    assert tab("run", "orders", "--from", offered[-1], "--to", "") == offered
    assert tab("run", "nosuch", "--window", "") == []


def test_topics_of_feeds_are_completed_as_position_prefixes(tab: Tab, project: Path) -> None:
    (project / "feeds" / "many.yaml").write_text("topics: [shop.a, shop.b]\nstart: earliest\nkafka: {bootstrap: a:1}\n")
    assert tab("run", "many", "--only", "") == ["shop.a:", "shop.b:"]
    assert tab("explain", "many", "shop.b") == ["shop.b:"]
    assert tab("peek", "") == ["shop.a:", "shop.b:", "orders:"]


def test_topics_of_the_given_kafka_are_completed(tab: Tab, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic(name="tab")
    assert topic in tab("init", "--bootstrap", kafka.bootstrap, "--topic", "tab")


def test_unreachable_kafka_gives_no_completions_and_no_error(tab: Tab, unused_port: Callable[[], int]) -> None:
    assert tab("init", "--bootstrap", f"127.0.0.1:{unused_port()}", "--topic", "") == []


def test_nothing_is_completed_outside_of_a_project(tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tab("run", "") == []


def test_help_and_completion_do_not_import_heavy_modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_WORDS", "sluice\nrun\norders\n--window\n")
    monkeypatch.setenv("COMP_CWORD", "4")
    script = f"""import sys, os
from sluice.cli.main import main
main(["--help"])
os.environ["_SLUICE_COMPLETE"] = "complete_bash"
try: main([])
except SystemExit: pass
{HEAVY}"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_completion_script(shell: str, sluice: Sluice) -> None:
    result = sluice("completion", shell)
    assert result.code == 0
    assert f"_SLUICE_COMPLETE=complete_{shell}" in result.out
    assert json.loads(sluice("completion", shell, "--json").out)["shell"] == shell


def test_menu_lists_every_command_once_and_daily_commands_first(sluice: Sluice) -> None:
    menu = sluice("--help").out
    assert menu.index("Daily:") < menu.index("  init ") < menu.index("  ui ") < menu.index("Inspect:")
    commands = typer.main.get_command(build_app()).commands
    texts = {name: c.get_short_help_str(200) for name, c in commands.items() if not c.hidden}
    assert texts == {name: text for section in MENU.values() for name, text in section.items()}
    assert len(texts) == sum(map(len, MENU.values()))
    assert all(menu.count(f"\n  {name} ") == 1 for name in texts)


def test_help_of_command_groups_is_not_truncated(sluice: Sluice) -> None:
    for group in ("feeds", "table", "offsets", "groups", "kafka", "quarantine", "schema", "contract"):
        assert "..." not in sluice(group, "--help").out.partition("Commands:")[2], group
