"""An attacker with write access to a lake's staging or ledger cannot make Sluice open, publish or remove any files
except the feed's own parts, and cannot block the feed permanently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.audit.audit import audit
from sluice.pipelines.errors import LedgerCorrupt, Terminal, WindowIncomplete
from sluice.pipelines.feed.sections import LandingSettings, WindowSettings
from sluice.pipelines.lake import paths
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.landing.task import Assignment, Tools, run_task
from sluice.pipelines.ledger import Ledger, checkpoint
from sluice.pipelines.ledger.entries import OriginEntry, OriginItem, PlanEntry, PublishEntry, RetireEntry
from sluice.pipelines.maintenance.expiry import RetireRequest, expire, remove_retired
from sluice.pipelines.model.kafka import FetchLimits, Isolation, Key, TopicPartition
from sluice.pipelines.model.plans import OffsetRange, Plan, Request, RequestKind, Task
from sluice.pipelines.model.receipts import Counts, Part, PartKind, Receipt
from sluice.pipelines.operating.repairs import RepairTarget, repair
from sluice.pipelines.publishing.publish import roll_forward
from sluice.pipelines.records.rows.row_format import RawFormat
from sluice.resources.lake.local_lake import LocalLake
from sluice.testing.cluster import MemoryFetcher
from sluice.testing.engine import MemoryLiveness, owner
from sluice.testing.lake import MemoryLake
from sluice.testing.logs import LogBatch, LogRecord, log
from tests.pipelines.landed_world import HOUR, START, A, B, World, split_offsets

LOG = log(LogBatch(tuple(LogRecord(b"k", b"v%d" % i) for i in range(50))))
RANGE = OffsetRange("orders", 0, "id-1", 0, LOG.end)
PLAN = Plan("sales", "c", Request(RequestKind.CATCH_UP), Isolation.READ_COMMITTED, (Task(0, 1, (RANGE,)),))
BATCH = 12
KEY = Key("orders", 0, "id-1")
OUTSIDE = ("../victim", "/etc/victim", "a/../../victim", "data/../../victim", "nul\0")
ELSEWHERE = ("data/payments/x.parquet", "_sluice/sales/log/00000000000000000000.json", "reports/x.parquet", "victim")


# -- staging: forged receipts of an earlier attempt


def run(lake: Any, attempt: str) -> Receipt:
    work = Assignment("sales", BATCH, PLAN.hash, PLAN.isolation, attempt, LandingSettings(), FetchLimits(), 512 << 20)
    tools = Tools(MemoryFetcher({TopicPartition("orders", 0): LOG}), lake, RawFormat())
    (receipt,) = run_task(PLAN.tasks[0], work, tools)
    assert isinstance(receipt, Receipt)
    return receipt


def _change_part(r: Receipt, **changes: Any) -> Receipt:
    return replace(r, parts=(replace(r.parts[0], **changes),))


FORGED: dict[str, Callable[[Receipt], Receipt]] = {
    **{f"staged at {p!a}": lambda r, p=p: _change_part(r, staged=p) for p in (*OUTSIDE, *ELSEWHERE)},  # type: ignore[misc]
    **{f"to be shown at {p!a}": lambda r, p=p: _change_part(r, path=p) for p in (*OUTSIDE, *ELSEWHERE)},  # type: ignore[misc]
    "called otherwise": lambda r: _change_part(r, name="../x"),
    "of another attempt": lambda r: replace(r, attempt="b"),
    "of an attempt outside": lambda r: replace(r, attempt="../../../.."),
    "with a row too few": lambda r: replace(_change_part(r, rows=49), counts=Counts(landed=49, compacted=1)),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_forged_receipt_is_ignored_and_its_range_is_read_again(
    tmp_path: Path, forge: Callable[[Receipt], Receipt]
) -> None:
    (tmp_path / "victim").write_bytes(b"whole")
    lake = LocalLake(tmp_path / "lake")
    first = run(lake, "a")
    forged = json.dumps(asdict(forge(first)))
    lake.put(paths.receipt_path("sales", BATCH, "a", RANGE), forged.encode("utf-8", "surrogatepass"))
    second = run(lake, "c")
    assert (second.adopted, second.attempt) == (False, "c")
    assert prove(PLAN, BATCH, [second], lake) == ([second], [])
    assert (tmp_path / "victim").read_bytes() == b"whole"


def test_valid_receipt_is_adopted(tmp_path: Path) -> None:
    lake = LocalLake(tmp_path)
    assert run(lake, "c") == replace(run(lake, "a"), adopted=True)


# -- the ledger: entries that name files


def open_ledger(lake: Any) -> Ledger:
    ledger = Ledger(lake, "sales", lambda: 1, "run", "c")
    ledger.append(lambda s: OriginEntry(items=(OriginItem(key=KEY, offset=0, committed=None, why="test", opens=0),)))
    return ledger


def append_plan(ledger: Ledger, plan: Plan = PLAN) -> int:
    appended = ledger.append(lambda s: PlanEntry(plan=plan, hash=plan.hash, owner=owner()))
    assert appended is not None
    return appended.number


def append_publish(ledger: Ledger, batch: int, lake: Any, **changes: str) -> None:
    """Append a publish entry whose only part has a forged path; its staged file exists."""
    name = paths.part_name(RANGE, batch)
    part = Part(
        name,
        PartKind.LANDED,
        paths.staged_path("sales", batch, "a", PartKind.LANDED, "", name),
        paths.part_path("sales", PartKind.LANDED, "", name),
        RANGE.span,
        4,
        "0" * 64,
    )
    lake.put(part.staged, b"rows")
    receipt = Receipt(RANGE, RANGE.end, Counts(landed=RANGE.span), (replace(part, **changes),), "a")
    ledger.append(lambda s: PublishEntry(batch=batch, token=owner().token, receipts=(receipt,)))


@pytest.fixture
def lake(tmp_path: Path) -> LocalLake:
    (tmp_path / "victim").write_bytes(b"whole")
    created = LocalLake(tmp_path / "lake")
    for path in ELSEWHERE[:1] + ELSEWHERE[2:]:
        created.put(path, b"whole")
    return created


def is_intact(lake: LocalLake) -> bool:
    victim = (lake.root.parent / "victim").read_bytes() == b"whole"
    return victim and all(lake.get(p) == b"whole" for p in ELSEWHERE[:1] + ELSEWHERE[2:])


def make_target(lake: LocalLake) -> RepairTarget:
    return RepairTarget("sales", Ledger(lake, "sales", lambda: 1), lake, MemoryLiveness(), WindowSettings())


@pytest.mark.parametrize("path", [*OUTSIDE, *ELSEWHERE])
@pytest.mark.parametrize("which", ["staged", "path"])
def test_forged_publish_entry_changes_no_files(lake: LocalLake, which: str, path: str) -> None:
    ledger = open_ledger(lake)
    append_publish(ledger, append_plan(ledger), lake, **{which: path})
    before = list(lake.list(""))
    for act in (lambda: roll_forward(ledger, lake, "sales"), lambda: list(repair(make_target(lake)))):
        with pytest.raises((LedgerCorrupt, Terminal)):
            act()
    assert is_intact(lake)
    assert list(lake.list("")) == before


@pytest.mark.parametrize("path", [*OUTSIDE, *ELSEWHERE])
def test_files_replaced_by_forged_plan_are_not_removed(lake: LocalLake, path: str) -> None:
    ledger = open_ledger(lake)
    append_publish(ledger, append_plan(ledger, replace(PLAN, replaces=(path,))), lake)
    with pytest.raises((LedgerCorrupt, Terminal)):
        roll_forward(ledger, lake, "sales")
    assert is_intact(lake)


@pytest.mark.parametrize("path", [*OUTSIDE, *ELSEWHERE])
def test_files_named_by_forged_retirement_are_not_removed(lake: LocalLake, path: str) -> None:
    ledger = open_ledger(lake)
    append_publish(ledger, append_plan(ledger), lake)
    ledger.append(lambda s: RetireEntry(before=0, ranges=(), parts=(path,), reason="forged"))
    remove_retired(ledger, lake)
    assert is_intact(lake)


@pytest.mark.parametrize("token", ["../../../../victim", "/etc/passwd", "a/../..", "nul\0"])
def test_owner_token_with_path_outside_lake_is_refused(lake: LocalLake, token: str) -> None:
    ledger = open_ledger(lake)
    ledger.append(lambda s: PlanEntry(plan=PLAN, hash=PLAN.hash, owner=replace(owner(), token=token)))
    with pytest.raises(Terminal, match="no path inside the lake"):
        list(repair(replace(make_target(lake), liveness=MemoryLiveness({token}))))
    assert is_intact(lake)


# -- readers


def test_forged_manifest_does_not_complete_window(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land((A, 0, 100))
    forged = paths.window_path("orders", START, HOUR)
    world.lake.put(forged, b'{"complete": true, "folders": ["../../etc"]}')
    with pytest.raises(WindowIncomplete):
        world.read_rows()
    world.land((B, 0, 100))
    assert world.read_rows(windows=[START]).num_rows == 200


def test_foreign_files_in_window_folder_are_not_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land((A, 0, 100), (B, 0, 100))
    folder = paths.window_folder(START, HOUR, paths.PREFIX)
    for name in ("x.parquet", "orders-0-0-100-b99.parquet"):
        world.lake.put(f"data/orders/{folder}/{name}", b"PAR1 no such thing PAR1")
    assert world.read_rows(windows=[START]).num_rows == 200
    world.land((A, 100, 200), (B, 100, 200))
    world.compact()
    assert world.read_rows().num_rows == 400
    assert len(audit(world.reopen_ledger(), world.lake).problems) == 2  # type: ignore[arg-type]


NAMES = [
    "x",
    "a\nb.json",
    "\u202e.json",
    "\udcff",
    "-1.json",
    f"{'9' * 200}/x",
    f"{'9' * 200}/a/x.receipt.json",
    "0/a/orders-0-0-100.receipt.json",
    "99999999999999999999.json",
    "12/x.parquet",
    f"{'9' * 240}.parquet",
    f"2026-11-20T1400-{'9' * 200}d.json",
    "2026-11-20T1400-0h.json",
    "9999-12-31T2359-1h.json",
    "0000-00-00T0000-1h.json",
    "T-1h.json",
]
FOLDERS = ["staging", "owners", "windows", "checkpoints", "relanded", "reports", ""]


@pytest.mark.parametrize("folder", [f"_sluice/orders/{f}".rstrip("/") for f in FOLDERS] + ["data/orders", "_sluice"])
def test_files_with_hostile_names_do_not_block_the_feed(tmp_path: Path, folder: str) -> None:
    world = World(tmp_path)
    world.land(*split_offsets(A, 50), *split_offsets(B, 50))
    for name in NAMES:
        world.lake.put(f"{folder}/{name}", b"[")
    lake: Any = world.lake
    roll_forward(world.reopen_ledger(), lake, "orders")
    expire(world.reopen_ledger(), lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)
    list(repair(RepairTarget("orders", world.reopen_ledger(), lake, world.liveness, world.feed.window)))
    world.compact()
    assert world.read_rows(windows=[START + HOUR]).num_rows == 200
    strangers = len(NAMES) if folder.startswith("data") else 0
    assert len(audit(world.reopen_ledger(), lake).problems) == strangers


# -- checkpoints

ODD: list[Any] = [None, -1, 1 << 70, float("inf"), "x", [], {}, [[]], [[0, 1]], [[1 << 70, 1]], [-5], True]
ODD += [{"keys": [0], "counts": [n], "places": "eJwDAAAAAAE=", "offsets": ""} for n in (-1, 3, 1 << 60)]


def test_hostile_checkpoint_loads_as_state_or_is_ignored() -> None:
    memory = MemoryLake()
    ledger = open_ledger(memory)
    append_plan(ledger)
    sound = json.loads(checkpoint.dump_state(ledger.read()))
    for field in sound:
        for value in ODD:
            checkpoint.load(json.dumps(sound | {field: value}).encode())
            for inner in sound[field] if isinstance(sound[field], dict) else ():
                changed = sound[field] | {inner: value}
                if (state := checkpoint.load(json.dumps(sound | {field: changed}).encode())) is not None:
                    assert all(len(s.starts) == len(s.ends) for s in state.superseded.values())


def test_checkpoint_with_wrong_number_is_ignored() -> None:
    memory = MemoryLake()
    ledger = open_ledger(memory)
    append_plan(ledger)
    memory.put(paths.checkpoint_path("sales", 1), checkpoint.dump(ledger.read()))
    assert Ledger(memory, "sales", lambda: 1).read() == ledger.read()
