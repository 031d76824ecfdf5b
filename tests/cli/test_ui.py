"""What has Dagster's servers load a project again."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.assets.specs.feed_files import open_real_lake, read_shapes
from sluice.cli.daily.ui import Changes, read_stamps
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.tip import Facts, Tip
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


def test_new_facts_in_a_ledger_count_and_files_of_an_editor_do_not(made: Project) -> None:
    now = 0.0
    changes = Changes(made, read_stamps(made), lambda: now)
    for name in (".orders.yaml.swp", ".orders.yaml", "orders.yaml~", "notes.txt"):
        (made.feeds_folder / name).write_text("x")
    assert settled(changes) == []
    lake = open_real_lake(read_shapes(made).feeds["orders"])
    lake.put(paths.tip_path("orders"), Tip("id", 3, Facts(0, ("orders",))).dump())
    assert settled(changes) == [], "ledgers are read from time to time"
    now = 20.0
    assert settled(changes) == ["the ledger of orders"]
    lake.put(paths.tip_path("orders"), Tip("id", 4, Facts(0, ("orders",), retention=3)).dump())
    now = 40.0
    assert settled(changes) == [], "an entry that changes nothing here"
