"""A lake copied while runs go on, in the order that docs/deploying.md names, and put back: no row is lost or twice."""

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
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, World, act

A, B = PARTITIONS
CATCH_UP = Request(RequestKind.CATCH_UP)
ORDER = (
    lambda path: path.endswith("/tip.json"),
    lambda path: "/checkpoints/" in path,
    lambda path: "/log/" in path,
    lambda path: path.startswith("_sluice/") and "/staging/" not in path,
    lambda path: path.startswith(("data/", "quarantine/")),
)
"""What is copied, in the page's order."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text("topics: orders\nstart: earliest\nkafka: {bootstrap: '127.0.0.1:9'}\n")
    made = World(load_feed(path, {}))
    land(made)
    return made


def land(world: World) -> None:
    """An hour passes, and what is pending lands and is committed."""
    for tp in PARTITIONS:
        act(world, ("write", tp, [0, 0, 0], False))
    act(world, ("pass", 2 * HOUR))
    world.land(CATCH_UP).check()
    settings = CommitSettings(world.feed.commit, world.feed.transactional_id, world.feed.policies.on_group_moved)
    commit(world.ledger, world.group, settings)


def copy(world: World, order: tuple[Callable[[str], bool], ...], between: Callable[[World], None]) -> dict[str, bytes]:
    """A copy of the lake, step by step; another run lands between any two steps."""
    copied: dict[str, bytes] = {}
    for step in order:
        copied |= {path: data for path, data in world.lake.files.items() if step(path) and path not in copied}
        between(world)
    return copied


def problems(world: World, lake: MemoryLake) -> tuple[object, ...]:
    found = Ledger(lake, "orders", lambda: world.now)
    return audit(found, lake, hashes=True).problems  # type: ignore[arg-type]


def everything(world: World) -> list[tuple[int, int]]:
    """Partition and offset of every record that Kafka holds."""
    return [(tp.partition, r["offset"]) for tp in PARTITIONS for r in world.topic.log(tp).visible(0, 1 << 40)]


def test_a_copy_in_order_holds_every_file_that_its_ledger_names(world: World) -> None:
    found = problems(world, MemoryLake(copy(world, ORDER, land)))
    assert found
    assert all("is in no publish entry" in str(p) for p in found), "only files of batches that came during the copy"
    assert problems(world, MemoryLake(copy(world, ORDER, lambda world: None))) == ()


def test_where_the_ledger_is_copied_last_files_are_missing(world: World) -> None:
    found = problems(world, MemoryLake(copy(world, (*ORDER[:2:-1], *ORDER[:3]), land)))
    assert any("is missing" in str(p) for p in found)


def test_where_a_checkpoint_is_copied_after_the_log_entries_are_missing(world: World) -> None:
    def much(world: World) -> None:
        for _ in range(8):  # a checkpoint comes in it
            land(world)

    with pytest.raises(EntriesLost, match="checkpoint"):
        problems(world, MemoryLake(copy(world, ORDER[::-1], much)))


@pytest.mark.parametrize("between", [land, lambda world: None], ids=["runs go on", "all is quiet"])
def test_what_was_restored_is_known_as_older_and_then_lands_again_once(
    world: World, between: Callable[[World], None]
) -> None:
    files = copy(world, ORDER, between)
    land(world)
    world.lake.files = files  # type: ignore[assignment]
    with pytest.raises(EntriesLost):
        land(world)
    accept_ledger(world.feed, world.edges(), "the lake was restored")
    land(world)
    assert sorted(world.rows(world.lake.list("data/orders"))) == everything(world)
    assert problems(world, world.lake) == ()


def test_a_lake_that_moved_goes_on_where_it_was(world: World) -> None:
    world.lake = MemoryLake(copy(world, ORDER, lambda world: None))
    land(world)
    assert sorted(world.rows(world.lake.list("data/orders"))) == everything(world)
    assert problems(world, world.lake) == ()
