"""A part that cannot be read, for any reason, is a finding of each audit, which continues; readers name the part."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipelines.audit import explain_offset, strict_audit
from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.rescan import CurrentLog, rescan
from sluice.pipelines.batch_report.column_profiles import profiles
from sluice.pipelines.batch_report.quality import rejects
from sluice.pipelines.errors import PartUnreadable, ProofFailed, SluiceError, Terminal
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.ledger.entries import PlanEntry
from sluice.pipelines.model.kafka import Isolation, TopicPartition, encode_topic
from sluice.pipelines.model.plans import Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.ports import Lake
from sluice.pipelines.publishing.publish import publish, roll_forward
from sluice.pipelines.quarantine import listing
from sluice.pipelines.quarantine.limit import faults_of
from sluice.testing.engine import owner
from tests.pipelines.batch.test_batch import HOUR
from tests.pipelines.landed_world import START, A, B, split_offsets
from tests.pipelines.landed_world import World as Landed
from tests.pipelines.validation.test_drift import SCHEMA, World

ROWS = [{"id": n, "amount": 1.5, "note": f"note {n}"} for n in range(300)]
Damage = Callable[[bytes], bytes | None]


def _flip_byte(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _drop_row(data: bytes) -> bytes:
    out = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(data)).slice(1), out)
    return out.getvalue()


def _rename_columns(data: bytes) -> bytes:
    """Rename every column."""
    table, out = pq.read_table(io.BytesIO(data)), io.BytesIO()
    pq.write_table(table.rename_columns([f"x{i}" for i in range(table.num_columns)]), out)
    return out.getvalue()


_UNSEEN = {"another number of rows", "other columns", "a flipped byte in the first column chunk"}
"""Damage that a reader of the column of reasons cannot notice."""
DAMAGE: dict[str, Damage] = {
    "cut in its middle": lambda d: d[: len(d) // 2],
    "cut by a byte": lambda d: d[:-1],
    "empty": lambda d: b"",
    "missing": lambda d: None,
    "no Parquet": lambda d: b"a page of HTML" * 99,
    "a flipped byte in the footer": lambda d: _flip_byte(d, len(d) - 40),
    "a flipped byte in the footer's length": lambda d: _flip_byte(d, len(d) - 6),
    "a flipped byte in the first column chunk": lambda d: _flip_byte(d, 5),
    "another number of rows": _drop_row,
    "other columns": _rename_columns,
}


def break_file(lake: Any, path: str, damage: Damage) -> None:
    after = damage(lake.get(path) or b"")
    lake.remove(path) if after is None else lake.put(path, after)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two landed batches; each test damages the first, or the quarantine, in its own copy."""
    intact = World(tmp_path_factory.mktemp("whole"))
    feed = intact.make_feed(SCHEMA)
    intact.land_records(feed, *ROWS, b"nojson", {"id": "x"})
    intact.land_records(feed, *ROWS)
    return intact


@pytest.fixture
def world(tmp_path: Path, intact: World) -> World:
    shutil.copytree(intact.root / "lake", tmp_path / "lake")
    copy = World(tmp_path)
    copy.runs, copy.liveness.dead = intact.runs, set(intact.liveness.dead)
    copy.topic.batches = {tp: list(batches) for tp, batches in intact.topic.batches.items()}
    return copy


@pytest.fixture
def feed(world: World) -> Feed:
    return world.make_feed(SCHEMA)


def list_files(world: World, folder: str) -> list[str]:
    return [p for p in world.lake.list(f"{folder}/orders") if p.endswith(".parquet")]


def audit_and_rescan(world: World, feed: Feed, *, hashes: bool = False) -> AuditReport:
    report = audit(world.ledger, world.lake, hashes=hashes)
    current = world.ledger.read().current
    today = {current[p.tp]: p for p in world.topic.partitions(["orders"], feed.isolation)}
    fetcher: Any = world.topic.make_fetcher()
    return rescan(report, world.ledger, world.lake, feed.shape, CurrentLog(fetcher, feed.isolation, today))


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("folder", ["data", "quarantine"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_file_is_a_finding_and_the_rescan_continues(
    world: World, feed: Feed, damage: Damage, folder: str, hashes: bool
) -> None:
    path = list_files(world, folder)[0]
    break_file(world.lake, path, damage)
    report = audit_and_rescan(world, feed, hashes=hashes)
    (problem,) = [p for p in report.problems if p.file]
    assert problem.file == path
    assert path in problem.text
    assert "sluice run orders --offsets orders:0:0-302 --replace" in problem.remedy
    assert report.compared >= len(ROWS), "the other offset range is still compared"


def test_every_broken_file_is_reported(world: World, feed: Feed) -> None:
    paths = [*list_files(world, "data"), *list_files(world, "quarantine")]
    for path in paths:
        break_file(world.lake, path, lambda d: d[:-1])
    assert sorted(p.file for p in audit_and_rescan(world, feed).problems) == sorted(paths)


@pytest.mark.parametrize("seed", range(60))
def test_no_flipped_byte_stops_a_rescan(world: World, feed: Feed, seed: int) -> None:
    path, random = Random(seed).choice([*list_files(world, "data"), *list_files(world, "quarantine")]), Random(seed)
    data = bytearray(world.lake.get(path) or b"")
    for _ in range(random.choice([1, 1, 8])):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    world.lake.put(path, bytes(data))
    audit_and_rescan(world, feed)
    assert [p.file for p in audit(world.ledger, world.lake, hashes=True).problems] == [path]


def test_a_file_that_the_lake_refuses_is_a_finding(world: World, feed: Feed) -> None:
    path = list_files(world, "data")[0]

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.lake, name)

        def open(self, at: str) -> Any:
            if at == path:
                raise Terminal(f"the lake refused {at}: Permission denied", remedy="give rights")
            return world.lake.open(at)

    lake: Any = Refusing()
    (problem,) = audit(world.ledger, lake).problems
    assert (problem.file, problem.text) == (path, f"the lake refused {path}: Permission denied")


def test_readers_name_the_file(world: World, feed: Feed) -> None:
    window = world.read_window(feed)
    (path, *_) = list_files(world, "data")
    break_file(world.lake, path, DAMAGE["a flipped byte in the first column chunk"])
    with pytest.raises(PartUnreadable, match=path):
        window.arrow()
    rest = replace(window, files=window.files[1:])
    with pytest.raises(pa.ArrowInvalid, match="nowhere"):
        rest.arrow(columns=["nowhere"])
    break_file(world.lake, path, DAMAGE["cut by a byte"])
    for name in ("arrow", "duckdb", "dataset"):
        with pytest.raises(PartUnreadable, match=path):
            getattr(replace(window), name)()
    with pytest.raises(PartUnreadable, match=path) as caught:
        explain_offset.explain(world.ledger, world.lake, TopicPartition("orders", 0), 7)
    assert caught.value.fields()["file"] == path
    assert "sluice audit orders --all --hashes" in caught.value.remedy


@pytest.mark.parametrize("damage", [h for n, h in DAMAGE.items() if n not in _UNSEEN])
def test_readers_of_the_quarantine_name_the_file(world: World, feed: Feed, damage: Damage) -> None:
    (path,) = list_files(world, "quarantine")
    break_file(world.lake, path, damage)
    all_records, settings = listing.Filter(), feed.window
    with pytest.raises(PartUnreadable, match=path):
        listing.listing(world.ledger, world.lake, all_records, settings)
    receipts = all_records.receipts(world.ledger, world.ledger.read(), settings)
    with pytest.raises(PartUnreadable, match=path):
        list(listing.samples(feed, world.make_ports(feed), all_records, 5))
    with pytest.raises(PartUnreadable, match=path):
        faults_of([path], world.lake)
    parts = [(r, p) for r in receipts for p in r.parts if p.kind is PartKind.QUARANTINED]
    rejected = rejects(parts, world.lake, published=True)
    assert (rejected.unread, rejected.files) == (2, 1)


def test_missing_columns_are_damage(world: World, feed: Feed) -> None:
    (path,) = list_files(world, "quarantine")
    break_file(world.lake, path, _rename_columns)
    with pytest.raises(PartUnreadable, match=path):
        listing.listing(world.ledger, world.lake, listing.Filter(), feed.window)
    with pytest.raises(PartUnreadable, match=path):
        faults_of([path], world.lake)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_report_counts_a_broken_file_as_not_read(world: World, feed: Feed, damage: Damage) -> None:
    entry = next(world.ledger.publication(b) for b in world.ledger.read().batches.values())
    parts = [(r, p) for r in entry.receipts for p in r.parts if p.kind is PartKind.LANDED]
    intact = profiles(parts, world.lake, ["id"], [], published=True)
    break_file(world.lake, parts[0][1].path, damage)
    assert profiles(parts, world.lake, ["id"], [], published=True).rows <= intact.rows


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_merging_names_the_file(tmp_path: Path, damage: Damage) -> None:
    world = Landed(tmp_path)
    world.land(*split_offsets(A, 50), *split_offsets(B, 50))
    path = world.list_files()[0]
    break_file(world.lake, path, damage)
    with pytest.raises(ProofFailed, match=path) as caught:
        world.compact([START])
    assert "sluice audit orders --all --hashes" in caught.value.remedy


def test_truncated_name_is_not_a_separate_error() -> None:
    name = encode_topic("A" * 249)
    assert "~1" in name
    assert "audit orders" in paths.find_remedy(f"data/orders/{name}-0-0-5-b3.parquet")
    assert "backup" in paths.find_remedy("_sluice/orders/staging/3/a/data/x.parquet")


def test_landed_offsets_missing_from_files_are_a_finding(tmp_path: Path) -> None:
    """A replacement of half a range, which no plan of ours makes."""
    world = Landed(tmp_path)
    world.land((A, 0, 100), (B, 0, 100))
    (old,) = (path for path in world.list_files() if "orders-0-0-100" in path)
    half = world.build_range(A, 0, 50)
    request = Request(RequestKind.OFFSETS, replace=True)
    plan = Plan("orders", "c", request, Isolation.READ_COMMITTED, (Task(0, 1, (half,)),), (old,))
    appended = world.ledger.append(lambda s: PlanEntry(plan=plan, hash=plan.hash, owner=owner("x")))
    assert appended is not None
    publish(world.ledger, appended.number, owner("x"), [world.land_range(half, appended.number, plan.hash, 0, 1)], [])
    roll_forward(world.ledger, world.lake, "orders")  # type: ignore[arg-type]
    (problem,) = audit(world.reopen_ledger(), world.lake, hashes=True).problems  # type: ignore[arg-type]
    assert (problem.invariant, problem.text.partition(" has")[0]) == (1, "orders:0: [50, 100)")
    assert "sluice run orders --offsets orders:0:50-100 --replace" in problem.remedy


# -- manifests and errors


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"boundaries": [{}]}', b"\xff\x00", b"[" * 100_000])
def test_a_broken_manifest_is_a_finding(tmp_path: Path, content: bytes) -> None:
    world = Landed(tmp_path)
    world.land((A, 0, 100))
    path = paths.window_path("orders", START, HOUR)
    world.lake.put(path, content)
    (problem,) = strict_audit._stands_right(world.lake, path, world.state())  # type: ignore[arg-type]
    assert (problem.file, problem.remedy) == (path, "remove that file, then: sluice repair orders   writes it again")


def test_errors_of_damage_cross_process_borders() -> None:
    import pickle

    error = PartUnreadable("x cannot be read", remedy="fix it", path="x", gone=True)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, SluiceError)
    assert (again.path, again.gone, json.dumps(again.fields())) == ("x", True, json.dumps(error.fields()))


def test_errors_of_the_lake_are_passed_on(world: World) -> None:
    class Away:
        def open(self, path: str) -> Any:
            raise Terminal("the store is away")

    lake: Lake = Away()  # type: ignore[assignment]
    with pytest.raises(Terminal, match="away"), parquet.open_parquet(lake, "data/x"):
        pass
