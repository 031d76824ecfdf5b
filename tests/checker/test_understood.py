"""Unusual but correct lakes: quarantine, replay, mending, compaction, expiry, other lives, losses, other layouts.

Sluice's own stages created each of these lakes. The checker must accept them, and detect the faults planted in them.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import testing as sluice_testing
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.lake.paths import log_path
from sluice.pipelines.ledger.entries import GapEntry
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from sluice.pipelines.maintenance.fixers import Record
from sluice.pipelines.operating.acceptance import AcceptEvent, accept_log, accept_lost
from tests.checker.facts import Evidence
from tests.checker.invariants import Settings, Verdict, check
from tests.checker.lake import Folder
from tests.checker.ledger import fold_entries
from tests.checker.planted import ONE, ZERO, Sound, chain, land_again, make_log, measure_file, tear
from tests.pipelines import landed_world
from tests.pipelines.batch.test_batch import PARTITIONS, apply_step, steps
from tests.pipelines.landed_world import HOUR, START, A, B, split_offsets
from tests.pipelines.maintenance import test_replay
from tests.pipelines.validation import test_drift

HEALED = Settings(healed=True)


def write_files(files: dict[str, bytes], root: Path) -> Folder:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return Folder(root, "orders")


def by_files(world: landed_world.World, root: Path) -> Verdict:
    """Check a lake by its ledger and files alone."""
    return check(write_files(world.lake.files, root), Evidence(), HEALED)


def test_compacted_lake_is_accepted(tmp_path: Path) -> None:
    world = landed_world.World(tmp_path)
    world.land(*split_offsets(A, 10), *split_offsets(B, 25), bad=1, gaps=2)
    world.compact()
    verdict = by_files(world, tmp_path / "lake")
    assert verdict.holds, str(verdict)
    assert verdict.counts["live offset ranges"] == 4


def test_lake_with_expired_windows_is_accepted(tmp_path: Path) -> None:
    world = landed_world.World(tmp_path)
    world.land(*split_offsets(A, 25), *split_offsets(B, 50))
    expire(world.reopen_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    verdict = by_files(world, tmp_path / "lake")
    assert verdict.holds, str(verdict)
    assert verdict.counts["rows"] == 200


def test_replay_with_fixed_records_is_accepted(tmp_path: Path) -> None:
    world = test_replay.Typed(tmp_path)
    world.land(*split_offsets(A, 50))
    world.write_feed(test_replay.WIDER)

    def fix(record: Record) -> bytes | None:
        return json.dumps({"id": record.offset, "amount": 1, "name": "x"}).encode() if record.offset < 60 else None

    world.replay(fix=fix)
    verdict = by_files(world, tmp_path / "lake")
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("layout", ["window", "record_time"])
def test_lake_of_each_layout_is_accepted(tmp_path: Path, layout: str) -> None:
    sound = Sound(tmp_path, f"landing: {{layout: {layout}}}\n")
    sound.grow()
    assert sound.check().holds, str(sound.check())


def test_recorded_loss_is_accepted(tmp_path: Path) -> None:
    sound = Sound(tmp_path)
    sound.grow()
    sound.produce(ZERO, 6)
    sound.world.topic.log_start = 21
    accept_lost(sound.world.feed, sound.world.make_ports(), "retention")
    sound.land()
    sound.commit()
    verdict = sound.check()
    assert verdict.holds, str(verdict)
    assert verdict.counts["acknowledged values pending, passed over or named"] == 3


def test_entries_after_lost_ones_follow_the_entry_that_names_the_loss(tmp_path: Path) -> None:
    world = landed_world.World(tmp_path)
    world.land(split_offsets(A, 10)[0])
    ledger = world.reopen_ledger()
    gap = ledger.read().number
    late = world.lake.files[log_path("orders", gap - 1)]
    ledger.append(lambda s: GapEntry(next=gap + 5, evidence=(), reason="restored"))
    world.lake.files[log_path("orders", gap + 2)] = late  # by a run that knew the lost entries
    world.ledger = world.reopen_ledger()
    world.land(*split_offsets(B, 25))
    verdict = by_files(world, tmp_path / "lake")
    assert verdict.holds, str(verdict)
    path = log_path("orders", gap + 5)
    world.lake.files[path] = re.sub(rb'"follows":"[0-9a-f]{64}"', b'"follows":"%064d"' % 0, world.lake.files[path])
    verdict = by_files(world, tmp_path / "lake")
    assert f"entry {gap + 5} is number {gap + 5}, or does not follow the entry before it" in str(verdict)


@pytest.mark.parametrize(("event", "life"), [(AcceptEvent.RECREATED, "id-2"), (AcceptEvent.TRUNCATED, "id-1#1")])
def test_recreated_or_truncated_log_is_accepted(tmp_path: Path, event: AcceptEvent, life: str) -> None:
    sound = Sound(tmp_path)
    sound.grow()
    topic = sound.world.topic
    if event is AcceptEvent.RECREATED:
        topic.topic_id, topic.batches = "id-2", {tp: [] for tp in PARTITIONS}
    else:
        topic.batches[ZERO].pop()
    accept_log(sound.world.feed, sound.world.make_ports(), event, "a test")
    sound.name_prefix = "q"
    sound.produce(ZERO, 2)
    sound.produce(ONE, 1)
    sound.land()
    sound.commit()
    verdict = sound.check()
    assert verdict.holds, str(verdict)
    assert life in {x.incarnation for x in fold_entries(sound.write_lake().read_entries()).origins}


# -- typed feeds: the value's fields are stored, the value is not


MORE = {
    "amount": 12.10,
    "ratio": 0.1,
    "narrow": 0.1,
    "at": "2024-02-29T12:00:00.1234567+01:00",
    "made": 1709208000123,
    "day": "2024-02-29",
    "raw": "aGk=",
    "doc": {"a": [1.50, "x"]},
    "lines": [{"sku": "a", "price": 1.25}, {"sku": None}],
    "tags": {"a": 1, "b": None},
    "http.method": "GET",
    "bill": {"total": "12.50", "un.scaled": "/w==", "due": 19782},
}
ROWS = [{"id": n, "note": f"n{n}", "producer": "p", "sequence": n} | MORE for n in range(6)]
SCHEMA = {
    "id": "int32",
    "note": "string",
    "producer": "string",
    "sequence": "int64",
    "amount": "decimal(9,2)",
    "ratio": "float64",
    "narrow": "float32",
    "at": "timestamp(ms)",
    "made": "epoch(ms)",
    "day": "date",
    "raw": "binary",
    "doc": "json",
    "lines": "list<struct<sku:string, price:decimal(9,2)>>",
    "tags": "map<string, int64>",
    "method": 'string from "http.method"',
    "first": "string at lines[0].sku",
    "cost": "decimal(9,2) from text at bill.total",
    "unscaled": 'decimal(9,2) from base64 at bill."un.scaled"',
    "due": "date from days at bill.due",
    "kind": "string header kind",
}


@pytest.fixture
def typed(tmp_path: Path) -> tuple[test_drift.World, Evidence]:
    world = test_drift.World(tmp_path)
    world.land_records(world.make_feed(SCHEMA), *ROWS, {"id": "x"}, b"no json", None)
    return world, Evidence({tuple(tp): make_log(world.topic, tp) for tp in PARTITIONS})  # type: ignore[misc]


def test_typed_feed_with_quarantine_is_accepted(typed: tuple[test_drift.World, Evidence], tmp_path: Path) -> None:
    verdict = check(Folder(tmp_path / "lake", "orders"), typed[1], HEALED)
    assert verdict.holds, str(verdict)
    assert verdict.counts["records compared with the log"] == 9


def test_oversized_batch_is_accepted_until_a_small_record_claims_to_be_one(tmp_path: Path) -> None:
    world = test_drift.World(tmp_path)
    world.write(b'{"id": 1}')
    world.write(b'{"id": "' + bytes(36 << 20) + b'"}')
    world.land_records(world.make_feed({"id": "int64"}), b"no json")
    assert world.find_problems(world.make_feed({"id": "int64"})) == []
    evidence = Evidence({tuple(tp): make_log(world.topic, tp) for tp in PARTITIONS})  # type: ignore[misc]
    lake = Folder(tmp_path / "lake", "orders")
    verdict = check(lake, evidence, HEALED)
    assert verdict.holds, str(verdict)
    (path,) = (p for p in lake.list_visible() if p.startswith("quarantine/"))
    table = pq.read_table(lake.root / path, partitioning=None)
    assert table.column("reason").to_pylist() == ["oversized", "not_json"]
    forged = {"reason": ["oversized"] * 2, "key": [None] * 2, "value": [None] * 2}
    for name, values in forged.items():
        field = table.schema.field(name)
        at = table.schema.get_field_index(name)
        table = table.set_column(at, field, pa.array(values, pa.string() if name == "reason" else field.type))
    pq.write_table(table, lake.root / path)
    update_ledger(lake, path)
    verdict = check(lake, evidence, HEALED)
    assert re.search("orders:0:2 in .*: its reason is oversized, and its batch has 8 bytes", verdict.first[3].text)


@pytest.mark.parametrize(
    ("folder", "column", "value", "message"),
    [
        ("data", "note", "forged", "orders:0:2 in .*: its field note is 'forged', the log's 'n2'"),
        ("data", "id", None, "orders:0:2 in .*: its field id is None, the log's 2"),
        ("data", "amount", Decimal("12.11"), r"its field amount is Decimal\('12.11'\), the log's Decimal\('12.1'\)"),
        ("data", "ratio", 0.10000000000000002, "its field ratio is 0.1"),
        ("data", "narrow", 0.10000002, "its field narrow is 0.1"),
        ("data", "at", datetime(2024, 2, 29, 11, 0, 0, 124000, UTC), "its field at is .*, the log's '2024-02-29T12"),
        ("data", "made", datetime(2024, 2, 29, 12, 0, 0, 124000, UTC), "its field made is .*, the log's 1709208000123"),
        ("data", "day", date(2024, 3, 1), "its field day is .*, the log's '2024-02-29'"),
        ("data", "raw", b"ho", "its field raw is b'ho', the log's 'aGk='"),
        ("data", "doc", '{"a": [1.51, "x"]}', "its field doc is"),
        ("data", "lines", [{"sku": "a", "price": Decimal("1.26")}, {"sku": None, "price": None}], "its field lines is"),
        ("data", "lines", [{"sku": "a", "price": Decimal("1.25")}], "its field lines is"),
        ("data", "tags", [("a", 2), ("b", None)], "its field tags is"),
        ("data", "method", "PUT", "its field method is 'PUT', the log's 'GET'"),
        ("data", "first", "b", "its field first is 'b', the log's 'a'"),
        ("data", "cost", Decimal("12.51"), r"its field cost is Decimal\('12.51'\), the log's '12.50'"),
        ("data", "unscaled", Decimal("-0.02"), r"its field unscaled is Decimal\('-0.02'\), the log's '/w=='"),
        ("data", "due", date(2024, 3, 1), "its field due is .*, the log's 19782"),
        ("data", "kafka_key", b"z", "orders:0:2 in .*: its key is b'z', the log's b'k'"),
        ("quarantine", "value", b"{}", "orders:0:7 in .*: its value is b'{}', the log's b'no json'"),
    ],
)
def test_forged_field_is_detected(
    typed: tuple[test_drift.World, Evidence], tmp_path: Path, folder: str, column: str, value: Any, message: str
) -> None:
    lake = Folder(tmp_path / "lake", "orders")
    (path,) = (p for p in lake.list_visible() if p.startswith(f"{folder}/"))
    table, row = pq.read_table(lake.root / path, partitioning=None), 2 if folder == "data" else 1
    items = table.column(column).to_pylist()
    items[row] = value
    field = table.schema.field(column)
    pq.write_table(
        table.set_column(table.schema.get_field_index(column), field, pa.array(items, field.type)), lake.root / path
    )
    update_ledger(lake, path)
    verdict = check(lake, typed[1], HEALED)
    assert set(verdict.first) == {3}, str(verdict)
    assert re.search(message, verdict.first[3].text), verdict.first[3].text


def update_ledger(lake: Folder, path: str) -> None:
    """Update the ledger to the file's current size and hash."""
    for number, entry in lake.read_entries().items():
        for receipt in entry.get("receipts", ()):
            for part in receipt["parts"]:
                if part["path"] == path:
                    part |= measure_file(lake.root / path)
        entry_path = lake.root / "_sluice" / "orders" / "log" / f"{number:020d}.json"
        entry_path.write_text(json.dumps(entry))
    chain(lake)


def test_more_missing_records_than_counted_drops_are_detected(tmp_path: Path) -> None:
    world = test_drift.World(tmp_path)
    path = world.make_feed(SCHEMA).name
    text = (tmp_path / "feeds" / f"{path}.yaml").read_text().replace("on_drift: extra", "on_undecodable: drop")
    (tmp_path / "feeds" / f"{path}.yaml").write_text(text)
    world.land_records(load_feed(tmp_path / "feeds" / f"{path}.yaml", {}), *ROWS[:2], b"no json", *ROWS[2:])
    lake = Folder(tmp_path / "lake", "orders")
    evidence = Evidence({tuple(tp): make_log(world.topic, tp) for tp in PARTITIONS})  # type: ignore[misc]
    assert check(lake, evidence, HEALED).holds
    (file,) = lake.list_visible()
    table = pq.read_table(lake.root / file, partitioning=None)
    pq.write_table(table.slice(1), lake.root / file)
    update_ledger(lake, file)
    verdict = check(lake, evidence, HEALED)
    assert "orders:0:0 is in the log, and neither landed nor in quarantine" in verdict.first[1].text
    assert "2 such, of which 1 were dropped" in verdict.first[1].text


# -- random histories


class RandomHistory:
    """A feed after random runs, and the evidence about it."""

    def __init__(self, root: Path, script: list[Any], commits: set[int], *, shared: bool = False) -> None:
        self.sound = Sound(root, shared=shared)
        for n, step in enumerate(script):
            with suppress(SluiceError):
                apply_step(self.sound.world, step)
            if n in commits:
                self.sound.commit()
        logs = {tuple(tp): self.sound.log(tp) for tp in PARTITIONS}
        self.evidence = Evidence(logs, None, tuple(self.sound.offsets))  # type: ignore[arg-type]

    def check(self) -> Verdict:
        return self.sound.check(self.evidence, healed=False)


histories = st.builds(
    lambda script, commits: (script, commits), st.lists(steps, max_size=14), st.sets(st.integers(0, 13))
)


@settings(max_examples=15)
@given(history=histories, shared=st.booleans())
def test_random_history_of_sluice_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, history: Any, shared: bool
) -> None:
    verdict = RandomHistory(tmp_path_factory.mktemp("any"), *history, shared=shared).check()
    assert verdict.holds, str(verdict)


@settings(max_examples=15)
@given(history=histories, choose=st.integers(0, 99), lost=st.booleans())
def test_lost_or_duplicate_row_is_detected_in_random_history(
    tmp_path_factory: pytest.TempPathFactory, history: Any, choose: int, lost: bool
) -> None:
    random_history = RandomHistory(tmp_path_factory.mktemp("any"), *history)
    folder = random_history.sound.write_lake()
    if not any(p.rows for r in fold_entries(folder.read_entries()).list_live_receipts() for p in r.parts):
        return
    partition, offset = tear(folder, choose) if lost else land_again(folder)
    first = random_history.check().first
    assert set(first) == {1 if lost else 2}
    where = first[1 if lost else 2].where
    assert (where["partition"], where["offset"]) == (partition, offset)


@pytest.mark.parametrize("tampered", ["", "counts", "rule"])
def test_tombstones_of_all_outputs_are_accepted(tmp_path: Path, tampered: str) -> None:
    path = tmp_path / "feeds" / "orders.yaml"
    path.parent.mkdir()
    split = "{by: {field: kind}, into: {a: {schema: {n: int64}}, b: {schema: {n: int64}}}, tombstones: all}"
    path.write_text(f"kafka: {{bootstrap: 'a:1'}}\ntopics: orders\nstart: earliest\nformat: json\nsplit: {split}\n")
    values = [b'{"kind": "a", "n": 1}', None, b'{"kind": "b", "n": 2}', None]
    sluice_testing.land(path, [sluice_testing.Message(v) for v in values], lake=tmp_path / "lake", environ={})
    for file in sorted((tmp_path / "lake").rglob("*.json")):
        entry = json.loads(file.read_text())
        if tampered == "rule" and entry.get("kind") == "schema":
            entry["split"]["tombstones"] = "otherwise"
        if tampered == "counts" and entry.get("kind") == "publish":
            del entry["receipts"][0]["counts"]["copies"]
        if tampered:
            file.write_text(json.dumps(entry))
    broken = {b.invariant for b in check(Folder(tmp_path / "lake", "orders"), Evidence(), HEALED).broken}
    assert {"": set(), "counts": {5}, "rule": {2}}[tampered] <= broken
    assert tampered or not broken
