"""Changes of a project that make Dagster's servers reload it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.assets.specs.feed_files import open_real_lake, read_shapes
from sluice.cli.daily.ui import Changes, read_stamps
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.tip import Facts, Tip
from sluice.resources.project import Project


@pytest.fixture
def ui_project(tmp_path: Path) -> Project:
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "orders.yaml").write_text("topics: orders\nstart: earliest\n")
    return Project(tmp_path)


def take_twice(changes: Changes) -> list[str]:
    """Take the changes twice: the first time there are none. Return the second."""
    assert changes.take() == []
    return changes.take()


def test_changed_definition_files_are_detected_once_settled(ui_project: Project) -> None:
    changes = Changes(ui_project, read_stamps(ui_project))
    assert take_twice(changes) == []
    feed = ui_project.feeds_folder / "orders.yaml"
    feed.write_text("topics: orders\nstart: latest\nwindow: 15m\n")
    (ui_project.feeds_folder / "orders.contract.json").write_text("{}")
    assert changes.take() == []
    feed.write_text("topics: orders\n")  # somebody still writes
    assert take_twice(changes) == ["feeds/orders.contract.json", "feeds/orders.yaml"]
    assert take_twice(changes) == []
    feed.unlink()
    (ui_project.root / "reports").mkdir()
    (ui_project.root / "reports" / "daily.sql").write_text("select 1")
    assert take_twice(changes) == ["feeds/orders.yaml", "reports/daily.sql"]


def test_new_ledger_facts_are_detected_and_editor_files_are_ignored(ui_project: Project) -> None:
    now = 0.0
    changes = Changes(ui_project, read_stamps(ui_project), lambda: now)
    for name in (".orders.yaml.swp", ".orders.yaml", "orders.yaml~", "notes.txt"):
        (ui_project.feeds_folder / name).write_text("x")
    assert take_twice(changes) == []
    lake = open_real_lake(read_shapes(ui_project).feeds["orders"])
    lake.put(paths.tip_path("orders"), Tip("id", 3, Facts(0, ("orders",))).dump())
    assert take_twice(changes) == [], "ledgers are read from time to time"
    now = 20.0
    assert take_twice(changes) == ["the ledger of orders"]
    lake.put(paths.tip_path("orders"), Tip("id", 4, Facts(0, ("orders",), retention=3)).dump())
    now = 40.0
    assert take_twice(changes) == [], "an entry that changes nothing here"
