"""A valid entry in the place of another: no reader takes its rows for those of a window."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.errors import EntriesLost, LedgerCorrupt
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger, checkpoint
from sluice.pipelines.ledger.entries import dump
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.operating.check_window import check_window, watch_window
from sluice.pipelines.publishing.published_files import list_files
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, START, World

CATCH_UP = Request(RequestKind.CATCH_UP)


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    path: Path = tmp_path_factory.mktemp("feeds") / "orders.yaml"
    path.write_text("kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\n")
    return load_feed(path, {})


@pytest.fixture
def world(feed: Feed) -> World:
    """Three hours of records in both partitions, landed hour by hour."""
    world = World(feed)
    for hour in range(3):
        for tp in PARTITIONS:
            world.topic.write(tp, [world.now + n for n in range(hour + 2)], False)
        world.now += HOUR
        world.land(CATCH_UP).check()
    world.now += HOUR
    world.land(CATCH_UP).check()
    return world


def read_each_way(world: World, window: int) -> list[Any]:
    """Returns the answers of the readers: files, `check`, `wait`."""
    ports = world.make_ports()
    ledger = Ledger(world.lake, "orders", lambda: world.now, checkpoints=False)
    files = list_files(world.feed, world.lake, [window], ledger=ledger)
    check = check_window(world.feed, ports, window, (), lambda progress: None)
    return [files, check.complete, check.counts, check.partitions, watch_window(world.feed, ports, window)()[1]]


def list_log(world: World) -> list[str]:
    return sorted(p for p in world.lake.files if paths.log_number(p) is not None and "/log/" in p)


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_no_reader_believes_an_entry_in_the_place_of_another(world: World, with_checkpoint: bool) -> None:
    for path in [p for p in world.lake.files if "/checkpoints/" in p]:
        world.lake.remove(path)
    if with_checkpoint:
        state = world.ledger.read()
        world.lake.put(paths.checkpoint_path("orders", state.number), checkpoint.dump(state))
    window, before = START + HOUR, dict(world.lake.files)
    answers, entries = read_each_way(world, window), list_log(world)
    assert answers[1]
    refused = 0
    for target, source in permutations(entries, 2):
        world.lake.files.update(before)
        world.lake.put(target, before[source])
        try:
            assert read_each_way(world, window) == answers
        except (LedgerCorrupt, EntriesLost):
            refused += 1
    assert refused >= len(entries)
    if not with_checkpoint:
        assert refused == len(entries) * (len(entries) - 1)


def test_another_version_of_an_entry_is_refused(world: World) -> None:
    """An entry of the same number from a copy of the lake that went on by itself."""
    (*_, path) = (p for p, e in zip(list_log(world), world.ledger.entries(), strict=True) if e[1].kind == "publish")
    entry = world.ledger.entry(paths.log_number(path) or 0)
    world.lake.put(path, dump(entry.model_copy(update={"write": "another"})))
    with pytest.raises(LedgerCorrupt, match="is not the one that was written there") as caught:
        Ledger.from_entries(world.lake, "orders", lambda: 0).read()
    assert "from a backup" in caught.value.remedy
    with pytest.raises(LedgerCorrupt, match="is not the one that was written there"):
        list_files(world.feed, world.lake, [START + 2 * HOUR], ledger=world.ledger)


def test_entries_of_earlier_releases_are_continued(world: World) -> None:
    """The first new entry names the hash of an entry without a number."""
    for number, entry in list(world.ledger.entries()):
        old = entry.model_copy(update={"number": None, "follows": ""})
        world.lake.put(paths.log_path("orders", number), dump(old))
    for path in [p for p in world.lake.files if "/checkpoints/" in p]:
        world.lake.remove(path)
    world.topic.write(PARTITIONS[0], [world.now], False)
    number = world.ledger.read().number
    world.land(CATCH_UP).check()
    assert [e.number for _, e in Ledger(world.lake, "orders", lambda: 0).entries()][number - 1 :][:2] == [None, number]
    first = world.lake.files[paths.log_path("orders", number - 1)]
    world.lake.put(paths.log_path("orders", number - 1), first.replace(b'"at":', b'"at":1'))
    with pytest.raises(LedgerCorrupt, match="is not the one that was written there"):
        Ledger.from_entries(world.lake, "orders", lambda: 0).read()
