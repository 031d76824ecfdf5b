"""A republish goes on when compaction replaces the parts that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import pytest

from sluice.pipelines.errors import ProofFailed
from sluice.pipelines.model.kafka import CommittedOffset, Range
from sluice.pipelines.ports import Delivered, Lake
from sluice.pipelines.records.kafka_batches.encode import SealedBatch
from sluice.pipelines.records.shape import RAW
from sluice.pipelines.republishing import coordinates
from sluice.pipelines.republishing.republish_plan import Republish, Source, Wishes
from sluice.pipelines.republishing.send_lane import LaneSent, Run, claim
from tests.pipelines.landed_world import A, B, World, split_offsets

PLAN = Republish("again", "orders", "", Wishes("to", 1), tuple(Source(*k, (Range(0, 200),)) for k in (A, B)))


class Topic:
    """`ports.Target` of one partition, in memory."""

    throttled_ms, most_bytes = 0, None

    def __init__(self) -> None:
        self.mark: CommittedOffset | None = None
        self.records = 0

    def partitions(self) -> int:
        return 1

    def begin(self) -> CommittedOffset | None:
        return self.mark

    def send(self, batches: Iterable[SealedBatch], describe: Callable[[int], str]) -> list[Delivered]:
        delivered, at = [], self.records
        for batch in batches:
            delivered.append(Delivered(0, at, batch.numbers))
            at += batch.count
        return delivered

    def commit(self, mark: CommittedOffset) -> None:
        self.mark = mark


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.land(*split_offsets(A, 20), *split_offsets(B, 20))
    return world


def run_republish(world: World) -> LaneSent:
    lake = cast(Lake, world.lake)
    token = claim(lake, PLAN)
    return Run(PLAN, 0, token, world.reopen_ledger(), lake, Topic(), RAW, lambda: world.now).carry_out()


def test_republish_continues_when_parts_are_merged_during_read(world: World) -> None:
    opened: list[str] = []

    def merge_first(path: str) -> None:
        opened.append(path)
        if path.startswith("data/") and len(opened) == 3:
            world.compact()

    world.lake.before["open"] = merge_first
    assert run_republish(world).records == 400
    rows = [coordinates.read(world.lake, PLAN, name) for name in coordinates.files(world.lake, PLAN, 0)]  # type: ignore[arg-type]
    assert sorted(n for t in rows for n in t.column("offset").to_pylist()) == sorted([*range(200)] * 2)


def test_damaged_part_that_was_not_replaced_is_an_error(world: World) -> None:
    world.lake.files[world.list_files()[3]] = b"of another program"
    with pytest.raises(ProofFailed):
        run_republish(world)
