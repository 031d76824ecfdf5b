"""The plan of a rename: which files it changes, and which names it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.pipelines.errors import FeedError, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feeds
from sluice.pipelines.operating.rename_feed import Rename, plan_rename

TEXT = "# The shop's orders.\nkafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\n"


def write(root: Path, name: str, text: str = TEXT) -> Path:
    path = root / "feeds" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def load(root: Path) -> dict[str, Feed]:
    return dict(load_feeds(root / "feeds", {}))


def plan(root: Path, path: Path, name: str, feed: str = "orders") -> Rename:
    feeds = load(root)
    return plan_rename(feeds[feed], path, name, feeds, root)


def test_group_and_transactional_id_stay_those_of_the_former_name(tmp_path: Path) -> None:
    path = write(tmp_path, "orders")
    before = load(tmp_path)["orders"]
    plan(tmp_path, path, "sales").carry_out()
    plan(tmp_path, path.with_name("sales.yaml"), "income", "sales").carry_out()
    (after,) = load(tmp_path).values()
    assert (after.name, after.stored) == ("income", "orders")
    assert (after.group, after.transactional_id) == (before.group, before.transactional_id)
    assert path.with_name("income.yaml").read_text() == f"stored_as: orders\n{TEXT}"


def test_a_file_that_names_its_feed_keeps_its_own_name(tmp_path: Path) -> None:
    path = write(tmp_path, "shop", f"feed: orders  # of the shop\n{TEXT}")
    (tmp_path / "fleet.yaml").write_text("feeds_at_once: 2  # orders first\n")
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "a.sql").write_text("select * from reorders")
    planned = plan(tmp_path, path, "sales")
    assert planned.mentions == (tmp_path / "fleet.yaml",)
    planned.carry_out()
    (after,) = load(tmp_path).values()
    assert (path.exists(), after.name, after.stored) == (True, "sales", "orders")


@pytest.mark.parametrize("name", ["orders", "clicks", "views", "no/name", ""])
def test_names_that_are_not_free_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "orders")
    write(tmp_path, "clicks", f"stored_as: views\n{TEXT}")
    with pytest.raises(UsageError):
        plan(tmp_path, path, name)


def test_two_feeds_of_one_ledger_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "orders")
    write(tmp_path, "sales", f"stored_as: orders\ngroup: other\n{TEXT}")
    with pytest.raises(FeedError, match="they would share a ledger"):
        load(tmp_path)


def test_paths_and_ledgers_are_named_by_stored() -> None:
    # By `feed.name`, a renamed feed would have another ledger, and its rows would land again.
    root, folders = Path(__file__).parents[3], ("pipelines", "resources", "assets", "cli", "src/sluice")
    taker = r"(?:\bpaths\.\w+\(|\bLedger(?:\.\w+)?\([^,]+, |\bPlan\(|lake, )"
    wrong = re.compile(taker + r"(?:\w+\.)*(?:_?feed|dataset)\.name\b")
    files = (path for folder in folders for path in (root / folder).rglob("*.py"))
    assert {p.name: uses for p in files if (uses := wrong.findall(p.read_text()))} == {}
