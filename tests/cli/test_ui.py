"""What has Dagster's servers load a project again."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.assets.specs.feed_files import remember
from sluice.cli.daily.ui import Changes, read_stamps
from sluice.resources.project import Project


@pytest.fixture
def made(tmp_path: Path) -> Project:
    (tmp_path / "feeds").mkdir()
    (tmp_path / "feeds" / "orders.yaml").write_text("topics: orders\nstart: earliest\n")
    return Project(tmp_path)


def settled(changes: Changes) -> list[str]:
    """What two looks find."""
    assert changes.take() == []
    return changes.take()


def test_what_shapes_the_definitions_is_noticed_once_it_has_settled(made: Project) -> None:
    changes = Changes(made, read_stamps(made))
    assert settled(changes) == []
    feed = made.feeds_folder / "orders.yaml"
    feed.write_text("topics: orders\nstart: latest\nwindow: 15m\n")
    (made.feeds_folder / "orders.contract.json").write_text("{}")
    assert changes.take() == []
    feed.write_text("topics: orders\n")  # somebody still writes
    assert settled(changes) == ["feeds/orders.contract.json", "feeds/orders.yaml"]
    assert settled(changes) == []
    feed.unlink()
    (made.root / "reports").mkdir()
    (made.root / "reports" / "daily.sql").write_text("select 1")
    assert settled(changes) == ["feeds/orders.yaml", "reports/daily.sql"]


def test_what_runs_saw_of_a_feed_counts_and_what_an_editor_leaves_does_not(made: Project) -> None:
    changes = Changes(made, read_stamps(made))
    for name in (".orders.yaml.swp", ".orders.yaml", "orders.yaml~", "notes.txt"):
        (made.feeds_folder / name).write_text("x")
    assert settled(changes) == []
    remember(made, "orders", first_window=0)
    assert settled(changes) == [".sluice/seen/orders.json"]
