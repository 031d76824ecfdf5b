"""A lake that is copied during runs, in the order of docs/deploying.md, and restored loses and doubles no row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.committing.commit import CommitSettings, commit
from sluice.pipelines.errors import EntriesLost
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.operating.acceptance import accept_ledger
from sluice.testing.lake import MemoryLake
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, World, apply_step

A, B = PARTITIONS
CATCH_UP = Request(RequestKind.CATCH_UP)
ORDER = (
    lambda path: path.endswith("/tip.json"),
    lambda path: "/checkpoints/" in path,
    lambda path: "/log/" in path,
    lambda path: path.startswith("_sluice/") and "/staging/" not in path,
    lambda path: path.startswith(("data/", "quarantine/")),
)
"""The steps of the copy, in the page's order."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text("topics: orders\nstart: earliest\nkafka: {bootstrap: '127.0.0.1:9'}\n")
    world = World(load_feed(path, {}))
    land(world)
    return world


def land(world: World) -> None:
    """Write records, let an hour pass, land them and commit."""
    for tp in PARTITIONS:
        apply_step(world, ("write", tp, [0, 0, 0], False))
    apply_step(world, ("pass", 2 * HOUR))
    world.land(CATCH_UP).check()
    settings = CommitSettings(world.feed.commit, world.feed.transactional_id, world.feed.policies.on_group_moved)
    commit(world.ledger, world.group, settings)


def copy(world: World, order: tuple[Callable[[str], bool], ...], between: Callable[[World], None]) -> dict[str, bytes]:
    """Copy the lake step by step, with a call of `between` after each step."""
    copied: dict[str, bytes] = {}
    for step in order:
        copied |= {path: data for path, data in world.lake.files.items() if step(path) and path not in copied}
        between(world)
    return copied


def list_problems(world: World, lake: MemoryLake) -> tuple[object, ...]:
    ledger = Ledger(lake, "orders", lambda: world.now)
    return audit(ledger, lake, hashes=True).problems  # type: ignore[arg-type]


def list_records(world: World) -> list[tuple[int, int]]:
    """Returns partition and offset of every record that Kafka holds."""
    return [(tp.partition, r["offset"]) for tp in PARTITIONS for r in world.topic.log(tp).visible(0, 1 << 40)]


def test_copy_in_order_contains_every_file_of_its_ledger(world: World) -> None:
    problems = list_problems(world, MemoryLake(copy(world, ORDER, land)))
    assert problems
    assert all("is in no publish entry" in str(p) for p in problems), "only files of batches that came during the copy"
    assert list_problems(world, MemoryLake(copy(world, ORDER, lambda world: None))) == ()


def test_copy_with_the_ledger_last_lacks_files(world: World) -> None:
    problems = list_problems(world, MemoryLake(copy(world, (*ORDER[:2:-1], *ORDER[:3]), land)))
    assert any("is missing" in str(p) for p in problems)


def test_copy_with_the_checkpoint_after_the_log_lacks_entries(world: World) -> None:
    def land_often(world: World) -> None:
        for _ in range(8):  # enough for a checkpoint
            land(world)

    with pytest.raises(EntriesLost, match="checkpoint"):
        list_problems(world, MemoryLake(copy(world, ORDER[::-1], land_often)))


@pytest.mark.parametrize("between", [land, lambda world: None], ids=["runs go on", "all is quiet"])
def test_restored_lake_is_recognized_as_older_and_lands_again_once(
    world: World, between: Callable[[World], None]
) -> None:
    files = copy(world, ORDER, between)
    land(world)
    world.lake.files = files  # type: ignore[assignment]
    with pytest.raises(EntriesLost):
        land(world)
    accept_ledger(world.feed, world.make_ports(), "the lake was restored")
    land(world)
    assert sorted(world.read_rows(world.lake.list("data/orders"))) == list_records(world)
    assert list_problems(world, world.lake) == ()


def test_moved_lake_continues(world: World) -> None:
    world.lake = MemoryLake(copy(world, ORDER, lambda world: None))
    land(world)
    assert sorted(world.read_rows(world.lake.list("data/orders"))) == list_records(world)
    assert list_problems(world, world.lake) == ()
