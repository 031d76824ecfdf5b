"""Lakes that earlier code wrote are read, appended to, rewritten and audited.

Each folder of `lakes/` was written by the code of one commit: catch-ups over logs in memory, some of which kept an
offset range pending, offsets landed again, two commits, checkpoints. `logs.json` has the steps that filled Kafka,
`group.json` the committed offsets.

    0_1_0          version 0.1.0: neither `tip.json` nor `by_marker`
    shared_files   78a81496: publish entries of format 2
    segments       bd569c0a: checkpoints of format 3, old entries in a segment
    checkpoint_4   9d3e4f4b: checkpoints of format 4
    folder_keys    4a1edeb2: schema entries of format 4 with the prefix of folders, checkpoints of format 6
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice import testing as sluice_testing
from sluice.pipelines.audit.audit import audit
from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.committing.commit import CommitSettings, CommitStatus, commit
from sluice.pipelines.errors import LedgerTooNew
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import Layout
from sluice.pipelines.lake import paths, receipt_files
from sluice.pipelines.ledger import BatchStatus, entries
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.maintenance.compaction import compact
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.model.kafka import CommittedOffset, TopicPartition
from sluice.pipelines.model.plans import Request, RequestKind
from sluice.pipelines.planning import windows
from sluice.pipelines.publishing import manifest
from sluice.testing.engine import owner
from sluice.testing.logs import COMMIT
from tests.pipelines.batch.test_batch import HOUR, PARTITIONS, World, apply_step

LAKES = Path(__file__).parent / "lakes"
A, B = PARTITIONS


@pytest.fixture
def old() -> World:
    """The lake of 0.1.0, with Kafka's logs of that time."""
    return open_old("0_1_0")


@pytest.fixture(params=sorted(p.name for p in LAKES.iterdir()))
def lake(request: pytest.FixtureRequest) -> World:
    """Each old lake, with Kafka's logs of that time."""
    return open_old(request.param)


def open_old(name: str) -> World:
    world = World(load_feed(LAKES / name / "orders.yaml", {}))
    for kind, *step in json.loads((LAKES / name / "logs.json").read_text()):
        apply_step(world, (kind, *step) if kind == "pass" else (kind, PARTITIONS[step[0]], *step[1:]))
    lake = LAKES / name / "lake"
    for file in sorted(p for p in lake.rglob("*") if p.is_file()):
        world.lake.put(file.relative_to(lake).as_posix(), file.read_bytes())
    for offset in json.loads((LAKES / name / "group.json").read_text()):
        tp = TopicPartition(offset["topic"], offset["partition"])
        world.group.offsets[tp] = CommittedOffset(offset["offset"], offset["epoch"], offset["metadata"])
    return world


def read(world: World) -> list[tuple[int, int]]:
    """Returns partition and offset of every row that readers see."""
    return sorted(world.read_rows(world.lake.list("data/orders")))


def in_kafka(world: World) -> list[tuple[int, int]]:
    """Returns partition and offset of every record in Kafka."""
    return [(tp.partition, r["offset"]) for tp in PARTITIONS for r in world.topic.log(tp).visible(0, 1 << 40)]


def assert_former_folders(world: World) -> None:
    """Every part lies in folders with the keys that the ledger began with."""
    folders = [p.split("/")[2:-1] for root in ("data", "quarantine") for p in world.lake.list(f"{root}/orders")]
    assert folders
    assert {tuple(level.partition("=")[0] for level in folder) for folder in folders} == {("date", "hour")}


def test_old_lake_is_read_and_balances(lake: World) -> None:
    assert audit(lake.ledger, lake.lake, hashes=True).problems == ()  # type: ignore[arg-type]
    assert read(lake) == in_kafka(lake)
    assert all(windows.complete(lake.ledger.read(), w, lake.feed.window) for w in lake.list_windows())
    assert {b.status for b in lake.ledger.read().batches.values()} == {BatchStatus.PUBLISHED}


def test_old_lake_is_appended_to_and_committed(lake: World) -> None:
    before, prefix = lake.ledger.read().number, lake.ledger.read().folder_prefix
    apply_step(lake, ("write", A, [0, 0], False))
    apply_step(lake, ("write", B, [0], True))
    apply_step(lake, ("end", B, COMMIT))
    apply_step(lake, ("pass", 2 * HOUR))
    landed = lake.land(Request(RequestKind.CATCH_UP))
    landed.check()
    assert lake.ledger.read().number > before
    assert read(lake) == in_kafka(lake)
    settings = CommitSettings(lake.feed.commit, lake.feed.transactional_id, lake.feed.policies.on_group_moved)
    assert commit(lake.ledger, lake.group, settings).status is CommitStatus.COMMITTED
    assert [lake.group.offsets[tp].offset for tp in PARTITIONS] == [lake.topic.log(tp).end for tp in PARTITIONS]
    assert audit(lake.ledger, lake.lake, hashes=True).problems == ()  # type: ignore[arg-type]
    assert lake.ledger.read().folder_prefix == prefix


def test_old_ranges_are_landed_again_and_files_merged(lake: World) -> None:
    apply_step(lake, ("offsets", A, 3, 2, True, frozenset()))
    compact(lake.feed, lake.make_ports(), None, owner("merging", "compact"), lambda progress: None)
    assert read(lake) == in_kafka(lake)
    assert audit(lake.ledger, lake.lake, hashes=True).problems == ()  # type: ignore[arg-type]


def test_old_lake_is_read_without_checkpoints_and_segments(lake: World) -> None:
    state = lake.ledger.read()
    for folder in (paths.checkpoint_folder("orders"), "_sluice/orders/segments"):
        for path in list(lake.lake.list(folder)):
            lake.lake.remove(path)
    again = lake.ledger.read()
    assert (again.number, again.frontiers(), again.batches) == (state.number, state.frontiers(), state.batches)


def test_old_lake_keeps_its_folders_after_a_schema_change(old: World) -> None:
    old.feed = old.feed.model_copy(update={"policies": old.feed.policies.model_copy(update={"on_undecodable": "drop"})})
    apply_step(old, ("write", A, [0, 0], False))
    apply_step(old, ("pass", 2 * HOUR))
    old.land(Request(RequestKind.CATCH_UP)).check()
    for path in list(old.lake.list(paths.checkpoint_folder("orders"))):
        old.lake.remove(path)
    apply_step(old, ("write", A, [0], False))
    apply_step(old, ("pass", 2 * HOUR))
    old.land(Request(RequestKind.CATCH_UP)).check()
    assert read(old) == in_kafka(old)
    assert_former_folders(old)


def test_old_lake_keeps_its_folders_by_record_time(old: World) -> None:
    by_time = old.feed.landing.model_copy(update={"layout": Layout.RECORD_TIME})
    old.feed = old.feed.model_copy(update={"landing": by_time})
    apply_step(old, ("write", A, [-HOUR, 0, HOUR], False))
    apply_step(old, ("pass", 2 * HOUR))
    old.land(Request(RequestKind.CATCH_UP)).check()
    assert read(old) == in_kafka(old)
    assert_former_folders(old)
    assert audit(old.ledger, old.lake, hashes=True).problems == ()  # type: ignore[arg-type]


def test_windows_and_reports_without_a_level_are_listed(old: World) -> None:
    lake: Any = old.lake
    flat = set(lake.list(paths.manifest_folder("orders")))
    assert flat
    assert all(path.count("/") == 3 for path in flat)
    assert manifest.write_manifests(old.ledger, lake, "orders", old.feed.window, everywhere=True) == ()
    assert manifest.write_manifests(old.ledger, lake, "orders", old.feed.window) == ()
    apply_step(old, ("write", A, [0, 0], False))
    apply_step(old, ("pass", 2 * HOUR))
    old.land(Request(RequestKind.CATCH_UP)).check()
    new = set(lake.list(paths.manifest_folder("orders"))) - flat
    assert new
    assert all(path.startswith("_sluice/orders/windows/2015-08/") for path in new)
    first = min(w for w in map(paths.manifest_window, flat) if w)[0]
    assert manifest.is_declared(lake, "orders", first, old.feed.window)
    batches = [b.id for b in old.ledger.read().batches.values() if b.published is not None]
    for batch in batches[:-1]:
        lake.put(paths.former_batch_page_path("orders", batch), b"<html>")
    lake.put(page := paths.batch_page_path("orders", batches[-1]), b"<html>")
    assert receipt_files.find_batch_page(lake, "orders", batches[0]) == f"_sluice/orders/reports/{batches[0]}.html"
    assert receipt_files.find_batch_page(lake, "orders", batches[-1]) == page

    before = max(w for w in map(paths.manifest_window, new) if w)[0] + HOUR
    removed = expire(old.ledger, lake, RetireRequest(before, "old"), old.feed.window, old.make_ports().liveness).removed
    assert flat | new <= {*removed.manifests}
    assert {*map(paths.page_batch, removed.pages)} == {*batches}
    assert not list(lake.list("_sluice/orders/windows")) + list(lake.list("_sluice/orders/reports"))


def test_one_offset_is_explained(old: World) -> None:
    assert explain(old.ledger, old.lake, A, 3).class_ is OffsetClass.LANDED  # type: ignore[arg-type]


def test_columns_under_other_names_make_a_ledger_that_0_1_0_refuses(tmp_path: Path) -> None:
    """0.1.0 reads format 1 alone. Its code, run once on such a ledger, raised LedgerTooNew and changed nothing."""
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    text = "kafka: {bootstrap: 'a:1'}\ntopics: orders\nstart: earliest\nformat: json\n"
    path.write_text(text + "schema: {id: int64, http_method: 'string from \"http.method\"'}\n")
    sluice_testing.land(path, [sluice_testing.Message(b'{"id": 1}')], lake=tmp_path / "lake", environ={})
    first = tmp_path / "lake" / paths.log_path("orders", 0)
    entry = json.loads(first.read_text())
    assert (entry["kind"], entry["format"]) == ("schema", 5)
    entries.parse(first.read_bytes(), "0.json")
    newer = json.dumps(entry | {"format": 9}).encode()
    with pytest.raises(LedgerTooNew, match=r"newer Sluice .format 9, .*reads format 8") as caught:
        entries.parse(newer, "0.json")
    assert "upgrade Sluice" in caught.value.remedy
