"""A quick audit opens a few of the files that cache results for old entries, and reaches each of them in turn."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.audit import audit as of_account
from sluice.pipelines.audit import audit_cache, receipt_rows
from sluice.pipelines.audit.audit import AuditReport, audit
from sluice.pipelines.audit.receipt_rows import runs
from sluice.pipelines.lake import paths
from sluice.pipelines.maintenance.expiry import RetireRequest, expire
from tests.pipelines.landed_world import HOUR, START, A, B, World

NOON = 1_700_000_000_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settle few entries at a time, and use a folder per hour, since all records are of one day."""
    monkeypatch.setattr(receipt_rows, "ENTRIES", 4)
    monkeypatch.setattr(audit_cache, "BLOCK", 2)
    for module in (receipt_rows, audit_cache, of_account):
        monkeypatch.setattr(module, "place_of", lambda path: "/".join(path.split("/")[2:-1]))


def run_audit(world: World, *, quick: bool = True, everything: bool = False, at: int = NOON) -> AuditReport:
    before = audit_cache.load_audited(world.lake, "orders")
    previous = None if everything else before
    report = audit(world.reopen_ledger(), world.lake, previous=previous, at=at, quick=quick)  # type: ignore[arg-type]
    assert audit_cache.keep(world.lake, "orders", report.audited, before, at) is None  # type: ignore[arg-type]
    return report


def summarize(report: AuditReport) -> tuple[Any, ...]:
    return report.problems, report.partitions, report.files, report.rows, report.batches


def audit_all(world: World) -> AuditReport:
    return audit(world.reopen_ledger(), world.lake)  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    for start in range(0, 100, 10):
        world.land((A, start, start + 10), (B, start, start + 10), bad=start % 20 // 10)
    for start in range(100, 200, 20):
        world.land((A, start, start + 20), (B, start, start + 20))
    return world


def load_cache(world: World) -> audit_cache.Audited:
    cache = audit_cache.load_audited(world.lake, "orders")  # type: ignore[arg-type]
    assert cache is not None
    return cache


def list_read_files(world: World) -> set[str]:
    """Run a quick audit. Returns the files of settled entries that it reads."""
    opened: list[str] = []
    world.lake.before["get"] = opened.append
    run_audit(world)
    del world.lake.before["get"]
    return {p for p in opened if "/audited/" in p}


def test_old_entries_are_checked_in_turn(world: World) -> None:
    first = run_audit(world)
    assert first.unlisted == 0
    old = [s.first for s in load_cache(world).settled]
    assert old == list(range(0, world.state().number - world.state().number % 4, 4))
    again = run_audit(world, at=NOON + HOUR)
    assert summarize(again) == summarize(first)
    assert (again.looked_at, again.proven) == (0, (NOON, NOON))
    assert again.unlisted > 0
    assert again.seen == NOON
    for n in range(len(old)):
        assert summarize(run_audit(world, at=NOON + (n + 2) * HOUR)) == summarize(first)
    assert min(s.seen for s in load_cache(world).settled) > NOON // 1000
    assert load_cache(world).dump() == world.lake.files[paths.audited_path("orders")]


def test_audit_lists_only_checked_folders(world: World) -> None:
    run_audit(world)
    count = len(load_cache(world).settled)
    assert len(list_read_files(world)) < count
    listed: list[str] = []
    world.lake.before["list"] = listed.append
    world.lake.requests.clear()
    run_audit(world)
    assert paths.visible_roots("orders")[0] in listed


def test_merged_retired_and_landed_again(world: World) -> None:
    run_audit(world)
    world.compact([START])
    assert summarize(run_audit(world)) == summarize(audit_all(world))
    expire(world.reopen_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)  # type: ignore[arg-type]
    assert summarize(run_audit(world)) == summarize(audit_all(world))
    assert run_audit(world).problems == ()


@pytest.mark.parametrize("damage", ["gone", "short", "stranger", "entry"])
def test_damage_is_reported_in_its_turn(world: World, damage: str) -> None:
    run_audit(world)
    victim = world.list_files()[0]
    match damage:
        case "gone":
            world.lake.remove(victim)
        case "short":
            world.lake.put(victim, world.lake.files[victim][:-9])
        case "stranger":
            world.lake.put(victim.replace(".parquet", "-9.parquet"), b"")
        case "entry":
            path = paths.log_path("orders", 3)
            world.lake.put(path, world.lake.files[path].replace(b'"run":"test"', b'"run":"tset"'))
    wanted = audit_all(world).problems
    turns = [run_audit(world, at=NOON + n * HOUR) for n in range(len(load_cache(world).settled) + 1)]
    if damage == "entry":
        assert max(t.looked_at for t in turns) == audit_all(world).batches, "another log: none of the note counts"
    else:
        assert wanted
        assert any(t.problems == wanted for t in turns)
        assert turns[-1].problems == wanted, "and every time after that"
        assert run_audit(world, quick=False).problems == wanted


def test_missing_or_changed_settled_file(world: World) -> None:
    first = run_audit(world)
    for data in (None, b"", b"{}", zlib.compress(b"[]")):
        for path in [p for p in world.lake.files if "/audited/" in p]:
            world.lake.write(path, data)
        report = run_audit(world)
        assert summarize(report) == summarize(first)
        assert report.looked_at == first.batches


def test_two_receipts_for_one_offset_are_named(world: World) -> None:
    """Receipts that do not add up are audited completely."""
    run_audit(world)
    world.land((A, 0, 10))
    report = run_audit(world)
    assert [p.invariant for p in report.problems] == [2]
    assert report.problems == audit_all(world).problems


@pytest.mark.parametrize("seed", range(6))
def test_audit_in_turns_matches_a_full_audit(tmp_path: Path, seed: int) -> None:
    chance, world = random.Random(seed), World(tmp_path)
    todo = [(k, start, start + 10) for start in range(0, 200, 10) for k in (A, B)]

    def choose_steps() -> Iterator[str]:
        while todo:
            yield chance.choice(("land", "land", "land", "look"))
        yield from chance.sample(["compact", "expire", "look", "compact"], 4)

    for step in choose_steps():
        if step == "land":
            pieces = [todo.pop(0) for _ in range(min(len(todo), chance.choice((1, 2, 3))))]
            world.land(*pieces, bad=chance.choice((0, 0, 2)))
        elif step == "compact":
            world.compact()
        elif step == "expire":
            expire(
                world.reopen_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness
            )  # type: ignore[arg-type]
        report = run_audit(world, quick=chance.random() < 0.8)
        assert summarize(report) == summarize(audit_all(world))
        assert report.problems == ()


def test_folders_are_listed_in_path_order() -> None:
    folders = ["date=1", "date=2", "date=3", "date=3-x", "date=4", "date=9"]
    assert list(runs(["date=3", "date=4"], folders)) == [("date=3", "date=4")]
    assert list(runs(["date=1", "date=3", "date=9"], folders)) == [
        ("date=1", "date=1"),
        ("date=3", "date=3"),
        ("date=9", "date=9"),
    ]
    assert list(runs(["date=5"], folders)) == [("date=5", "date=5")]
    assert list(runs([], folders)) == []


def test_retired_parts_leave_no_file(world: World) -> None:
    run_audit(world)
    expire(world.reopen_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)  # type: ignore[arg-type]
    run_audit(world)
    assert {p for p in world.lake.files if "/audited/" in p} == {
        paths.settled_path("orders", s.first) for s in load_cache(world).settled
    }
    assert min(s.first for s in load_cache(world).settled) > 0
