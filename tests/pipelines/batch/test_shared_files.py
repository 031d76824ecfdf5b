"""Batches whose offset ranges share files: landed again, read, audited, explained, retired. The checker verifies the
results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.errors import LedgerTooNew, UsageError
from sluice.pipelines.ledger.entries import PublishEntry
from sluice.pipelines.maintenance import expiry
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.publishing.published_files import File, list_files, order_files
from tests.checker.planted import ONE, ZERO, Sound, request_range


@pytest.fixture
def sound(tmp_path: Path) -> Sound:
    created = Sound(tmp_path, shared=True)
    created.grow()
    return created


def list_visible(sound: Sound) -> list[str]:
    return sorted(p.rpartition("/")[2] for p in sound.world.lake.list("data/orders"))


def read_publish_entries(sound: Sound) -> list[PublishEntry]:
    return [e for _, e in sound.world.ledger.entries() if isinstance(e, PublishEntry)]


def test_one_file_per_batch_and_the_account_balances(sound: Sound) -> None:
    assert list_visible(sound) == [f"orders-0-{r}-shared.parquet" for r in ("0-12-b2", "12-15-b7", "15-18-b12")]
    assert sound.check().broken == []
    report = audit(sound.world.ledger, sound.world.lake, hashes=True)
    assert (report.problems, report.files) == ((), 3)


def test_every_record_is_explained(sound: Sound) -> None:
    for tp in (ZERO, ONE):
        for row in sound.world.topic.log(tp).visible(0, sound.world.topic.log(tp).end):
            explanation = explain(sound.world.ledger, sound.world.lake, tp, row["offset"])
            assert explanation.path
            rows = sound.world.read_rows([explanation.path])
            assert rows[explanation.row or 0] == (tp.partition, row["offset"])


def test_landing_again_replaces_the_whole_file(sound: Sound) -> None:
    sound.world.land(request_range(0, 1, again=True))
    (*_, again) = read_publish_entries(sound)
    assert {r.offset_range.tp for r in again.receipts} == {ZERO, ONE}
    assert {r.offset_range.range for r in again.receipts} == {
        r.offset_range.range for r in read_publish_entries(sound)[0].receipts
    }
    assert "orders-0-0-12-b2-shared.parquet" not in list_visible(sound)
    assert sound.check().broken == []


def test_landing_again_is_refused_if_kafka_deleted_a_range_of_the_file(tmp_path: Path) -> None:
    sound = Sound(tmp_path, shared=True)
    sound.produce(ONE, 5)
    sound.land()
    sound.produce(ZERO, 2)
    sound.produce(ONE, 2)
    sound.land()
    before = list_visible(sound)
    sound.world.topic.log_start = 1
    again = Request(RequestKind.OFFSETS, ranges=(AskedRange("orders", 1, 5, 7),), replace=True)
    with pytest.raises(
        UsageError, match=r"orders:0:0-2 cannot be landed again now, and shares a file with requested offsets"
    ):
        sound.world.land(again)
    assert list_visible(sound) == before


def test_ranges_are_retired_with_their_file(sound: Sound) -> None:
    world = sound.world
    before = sorted(t for t in world.ledger.read().boundary_times)[1]
    done = expiry.expire(
        world.ledger, world.lake, expiry.RetireRequest(before, "old"), world.feed.window, world.liveness
    )
    assert [r.offset_range.tp for r in done.expiry.receipts] == [ZERO, ONE]
    assert done.removed.parts == done.expiry.paths
    assert sound.check().broken == []


def test_the_files_of_a_window(sound: Sound) -> None:
    world = sound.world
    (first, *_) = world.list_windows()
    listed = list_files(world.feed, world.lake, [first], PartKind.LANDED)
    assert [(f.partition, f.first, f.rows) for f in listed] == [(0, 0, 8), (1, 8, 5)]
    assert sum(f.bytes for f in listed) == world.lake.size(listed[0].path)
    assert len(order_files(listed)) == 1


def make_file(path: str, partition: int, start: int) -> File:
    return File(0, PartKind.LANDED, path, path, "orders", partition, start, start + 1, 1, 1, "")


@pytest.mark.parametrize(
    ("files", "order"),
    [
        ([("a", 0, 0), ("b", 0, 1), ("c", 1, 0)], "abc"),
        ([("b", 0, 1), ("a", 1, 0), ("b", 1, 1)], "ab"),
        ([("c", 0, 0), ("a", 0, 5), ("a", 1, 0), ("b", 1, 1), ("c", 2, 3), ("b", 2, 4)], "cab"),
        ([("a", 0, 0), ("b", 0, 1), ("b", 1, 0), ("a", 1, 1)], "ab"),
        ([("a", 0, 0), ("a", 0, 1), ("b", 0, 2)], "ab"),
    ],
    ids=["alone", "behind", "more", "in a circle", "the same"],
)
def test_file_order_keeps_the_order_of_the_log(files: list[tuple[str, int, int]], order: str) -> None:
    assert "".join(f.path for f in order_files([make_file(*f) for f in files])) == order


def test_older_sluice_stops_at_the_entry(sound: Sound) -> None:
    raw = json.loads(next(sound.get_entry_path(n) for n in sound.list_numbers("publish")).read_bytes())
    assert raw["format"] == 3
    log = sound.list_numbers("publish")[0]
    path = f"_sluice/orders/log/{log:020d}.json"
    sound.world.lake.files[path] = json.dumps(raw | {"format": 4}).encode()
    with pytest.raises(LedgerTooNew):
        list(sound.world.ledger.entries())


# -- the audit and the checker detect errors in a shared file


def change(sound: Sound, how: Any) -> None:
    """Change the first publish entry."""
    number = sound.list_numbers("publish")[0]
    path = f"_sluice/orders/log/{number:020d}.json"
    raw = json.loads(sound.world.lake.files[path])
    how(raw)
    sound.world.lake.files[path] = json.dumps(raw).encode()
    for path in [p for p in sound.world.lake.files if "/log/" in p]:  # as of a release without numbers and hashes
        entry = json.loads(sound.world.lake.files[path])
        old = {name: value for name, value in entry.items() if name not in ("number", "follows")}
        sound.world.lake.files[path] = json.dumps(old).encode()


def forgotten(raw: Any) -> None:
    """Remove a row of the file from the ledger's counts."""
    raw["receipts"][0]["parts"][0]["rows"] -= 1
    raw["receipts"][0]["counts"]["landed"] -= 1
    raw["receipts"][0]["counts"]["compacted"] += 1


def moved(raw: Any) -> None:
    """Let the rows of the second range begin within those of the first."""
    raw["receipts"][1]["parts"][0]["shared"]["first"] -= 1


def alone(raw: Any) -> None:
    """Record the file of one offset range as not shared."""
    raw["receipts"][0]["parts"][0]["shared"] = None


@pytest.mark.parametrize("how", [forgotten, moved, alone])
def test_wrong_entry_about_a_shared_file_is_detected(sound: Sound, how: Any) -> None:
    change(sound, how)
    assert {b.invariant for b in sound.check().broken} & {2, 3}
    report = audit(sound.world.ledger, sound.world.lake)
    assert {p.invariant for p in report.problems} & {2, 3}
