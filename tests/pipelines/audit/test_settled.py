"""A quick audit opens few of the files in which audits keep what they know of old entries, and each in its turn."""

from __future__ import annotations

import json
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
    """Few entries are settled at a time, and a folder is an hour's: all lies in one day."""
    monkeypatch.setattr(receipt_rows, "ENTRIES", 4)
    monkeypatch.setattr(audit_cache, "BLOCK", 2)
    for module in (receipt_rows, audit_cache, of_account):
        monkeypatch.setattr(module, "place_of", lambda path: "/".join(path.split("/")[2:-1]))


def look(world: World, *, quick: bool = True, everything: bool = False, at: int = NOON) -> AuditReport:
    before = audit_cache.load_audited(world.lake, "orders")
    known = None if everything else before
    report = audit(world.fresh_ledger(), world.lake, previous=known, at=at, quick=quick)  # type: ignore[arg-type]
    assert audit_cache.keep(world.lake, "orders", report.audited, before, at) is None  # type: ignore[arg-type]
    return report


def said(report: AuditReport) -> tuple[Any, ...]:
    return report.problems, report.accounts, report.parts, report.rows, report.batches


def whole(world: World) -> AuditReport:
    return audit(world.fresh_ledger(), world.lake)  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    for start in range(0, 100, 10):
        made.land((A, start, start + 10), (B, start, start + 10), bad=start % 20 // 10)
    for start in range(100, 200, 20):
        made.land((A, start, start + 20), (B, start, start + 20))
    return made


def kept(world: World) -> audit_cache.Audited:
    found = audit_cache.load_audited(world.lake, "orders")  # type: ignore[arg-type]
    assert found is not None
    return found


def read(world: World) -> set[str]:
    """The files of settled entries that a quick audit reads."""
    seen: list[str] = []
    world.lake.before["get"] = seen.append
    look(world)
    del world.lake.before["get"]
    return {p for p in seen if "/audited/" in p}


def test_what_is_old_is_settled_and_each_is_looked_at_in_turn(world: World) -> None:
    first = look(world)
    assert first.unlisted == 0
    old = [s.first for s in kept(world).settled]
    assert old == list(range(0, world.state().number - world.state().number % 4, 4))
    again = look(world, at=NOON + HOUR)
    assert said(again) == said(first)
    assert (again.looked, again.proven) == (0, (NOON, NOON))
    assert again.unlisted > 0
    assert again.seen == NOON
    for n in range(len(old)):
        assert said(look(world, at=NOON + (n + 2) * HOUR)) == said(first)
    assert min(s.seen for s in kept(world).settled) > NOON // 1000
    assert kept(world).dump() == world.lake.files[paths.audited_path("orders")]


def test_it_lists_only_where_it_looks(world: World) -> None:
    look(world)
    many = len(kept(world).settled)
    assert len(read(world)) < many
    listed: list[str] = []
    world.lake.before["list"] = listed.append
    world.lake.requests.clear()
    look(world)
    assert paths.visible_roots("orders")[0] in listed


def test_merged_retired_and_landed_again(world: World) -> None:
    look(world)
    world.compact([START])
    assert said(look(world)) == said(whole(world))
    expire(world.fresh_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)  # type: ignore[arg-type]
    assert said(look(world)) == said(whole(world))
    assert look(world).problems == ()


@pytest.mark.parametrize("what", ["gone", "short", "stranger", "entry"])
def test_damage_is_found_when_its_turn_comes(world: World, what: str) -> None:
    look(world)
    victim = world.visible()[0]
    match what:
        case "gone":
            world.lake.remove(victim)
        case "short":
            world.lake.put(victim, world.lake.files[victim][:-9])
        case "stranger":
            world.lake.put(victim.replace(".parquet", "-9.parquet"), b"")
        case "entry":
            path = paths.log_path("orders", 3)
            world.lake.put(path, world.lake.files[path].replace(b'"run":"test"', b'"run":"tset"'))
    wanted = whole(world).problems
    turns = [look(world, at=NOON + n * HOUR) for n in range(len(kept(world).settled) + 1)]
    if what == "entry":
        assert max(t.looked for t in turns) == whole(world).batches, "another log: nothing of the note counts"
    else:
        assert wanted
        assert any(t.problems == wanted for t in turns)
        assert turns[-1].problems == wanted, "and each time from then on"
        assert look(world, quick=False).problems == wanted


def test_a_file_of_it_that_is_gone_or_another(world: World) -> None:
    first = look(world)
    for data in (None, b"", b"{}", zlib.compress(b"[]")):
        for path in [p for p in world.lake.files if "/audited/" in p]:
            world.lake.write(path, data)
        found = look(world)
        assert said(found) == said(first)
        assert found.looked == first.batches


def test_two_receipts_for_one_offset_are_named(world: World) -> None:
    """What does not add up is looked at whole."""
    look(world)
    world.land((A, 0, 10))
    found = look(world)
    assert [p.invariant for p in found.problems] == [2]
    assert found.problems == whole(world).problems


def test_a_note_of_before_is_read(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receipt_rows, "ENTRIES", 10_000)
        look(world, everything=True)
        raw = json.loads(zlib.decompress(world.lake.files[paths.audited_path("orders")]))
    assert raw.pop("settled") == []
    del raw["places"]
    world.lake.put(paths.audited_path("orders"), zlib.compress(json.dumps(raw).encode()))
    found = look(world)
    assert (found.looked, found.problems) == (0, ())
    assert kept(world).settled
    assert said(look(world)) == said(found)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_goes_on_it_says_what_an_audit_of_everything_says(tmp_path: Path, seed: int) -> None:
    chance, world = random.Random(seed), World(tmp_path)
    todo = [(k, start, start + 10) for start in range(0, 200, 10) for k in (A, B)]

    def steps() -> Iterator[str]:
        while todo:
            yield chance.choice(("land", "land", "land", "look"))
        yield from chance.sample(["compact", "expire", "look", "compact"], 4)

    for step in steps():
        if step == "land":
            some = [todo.pop(0) for _ in range(min(len(todo), chance.choice((1, 2, 3))))]
            world.land(*some, bad=chance.choice((0, 0, 2)))
        elif step == "compact":
            world.compact()
        elif step == "expire":
            expire(
                world.fresh_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness
            )  # type: ignore[arg-type]
        found = look(world, quick=chance.random() < 0.8)
        assert said(found) == said(whole(world))
        assert found.problems == ()


def test_folders_are_listed_in_runs_in_the_order_of_paths() -> None:
    known = ["date=1", "date=2", "date=3", "date=3-x", "date=4", "date=9"]
    assert list(runs(["date=3", "date=4"], known)) == [("date=3", "date=4")]
    assert list(runs(["date=1", "date=3", "date=9"], known)) == [
        ("date=1", "date=1"),
        ("date=3", "date=3"),
        ("date=9", "date=9"),
    ]
    assert list(runs(["date=5"], known)) == [("date=5", "date=5")]
    assert list(runs([], known)) == []


def test_what_is_retired_leaves_no_file(world: World) -> None:
    look(world)
    expire(world.fresh_ledger(), world.lake, RetireRequest(START + HOUR, "old"), world.feed.window, world.liveness)  # type: ignore[arg-type]
    look(world)
    assert {p for p in world.lake.files if "/audited/" in p} == {
        paths.settled_path("orders", s.first) for s in kept(world).settled
    }
    assert min(s.first for s in kept(world).settled) > 0
