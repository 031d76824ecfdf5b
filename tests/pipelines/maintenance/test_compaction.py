"""Compaction: rows, offsets and the account stay as they are, whatever was landed, whoever comes between, and wherever
it dies; files become few, and a second time finds nothing.
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

from sluice.pipelines.audit.explain_offset import Class, explain
from sluice.pipelines.errors import Failed, LakeUnavailable, OwnershipLost, PlanBusy, ProofFailed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.sections import CompactionSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.writer import PartWriter
from sluice.pipelines.ledger.entries import Boundaries, BoundaryEntry
from sluice.pipelines.maintenance import compaction, merging, rewrite
from sluice.pipelines.maintenance.compaction import Compacted, compact, find, foresee_compaction
from sluice.pipelines.model.plans import Plan, RequestKind
from sluice.pipelines.model.receipts import Counts, Fate, Life, Part, PartKind, Progress, Receipt
from sluice.pipelines.publishing import published_files as reading
from sluice.pipelines.publishing.publish import abandon, publish, roll_forward
from sluice.pipelines.records.rows.row_format import quarantine_rows
from sluice.pipelines.records.shape import Shape
from sluice.testing.engine import owner
from sluice.testing.lake import MemoryLake
from tests.examples import examples
from tests.pipelines.landed_world import FEED, HOUR, START, A, B, Died, World, decoded, dying, pieces
from tests.pipelines.records.avro.rows import encoded
from tests.pipelines.validation import test_drift


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# -- what becomes of rows and files


def test_small_parts_of_a_window_become_one_and_every_row_stays(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 50), bad=2, gaps=2)
    before, refused = world.rows(), world.rows(PartKind.QUARANTINED)
    done = world.compact()
    assert world.rows().equals(before)
    assert world.rows(PartKind.QUARANTINED).equals(refused)
    assert len(world.visible()) == 8, "a file for each partition, hour and kind"
    assert [(len(m.parts), len(r.parts)) for m, r in done.merged if r] == [(20, 2), (4, 2), (20, 2), (4, 2)]
    world.check()
    assert world.compact() == Compacted()
    assert world.state().frontiers() == {A: 200, B: 200}
    found = explain(world.ledger, world.lake, A.tp, 44)  # type: ignore[arg-type]
    assert (found.found, found.row) == (Class.LANDED, 14)


def test_rows_with_nan_are_merged_and_are_those_of_the_log(tmp_path: Path) -> None:
    world = test_drift.World(tmp_path)
    kind: Any = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "double"}]}
    kind["fields"].append({"name": "l", "type": {"type": "array", "items": "float"}})
    (tmp_path / "orders.avsc").write_text(json.dumps(kind))
    text = FEED + "lake: lake\nwindow: 1h\nformat: avro\nschema_file: orders.avsc\nwire_format: bare\n"
    (tmp_path / "feeds" / "orders.yaml").write_text(text)
    feed = load_feed(tmp_path / "feeds" / "orders.yaml", {})
    for x in (1.5, math.nan):
        world.landed(feed, encoded(kind, {"x": x, "l": [x]}, None), encoded(kind, {"x": math.nan, "l": []}, None))
    world.window(feed)
    done = compact(feed, world.edges(feed), None, owner("merging", "compact"), lambda progress: None)
    assert [len(m.parts) for m, receipt in done.merged if receipt] == [2]
    assert world.audited(feed) == []


def test_a_merged_file_is_as_landing_would_have_made_it(world: World) -> None:
    world.land(*pieces(A, 50, end=100), (B, 0, 100))
    old = pq.ParquetFile(world.lake.open(world.visible()[0]))
    ((merge, receipt),) = world.compact().merged
    assert receipt is not None
    file = pq.ParquetFile(world.lake.open(receipt.parts[0].path))
    assert file.schema.equals(old.schema)
    said = {k.decode(): v.decode() for k, v in file.metadata.metadata.items()}
    assert (said["sluice.range"], said["sluice.topic_id"]) == ("orders:0:0-100", "id-1")
    assert said["sluice.batch"] == str(max(world.state().batches))
    assert world.ledger.entry(max(world.state().batches)).cluster == "c", "the cluster that the ledger knows"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert (
        receipt.parts[0].path
        == f"data/orders/{merge.offset_range.folder}/orders-0-0-100-b{said['sluice.batch']}.parquet"
    )
    assert (receipt.counts, receipt.position, receipt.input_bytes) == (Counts(landed=100), 100, 100)
    assert merge.offset_range.leader_epoch == 3


def test_only_what_follows_itself_in_a_window_is_merged(world: World) -> None:
    world.land((A, 0, 10), (A, 10, 20), (A, 30, 40), (A, 40, 100), *pieces(B, 100))
    world.land((A, 20, 30), *pieces(A, 25, 100))
    done = world.compact()
    assert [str(m.offset_range) for m, _ in done.merged] == ["orders:0:0-100", "orders:0:100-200"]
    world.check()


def test_rows_by_their_own_time_stay_in_their_folders_in_order(tmp_path: Path) -> None:
    world = World(tmp_path, "landing: {layout: record_time}\n", by_time=True)
    world.land(*pieces(A, 20), *pieces(B, 100), bad=3)
    before, folders = _by_folder(world), {p.rpartition("/")[0] for p in world.visible()}
    assert world.compact().merged
    assert _by_folder(world) == before
    assert {p.rpartition("/")[0] for p in world.visible()} == folders
    assert sum(p.startswith("data") for p in world.visible()) == 4 * 5, "hours of stamps"
    world.check()


def _by_folder(world: World) -> dict[str, list[tuple[int, int]]]:
    out: dict[str, list[tuple[int, int]]] = {}
    for path in world.visible():
        rows = pq.read_table(world.lake.open(path), columns=["partition", "offset"]).to_pydict()
        out.setdefault(path.rpartition("/")[0], []).extend(zip(rows["partition"], rows["offset"], strict=True))
    return {folder: sorted(rows) for folder, rows in out.items()}


def test_what_has_half_of_the_size_is_left_alone_and_none_grows_beyond_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land(*pieces(A, 10), *pieces(B, 100))
    one = world.lake.size(world.visible()[0]) or 0
    world.feed = _with(world.feed, target_file_bytes=3 * one + one // 2)
    done = world.compact()
    assert {len(m.receipts) for m, _ in done.merged} == {3}
    world.feed = _with(world.feed, target_file_bytes=one)
    assert world.compact().merged == ()
    world.check()


def _with(feed: Feed, **changes: int) -> Feed:
    return feed.model_copy(update={"compaction": CompactionSettings(**changes)})


def test_ranges_without_rows_go_along_but_are_no_reason(world: World) -> None:
    world.land((A, 0, 50), (A, 50, 52))
    batch = world.plan([world.build_range(A, 52, 100)])
    nothing = Receipt(world.build_range(A, 52, 100), 100, Counts(aborted=48), (), "a")
    publish(world.ledger, batch, owner("landing"), [nothing], [])
    world.land((A, 100, 200), *pieces(B, 100))
    ((merge, receipt),) = world.compact().merged
    assert receipt is not None
    assert (str(merge.offset_range), receipt.counts) == ("orders:0:0-100", Counts(landed=52, aborted=48))
    world.check()
    assert world.compact().merged == ()


def test_a_bounded_batch_is_put_in_place_before_the_next_one_begins(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    before = world.rows()
    world.feed = _with(world.feed, batch_bytes=1)
    assert len(world.compact().batches) == 4
    assert world.rows().equals(before)
    world.check()


def test_memory_says_how_many_are_merged_at_once(world: World) -> None:
    assert [compaction.threads(CompactionSettings(memory=m << 20), 8) for m in (1, 128, 300, 1 << 20)] == [1, 1, 2, 8]


# -- which windows


def test_incomplete_windows_are_left_alone_and_named(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10, end=100))
    found = find(world.feed, world.ledger)
    assert {m.offset_range.window for m in found.merges} == {START}
    assert found.incomplete == (START + HOUR,)
    assert world.compact().incomplete == (START + HOUR,)


def test_windows_that_are_asked_for_and_no_others(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    done = world.compact([START + HOUR])
    assert {m.offset_range.window for m, _ in done.merged} == {START + HOUR}
    assert world.compact([START + 5 * HOUR]) == Compacted()


def test_rows_outside_windows_are_merged_too_but_not_across_a_boundary(world: World) -> None:
    world.land(*pieces(A, 100), *pieces(B, 100))
    ranges = [world.build_range(A, s, s + 10, window=0) for s in (300, 310, 320)]
    batch = world.plan(ranges)
    plan = world.ledger.plan(batch)
    publish(world.ledger, batch, owner("landing"), [world.landed(s, batch, plan.hash, 0, 1) for s in ranges], [])
    pin = Boundaries(key=A, times=(START + 3 * HOUR,), offsets=(320,))
    world.ledger.append(lambda s: BoundaryEntry(items=(pin,)))
    assert [str(m.offset_range) for m, _ in world.compact().merged] == ["orders:0:300-320"]
    world.check()


def test_nothing_landed_is_nothing_to_merge(world: World) -> None:
    assert world.compact() == Compacted()
    world.lake = MemoryLake()
    assert foresee_compaction(world.feed, world.edges) == world.compact() == Compacted()


# -- rivals


def test_where_another_batch_is_at_work_is_left_out_and_named(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    at_work = world.plan([world.build_range(A, 20, 30)], by="replacing")
    for done in (foresee_compaction(world.feed, world.edges), world.compact()):
        assert done.busy == {START: at_work}
        assert [(m.batch, m.verdict.life, m.ways) for m in done.met] == [(at_work, Life.ALIVE, ())]
        assert [str(m.offset_range) for m, _ in done.merged] == [
            "orders:1:0-100",
            "orders:0:100-200",
            "orders:1:100-200",
        ]


def test_where_a_dead_run_s_batch_is_in_the_way_the_ways_out_are_told(world: World) -> None:
    """It was "at work" for ever, which was untrue."""
    world.land(*pieces(A, 10), *pieces(B, 10))
    left = world.plan([world.build_range(A, 20, 30)], by="replacing")
    world.liveness.dead.add("replacing")
    for done in (foresee_compaction(world.feed, world.edges), world.compact()):
        (met,) = done.met
        assert (met.batch, met.verdict.life) == (left, Life.DEAD)
        assert [command for command, _ in met.ways] == ["sluice run orders", f"sluice repair orders --abandon {left}"]


def test_what_a_dead_run_was_writing_again_is_given_up_and_said(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    left = world.plan([world.build_range(B, 0, 100)], RequestKind.REPLAY, by="rival")
    world.liveness.dead.add("rival")
    said: list[Progress] = []
    compact(world.feed, world.edges, None, owner("merging"), said.append)
    heard = [p.met for p in said if p.met]
    assert [(m.batch, m.fate) for m in heard] == [(left, Fate.GIVEN_UP)]


def test_one_compaction_at_a_time(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    rival = world.plan([world.build_range(B, 0, 100)], RequestKind.COMPACT, by="rival")
    with pytest.raises(PlanBusy, match=f"batch {rival}"):
        world.compact()
    assert foresee_compaction(world.feed, world.edges).busy == {START: rival}
    world.liveness.dead.add("rival")
    assert len(foresee_compaction(world.feed, world.edges).merged) == 4
    assert len(world.compact().merged) == 4
    assert world.state().live() == ()


def test_a_rival_that_comes_between_finding_and_planning_wins(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    before = world.rows()
    rivals = iter([True])

    def rival_first(path: str) -> None:
        if "/log/" in path and next(rivals, False):
            world.lake.before.clear()
            compact(world.feed, world.edges, None, owner("rival"), lambda progress: None)

    world.lake.before["put_if_absent"] = rival_first
    assert world.compact() == Compacted()
    assert world.rows().equals(before)
    world.check()


def test_one_whose_files_another_replaced_meanwhile_says_who_owns_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    check_source = merging.check_source

    def overtaken(lake: Any, feed: str, part: Any) -> None:
        check_source(lake, feed, part)
        monkeypatch.setattr(merging, "check_source", check_source)
        (batch,) = world.state().live()
        abandon(world.fresh_ledger(), batch.id, "taken for dead")
        world.compact(by="another")

    monkeypatch.setattr(merging, "check_source", overtaken)
    with pytest.raises(OwnershipLost):
        world.compact()
    world.check()


def test_a_batch_that_was_given_up_meanwhile_publishes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    before, files = world.rows(), world.visible()
    prove = rewrite.prove

    def robbed(plan: Plan, batch: int, outcomes: Any, lake: Any) -> Any:
        abandon(world.fresh_ledger(), batch, "taken for dead")
        return prove(plan, batch, outcomes, lake)

    monkeypatch.setattr(rewrite, "prove", robbed)
    with pytest.raises(OwnershipLost):
        world.compact()
    assert (world.visible(), world.rows().equals(before)) == (files, True)
    roll_forward(world.fresh_ledger(), world.lake, "orders")  # type: ignore[arg-type]
    assert list(world.lake.list(paths.staging_root("orders"))) == []


# -- whatever goes wrong


@pytest.mark.slow
def test_a_crash_at_any_write_leaves_every_row_exactly_once(tmp_path: Path) -> None:
    crashed, at = 0, 0
    while crashed == at:
        world = World(tmp_path / str(at))
        world.land(*pieces(A, 50), *pieces(B, 100), bad=1)
        before = world.rows()
        with contextlib.suppress(Died), dying(world.lake, at):
            world.compact()
            at -= 1
        crashed, at = crashed + 1, at + 1
        _readable_or_refused(world, before)
        roll_forward(world.fresh_ledger(), world.lake, "orders")  # type: ignore[arg-type]
        assert world.rows().equals(before), at
        world.check()
        world.compact(by="next")
        assert world.rows().equals(before)
        assert len(world.visible()) == 8
        assert list(world.lake.list(paths.staging_root("orders"))) == []
        world.check()
    assert crashed > 20, "every write was tried"


def _readable_or_refused(world: World, before: pa.Table) -> None:
    """Never other rows: where some are not in place yet, the reader is told to wait."""
    with contextlib.suppress(reading.WindowIncomplete):
        assert world.rows().equals(before)


def test_a_lake_that_fails_ends_it_tidily(world: World) -> None:
    world.land(*pieces(A, 10), *pieces(B, 10))
    before, files, create = world.rows(), world.visible(), world.lake.create

    @contextlib.contextmanager
    def full(path: str) -> Iterator[Any]:
        if "orders-1-100" in path:
            raise LakeUnavailable("later", remedy="run again")
        with create(path) as sink:
            yield sink

    world.lake.create = full  # type: ignore[method-assign]
    with pytest.raises(LakeUnavailable):
        world.compact()
    world.lake.create = create  # type: ignore[method-assign]
    assert (world.visible(), world.rows().equals(before), world.state().live()) == (files, True, ())
    assert list(world.lake.list(paths.staging_root("orders"))) == []
    assert len(world.compact().merged) == 4


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_part_that_is_not_the_ledgers_is_never_merged(damage: str, world: World) -> None:
    world.land(*pieces(A, 50), *pieces(B, 50))
    path = world.visible()[1]
    data = world.lake.files.pop(path)
    if damage == "flip":
        world.lake.files[path] = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    with pytest.raises(ProofFailed, match=path):
        world.compact()
    assert world.state().live() == ()


def test_what_does_not_read_back_as_it_was_is_never_published(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.land(*pieces(A, 50), *pieces(B, 50))
    write = PartWriter.write

    def wrongly(self: PartWriter, rows: pa.RecordBatch) -> None:
        at = rows.schema.get_field_index("timestampType")
        write(self, rows.set_column(at, rows.schema.field(at), pa.array([1] * rows.num_rows, pa.int32())))

    monkeypatch.setattr(PartWriter, "write", wrongly)
    with pytest.raises(ProofFailed, match="are not those of its 2 parts"):
        world.compact()
    assert list(world.lake.list(paths.staging_root("orders"))) == []


def test_an_interrupt_ends_the_merges_that_are_under_way() -> None:
    stop = Event()
    stop.set()
    desk = merging.RewriteContext(MemoryLake(), "orders", 1, "h", "a", None, stop)  # type: ignore[arg-type]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"offset": [1]}), sink)
    desk.lake.files["x"] = sink.getvalue().to_pybytes()  # type: ignore[attr-defined]
    with pytest.raises(Failed, match="was ended"):
        next(desk.rows_of(Part("x", PartKind.LANDED, "s", "x", 1, 1, ""), "x"))


# -- any landing


@settings(max_examples=examples(15))
@given(st.data())
def test_whatever_landed_is_the_same_after_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    world = World(tmp_path_factory.mktemp("any"), by_time=data.draw(st.booleans(), label="by time"))
    for key in (A, B):
        cuts = sorted(data.draw(st.sets(st.integers(1, 199), max_size=8), label=f"cuts of {key}") | {0, 100, 200})
        ranges = [(key, a, b) for a, b in itertools.pairwise(cuts)]
        for some in (data.draw(st.permutations(ranges)), []) if len(ranges) < 5 else (ranges[::2], ranges[1::2]):
            if some:
                world.land(*some, bad=data.draw(st.integers(0, 1), label="bad"))
    if data.draw(st.booleans(), label="small target"):
        world.feed = _with(world.feed, target_file_bytes=data.draw(st.integers(2000, 9000)), batch_bytes=5000)
    before = {kind: _sorted(world.rows(kind)) for kind in PartKind}
    files = len(world.visible())
    done = world.compact()
    assert {kind: _sorted(world.rows(kind)) for kind in PartKind} == before
    assert len(world.visible()) == files - sum(len(m.parts) - len(r.parts) for m, r in done.merged if r)
    assert all(len(r.parts) < len(m.parts) for m, r in done.merged if r)
    world.check()


def _sorted(rows: pa.Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.to_pylist()
    return sorted(found, key=lambda r: (r["partition"], r["offset"]))


def test_duckdb_sees_the_same_rows_over_the_files(world: World, tmp_path: Path) -> None:
    world.land(*pieces(A, 10), *pieces(B, 25), bad=1, gaps=3)

    def asked() -> list[Any]:
        for path in world.visible():
            place = tmp_path / "out" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(world.lake.files[path])
        held = [str(tmp_path / "out" / p) for p in world.visible() if p.startswith("data")]
        query = 'select *, hour from read_parquet($held, hive_partitioning = true) order by partition, "offset"'
        return duckdb.connect().sql(query, params={"held": held}).fetchall()

    before = asked()
    assert world.compact().merged
    assert asked() == before
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


def _document(i: int) -> bytes:
    lines = [{"sku": f"s{k}", "tags": {"a": [k, None], "b": []}} if k % 3 else None for k in range(i % 4)]
    said = {"id": i, "small": i % 100, "ratio": i / 7, "yes": i % 2 == 0, "day": "2026-11-20", "amount": 1.5}
    said |= {"at": "2026-11-20T14:00:00Z", "large": 12345678901234567890, "name": "x" * (i % 5), "lines": lines}
    return json.dumps({k: v for k, v in said.items() if (i + len(k)) % 6 or k == "id"} | {"unknown": i}).encode()


def test_typed_rows_of_every_kind_come_through(tmp_path: Path) -> None:
    from sluice.pipelines.records.json.format import JsonFormat  # late: it loads compiled loops
    from sluice.pipelines.schema.schema import parse_schema

    world, typed = World(tmp_path), JsonFormat(parse_schema(ALL_TYPES))
    world.land(*pieces(B, 100))
    ranges = [world.build_range(A, at, at + 50) for at in range(0, 200, 50)]
    batch = world.plan(ranges)
    plan = world.ledger.plan(batch)
    receipts = []
    for s in ranges:
        rows = decoded(np.arange(s.start, s.end))
        values = [b"no" if o % 10 == 3 else _document(o) for o in range(s.start, s.end)]
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values, pa.binary()))
        (made,) = typed.convert(s, rows)
        assert made.quarantined is not None
        parts = world.write(s, batch, plan.hash, PartKind.LANDED, made.landed)
        parts += world.write(s, batch, plan.hash, PartKind.QUARANTINED, quarantine_rows(made.quarantined, batch, ""))
        counts = Counts(landed=made.landed.num_rows, quarantined=made.quarantined.num_rows)
        receipts.append(Receipt(s, s.end, counts, parts, "a", format=Shape(parse_schema(ALL_TYPES)).name))
    publish(world.ledger, batch, owner("landing"), receipts, [])
    roll_forward(world.ledger, world.lake, "orders")  # type: ignore[arg-type]

    def now() -> tuple[list[pa.Table], set[str]]:
        schemas = {str(pq.ParquetFile(world.lake.open(p)).schema) for p in world.visible() if "/orders-0-" in p}
        return [world.rows(kind, partitions=(0,)) for kind in PartKind], {s.partition("\n")[2] for s in schemas}

    before = now()
    assert [t.num_rows for t in before[0]] == [180, 20]
    assert [len(m.parts) for m, _ in world.compact().merged] == [4, 4]
    after = now()
    assert all(a.equals(b) for a, b in zip(after[0], before[0], strict=True))
    assert after[1] == before[1]
    world.check()
