"""Compaction leaves rows, offsets and the account unchanged, for any landing, any rival run and a crash at any write.

Files become few, and a second compaction finds nothing to merge.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipelines.audit.explain_offset import explain
from sluice.pipelines.errors import Failed, LakeUnavailable, OwnershipLost, PlanBusy, ProofFailed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import CompactionSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.writer import PartWriter, SharedWriter
from sluice.pipelines.ledger.account import OffsetClass
from sluice.pipelines.ledger.entries import Boundaries, BoundaryEntry
from sluice.pipelines.maintenance import compaction, merging, rewrite
from sluice.pipelines.maintenance.compaction import Compacted, compact, find, foresee_compaction
from sluice.pipelines.model.plans import OffsetRange, Plan, RequestKind
from sluice.pipelines.model.receipts import Counts, Fate, Life, Part, PartKind, Progress, Receipt, count_files
from sluice.pipelines.publishing import published_files as reading
from sluice.pipelines.publishing.publish import abandon, publish, roll_forward
from sluice.pipelines.records.rows.row_format import quarantine_rows
from sluice.pipelines.records.shape import Shape
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake
from tests.examples import scale_examples
from tests.pipelines.landed_world import (
    FEED,
    HOUR,
    START,
    A,
    B,
    Died,
    World,
    crash_after,
    make_records,
    set_sharing,
    split_offsets,
)
from tests.pipelines.records.avro.rows import encode
from tests.pipelines.validation import test_drift


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# -- rows and files


def test_small_parts_of_a_window_are_merged_without_losing_rows(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 50), bad=2, gaps=2)
    before, refused = world.read_rows(), world.read_rows(PartKind.QUARANTINED)
    done = world.compact()
    assert world.read_rows().equals(before)
    assert world.read_rows(PartKind.QUARANTINED).equals(refused)
    assert len(world.list_files()) == 8, "a file for each partition, hour and kind"
    assert [(len(m.parts), len(r.parts)) for m, r in done.merged if r] == [(20, 2), (4, 2), (20, 2), (4, 2)]
    world.check()
    assert world.compact() == Compacted()
    assert world.state().frontiers() == {A: 200, B: 200}
    explanation = explain(world.ledger, world.lake, A.tp, 44)  # type: ignore[arg-type]
    assert (explanation.class_, explanation.row) == (OffsetClass.LANDED, 14)


def test_small_partitions_of_a_window_share_a_file(tmp_path: Path) -> None:
    world = World(tmp_path, shares=True)
    world.land(*split_offsets(A, 10, end=100), (B, 0, 100), bad=2)
    before = {kind: _sort_rows(world.read_rows(kind, (START,))) for kind in PartKind}
    foreseen = foresee_compaction(world.feed, world.ports)
    done = world.compact()
    assert [m for m, _ in foreseen.merged] == [m for m, _ in done.merged]
    assert {kind: _sort_rows(world.read_rows(kind, (START,))) for kind in PartKind} == before
    (first, second) = (m for m, _ in done.merged)
    assert (str(first.offset_range), str(second.offset_range)) == ("orders:0:0-100", "orders:1:0-100")
    folder, batch = first.offset_range.folder, done.batches[0]
    shared = [f"{root}/orders/{folder}/orders-0-0-100-b{batch}-shared.parquet" for root in ("data", "quarantine")]
    assert {p.path for _, r in done.merged if r for p in r.parts} == {*shared}
    assert [p for p in world.list_files() if folder in p] == shared
    world.check()
    explanation = explain(world.ledger, world.lake, B.tp, 44)  # type: ignore[arg-type]
    assert (explanation.class_, explanation.row) == (OffsetClass.LANDED, 80 + 44)
    world.land(*split_offsets(B, 50, start=100))
    world.land((A, 100, 200))
    assert [str(m.offset_range) for m, _ in world.compact().merged] == ["orders:0:100-200", "orders:1:100-200"]
    assert world.compact() == Compacted()


def test_window_that_was_compacted_by_partition_is_compacted_again_once_partitions_share(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    world.compact()
    assert len(world.list_files()) == 4
    world.feed = set_sharing(world.feed, True)
    world.compact()
    assert len(world.list_files()) == 2
    world.check()


def test_shared_file_that_reads_back_differently_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, shares=True)
    world.land(*split_offsets(A, 50), *split_offsets(B, 50))
    before, add = world.list_files(), SharedWriter.add

    def add_wrong_types(self: SharedWriter, s: OffsetRange, batches: list[pa.RecordBatch]) -> None:
        at = batches[0].schema.get_field_index("timestampType")
        wrong = [b.set_column(at, b.schema.field(at), pa.array([1] * b.num_rows, pa.int32())) for b in batches]
        add(self, s, wrong)

    monkeypatch.setattr(SharedWriter, "add", add_wrong_types)
    with pytest.raises(ProofFailed, match="are not those of its 2 parts"):
        world.compact()
    assert (world.list_files(), list(world.lake.list(paths.staging_root("orders")))) == (before, [])


def test_rows_with_nan_are_merged_and_match_the_log(tmp_path: Path) -> None:
    world = test_drift.World(tmp_path)
    kind: Any = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "double"}]}
    kind["fields"].append({"name": "l", "type": {"type": "array", "items": "float"}})
    (tmp_path / "orders.avsc").write_text(json.dumps(kind))
    text = FEED + "lake: lake\nwindow: 1h\nformat: avro\nschema_file: orders.avsc\nwire_format: bare\n"
    (tmp_path / "feeds" / "orders.yaml").write_text(text)
    feed = load_feed(tmp_path / "feeds" / "orders.yaml", {})
    for x in (1.5, math.nan):
        world.land_records(feed, encode(kind, {"x": x, "l": [x]}, None), encode(kind, {"x": math.nan, "l": []}, None))
    world.read_window(feed)
    done = compact(feed, world.make_ports(feed), None, owner("merging", "compact"), lambda progress: None)
    assert [len(m.parts) for m, receipt in done.merged if receipt] == [2]
    assert world.find_problems(feed) == []


def test_merged_file_matches_a_landed_one(world: World) -> None:
    world.land(*split_offsets(A, 50, end=100), (B, 0, 100))
    old = pq.ParquetFile(world.lake.open(world.list_files()[0]))
    ((merge, receipt),) = world.compact().merged
    assert receipt is not None
    file = pq.ParquetFile(world.lake.open(receipt.parts[0].path))
    assert file.schema.equals(old.schema)
    metadata = {k.decode(): v.decode() for k, v in file.metadata.metadata.items()}
    assert (metadata["sluice.range"], metadata["sluice.topic_id"]) == ("orders:0:0-100", "id-1")
    assert metadata["sluice.batch"] == str(max(world.state().batches))
    assert world.ledger.entry(max(world.state().batches)).cluster == "c", "the cluster that the ledger knows"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert (
        receipt.parts[0].path
        == f"data/orders/{merge.offset_range.folder}/orders-0-0-100-b{metadata['sluice.batch']}.parquet"
    )
    assert (receipt.counts, receipt.position, receipt.input_bytes) == (Counts(landed=100), 100, 100)
    assert merge.offset_range.leader_epoch == 3


def test_only_adjacent_parts_of_a_window_are_merged(world: World) -> None:
    world.land((A, 0, 10), (A, 10, 20), (A, 30, 40), (A, 40, 100), *split_offsets(B, 100))
    world.land((A, 20, 30), *split_offsets(A, 25, 100))
    done = world.compact()
    assert [str(m.offset_range) for m, _ in done.merged] == ["orders:0:0-100", "orders:0:100-200"]
    world.check()


def test_rows_by_record_time_stay_in_their_folders_in_order(tmp_path: Path) -> None:
    world = World(tmp_path, "landing: {layout: record_time}\n", by_time=True)
    world.land(*split_offsets(A, 20), *split_offsets(B, 100), bad=3)
    before, folders = _read_by_folder(world), {p.rpartition("/")[0] for p in world.list_files()}
    assert world.compact().merged
    assert _read_by_folder(world) == before
    assert {p.rpartition("/")[0] for p in world.list_files()} == folders
    assert sum(p.startswith("data") for p in world.list_files()) == 4 * 5, "hours of stamps"
    world.check()


def _read_by_folder(world: World) -> dict[str, list[tuple[int, int]]]:
    offsets: dict[str, list[tuple[int, int]]] = {}
    for path in world.list_files():
        rows = pq.read_table(world.lake.open(path), columns=["partition", "offset"]).to_pydict()
        offsets.setdefault(path.rpartition("/")[0], []).extend(zip(rows["partition"], rows["offset"], strict=True))
    return {folder: sorted(rows) for folder, rows in offsets.items()}


def test_parts_of_half_the_target_size_stay_and_none_exceeds_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land(*split_offsets(A, 10), *split_offsets(B, 100))
    one = world.lake.size(world.list_files()[0]) or 0
    world.feed = _set_compaction(world.feed, target_file_bytes=3 * one + one // 2)
    done = world.compact()
    assert {len(m.receipts) for m, _ in done.merged} == {3}
    world.feed = _set_compaction(world.feed, target_file_bytes=one)
    assert world.compact().merged == ()
    world.check()


def _set_compaction(feed: Feed, **changes: int) -> Feed:
    return feed.model_copy(update={"compaction": CompactionSettings(**changes)})


def test_ranges_without_rows_are_included_but_trigger_no_merge(world: World) -> None:
    world.land((A, 0, 50), (A, 50, 52))
    batch = world.plan([world.build_range(A, 52, 100)])
    empty = Receipt(world.build_range(A, 52, 100), 100, Counts(aborted=48), (), "a")
    publish(world.ledger, batch, owner("landing"), [empty], [])
    world.land((A, 100, 200), *split_offsets(B, 100))
    ((merge, receipt),) = world.compact().merged
    assert receipt is not None
    assert (str(merge.offset_range), receipt.counts) == ("orders:0:0-100", Counts(landed=52, aborted=48))
    world.check()
    assert world.compact().merged == ()


def test_bounded_batch_is_published_before_the_next_starts(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    before = world.read_rows()
    world.feed = _set_compaction(world.feed, batch_bytes=1)
    assert len(world.compact().batches) == 4
    assert world.read_rows().equals(before)
    world.check()


def test_concurrent_merges_are_limited_by_memory(world: World) -> None:
    assert [compaction.threads(CompactionSettings(memory=m << 20), 8) for m in (1, 128, 300, 1 << 20)] == [1, 1, 2, 8]


# -- windows


def test_incomplete_windows_are_skipped_and_named(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10, end=100))
    candidates = find(world.feed, world.ledger)
    assert {m.offset_range.window for m in candidates.merges} == {START}
    assert candidates.incomplete == (START + HOUR,)
    assert world.compact().incomplete == (START + HOUR,)


def test_only_requested_windows_are_merged(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    done = world.compact([START + HOUR])
    assert {m.offset_range.window for m, _ in done.merged} == {START + HOUR}
    assert world.compact([START + 5 * HOUR]) == Compacted()


def test_rows_outside_windows_are_merged_within_boundaries(world: World) -> None:
    world.land(*split_offsets(A, 100), *split_offsets(B, 100))
    ranges = [world.build_range(A, s, s + 10, window=0) for s in (300, 310, 320)]
    batch = world.plan(ranges)
    plan = world.ledger.plan(batch)
    publish(world.ledger, batch, owner("landing"), [world.land_range(s, batch, plan.hash, 0, 1) for s in ranges], [])
    pin = Boundaries(key=A, times=(START + 3 * HOUR,), offsets=(320,))
    world.ledger.append(lambda s: BoundaryEntry(items=(pin,)))
    assert [str(m.offset_range) for m, _ in world.compact().merged] == ["orders:0:300-320"]
    world.check()


def test_empty_feed_has_nothing_to_merge(world: World) -> None:
    assert world.compact() == Compacted()
    world.lake = MemoryLake()
    assert foresee_compaction(world.feed, world.ports) == world.compact() == Compacted()


# -- rivals


def test_ranges_of_an_active_batch_are_skipped_and_named(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    at_work = world.plan([world.build_range(A, 20, 30)], by="replacing")
    for done in (foresee_compaction(world.feed, world.ports), world.compact()):
        assert done.busy == {START: at_work}
        assert [(m.batch, m.verdict.life, m.ways) for m in done.met] == [(at_work, Life.ALIVE, ())]
        assert [str(m.offset_range) for m, _ in done.merged] == [
            "orders:1:0-100",
            "orders:0:100-200",
            "orders:1:100-200",
        ]


def test_batch_of_a_dead_run_blocks_with_remedies(world: World) -> None:
    """Regression: the dead run's batch was reported as at work, without end."""
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    dead_batch = world.plan([world.build_range(A, 20, 30)], by="replacing")
    world.liveness.dead.add("replacing")
    for done in (foresee_compaction(world.feed, world.ports), world.compact()):
        (met,) = done.met
        assert (met.batch, met.verdict.life) == (dead_batch, Life.DEAD)
        assert [command for command, _ in met.ways] == [
            "sluice run orders",
            f"sluice repair orders --abandon {dead_batch}",
        ]


def test_rewrite_of_a_dead_run_is_abandoned_and_reported(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    dead_batch = world.plan([world.build_range(B, 0, 100)], RequestKind.REPLAY, by="rival")
    world.liveness.dead.add("rival")
    reports: list[Progress] = []
    compact(world.feed, world.ports, None, owner("merging"), reports.append)
    met_batches = [p.met for p in reports if p.met]
    assert [(m.batch, m.fate) for m in met_batches] == [(dead_batch, Fate.GIVEN_UP)]


def test_one_compaction_at_a_time(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    rival = world.plan([world.build_range(B, 0, 100)], RequestKind.COMPACT, by="rival")
    with pytest.raises(PlanBusy, match=f"batch {rival}"):
        world.compact()
    assert foresee_compaction(world.feed, world.ports).busy == {START: rival}
    world.liveness.dead.add("rival")
    assert len(foresee_compaction(world.feed, world.ports).merged) == 4
    assert len(world.compact().merged) == 4
    assert world.state().live() == ()


def test_rival_between_search_and_plan_wins(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    before = world.read_rows()
    rivals = iter([True])

    def compact_first(path: str) -> None:
        if "/log/" in path and next(rivals, False):
            world.lake.before.clear()
            compact(world.feed, world.ports, None, owner("rival"), lambda progress: None)

    world.lake.before["put_if_absent"] = compact_first
    assert world.compact() == Compacted()
    assert world.read_rows().equals(before)
    world.check()


def test_merge_of_files_replaced_meanwhile_names_the_owner(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    check_source = merging.check_source

    def check_and_overtake(lake: Any, feed: str, part: Any) -> None:
        check_source(lake, feed, part)
        monkeypatch.setattr(merging, "check_source", check_source)
        (batch,) = world.state().live()
        abandon(world.reopen_ledger(), batch.id, "taken for dead")
        world.compact(by="another")

    monkeypatch.setattr(merging, "check_source", check_and_overtake)
    with pytest.raises(OwnershipLost):
        world.compact()
    world.check()


def test_batch_abandoned_meanwhile_publishes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    before, files = world.read_rows(), world.list_files()
    prove = rewrite.prove

    def abandon_and_prove(plan: Plan, batch: int, outcomes: Any, lake: Any) -> Any:
        abandon(world.reopen_ledger(), batch, "taken for dead")
        return prove(plan, batch, outcomes, lake)

    monkeypatch.setattr(rewrite, "prove", abandon_and_prove)
    with pytest.raises(OwnershipLost):
        world.compact()
    assert (world.list_files(), world.read_rows().equals(before)) == (files, True)
    roll_forward(world.reopen_ledger(), world.lake, "orders")  # type: ignore[arg-type]
    assert list(world.lake.list(paths.staging_root("orders"))) == []


# -- failures


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True])
def test_a_crash_at_any_write_leaves_every_row_exactly_once(shares: bool, tmp_path: Path) -> None:
    landed = World(tmp_path, shares=shares)
    landed.land(*split_offsets(A, 50), *split_offsets(B, 100), bad=1)
    before = _sort_rows(landed.read_rows())
    crashed, at = 0, 0
    while crashed == at:
        world = landed.fork()
        with contextlib.suppress(Died), crash_after(world.lake, at):
            world.compact()
            at -= 1
        crashed, at = crashed + 1, at + 1
        _check_readable(world, before)
        roll_forward(world.reopen_ledger(), world.lake, "orders")  # type: ignore[arg-type]
        assert _sort_rows(world.read_rows()) == before, at
        world.check()
        world.compact(by="next")
        assert _sort_rows(world.read_rows()) == before
        assert len(world.list_files()) == (4 if shares else 8)
        assert list(world.lake.list(paths.staging_root("orders"))) == []
        world.check()
    assert crashed > 20, "every write was tried"


def _check_readable(world: World, before: list[dict[str, Any]]) -> None:
    """Check that readers get the same rows, or an error while files are not in place yet."""
    with contextlib.suppress(reading.WindowIncomplete):
        assert _sort_rows(world.read_rows()) == before


def test_failing_lake_ends_the_compaction_cleanly(world: World) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 10))
    before, files, create = world.read_rows(), world.list_files(), world.lake.create

    @contextlib.contextmanager
    def fail_or_create(path: str) -> Iterator[Any]:
        if "orders-1-100" in path:
            raise LakeUnavailable("later", remedy="run again")
        with create(path) as sink:
            yield sink

    world.lake.create = fail_or_create  # type: ignore[method-assign]
    with pytest.raises(LakeUnavailable):
        world.compact()
    world.lake.create = create  # type: ignore[method-assign]
    assert (world.list_files(), world.read_rows().equals(before), world.state().live()) == (files, True, ())
    assert list(world.lake.list(paths.staging_root("orders"))) == []
    assert len(world.compact().merged) == 4


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_part_that_is_not_the_ledgers_is_never_merged(damage: str, world: World) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 50))
    path = world.list_files()[1]
    data = world.lake.files.pop(path)
    if damage == "flip":
        world.lake.files[path] = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    with pytest.raises(ProofFailed, match=path):
        world.compact()
    assert world.state().live() == ()


def test_merged_file_that_reads_back_differently_is_never_published(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.land(*split_offsets(A, 50), *split_offsets(B, 50))
    write = PartWriter.write

    def write_wrong_types(self: PartWriter, rows: pa.RecordBatch) -> None:
        at = rows.schema.get_field_index("timestampType")
        write(self, rows.set_column(at, rows.schema.field(at), pa.array([1] * rows.num_rows, pa.int32())))

    monkeypatch.setattr(PartWriter, "write", write_wrong_types)
    with pytest.raises(ProofFailed, match="are not those of its 2 parts"):
        world.compact()
    assert list(world.lake.list(paths.staging_root("orders"))) == []


def test_interrupt_ends_running_merges() -> None:
    stop = Event()
    stop.set()
    context = merging.RewriteContext(MemoryLake(), "orders", 1, "h", "a", None, stop)  # type: ignore[arg-type]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"offset": [1]}), sink)
    context.lake.files["x"] = sink.getvalue().to_pybytes()  # type: ignore[attr-defined]
    with pytest.raises(Failed, match="was ended"):
        next(context.rows_of(Part("x", PartKind.LANDED, "s", "x", 1, 1, ""), "x"))


# -- any landing


@settings(max_examples=scale_examples(15))
@given(st.data())
def test_any_landed_rows_are_unchanged_by_compaction(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    by_time, shares = data.draw(st.booleans(), label="by time"), data.draw(st.booleans(), label="shares")
    world = World(tmp_path_factory.mktemp("any"), by_time=by_time, shares=shares)
    for key in (A, B):
        cuts = sorted(data.draw(st.sets(st.integers(1, 199), max_size=8), label=f"cuts of {key}") | {0, 100, 200})
        ranges = [(key, a, b) for a, b in itertools.pairwise(cuts)]
        for selection in (data.draw(st.permutations(ranges)), []) if len(ranges) < 5 else (ranges[::2], ranges[1::2]):
            if selection:
                world.land(*selection, bad=data.draw(st.integers(0, 1), label="bad"))
    if data.draw(st.booleans(), label="small target"):
        world.feed = _set_compaction(world.feed, target_file_bytes=data.draw(st.integers(2000, 9000)), batch_bytes=5000)
    before = {kind: _sort_rows(world.read_rows(kind)) for kind in PartKind}
    files = len(world.list_files())
    done = world.compact()
    assert {kind: _sort_rows(world.read_rows(kind)) for kind in PartKind} == before
    fewer = count_files(m for m, _ in done.merged) - count_files(r for _, r in done.merged if r)
    assert len(world.list_files()) == files - fewer
    assert fewer > 0 or not done.merged
    assert shares or all(len(r.parts) < len(m.parts) for m, r in done.merged if r)
    world.check()
    # Merged files are smaller than their sources, so a later compaction may find room for one more.
    rounds = list(itertools.takewhile(lambda again: again.merged, (world.compact() for _ in range(files))))
    assert len(rounds) < files
    assert {kind: _sort_rows(world.read_rows(kind)) for kind in PartKind} == before


def _sort_rows(rows: pa.Table) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = rows.to_pylist()
    return sorted(items, key=lambda r: (r["partition"], r["offset"]))


def test_duckdb_reads_the_same_rows_over_the_files(world: World, tmp_path: Path) -> None:
    world.land(*split_offsets(A, 10), *split_offsets(B, 25), bad=1, gaps=3)

    def query_rows() -> list[Any]:
        for path in world.list_files():
            copy = tmp_path / "out" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(world.lake.files[path])
        files = [str(tmp_path / "out" / p) for p in world.list_files() if p.startswith("data")]
        query = 'select *, hour from read_parquet($held, hive_partitioning = true) order by partition, "offset"'
        return duckdb.connect().sql(query, params={"held": files}).fetchall()

    before = query_rows()
    assert world.compact().merged
    assert query_rows() == before
    assert len(before) == 20 * 3 + 8 * 8


ALL_TYPES = {
    "id": "int64 not null",
    "small": "int8",
    "ratio": "float64",
    "yes": "bool",
    "day": "date",
    "at": "timestamp",
    "amount": "decimal(12,2)",
    "large": "decimal(30,4)",
    "name": "string",
    "lines": "list<struct<sku:string, tags:map<string, list<int16>>>>",
}


def _make_document(i: int) -> bytes:
    lines = [{"sku": f"s{k}", "tags": {"a": [k, None], "b": []}} if k % 3 else None for k in range(i % 4)]
    document = {"id": i, "small": i % 100, "ratio": i / 7, "yes": i % 2 == 0, "day": "2026-11-20", "amount": 1.5}
    document |= {"at": "2026-11-20T14:00:00Z", "large": 12345678901234567890, "name": "x" * (i % 5), "lines": lines}
    return json.dumps({k: v for k, v in document.items() if (i + len(k)) % 6 or k == "id"} | {"unknown": i}).encode()


def test_typed_rows_of_every_type_are_unchanged(tmp_path: Path) -> None:
    from sluice.pipelines.records.json.format import JsonFormat  # late: it loads compiled loops
    from sluice.pipelines.schema.schema import parse_schema

    world, typed = World(tmp_path), JsonFormat(parse_schema(ALL_TYPES))
    world.land(*split_offsets(B, 100))
    ranges = [world.build_range(A, at, at + 50) for at in range(0, 200, 50)]
    batch = world.plan(ranges)
    plan = world.ledger.plan(batch)
    receipts = []
    for s in ranges:
        rows = make_records(np.arange(s.start, s.end))
        values = [b"no" if o % 10 == 3 else _make_document(o) for o in range(s.start, s.end)]
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values, pa.binary()))
        (converted,) = typed.convert(s, rows)
        assert converted.quarantined is not None
        parts = world.write(s, batch, plan.hash, PartKind.LANDED, converted.landed)
        parts += world.write(
            s, batch, plan.hash, PartKind.QUARANTINED, quarantine_rows(converted.quarantined, batch, "")
        )
        counts = Counts(landed=converted.landed.num_rows, quarantined=converted.quarantined.num_rows)
        receipts.append(Receipt(s, s.end, counts, parts, "a", format=Shape(parse_schema(ALL_TYPES)).name))
    publish(world.ledger, batch, owner("landing"), receipts, [])
    roll_forward(world.ledger, world.lake, "orders")  # type: ignore[arg-type]

    def read_tables() -> tuple[list[pa.Table], set[str]]:
        schemas = {str(pq.ParquetFile(world.lake.open(p)).schema) for p in world.list_files() if "/orders-0-" in p}
        return [world.read_rows(kind, partitions=(0,)) for kind in PartKind], {s.partition("\n")[2] for s in schemas}

    before = read_tables()
    assert [t.num_rows for t in before[0]] == [180, 20]
    assert [len(m.parts) for m, _ in world.compact().merged] == [4, 4]
    after = read_tables()
    assert all(a.equals(b) for a, b in zip(after[0], before[0], strict=True))
    assert after[1] == before[1]
    world.check()
